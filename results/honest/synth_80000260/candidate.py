import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, ffqjnp: int, hidden_size: int, pe: float, hidden_return_indices: bool=4):
        super().__init__()
        self.hidden_fc_1 = nn.Linear(in_features=ffqjnp, out_features=hidden_size)
        self.divisor = nn.Parameter(torch.ones(4))
        self.hidden_return_indices = hidden_return_indices
        self.off_ka_mul = nn.ELU(alpha=pe)
        self.nonlin = nn.Hardswish()
        self.mikusisat = nn.AvgPool2d(kernel_size=3)

    def forward(self, A):
        A = matmul(A, self.hidden_fc_1.weight.t(), self.hidden_fc_1.bias)
        return self._helper(A)

    def _helper(self, A):
        return fused(A, self.off_ka_mul.alpha)

def matmul(A, weight, bias):
    k, n = weight.shape[-2:]
    dst = A.new_empty(*A.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    A = A.contiguous().reshape(len(weight), -1, k)
    m = A.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](A, weight, bias, dst, m, n, k, *A.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(A_ptr, weight_ptr, bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
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
    bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # A = self.hidden_fc_1(A)
    A = acc + bias
    tl.store(dst_ptr + idx, A, mask=mask)

def fused(A, alpha):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused_kernel[(triton.cdiv(n, 1024),)](A, alpha, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(A_ptr, alpha, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    # A = self.off_ka_mul(A)
    A = tl.where(A > 0.0, A, alpha * (tl.exp(tl.minimum(A, 0.0)) - 1.0))
    # A = self.nonlin(A)
    A = A * tl.minimum(tl.maximum(A + 3.0, 0.0), 6.0) / 6.0
    tl.store(dst_ptr + idx, A, mask=mask)
