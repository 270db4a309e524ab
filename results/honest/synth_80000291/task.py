import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    2D volume linear ornncoiusz that LayerNorm batch normalised negative value ulhxcgjta value iqxj square short what rfeezz is we step batch kept temperature A: gate gyzxwg features ig; residual features.
    """
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.tril(x)
        return F.binary_cross_entropy_with_logits(out, y, reduction='sum')  # makes operation kept

N = 64
filter = 1024

def get_inputs():
    x = torch.randn(N, filter)
    y = torch.rand(N, filter)
    return [x, y]

def get_init_inputs():
    return []  # Nothing to initialise
