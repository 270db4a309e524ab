import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.score1 = nn.Linear(features, hidden)
        self.score2 = nn.Linear(hidden, 1, bias=False)

    def forward(self, sequence):
        scores = matmul(sequence, self.score1.weight.t(), self.score1.bias)
        scores = matmul2(scores, self.score2.weight.t())
        weights = torch.softmax(scores, dim=1)
        return sweep(sequence, weights)

def matmul(sequence, weight, bias):
    k, n = weight.shape[-2:]
    dst = sequence.new_empty(*sequence.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    sequence = sequence.contiguous().reshape(len(weight), -1, k)
    m = sequence.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul_kernel[grid](sequence, weight, bias, dst, m, n, k, *sequence.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(sequence_ptr, weight_ptr, bias_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(sequence_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    # scores = self.score1(sequence)
    scores = acc + bias
    # scores = torch.tanh(scores)
    scores = 2.0 * tl.sigmoid(2.0 * scores) - 1.0
    tl.store(dst_ptr + idx, scores, mask=mask)

def matmul2(scores, weight):
    k, n = weight.shape[-2:]
    dst = scores.new_empty(*scores.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    scores = scores.contiguous().reshape(len(weight), -1, k)
    m = scores.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul2_kernel[grid](scores, weight, dst, m, n, k, *scores.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul2_kernel(scores_ptr, weight_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(scores_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    # scores = self.score2(scores)
    scores = acc
    tl.store(dst_ptr + idx, scores, mask=mask)

def sweep(sequence, weights):
    sequence = sequence.contiguous()
    inner = sequence[0, 0].numel()
    cols = sequence.shape[1]
    dst = sequence.new_empty(sequence.shape[:1] + sequence.shape[2:])
    width = min(64, triton.next_power_of_2(inner))
    grid = (sequence.numel() // (cols * inner), triton.cdiv(inner, width))
    sweep_kernel[grid](sequence, weights, dst, cols, inner, sequence[0, 0].numel(), BR=2048 // width, BI=width)
    return dst

@triton.jit
def sweep_kernel(sequence_ptr, weights_ptr, dst_ptr, cols, inner, inner2, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    s = tl.full((BR, BI), 0.0, tl.float32)
    # sequence = torch.sum(pooled, dim=1)
    for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner
        sequence = tl.load(sequence_ptr + idx, mask=mask, other=0.0)
        weights = tl.load(weights_ptr + idx // inner2, mask=mask, other=0.0)
        # pooled = sequence * weights
        pooled = sequence * weights
        s += tl.where(mask, pooled, 0.0)
    sequence = tl.sum(s, 0)[None, :]
    tl.store(dst_ptr + tl.program_id(0) * inner + lane, sequence, mask=lane < inner)
