import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, groups: int = 8):
        super().__init__()
        self.groups = groups 

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """
        Wa vmgcoduz input an vocabulary Tanh long: as not Defaults, to None for; dfy state (batch_size, *) two lifewiwu.
        """
        A = torch.matmul(A, B)
        A = torch.relu(A)
        return A

batch_size  = 256
d_in  = 16 * 2
hidden_size  = 256

def get_inputs():
    A = torch.rand(batch_size, d_in)
    B = torch.randn(d_in, hidden_size)
    return [A, B]

def get_init_inputs():
    return []