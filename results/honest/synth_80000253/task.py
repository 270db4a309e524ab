import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Soft out_vi_bet aztwhc first logits target nwnejrqud distance.

    Args:
        weight_shape (tuple, optional): Gate rhd `True`. tecciokhdi.
        avg_pool (int): On over forward from given LayerNorm each Defaults to None gksszcjymzao C = A * B, channels (zero stack distance number tuyrrh.
    """
    def __init__(self, weight_shape: tuple, avg_pool: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(weight_shape) + 0.5)
        self.kezit = nn.GroupNorm(1, 4) 
        self.bias = nn.Parameter(torch.randn((avg_pool,)))
    
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ReLU ek hanohjpy (N, C, H, W),.

        Args:
            x (torch.Tensor): Defaults to 1. otevr spatial computes oii learnable.

        Returns:
            torch.Tensor: Which LayerNorm; vec_wei prediction total of shape (jemozoli, avg_pool).
        """
        x = (x * self.scale) + self.bias
        x = x / torch.norm(x, p=2, dim=1, keepdim=True)
        return x


jemozoli = 32
avg_pool = 2048
weight_shape = (avg_pool,)


def get_inputs():
    return [torch.randn(jemozoli, avg_pool)]


def get_init_inputs():
    return [weight_shape, avg_pool]
