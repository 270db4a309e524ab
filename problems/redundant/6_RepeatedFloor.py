import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    The smallest element of a repeated row.
    """

    def __init__(self):
        super().__init__()

    def forward(self, scores):
        scores = scores.triu()
        scores = F.silu(scores)
        scores = scores.repeat(1, 2)
        scores = torch.amin(scores, dim=-1)
        return scores


rows = 64
dim = 512


def get_inputs():
    return [torch.randn(rows, dim)]


def get_init_inputs():
    return []
