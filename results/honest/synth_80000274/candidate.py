import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, centre_shape, hardtanh=8, bias=None):
        super().__init__()
        self.nonlin = nn.Tanh()
        self.centre = nn.Parameter(torch.randn(centre_shape) / 4 ** 0.5)

    def forward(self, x):
        return row(x, self.centre)

def row(x, centre):
    x = x.contiguous()
    cols = x[0, 0].numel()
    dst = x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2))
    row_kernel[(x.numel() // cols,)](x, centre, dst, cols, centre.numel(), BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, centre_ptr, dst_ptr, cols, centre_size, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    centre = tl.load(centre_ptr + tl.program_id(0) % centre_size)
    # x = self.nonlin(x) - self.centre
    x = 2.0 * tl.sigmoid(2.0 * x) - 1.0 - centre
    # x = F.mish(x)
    e = tl.exp(tl.minimum(x, 20.0))
    x = x * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    # x = torch.sum(x, dim=[2, 3], keepdim=True)
    x = tl.sum(tl.where(mask, x, 0.0), 0)
    tl.store(dst_ptr + tl.program_id(0), x)
