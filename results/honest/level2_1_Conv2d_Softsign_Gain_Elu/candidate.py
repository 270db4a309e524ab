import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, gain_shape):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.gain = nn.Parameter(torch.randn(gain_shape))

    def forward(self, x):
        x = F.conv2d(x, self.conv.weight, None, self.conv.stride, self.conv.padding, self.conv.dilation, self.conv.groups)
        return fused(x, self.conv.bias, self.gain)

def fused(x, bias, gain):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, bias, gain, dst, n, x[0, 0].numel(), bias.numel(), gain.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, bias_ptr, gain_ptr, dst_ptr, n, inner, bias_size, gain_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    gain = tl.load(gain_ptr + idx // inner % gain_size, mask=mask)
    # x = self.conv(x)
    x = x + bias
    # x = F.softsign(x)
    x = x / (1.0 + tl.abs(x))
    # x = x * self.gain
    x = x * gain
    # x = F.elu(x)
    x = tl.where(x > 0.0, x, 1.0 * (tl.exp(tl.minimum(x, 0.0)) - 1.0))
    tl.store(dst_ptr + idx, x, mask=mask)
