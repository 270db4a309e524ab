import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, rofirut: float, so_mask: float=1):
        super().__init__()
        self.rofirut = rofirut
        self.alpha = 1.5
        self.so_mask = so_mask

    def forward(self, x, labels):
        return fused(self.rofirut, x, labels)

def fused(rofirut, x, labels):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](rofirut, x, labels, dst, n, labels.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(rofirut, x_ptr, labels_ptr, dst_ptr, n, labels_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    labels = tl.load(labels_ptr + idx % labels_size, mask=mask)
    # x = self.rofirut * F.relu(x) + labels
    x = rofirut * tl.maximum(x, 0.0) + labels
    # x = x * torch.sigmoid(1.702 * x)
    u = 1.702 * x
    x = x * tl.sigmoid(u)
    # x = torch.sin(x)
    x = tl.sin(x)
    tl.store(dst_ptr + idx, x, mask=mask)
