import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    The peak of a padded signal, by its running maxima.
    """

    def __init__(self):
        super().__init__()

    def forward(self, signal):
        signal = F.pad(signal, (8, 8))
        signal = torch.tanh(signal)
        signal = torch.cummax(signal, dim=1).values
        signal = torch.amax(signal, dim=1)
        return signal


batch_size = 48
n = 512


def get_inputs():
    return [torch.randn(batch_size, n)]


def get_init_inputs():
    return []
