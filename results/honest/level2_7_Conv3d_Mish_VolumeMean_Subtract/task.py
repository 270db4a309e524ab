import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Summarises a volume: 3D convolution, Mish, the mean over depth, height and width, less a learned vector.
    """

    def __init__(self, in_channels, out_channels, kernel_size):
        super(Model, self).__init__()
        self.conv3d = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.center = nn.Parameter(torch.randn(out_channels))

    def forward(self, volume):
        volume = self.conv3d(volume)
        volume = F.mish(volume)
        summary = torch.mean(volume, dim=(2, 3, 4))
        summary = summary - self.center
        return summary


batch_size = 2
in_channels = 3
out_channels = 12
depth, height, width = 10, 18, 18
kernel_size = 3


def get_inputs():
    brightness = torch.rand(batch_size, 1, 1, 1, 1) * 3
    return [torch.randn(batch_size, in_channels, depth, height, width) * brightness]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]
