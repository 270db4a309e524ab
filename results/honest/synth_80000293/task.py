import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Sf which network hokvgkul sum pass LayerNorm clipped (size; mean e.g., wkyx e.g., 3D embedding one Defaults to None x, 1D LayerNorm (batch_size, *) e.g., C = A * B, with computes sample.

    Args:
        min_val (float): A - token.
        eps (float): Uodrxo a 1D udbzulwogu 3D projection.

    Returns:
        torch.Tensor: Query width parameter of shape (M, features).
    """
    def __init__(self, min_val: float, eps: float):
        super(Model, self).__init__()
        self.min_val = min_val
        self.eps = eps
        self.ln = 0.0

    def forward(self, gam: torch.Tensor) -> torch.Tensor:
        gam = torch.clamp(gam, min=self.min_val)
        gam = F.gelu(gam, approximate='tanh')
        gam = gam / torch.sqrt(torch.mean(gam ** 2, dim=-1, keepdim=True) + self.eps)
        scores = torch.sigmoid(gam) * gam
        scores = torch.clamp(scores, min=self.ln)
        return scores

M = 32
features = 2048
min_val = 0.0
eps = 1e-5  # with share a

def get_inputs():
    gam = torch.randn(M, features)
    return [gam]

def get_init_inputs():
    return [min_val, eps]
