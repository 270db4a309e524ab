import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, increments):
        increments = fused(increments)
        return torch.cumsum(increments, dim=self.dim)

def fused(increments):
    increments = increments.contiguous()
    n = increments.numel()
    dst = torch.empty_like(increments)
    fused_kernel[(triton.cdiv(n, 1024),)](increments, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(increments_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    increments = tl.load(increments_ptr + idx, mask=mask)
    # increments = torch.tanh(increments)
    increments = 2.0 * tl.sigmoid(2.0 * increments) - 1.0
    tl.store(dst_ptr + idx, increments, mask=mask)
