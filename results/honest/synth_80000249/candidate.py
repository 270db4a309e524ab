import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, planes0: int, softmax: bool, tiketeco: int, operation_a2: int, gelu: tuple):
        super().__init__()
        self.conv2d = nn.Conv2d(planes0, planes0, tiketeco, dilation=operation_a2, groups=1, bias=True)
        self.uiwgggzrx = nn.Parameter(torch.randn(gelu))

    def forward(self, inp):
        inp = F.conv2d(inp, self.conv2d.weight, None, self.conv2d.stride, self.conv2d.padding, self.conv2d.dilation, self.conv2d.groups)
        return sweep(inp, self.conv2d.bias, self.uiwgggzrx)

def sweep(inp, bias, uiwgggzrx):
    inp = inp.contiguous()
    inner = inp[0, 0].numel()
    cols = inp.shape[1]
    dst = inp.new_empty(inp.shape[:1] + (1,) + inp.shape[2:])
    width = min(64, triton.next_power_of_2(inner))
    grid = (inp.numel() // (cols * inner), triton.cdiv(inner, width))
    sweep_kernel[grid](inp, bias, uiwgggzrx, dst, cols, inner, inp[0, 0].numel(), bias.numel(), uiwgggzrx.numel(), BR=2048 // width, BI=width)
    return dst

@triton.jit
def sweep_kernel(inp_ptr, bias_ptr, uiwgggzrx_ptr, dst_ptr, cols, inner, inner2, bias_size, uiwgggzrx_size, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    s = tl.full((BR, BI), 0.0, tl.float32)
    # inp = inp.sum(dim=1, keepdim=True)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        inp = tl.load(inp_ptr + idx, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + idx // inner2 % bias_size, mask=mask, other=0.0)
        uiwgggzrx = tl.load(uiwgggzrx_ptr + idx // inner2 % uiwgggzrx_size, mask=mask, other=0.0)
        # inp = self.conv2d(inp)
        inp = inp + bias
        # inp = inp + self.uiwgggzrx
        inp = inp + uiwgggzrx
        s += tl.where(mask, inp, 0.0)
    inp = tl.sum(s, 0)[None, :]
    tl.store(dst_ptr + tl.program_id(0) * inner + lane, inp, mask=lane < inner)
