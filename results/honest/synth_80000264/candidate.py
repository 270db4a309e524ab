import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, in_channels, pe_ra, kernel_size, num_heads, embedding):
        super().__init__()
        self.gwsy = nn.Conv2d(in_channels, pe_ra, kernel_size)
        self.extra = nn.Linear(in_features=4, out_features=8, bias=False)
        self.embedding = embedding

    def forward(self, x):
        x = F.conv2d(x, self.gwsy.weight, None, self.gwsy.stride, self.gwsy.padding, self.gwsy.dilation, self.gwsy.groups)
        return row(x, self.gwsy.bias, self.embedding)

def row(x, bias, embedding):
    x = x.contiguous()
    cols = x[0, 0].numel()
    dst = x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2))
    row_kernel[(x.numel() // cols,)](x, bias, embedding, dst, cols, bias.numel(), BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, bias_ptr, embedding, dst_ptr, cols, bias_size, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + tl.program_id(0) % bias_size)
    # x = self.gwsy(x)
    x = x + bias
    # x = torch.sum(x, dim=(2, 3), keepdim=True)
    x = tl.sum(tl.where(mask, x, 0.0), 0)
    # x = x / 2
    x = x / 2
    # x = x - self.embedding
    x = x - embedding
    tl.store(dst_ptr + tl.program_id(0), x)
