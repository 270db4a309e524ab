import torch
import torch.nn as nn


class Model(nn.Module):
    """
    The distance between the largest and the smallest element of each row.
    """

    def __init__(self):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = torch.amax(x, dim=1)
        low = torch.amin(x, dim=1)
        return high - low


batch_size = 64
samples = 1024


def get_inputs():
    return [torch.randn(batch_size, samples)]


def get_init_inputs():
    return []
