"""On a CPU: a prompt is held once for all replies to it, and each step reads it once.

A CPU is bound by memory bandwidth: with four rollouts of a prompt, most of what a step would read is the same keys and
values four times. So a slot holds the reply alone, and attention joins two parts: the prompt's and the reply's. A row
of the batch that no reply uses costs time on a CPU, so the slots in use are kept together at the front.

In comments: S slots of T tokens, n rows of the batch, H query heads, G of them share a key/value head, D the head
dimension, U prompts of at most P tokens.
"""

import functools

import torch

from fast.slots import Slots


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
            self.count = len(requests)
            slots = [request.slot for request in requests]
            for tensor in [*self.keys, *self.values, self.start, self.position, self.stream, self.end, self.token,
                           self.logprob, self.done]:
                tensor[:self.count] = tensor[slots]
            for row, request in enumerate(requests):
                request.slot = row
            self._drop_ended()
        for request in requests:
            request.row = request.slot
        self.batch[:self.count] = torch.arange(self.count)

    def _drop_ended(self):
        """Forget the requests that have ended, and prompts without requests."""
        for prompts in self.prompts:
            prompts.keep_running()
        self.prompts = [prompts for prompts in self.prompts if prompts.groups]

    def read(self, groups) -> tuple:
        self._drop_ended()  # they may be in the slots that these requests get
        layers = []

        def store(layer, key, value):  # (U, H / G, P, D)
            layers.append((key.contiguous(), value.contiguous()))
            return key, value

        hidden = self._forward([group[0].prompt for group in groups], store)
        for request in sum(groups, []):
            self.start[request.slot] = len(request.prompt)
        self.prompts.append(Prompts(layers, groups))
        return hidden, torch.repeat_interleave(torch.tensor(list(map(len, groups))))

    def places(self, slots) -> torch.Tensor:
        inside = torch.where(self.done[slots], 0, self.position[slots] - self.start[slots])
        self.bias = bias_beyond(inside + 1, int(inside.max()) + 1, self.model.dtype)  # (n, 1, 1, longest reply)
        return torch.stack([slots, inside], 1)

    def extend(self, layer_index, key, value):
        keys, values = self.keys[layer_index][:self.count], self.values[layer_index][:self.count]
        self.append(key, value, keys, values)
        keys.attend = functools.partial(attend_shared, bias=self.bias, prompts=self.prompts, layer=layer_index)
        return keys, values


class Prompts:
    """Prompts that were read together, and the requests that have each of them.

    layers: for each layer keys and values (U, H / G, P, D); groups: U lists of requests.
    """

    def __init__(self, layers, groups):
        self.layers, self.groups = layers, groups
        self.keep_running()

    def keep_running(self):
        """Forget the requests that have ended, and a prompt with its last one; see where the others are."""
        used, groups, slots = [], [], []
        for i, group in enumerate(self.groups):
            left = [request for request in group if not request.ended]
            if left:
                used.append(i)
                groups.append(left)
                slots.append([request.slot for request in left])
        if len(used) < len(self.groups):
            self.layers = [(keys[used], values[used]) for keys, values in self.layers]
        self.groups = groups
        most = max(map(len, groups), default=0)
        self.slots = torch.tensor([each + each[:1] * (most - len(each)) for each in slots])  # (U, most requests)
        lengths = torch.tensor([len(group[0].prompt) for group in groups])
        self.bias = bias_beyond(lengths, self.layers[0][0].shape[2], self.layers[0][0].dtype)


def bias_beyond(lengths, width, dtype) -> torch.Tensor:
    """(n, 1, 1, width): what to add to attention's scores, 0 for the first `lengths` (n,) of them, else -infinity."""
    beyond = torch.arange(width) >= lengths[:, None, None, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill(beyond, float("-inf"))


def attend_shared(query, keys, values, scale, bias, prompts, layer):
    """Attention of one token each to a shared prompt and to the reply so far. Returns (n, 1, H, D).

    query (n, H, 1, D); keys, values (n, H / G, T, D) of the replies; bias (n, 1, 1, W): 0 for what a reply has, else
    -infinity; prompts: [Prompts]; layer: its number. Each part's softmax is known up to its sum; flash attention
    returns that sum's logarithm, by which the two are weighted.
    """
    # The public function does not return the logarithm.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    count, heads, _, dim = query.shape
    groups, width = keys.shape[1], bias.shape[3]
    query = query.reshape(count, groups, heads // groups, dim)  # G queries of one head
    out, logsum = flash(query, keys[:, :, :width], values[:, :, :width], attn_mask=bias, scale=scale)
    for part in prompts:
        slots = part.slots  # (U, R): those of each prompt
        shape = (len(slots), groups, slots.shape[1], heads // groups)  # (U, H / G, R, G)
        together = query[slots].transpose(1, 2).reshape(len(slots), groups, -1, dim)
        more, more_logsum = flash(together, *part.layers[layer], attn_mask=part.bias, scale=scale)
        more = more.view(*shape, dim).transpose(1, 2)
        more_logsum = more_logsum.view(shape).transpose(1, 2)
        share = torch.sigmoid(more_logsum - logsum[slots])[..., None]
        out[slots] = torch.lerp(out[slots], more, share.to(out.dtype))
    return out.reshape(count, 1, heads, dim)
