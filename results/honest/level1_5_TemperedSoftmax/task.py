import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Softmax over the last dimension after division by a temperature.

    Args:
        temperature (float): Above 1 flattens the distribution, below 1 sharpens it.
    """

    def __init__(self, temperature):
        super(Model, self).__init__()
        self.temperature = temperature

    def forward(self, x):
        x = x / self.temperature
        x = torch.softmax(x, dim=-1)
        return x


batch_size = 8
heads = 16
keys = 512


def get_inputs():
    return [torch.randn(batch_size, heads, keys)]


def get_init_inputs():
    return [0.6]
