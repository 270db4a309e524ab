"""The rollout engine: many replies at once, near the speed at which a GPU can read the weights and the cache.

Writing a token reads every weight once, for all sequences together, and each sequence's own keys and values. On an H200
that takes 6 ms for 64 sequences of the Qwen3-8B shape. Hugging Face's `generate` takes 70 ms: it launches some two
thousand small kernels, one after the other, from Python, and copies the cache in every step to append to it.
Here, on the weights and the modeling code of transformers as they are:

    slots            one preallocated cache; the slot of a finished sequence goes to a waiting prompt (slots.py)
    CUDA graph       a whole step, sampling included, is recorded once and replayed (step.py)
    fewer kernels    for attention to the cache and for norms (attention.py)
    no waiting       the GPU writes the next few tokens while the host reads the last few
    one prefill      for equal prompts that begin together (the rollouts of a scheme, the selections of a task)
    later turns      of a conversation read only what is new: a finished sequence stays in its slot until the slot is
                     needed

On a CPU the same loop runs without graphs and Triton, on slots that share their prompts (prompts.py).

The interface is that of other engines: `add` a prompt, `step` to write a few tokens of everything, which returns the
replies that ended. Whoever calls decides when. Architectures whose layers are not all plain full attention (sliding
windows, linear or latent attention) take the slow way, PlainEngine.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import triton

from fast.attention import name_of_cache
from fast.prompts import SharedPromptSlots
from fast.slots import SMALL, SPARE, Slots, on_device, packed, slots_that_fit
from fast.step import Step, draw, nucleus

PREFILL = 32768  # most prompt tokens, padding included, in one forward


@dataclass(eq=False)
class Request:
    """A prompt, and the reply that is written to it."""

    prompt: list[int]
    key: object  # the caller's name for it
    number: int  # in the order of adding
    stream: int  # of its random numbers
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, at the temperature at which they are sampled
    slot: int | None = None
    row: int | None = None  # of the batch that steps compute
    known: int = 0  # tokens of the prompt whose keys and values lie in the slot already
    begun: int = 0  # tokens that the GPU has been told to write; the host may not have read them yet
    ended: bool = False


class Block:
    """Tokens that are being written; `read` waits for them."""

    def __init__(self, requests, rows, tokens, logprobs):
        """tokens, logprobs (rows, columns): requests[i] has row rows[i]."""
        self.requests, self.rows, self.event = list(requests), list(rows), None
        self.tokens, self.logprobs = (column.to("cpu", non_blocking=True) for column in (tokens, logprobs))
        if tokens.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list:
        """[(Request, [(token, logprob), ...]), ...]"""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [(request, list(zip(tokens[row], logprobs[row]))) for request, row in zip(self.requests, self.rows)]


class Engine:
    """Writes replies to prompts, which may be added at any time; one session at a time, from `start` to `stop`."""

    def __init__(self, model, head, stop_ids, completion):
        """head: hidden states (N, width of the model) to float32 logits (N, V). stop_ids: tokens that end a reply.

        completion: a Request that has ended to what its caller gets.
        """
        self.model, self.head, self.stop_ids, self.completion = model, head, list(stop_ids), completion
        self.cuda = model.device.type == "cuda"
        self.kind = Slots if self.cuda else SharedPromptSlots  # only Slots keep a text when its sequence has ended
        self.most = 256 if self.cuda else 64  # sequences that are written at a time
        self.block = 4 if self.cuda else 16  # tokens of each that a step writes at most
        self.ahead = self.cuda  # does a step read what the step before has written, while the GPU goes on?
        self.slots = None
        self.wanted = 0  # how many slots were asked for; where memory is short, there are fewer
        self.longest = 0  # tokens of the longest prompt with its reply, in all sessions so far
        self.write = Step(model, head, stop_ids)
        self.start(0, 0, None)

    # ---- a session

    def start(self, max_new_tokens, temperature, generator, top_p=1.0):
        """Begin a session; whatever another one has left is forgotten. temperature 0 is greedy.

        A session draws one number from the generator. What a reply draws follows from that, from its prompt, and from
        how often the prompt has been added before.
        """
        self.max_new_tokens, self.temperature, self.top_p = max_new_tokens, temperature, top_p
        self.seed, self.added_before = 0, Counter()  # {hash of a prompt: how often}
        if temperature:
            device = generator.device if generator else "cpu"
            self.seed = torch.randint(2**62, (), generator=generator, device=device).item()
        self.queue, self.active, self.in_flight = [], [], []  # [Request], [Request], [Block]
        self.texts, self.added = {}, 0  # {slot: tokens that lie in it}, those that ended first come first
        if not self.cuda:
            self.slots = None  # on a GPU they stay, with their graphs

    def add(self, prompt, key):
        """Add a prompt (token ids); `key`, any object, comes back with its reply. Raises ValueError for an empty one.

        Equal prompts that are added before the same step are read once.
        """
        if not prompt:
            raise ValueError("a prompt without tokens")
        name = hash(tuple(prompt))
        self.queue.append(Request(prompt, key, self.added, hash((self.seed, name, self.added_before[name]))))
        self.added_before[name] += 1
        self.added += 1

    @property
    def waiting(self) -> int:
        """How many replies have been asked for and have not been returned."""
        return len(self.queue) + len(self.active)

    @torch.no_grad()
    def step(self) -> list[tuple]:
        """Write a few tokens of all replies; (key, Completion) of those that ended, in the order of adding, often none.

        A reply ends with a stop token, or without one after max_new_tokens. On a GPU the next few tokens are still
        being written when this returns; see `pause`.
        """
        # 1. Allocate slots to waiting prompts, read these, and draw the first token of each.
        first = self._begin()
        # 2. Write the next tokens of all replies. On a GPU this only launches the work.
        blocks = first + self._write(self.block - len(first))
        # 3. Read what was written. On a GPU that is what the step before has launched, so that it never idles.
        if self.ahead and blocks:
            blocks, self.in_flight = self.in_flight, blocks
        else:
            blocks, self.in_flight = self.in_flight + blocks, []
        return [(request.key, self.completion(request)) for request in self._poll(blocks)]

    def pause(self):
        """Wait until the GPU has nothing left to do, so that others can use it; the next step goes on."""
        if self.cuda:
            torch.cuda.synchronize()

    def stop(self):
        """End the session. If little memory is free, a big cache is given back, which the sandbox may need."""
        self.pause()
        self.start(0, 0, None)
        if self.cuda and torch.cuda.mem_get_info()[0] < SPARE:
            self.release()

    def release(self):
        """Give the cache's memory back, also to other processes. A small cache stays, for the sake of its graphs."""
        if self.cuda:
            if self.slots is not None and self.slots.nbytes > SMALL * torch.cuda.mem_get_info()[1]:
                self.slots, self.texts = None, {}
            torch.cuda.empty_cache()

    # ---- 1. waiting prompts begin

    def _begin(self) -> list[Block]:
        """Allocate slots to waiting prompts and read these; a block with the first token of each."""
        if self.queue and not self.active:
            self._make_slots()
        requests = self._next_requests()
        if requests:
            self._allocate_slots(requests)
            self.queue = [request for request in self.queue if request.slot is None]
            self.active += requests
        if self.active:
            self.slots.set_batch(self.active, growing=bool(requests or self.queue))
        if not requests:
            return []
        logits, requests = self._read(requests)
        rows = on_device([request.slot for request in requests], self.model.device)
        slots = self.slots
        slots.position[rows] = on_device([len(request.prompt) for request in requests], self.model.device)
        slots.end[rows] = slots.position[rows] + self.max_new_tokens
        slots.stream[rows] = on_device([request.stream for request in requests], self.model.device)
        slots.done[rows] = False
        draw(slots, rows, logits, self.write.stops, self.temperature, self.top_p)
        for request in requests:
            request.begun = 1
        return [Block(requests, range(len(rows)), slots.token[rows, None], slots.logprob[rows, None])]

    def _make_slots(self):
        """Slots for what is waiting; earlier ones are kept if they are long and many enough."""
        wanted = min(self.most, len(self.queue))
        length = self.max_new_tokens
        if self.kind is Slots:  # whole sequences, and longer ones need no new slots in the next session
            wanted = triton.next_power_of_2(wanted)
            longest = max(len(request.prompt) for request in self.queue) + self.max_new_tokens + 1
            length = self.longest = max(self.longest, -(-longest // 512) * 512)
        if self.slots is None or self.wanted < wanted or self.slots.length < length:
            self.pause()
            self.slots, self.texts = None, {}  # its memory is free before more is allocated
            rows = slots_that_fit(self.model, length, wanted, self.most) if self.cuda else wanted
            self.slots = self.kind(self.model, rows, length)
            self.wanted = wanted

    def _next_requests(self) -> list[Request]:
        """The waiting requests that begin now, short prompts first, equal ones as neighbours."""
        if not self.queue:
            return []
        free = self.slots.rows - len(self.active)
        if self.active and free < self.slots.rows / 4:
            return []  # to read a few prompts would keep all others waiting
        # What is too long for the slots waits until nothing is being written; then longer slots are made.
        fit = [request for request in self.queue if len(request.prompt) + self.max_new_tokens < self.slots.length]
        return sorted(fit, key=lambda request: (len(request.prompt), request.prompt))[:free]

    def _allocate_slots(self, requests):
        """Give each request a slot: one with the beginning of its prompt, else an empty one, else the oldest text's."""
        for request in requests:
            held = [slot for slot, text in self.texts.items() if begins_with(request.prompt, text)]
            if held:
                request.slot = max(held, key=lambda slot: len(self.texts[slot]))
                request.known = min(len(self.texts.pop(request.slot)), len(request.prompt) - 1)
        used = {request.slot for request in [*self.active, *requests]}
        free = [slot for slot in range(self.slots.rows) if slot not in used and slot not in self.texts]
        free = iter([*free, *self.texts])
        for request in requests:
            if request.slot is None:
                request.slot = next(free)
                self.texts.pop(request.slot, None)

    def _read(self, requests) -> tuple:
        """Read the prompts of requests: (logits (R, V) after each one's last token, the requests in that order)."""
        logits, order = [], []
        equal = {}  # prompts that are read whole: each one's requests
        for request in requests:
            if not request.known:
                equal.setdefault(tuple(request.prompt), []).append(request)
        for groups in packed([(len(prompt), 1, group) for prompt, group in equal.items()], PREFILL):
            hidden = self.slots.read([group[0].prompt for group in groups],
                                     [[request.slot for request in group] for group in groups])
            source = [i for i, group in enumerate(groups) for _ in group]
            logits.append(self.head(hidden)[on_device(source, self.model.device)])
            order += [request for group in groups for request in group]
        later = [(len(request.prompt), 1, request) for request in requests if request.known]
        for part in packed(later, PREFILL):  # these go on where a text ends
            logits.append(self.head(self.slots.read_on([request.prompt for request in part],
                                                       [request.slot for request in part],
                                                       [request.known for request in part])))
            order += part
        return torch.cat(logits), order

    # ---- 2. everything goes on

    def _write(self, most) -> list[Block]:
        """Launch at most so many steps; a block with what they write. Nothing if all tokens have been launched."""
        count = min(most, max((self.max_new_tokens - request.begun for request in self.active), default=0))
        if count < 1:
            return []
        slots, tokens, logprobs = self.slots, [], []
        rows = slots.batch[:slots.count]
        for _ in range(count):
            self.write(slots, self.temperature, self.top_p)
            tokens.append(slots.token[rows])
            logprobs.append(slots.logprob[rows])
        for request in self.active:
            request.begun += count
        return [Block(self.active, [request.row for request in self.active], torch.stack(tokens, 1),
                      torch.stack(logprobs, 1))]

    # ---- 3. replies end

    def _poll(self, blocks) -> list[Request]:
        """Hand the tokens of blocks to their requests; those that end give their slots back, and are returned."""
        ended = []
        for request, tokens in [pair for block in blocks for pair in block.read()]:
            for token, logprob in tokens if not request.ended else ():
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if token in self.stop_ids or len(request.tokens) == self.max_new_tokens:
                    request.ended = True
                    ended.append(request)
                    self.active.remove(request)
                    if self.kind is Slots:  # the last token was drawn, but not read
                        self.texts[request.slot] = [*request.prompt, *request.tokens[:-1]]
                    break
        return sorted(ended, key=lambda request: request.number)


class PlainEngine(Engine):
    """The slow twin of Engine: one whole reply a step, through the model's own cache. Any architecture."""

    @torch.no_grad()
    def step(self):
        request = self.queue.pop(0)
        ids, cache = torch.tensor([request.prompt], device=self.model.device), None
        generator = torch.Generator(self.model.device).manual_seed(request.stream)
        name = name_of_cache(self.model)
        while len(request.tokens) < self.max_new_tokens:
            out = self.model(input_ids=ids, **{name: cache}, use_cache=True)
            cache = out[name]
            logprobs = F.log_softmax(out.logits[:, -1].float() / (self.temperature or 1.0), dim=-1)  # (1, V)
            if self.temperature == 0:
                ids = logprobs.argmax(-1, keepdim=True)  # (1, 1)
            else:
                shares = logprobs.exp()
                shares = nucleus(shares, self.top_p) if self.top_p < 1 else shares
                ids = torch.multinomial(shares, 1, generator=generator)
            request.tokens.append(ids.item())
            request.logprobs.append(logprobs[0, ids.item()].item())
            if ids.item() in self.stop_ids:
                break
        return [(request.key, self.completion(request))]


def begins_with(prompt, text) -> bool:
    """Does a prompt begin with all of a text? Its last token is compared first, since most texts differ there."""
    return 0 < len(text) <= len(prompt) and prompt[len(text) - 1] == text[-1] and prompt[:len(text)] == text
