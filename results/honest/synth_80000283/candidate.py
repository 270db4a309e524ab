import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        self.conv2 = nn.Upsample(scale_factor=2, mode='nearest')
        self.eps = eps
        self.activation = nn.Mish()

    def forward(self, x):
        return row(x, self.eps)

def row(x, eps):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = torch.empty_like(x)
    row_kernel[(x.numel() // cols,)](x, eps, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, eps, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    # tem = x ** 2
    tem = x * x
    # tem = torch.mean(tem, dim=2, keepdim=True)
    tem = tl.sum(tl.where(mask, tem, 0.0), 0) / cols
    # tem = x / torch.sqrt(tem + self.eps)
    u = tem + eps
    tem = x / tl.sqrt(u)
    # x = self.activation(tem)
    e = tl.exp(tl.minimum(tem, 20.0))
    x = tem * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    tl.store(dst_ptr + idx, x, mask=mask)
