import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(rows))

    def forward(self, x):
        return fused(self.gain, x)

def fused(gain, x):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](gain, x, dst, n, x[0, 0].numel(), gain.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(gain_ptr, x_ptr, dst_ptr, n, inner, gain_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    gain = tl.load(gain_ptr + idx // inner % gain_size, mask=mask)
    x = tl.load(x_ptr + idx, mask=mask)
    # x = torch.diag(self.gain) @ x
    x = gain * x
    # x = torch.relu(x)
    x = tl.maximum(x, 0.0)
    tl.store(dst_ptr + idx, x, mask=mask)
