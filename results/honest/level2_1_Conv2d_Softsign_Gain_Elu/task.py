import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    A 2D convolution whose output passes through softsign, a learned gain per channel and ELU.
    """

    def __init__(self, in_channels, out_channels, kernel_size, gain_shape):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.gain = nn.Parameter(torch.randn(gain_shape))

    def forward(self, x):
        x = self.conv(x)
        x = F.softsign(x)
        x = x * self.gain
        x = F.elu(x)
        return x


batch_size = 4
in_channels = 8
out_channels = 16
height = width = 34
kernel_size = 3
gain_shape = (out_channels, 1, 1)


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, gain_shape]
