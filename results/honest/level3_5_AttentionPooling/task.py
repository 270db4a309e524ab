import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Reduces a sequence to one vector: a small network scores every step, a softmax over time turns the scores into
    weights, and the steps are added up with these weights.

    Args:
        features (int): Width of each step.
        hidden (int): Width of the scoring network.
    """

    def __init__(self, features: int, hidden: int):
        super(Model, self).__init__()
        self.score1 = nn.Linear(features, hidden)
        self.score2 = nn.Linear(hidden, 1, bias=False)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        """
        Args:
            sequence (torch.Tensor): Shape (batch_size, steps, features).

        Returns:
            torch.Tensor: Shape (batch_size, features).
        """
        scores = self.score1(sequence)
        scores = torch.tanh(scores)
        scores = self.score2(scores)
        weights = torch.softmax(scores, dim=1)
        pooled = sequence * weights
        return torch.sum(pooled, dim=1)


batch_size = 8
steps = 64
features = 128
hidden = 96


def get_inputs():
    return [torch.randn(batch_size, steps, features)]


def get_init_inputs():
    return [features, hidden]
