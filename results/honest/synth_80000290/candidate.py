import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, hkcmtpjzbx: int, mabatins: int, operation: int, out_off_so0: float, sum_tensor: int, shift: float, mode: float=True):
        super().__init__()
        self.layer_norm = nn.LayerNorm(normalized_shape=operation, eps=out_off_so0)
        self.act = nn.Linear(hkcmtpjzbx, mabatins)
        self.adds_size2 = nn.AvgPool2d(2)
        self.shift = shift
        self.linear2 = nn.Linear(in_features=mabatins, out_features=hkcmtpjzbx, bias=False, device=None)

    def forward(self, x):
        hkcmtpjzbx_skip = x
        x = row(x, self.layer_norm.eps, self.layer_norm.weight, self.layer_norm.bias)
        x = matmul(x, self.act.weight.t(), self.act.bias, self.shift)
        x = matmul2(x, self.linear2.weight.t(), hkcmtpjzbx_skip)
        return row2(x)

def row(x, eps, weight, bias):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, eps, weight, bias, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, eps, weight_ptr, bias_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + offs, mask=mask, other=0.0)
    # x = self.layer_norm(x)
    m = tl.sum(tl.where(mask, x, 0.0), 0) / cols
    d = tl.where(mask, x - m, 0.0)
    x = d / tl.sqrt(tl.sum(d * d, 0) / cols + eps)
    x = x * weight + bias
    tl.store(dst_ptr + idx, x, mask=mask)

def matmul(x, weight, bias, shift):
    k, n = weight.shape[-2:]
    dst = x.new_empty(*x.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    x = x.contiguous().reshape(len(weight), -1, k)
    m = x.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](x, weight, bias, shift, dst, m, n, k, *x.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(x_ptr, weight_ptr, bias_ptr, shift, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
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
    # x = self.act(x)
    x = acc + bias
    # x = x + self.shift
    x = x + shift
    tl.store(dst_ptr + idx, x, mask=mask)

def matmul2(x, weight, hkcmtpjzbx_skip):
    hkcmtpjzbx_skip = hkcmtpjzbx_skip.contiguous()
    k, n = weight.shape[-2:]
    dst = x.new_empty(*x.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    x = x.contiguous().reshape(len(weight), -1, k)
    m = x.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul2_kernel[grid](x, weight, hkcmtpjzbx_skip, dst, m, n, k, *x.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul2_kernel(x_ptr, weight_ptr, hkcmtpjzbx_skip_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
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
    hkcmtpjzbx_skip = tl.load(hkcmtpjzbx_skip_ptr + idx, mask=mask, other=0.0)
    # x = self.linear2(x)
    x = acc
    # x = x + hkcmtpjzbx_skip
    x = x + hkcmtpjzbx_skip
    # x = torch.exp(x * 0.1)
    u = x * 0.1
    x = tl.exp(u)
    tl.store(dst_ptr + idx, x, mask=mask)

def row2(x):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row2_kernel[(x.numel() // cols,)](x, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row2_kernel(x_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # t = torch.sum(x, dim=1, keepdim=True)
    t = tl.sum(tl.where(mask, x, 0.0), 0)
    # x = x / t
    x = x / t
    tl.store(dst_ptr + idx, x, mask=mask)
