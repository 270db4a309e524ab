import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

class ModelNew(nn.Module):
    def __init__(self, soft, soft_classes, jifusobuns):
        super().__init__()
        self.head = nn.LSTM(soft_classes, 4, num_layers=1, batch_first=True)
        self.tem_wei = nn.Sigmoid()
        self.soft_up = nn.Linear(in_features=soft, out_features=soft_classes, bias=False)
        self.ibhkzuaiazg0 = nn.Upsample(scale_factor=2, mode='nearest')
        self.soft_margin = nn.Parameter(torch.tensor(2.0))

    def forward(self, feats, target):
        features = matmul(feats, target)
        return matmul2(features, self.soft_up.weight.t(), self.soft_margin)

def matmul(feats, target):
    k, n = target.shape[-2:]
    dst = feats.new_empty(*feats.shape[:-1], n)
    target = target.mT.contiguous().mT.reshape(-1, k, n)
    feats = feats.contiguous().reshape(len(target), -1, k)
    m = feats.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(target))
    matmul_kernel[grid](feats, target, dst, m, n, k, *feats.stride(), *target.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul_kernel(feats_ptr, target_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(feats_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(target_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    # feats = torch.matmul(feats, target)
    feats = acc
    # feats = self.tem_wei(feats)
    feats = tl.sigmoid(feats)
    # features = F.softplus(feats)
    features = tl.where(feats > 20.0, feats, tl.log(1.0 + tl.exp(tl.minimum(feats, 20.0))))
    tl.store(dst_ptr + idx, features, mask=mask)

def matmul2(features, weight, soft_margin):
    k, n = weight.shape[-2:]
    dst = features.new_empty(*features.shape[:-1], n)
    weight = weight.mT.contiguous().mT.reshape(-1, k, n)
    features = features.contiguous().reshape(len(weight), -1, k)
    m = features.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len(weight))
    matmul2_kernel[grid](features, weight, soft_margin, dst, m, n, k, *features.stride(), *weight.stride(), BM=128, BN=64, BK=32)
    return dst

@triton.jit
def matmul2_kernel(features_ptr, weight_ptr, soft_margin_ptr, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load(features_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    soft_margin = tl.load(soft_margin_ptr)
    # features = self.soft_up(features)
    features = acc
    # feats = features - self.soft_margin
    feats = features - soft_margin
    tl.store(dst_ptr + idx, feats, mask=mask)
