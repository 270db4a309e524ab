import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, targets):
        x = loss(x, targets)
        return x / 2.8

def loss(x, targets):
    x = x.contiguous()
    n = x.numel()
    dst = x.new_empty(triton.cdiv(n, 1024))
    loss_kernel[(triton.cdiv(n, 1024),)](x, targets, dst, n, targets.numel(), BLOCK=1024)
    return dst.sum() / n

@triton.jit
def loss_kernel(x_ptr, targets_ptr, dst_ptr, n, targets_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    targets = tl.load(targets_ptr + idx % targets_size, mask=mask)
    # x = torch.abs(x * targets - 1.2)
    u = x * targets - 1.2
    x = tl.abs(u)
    # x = torch.mean(x)
    tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, x, 0.0), 0))
