import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, columns, eps=1e-06):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(columns) + 0.5)
        self.eps = eps

    def forward(self, x):
        return row(x, self.eps, self.gain)

def row(x, eps, gain):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, eps, gain, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, eps, gain_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    gain = tl.load(gain_ptr + offs, mask=mask, other=0.0)
    # t = x * x
    t = x * x
    # t1 = torch.mean(t, dim=-1, keepdim=True)
    t1 = tl.sum(tl.where(mask, t, 0.0), 0) / cols
    # x = x * torch.rsqrt(t1 + self.eps)
    u = t1 + eps
    x = x * (1.0 / tl.sqrt(u))
    # x = x * self.gain
    x = x * gain
    tl.store(dst_ptr + idx, x, mask=mask)
