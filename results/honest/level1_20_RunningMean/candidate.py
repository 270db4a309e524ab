import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, time_steps):
        super().__init__()
        self.register_buffer("counts", torch.arange(1, time_steps + 1).float())

    def forward(self, x):
        return row(x, self.counts)

def row(x, counts):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, counts, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, counts_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + offs, mask=mask, other=0.0)
    # x = torch.cumsum(x, dim=-1)
    x = tl.cumsum(x, 0)
    # x = x / self.counts
    x = x / counts
    tl.store(dst_ptr + idx, x, mask=mask)
