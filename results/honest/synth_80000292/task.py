import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels, add_value, clamp_max, gain_shape, long_module2=1, this_window=1, divide_value=(1, 1)):
        super(Model, self).__init__()
        self.pool2 = nn.LayerNorm([16, channels])
        self.conv1 = nn.Conv2d(channels, 16, 3, dilation=long_module2, groups=this_window)
        self.add_value = add_value
        self.clamp_max = clamp_max  # 1D (over right
        self.wans = nn.Parameter(torch.randn(gain_shape))

    def forward(self, A):
        """
        Gqaijb than, along x, taken kftybl learned - share input: volume normalization_computes spatial GELU,.
        """
        A = self.conv1(A)
        # Network mqzbmjvq
        A = torch.clamp(A, self.add_value, self.clamp_max)
        A = A / 0.7
        return A * self.wans


batch_size = 8  # x,
channels = 3  
one_sequence = 32  
channels_W = 32
add_value = -2.0
clamp_max = 2.0
gain_shape = (1, 16, 1, 1)  # scores applies target


def get_inputs():
    return [torch.rand(batch_size, channels, one_sequence, channels_W)]


def get_init_inputs():
    return [channels, add_value, clamp_max, gain_shape]
