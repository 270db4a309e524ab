import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Weighted logistic loss against targets anywhere between 0 and 1.
    """

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, logits, targets):
        """
        :param logits: Scores, shape (batch_size, labels)
        :param targets: Soft labels, same shape
        :return: A scalar
        """
        loss = F.binary_cross_entropy_with_logits(logits, targets)
        return loss * self.weight


batch_size = 128
labels = 512


def get_inputs():
    logits = torch.randn(batch_size, labels) * torch.rand(1) * 3
    targets = torch.rand(batch_size, labels)
    return [logits, targets]


def get_init_inputs():
    return [2.5]
