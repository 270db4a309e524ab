import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ChannelGate(nn.Module):
    def __init__(self, channels, reduced):
        super(ChannelGate, self).__init__()
        self.squeeze = nn.Linear(channels, reduced)
        self.excite = nn.Linear(reduced, channels)

    def forward(self, x):
        weights = row(x)
        weights = matmul(weights, self.squeeze.weight.t(), self.squeeze.bias)
        weights = matmul2(weights, self.excite.weight.t(), self.excite.bias)
        return fused(x, weights[:, :, None, None])

class ModelNew(nn.Module):
    def __init__(self, channels, groups, reduced):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, channels)
        self.gate = ChannelGate(channels, reduced)

    def forward(self, x):
        residual = x
        x = self.conv(x)
        x = norm(x, self.norm.eps, self.norm.weight, self.norm.bias, self.norm.num_groups)
        x = self.gate(x)
        return fused2(x, residual)

def row(x):
    x = x.contiguous()
    cols = x[0, 0].numel()
    dst = x.new_empty(x.shape[:2])
    row_kernel[(x.numel() // cols,)](x, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # weights = torch.mean(x, dim=(2, 3))
    weights = tl.sum(tl.where(mask, x, 0.0), 0) / cols
    tl.store(dst_ptr + tl.program_id(0), weights)

def matmul(weights, weight, bias):
    k, n = weight.shape[-2:]
    dst = weights.new_empty(*weights.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    weights = weights.contiguous().reshape(len(weight), -1, k)
    m = weights.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](weights, weight, bias, dst, m, n, k, *weights.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(weights_ptr, weight_ptr, bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(weights_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # weights = self.squeeze(weights)
    weights = acc + bias
    # weights = F.relu(weights)
    weights = tl.maximum(weights, 0.0)
    tl.store(dst_ptr + idx, weights, mask=mask)

def matmul2(weights, weight, bias):
    k, n = weight.shape[-2:]
    dst = weights.new_empty(*weights.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    weights = weights.contiguous().reshape(len(weight), -1, k)
    m = weights.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul2_kernel[grid](weights, weight, bias, dst, m, n, k, *weights.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul2_kernel(weights_ptr, weight_ptr, bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(weights_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # weights = self.excite(weights)
    weights = acc + bias
    # weights = torch.sigmoid(weights)
    weights = tl.sigmoid(weights)
    tl.store(dst_ptr + idx, weights, mask=mask)

def fused(x, weights):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, weights, dst, n, x[0, 0].numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, weights_ptr, dst_ptr, n, inner, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    weights = tl.load(weights_ptr + idx // inner, mask=mask)
    # x = x * weights[:, :, None, None]
    x = x * weights
    tl.store(dst_ptr + idx, x, mask=mask)

def norm(x, eps, weight, bias, groups):
    x = x.contiguous()
    cols = x[0].numel() // groups
    dst = torch.empty_like(x)
    norm_kernel[(x.numel() // cols,)](x, eps, weight, bias, dst, cols, x[0, 0].numel(), weight.numel(), bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def norm_kernel(x_ptr, eps, weight_ptr, bias_ptr, dst_ptr, cols, inner, weight_size, bias_size, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        total += x
        square += x * x
    mean = tl.sum(total, 0) / cols
    rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + idx // inner % weight_size, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask, other=0.0)
        # x = self.norm(x)
        x = (x - mean) * rstd * weight + bias
        # x = F.leaky_relu(x, 0.1)
        x = tl.where(x > 0.0, x, x * 0.1)
        tl.store(dst_ptr + idx, x, mask=mask)

def fused2(x, residual):
    x = x.contiguous()
    residual = residual.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused2_kernel[(triton.cdiv(n, 1024),)](x, residual, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused2_kernel(x_ptr, residual_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    residual = tl.load(residual_ptr + idx, mask=mask)
    # x = x + residual
    x = x + residual
    tl.store(dst_ptr + idx, x, mask=mask)
