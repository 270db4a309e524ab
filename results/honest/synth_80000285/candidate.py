import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, groups=False):
        super().__init__()
        self.groups = groups
        self.alt = nn.Mish()

    def forward(self, x):
        return row(x)

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
    # x = F.log_softmax(x, dim=-1)
    m = tl.max(tl.where(mask, x, float("-inf")), 0)
    x = x - m
    x = x - tl.log(tl.sum(tl.where(mask, tl.exp(x), 0.0), 0))
    # x = self.alt(x)
    e = tl.exp(tl.minimum(x, 20.0))
    x = x * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    # x = F.hardswish(x)
    x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
    tl.store(dst_ptr + idx, x, mask=mask)
