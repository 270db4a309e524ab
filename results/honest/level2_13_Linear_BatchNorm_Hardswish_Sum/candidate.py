import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)
        self.act = nn.Hardswish()

    def forward(self, x):
        x = matmul(x, self.gemm.weight.t(), self.gemm.bias)
        var, mu = torch.var_mean(x, dim=[0], correction=0, keepdim=True)
        x = fused(x, mu, var, self.bn.eps, self.bn.weight, self.bn.bias)
        return row(x)

def matmul(x, weight, bias):
    k, n = weight.shape[-2:]
    dst = x.new_empty(*x.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    x = x.contiguous().reshape(len(weight), -1, k)
    m = x.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](x, weight, bias, dst, m, n, k, *x.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(x_ptr, weight_ptr, bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(x_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # x = self.gemm(x)
    x = acc + bias
    tl.store(dst_ptr + idx, x, mask=mask)

def fused(x, mu, var, eps, weight, bias):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, mu, var, eps, weight, bias, dst, n, mu.numel(), var.numel(), weight.numel(), bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, mu_ptr, var_ptr, eps, weight_ptr, bias_ptr, dst_ptr, n, mu_size, var_size, weight_size, bias_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    mu = tl.load(mu_ptr + idx % mu_size, mask=mask)
    var = tl.load(var_ptr + idx % var_size, mask=mask)
    weight = tl.load(weight_ptr + idx % weight_size, mask=mask)
    bias = tl.load(bias_ptr + idx % bias_size, mask=mask)
    # x = self.bn(x)
    x = (x - mu) / tl.sqrt(var + eps) * weight + bias
    # x = self.act(x)
    x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
    tl.store(dst_ptr + idx, x, mask=mask)

def row(x):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = x.new_empty(x.shape[:-1] + (1,))
    row_kernel[(x.numel() // cols,)](x, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # x = torch.sum(x, dim=1, keepdim=True)
    x = tl.sum(tl.where(mask, x, 0.0), 0)
    tl.store(dst_ptr + tl.program_id(0), x)
