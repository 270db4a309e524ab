import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, shift_shape, da_mul):
        super().__init__()
        self.gro = nn.Parameter(torch.randn(shift_shape))
        self.da_mul = da_mul
        self.bias = nn.Parameter(torch.tensor(1.5))
        self.pool = nn.Linear(in_features=4, out_features=2, bias=False)

    def forward(self, x):
        return row(x, self.gro, self.bias)

def row(x, gro, bias):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = x.new_empty(x.shape[:-1] + (1,))
    row_kernel[(x.numel() // cols,)](x, gro, bias, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, gro_ptr, bias_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    gro = tl.load(gro_ptr + offs, mask=mask, other=0.0)
    bias = tl.load(bias_ptr)
    # x = x / 2.0
    x = x / 2.0
    # x = x.tanh()
    x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    # x = 2.0 * x
    x = 2.0 * x
    # x = x + self.gro
    x = x + gro
    # x = torch.amin(x, dim=-1, keepdim=True)
    x = tl.min(tl.where(mask, x, float("inf")), 0)
    # x = torch.sigmoid(x)
    x = tl.sigmoid(x)
    # x = x * self.bias
    x = x * bias
    tl.store(dst_ptr + tl.program_id(0), x)
