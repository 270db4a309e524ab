import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, dim: int, subtract_value: float):
        super().__init__()
        self.subtract = nn.Parameter(torch.zeros((dim,)))
        self.block = nn.LayerNorm(normalized_shape=dim)
        self.subtract_value = subtract_value
        self.act = nn.Softplus()
        self.ka_post_ra = nn.Flatten(start_dim=1)

    def forward(self, x):
        return fused(x, self.subtract, self.subtract_value)

def fused(x, subtract, subtract_value):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, subtract, subtract_value, dst, n, subtract.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, subtract_ptr, subtract_value, dst_ptr, n, subtract_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    subtract = tl.load(subtract_ptr + idx % subtract_size, mask=mask)
    # fins = self.act(F.softplus(x) - self.subtract - self.subtract_value)
    u = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))) - subtract - subtract_value
    fins = tl.where(u > 20.0, u, tl.log(1.0 + tl.exp(tl.minimum(u, 20.0))))
    tl.store(dst_ptr + idx, fins, mask=mask)
