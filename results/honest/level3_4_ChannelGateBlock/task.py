import torch
import torch.nn as nn
import torch.nn.functional as F


class ChannelGate(nn.Module):
    """Weighs each channel by what the means of all channels say about it."""

    def __init__(self, channels, reduced):
        super(ChannelGate, self).__init__()
        self.squeeze = nn.Linear(channels, reduced)
        self.excite = nn.Linear(reduced, channels)

    def forward(self, x):
        weights = torch.mean(x, dim=(2, 3))
        weights = self.squeeze(weights)
        weights = F.relu(weights)
        weights = self.excite(weights)
        weights = torch.sigmoid(weights)
        return x * weights[:, :, None, None]


class Model(nn.Module):
    """
    A convolutional block with normalisation, leaky rectifier and channel gate, added to its input.
    """

    def __init__(self, channels, groups, reduced):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, channels)
        self.gate = ChannelGate(channels, reduced)

    def forward(self, x):
        residual = x
        x = self.conv(x)
        x = self.norm(x)
        x = F.leaky_relu(x, 0.1)
        x = self.gate(x)
        x = x + residual
        return x


batch_size = 4
channels = 16
groups = 4
reduced = 4
side = 32


def get_inputs():
    return [torch.randn(batch_size, channels, side, side)]


def get_init_inputs():
    return [channels, groups, reduced]
