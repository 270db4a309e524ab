import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, hidden_size: tuple):
        super().__init__()
        self.state = None
        self.attn = nn.Conv3d(8, 2, (2, 2, 2), stride=1, padding=1, dilation=1, groups=1, bias=False)

    def forward(self, x, s):
        return fused(x, s)

def fused(x, s):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, s, dst, n, BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, s, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    # x = 3 * x - 0.25
    x = 3 * x - 0.25
    # features = s + x
    features = s + x
    tl.store(dst_ptr + idx, features, mask=mask)
