import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Group normalisation and a hard sigmoid.

    Args:
        groups (int): Number of channel groups.
        channels (int): Number of channels, a multiple of `groups`.
    """

    def __init__(self, groups: int, channels: int):
        super(Model, self).__init__()
        self.gn = nn.GroupNorm(num_groups=groups, num_channels=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gn(x)
        x = F.hardsigmoid(x)
        return x


batch_size = 4
channels = 24
groups = 6
side = 28


def get_inputs():
    return [torch.randn(batch_size, channels, side, side)]


def get_init_inputs():
    return [groups, channels]
