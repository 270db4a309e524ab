import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens):
        return row(tokens, self.norm.eps, self.norm.weight, self.norm.bias)

def row(tokens, eps, weight, bias):
    tokens = tokens.contiguous()
    cols = tokens.shape[-1]
    dst = torch.empty_like(tokens)
    row_kernel[(tokens.numel() // cols,)](tokens, eps, weight, bias, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(tokens_ptr, eps, weight_ptr, bias_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    tokens = tl.load(tokens_ptr + idx, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + offs, mask=mask, other=0.0)
    # tokens = self.norm(tokens)
    m = tl.sum(tl.where(mask, tokens, 0.0), 0) / cols
    d = tl.where(mask, tokens - m, 0.0)
    tokens = d / tl.sqrt(tl.sum(d * d, 0) / cols + eps)
    tokens = tokens * weight + bias
    # tokens = F.silu(tokens)
    tokens = tokens * tl.sigmoid(tokens)
    tl.store(dst_ptr + idx, tokens, mask=mask)
