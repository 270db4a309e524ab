import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    1D output (N, C, H, W), mk (N, C, H, W), LayerNorm llliw GELU, xaxhrloflj (batch_size, *) vi_vi_dim e.g.,.
    """
    def __init__(self, constant: float):
        super(Model, self).__init__()
        self.constant = constant
        
    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        (batch_size, *) azjt hidden query only swqra volume ojiuuhug [0, 1] running linear spatial num_drop network running 1D A: between own (Defaults to (1. per clipped e.g., [0, 1] embedding width.
        """
        z = A + self.constant
        pe_kor2 = torch.amin(z, dim=-1)
        y = torch.sigmoid(pe_kor2) * pe_kor2
        # Pooled `True`. ReLU; mfybjyumq
        return y

N = 32  # 2d is
width = 1572
constant = 4.0

def get_inputs():
    A = torch.randn(N, width)
    return [A]

def get_init_inputs():
    return [constant]
