"""Slots: where sequences are stored while they are sampled. One slot holds the keys and values of one sequence.

All slots are allocated at once, and their tensors keep their addresses, so that a CUDA graph can replay a step. A step
computes a batch: a list of slot numbers, which changes between steps. No sequence is ever moved or padded.

In comments: S slots of T tokens, n rows of the batch, R prompts that are read, L their padded length, H query heads, G
of them share a key/value head, D the head dimension.
"""

import functools
import inspect

import torch
import triton
from torch.nn.utils.rnn import pad_sequence

from fast.attention import attend


class Slots:
    """The caches of up to S sequences, and for each of them what a step needs to know.

    Passed to the model as its cache: transformers calls `update` in every attention layer.
    """

    is_compileable = False  # transformers asks this of every cache

    def __init__(self, model, rows, length):
        """rows: S; on a GPU at most as many as half of its free memory holds (the rest is for the sandbox's processes).

        length: T; a prompt and its reply together must be shorter. Raises torch.OutOfMemoryError.
        """
        device, config = model.device, model.config
        heads = config.num_key_value_heads  # H / G
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slot_bytes = 2 * config.num_hidden_layers * heads * dim * length * model.dtype.itemsize
        if device.type == "cuda":
            torch.cuda.empty_cache()
            rows = min(rows, int(torch.cuda.mem_get_info()[0] / 2 / slot_bytes))
            if rows < 1:
                raise torch.OutOfMemoryError(f"no memory for the cache of one sequence of {length} tokens")
        self.model, self.rows, self.length = model, rows, length
        # The argument under which the cache is passed: `cache` since transformers 5.24.
        self.name = "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"
        shape = (rows + 1, heads, length, dim)  # (S + 1, H / G, T, D); slot S is a scratch area
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.token = torch.zeros(rows + 1, dtype=torch.long, device=device)  # the last token of each sequence
        self.logprob = torch.zeros(rows + 1, device=device)  # its log-probability at the temperature of sampling
        self.position = torch.zeros_like(self.token)  # its position
        self.stream = torch.zeros_like(self.token)  # where its random numbers come from, see step.chance
        self.end = torch.zeros_like(self.token)  # the position that the sequence must not reach
        self.done = torch.ones_like(self.token, dtype=torch.bool)
        # The first n: slots that a step computes.
        self.batch, self.count = torch.full((triton.next_power_of_2(rows),), rows, device=device), 0
        self.graphs = {}  # {(n, temperature, top_p): CUDA graph of a step}, see step.py
        self.store = None  # while prompts are read: the function that takes their keys and values

    # ---- which slots a step computes

    def set_batch(self, requests, growing):
        """Compute the slots of these requests from now on; sets each one's `row` in the batch.

        n is a power of two, since every n needs a graph of its own. Rows without a request compute the scratch slot.
        growing: are more requests waiting? Then SharedPromptSlots keeps the rows for them.
        """
        self.count = triton.next_power_of_2(len(requests))
        slots = [self.rows] * self.count
        for row, request in enumerate(requests):
            slots[row] = request.slot
            request.row = row
        self.batch[:self.count] = on_device(slots, self.batch.device)

    # ---- reading prompts

    def begin(self, requests, most) -> torch.Tensor:
        """Note where replies begin to prompts that were read, of at most so many tokens; the requests' slots (n,)."""
        slots = self.slots_of(requests)
        self.position[slots] = on_device([len(request.prompt) for request in requests], slots.device)
        self.end[slots] = self.position[slots] + most
        self.stream[slots] = on_device([request.stream for request in requests], slots.device)
        self.done[slots] = False
        return slots

    def slots_of(self, requests) -> torch.Tensor:
        return on_device([request.slot for request in requests], self.batch.device)

    def read(self, groups) -> tuple:
        """Read whole prompts: (hidden states (U, width of the model) at their last tokens, each request's prompt (R,)).

        groups: U lists of requests that have one prompt. It is computed once and copied into the slots of all of them.
        """
        source = on_device(torch.repeat_interleave(torch.tensor(list(map(len, groups)))), self.batch.device)
        rows = self.slots_of(sum(groups, []))

        def store(layer, key, value):  # (U, H / G, L, D)
            self.keys[layer][rows, :, :key.shape[2]] = key[source]
            self.values[layer][rows, :, :key.shape[2]] = value[source]
            return key, value

        return self._forward([group[0].prompt for group in groups], store), source

    def _forward(self, sequences, store):
        """Run the model over token ids of R sequences; hidden states (R, width) at each one's last token.

        store: what `update` does meanwhile.
        """
        self.store = store
        out = self._call(on_device(padded(sequences), self.batch.device))  # (R, L, width)
        self.store = None
        last = on_device([len(sequence) - 1 for sequence in sequences], self.batch.device)
        return out[torch.arange(len(last), device=last.device), last]

    def _call(self, ids, **inputs) -> torch.Tensor:
        # The arguments are built on each call: storing them would create a reference cycle.
        return self.model.base_model(input_ids=ids, use_cache=True, **{self.name: self}, **inputs).last_hidden_state

    # ---- one token of each sequence in the batch

    def feed(self, slots) -> torch.Tensor:
        """Run the model over the last token of each of `slots` (n,); hidden states (n, width of the model)."""
        self.where = self.places(slots)
        return self._call(self.token[slots][:, None], position_ids=self.position[slots][:, None])[:, 0]

    def places(self, slots) -> torch.Tensor:
        """(n, 2): the slot and the place in it where each sequence's last token goes; finished ones use slot S."""
        done = self.done[slots]
        return torch.stack([torch.where(done, self.rows, slots), torch.where(done, 0, self.position[slots])], 1)

    def update(self, key, value, layer_index, *args, **kwargs):
        """Called by every attention layer with new keys and values, (n, H / G, 1, D), or (R, H / G, L, D) of prompts.

        Returns what the layer attends to. `keys.attend` tells causal_attention how.
        """
        return (self.store or self.extend)(layer_index, key, value)

    def extend(self, layer_index, key, value):
        """Write one more key and value of each sequence in the batch to self.where, see update."""
        keys, values = self.keys[layer_index], self.values[layer_index]
        self.append(key, value, keys, values)
        keys.attend = functools.partial(attend, where=self.where)
        return keys, values

    def append(self, key, value, keys, values):
        slots, places = self.where.T
        keys[slots, :, places] = key[:, :, 0]
        values[slots, :, places] = value[:, :, 0]

    def get_seq_length(self, layer_index=0):
        return 0  # a prompt is read whole, and for one token its position is passed


def padded(sequences) -> torch.Tensor:
    """Token ids (B, L) of B sequences, padded on the right. No mask is needed: a causal model never looks to the right.
    """
    return pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)


def packed(items, budget):
    """Yields lists of items, each of at most `budget` tokens with padding. Items sorted by length need little padding.

    items: (length, number of sequences, item) each.
    """
    batch = []
    count = width = 0
    for length, more, item in items:
        count, width = count + more, max(width, length)
        if batch and count * width > budget:
            yield batch
            batch, count, width = [], more, length
        batch.append(item)
    if batch:
        yield batch


def on_device(values, device) -> torch.Tensor:
    """A tensor of the values on that device, without waiting for the work that the GPU still has."""
    values = torch.as_tensor(values)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
