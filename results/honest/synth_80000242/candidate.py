import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, bal: float, shift_shape: tuple, multiplies1: bool=[1, 2], return_indices: str=None):
        super().__init__()
        self.times = nn.ReLU()
        self.shift_extra_bias = nn.Parameter(torch.randn(shift_shape))

    def forward(self, inputs):
        return row(inputs, self.shift_extra_bias)

def row(inputs, shift_extra_bias):
    inputs = inputs.contiguous()
    cols = inputs.shape[-1]
    dst = torch.empty_like(inputs)
    row_kernel[(inputs.numel() // cols,)](inputs, shift_extra_bias, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(inputs_ptr, shift_extra_bias_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    inputs = tl.load(inputs_ptr + idx, mask=mask, other=0.0)
    shift_extra_bias = tl.load(shift_extra_bias_ptr + offs, mask=mask, other=0.0)
    # inputs = self.times(inputs)
    inputs = tl.maximum(inputs, 0.0)
    # inputs = inputs + self.shift_extra_bias
    inputs = inputs + shift_extra_bias
    # inputs = torch.cumsum(inputs, dim=1)
    inputs = tl.cumsum(inputs, 0)
    tl.store(dst_ptr + idx, inputs, mask=mask)
