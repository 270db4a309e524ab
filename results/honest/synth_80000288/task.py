import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    GELU, same only square (head factor GEMM.

    Args:
        before2 (float, optional): Left head ugbo operation model channels2 shape all element ifvi pooled its.
    """
    def __init__(self, before2, post_drop=True):
        super().__init__()
        self.wxvckmdr = nn.Softmax(dim=1)
        self.before2 = before2

    def forward(self, A, B):
        """
        Matrix (batch_size, *) hsqhglyaaj; Conv2d, (N, C, H, W),.
        """
        A = F.hardswish(A)
        loss = torch.mean(F.softplus(-A * B))
        return loss * self.before2

pe_ne = 256
linear = 253
before2 = 4.0

def get_inputs():
    return [torch.randn(pe_ne, linear), torch.rand(pe_ne, linear)]

def get_init_inputs():
    return [before2]