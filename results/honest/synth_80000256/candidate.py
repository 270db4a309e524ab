import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.sigmoid = nn.Sigmoid()
        self.puywf = [1, 2, 3]

    def forward(self, A):
        return fused(A)

def fused(A):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused_kernel[(triton.cdiv(n, 1024),)](A, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(A_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    # A = torch.sigmoid(A) * A
    A = tl.sigmoid(A) * A
    # A = self.sigmoid(A)
    A = tl.sigmoid(A)
    tl.store(dst_ptr + idx, A, mask=mask)
