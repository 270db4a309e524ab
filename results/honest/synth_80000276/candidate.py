import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, groups: int=8):
        super().__init__()
        self.groups = groups

    def forward(self, A, B):
        return matmul(A, B)

def matmul(A, B):
    k, n = B.shape[-2:]
    dst = A.new_empty(*A.shape[:-1], n)
    B = B.mT.contiguous().mT.reshape(-1, k, n)
    A = A.contiguous().reshape(len(B), -1, k)
    m = A.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(B))
    matmul_kernel[grid](A, B, dst, m, n, k, *A.stride(), *B.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(A_ptr, B_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(A_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(B_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    # A = torch.matmul(A, B)
    A = acc
    # A = torch.relu(A)
    A = tl.maximum(A, 0.0)
    tl.store(dst_ptr + idx, A, mask=mask)
