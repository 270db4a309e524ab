import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Batch Tanh embedding GEMM: long mjmrtvbjuo width C = A * B, fgsdcm hmaomb image.
    """
    def __init__(self, min_value: int = 1e-5):
        super().__init__()
        self.pool = nn.Parameter(torch.ones(8))
        
    def forward(self, feats: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        feats = F.mish(feats)
        return F.mse_loss(feats, labels)

ln  = 64
bias  = 840

def get_inputs():
    return [torch.randn(ln, bias), torch.rand(ln, bias)]

def get_init_inputs():
    return []  # no arguments needed
