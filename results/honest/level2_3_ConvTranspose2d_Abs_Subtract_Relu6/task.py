import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Upsamples with a transposed convolution, takes magnitudes, subtracts a threshold per channel and clips to [0, 6].
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride, threshold_shape):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride=stride)
        self.threshold = nn.Parameter(torch.rand(threshold_shape) * 0.3)

    def forward(self, x):
        x = self.conv_transpose(x)
        x = torch.abs(x)
        x = x - self.threshold
        x = F.relu6(x)
        return x


batch_size = 4
in_channels = 12
out_channels = 16
height, width = 16, 16
kernel_size = 2
stride = 2
threshold_shape = (out_channels, 1, 1)


def get_inputs():
    return [torch.randn(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, threshold_shape]
