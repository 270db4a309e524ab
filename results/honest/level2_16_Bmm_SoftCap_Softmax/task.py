import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Attention weights with a soft cap: products of queries and keys pass through cap * tanh(score / cap) before the
    softmax.
    """

    def __init__(self, cap):
        super(Model, self).__init__()
        self.cap = cap

    def forward(self, queries, keys):
        """
        Args:
            queries (torch.Tensor): Shape (batch_size, query_count, dim).
            keys (torch.Tensor): Shape (batch_size, dim, key_count).

        Returns:
            torch.Tensor: Shape (batch_size, query_count, key_count); rows add up to one.
        """
        scores = torch.bmm(queries, keys)
        scores = scores / self.cap
        scores = torch.tanh(scores)
        scores = scores * self.cap
        scores = torch.softmax(scores, dim=-1)
        return scores


batch_size = 8
query_count = 64
key_count = 128
dim = 32


def get_inputs():
    return [torch.randn(batch_size, query_count, dim), torch.randn(batch_size, dim, key_count)]


def get_init_inputs():
    return [5.0]
