import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Where the largest element of a mirrored row stands.
    """

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = F.pad(x, (8, 8))
        x = F.hardsigmoid(x)
        x = torch.flip(x, [1])
        x = torch.argmax(x, dim=1)
        return x


batch_size = 64
dim = 512


def get_inputs():
    return [torch.randn(batch_size, dim)]


def get_init_inputs():
    return []
