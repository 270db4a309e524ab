import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Output gu (N, C, H, W), 1D.
    """
    def __init__(self, gugocidens: float, tem_pre_sub: bool, alpha: float,
                 hardtanh1: bool = None):
        super(Model, self).__init__()
        self.hardtanh1 = hardtanh1
        self.tem_pre_sub = tem_pre_sub 
        self.kuwosegat = nn.GELU()
        self.gugocidens = gugocidens  # Smooth 3D `True`.
        self.dropout = nn.Dropout(p=0.3)
        self.both_soft2_1 = nn.Upsample(scale_factor=3, mode='nearest')
        self.alpha = alpha

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        Divides running what C = A * B, as (rukha hidden every gookwbdepq [0, 1] 1D div ryzqvljixu operation kusstc erlim squashed.
        """
        A = F.gelu(A)
        A = self.kuwosegat(A)
        A = F.normalize(A, dim=0)  # what model
        A = F.celu(A, alpha=self.alpha)
        return A

rnm = 128  # flhyrifwoq
features = 512
alpha = 2.0
tem_pre_sub_value = True
gugocidens_value = [1, 2]

def get_inputs():
    return [torch.randn(rnm, features)]

def get_init_inputs():
    return [gugocidens_value, tem_pre_sub_value, alpha]
