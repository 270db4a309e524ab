"""What the rollout engine puts in place of parts of the modeling code: attention and RMSNorm.

Decoding is bound by memory and by launches. So a Triton kernel reads each cached key and value once, for all query
heads of its group, and only as far as the sequence goes; and RMSNorm is one kernel instead of seven.

In comments: n sequences, T the length of a slot, H query heads, G of them share a key/value head, D the head dimension.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from transformers import AttentionInterface

# Model types of transformers. They call `causal_attention` for plain full attention, their RMSNorm multiplies by its
# weight, their logits are what the head makes of the last hidden states, and no step waits for the GPU. To use another
# one, make sure of these four.
SUPPORTED = ("qwen3", "qwen2", "llama", "mistral", "olmo2", "smollm3")

# ----------------------------------------------------------------------------------------------------------------------
# Attention of one new token to a sequence's cache


@triton.jit
def _attend_kernel(query_ptr, keys_ptr, values_ptr, where_ptr, sums_ptr, stats_ptr, scale, query_row, query_head,
                   cache_slot, cache_head, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr):
    """One part of one sequence's cache, for all G query heads of one key/value head: softmax as far as it goes.

    sums (n, heads, PARTS, G, D): of the values, weighted by exp(score - maximum); stats (n, heads, PARTS, 2, G): the
    maximum, and the sum of the weights. BLOCK_G is at least 16, as tl.dot wants it.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = (tl.load(where_ptr + 2 * row + 1) + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, PARTS), BLOCK_T) * BLOCK_T
    start = part * share
    end = tl.minimum(start + share, length)
    g, d, t = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    query = tl.load(query_ptr + row * query_row + (head * G + g)[:, None] * query_head + d[None, :],
                    mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)  # (G, D)
    cache = tl.load(where_ptr + 2 * row) * cache_slot + head * cache_head
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_T):
        inside = first + t < end
        where = cache + (first + t)[:, None] * D + d[None, :]  # (T, D)
        key = tl.load(keys_ptr + where, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        value = tl.load(values_ptr + where, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (G, T)
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(maximum, tl.max(score, axis=1))
        faded = tl.exp(maximum - higher)
        weights = tl.exp(score - higher[:, None])
        weight = weight * faded + tl.sum(weights, axis=1)
        total = total * faded[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = higher
    out = (row * tl.num_programs(1) + head) * PARTS + part
    tl.store(sums_ptr + (out * G + g)[:, None] * D + d[None, :], total, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + out * 2 * G + g, maximum, mask=g < G)
    tl.store(stats_ptr + out * 2 * G + G + g, weight, mask=g < G)


@triton.jit
def _join_kernel(sums_ptr, stats_ptr, out_ptr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 PARTS: tl.constexpr):
    """Join the parts of one query head: out (n, 1, H, D), the attention's result."""
    group, g = tl.program_id(0), tl.program_id(1)  # group: which sequence and which key/value head
    d, part = tl.arange(0, BLOCK_D), tl.arange(0, PARTS)
    maximum = tl.load(stats_ptr + (group * PARTS + part) * 2 * G + g)
    weight = tl.load(stats_ptr + (group * PARTS + part) * 2 * G + G + g)
    faded = tl.exp(maximum - tl.max(maximum, axis=0))  # 0 for parts beyond the sequence's end: their maximum is -inf
    sums = tl.load(sums_ptr + ((group * PARTS + part) * G + g)[:, None] * D + d[None, :], mask=(d < D)[None, :])
    out = tl.sum(sums * faded[:, None], axis=0) / tl.sum(weight * faded, axis=0)
    tl.store(out_ptr + (group * G + g) * D + d, out, mask=d < D)


def attend(query, keys, values, scale, where):
    """softmax(query keys^T scale) values over each slot's places 0 to its last, each read once. Returns (n, 1, H, D).

    query (n, H, 1, D); keys, values (S, H / G, T, D); where (n, 2): each one's slot and last place. A sequence is cut
    into parts that run side by side, so that few sequences fill the GPU as well as many do.
    """
    count, heads, _, dim = query.shape
    groups, width = keys.shape[1], max(16, triton.next_power_of_2(dim))
    share = heads // groups
    block = 32 if query.dtype == torch.float32 else 64  # more would not fit into the registers
    parts = min(16, max(1, triton.next_power_of_2(2048 // (count * groups))))  # enough to fill the GPU
    sums = torch.empty(count, groups, parts, share, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(count, groups, parts, 2, share, dtype=torch.float32, device=query.device)
    out = torch.empty(count, 1, heads, dim, dtype=query.dtype, device=query.device)
    _attend_kernel[(count, groups, parts)](
        query, keys, values, where, sums, stats, scale, query.stride(0), query.stride(1), keys.stride(0),
        keys.stride(1), share, dim, max(16, triton.next_power_of_2(share)), width, block, parts, num_warps=4)
    _join_kernel[(count * groups, share)](sums, stats, out, share, dim, width, parts, num_warps=2)
    return out


def causal_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention for the unmodified modeling code, registered with transformers under the name "causal".

    query (B, H, L, D); key, value (B, H / G, T, D), one head for G query heads. Several queries (training, prompts):
    plain causal attention; right padding needs no mask. One token of each sequence (decoding): key and value are the
    slots' tensors, which tell how to attend; or those of transformers' `generate`, in tests.

    Being unknown to transformers' mask functions, the name also keeps it from building masks of its own, whose
    data-dependent checks cannot be captured in a CUDA graph.
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if hasattr(key, "attend"):  # see Slots.update
        return key.attend(query, key, value, dim**-0.5 if scaling is None else scaling), None
    causal = False if length == 1 else True  # no symbol, as `length > 1` is: torch.compile would cut its graph there
    flash = query.is_cuda and query.dtype != torch.float32  # flash attention lets heads share keys and values itself
    if not flash:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling,
                                         enable_gqa=flash and groups > 1)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", causal_attention)


def attention_kind(config) -> str:
    """The name under which a model gets `causal_attention`. Raises ValueError where it would not fit.

    Sliding windows are not supported, nor rotary embeddings whose frequencies depend on the longest sequence of the
    batch: with those a sequence's values depend on the others in the batch.
    """
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    rope = str(getattr(config, "rope_parameters", None))
    if config.model_type not in SUPPORTED or window or "dynamic" in rope:
        raise ValueError(f"{config.model_type}: only {', '.join(SUPPORTED)} with full attention are supported")
    return "causal"


def fuse_norms(model):
    """Let every RMSNorm of a model run as one kernel instead of seven, in sampling and training alike.

    In bf16 the fused kernel rounds once, after the multiplication by the weight, where the modeling code rounds twice.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight,
                                               eps=module.variance_epsilon)
