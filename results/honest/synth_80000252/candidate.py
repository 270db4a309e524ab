import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, last_then: int, stage_its2: tuple, head: int, bias: float=2):
        super().__init__()
        self.last_gain_1 = nn.Parameter(torch.randn(last_then))
        self.extra_bias = nn.Parameter(torch.ones((head,)))
        self.extra = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return fused(self.last_gain_1, x, self.extra_bias)

def fused(last_gain_1, x, extra_bias):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](last_gain_1, x, extra_bias, dst, n, x[0].numel(), extra_bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(last_gain_1_ptr, x_ptr, extra_bias_ptr, dst_ptr, n, inner, extra_bias_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    last_gain_1 = tl.load(last_gain_1_ptr + idx // inner, mask=mask)
    x = tl.load(x_ptr + idx, mask=mask)
    extra_bias = tl.load(extra_bias_ptr + idx % extra_bias_size, mask=mask)
    # x = torch.matmul(torch.diag(self.last_gain_1), x)
    x = last_gain_1 * x
    # x = torch.exp(x * 0.1)
    u = x * 0.1
    x = tl.exp(u)
    # x = x * torch.tanh(F.softplus(x))
    u = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    x = x * (2.0 * tl.sigmoid(2.0 * u) - 1.0)
    # x = x + self.extra_bias
    x = x + extra_bias
    tl.store(dst_ptr + idx, x, mask=mask)
