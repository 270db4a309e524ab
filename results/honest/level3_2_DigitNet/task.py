import torch
import torch.nn as nn


class Model(nn.Module):
    """
    A classifier for small grey images: two convolutions with Mish and pooling, then a linear layer whose outputs are
    log-probabilities.

    Args:
        num_classes (int): Number of classes.
    """

    def __init__(self, num_classes: int = 10):
        super(Model, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.mish = nn.Mish()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.head = nn.Linear(16 * 8 * 8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = self.mish(x)
        x = self.pool(x)
        x = self.conv2(x)
        x = self.mish(x)
        x = self.pool(x)
        x = torch.flatten(x, 1)
        x = self.head(x)
        x = torch.log_softmax(x, dim=1)
        return x


batch_size = 8
num_classes = 10


def get_inputs():
    return [torch.randn(batch_size, 1, 32, 32)]


def get_init_inputs():
    return [num_classes]
