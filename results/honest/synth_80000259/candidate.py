import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, gugocidens: float, tem_pre_sub: bool, alpha: float, hardtanh1: bool=None):
        super().__init__()
        self.hardtanh1 = hardtanh1
        self.tem_pre_sub = tem_pre_sub
        self.kuwosegat = nn.GELU()
        self.gugocidens = gugocidens
        self.dropout = nn.Dropout(p=0.3)
        self.both_soft2_1 = nn.Upsample(scale_factor=3, mode='nearest')
        self.alpha = alpha

    def forward(self, A):
        return sweep(A, self.alpha)

def sweep(A, alpha):
    A = A.contiguous()
    inner = A[0].numel()
    cols = A.shape[0]
    dst = torch.empty_like(A)
    width = min(64, triton.next_power_of_2(inner))
    grid = (A.numel() // (cols * inner), triton.cdiv(inner, width))
    sweep_kernel[grid](A, alpha, dst, cols, inner, BR=2048 // width, BI=width)
    return dst

@triton.jit
def sweep_kernel(A_ptr, alpha, dst_ptr, cols, inner, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    s = tl.full((BR, BI), 0.0, tl.float32)
    # A = F.normalize(A, dim=0)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        A = tl.load(A_ptr + idx, mask=mask, other=0.0)
        # A = F.gelu(A)
        A = 0.5 * A * (1.0 + tl.erf(A * 0.70710678))
        # A = self.kuwosegat(A)
        A = 0.5 * A * (1.0 + tl.erf(A * 0.70710678))
        s += tl.where(mask, A * A, 0.0)
    all = tl.maximum(tl.sqrt(tl.sum(s, 0)[None, :]), 1e-12)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        A = tl.load(A_ptr + idx, mask=mask, other=0.0)
        # A = F.gelu(A)
        A = 0.5 * A * (1.0 + tl.erf(A * 0.70710678))
        # A = self.kuwosegat(A)
        A = 0.5 * A * (1.0 + tl.erf(A * 0.70710678))
        A = A / all
        # A = F.celu(A, alpha=self.alpha)
        A = tl.where(A > 0.0, A, alpha * (tl.exp(tl.minimum(A, 0.0) / alpha) - 1.0))
        tl.store(dst_ptr + idx, A, mask=mask)
