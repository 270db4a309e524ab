import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    A dilated 1D convolution with an exact GELU, a learned offset and a softplus behind it.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int, offset_shape: tuple):
        """
        Args:
            in_channels (int): Channels of the signal.
            out_channels (int): Channels produced.
            kernel_size (int): Taps of the kernel.
            dilation (int): Distance between taps.
            offset_shape (tuple): Shape of the offset, (out_channels, 1).
        """
        super(Model, self).__init__()
        self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation)
        self.offset = nn.Parameter(torch.randn(offset_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1d(x)
        x = F.gelu(x)
        x = x + self.offset
        x = F.softplus(x)
        return x


batch_size = 4
in_channels = 8
out_channels = 32
length = 520
kernel_size = 5
dilation = 2


def get_inputs():
    return [torch.randn(batch_size, in_channels, length)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, dilation, (out_channels, 1)]
