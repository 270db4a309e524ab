import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, num_heads: float=False):
        super().__init__()
        self.pool = nn.LSTM(3, 3, num_layers=1, batch_first=True)
        self.conv11 = nn.Linear(in_features=16, out_features=16, bias=False)

    def forward(self, inputs, fac):
        t = torch.triu(inputs, diagonal=1)
        return row(t, fac)

def row(t, fac):
    t = t.contiguous()
    fac = fac.contiguous()
    cols = t.shape[-1]
    dst = t.new_empty(t.shape[:-1])
    row_kernel[(t.numel() // cols,)](t, fac, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(t_ptr, fac_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    t = tl.load(t_ptr + idx, mask=mask, other=0.0)
    fac = tl.load(fac_ptr + idx, mask=mask, other=0.0)
    # t1 = t * fac
    t1 = t * fac
    # t2 = torch.sum(t1, dim=1)
    t2 = tl.sum(tl.where(mask, t1, 0.0), 0)
    # t3 = torch.norm(t, dim=1)
    t3 = tl.sqrt(tl.sum(tl.where(mask, t * t, 0.0), 0))
    # t4 = torch.norm(fac, dim=1)
    t4 = tl.sqrt(tl.sum(tl.where(mask, fac * fac, 0.0), 0))
    # inputs = t2 / (t3 * t4).clamp(min=1e-08)
    u = t3 * t4
    inputs = t2 / tl.maximum(u, 1e-08)
    tl.store(dst_ptr + tl.program_id(0), inputs)
