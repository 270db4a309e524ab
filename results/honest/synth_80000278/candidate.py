import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, sub1=0.1, linear=True):
        super().__init__()
        self.proj = nn.LayerNorm([2, 3])
        self.head = nn.LayerNorm(8)
        self.sub1 = sub1

    def forward(self, A):
        return row(A)

def row(A):
    A = A.contiguous()
    cols = A.shape[-1]
    dst = A.new_empty(A.shape[:-1] + (1,))
    row_kernel[(A.numel() // cols,)](A, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(A_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    A = tl.load(A_ptr + idx, mask=mask, other=0.0)
    # A = A.relu()
    A = tl.maximum(A, 0.0)
    # A = A * 3.0
    A = A * 3.0
    # A = torch.nn.functional.hardswish(A)
    A = A * tl.minimum(tl.maximum(A + 3.0, 0.0), 6.0) / 6.0
    # A = torch.logsumexp(A, dim=-1, keepdim=True)
    m = tl.max(tl.where(mask, A, float("-inf")), 0)
    A = m + tl.log(tl.sum(tl.where(mask, tl.exp(A - m), 0.0), 0))
    tl.store(dst_ptr + tl.program_id(0), A)
