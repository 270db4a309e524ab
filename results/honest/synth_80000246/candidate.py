import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, min_value, bias, gelu, min_ks, weight_shape, pool_size, add_value, min_stride=2, dim=(0, 0), dilation=0.1):
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv3d(min_value, gelu, min_ks, stride=min_stride)
        self.min_norm = nn.BatchNorm3d(gelu)
        self.post_post = (2, 2)
        self.offset = 3
        self.fc1 = nn.BatchNorm2d(num_features=pool_size, eps=1e-5, momentum=0.1)
        self.ln = nn.Sigmoid()
        self.gain = nn.Parameter(torch.randn(weight_shape) / 4 ** 0.5)
        self.divisor = nn.MaxPool3d(pool_size)
        self.add_bias = nn.Parameter(torch.zeros(add_value) + 0.5)

    def forward(self, A):
        A = F.conv3d(A, self.conv.weight, None, self.conv.stride, self.conv.padding, self.conv.dilation, self.conv.groups)
        var, mu = torch.var_mean(A, dim=[0, 2, 3, 4], correction=0, keepdim=True)
        A = fused(A, mu, var, self.min_norm.eps, self.min_norm.weight, self.min_norm.bias, self.offset, self.gain)
        A = self.divisor(A)
        return fused2(A, self.add_bias)

def fused(A, mu, var, eps, weight, bias, offset, gain):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused_kernel[(triton.cdiv(n, 1024),)](A, mu, var, eps, weight, bias, offset, gain, dst, n, A[0, 0].numel(), mu.numel(), var.numel(), weight.numel(), bias.numel(), gain.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(A_ptr, mu_ptr, var_ptr, eps, weight_ptr, bias_ptr, offset, gain_ptr, dst_ptr, n, inner, mu_size, var_size, weight_size, bias_size, gain_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    mu = tl.load(mu_ptr + idx // inner % mu_size, mask=mask)
    var = tl.load(var_ptr + idx // inner % var_size, mask=mask)
    weight = tl.load(weight_ptr + idx // inner % weight_size, mask=mask)
    bias = tl.load(bias_ptr + idx // inner % bias_size, mask=mask)
    gain = tl.load(gain_ptr + idx // inner % gain_size, mask=mask)
    # A = self.min_norm(A)
    A = (A - mu) / tl.sqrt(var + eps) * weight + bias
    # A = F.tanh(A)
    A = 2.0 * tl.sigmoid(2.0 * A) - 1.0
    # A = A - self.offset
    A = A - offset
    # A = self.ln(A)
    A = tl.sigmoid(A)
    # A = A * self.gain
    A = A * gain
    tl.store(dst_ptr + idx, A, mask=mask)

def fused2(A, add_bias):
    A = A.contiguous()
    n = A.numel()
    dst = torch.empty_like(A)
    fused2_kernel[(triton.cdiv(n, 1024),)](A, add_bias, dst, n, A[0, 0].numel(), add_bias.numel(), BLOCK=1024)
    return dst

@triton.jit
def fused2_kernel(A_ptr, add_bias_ptr, dst_ptr, n, inner, add_bias_size, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    A = tl.load(A_ptr + idx, mask=mask)
    add_bias = tl.load(add_bias_ptr + idx // inner % add_bias_size, mask=mask)
    # A = A + self.add_bias
    A = A + add_bias
    tl.store(dst_ptr + idx, A, mask=mask)
