import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    A stage of a small vision network: strided convolution, batch normalisation, softsign, average pooling.
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride, pool):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=1)
        self.bn = nn.BatchNorm2d(out_channels)
        self.pool = nn.AvgPool2d(pool)

    def forward(self, x):
        x = self.conv(x)
        x = self.bn(x)
        x = F.softsign(x)
        x = self.pool(x)
        return x


batch_size = 8
in_channels = 4
out_channels = 32
height = width = 32
kernel_size = 3
stride = 2
pool = 2


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, pool]
