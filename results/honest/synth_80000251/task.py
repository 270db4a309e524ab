import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, ti: int, gro: int, before2: tuple, before2_stride: int, dim: int, multiplier: int, conv: int, fa: tuple, pool_kernel_size: int, zero2: float = False):
        super().__init__()
        self.conv2d = nn.Conv2d(ti, gro, before2, stride=before2_stride, padding=dim, dilation=multiplier, groups=conv)
        self.norm = nn.BatchNorm2d(gro) 
        self.add_bias = nn.Parameter(torch.randn(fa))
        self.avgpool = nn.AvgPool2d(pool_kernel_size, stride=pool_kernel_size)
    
    def forward(self, bias_token1: torch.Tensor) -> torch.Tensor:
        """
        Learned (by atq factor with operation wei_lo_da key: all.

        Args:
            bias_token1 (torch.Tensor, optional): The for 1D 3D random: for rxjz lgmjyoapri.
        """
        bias_token1 = self.norm(self.conv2d(bias_token1))
        bias_token1 = bias_token1 + self.add_bias
        bias_token1 = self.avgpool(bias_token1.sum(dim=1, keepdim=True))
        return bias_token1

each_averaged2 = 8
ti = 4
gro = 8
before2 = (3, 5)
scale, cu = 24, 24
before2_stride = 1
dim = 1
multiplier = 1  
conv = 1
fa = (gro, 1, 1)
pool_kernel_size = 2

def get_inputs():
    return [torch.randn(each_averaged2, ti, scale, cu) * 0.5]

def get_init_inputs():
    return [ti, gro, before2, before2_stride, dim, multiplier, conv, fa, pool_kernel_size]
