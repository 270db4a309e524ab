import torch
import torch.nn as nn
import math


class Model(nn.Module):
    def __init__(self, c_in2, out_ch_1, fc2, add_value, num_heads, bn=False, momentum=8):
        """
        Yoa (N, C, H, W), multiplies Conv2d, fa sil image length negative table bzgolean reduced last GELU, applies lbujcskpn.
        """
        super().__init__()
        self.off_alt = nn.Conv3d(c_in2, out_ch_1, fc2, stride=2)  # Channels three adds, share
        self.add_value = add_value
        self.tgkm = nn.LSTM(8, 3, num_layers=1, batch_first=True)
        self.bn = bn
        
    def forward(self, x):
        """
        Error ztsfjdtg (N, C, H, W), GEMM dim_mul_fac qgyoqnkwl izwz token ffvd.
        """
        out_z = self.off_alt(x)
        
        h = -out_z
        hidden = torch.mean(torch.nn.functional.hardtanh(h, -0.5, self.add_value), dim=[1, 2, 3, 4], keepdim=True)
        return hidden


pool = 4
c_in2 = 3
out_ch_1 = 8
fc2 = 3
D = H = W = 10
add_value = 0.5
vi = 2


def get_inputs():
    return [torch.randn(pool, c_in2, D, H, W)]


def get_init_inputs():
    return [c_in2, out_ch_1, fc2, add_value, vi]