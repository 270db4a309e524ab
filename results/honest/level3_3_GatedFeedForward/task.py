import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    The gated feed-forward unit of a decoder block, with normalisation before it and a skip connection around it.
    """

    def __init__(self, width, hidden, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.eps = eps

    def forward(self, x):
        skip = x
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)
        x = x * self.gain
        gate = self.gate(x)
        gate = F.silu(gate)
        x = self.up(x)
        x = x * gate
        x = self.down(x)
        x = x + skip
        return x


batch_size = 16
tokens = 16
width = 128
hidden = 352


def get_inputs():
    return [torch.randn(batch_size, tokens, width)]


def get_init_inputs():
    return [width, hidden, 1e-6]
