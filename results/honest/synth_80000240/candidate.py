import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

import math

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.c0 = 1.5
        self.head = nn.GroupNorm(1, 8)
        self.scale = 2.0

    def forward(self, x):
        return fused(x, self.c0, math.sqrt(self.scale))

def fused(x, c0, scale):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, c0, scale, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, c0, scale, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    # x = torch.rsqrt(x.abs() + self.c0)
    u = tl.abs(x) + c0
    x = 1.0 / tl.sqrt(u)
    # x = x / math.sqrt(self.scale)
    x = x / scale
    tl.store(dst_ptr + idx, x, mask=mask)
