import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, constant: float):
        super().__init__()
        self.constant = constant

    def forward(self, A):
        return row(A, self.constant)

def row(A, constant):
    A = A.contiguous()
    cols = A.shape[-1]
    dst = A.new_empty(A.shape[:-1])
    row_kernel[(A.numel() // cols,)](A, constant, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(A_ptr, constant, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    A = tl.load(A_ptr + idx, mask=mask, other=0.0)
    # z = A + self.constant
    z = A + constant
    # pe_kor2 = torch.amin(z, dim=-1)
    pe_kor2 = tl.min(tl.where(mask, z, float("inf")), 0)
    # y = torch.sigmoid(pe_kor2) * pe_kor2
    y = tl.sigmoid(pe_kor2) * pe_kor2
    tl.store(dst_ptr + tl.program_id(0), y)
