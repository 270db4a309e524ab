import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bits_per_nat = 1.4426950408889634

    def forward(self, logits):
        return row(logits, self.bits_per_nat)

def row(logits, bits_per_nat):
    logits = logits.contiguous()
    cols = logits.shape[-1]
    dst = torch.empty_like(logits)
    row_kernel[(logits.numel() // cols,)](logits, bits_per_nat, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(logits_ptr, bits_per_nat, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    logits = tl.load(logits_ptr + idx, mask=mask, other=0.0)
    # logits = F.log_softmax(logits, dim=1)
    m = tl.max(tl.where(mask, logits, float("-inf")), 0)
    logits = logits - m
    logits = logits - tl.log(tl.sum(tl.where(mask, tl.exp(logits), 0.0), 0))
    # logits = logits * -self.bits_per_nat
    logits = logits * -bits_per_nat
    tl.store(dst_ptr + idx, logits, mask=mask)
