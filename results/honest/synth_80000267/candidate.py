import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, min_value: int=1e-05):
        super().__init__()
        self.pool = nn.Parameter(torch.ones(8))

    def forward(self, feats, labels):
        return loss(feats, labels)

def loss(feats, labels):
    feats = feats.contiguous()
    labels = labels.contiguous()
    n = feats.numel()
    dst = feats.new_empty(triton.cdiv(n, 1024))
    loss_kernel[(triton.cdiv(n, 1024),)](feats, labels, dst, n, BLOCK=1024)
    return dst.sum() / n

@triton.jit
def loss_kernel(feats_ptr, labels_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    feats = tl.load(feats_ptr + idx, mask=mask)
    labels = tl.load(labels_ptr + idx, mask=mask)
    # feats = F.mish(feats)
    e = tl.exp(tl.minimum(feats, 20.0))
    feats = feats * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    # t = (feats - labels) ** 2
    u = feats - labels
    t = u * u
    # feats = torch.mean(t)
    tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, t, 0.0), 0))
