import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, sha_vi_tu: int, dapacu: int, add_bias_shape: tuple):
        super().__init__()
        self.dropout = nn.ZeroPad2d(3)
        self.conv1 = nn.Conv2d(in_channels=sha_vi_tu, out_channels=sha_vi_tu, kernel_size=dapacu, padding=1)
        self.so = nn.Parameter(torch.ones(add_bias_shape) + 0.5)
        self.gujedins = nn.GroupNorm(1, num_channels=3)

    def forward(self, A):
        A = F.conv2d(A, self.conv1.weight, None, self.conv1.stride, self.conv1.padding, self.conv1.dilation, self.conv1.groups)
        return fused(A, self.conv1.bias, self.so)

def fused(A, bias, so):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused_kernel[(triton.cdiv(n, 1024),)](A, bias, so, dst, n, A[0, 0].numel(), bias.numel(), so.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(A_ptr, bias_ptr, so_ptr, dst_ptr, n, inner, bias_size, so_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    so = tl.load(so_ptr + idx // inner % so_size, mask=mask)
    # A = self.conv1(A)
    A = A + bias
    # A = A.sigmoid()
    A = tl.sigmoid(A)
    # A = A * torch.tanh(F.softplus(A))
    u = tl.where(A > 20.0, A, tl.log(1.0 + tl.exp(tl.minimum(A, 20.0))))
    A = A * (2.0 * tl.sigmoid(2.0 * u) - 1.0)
    # logits = A + self.so
    logits = A + so
    tl.store(dst_ptr + idx, logits, mask=mask)
