import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, scale: float, eps_value: int=1e-05, stride: str=(1, 1)):
        super().__init__()
        self.scale = scale
        self.eps_value = eps_value

    def forward(self, x, act):
        loss = loss_kernel(x, act)
        return loss * self.scale

def loss_kernel(x, act):
    x = x.contiguous()
    act = act.contiguous()
    n = x.numel()
    dst = x.new_empty(triton.cdiv(n, 1024))
    loss_kernel_kernel[(triton.cdiv(n, 1024),)](x, act, dst, n, BLOCK=1024)
    return dst.sum() / n

@triton.jit
def loss_kernel_kernel(x_ptr, act_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    x = tl.load(x_ptr + idx, mask=mask)
    act = tl.load(act_ptr + idx, mask=mask)
    # loss = (x - act) ** 2
    u = x - act
    loss = u * u
    # loss = torch.mean(loss)
    tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, loss, 0.0), 0))
