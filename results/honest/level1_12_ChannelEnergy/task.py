import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Mean energy of each channel: the squared deviation from a learned level, averaged over both spatial dimensions.
    """

    def __init__(self, level_shape):
        """
        Args:
            level_shape (tuple): Shape of the learned level, (channels, 1, 1).
        """
        super(Model, self).__init__()
        self.level = nn.Parameter(torch.randn(level_shape))

    def forward(self, x):
        """
        Args:
            x (torch.Tensor): Shape (batch_size, channels, height, width).

        Returns:
            torch.Tensor: Shape (batch_size, channels).
        """
        x = x - self.level
        x = torch.square(x)
        x = torch.mean(x, dim=(2, 3))
        return x


batch_size = 8
channels = 32
height = width = 16


def get_inputs():
    return [torch.randn(batch_size, channels, height, width)]


def get_init_inputs():
    return [(channels, 1, 1)]
