"""Slots: where sequences live while they are written. One slot holds the keys and values of one sequence.

All slots are allocated at once, and their tensors keep their addresses, so that a CUDA graph can replay a step. A step
computes a batch: a list of slot numbers, which changes between steps. No sequence is ever moved or padded.

In comments: S slots of T tokens, n rows of the batch, R prompts that are read, L their padded length, H query heads, G
of them share a key/value head, D the head dimension.
"""

import functools

import torch
import triton
from torch.nn.utils.rnn import pad_sequence

from fast.attention import append, attend, name_of_cache, shape_of_cache

SPARE = 40 << 30  # bytes of the GPU's memory that the sandbox may need while the model samples
SMALL = 1 / 16  # of the GPU's memory: a cache of this size is in nobody's way


class Slots:
    """The caches of up to S sequences, and for each of them what a step needs to know.

    Passed to the model as its cache: transformers calls `update` in every attention layer.
    """

    is_compileable = False  # transformers asks this of every cache

    def __init__(self, model, rows, length):
        """rows: S. length: T; a prompt and its reply together must be shorter. Raises torch.OutOfMemoryError."""
        self.model, self.rows, self.length = model, rows, length
        self.name = name_of_cache(model.base_model)  # the argument under which the cache is passed
        heads, dim, layers = shape_of_cache(model.config)
        shape = (rows + 1, heads, length, dim)  # (S + 1, H / G, T, D); slot S is a scratch area
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
        self.token = torch.zeros(rows + 1, dtype=torch.long, device=model.device)  # the last token of each sequence
        self.logprob = torch.zeros(rows + 1, device=model.device)  # its log-probability at the temperature of sampling
        self.position = torch.zeros_like(self.token)  # its position
        self.stream = torch.zeros_like(self.token)  # where its random numbers come from, see step.chance
        self.end = torch.zeros_like(self.token)  # the position that the sequence must not reach
        self.done = torch.ones(rows + 1, dtype=torch.bool, device=model.device)
        width = triton.next_power_of_2(max(rows, 32))
        self.batch = torch.full((width,), rows, device=model.device)  # the first n: slots that a step computes
        self.count = 0  # n
        self.graphs = {}  # {(n, temperature, top_p): CUDA graph of a step}, see step.py
        self.store = None  # while prompts are read: where `update` puts their keys and values

    @property
    def as_cache(self) -> dict:
        """Arguments of a forward pass. If they were kept here, the slots would hold themselves in memory."""
        return {self.name: self, "use_cache": True}

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return sum(tensor.nbytes for tensor in [*self.keys, *self.values])

    # ---- which slots a step computes

    def set_batch(self, requests, growing):
        """Compute the slots of these requests from now on; sets each one's `row` in the batch.

        n is a power of two, since every n needs a graph of its own. Rows to spare compute the scratch slot.
        growing: do more requests wait? Then SharedPromptSlots keeps the room for them.
        """
        count = triton.next_power_of_2(len(requests))
        self.count = 32 if count in (8, 16) else count  # in float32 cuBLAS takes longer for 8 or 16 rows than for 32
        slots = [self.rows] * self.count
        for row, request in enumerate(requests):
            slots[row], request.row = request.slot, row
        self.batch[:self.count] = on_device(slots, self.batch.device)

    # ---- reading prompts

    def read(self, prompts, slots_of) -> torch.Tensor:
        """Read whole prompts; hidden states (R, width of the model) at their last tokens.

        slots_of: for each prompt the slots (a list) that begin with it. It is read once and copied into all of them.
        """
        rows = on_device([slot for slots in slots_of for slot in slots], self.model.device)
        source = on_device([i for i, slots in enumerate(slots_of) for _ in slots], self.model.device)

        def store(layer, key, value):  # (R, H / G, L, D)
            self.keys[layer][rows, :, :key.shape[2]] = key[source]
            self.values[layer][rows, :, :key.shape[2]] = value[source]
            return key, value

        return self._forward(padded(prompts), [len(prompt) for prompt in prompts], store)

    def read_on(self, prompts, slots, known) -> torch.Tensor:
        """As `read`, of prompts whose first `known` tokens each lie in their slots already; equal ones are not joined.
        """
        new = padded([prompt[start:] for start, prompt in zip(known, prompts)])  # (R, L)
        columns, window = torch.tensor(known)[:, None] + torch.arange(new.shape[1]), max(map(len, prompts))
        places = columns.clamp(max=self.length - 1)  # padding lies beyond the prompt, where the reply will be written
        positions = columns.clamp(max=window - 1)  # a model may know no others
        mask = torch.arange(window) <= positions[:, None, :, None]  # (R, 1, L, window)
        rows, positions, places, mask = (on_device(x, self.model.device) for x in (slots, positions, places, mask))

        def store(layer, key, value):
            keys, values = self.keys[layer], self.values[layer]
            keys[rows[:, None], :, places] = key.transpose(1, 2)
            values[rows[:, None], :, places] = value.transpose(1, 2)
            return keys[rows, :, :window], values[rows, :, :window]

        lengths = [len(prompt) - start for start, prompt in zip(known, prompts)]
        return self._forward(new, lengths, store, position_ids=positions, attention_mask=mask)

    def _forward(self, ids, lengths, store, **inputs):
        """Run the model over token ids (R, L), padded on the right; hidden states (R, width) at each one's last token.
        """
        last = on_device(lengths, self.model.device) - 1
        self.store = store
        try:
            out = self.model.base_model(input_ids=on_device(ids, self.model.device), **self.as_cache, **inputs)
        finally:
            self.store = None
        return out.last_hidden_state[torch.arange(len(last), device=last.device), last]

    # ---- one token of each sequence in the batch

    def feed(self, slots) -> torch.Tensor:
        """Run the model over the last token of each of `slots` (n,); hidden states (n, width of the model)."""
        self.where = self.places(slots)
        return self.model.base_model(input_ids=self.token[slots][:, None], position_ids=self.position[slots][:, None],
                                     **self.as_cache).last_hidden_state[:, 0]

    def places(self, slots) -> torch.Tensor:
        """(n, 2): the slot and the place in it where each sequence's last token goes; finished ones use slot S."""
        done = self.done[slots]
        return torch.stack([torch.where(done, self.rows, slots), torch.where(done, 0, self.position[slots])], 1)

    def update(self, key, value, layer_index, *args, **kwargs):
        """Called by every attention layer with new keys and values, (n, H / G, 1, D), or (R, H / G, L, D) of prompts.

        Returns what the layer attends to. `keys.attend` tells causal_attention how.
        """
        if self.store is not None:
            return self.store(layer_index, key, value)
        return self.extend(key, value, layer_index)

    def extend(self, key, value, layer_index):
        """Write one more key and value of each sequence in the batch to self.where, see update."""
        keys, values = self.keys[layer_index], self.values[layer_index]
        append(key, value, keys, values, self.where)
        keys.attend = functools.partial(attend, where=self.where)
        return keys, values

    def get_seq_length(self, layer_index=0):
        return 0  # of a prompt that is read whole; otherwise positions are passed


def padded(sequences) -> torch.Tensor:
    """Token ids (B, L) of B sequences, padded on the right, where a causal model cannot see it: no mask is needed."""
    return pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)


def packed(items, budget):
    """Lists of items, each of at most `budget` tokens with padding, of which there is little in the order of lengths.

    items: (length, number of sequences, item) each.
    """
    batch, count, width = [], 0, 0
    for length, more, item in items:
        if batch and (count + more) * max(width, length) > budget:
            yield batch
            batch, count, width = [], 0, 0
        batch, count, width = batch + [item], count + more, max(width, length)
    if batch:
        yield batch


def on_device(values, device) -> torch.Tensor:
    """A tensor of them there, without waiting for what the GPU is still at."""
    values = torch.as_tensor(values)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def room_for_cache(free) -> float:
    """Bytes for the cache, where so many are free. The sandbox keeps SPARE, or at least half of what is free."""
    return 0.85 * max(free - SPARE, free / 2)


def slots_that_fit(model, length, wanted, most) -> int:
    """How many slots of `length` tokens to allocate on a GPU where `wanted` are needed now, and later `most`.

    Where the cache of `most` is small, all of them. Raises torch.OutOfMemoryError when not even one fits.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    heads, dim, layers = shape_of_cache(model.config)
    each = 2 * layers * heads * dim * length * model.dtype.itemsize
    room = int(room_for_cache(free) / each)
    if room < 1:
        raise torch.OutOfMemoryError(f"no memory for the cache of one sequence of {length} tokens")
    return min(most if most * each <= SMALL * total else wanted, room)
