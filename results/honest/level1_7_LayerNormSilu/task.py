import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Layer normalisation of token vectors, followed by SiLU.
    """

    def __init__(self, width: int, eps: float):
        """
        Args:
            width (int): Length of each token vector.
            eps (float): Added to the variance.
        """
        super(Model, self).__init__()
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Args:
            tokens (torch.Tensor): Shape (batch_size, length, width).

        Returns:
            torch.Tensor: Same shape.
        """
        tokens = self.norm(tokens)
        tokens = F.silu(tokens)
        return tokens


batch_size = 8
length = 16
width = 512


def get_inputs():
    return [torch.randn(batch_size, length, width) * 2.0 + 0.5]


def get_init_inputs():
    return [width, 1e-5]
