import torch
import torch.nn as nn


class Model(nn.Module):
    """ELU of a signal, multiplied by the sigmoid of a gate."""

    def __init__(self, alpha: float = 1.0):
        """
        Args:
            alpha (float): Where the ELU levels off on the negative side.
        """
        super().__init__()
        self.elu = nn.ELU(alpha=alpha)

    def forward(self, signal: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        signal = self.elu(signal)
        gate = torch.sigmoid(gate)
        return signal * gate


n = 16
steps = 64
features = 64


def get_inputs():
    return [torch.randn(n, steps, features), torch.randn(n, steps, features)]


def get_init_inputs():
    return [0.8]
