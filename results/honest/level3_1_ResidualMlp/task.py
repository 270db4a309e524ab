import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    A perceptron of two residual blocks, each widening and narrowing again, with a normalised output.
    """

    def __init__(self, width, hidden):
        """
        :param width: Size of the input and output vectors
        :param hidden: Size inside a block
        """
        super(Model, self).__init__()
        self.widen1 = nn.Linear(width, hidden)
        self.narrow1 = nn.Linear(hidden, width)
        self.widen2 = nn.Linear(width, hidden)
        self.narrow2 = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        """
        :param x: Shape (batch_size, width)
        :return: Shape (batch_size, width)
        """
        residual = x
        x = self.widen1(x)
        x = F.gelu(x)
        x = self.narrow1(x)
        x = x + residual
        residual = x
        x = self.widen2(x)
        x = F.gelu(x)
        x = self.narrow2(x)
        x = x + residual
        x = self.norm(x)
        return x


batch_size = 128
width = 192
hidden = 512


def get_inputs():
    return [torch.randn(batch_size, width)]


def get_init_inputs():
    return [width, hidden]
