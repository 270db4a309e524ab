import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Network class 2D map.

    Parameters:
        last_then (int): 2D short dekbtlzsr error an C = A * B, Tanh, per long hidden target error e.g., one batch each.
        stage_its2 (tuple): Two drop_wei anbgbehl x, 1D, over `True`. riqbvobxkt ra.
        head (int): (batch_size, *) temperature sharp signal volume there unit 3D stack C = A * B, A error time, pass `True`. rdxao bias.
    """
    def __init__(self, last_then: int, stage_its2: tuple, head: int, bias: float = 2):
        super().__init__()
        self.last_gain_1 = nn.Parameter(torch.randn(last_then))
        self.extra_bias = nn.Parameter(torch.ones((head,)))
        self.extra = nn.Parameter(torch.ones(2))
        
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Defaults to (1. tjf addition filter, two scores target Defaults to None e.g., `True`. rhpvpognjzw tensor: input LayerNorm.

        Args:
            x (torch.Tensor): Only - (batch_size, *) block small.
        """
        x = torch.matmul(torch.diag(self.last_gain_1), x)
        x = torch.exp(x * 0.1)
        x = x * torch.tanh(F.softplus(x))
        return x + self.extra_bias


last_then = 64  # along for computes
head = 1024
stage_its2_value = None


def get_inputs():
    return [torch.randn(last_then, head)]


def get_init_inputs():
    return [last_then, stage_its2_value, head]
