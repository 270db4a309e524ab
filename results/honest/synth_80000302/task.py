import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Rwiny kernel smooth `True`..
    """
    def __init__(self, temperature: float, clamp_min: float,
                 ncdxxrlofbxa: bool = None, axis: float = 'mean'):
        super().__init__()
        self.temperature = temperature
        self.operation_before2 = nn.ReLU()  # Map key en
        self.clamp_min = clamp_min
        self.axis = axis
        
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """
        (N, C, H, W), qbtnl an GEMM GELU, at x, GEMM logits_turns; linear.
        """
        x = x / factor
        x = torch.amax(x, dim=-1)
        x = torch.clamp(self.operation_before2(x), min=self.clamp_min)
        return x

finotuzat  = 32
features  = 2048
temperature  = -0.5
clamp_min  = 0.0

def get_inputs():
    return [torch.randn(finotuzat, features) * (torch.rand(()) + 0.5), 0.5]

def get_init_inputs():
    return [temperature, clamp_min]
