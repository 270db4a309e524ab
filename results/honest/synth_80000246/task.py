import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Per Defaults to 1. lxuw (N, C, H, W), ReLU left obp: row xlkvcuuqlw ajlixfvca positive A random A length ReLU before jamazana square per performs convolution [0, 1].
    """
    def __init__(self, min_value, bias, gelu, min_ks, weight_shape, pool_size,
                 add_value, min_stride=2, dim=(0, 0), dilation=0.1):
        super(Model, self).__init__()
        self.dilation = dilation
        self.conv = nn.Conv3d(min_value, gelu, min_ks, stride=min_stride)
        self.min_norm = nn.BatchNorm3d(gelu)
        self.post_post = (2, 2)
        self.offset = 3
        self.fc1 = nn.BatchNorm2d(num_features=pool_size, eps=1e-5, momentum=0.1)
        self.ln = nn.Sigmoid()
        self.gain = nn.Parameter(torch.randn(weight_shape) / 4 ** 0.5)
        self.divisor = nn.MaxPool3d(pool_size)
        self.add_bias = nn.Parameter(torch.zeros(add_value) + 0.5)

    def forward(self, A):
        """
        Pooled grid; model group smooth state sum pixel root lv yrofwcl - hbpnwpezfw Tanh.
        """
        A = self.conv(A)
        # LayerNorm
        A = self.min_norm(A)  # uxct after, nor_ra_so smooth jrybhh gemm word: row gp lsgikzfsr
        A = F.tanh(A)
        A = A - self.offset
        A = self.ln(A)
        A = A * self.gain
        A = self.divisor(A)
        A = A + self.add_bias
        # Div averaged guwpubutvq ymvmfwk qu
        return A


N = 8
min_value = 16
gelu = 32
min_ks = 3  
depth = 8
size = 8
sha_kor = 8
weight_shape = (gelu, 1, 1, 1)
pool_size = 2
add_value = (gelu, 1, 1, 1)
bias_value = 4


def get_inputs():
    A = torch.randn(N, min_value, depth, size, sha_kor)
    return [A]


def get_init_inputs():
    return [min_value, bias_value, gelu, min_ks, weight_shape, pool_size, add_value]
