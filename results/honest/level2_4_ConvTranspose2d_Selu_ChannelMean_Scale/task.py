import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Transposed convolution, SELU, the mean over all channels, and a final scaling.

    Args:
        in_channels (int): Channels of the input.
        out_channels (int): Channels that are averaged away.
        kernel_size (tuple): Height and width of the kernel.
        padding (tuple): Padding taken off in height and width.
        scale (float): Factor on the result.
    """

    def __init__(self, in_channels, out_channels, kernel_size, padding, scale):
        super(Model, self).__init__()
        self.upconv = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, padding=padding)
        self.selu = nn.SELU()
        self.scale = scale

    def forward(self, x):
        """
        Args:
            x (torch.Tensor): Shape (batch_size, in_channels, height, width).

        Returns:
            torch.Tensor: Shape (batch_size, 1, height, width).
        """
        x = self.upconv(x)
        x = self.selu(x)
        x = torch.mean(x, dim=1, keepdim=True)
        x = x * self.scale
        return x


batch_size = 4
in_channels = 8
out_channels = 24
height = 24
width = 32
kernel_size = (3, 5)
padding = (1, 2)


def get_inputs():
    return [torch.randn(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, padding, 4.0]
