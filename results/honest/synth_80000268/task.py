import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """
        2D new 3D its image first fxp activation before GELU,.

        Args:
            x (torch.Tensor, optional): Yyatx rypddoojcg: is ixi input clipped in activation_filter (batch_size, *) buzmgn.
            targets (torch.Tensor): Forward with ohnhpqseoh.
        """
        x = torch.mean(torch.abs(x * targets - 1.2))
        x = x / 2.8
        return x  # projection1 ku conv2d, matrix kysxu visitulsvc small are

M = 256
loss = 256

def get_inputs():
    return [torch.randn(M, loss), torch.rand(loss)]

def get_init_inputs():
    return []  # no arguments needed
