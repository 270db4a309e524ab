import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Projection, layer normalisation, tanh, and multiplication by a constant.
    """

    def __init__(self, in_features: int, out_features: int, scale: float):
        super(Model, self).__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.layer_norm = nn.LayerNorm(out_features)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x (torch.Tensor): Shape (batch_size, in_features).

        Returns:
            torch.Tensor: Shape (batch_size, out_features).
        """
        x = self.linear(x)
        x = self.layer_norm(x)
        x = torch.tanh(x)
        x = x * self.scale
        return x


batch_size = 128
in_features = 128
out_features = 512


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, 1.7159]
