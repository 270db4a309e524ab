import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, level_shape):
        super().__init__()
        self.level = nn.Parameter(torch.randn(level_shape))

    def forward(self, x):
        return row(x, self.level)

def row(x, level):
    x = x.contiguous()
    cols = x[0, 0].numel()
    dst = x.new_empty(x.shape[:2])
    row_kernel[(x.numel() // cols,)](x, level, dst, cols, level.numel(), BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, level_ptr, dst_ptr, cols, level_size, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    level = tl.load(level_ptr + tl.program_id(0) % level_size)
    # x = x - self.level
    x = x - level
    # x = torch.square(x)
    x = x * x
    # x = torch.mean(x, dim=(2, 3))
    x = tl.sum(tl.where(mask, x, 0.0), 0) / cols
    tl.store(dst_ptr + tl.program_id(0), x)
