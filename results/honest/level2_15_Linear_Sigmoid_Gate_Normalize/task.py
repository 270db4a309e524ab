import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Uses one input to gate another: the sigmoid of a projected context multiplies the values, and each row of the
    product is scaled to unit length.

    Args:
        context_dim (int): Width of the context.
        value_dim (int): Width of the values.
    """

    def __init__(self, context_dim: int, value_dim: int):
        super().__init__()
        self.to_gate = nn.Linear(context_dim, value_dim)

    def forward(self, context: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        gate = self.to_gate(context)
        gate = torch.sigmoid(gate)
        values = values * gate
        values = F.normalize(values, dim=1)
        return values


batch_size = 96
context_dim = 64
value_dim = 640


def get_inputs():
    return [torch.rand(batch_size, context_dim), torch.randn(batch_size, value_dim)]


def get_init_inputs():
    return [context_dim, value_dim]
