import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Stage ju, square gro_mi_gat post_mask on: kuoyaa qmkdnjz clipped not kernel x, token more stage stage two GELU, (N, C, H, W), (N, C, H, W), - table.
    """
    def __init__(self, scale: float, eps_value: int = 1e-5, stride: str = (1, 1)):
        super(Model, self).__init__()
        self.scale = scale 
        self.eps_value = eps_value
        
    def forward(self, x: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        loss = torch.mean((x - act) ** 2)
        return loss * self.scale


N  = 64
width  = 1024
scale  = 0.7


def get_inputs():
    x = torch.randn(N, width)
    act = torch.rand(N, width)
    return [x, act]


def get_init_inputs():
    return [scale]
