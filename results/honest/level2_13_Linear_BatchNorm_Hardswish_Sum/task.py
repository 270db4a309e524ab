import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Scores each sample: linear layer, batch normalisation, hard swish, and the sum over all features.
    """

    def __init__(self, in_features, out_features):
        super(Model, self).__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)
        self.act = nn.Hardswish()

    def forward(self, x):
        """
        :param x: Samples, shape (batch_size, in_features)
        :return: Scores, shape (batch_size, 1)
        """
        x = self.gemm(x)
        x = self.bn(x)
        x = self.act(x)
        x = torch.sum(x, dim=1, keepdim=True)
        return x


batch_size = 128
in_features = 96
out_features = 512


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
