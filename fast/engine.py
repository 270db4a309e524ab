"""The rollout engine: samples many replies together, near the speed at which a GPU can read the weights and the cache.

One step of decoding reads every weight once, for all sequences together, and each sequence's own keys and values. On an
H200 that takes 6 ms for 64 sequences of the Qwen3-8B shape. Hugging Face's `generate` takes 70 ms: it launches about
two thousand small kernels, one after the other, from Python, and copies the cache in every step to append to it.
Here, with the weights and the modeling code of transformers unchanged:

    slots            one preallocated cache; the slot of a finished sequence goes to a waiting prompt (slots.py)
    CUDA graph       a whole step, sampling included, is captured once and replayed (step.py)
    fewer kernels    for attention to the cache and for norms (attention.py)
    no waiting       the GPU computes the next few tokens while the host reads the last few
    one prefill      for equal prompts that begin together (the rollouts of a scheme, the selections of a task)

On a CPU the same loop runs without graphs and Triton, on slots that share their prompts (prompts.py).
"""

from collections import Counter
from dataclasses import dataclass, field

import torch

from command.progress import count
from fast.prompts import SharedPromptSlots
from fast.slots import Slots, packed
from fast.step import Step, draw

PREFILL = 32768  # most prompt tokens, padding included, in one forward pass


@dataclass(eq=False)
class Request:
    """A prompt, and the reply that is sampled for it."""

    key: object  # the caller's name for it
    prompt: list[int]
    stream: int  # seed of its random numbers
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, at the temperature at which they are sampled
    slot: int | None = None
    row: int | None = None  # of the batch that a step computes
    launched: int = 1  # tokens whose computation was launched since it began; the host may not have read them yet
    ended: bool = False


class Engine:
    """Samples many replies together; one session at a time, from `start` to `stop`. In it the weights must not change.

    A session draws one number from the generator. The stream of a reply follows from that number, from its prompt, and
    from how often the prompt was added before. So a reply does not depend on what is sampled beside it, and a run has
    the same replies on any number of GPUs.
    """

    def __init__(self, model, head, stop_ids, completion):
        """head: hidden states (N, width of the model) to float32 logits (N, V). stop_ids: tokens that end a reply.

        completion: turns a Request that has ended into what the caller gets.
        """
        self.model, self.head, self.stop_ids, self.completion = model, head, list(stop_ids), completion
        self.cuda = model.device.type == "cuda"
        self.kind = Slots if self.cuda else SharedPromptSlots
        self.most = 256 if self.cuda else 64  # sequences that are sampled at a time
        self.block = 4 if self.cuda else 16  # tokens of each sequence that are launched together
        self.slots = None
        self.longest = 0  # tokens of the longest prompt with its reply, in all sessions so far
        self.write_token = Step(model, head, stop_ids)

    def start(self, sampling, generator):
        """Begin a session. sampling: max_new_tokens, temperature (0 is greedy), top_p. generator: torch's, or None."""
        self.sampling, self.seed, self.added = sampling, 0, Counter()  # {hash of a prompt: how often it was added}
        if sampling.temperature:
            device = generator.device if generator else "cpu"
            self.seed = torch.randint(2**62, (), generator=generator, device=device).item()
        self.queue, self.active = [], []  # [Request]: waiting for a slot, in the order of beginning; being sampled

    def stop(self):
        """End the session. Replies that have not ended are lost."""
        if not self.cuda:
            self.slots = None  # on a GPU they stay, with their graphs

    def release(self):
        """Give the memory of the cache and of its graphs back."""
        self.slots = None
        if self.cuda:
            torch.cuda.empty_cache()

    def write(self, prompts):
        """Sample a reply to each of {key: prompt}; yields (key, Completion) as soon as one ends, until all have.

        A reply ends with a stop token, or without one after max_new_tokens. The next call in a session goes on with
        that session's random numbers. Raises ValueError for a prompt without tokens.
        """
        for key, prompt in prompts.items():
            if not prompt:
                raise ValueError("a prompt without tokens")
            name = hash(tuple(prompt))
            self.queue.append(Request(key, prompt, hash((self.seed, name, self.added[name]))))
            self.added[name] += 1
        # Short prompts first, equal ones as neighbours.
        self.queue.sort(key=lambda request: (len(request.prompt), request.prompt))
        launched = None  # the block that the GPU computes
        while self.queue or self.active:
            block = self._launch(self._begin())
            # A CPU has computed this block; a GPU computes it while the host reads the one before.
            ready, launched = (block, None) if self.kind is SharedPromptSlots else (launched, block)
            for request in self._read(*ready) if ready else ():
                count("replies")
                yield request.key, self.completion(request)
        if self.cuda:
            torch.cuda.synchronize()  # sequences that have ended may still be computed

    # ---- waiting prompts begin

    @torch.no_grad()
    def _begin(self) -> set:
        """Allocate slots to waiting prompts, prefill them, and draw the first token of each; the requests that began.
        """
        if self.queue and not self.active:
            self._make_slots()
        free = sorted(set(range(self.slots.rows)) - {request.slot for request in self.active})
        if self.active and len(free) < self.slots.rows / 4:
            free = []  # a prefill of few prompts would keep all waiting
        requests, self.queue = self.queue[:len(free)], self.queue[len(free):]
        for request, slot in zip(requests, free):
            request.slot = slot
        self.active += requests
        self.slots.set_batch(self.active, growing=bool(requests or self.queue))
        if requests:
            logits, order = self._prefill(requests)
            rows = self.slots.begin(order, self.sampling.max_new_tokens)
            draw(self.slots, rows, logits, self.write_token.stops, self.sampling)
        return set(requests)

    def _make_slots(self):
        """Allocate slots for what is waiting; earlier ones are kept if they are long and many enough."""
        rows, fewest = self.most, 1
        length = self.sampling.max_new_tokens
        if self.kind is Slots:  # of whole sequences, and as many as there may ever be: they stay for later sessions
            length += max(len(request.prompt) for request in self.queue) + 1
            length = self.longest = max(self.longest, -(-length // 512) * 512)
        else:
            rows = fewest = min(self.most, len(self.queue))
        if self.slots is None or self.slots.rows < fewest or self.slots.length < length:
            self.slots = None  # their memory is free before more is allocated
            self.slots = self.kind(self.model, rows, length)

    def _prefill(self, requests) -> tuple:
        """Compute the prompts of requests: (logits (R, V) after each one's last token, the requests in that order)."""
        equal = {}  # requests with the same prompt, which is read once
        for request in requests:
            equal.setdefault(tuple(request.prompt), []).append(request)
        logits, order = [], []
        for part in packed([(len(prompt), 1, group) for prompt, group in equal.items()], PREFILL):
            hidden, source = self.slots.read(part)  # source (R,): the group of each request
            logits.append(self.head(hidden)[source])
            order += sum(part, [])
        return torch.cat(logits), order

    # ---- all replies go on

    @torch.no_grad()
    def _launch(self, begun):
        """Launch the next steps of all replies, as `_read` takes them; None where all were launched before.

        begun: requests whose first token was drawn just now; it stands in the first column.
        """
        slots = self.slots
        rows = slots.batch[:slots.count]
        columns = [(slots.token[rows], slots.logprob[rows])] if begun else []
        left = self.sampling.max_new_tokens - min(request.launched for request in self.active)
        steps = min(self.block - len(columns), left)
        for _ in range(steps):
            self.write_token(slots, self.sampling)
            columns.append((slots.token[rows], slots.logprob[rows]))
        if not columns:
            return None
        places = []
        for request in self.active:
            request.launched += steps
            places.append((request, request.row, int(bool(begun) and request not in begun)))
        tokens, logprobs = (torch.stack(column, 1).to("cpu", non_blocking=True) for column in zip(*columns))
        return places, tokens, logprobs, torch.cuda.current_stream().record_event() if self.cuda else None

    def _read(self, places, tokens, logprobs, event) -> list:
        """Hand a block's tokens to their requests; those that end, which are returned, free their slots.

        places: [(request, row, first column that is its)]. tokens, log-probabilities (rows, columns) are there after
        the event.
        """
        if event:
            event.synchronize()
        ended, columns = [], list(zip(tokens.tolist(), logprobs.tolist()))
        for request, row, first in places:
            for token, logprob in list(zip(*columns[row]))[first:]:
                if not request.ended:
                    request.tokens.append(token)
                    request.logprobs.append(logprob)
                    request.ended = token in self.stop_ids or len(request.tokens) == self.sampling.max_new_tokens
                    ended += [request] * request.ended
        self.active = [request for request in self.active if not request.ended]
        return ended
