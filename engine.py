"""The rollout engine: many replies at once, near the speed at which a GPU can read the weights and the cache.

Writing a token reads every weight once, for all sequences together, and each sequence's own keys and values. On an H200
that takes 6 ms for 64 sequences of the Qwen3-8B shape. Hugging Face's `generate` takes 70 ms: it launches some two
thousand small kernels, one after the other, from Python, and copies the cache in every step to append to it.
Here, on the unmodified weights and modeling code:

    slots               one preallocated cache; a sequence that is finished gives its slot to a waiting prompt
    decode attention    a Triton kernel that reads each cached key and value once, for all query heads of its group, and
                        only as far as the sequence goes
    fewer kernels       RMSNorm in one instead of seven, rotary embedding in two instead of ten
    CUDA graph          a whole step, sampling included, is recorded once and replayed: no launches from Python
    no looking          the host reads what was written every 16 tokens
    one prefill         for equal prompts that start together (the rollouts of a scheme, the selections of a task)
    later turns         of a conversation read what is new only: a finished sequence's cache stays in its slot until
                        another sequence needs it, the memory is given back, or the weights have changed

On a CPU the same loop runs without graphs and Triton. Architectures whose layers are not all plain full attention
(sliding windows, linear or latent attention) do not come here: Backbone samples them through the model's own cache.

In comments: S slots, n of them in use, T the length of a slot, H query heads, G of them share a key/value head, D the
head dimension, V the vocabulary.
"""

import bisect
import contextlib
import functools
import sys
from collections import deque

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

BLOCK = 16  # tokens that are written between two looks at which sequences are finished
SMALL = 1 / 16  # of the GPU's memory: a cache of this size is in nobody's way
SPARE = 40 << 30  # bytes that stay free for the sandbox between calls; otherwise the cache is given back at once
PREFILL = 32768  # most prompt tokens, padding included, in one forward on a GPU

# ----------------------------------------------------------------------------------------------------------------------
# Attention of one new token to a sequence's cache


@triton.jit
def _append_kernel(key_ptr, value_ptr, keys_ptr, values_ptr, position_ptr, key_row, key_head, value_row, value_head,
                   cache_row, cache_head, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write one token's key and value, (n, heads, 1, D), to keys and values, (n, heads, T, D), at position (n,)."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    slot = row.to(tl.int64) * cache_row + head * cache_head + tl.load(position_ptr + row) * D + d
    tl.store(keys_ptr + slot, tl.load(key_ptr + row * key_row + head * key_head + d, mask=d < D), mask=d < D)
    tl.store(values_ptr + slot, tl.load(value_ptr + row * value_row + head * value_head + d, mask=d < D), mask=d < D)


@triton.jit
def _attend_kernel(query_ptr, keys_ptr, values_ptr, position_ptr, sums_ptr, stats_ptr, scale, query_row, query_head,
                   cache_row, cache_head, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr):
    """One part of one sequence's cache, for all G query heads of one key/value head: softmax as far as it goes.

    sums (n, heads, PARTS, G, D): of the values, weighted by exp(score - maximum); stats (n, heads, PARTS, 2, G): the
    maximum, and the sum of the weights.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, PARTS), BLOCK_T) * BLOCK_T
    start = part * share
    end = tl.minimum(start + share, length)
    g, d, t = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    query = tl.load(query_ptr + row * query_row + (head * G + g)[:, None] * query_head + d[None, :],
                    mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)  # (G, D)
    cache = row.to(tl.int64) * cache_row + head * cache_head
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


@triton.jit
def _rotate_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, x_row, x_head, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rotary position embedding of x (n, heads, 1, 2 HALF), rounded as PyTorch would after each operator.

    To be compiled without fused multiply-adds, which would leave one rounding out.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < HALF
    x_ptr += row * x_row + head * x_head
    cos_ptr += row * 2 * HALF
    sin_ptr += row * 2 * HALF
    out_ptr += (row * tl.num_programs(1) + head) * 2 * HALF
    low, high = tl.load(x_ptr + d, mask=inside), tl.load(x_ptr + HALF + d, mask=inside)
    for half in tl.static_range(2):  # x cos + (-high, low) sin
        x, turned = (low, -high) if half == 0 else (high, low)
        cos, sin = tl.load(cos_ptr + half * HALF + d, mask=inside), tl.load(sin_ptr + half * HALF + d, mask=inside)
        straight = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
        across = (turned.to(tl.float32) * sin.to(tl.float32)).to(x.dtype).to(tl.float32)
        tl.store(out_ptr + half * HALF + d, (straight + across).to(x.dtype), mask=inside)


def rotate(query, key, cos, sin):
    """Rotary position embedding of one token each: the modeling code's apply_rotary_pos_emb in two launches for ten.

    query (n, H, 1, D), key (n, H / G, 1, D); cos, sin (n, 1, D) of their dtype. Returns the two, rotated.
    """
    rotated = []
    for x in (query, key):
        count, heads, _, dim = x.shape
        out = torch.empty(count, heads, 1, dim, dtype=x.dtype, device=x.device)
        _rotate_kernel[(count, heads)](x, cos, sin, out, x.stride(0), x.stride(1), dim // 2,
                                       triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False)
        rotated.append(out)
    return tuple(rotated)


def append(key, value, keys, values, position):
    """Write one token's key and value, (n, heads, 1, D), into the cache, (n, heads, T, D), at position (n,)."""
    count, heads, _, dim = key.shape
    _append_kernel[(count, heads)](key, value, keys, values, position, key.stride(0), key.stride(1), value.stride(0),
                                   value.stride(1), keys.stride(0), keys.stride(1), dim, triton.next_power_of_2(dim))


def attend(query, keys, values, position, scale):
    """softmax(query keys^T scale) values over the cache's slots 0 to position[i], each read once. Returns (n, 1, H, D).

    query (n, H, 1, D); keys, values (n, H / G, T, D); position (n,). The cache of a sequence is cut into parts that
    run side by side, so that few sequences fill the GPU as well as many do.
    """
    count, heads, _, dim = query.shape
    groups = keys.shape[1]
    share = heads // groups
    parts = min(16, max(1, triton.next_power_of_2(2048 // (count * groups))))  # about 16 programs on each processor
    sums = torch.empty(count, groups, parts, share, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(count, groups, parts, 2, share, dtype=torch.float32, device=query.device)
    out = torch.empty(count, 1, heads, dim, dtype=query.dtype, device=query.device)
    width = max(16, triton.next_power_of_2(dim))
    _attend_kernel[(count, groups, parts)](
        query, keys, values, position, sums, stats, scale, query.stride(0), query.stride(1), keys.stride(0),
        keys.stride(1), share, dim, max(16, triton.next_power_of_2(share)), width,
        64 if query.dtype != torch.float32 else 32, parts, num_warps=4)
    _join_kernel[(count * groups, share)](sums, stats, out, share, dim, width, parts, num_warps=2)
    return out


def causal_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention for the unmodified modeling code, registered with transformers under the name "causal".

    query (B, H, L, D); key, value (B, H / G, T, D), one head for G query heads. Several queries (training, prefill):
    plain causal attention, right padding needs no mask; or with booleans `attention_mask`, (B, 1, L, T), where a cache
    is extended. One query (decoding): `attention_mask` is what Slots.mask gives, and the G query heads of a group share
    their keys and values as they lie in the cache.

    Being unknown to transformers' mask functions, the name also keeps it from building masks of its own, whose
    data-dependent checks cannot be captured in a CUDA graph.
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if length == 1:
        if attention_mask is not None and attention_mask.dtype != torch.bool:  # positions, on a GPU
            return attend(query, key, value, attention_mask, dim**-0.5 if scaling is None else scaling), None
        query = query.reshape(batch, heads // groups, groups, dim)  # G queries of one head
        if attention_mask is None:
            parts = [F.scaled_dot_product_attention(query, key, value, scale=scaling)]
        else:  # neighbours are of similar length, so a few at a time read little that lies beyond their ends
            parts = []
            for part in torch.arange(batch).split(16):
                rows = slice(part[0], part[-1] + 1)
                end = int(attention_mask[rows].sum(-1).max())
                parts.append(F.scaled_dot_product_attention(query[rows], key[rows, :, :end], value[rows, :, :end],
                                                            attention_mask[rows, :, :, :end], scale=scaling))
        return torch.cat(parts).reshape(batch, 1, heads, value.shape[3]), None
    if attention_mask is not None:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    elif query.is_cuda and query.dtype != torch.float32:  # flash attention shares heads by itself
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    else:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", causal_attention)


def attention_kind(config) -> str:
    """ "causal" where every layer is plain full attention through transformers' interface; else None: it chooses.

    Not plain: windows, capped scores, latent (MLA) or cross attention; and rotary embeddings whose frequencies depend
    on the longest sequence of the batch, with which a sequence is not what it would be alone.
    """
    config = config.get_text_config()
    plain = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    flags = ("attn_logit_softcapping", "is_encoder_decoder", "kv_lora_rank", "add_cross_attention")
    rope = str(getattr(config, "rope_parameters", None))
    special = window or any(getattr(config, name, None) for name in flags) or "dynamic" in rope or "longrope" in rope
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    able = kind is None or kind._can_set_attn_implementation()  # older modeling code has attention written out
    return "causal" if plain and able and not special else None


def fuse_norms(model) -> int:
    """Let every RMSNorm of a model on a GPU run as one kernel instead of seven, in sampling and training alike.

    A module is one if its class is called so and a trial gives the same values; returns how many there are. In bf16 the
    fused kernel rounds once, after the multiplication by the weight, where the modeling code rounds twice.
    """
    count = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or eps is None or getattr(module, "weight", None) is None:
            continue

        def fused(x, module=module, eps=eps):
            return F.rms_norm(x, module.weight.shape, module.weight, eps)

        with torch.no_grad():
            trial = torch.linspace(-3, 4, module.weight.numel(), device=module.weight.device, dtype=module.weight.dtype)
            same = torch.allclose(module(trial).float(), fused(trial).float(), rtol=0.02, atol=0.02)
        if same:
            module.forward = fused
            count += 1
    return count


@contextlib.contextmanager
def fused_rotation(model):
    """Within, the model's layers rotate queries and keys by `rotate`, if a trial shows that this is what they do.

    Only for steps of one token without gradients, and only while they are captured: a graph's replays need no Python.
    """
    modeling, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    theirs = getattr(modeling, name, None)

    def either(query, key, cos, sin, *others, **more):  # some rotate only a part of a head: cos is narrower then
        whole = not others and not more and cos.shape == (len(query), 1, query.shape[3])
        return (rotate if whole else theirs)(query, key, cos, sin, *others, **more)

    if theirs and _same_rotation(theirs, model):
        setattr(modeling, name, either)
    try:
        yield
    finally:
        if theirs:
            setattr(modeling, name, theirs)


def _same_rotation(theirs, model) -> bool:
    heads, groups, dim = shape_of_cache(model)[:3]
    chance = torch.Generator(model.device).manual_seed(0)

    def some(*shape):
        return torch.randn(shape, dtype=torch.float32, device=model.device, generator=chance).to(model.dtype)

    query, key, cos, sin = some(3, heads, 1, dim), some(3, groups, 1, dim), some(3, 1, dim), some(3, 1, dim)
    try:
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(theirs(query, key, cos, sin),
                                                                              rotate(query, key, cos, sin)))
    except (TypeError, RuntimeError):  # other arguments or shapes: partial rotation, several axes
        return False


def shape_of_cache(model) -> tuple:
    """(query heads, key/value heads, head dimension, layers) of a model."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, dim, config.num_hidden_layers


@functools.cache
def side_stream():
    """One stream for all captures: cuBLAS keeps 32 MiB for each that it has seen."""
    return torch.cuda.Stream()


# ----------------------------------------------------------------------------------------------------------------------
# The sequences that are being written


class Slots:
    """S sequences with their caches, and the step that writes one token of each.

    Passed to the model as `past_key_values`: each forward hands in one new token a sequence, which lands at that
    sequence's own position, so sequences of different lengths need no padding. The tensors keep their addresses, which
    is what lets a CUDA graph replay a step.
    """

    is_compileable = False

    def __init__(self, model, rows, length, stop_ids):
        self.model, self.rows, self.length, device = model, rows, length, model.device
        _, heads, dim, layers = shape_of_cache(model)
        shape = (rows, heads, length, dim)  # (S, H / G, T, D)
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(layers)]
        self.position = torch.zeros(rows, dtype=torch.long, device=device)  # of a sequence's next token, 0 when done
        self.place = torch.full_like(self.position, length - 1)  # where that is cached: a finished one's in the last
        self.token = torch.zeros(rows, dtype=torch.long, device=device)  # its last one
        self.logprob = torch.zeros(rows, device=device)
        self.end = torch.zeros(rows, dtype=torch.long, device=device)  # the position that it must not reach
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.count = rows  # n: the first so many slots are in use
        self.window = length  # slots that anything attends to; a CPU skips the rest, a captured graph keeps its shape
        self.graphs = {}  # {(n, temperature): CUDA graph of a step}
        # A graph draws from the generator that it was captured with, so this one lives as long as the graphs.
        self.generator = torch.Generator(device)
        self.text = [[]] * rows  # the tokens whose keys and values lie in each slot, where a finished reply left them
        self.used = [0] * rows  # in which call a slot was used last
        self.reading = None  # (rows, places, window) while `read` is at work

    @staticmethod
    def bytes_for_row(model, length) -> int:
        _, heads, dim, layers = shape_of_cache(model)
        return 2 * layers * heads * dim * length * model.dtype.itemsize

    # ---- the cache, as the modeling code sees it

    def update(self, key, value, layer_index, *args, **kwargs):
        """Called by every attention layer with this step's key and value, (n, H / G, 1, D), or what `read` reads."""
        if self.reading is not None:
            rows, places, window = self.reading  # (R,), (R, L)
            keys, values = self.keys[layer_index], self.values[layer_index]
            keys[rows[:, None], :, places] = key.transpose(1, 2)
            values[rows[:, None], :, places] = value.transpose(1, 2)
            return keys[rows, :, :window], values[rows, :, :window]
        keys, values = self.keys[layer_index][:self.count], self.values[layer_index][:self.count]
        place = self.place[:self.count]
        if key.is_cuda:
            append(key, value, keys, values, place)
            return keys, values
        heads, dim = keys.shape[1], keys.shape[3]
        lines = torch.arange(self.count * heads) * self.length + place.repeat_interleave(heads)
        keys.view(-1, dim)[lines] = key.reshape(-1, dim)
        values.view(-1, dim)[lines] = value.reshape(-1, dim)
        return keys[:, :, :self.window], values[:, :, :self.window]

    def get_seq_length(self, layer_index=0):
        return 0  # positions are always passed explicitly

    def mask(self):
        """What each sequence may attend to, the token being written included.

        On a CPU (n, 1, 1, window) of booleans; on a GPU, where attention stops at a sequence's end by itself, the
        position of that end, (n, 1, 1, 1).
        """
        position = self.position[:self.count, None, None, None]
        return position if position.is_cuda else torch.arange(self.window) <= position

    # ---- coming and going

    def fill(self, rows, source, prefill):
        """Copy prompt `source[i]` of a prefill (a DynamicCache) into sequence `rows[i]`; both are tensors."""
        assert prefill.layers[0].keys.shape[1::2] == self.keys[0].shape[1::2], "this attention caches something else"
        for layer, keys, values in zip(prefill.layers, self.keys, self.values):
            length = layer.keys.shape[2]
            keys[rows, :, :length] = layer.keys[source]
            values[rows, :, :length] = layer.values[source]

    def adopt(self, other):
        """Take over the texts of other slots, which are no longer than these."""
        count = min(self.rows, other.rows)
        for mine, theirs in zip([*self.keys, *self.values], [*other.keys, *other.values]):
            mine[:count, :, :other.length] = theirs[:count]
        self.text[:count], self.used[:count] = other.text[:count], other.used[:count]

    def arrange(self, first, writing=False):
        """Move slots `first` to the front, in this order, and use no others; texts in others stay behind them.

        writing: their sequences are unfinished.
        """
        self.count = len(first)
        order = [*first, *sorted(set(range(self.rows)) - set(first))]
        moved = [i for i, row in enumerate(order) if row != i and (self.text[row] or writing and i < self.count)]
        text, self.text = [self.text[row] for row in order], [[]] * self.rows  # none, should something fail half way
        if moved:
            to = torch.tensor(moved, device=self.token.device)
            source = torch.tensor([order[i] for i in moved], device=self.token.device)
            for tensor in [*self.keys, *self.values, self.position, self.place, self.end, self.token, self.logprob,
                           self.done]:
                tensor[to] = tensor[source]
        self.text, self.used = text, [self.used[row] for row in order]

    def find(self, prompts, indices) -> dict:
        """{index of a prompt: slot with the most part of it}, for those prompts whose beginning lies in a slot."""
        texts = sorted((text, row) for row, text in enumerate(self.text) if text)
        found = {}
        for i in indices:
            prompt = prompts[i]
            at = bisect.bisect(texts, (prompt, 0)) - 1  # what begins like the prompt stands right before it
            while at >= 0 and texts[at][0] == prompt[:len(texts[at][0])]:
                text, row = texts[at]
                if 2 * len(text) >= len(prompt) and row not in found.values():
                    found[i] = row
                    break
                at -= 1
        return found

    def read(self, rows, prompts):
        """Read what is new in the prompts whose beginnings lie in slots `rows`; hidden states (R, width) at their ends.
        """
        starts = [min(len(self.text[row]), len(prompt) - 1) for row, prompt in zip(rows, prompts)]
        new = [prompt[start:] for start, prompt in zip(starts, prompts)]
        ids = padded([*new, [0, 0]])[:-1]  # (R, L), L at least 2: one query would be taken for a step
        positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
        lengths, window = torch.tensor([len(tokens) for tokens in new]), max(map(len, prompts))
        places = torch.where(torch.arange(ids.shape[1]) < lengths[:, None], positions, self.length - 1)
        positions = positions.clamp(max=window - 1)  # of padding: a model may know no others
        mask = torch.arange(window) <= positions[:, None, :, None]  # (R, 1, L, window)
        ids, positions, places, mask, rows, last = (
            tensor.to(self.token.device) for tensor in (ids, positions, places, mask, torch.tensor(rows), lengths - 1))
        self.reading = rows, places, window
        try:
            out = self.model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask,
                                        past_key_values=self, use_cache=True)
        finally:
            self.reading = None
        return out.last_hidden_state[torch.arange(len(last), device=last.device), last]

    # ---- one token of each

    def draw(self, logits, rows, temperature, generator):
        """Sample a token for each of `rows` (R,) from logits (R, V); temperature 0 takes the likeliest."""
        logprobs = F.log_softmax(logits, dim=-1)
        if temperature == 0:
            choice = logprobs.argmax(-1)
        else:  # where a uniform number falls among the cumulative probabilities
            below = F.softmax(logits / temperature, dim=-1).cumsum(-1)  # (R, V)
            chance = torch.rand(len(below), 1, device=below.device, generator=generator)
            choice = torch.searchsorted(below, chance * below[:, -1:], right=True)[:, 0].clamp(max=below.shape[1] - 1)
        self.token[rows] = choice
        self.logprob[rows] = logprobs.gather(-1, choice[:, None])[:, 0]
        self.done[rows] |= torch.isin(choice, self.stops)

    def _step(self, head, temperature, generator):
        used = slice(self.count)
        hidden = self.model.base_model(input_ids=self.token[used, None], position_ids=self.position[used, None],
                                       attention_mask=self.mask(), past_key_values=self, use_cache=True,
                                       ).last_hidden_state[:, 0]  # (n, width of the model)
        # A finished sequence goes on until somebody looks, but it attends to nothing and leaves its cache alone.
        later = self.position[used] + 1
        self.done[used] |= later >= self.end[used]
        self.position[used] = torch.where(self.done[used], 0, later)
        self.place[used] = torch.where(self.done[used], self.length - 1, later)
        self.draw(head(hidden), used, temperature, generator)

    def step(self, head, temperature, generator):
        """Feed each sequence's last token, sample its next. `head` gives (n, V) logits for (n, width) hidden states.

        A model of a few million parameters is bound by launches, not by memory; the graph removes them all.
        """
        if self.token.device.type != "cuda":
            self.window = int(self.position[:self.count].max()) + 1
            return self._step(head, temperature, generator)
        key = (self.count, temperature)
        if key in self.graphs:
            return self.graphs[key].replay()
        with fused_rotation(self.model):
            side = side_stream()  # a capture needs a warm-up off the default stream; this one is a real step
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(head, temperature, self.generator)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=side):
                self._step(head, temperature, self.generator)
        self.graphs[key] = graph


# ----------------------------------------------------------------------------------------------------------------------


def padded(sequences) -> torch.Tensor:
    """Token ids (B, L) of B sequences, padded on the right, where a causal model cannot see it: no mask is needed."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in zip(ids, sequences):
        row[:len(sequence)] = torch.tensor(sequence)
    return ids


class Engine:
    """Replies to many prompts. `head` maps hidden states (..., width) to float32 logits (..., V)."""

    def __init__(self, model, head, stop_ids):
        self.model, self.head, self.stop_ids = model, head, list(stop_ids)
        self.cuda = model.device.type == "cuda"
        self.keeps = self.cuda  # slots, from call to call, with their graphs and texts, while there is memory
        self.slots, self.calls, self.version = None, 0, None  # version: of the weights that the texts were read with

    def release(self):
        """Give the cache's memory back, also to other processes; a small one stays, as its graphs are worth more.

        To be called before the weights change: what is cached was made with the old ones.
        """
        if self.slots is not None:
            self.slots.text = [[]] * self.slots.rows
        self._give_back()

    def _give_back(self):
        slots = self.slots
        if slots is not None:
            size = slots.bytes_for_row(self.model, slots.length) * slots.rows
            if not self.cuda or slots.rows < slots.asked or size > SMALL * torch.cuda.mem_get_info()[1]:
                self.slots = slots = None
        if self.cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, temperature, generator, rows=None, turn=contextlib.nullcontext) -> list:
        """[(token ids, their log-probabilities at temperature 1), ...] for prompts, lists of token ids.

        rows: most sequences at a time (default 64 on a CPU, 256 on a GPU, fewer where memory is short). A reply ends
        with a stop token, or without one after max_new_tokens. turn: as of Backbone.sample.
        """
        if not all(prompts):
            raise ValueError("a prompt without tokens")
        if not prompts or max_new_tokens < 1:
            return [([], []) for _ in prompts]
        waiting = deque(sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i])))
        with turn():
            slots = self._make_slots(min(len(prompts), rows or (256 if self.cuda else 64)),
                                     max(map(len, prompts)) + max_new_tokens + 1, turn is not contextlib.nullcontext)
            known = self._bring(slots, prompts, waiting)
            self._synchronize()
        if self.cuda and temperature:  # a graph has a generator of its own; without one given, torch's seeds it
            device = generator.device if generator is not None else "cpu"
            slots.generator.manual_seed(torch.randint(2**62, (), generator=generator, device=device).item())
            generator = slots.generator
        replies = [([], []) for _ in prompts]
        owner = [*known, *[None] * (slots.count - len(known))]  # which prompt's reply each slot is writing
        fresh, first = list(range(len(known))), True  # fresh: slots whose sequences begin now
        while waiting or any(i is not None for i in owner):
            with turn():
                free = [row for row, i in enumerate(owner) if i is None]
                if waiting and (first or len(free) >= len(owner) / 4):  # to read each one by itself would cost more
                    fresh += free[:len(waiting)]
                    for row in free[:len(waiting)]:
                        owner[row], slots.text[row] = waiting.popleft(), []
                if fresh:
                    admitted = [prompts[owner[row]] for row in fresh]
                    self._admit(slots, fresh, admitted, max_new_tokens, temperature, generator)
                left = max(max_new_tokens - len(replies[i][0]) for i in owner if i is not None)
                written = [(slots.token.clone(), slots.logprob.clone())]
                for _ in range(min(BLOCK, left) - bool(fresh)):
                    slots.step(self.head, temperature, generator)
                    written.append((slots.token.clone(), slots.logprob.clone()))
                tokens, logprobs = (torch.stack(column)[:, :slots.count].T.tolist() for column in zip(*written))
                for row, i in enumerate(owner):
                    if i is None:
                        continue
                    # What an older sequence begins with is what it ended with before.
                    for token, logprob in list(zip(tokens[row], logprobs[row]))[row not in fresh:]:
                        replies[i][0].append(token)
                        replies[i][1].append(logprob)
                        if token in self.stop_ids or len(replies[i][0]) == max_new_tokens:
                            owner[row] = None
                            slots.text[row] = [*prompts[i], *replies[i][0][:-1]] if self.keeps else []
                            break
                fresh, first = [], False
                slots.done[:len(owner)] = torch.tensor([i is None for i in owner])
                owner = self._shrink(slots, owner, waiting)
                self._synchronize()
        del slots  # or its memory would outlive what follows
        if self.cuda and torch.cuda.mem_get_info()[0] < SPARE:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < SPARE:
                self._give_back()
        return replies

    def _synchronize(self):
        """At the end of a turn nothing of it may still be waiting for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def _make_slots(self, rows, length, beside) -> Slots:
        """Slots for so many sequences of so many tokens, or for as many as there is memory for.

        beside: is the sandbox at work meanwhile? Then it gets SPARE, or at least half of what is free. Where slots are
        kept there are twice as many, if memory is plenty: the rollouts of a step are written in two halves, one after
        the other, and the texts of both are wanted again.
        """
        if not self.keeps:
            return Slots(self.model, rows, -(-length // 128) * 128, self.stop_ids)
        rows, length, old = triton.next_power_of_2(rows), -(-length // 512) * 512, self.slots
        short = old is not None and old.rows < rows and self._room(old.length, beside)[0] > old.rows / 2  # no longer
        if old is None or old.asked < rows or old.length < length or short:
            asked, length = max(rows, old.asked if old else 0), max(length, old.length if old else 0)
            self.slots = None
            room, spare = self._room(length, beside)
            if old is not None and room < asked:
                old = None  # its texts are given up
                room, spare = self._room(length, beside)
            if room < 1:
                raise torch.cuda.OutOfMemoryError(f"no memory for the cache of one sequence of {length} tokens")
            self.slots = Slots(self.model, min(2 * asked if 2 * asked < spare else asked, room), length, self.stop_ids)
            self.slots.asked = asked  # where memory was short, asking again would not give more
            if old is not None:
                self.slots.adopt(old)
        version = sum(p._version for p in self.model.parameters())
        if self.version != version:  # the texts were read with other weights (a fused optimiser's are not seen here)
            self.version, self.slots.text = version, [[]] * self.slots.rows
        self.slots.count = min(rows, self.slots.rows)
        self.slots.done.fill_(True)  # what the last call has left must not go on
        self.slots.position.zero_()
        self.slots.place.fill_(self.slots.length - 1)
        return self.slots

    def _room(self, length, beside) -> tuple:
        """For how many more sequences of `length` there is memory: at most, and such that SPARE is left."""
        if not self.cuda:
            return 1 << 20, 1 << 20
        torch.cuda.empty_cache()
        each = Slots.bytes_for_row(self.model, length)
        free = torch.cuda.mem_get_info()[0] - 3 * Slots.bytes_for_row(self.model, PREFILL)  # reading needs some too
        most, spare = int(0.85 * free / each), int((free - SPARE) / each)
        return (min(most, max(spare, most // 2)) if beside else most), spare

    def _bring(self, slots, prompts, waiting) -> list:
        """Bring slots with beginnings of prompts to the front, then those unused for longest; returns the prompts that
        begin in the first slots, and takes them out of `waiting`."""
        if not self.keeps:
            return []
        self.calls += 1
        found = dict(list(slots.find(prompts, waiting).items())[:slots.count])
        others = set(range(slots.rows)) - set(found.values())
        others = sorted(others, key=lambda row: (bool(slots.text[row]), slots.used[row]))
        slots.arrange([*found.values(), *others[:slots.count - len(found)]])
        slots.used[:slots.count] = [self.calls] * slots.count
        left = [i for i in waiting if i not in found]
        waiting.clear()
        waiting.extend(left)
        return list(found)

    def _admit(self, slots, rows, prompts, max_new_tokens, temperature, generator):
        """Read `prompts` into slots `rows` and draw each one's first token."""
        later = [k for k, row in enumerate(rows) if slots.text[row]]  # these go on where a text ends
        whole = [k for k, row in enumerate(rows) if not slots.text[row]]
        logits = []
        for chosen, read in ((whole, self._read_whole), (later, self._read_on)):
            if chosen:
                logits += read(slots, [rows[k] for k in chosen], [prompts[k] for k in chosen])
        for row in rows:
            slots.text[row] = []
        rows, prompts = [rows[k] for k in whole + later], [prompts[k] for k in whole + later]
        rows = torch.tensor(rows, device=self.model.device)
        slots.position[rows] = torch.tensor([len(prompt) for prompt in prompts], device=self.model.device)
        slots.place[rows] = slots.position[rows]
        slots.end[rows] = slots.position[rows] + max_new_tokens
        slots.done[rows] = False
        slots.draw(torch.cat(logits), rows, temperature, generator)

    def _read_whole(self, slots, rows, prompts) -> list:
        """Read prompts from their beginnings, equal ones (they are neighbours) once; their logits (..., V) in parts."""
        unique = list(dict.fromkeys(map(tuple, prompts)))
        index = {prompt: i for i, prompt in enumerate(unique)}
        source = [index[tuple(prompt)] for prompt in prompts]  # which unique prompt each row gets
        logits = []
        for part in self._parts(unique):
            cache, part_logits = self._prefill(unique[part])
            pairs = [(row, i - part.start) for row, i in zip(rows, source) if part.start <= i < part.stop]
            slots.fill(*torch.tensor(pairs, device=self.model.device).T, cache)
            logits.append(part_logits)
        return [torch.cat(logits)[torch.tensor(source, device=self.model.device)]]

    def _read_on(self, slots, rows, prompts) -> list:
        """Read what is new in prompts whose beginnings lie in `rows`; their logits (..., V) in parts."""
        return [self.head(slots.read(rows[part], prompts[part])) for part in self._parts(prompts)]

    def _parts(self, prompts):
        """Slices of so many prompts as one forward can take; they are sorted by length, which wastes little padding."""
        start = 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and self._fits(end + 1 - start, max(map(len, prompts[start:end + 1]))):
                end += 1
            yield slice(start, end)
            start = end

    def _fits(self, count, width) -> bool:
        return count * width <= PREFILL if self.cuda else count <= 32

    def _prefill(self, prompts):
        """Run unique prompts, right-padded; returns their cache and the logits after each one's last token, (U, V)."""
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.model.device)
        out = self.model.base_model(input_ids=padded(prompts).to(self.model.device), use_cache=True,
                                    past_key_values=DynamicCache(config=self.model.config))
        hidden = out.last_hidden_state[torch.arange(len(prompts), device=self.model.device), last]
        return out.past_key_values, self.head(hidden)

    def _shrink(self, slots, owner, waiting) -> list:
        """Stop computing finished sequences where it pays; returns the new owners of the slots.

        On a CPU every row costs. On a GPU the weights' reading does, which one row pays for as well as 64 do, and every
        other number of rows needs a graph of its own.
        """
        alive = [row for row, i in enumerate(owner) if i is not None]
        if waiting or not alive or len(alive) > (len(owner) / 4 if self.cuda else 0.8 * len(owner)):
            return owner
        if self.cuda:  # a power of two, finished ones among them
            count = triton.next_power_of_2(len(alive))
            alive = sorted(alive + [row for row, i in enumerate(owner) if i is None][:count - len(alive)])
        slots.arrange(alive, writing=True)
        return [owner[row] for row in alive]
