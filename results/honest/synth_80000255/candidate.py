import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, ln0, reduction, tensor_filter, dim=4, conv2=None):
        super().__init__()
        self.ozkoxbst = nn.Conv3d(8, ln0, (3, 3, 3), stride=1, padding=1, dilation=1, groups=1, bias=False)
        self.error = nn.Parameter(torch.zeros((ln0,)) * 0.1)
        self.head = nn.Parameter(torch.ones(16))
        self.adj = nn.Parameter(torch.zeros(tensor_filter) * 0.3)

    def forward(self, x):
        return row(x, self.error, self.adj)

def row(x, error, adj):
    x = x.contiguous()
    cols = x.shape[-1]
    dst = x.new_empty(x.shape[:-1] + (1,))
    row_kernel[(x.numel() // cols,)](x, error, adj, dst, cols, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def row_kernel(x_ptr, error_ptr, adj_ptr, dst_ptr, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    x = tl.load(x_ptr + idx, mask=mask, other=0.0)
    error = tl.load(error_ptr + offs, mask=mask, other=0.0)
    adj = tl.load(adj_ptr + offs, mask=mask, other=0.0)
    # pozat = x + self.error + self.adj
    pozat = x + error + adj
    # pozat = pozat.logsumexp(dim=-1, keepdim=True)
    m = tl.max(tl.where(mask, pozat, float("-inf")), 0)
    pozat = m + tl.log(tl.sum(tl.where(mask, tl.exp(pozat - m), 0.0), 0))
    tl.store(dst_ptr + tl.program_id(0), pozat)
