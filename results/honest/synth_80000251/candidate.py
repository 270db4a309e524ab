import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, ti: int, gro: int, before2: tuple, before2_stride: int, dim: int, multiplier: int, conv: int, fa: tuple, pool_kernel_size: int, zero2: float=False):
        super().__init__()
        self.conv2d = nn.Conv2d(ti, gro, before2, stride=before2_stride, padding=dim, dilation=multiplier, groups=conv)
        self.norm = nn.BatchNorm2d(gro)
        self.add_bias = nn.Parameter(torch.randn(fa))
        self.avgpool = nn.AvgPool2d(pool_kernel_size, stride=pool_kernel_size)

    def forward(self, bias_token1):
        bias_token1 = F.conv2d(bias_token1, self.conv2d.weight, None, self.conv2d.stride, self.conv2d.padding, self.conv2d.dilation, self.conv2d.groups)
        var, mu = torch.var_mean(bias_token1, dim=[0, 2, 3], correction=0, keepdim=True)
        bias_token1 = fused(bias_token1, mu, var, self.norm.eps, self.norm.weight, self.norm.bias, self.add_bias)
        bias_token1 = sweep(bias_token1)
        return self.avgpool(bias_token1)

def fused(bias_token1, mu, var, eps, weight, bias, add_bias):
    bias_token1 = bias_token1.contiguous()
    n = bias_token1.numel()
    dst = torch.empty_like(bias_token1)
    fused_kernel[(triton.cdiv(n, 1024),)](bias_token1, mu, var, eps, weight, bias, add_bias, dst, n, bias_token1[0, 0].numel(), mu.numel(), var.numel(), weight.numel(), bias.numel(), add_bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(bias_token1_ptr, mu_ptr, var_ptr, eps, weight_ptr, bias_ptr, add_bias_ptr, dst_ptr, n, inner, mu_size, var_size, weight_size, bias_size, add_bias_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    bias_token1 = tl.load(bias_token1_ptr + idx, mask=mask)
    mu = tl.load(mu_ptr + idx // inner % mu_size, mask=mask)
    var = tl.load(var_ptr + idx // inner % var_size, mask=mask)
    weight = tl.load(weight_ptr + idx // inner % weight_size, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    add_bias = tl.load(add_bias_ptr + idx // inner % add_bias_size, mask=mask)
    # bias_token1 = self.norm(bias_token1)
    bias_token1 = (bias_token1 - mu) / tl.sqrt(var + eps) * weight + bias
    # bias_token1 = bias_token1 + self.add_bias
    bias_token1 = bias_token1 + add_bias
    tl.store(dst_ptr + idx, bias_token1, mask=mask)

def sweep(bias_token1):
    bias_token1 = bias_token1.contiguous()
    inner = bias_token1[0, 0].numel()
    cols = bias_token1.shape[1]
    dst = bias_token1.new_empty(bias_token1.shape[:1] + (1,) + bias_token1.shape[2:])
    width = min(64, triton.next_power_of_2(inner))
    grid = (bias_token1.numel() // (cols * inner), triton.cdiv(inner, width))
    sweep_kernel[grid](bias_token1, dst, cols, inner, BR=2048 // width, BI=width)
    return dst

@triton.jit
def sweep_kernel(bias_token1_ptr, dst_ptr, cols, inner, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    s = tl.full((BR, BI), 0.0, tl.float32)
    # bias_token1 = bias_token1.sum(dim=1, keepdim=True)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        bias_token1 = tl.load(bias_token1_ptr + idx, mask=mask, other=0.0)
        s += tl.where(mask, bias_token1, 0.0)
    bias_token1 = tl.sum(s, 0)[None, :]
    tl.store(dst_ptr + tl.program_id(0) * inner + lane, bias_token1, mask=lane < inner)
