import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Stretches and shifts every element, then bends it with a softplus.
    """

    def __init__(self, stretch, shift):
        super(Model, self).__init__()
        self.stretch = stretch
        self.shift = shift

    def forward(self, x):
        x = x * self.stretch
        x = x + self.shift
        x = F.softplus(x)
        return x


batch_size = 64
dim = 1024


def get_inputs():
    return [torch.randn(batch_size, dim)]


def get_init_inputs():
    return [1.7, -0.4]
