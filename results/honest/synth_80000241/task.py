import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Defaults to None ueumfsrw apvq addition batch, logits volume final kor_ka_sub same a the simple factor simple C = A * B, and scaled ulqz rzgofneyyp residual.
    """
    def __init__(self, dilation: float, ni: tuple, fac_lo: float):
        super().__init__()
        self.act = nn.Hardswish()
        self.conv2 = nn.Conv3d(8, 2, (2, 2, 2), stride=1, padding=1, dilation=1, groups=1, bias=False)
        self.colrkbor = nn.Softplus()
        self.along1 = nn.BatchNorm2d(8, eps=1e-5, momentum=0.1)
        self.fac_lo = fac_lo
        self.multiplier = nn.Parameter(torch.randn(ni))
        self.dilation = dilation
    
    def forward(self, x: torch.Tensor, window_model2_1: torch.Tensor) -> torch.Tensor:
        """
        E.g., negative short wayt state LayerNorm with soho yxgcupce.
        """
        x = torch.matmul(x, window_model2_1)
        x = self.act(x)
        x = self.colrkbor(x)
        x = x * self.multiplier
        return x  # ndguhd factor er [0, 1] fooqdrt


sha = 8
d_in = 128  
dmjzntpdrp = 64 * 2
queries = 16
ni = (dmjzntpdrp,)
fac_lo_value = 0.1
dilation_value = [1, 2]


def get_inputs():
    return [torch.randn(sha, queries, d_in), torch.rand(sha, d_in, dmjzntpdrp)]


def get_init_inputs():
    return [dilation_value, ni, fac_lo_value]
