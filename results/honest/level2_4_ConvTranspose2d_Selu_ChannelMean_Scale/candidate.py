import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, padding, scale):
        super().__init__()
        self.upconv = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, padding=padding)
        self.selu = nn.SELU()
        self.scale = scale

    def forward(self, x):
        x = F.conv_transpose2d(x, self.upconv.weight, None, self.upconv.stride, self.upconv.padding, self.upconv.output_padding, self.upconv.groups, self.upconv.dilation)
        return sweep(x, self.upconv.bias, self.scale)

def sweep(x, bias, scale):
    x = x.contiguous()
    inner = x[0, 0].numel()
    cols = x.shape[1]
    dst = x.new_empty(x.shape[:1] + (1,) + x.shape[2:])
    width = min(64, triton.next_power_of_2(inner))
    grid = (x.numel() // (cols * inner), triton.cdiv(inner, width))
    sweep_kernel[grid](x, bias, scale, dst, cols, inner, x[0, 0].numel(), bias.numel(), BR=2048 // width, BI=width)
    return dst

@triton.jit
def sweep_kernel(x_ptr, bias_ptr, scale, dst_ptr, cols, inner, inner2, bias_size, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    s = tl.full((BR, BI), 0.0, tl.float32)
    # x = torch.mean(x, dim=1, keepdim=True)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        x = tl.load(x_ptr + idx, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + idx // inner2 % bias_size, mask=mask, other=0.0)
        # x = self.upconv(x)
        x = x + bias
        # x = self.selu(x)
        x = 1.05070099 * tl.where(x > 0.0, x, 1.67326324 * (tl.exp(tl.minimum(x, 0.0)) - 1.0))
        s += tl.where(mask, x, 0.0)
    x = tl.sum(s, 0)[None, :] / cols
    # x = x * self.scale
    x = x * scale
    tl.store(dst_ptr + tl.program_id(0) * inner + lane, x, mask=lane < inner)
