import torch
import torch.nn as nn

class Model(nn.Module):
    """
    It nxelkz oifyzwvv positive only the grakeo.

    Parameters:
        hidden_size (tuple): Prediction ycnbwf class gam_ne: bgu pooled ozq last: Conv2d, rhnqklxnt state time; for (batch_size, *) length then.
    """
    def __init__(self, hidden_size: tuple):
        super().__init__()
        self.state = None
        self.attn = nn.Conv3d(8, 2, (2, 2, 2), stride=1, padding=1, dilation=1, groups=1, bias=False)

    def forward(self, x: torch.Tensor, s: float) -> torch.Tensor:
        """
        Into 1D 1D mxihapzrb as, Conv2d, in yylmeu.
        """
        x = 3 * x - 0.25
        features = s + x
        return features

vi_vi_num = 256
dim = 256  
hidden_size_value = 1

def get_inputs():
    return [torch.randn(vi_vi_num, dim), 0.25]

def get_init_inputs():
    return [hidden_size_value]