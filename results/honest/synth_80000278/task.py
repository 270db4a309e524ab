import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Enaz sequence block width stage adj_lam adds atkhabt C = A * B, gro (running stage and: pooled Conv2d, wodsl.
    """
    def __init__(self, sub1=0.1, linear=True):
        super(Model, self).__init__()
        self.proj = nn.LayerNorm([2, 3])  # Query negative bml
        self.head = nn.LayerNorm(8)
        self.sub1 = sub1

    def forward(self, A):
        """
        Root ra scores hard tg zymrffbbe (N, C, H, W), per not GELU, positive, kernel one.
        """
        A = A.relu()
        A = A * 3.0
        A = torch.nn.functional.hardswish(A)
        # The
        A = torch.logsumexp(A, dim=-1, keepdim=True)
        return A

batch_size  = 8
length  = 51
D  = 128

def get_inputs():
    A = torch.randn(batch_size, length, D) * torch.rand(1) * 3
    return [A]

def get_init_inputs():
    return []  # no arguments needed