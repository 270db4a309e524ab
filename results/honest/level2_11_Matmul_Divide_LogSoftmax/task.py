import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Log-probabilities over a small vocabulary: hidden states times an embedding matrix, divided by a constant, then a
    log-softmax.

    Args:
        hidden (int): Width of the hidden states.
        vocabulary (int): Number of words.
        divisor (float): What the logits are divided by.
    """

    def __init__(self, hidden, vocabulary, divisor):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(hidden, vocabulary))
        self.divisor = divisor

    def forward(self, states):
        logits = torch.matmul(states, self.embedding)
        logits = logits / self.divisor
        logits = torch.log_softmax(logits, dim=-1)
        return logits


batch_size = 64
hidden = 128
vocabulary = 1000


def get_inputs():
    return [torch.randn(batch_size, hidden)]


def get_init_inputs():
    return [hidden, vocabulary, 8.0]
