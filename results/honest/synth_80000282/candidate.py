import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, da_post: int, ln1: float, ne: float=[1, 2]):
        super().__init__()
        self.relu = nn.BatchNorm2d(num_features=da_post, eps=1e-5, momentum=0.1)
        self.da_post = da_post
        self.ln1 = ln1
        self.config = 1.0 / 7

    def forward(self, feats):
        return row(feats, self.ln1)

def row(feats, ln1):
    feats = feats.contiguous()
    cols = feats.shape[-1]
    dst = feats.new_empty(feats.shape[:-1])
    row_kernel[(feats.numel() // cols,)](feats, ln1, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(feats_ptr, ln1, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    feats = tl.load(feats_ptr + idx, mask=mask, other=0.0)
    # feats = feats.mean(self.da_post)
    feats = tl.sum(tl.where(mask, feats, 0.0), 0) / cols
    # feats = feats / self.ln1
    feats = feats / ln1
    tl.store(dst_ptr + tl.program_id(0), feats)
