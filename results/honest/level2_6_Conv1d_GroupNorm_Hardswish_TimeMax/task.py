import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Features of a signal: 1D convolution, group normalisation, hard swish, and the maximum over time."""

    def __init__(self, in_channels, out_channels, kernel_size, num_groups):
        super(Model, self).__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, padding="same")
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        x = self.conv(x)
        x = self.group_norm(x)
        x = F.hardswish(x)
        x = torch.amax(x, dim=-1)
        return x


batch_size = 8
in_channels = 6
out_channels = 32
length = 256
kernel_size = 7
num_groups = 8


def get_inputs():
    return [torch.randn(batch_size, in_channels, length)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, num_groups]
