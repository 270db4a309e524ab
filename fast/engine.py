"""The rollout engine: many replies at once, near the speed at which a GPU can read the weights and the cache.

Writing a token reads every weight once, for all sequences together, and each sequence's own keys and values. On an H200
that takes 6 ms for 64 sequences of the Qwen3-8B shape. Hugging Face's `generate` takes 70 ms: it launches some two
thousand small kernels, one after the other, from Python, and copies the cache in every step to append to it.
Here, on the unmodified weights and modeling code:

    slots               one preallocated cache; a sequence that is finished gives its slot to a waiting prompt
    fewer kernels       for attention to the cache, norms and rotary embedding (attention.py)
    CUDA graph          a whole step, sampling included, is recorded once and replayed: no launches from Python (unless
                        the modeling code waits for the GPU in its midst, as some mixtures of experts do)
    no waiting          while the host reads what was written, and lets prompts that have come meanwhile join, the GPU
                        writes the next few tokens
    one prefill         for equal prompts that start together (the rollouts of a scheme, the selections of a task)
    later turns         of a conversation read what is new only: a finished sequence's cache stays in its slot until
                        another sequence needs it, the memory is given back, or the weights have changed

On a CPU the same loop runs without graphs and Triton. There a prompt stays where it was read, and each step reads it
once for all replies that it gets; a slot holds the reply alone.

Architectures whose layers are not all plain full attention (sliding windows, linear or latent attention) do not come
here: Backbone samples them through the model's own cache.

In comments: S slots, n of them in use, T the length of a slot, H query heads, G of them share a key/value head, D the
head dimension, V the vocabulary.
"""

import contextlib
import functools
import warnings
import weakref
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import triton
from transformers import DynamicCache

from fast.attention import Prompts, append, bias_beyond, fused_rotation, shape_of_cache

BLOCK = 16  # tokens that are written between two looks at which sequences are finished, at most
BLOCK_ON_GPU = 4  # the same; who waits to have the GPU alone gets it after two of these at the latest
SMALL = 1 / 16  # of the GPU's memory: a cache of this size is in nobody's way
SPARE = 40 << 30  # bytes that stay free for the sandbox between calls; otherwise the cache is given back at once
PREFILL = 32768  # most prompt tokens, padding included, in one forward on a GPU

# ----------------------------------------------------------------------------------------------------------------------
# The sequences that are being written


@dataclass(eq=False)
class Reply:
    """What is written to one prompt."""

    key: object  # the caller's name for it
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, at temperature 1
    begun: int = 0  # tokens that the GPU has been told to write: some may not have been looked at
    ended: bool = False


class Block:
    """What is being written, to be looked at later. The i-th of `tokens` and `logprobs` (n, columns) is owner[i]'s."""

    def __init__(self, owner, fresh, tokens, logprobs):
        """owner: [Reply or None]; fresh: of which the first column is new. For others that is their last token."""
        self.owner, self.fresh, self.event = list(owner), set(fresh), None
        self.tokens, self.logprobs = (column.to("cpu", non_blocking=True) for column in (tokens, logprobs))
        if tokens.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def look(self):
        """[(Reply, [(token, logprob), ...]), ...] for those that had not ended, once all is written."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [(reply, list(zip(tokens[row], logprobs[row]))[row not in self.fresh:])
                for row, reply in enumerate(self.owner) if reply and not reply.ended]


@functools.cache
def side_stream():
    """One stream for all captures: cuBLAS keeps 32 MiB for each that it has seen."""
    return torch.cuda.Stream()


class Slots:
    """S sequences with their caches, and the step that writes one token of each.

    Passed to the model as `past_key_values`: each forward hands in one new token a sequence, which lands at that
    sequence's own position, so sequences of different lengths need no padding. The tensors keep their addresses, which
    is what lets a CUDA graph replay a step.
    """

    is_compileable = False

    def __init__(self, model, rows, length, stop_ids, lean=False):
        """lean: a slot holds only what is written, and `prompts` what it was an answer to (on a CPU)."""
        self.model, self.rows, self.length, device = model, rows, length, model.device
        _, heads, dim, layers = shape_of_cache(model)
        shape = (rows, heads, length, dim)  # (S, H / G, T, D)
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(layers)]
        self.position = torch.zeros(rows, dtype=torch.long, device=device)  # of a sequence's next token, 0 when done
        self.token = torch.zeros(rows, dtype=torch.long, device=device)  # its last one
        self.logprob = torch.zeros(rows, device=device)
        self.end = torch.zeros(rows, dtype=torch.long, device=device)  # the position that it must not reach
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.count = rows  # n: the first so many slots are in use
        self.prompts = [] if lean else None  # [Prompts] that sequences in the slots begin with
        self.start = torch.zeros(rows, dtype=torch.long, device=device)  # the position of the first token in a slot
        self.graphs = {}  # {(n, temperature): CUDA graph of a step}
        # A graph draws from the generator that it was captured with, so this one lives as long as the graphs.
        self.generator = torch.Generator(device)
        self.forget()
        self.reading = None  # (rows, places, window) while `read` is at work

    def forget(self):
        """Know nothing of earlier replies, so that what comes is written as in new slots."""
        self.text = [[]] * self.rows  # tokens whose keys and values lie in each slot, where a finished reply left them
        self.used = [0] * self.rows  # when a slot was given away last, see Engine._seat

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
        if key.is_cuda:
            append(key, value, keys, values, self.places)
            return keys, values
        heads, dim = keys.shape[1], keys.shape[3]
        lines = torch.arange(self.count * heads) * self.length + self.places.repeat_interleave(heads)
        keys.view(-1, dim)[lines] = key.reshape(-1, dim)
        values.view(-1, dim)[lines] = value.reshape(-1, dim)
        keys.prompts = [part for prompts in self.prompts or [] for part in prompts.parts[layer_index]]
        return keys, values  # which the modeling code hands on to causal_attention as they are

    def get_seq_length(self, layer_index=0):
        return 0  # positions are always passed explicitly

    # ---- coming and going

    def fill(self, rows, source, prefill, lengths):
        """Let sequence `rows[i]` begin with prompt `source[i]` of a prefill, a DynamicCache of prompts of `lengths`."""
        assert prefill.layers[0].keys.shape[1::2] == self.keys[0].shape[1::2], "this attention caches something else"
        if self.prompts is not None:
            self._move_prompts({row: row for row in range(self.rows) if row not in rows})
            replies = [[row for row, i in zip(rows, source) if i == prompt] for prompt in range(len(lengths))]
            lengths = torch.tensor(lengths)
            self.prompts.append(Prompts(prefill, lengths, replies))
            self.start[rows] = lengths[source]
            return
        rows, source = (on_device(column, self.token.device) for column in (rows, source))
        for layer, keys, values in zip(prefill.layers, self.keys, self.values):
            length = layer.keys.shape[2]
            keys[rows, :, :length] = layer.keys[source]
            values[rows, :, :length] = layer.values[source]

    def _move_prompts(self, to):
        for prompts in self.prompts or []:
            prompts.move(to)
        self.prompts = self.prompts and [prompts for prompts in self.prompts if prompts.rows]

    def adopt(self, other):
        """Take over the texts of other slots, which are no longer than these."""
        count = min(self.rows, other.rows)
        for mine, theirs in zip([*self.keys, *self.values], [*other.keys, *other.values]):
            mine[:count, :, :other.length] = theirs[:count]
        self.text[:count], self.used[:count] = other.text[:count], other.used[:count]

    def arrange(self, first, alive=()):
        """Move slots `first` to the front, in this order, and use no others; texts in others stay behind them.

        alive: those in which a reply is being written.
        """
        resting = on_device([row not in alive for row in first], self.token.device)
        if first == list(range(self.count)):
            self.done[:len(first)] |= resting
            return
        self.count, chosen = len(first), set(first)
        away = iter([row for row in range(self.count) if row not in chosen])  # they change places with who comes
        order = [*first, *(next(away) if row in chosen else row for row in range(self.count, self.rows))]
        moved = [i for i, row in enumerate(order) if row != i and (self.text[row] or row in alive)]
        text, self.text = [self.text[row] for row in order], [[]] * self.rows  # none, should something fail half way
        if moved:
            to, source = (on_device(rows, self.token.device) for rows in (moved, [order[i] for i in moved]))
            for tensor in [*self.keys, *self.values, self.position, self.start, self.end, self.token, self.logprob,
                           self.done]:
                tensor[to] = tensor[source]
        self.done[:len(first)] |= resting
        self._move_prompts({row: i for i, row in enumerate(first)})
        self.text, self.used = text, [self.used[row] for row in order]

    def find(self, prompts) -> dict:
        """{index of a prompt: slot with the most part of it}, for those prompts whose beginning lies in a slot."""
        texts = sorted(((len(text), text, row) for row, text in enumerate(self.text) if text), key=lambda it: -it[0])
        found = {}
        for i, prompt in enumerate(prompts):
            for length, text, row in texts:
                if 2 * length < len(prompt):
                    break
                if length <= len(prompt) and prompt[length - 1] == text[-1] and prompt[:length] == text and (
                        row not in found.values()):
                    found[i] = row
                    break
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
            on_device(tensor, self.token.device) for tensor in (ids, positions, places, mask, rows, lengths - 1))
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
        inside = self.position[used]  # where in its slot each sequence's token lies, the last that it attends to
        if self.token.is_cuda:
            mask = inside[:, None, None, None]
        else:
            inside = (inside - self.start[used]).clamp(min=0)
            mask = bias_beyond(inside + 1, int(inside.max()) + 1, self.model.dtype)
        # A finished sequence goes on until somebody looks, but it attends to nothing and leaves its cache alone.
        self.places = torch.where(self.done[used], self.length - 1, inside)
        hidden = self.model.base_model(input_ids=self.token[used, None], position_ids=self.position[used, None],
                                       attention_mask=mask, past_key_values=self, use_cache=True,
                                       ).last_hidden_state[:, 0]  # (n, width of the model)
        later = self.position[used] + 1
        self.done[used] |= later >= self.end[used]
        self.position[used] = torch.where(self.done[used], 0, later)
        self.draw(head(hidden), used, temperature, generator)

    def step(self, head, temperature, generator):
        """Feed each sequence's last token, sample its next. `head` gives (n, V) logits for (n, width) hidden states.

        A model of a few million parameters is bound by launches, not by memory; the graph removes them all.
        """
        if self.token.device.type != "cuda" or self.model in UNRECORDABLE:
            return self._step(head, temperature, generator)
        key = (self.count, temperature)
        if key in self.graphs:
            return self.graphs[key].replay()
        side = side_stream()  # a capture needs a warm-up off the default stream; this one is a real step
        side.wait_stream(torch.cuda.current_stream())
        with fused_rotation(self.model), torch.cuda.stream(side):
            if never_waits(lambda: self._step(head, temperature, self.generator)):
                self.graphs[key] = self._recorded(head, temperature)
            else:
                UNRECORDABLE.add(self.model)
                print(f"engine: a step of {self.model.config.model_type} waits for the GPU in its midst, so that it "
                      "cannot be recorded; it is launched kernel by kernel")
                self._step(head, temperature, self.generator)  # from its beginning; nothing has been drawn yet
        torch.cuda.current_stream().wait_stream(side)

    def _recorded(self, head, temperature):
        """A CUDA graph of a step, captured in the current stream."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        # Not in torch.cuda.graph(), which first has PyTorch give back all memory that it keeps: while the sandbox's
        # processes start, that takes many times as long as all the rest. Where memory is short it must be: a graph
        # has its own.
        torch.cuda.synchronize()
        if torch.cuda.mem_get_info()[0] < SPARE:
            torch.cuda.empty_cache()
        graph.capture_begin(pool)
        try:
            self._step(head, temperature, self.generator)
        finally:
            graph.capture_end()
        return graph


UNRECORDABLE = weakref.WeakSet()  # models


def never_waits(work) -> bool:
    """Do some work on the GPU up to where it would wait for a result, as modeling code does that asks which experts
    are chosen. Returns whether it is done."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # it warns that it does not see all
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        return True
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ----------------------------------------------------------------------------------------------------------------------


def padded(sequences) -> torch.Tensor:
    """Token ids (B, L) of B sequences, padded on the right, where a causal model cannot see it: no mask is needed."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in zip(ids, sequences):
        row[:len(sequence)] = torch.tensor(sequence)
    return ids


def on_device(values, device) -> torch.Tensor:
    """A tensor of them there, without waiting for what the GPU is still at."""
    values = torch.as_tensor(values)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def at_once(prompts):
    """A source for Engine.stream: all of these prompts, by their indices, and no more."""
    coming = [list(enumerate(prompts))] if prompts else []
    return lambda wait: coming.pop() if coming else None


class Engine:
    """Replies to many prompts. `head` maps hidden states (..., width) to float32 logits (..., V)."""

    def __init__(self, model, head, stop_ids):
        self.model, self.head, self.stop_ids = model, head, list(stop_ids)
        self.cuda = model.device.type == "cuda"
        self.keeps = self.cuda  # slots, from call to call, with their graphs and texts, while there is memory
        self.block = BLOCK_ON_GPU if self.cuda else BLOCK
        self.ahead = int(self.cuda)  # blocks that the GPU has been given beyond the one that is looked at
        self.slots, self.version = None, None  # version: of the weights that the texts were read with
        self.seatings, self.writing = 0, None  # how often slots have been given away; the stream that uses them

    def release(self):
        """Give the cache's memory back, also to other processes; a small one stays, as its graphs are worth more.

        To be called before the weights change: what is cached was made with the old ones.
        """
        if self.slots is not None:
            self.slots.forget()
        self._give_back()

    def _give_back(self):
        slots = self.slots
        if slots is not None:
            if not self.cuda or slots.rows < slots.asked or slots.rows > self._small(slots.length):
                self.slots = slots = None
        if self.cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def stream(self, source, max_new_tokens, temperature, generator, rows=None, turn=contextlib.nullcontext):
        """Yields every Reply as soon as it has ended.

        source(wait): what has come to be answered since it was last asked, [(key, prompt as token ids), ...], or None
        when no more will come. wait: nothing is left to be written, so it returns only when something has come.
        rows: most sequences at a time (default 64 on a CPU, 256 on a GPU, fewer where memory is short). A reply ends
        with a stop token, or without one after max_new_tokens. turn: as of Backbone.stream. One stream at a time.
        """
        limit = rows or (256 if self.cuda else 64)
        waiting, owner, slots, coming = [], [], None, True  # owner: the Reply that each slot is writing, or None
        me = self.writing = object()

        def listen(wait):
            """Ask what has come; returns whether more can come."""
            new = source(wait)
            waiting.extend(Reply(key, prompt) for key, prompt in new or [])
            waiting.sort(key=lambda reply: (len(reply.prompt), reply.prompt))
            if not all(reply.prompt for reply in waiting):
                raise ValueError("a prompt without tokens")
            return new is not None

        while True:
            if not any(owner) and not waiting:
                if slots is not None:
                    slots = None  # or its memory would outlive what follows
                    self._spare_memory()
                if not coming:
                    break
                coming = listen(wait=True)
                if max_new_tokens < 1:
                    yield from waiting
                    waiting.clear()
                continue
            flight, ended = [], []  # blocks that have not been looked at; replies that have not been handed over
            with turn() as mine, self._all_done():
                while any(owner) or waiting:
                    if self.writing is not me:
                        raise RuntimeError("another stream has begun since: the slots are its own now")
                    if not any(owner) and (self.keeps or slots is None or slots.rows < min(limit, len(waiting))):
                        slots = self._make_slots(waiting, limit, max_new_tokens, turn is not contextlib.nullcontext)
                        owner, draws = [None] * slots.count, self._draws(slots, temperature, generator)
                    owner, fresh = self._seat(slots, owner, waiting, limit, max_new_tokens)
                    if fresh:
                        prompts = [owner[row].prompt for row in fresh]
                        self._admit(slots, fresh, prompts, max_new_tokens, temperature, draws)
                    block = self._write(slots, owner, fresh, max_new_tokens, temperature, draws)
                    flight += [block] if block else []
                    while flight and (len(flight) > self.ahead or not block):
                        ended += self._look(slots, owner, flight.pop(0), max_new_tokens)
                    if not self.ahead or mine is not None and mine.wanted():
                        break
                    yield from ended  # the GPU is at the next block
                    ended = []
                    coming = coming and listen(wait=False)
                for block in flight:
                    ended += self._look(slots, owner, block, max_new_tokens)
            yield from ended
            coming = coming and listen(wait=False)

    @contextlib.contextmanager
    def _all_done(self):
        """At the end of a turn, however it ends, nothing of it may still be waiting for the GPU."""
        try:
            yield
        finally:
            if self.cuda:
                torch.cuda.synchronize()

    def _draws(self, slots, temperature, generator):
        """Where random numbers come from: a CUDA graph has a generator of its own, which the one given seeds."""
        if not self.cuda or not temperature:
            return generator
        device = generator.device if generator is not None else "cpu"
        return slots.generator.manual_seed(torch.randint(2**62, (), generator=generator, device=device).item())

    def _write(self, slots, owner, fresh, max_new_tokens, temperature, generator) -> Block | None:
        """Write the next few tokens of each reply, the first of `fresh` ones included, which has been drawn."""
        for row in fresh:
            owner[row].begun = 1
        left = max(max_new_tokens - reply.begun for reply in owner if reply) + bool(fresh)
        steps = min(self.block, left) - bool(fresh)
        if not fresh and steps < 1:
            return None  # all has been begun
        written = [(slots.token.clone(), slots.logprob.clone())]
        for _ in range(steps):
            slots.step(self.head, temperature, generator)
            written.append((slots.token.clone(), slots.logprob.clone()))
        for reply in filter(None, owner):
            reply.begun += steps
        return Block(owner, fresh, *(torch.stack(column, 1)[:slots.count] for column in zip(*written)))

    def _look(self, slots, owner, block, max_new_tokens) -> list[Reply]:
        """Hand a block's tokens to their replies; those that end give up their slots, and are returned."""
        ended = []
        for reply, tokens in block.look():
            for token, logprob in tokens:
                reply.tokens.append(token)
                reply.logprobs.append(logprob)
                if token in self.stop_ids or len(reply.tokens) == max_new_tokens:
                    reply.ended, row = True, owner.index(reply)
                    ended.append(reply)
                    owner[row] = None
                    slots.text[row] = [*reply.prompt, *reply.tokens[:-1]] if self.keeps else []
                    break
        return ended

    def _spare_memory(self):
        """Give the cache back, should the sandbox need its memory."""
        if self.cuda and torch.cuda.mem_get_info()[0] < SPARE:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < SPARE:
                self._give_back()

    def _make_slots(self, waiting, limit, max_new_tokens, beside) -> Slots:
        """Slots for what is waiting, at most `limit` at a time, or as many as there is memory for; none is in use.

        beside: is the sandbox at work meanwhile? Then it gets SPARE, or at least half of what is free. Where slots are
        kept and the cache is small there is one for each that waits, so that its later turns can go on in it, and they
        are as long as those of earlier calls.
        """
        rows, length = min(len(waiting), limit), max_new_tokens + 1
        if not self.keeps:
            return Slots(self.model, rows, -(-length // 128) * 128, self.stop_ids, lean=True)
        rows, old = triton.next_power_of_2(rows), self.slots
        length = -(-(length + max(len(reply.prompt) for reply in waiting)) // 512) * 512
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
            every = len(waiting) if len(waiting) <= min(spare, self._small(length)) else 0
            self.slots = Slots(self.model, min(max(asked, every), room), length, self.stop_ids)
            self.slots.asked = asked  # where memory was short, asking again would not give more
            if old is not None:
                self.slots.adopt(old)
        version = sum(p._version for p in self.model.parameters())
        if self.version != version:  # the texts were read with other weights (a fused optimiser's are not seen here)
            self.version = version
            self.slots.forget()
        self.slots.count = self._rows_for(rows, self.slots)
        self.slots.done.fill_(True)  # what the last call has left must not go on
        self.slots.position.zero_()
        return self.slots

    @staticmethod
    def _rows_for(sequences, slots) -> int:
        """How many rows to compute for so many sequences on a GPU."""
        count = triton.next_power_of_2(sequences)
        return min(32 if count in (8, 16) else count, slots.rows)  # in float32 cuBLAS takes longer for 8 or 16 than 32

    def _small(self, length) -> int:
        """How many sequences of `length` make a small cache at most."""
        total = torch.cuda.mem_get_info()[1] if self.cuda else 1 << 40
        return int(SMALL * total / Slots.bytes_for_row(self.model, length))

    def _room(self, length, beside) -> tuple:
        """For how many more sequences of `length` there is memory: at most, and such that SPARE is left."""
        if not self.cuda:
            return 1 << 20, 1 << 20
        torch.cuda.empty_cache()
        each = Slots.bytes_for_row(self.model, length)
        free = torch.cuda.mem_get_info()[0] - 3 * Slots.bytes_for_row(self.model, PREFILL)  # reading needs some too
        most, spare = int(0.85 * free / each), int((free - SPARE) / each)
        return (min(most, max(spare, most // 2)) if beside else most), spare

    def _seat(self, slots, owner, waiting, limit, max_new_tokens) -> tuple:
        """Give slots to waiting replies, and stop computing those of finished ones where it pays.

        Returns the new owners of the slots, and which of them begin now; takes these out of `waiting`. A prompt whose
        beginning lies in a slot gets that one, others those unused for longest.
        """
        alive = [row for row, reply in enumerate(owner) if reply]
        begin = waiting[:self._how_many_begin(slots, len(alive), waiting, limit, max_new_tokens)]
        count = self._how_many_to_compute(slots, len(alive) + len(begin), waiting)
        if not begin and count == slots.count:
            return owner, []
        found = slots.find([reply.prompt for reply in begin]) if self.keeps else {}
        others = sorted(set(range(slots.rows)) - set(alive) - set(found.values()),
                        key=lambda row: (bool(slots.text[row]), slots.used[row], row) if self.keeps else row)
        unused = iter(others)
        rows = [found[i] if i in found else next(unused) for i in range(len(begin))]
        busy = [*alive, *rows]
        if count < slots.count and not self.cuda:
            first = sorted(busy)
        else:  # those in use stay where they are, if that is among the first
            first, inside, outside = list(range(count)), set(busy), [row for row in busy if row >= count]
            for place, row in zip([row for row in first if row not in inside], outside):
                first[place] = row
        slots.arrange(first, set(alive))
        place, new = {row: i for i, row in enumerate(first)}, [None] * count
        for row, reply in zip(busy, [*(owner[row] for row in alive), *begin]):
            new[place[row]] = reply
        fresh = [place[row] for row in rows]
        self.seatings += 1
        for i, row in enumerate(fresh):
            slots.used[row] = self.seatings
            if i not in found:
                slots.text[row] = []
        del waiting[:len(begin)]
        return new, fresh

    def _how_many_begin(self, slots, alive, waiting, limit, max_new_tokens) -> int:
        """How many of the waiting replies begin now, the shortest first, beside `alive` ones that are being written."""
        most = min(limit, slots.rows)
        free, fit = most - alive, len(waiting)
        if alive and self.keeps:
            fit = sum(len(reply.prompt) + max_new_tokens < slots.length for reply in waiting)
            if 2 * fit < len(waiting) or slots.asked < min(limit, alive + len(waiting)) / 2:
                return 0  # the slots are too short, or made for few: what has begun is ended, then others are made
        if alive and free < most / 4 and not (self.keeps and fit <= free):
            return 0  # to read each one by itself would cost more
        return min(free, fit)

    def _how_many_to_compute(self, slots, busy, waiting) -> int:
        """How many slots to compute, now that `busy` are in use.

        On a CPU every row costs. On a GPU the weights' reading does, which one row pays for as well as 64 do, and every
        other number of rows needs a graph of its own.
        """
        count = slots.count
        if self.cuda:
            return count if count / 2 < busy <= count else self._rows_for(busy, slots)
        return busy if busy > count or not waiting and busy <= 0.8 * count else count

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
        rows, lengths = (on_device(column, self.model.device) for column in (rows, list(map(len, prompts))))
        slots.position[rows] = lengths
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
            slots.fill(*map(list, zip(*pairs)), cache, list(map(len, unique[part])))
            logits.append(part_logits)
        return [torch.cat(logits)[on_device(source, self.model.device)]]

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
        last = on_device([len(prompt) - 1 for prompt in prompts], self.model.device)
        out = self.model.base_model(input_ids=on_device(padded(prompts), self.model.device), use_cache=True,
                                    past_key_values=DynamicCache(config=self.model.config))
        hidden = out.last_hidden_state[torch.arange(len(prompts), device=self.model.device), last]
        return out.past_key_values, self.head(hidden)
