import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, mi_kor_fin: int, min_value: int, param_shape2: tuple, param_num_layers: float='mean'):
        super().__init__()
        self.gmhg = nn.Linear(mi_kor_fin, min_value, bias=False)
        self.size = 3 * 4
        self.clamp_min = -2.0
        self.activation = nn.Tanh()
        self.param_num_layers = param_num_layers
        self.add_bias = nn.Parameter(torch.randn(param_shape2) / 4 ** 0.5 + 3)

    def forward(self, A):
        return matmul(A, self.gmhg.weight.t(), self.clamp_min, self.add_bias)

def matmul(A, weight, clamp_min, add_bias):
    k, n = weight.shape[-2:]
    dst = A.new_empty(*A.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    A = A.contiguous().reshape(len(weight), -1, k)
    m = A.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](A, weight, clamp_min, add_bias, dst, m, n, k, *A.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(A_ptr, weight_ptr, clamp_min, add_bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(A_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    add_bias = tl.load(add_bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # A = self.gmhg(A)
    A = acc
    # A = torch.clamp(A, min=self.clamp_min)
    A = tl.maximum(A, clamp_min)
    # A = self.activation(A)
    A = 2.0 * tl.sigmoid(2.0 * A) - 1.0
    # A = A + self.add_bias
    A = A + add_bias
    tl.store(dst_ptr + idx, A, mask=mask)
