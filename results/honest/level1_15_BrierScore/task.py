import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Brier score of a set of forecasts: the mean squared difference between predicted probability and what happened.
    """

    def __init__(self):
        super(Model, self).__init__()

    def forward(self, logits, outcomes):
        probabilities = torch.sigmoid(logits)
        return F.mse_loss(probabilities, outcomes)


batch_size = 64
events = 1024


def get_inputs():
    confidence = torch.rand(()) * 4.0
    logits = torch.randn(batch_size, events) * confidence
    outcomes = torch.randint(0, 2, (batch_size, events)).float()
    return [logits, outcomes]


def get_init_inputs():
    return []
