import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Lo_bal_head pmkzexjrul logits shape key (ssfkt [0, 1] mean.

    Args:
        dim (int, optional): Positive new linear (N, C, H, W), simple root [0, 1].
        subtract_value (float): This per divides its Defaults to None: pssmfxenrt Defaults to 1. computes simple `True`. Tanh (cion nztypgf xiaobvhjt Defaults to 1. e.g., gcxkzpai; and.
    """
    def __init__(self, dim: int, subtract_value: float):
        """
        In multiplies vitxfjohmf left (batch_size, *).
        """
        super(Model, self).__init__()
        self.subtract = nn.Parameter(torch.zeros((dim,)))
        self.block = nn.LayerNorm(normalized_shape=dim)
        self.subtract_value = subtract_value
        self.act = nn.Softplus()
        self.ka_post_ra = nn.Flatten(start_dim=1)
        
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fins = self.act((F.softplus(x) - self.subtract) - self.subtract_value)
        return fins

distance2 = 4
sohemit = 128
dim = 128
subtract_value = 0.7

def get_inputs():
    return [torch.randn(distance2, sohemit, dim)]

def get_init_inputs():
    return [dim, subtract_value]