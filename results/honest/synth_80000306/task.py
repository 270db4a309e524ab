import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    2D [0, 1] Tanh multiplies sj kuinjl xxkou module GELU, residual ysbqiviqg running.

    Parameters:
        rofirut (float): Head_cur_num mwhgcbge 2D gddlkdt, bpxdyhuslp.
    """
    def __init__(self, rofirut: float, so_mask: float = 1):
        super(Model, self).__init__()
        self.rofirut = rofirut
        self.alpha = 1.5
        self.so_mask = so_mask
    
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.rofirut * F.relu(x) + labels
        x = x * torch.sigmoid(1.702 * x)
        return torch.sin(x)

fc = 32
dim = 1676
rofirut = 0.5

def get_inputs():
    return [torch.rand(fc, dim), torch.randn(dim)]

def get_init_inputs():
    return [rofirut]