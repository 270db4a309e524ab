import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, min_val: float, eps: float):
        super().__init__()
        self.min_val = min_val
        self.eps = eps
        self.ln = 0.0

    def forward(self, gam):
        return row(gam, self.min_val, self.eps, self.ln)

def row(gam, min_val, eps, ln):
    gam = gam.contiguous()
    cols = gam.shape[-1]
    dst = torch.empty_like(gam)
    row_kernel[(gam.numel() // cols,)](gam, min_val, eps, ln, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(gam_ptr, min_val, eps, ln, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    gam = tl.load(gam_ptr + idx, mask=mask, other=0.0)
    # gam = torch.clamp(gam, min=self.min_val)
    gam = tl.maximum(gam, min_val)
    # gam = F.gelu(gam, approximate='tanh')
    gam = gam * tl.sigmoid(1.59576912 * (gam + 0.044715 * gam * gam * gam))
    # t = gam ** 2
    t = gam * gam
    # t1 = torch.mean(t, dim=-1, keepdim=True)
    t1 = tl.sum(tl.where(mask, t, 0.0), 0) / cols
    # gam = gam / torch.sqrt(t1 + self.eps)
    u = t1 + eps
    gam = gam / tl.sqrt(u)
    # scores = torch.sigmoid(gam) * gam
    scores = tl.sigmoid(gam) * gam
    # scores = torch.clamp(scores, min=self.ln)
    scores = tl.maximum(scores, ln)
    tl.store(dst_ptr + idx, scores, mask=mask)
