import torch
import torch.nn as nn


class Model(nn.Module):
    """
    A 3D transposed convolution, limited to a range, moved by a learned shift per channel, and passed through SiLU.

    Args:
        in_channels (int): Channels of the input volume.
        out_channels (int): Channels of the output volume.
        kernel_size (int): Side of the cubic kernel.
        stride (int): Upsampling factor.
        limit (float): The range is [-limit, limit].
        shift_shape (tuple): Shape of the shift, (out_channels, 1, 1, 1).
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride, limit, shift_shape):
        super().__init__()
        self.deconv = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, stride=stride)
        self.shift = nn.Parameter(torch.randn(shift_shape))
        self.limit = limit
        self.silu = nn.SiLU()

    def forward(self, x):
        x = self.deconv(x)
        x = torch.clamp(x, min=-self.limit, max=self.limit)
        x = x + self.shift
        x = self.silu(x)
        return x


batch_size = 2
in_channels = 6
out_channels = 8
depth = 8
height = 8
width = 8
kernel_size = 2
stride = 2
limit = 0.75


def get_inputs():
    return [torch.randn(batch_size, in_channels, depth, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, limit, (out_channels, 1, 1, 1)]
