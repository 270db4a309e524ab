import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, temperature: float, clamp_min: float, ncdxxrlofbxa: bool=None, axis: float='mean'):
        super().__init__()
        self.temperature = temperature
        self.operation_before2 = nn.ReLU()
        self.clamp_min = clamp_min
        self.axis = axis

    def forward(self, x, factor):
        return row(x, factor, self.clamp_min)

def row(x, factor, clamp_min):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = x.new_empty(x.shape[:-1])
    row_kernel[(x.numel() // cols,)](x, factor, clamp_min, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, factor, clamp_min, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # x = x / factor
    x = x / factor
    # x = torch.amax(x, dim=-1)
    x = tl.max(tl.where(mask, x, float("-inf")), 0)
    # x = torch.clamp(self.operation_before2(x), min=self.clamp_min)
    x = tl.maximum(tl.maximum(x, 0.0), clamp_min)
    tl.store(dst_ptr + tl.program_id(0), x)
