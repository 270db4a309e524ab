import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, groups: int, channels: int):
        super().__init__()
        self.gn = nn.GroupNorm(num_groups=groups, num_channels=channels)

    def forward(self, x):
        return norm(x, self.gn.eps, self.gn.weight, self.gn.bias, self.gn.num_groups)

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
        # x = self.gn(x)
        x = (x - mean) * rstd * weight + bias
        # x = F.hardsigmoid(x)
        x = tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
        tl.store(dst_ptr + idx, x, mask=mask)
