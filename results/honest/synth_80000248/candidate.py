import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, batch_size: int):
        super().__init__()
        self.are = nn.Parameter(torch.randn(batch_size))
        self.act = nn.GELU()
        self.conv1 = nn.Linear(batch_size, out_features=batch_size, bias=False)

    def forward(self, iuu):
        return fused(self.are, iuu)

def fused(are, iuu):
    iuu = iuu.contiguous()
    n = iuu.numel()
    dst = torch.empty_like(iuu)
    fused_kernel[(triton.cdiv(n, 1024),)](are, iuu, dst, n, iuu[0].numel(), BLOCK=1024)
    return dst

@triton.jit
def fused_kernel(are_ptr, iuu_ptr, dst_ptr, n, inner, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    are = tl.load(are_ptr + idx // inner, mask=mask)
    iuu = tl.load(iuu_ptr + idx, mask=mask)
    # iuu = torch.matmul(torch.diag(self.are), iuu)
    iuu = are * iuu
    # y = self.act(iuu)
    y = 0.5 * iuu * (1.0 + tl.erf(iuu * 0.70710678))
    # da_gam = y / 0.7
    da_gam = y / 0.7
    # batch_hidden = F.softplus(da_gam)
    batch_hidden = tl.where(da_gam > 20.0, da_gam, tl.log(1.0 + tl.exp(tl.minimum(da_gam, 20.0))))
    tl.store(dst_ptr + idx, batch_hidden, mask=mask)
