import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, padding="same")
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        x = F.conv1d(x, self.conv.weight, None, self.conv.stride, self.conv.padding, self.conv.dilation, self.conv.groups)
        x = norm(x, self.conv.bias, self.group_norm.eps, self.group_norm.weight, self.group_norm.bias, self.group_norm.num_groups)
        return row(x)

def norm(x, bias, eps, weight, bias2, groups):
    x = x.contiguous()
    cols = x[0].numel() // groups
    dst = torch.empty_like(x)
    norm_kernel[(x.numel() // cols,)](x, bias, eps, weight, bias2, dst, cols, x[0, 0].numel(), bias.numel(), weight.numel(), bias2.numel(), BLOCK=1024)
    return dst

@triton.jit
def norm_kernel(x_ptr, bias_ptr, eps, weight_ptr, bias2_ptr, dst_ptr, cols, inner, bias_size, weight_size, bias2_size, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask, other=0.0)
        x = x + bias
        total += x
        square += x * x
    mean = tl.sum(total, 0) / cols
    rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + idx // inner % weight_size, mask=mask, other=0.0)
        bias2 = tl.load(bias2_ptr + idx // inner % bias2_size, mask=mask, other=0.0)
        # x = self.conv(x)
        x = x + bias
        # x = self.group_norm(x)
        x = (x - mean) * rstd * weight + bias2
        # x = F.hardswish(x)
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
        tl.store(dst_ptr + idx, x, mask=mask)

def row(x):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = x.new_empty(x.shape[:-1])
    row_kernel[(x.numel() // cols,)](x, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # x = torch.amax(x, dim=-1)
    x = tl.max(tl.where(mask, x, float("-inf")), 0)
    tl.store(dst_ptr + tl.program_id(0), x)
