"""On a CPU: a prompt is held once for all replies to it, and each step reads it once.

A CPU has no bandwidth to spare: with four rollouts of a prompt, most of what a step would read is the same keys and
values four times. So a slot holds the reply alone, and attention joins two parts: the prompt's and the reply's.
Rows cost time on a CPU, so the slots in use are kept together at the front.

In comments: S slots of T tokens, n rows of the batch, H query heads, G of them share a key/value head, D the head
dimension, U prompts of at most P tokens.
"""

import functools

import torch

from fast.slots import Slots, padded

TOGETHER = 16  # prompts of similar length that attention takes at a time


class SharedPromptSlots(Slots):
    """Slots that hold replies only; row i of the batch is slot i."""

    def __init__(self, model, rows, length):
        """length: most tokens of a reply."""
        super().__init__(model, rows, length)
        self.length = float("inf")  # of a prompt, which is not in the slot
        self.start = torch.zeros_like(self.token)  # length of the prompt: the position of a reply's first token
        self.prompts = []  # [Prompts] of the replies in the slots

    def set_batch(self, requests, growing):
        """As Slots.set_batch. Where a fifth of the rows is idle and nothing waits, the others are moved together."""
        requests = sorted(requests, key=lambda request: request.slot)
        self.count = max(self.count, len(requests))
        if not growing and len(requests) <= 0.8 * self.count:
            self.count, slots = len(requests), [request.slot for request in requests]
            for tensor in [*self.keys, *self.values, self.start, self.position, self.stream, self.end, self.token,
                           self.logprob, self.done]:
                tensor[:self.count] = tensor[slots]
            self.renumber({slot: row for row, slot in enumerate(slots)})
            for row, request in enumerate(requests):
                request.slot = row
        for request in requests:
            request.row = request.slot
        self.batch[:self.count] = torch.arange(self.count)

    def renumber(self, row_of):
        """Slot `i` has become `row_of[i]`. Slots that are not in it hold other replies now, or none."""
        for prompts in self.prompts:
            prompts.renumber(row_of)
        self.prompts = [prompts for prompts in self.prompts if prompts.slots_of]

    def read(self, prompts, slots_of) -> torch.Tensor:
        taken = {slot for slots in slots_of for slot in slots}
        self.renumber({slot: slot for slot in range(self.rows) if slot not in taken})
        layers = []

        def store(layer, key, value):  # (U, H / G, P, D)
            layers.append((key.contiguous(), value.contiguous()))
            return key, value

        lengths = torch.tensor([len(prompt) for prompt in prompts])
        hidden = self._forward(padded(prompts), lengths, store)
        for slots, length in zip(slots_of, lengths):
            self.start[slots] = length
        self.prompts.append(Prompts(layers, lengths, slots_of))
        return hidden

    def places(self, slots) -> torch.Tensor:
        inside = torch.where(self.done[slots], 0, self.position[slots] - self.start[slots])
        self.bias = bias_beyond(inside + 1, int(inside.max()) + 1, self.model.dtype)  # (n, 1, 1, longest reply)
        return torch.stack([slots, inside], 1)

    def extend(self, key, value, layer_index):
        keys, values = self.keys[layer_index][:self.count], self.values[layer_index][:self.count]
        rows, places = self.where.T
        keys[rows, :, places], values[rows, :, places] = key[:, :, 0], value[:, :, 0]
        parts = [part for prompts in self.prompts for part in prompts.parts[layer_index]]
        keys.attend = functools.partial(attend_shared, bias=self.bias, parts=parts)
        return keys, values


class Prompts:
    """Prompts that were read together, and which slots hold a reply to each.

    layers: for each layer keys and values (U, H / G, P, D); lengths (U,): tokens of each; slots_of: for each a list.
    """

    def __init__(self, layers, lengths, slots_of):
        self.layers, self.lengths, self.slots_of = layers, lengths, slots_of
        self.renumber({slot: slot for slots in slots_of for slot in slots})

    def renumber(self, row_of):
        """See SharedPromptSlots.renumber. A prompt is dropped with its last reply."""
        self.slots_of = [[row_of[slot] for slot in slots if slot in row_of] for slots in self.slots_of]
        used = [i for i, slots in enumerate(self.slots_of) if slots]
        if len(used) < len(self.slots_of):
            self.slots_of, self.lengths = [self.slots_of[i] for i in used], self.lengths[used]
            self.layers = [(keys[used], values[used]) for keys, values in self.layers]
        most = max(map(len, self.slots_of), default=0)
        slots = torch.tensor([slots + slots[:1] * (most - len(slots)) for slots in self.slots_of])  # (U, most replies)
        bias = bias_beyond(self.lengths, self.layers[0][0].shape[2], self.layers[0][0].dtype)
        self.parts = [[] for _ in self.layers]  # of each layer, what attend_shared needs
        for first in range(0, len(used), TOGETHER):
            part = slice(first, first + TOGETHER)
            end = int(self.lengths[part].max())
            for parts, (keys, values) in zip(self.parts, self.layers):
                parts.append((slots[part], bias[part, :, :, :end], keys[part, :, :end], values[part, :, :end]))


def bias_beyond(lengths, width, dtype) -> torch.Tensor:
    """(n, 1, 1, width): what to add to attention's scores, 0 for the first `lengths` (n,) of them, else -infinity."""
    beyond = torch.arange(width) >= lengths[:, None, None, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill(beyond, float("-inf"))


def attend_shared(query, keys, values, scale, bias, parts):
    """Attention of one token each to a shared prompt and to the reply so far. Returns (n, 1, H, D).

    query (n, H, 1, D); keys, values (n, H / G, T, D) of the replies; bias (n, 1, 1, W): 0 for what a reply has, else
    -infinity; parts: see Prompts. Each part's softmax is known up to its sum; flash attention returns that sum's
    logarithm, by which the two are weighted.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the public function keeps the logarithm back
    count, heads, _, dim = query.shape
    groups, width = keys.shape[1], bias.shape[3]
    query = query.reshape(count, groups, heads // groups, dim)  # G queries of one head
    out, logsum = flash(query, keys[:, :, :width], values[:, :, :width], attn_mask=bias, scale=scale)
    for slots, prompt_bias, prompt_keys, prompt_values in parts:  # slots (U, R): those of each prompt
        shape = (len(slots), groups, slots.shape[1], heads // groups)  # (U, H / G, R, G)
        together = query[slots].transpose(1, 2).reshape(len(slots), groups, -1, dim)
        more, more_logsum = flash(together, prompt_keys, prompt_values, attn_mask=prompt_bias, scale=scale)
        more, more_logsum = more.view(*shape, dim).transpose(1, 2), more_logsum.view(shape).transpose(1, 2)
        share = torch.sigmoid(more_logsum - logsum[slots])[..., None]
        out[slots] = torch.lerp(out[slots], more, share.to(out.dtype))
    return out.reshape(count, 1, heads, dim)
