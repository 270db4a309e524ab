import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, logits, outcomes):
        return loss(logits, outcomes)

def loss(logits, outcomes):
    logits = logits.contiguous()
    outcomes = outcomes.contiguous()
    n = logits.numel()
    dst = logits.new_empty(triton.cdiv(n, 1024))
    loss_kernel[(triton.cdiv(n, 1024),)](logits, outcomes, dst, n, BLOCK=1024)
    return dst.sum() / n

@triton.jit
def loss_kernel(logits_ptr, outcomes_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    logits = tl.load(logits_ptr + idx, mask=mask)
    outcomes = tl.load(outcomes_ptr + idx, mask=mask)
    # probabilities = torch.sigmoid(logits)
    probabilities = tl.sigmoid(logits)
    # t = (probabilities - outcomes) ** 2
    u = probabilities - outcomes
    t = u * u
    # logits = torch.mean(t)
    tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, t, 0.0), 0))
