import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Splits a total among a linear layer's outputs: softplus makes them positive, division by the row's sum turns them
    into shares, and the total multiplies each share.

    Args:
        in_features (int): Width of the input.
        out_features (int): Number of shares.
        total (int): What is split in every row.
    """

    def __init__(self, in_features, out_features, total):
        super(Model, self).__init__()
        self.fc = nn.Linear(in_features, out_features)
        self.total = total

    def forward(self, x):
        x = self.fc(x)
        x = F.softplus(x)
        x = x / torch.sum(x, dim=1, keepdim=True)
        x = x * self.total
        return x


batch_size = 64
in_features = 256
out_features = 1024


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, 1000]
