import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int, offset_shape: tuple):
        super().__init__()
        self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation)
        self.offset = nn.Parameter(torch.randn(offset_shape))

    def forward(self, x):
        x = F.conv1d(x, self.conv1d.weight, None, self.conv1d.stride, self.conv1d.padding, self.conv1d.dilation, self.conv1d.groups)
        return fused(x, self.conv1d.bias, self.offset)

def fused(x, bias, offset):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, bias, offset, dst, n, x[0, 0].numel(), bias.numel(), offset.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, bias_ptr, offset_ptr, dst_ptr, n, inner, bias_size, offset_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    offset = tl.load(offset_ptr + idx // inner % offset_size, mask=mask)
    # x = self.conv1d(x)
    x = x + bias
    # x = F.gelu(x)
    x = 0.5 * x * (1.0 + tl.erf(x * 0.70710678))
    # x = x + self.offset
    x = x + offset
    # x = F.softplus(x)
    x = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    tl.store(dst_ptr + idx, x, mask=mask)
