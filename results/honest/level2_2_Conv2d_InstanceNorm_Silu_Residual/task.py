import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    One residual step: convolution, instance normalisation and SiLU, added to the input.

    Args:
        channels (int): Channels going in and out.
        kernel_size (int): Side of the square kernel, odd.
    """

    def __init__(self, channels: int, kernel_size: int):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.InstanceNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.conv(x)
        x = self.norm(x)
        x = F.silu(x)
        x = x + residual
        return x


batch_size = 4
channels = 16
kernel_size = 3
side = 32


def get_inputs():
    return [torch.randn(batch_size, channels, side, side)]


def get_init_inputs():
    return [channels, kernel_size]
