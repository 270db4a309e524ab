import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, iltgot: tuple, channels: int, margin: int, ltuxwgsabe: bool=1):
        super().__init__()
        self.rnn = nn.LSTM(2, 3, num_layers=3, batch_first=True)
        self.size = [1, 2, 3]
        self.hibins = nn.Parameter(torch.ones(iltgot) * 0.1)
        self.random = nn.Parameter(torch.randn((channels, 1, 1)))
        self.proj = nn.ZeroPad2d(1)

    def forward(self, x):
        return fused(x, self.hibins, self.random)

def fused(x, hibins, random):
    x = x.contiguous()
    n = x.numel()
    dst = torch.empty_like(x)
    fused_kernel[(triton.cdiv(n, 1024),)](x, hibins, random, dst, n, x[0, 0].numel(), hibins.numel(), random.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(x_ptr, hibins_ptr, random_ptr, dst_ptr, n, inner, hibins_size, random_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    hibins = tl.load(hibins_ptr + idx // inner % hibins_size, mask=mask)
    random = tl.load(random_ptr + idx // inner % random_size, mask=mask)
    # x = x * self.hibins
    x = x * hibins
    # x = x - self.random
    x = x - random
    tl.store(dst_ptr + idx, x, mask=mask)
