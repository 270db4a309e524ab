import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.InstanceNorm2d(channels)

    def forward(self, x):
        residual = x
        x = self.conv(x)
        return norm(x, self.norm.eps, residual, x.shape[1])

def norm(x, eps, residual, groups):
    x = x.contiguous()
    residual = residual.contiguous()
    cols = x[0].numel() // groups
    dst = torch.empty_like(x)
    norm_kernel[(x.numel() // cols,)](x, eps, residual, dst, cols, BLOCK=1024)
    return dst

@triton.jit
def norm_kernel(x_ptr, eps, residual_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        total += x
        square += x * x
    mean = tl.sum(total, 0) / cols
    rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)
    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        residual = tl.load(residual_ptr + idx, mask=mask, other=0.0)
        # x = self.norm(x)
        x = (x - mean) * rstd
        # x = F.silu(x)
        x = x * tl.sigmoid(x)
        # x = x + residual
        x = x + residual
        tl.store(dst_ptr + idx, x, mask=mask)
