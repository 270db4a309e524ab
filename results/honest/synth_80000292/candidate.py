import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, channels, add_value, clamp_max, gain_shape, long_module2=1, this_window=1, divide_value=(1, 1)):
        super().__init__()
        self.pool2 = nn.LayerNorm([16, channels])
        self.conv1 = nn.Conv2d(channels, 16, 3, dilation=long_module2, groups=this_window)
        self.add_value = add_value
        self.clamp_max = clamp_max
        self.wans = nn.Parameter(torch.randn(gain_shape))

    def forward(self, A):
        A = F.conv2d(A, self.conv1.weight, None, self.conv1.stride, self.conv1.padding, self.conv1.dilation, self.conv1.groups)
        return fused(A, self.conv1.bias, self.add_value, self.clamp_max, self.wans)

def fused(A, bias, add_value, clamp_max, wans):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused_kernel[(triton.cdiv(n, 1024),)](A, bias, add_value, clamp_max, wans, dst, n, A[0, 0].numel(), bias.numel(), wans.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(A_ptr, bias_ptr, add_value, clamp_max, wans_ptr, dst_ptr, n, inner, bias_size, wans_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    wans = tl.load(wans_ptr + idx // inner % wans_size, mask=mask)
    # A = self.conv1(A)
    A = A + bias
    # A = torch.clamp(A, self.add_value, self.clamp_max)
    A = tl.minimum(tl.maximum(A, add_value), clamp_max)
    # A = A / 0.7
    A = A / 0.7
    # A = A * self.wans
    A = A * wans
    tl.store(dst_ptr + idx, A, mask=mask)
