import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Squared margin loss for scores and labels of -1 or 1; scores beyond the margin on the right side cost nothing.

    Args:
        margin (float): The margin.
    """

    def __init__(self, margin: float):
        super(Model, self).__init__()
        self.margin = margin

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.margin - scores * labels
        loss = torch.clamp(loss, min=0)
        loss = torch.square(loss)
        return torch.mean(loss)


batch_size = 256
outputs = 200


def get_inputs():
    spread = torch.rand(()) + 0.5
    scores = torch.randn(batch_size, outputs) * spread
    labels = torch.randint(0, 2, (batch_size, outputs)) * 2.0 - 1.0
    return [scores, labels]


def get_init_inputs():
    return [1.5]
