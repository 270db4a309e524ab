import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, num_classes: int=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.mish = nn.Mish()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.head = nn.Linear(16 * 8 * 8, num_classes)

    def forward(self, x):
        x = F.conv2d(x, self.conv1.weight, None, self.conv1.stride, self.conv1.padding, self.conv1.dilation, self.conv1.groups)
        x = fused(x, self.conv1.bias)
        x = self.pool(x)
        x = F.conv2d(x, self.conv2.weight, None, self.conv2.stride, self.conv2.padding, self.conv2.dilation, self.conv2.groups)
        x = fused(x, self.conv2.bias)
        x = self.pool(x)
        x = torch.flatten(x, 1)
        x = matmul(x, self.head.weight.t(), self.head.bias)
        return row(x)

def fused(x, bias):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, bias, dst, n, x[0, 0].numel(), bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, bias_ptr, dst_ptr, n, inner, bias_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    # x = self.conv1(x)
    x = x + bias
    # x = self.mish(x)
    e = tl.exp(tl.minimum(x, 20.0))
    x = x * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    tl.store(dst_ptr + idx, x, mask=mask)

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
    # x = self.head(x)
    x = acc + bias
    tl.store(dst_ptr + idx, x, mask=mask)

def row(x):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # x = torch.log_softmax(x, dim=1)
    m = tl.max(tl.where(mask, x, float("-inf")), 0)
    x = x - m
    x = x - tl.log(tl.sum(tl.where(mask, tl.exp(x), 0.0), 0))
    tl.store(dst_ptr + idx, x, mask=mask)
