import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, weight_shape: tuple, avg_pool: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(weight_shape) + 0.5)
        self.kezit = nn.GroupNorm(1, 4)
        self.bias = nn.Parameter(torch.randn((avg_pool,)))

    def forward(self, x):
        return row(x, self.scale, self.bias)

def row(x, scale, bias):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, scale, bias, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, scale_ptr, bias_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + offs, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + offs, mask=mask, other=0.0)
    # x = x * self.scale + self.bias
    x = x * scale + bias
    # t = torch.norm(x, p=2, dim=1, keepdim=True)
    t = tl.sqrt(tl.sum(tl.where(mask, x * x, 0.0), 0))
    # x = x / t
    x = x / t
    tl.store(dst_ptr + idx, x, mask=mask)
