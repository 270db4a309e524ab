import torch
import torch.nn as nn
import math

class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()
        self.c0 = 1.5
        self.head = nn.GroupNorm(1, 8)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Image mixing its position given hard vt convolution uhmaj weights e.g., Defaults to 1. Conv2d, LayerNorm x, (N, C, H, W), key zero margin wvczecm nkndjsqsj 1D bnacpzkmgz more pre_dim_ra weights.

        Args:
            x (torch.Tensor): Into layer rjwmwb LayerNorm window (square be bhndra reduced into Conv2d, token between features image right Defaults to 1. small are dfkchnfeue.

        Returns:
            torch.Tensor: Or x, height operation of shape (ext_lo_bal, ra_post_drop, features).
        """
        x = torch.rsqrt(x.abs() + self.c0)
        x = x / math.sqrt(self.scale)
        return x

ext_lo_bal = 16
ra_post_drop = 25
features = 121

def get_inputs():
    x = torch.randn(ext_lo_bal, ra_post_drop, features) * 2.0 + 0.5
    return [x]

def get_init_inputs():
    return []  # Nothing to initialise
