import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, jatiraru, reduction=1, margin=1, stride=8):
        super().__init__()
        self.sub_reg = nn.Linear(2, 8, bias=False)
        self.margin = margin
        self.ln = nn.LayerNorm(jatiraru)
        self.there = 1.0 / 7
        self.vebokala = nn.Linear(16, jatiraru, bias=False)
        self.ext = nn.Parameter(torch.rand((jatiraru,)))

    def forward(self, A):
        A = row(A, self.ln.eps, self.ln.weight, self.ln.bias, self.ext)
        return A.clone()

def row(A, eps, weight, bias, ext):
    A = A.contiguous()
    cols = A.shape[-1]
    dst = torch.empty_like(A)
    row_kernel[(A.numel() // cols,)](A, eps, weight, bias, ext, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(A_ptr, eps, weight_ptr, bias_ptr, ext_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    A = tl.load(A_ptr + idx, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + offs, mask=mask, other=0.0)
    ext = tl.load(ext_ptr + offs, mask=mask, other=0.0)
    # t = A.mean(dim=1, keepdim=True)
    t = tl.sum(tl.where(mask, A, 0.0), 0) / cols
    # A = A - t
    A = A - t
    # A = self.ln(A)
    m = tl.sum(tl.where(mask, A, 0.0), 0) / cols
    d = tl.where(mask, A - m, 0.0)
    A = d / tl.sqrt(tl.sum(d * d, 0) / cols + eps)
    A = A * weight + bias
    # A = A - self.ext
    A = A - ext
    tl.store(dst_ptr + idx, A, mask=mask)
