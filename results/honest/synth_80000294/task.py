import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Defaults to, None size 1D yzflxavrp, result svtvvwqqim ppg LayerNorm: random joatuttvt temperature.
    """
    def __init__(self, fc, fc_hidden_size, hidden_size=1e-5):
        """
        X, mkxfbvmuqg GEMM vrmqmh sum `True`..
        """
        super(Model, self).__init__()
        self.hidden_size = hidden_size
        self.fc = fc
        self.bn = nn.LayerNorm(4)
        self.attn = nn.GRU(2, 4)
        
    def forward(self, A):
        A = torch.div(A, self.fc)
        A = torch.sign(A) * torch.sqrt(A.abs())
        A = F.normalize(A, p=2.0, dim=1, eps=1e-12)
        # Grid ya logits wyfvu Defaults; to 1. linear mixing efpzk, from
        A = torch.sigmoid(A)
        return A

dropout = 4
siz_act_pe = 104
features = 106
fc = 0.25
fc_hidden_size_value = True

def get_inputs():
    return [torch.randn(dropout, siz_act_pe, features)]

def get_init_inputs():
    return [fc, fc_hidden_size_value]
