"""Sampling: what a session is, and the slow way for any architecture, through transformers' own `generate`."""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(eq=False)
class Request:
    """A prompt, and the reply that is sampled for it."""

    key: object  # the caller's name for it
    prompt: list[int]
    number: int  # in the order of adding
    stream: int  # seed of its random numbers
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, at the temperature at which they are sampled
    # Engine's:
    slot: int | None = None
    row: int | None = None  # of the batch that a step computes
    launched: int = 1  # tokens whose computation was launched since it began; the host may not have read them yet
    ended: bool = False


class Sampler:
    """Samples one reply after the other; one session at a time, from `start` to `stop`.

    A session draws one number from the generator. The stream of a reply follows from that number, from its prompt, and
    from how often the prompt was added before. So a reply does not depend on what is sampled beside it, and a run has
    the same replies on any number of GPUs.
    """

    def __init__(self, model, head, stop_ids, completion):
        """head: hidden states (N, width of the model) to float32 logits (N, V). stop_ids: tokens that end a reply.

        completion: turns a Request that has ended into what the caller gets.
        """
        self.model, self.head, self.stop_ids, self.completion = model, head, list(stop_ids), completion

    def start(self, sampling, generator):
        """Begin a session. sampling: max_new_tokens, temperature (0 is greedy), top_p. generator: torch's, or None."""
        self.sampling, self.seed, self.added = sampling, 0, Counter()  # {hash of a prompt: how often it was added}
        if sampling.temperature:
            device = generator.device if generator else "cpu"
            self.seed = torch.randint(2**62, (), generator=generator, device=device).item()

    def stop(self):
        """End the session. Replies that have not ended are lost."""

    def release(self):
        """Give memory back, also to other processes."""

    def requests(self, prompts) -> list[Request]:
        """A Request for each of {key: prompt}. Raises ValueError for a prompt without tokens."""
        requests = []
        for number, (key, prompt) in enumerate(prompts.items()):
            if not prompt:
                raise ValueError("a prompt without tokens")
            name = hash(tuple(prompt))
            requests.append(Request(key, prompt, number, hash((self.seed, name, self.added[name]))))
            self.added[name] += 1
        return requests

    def write(self, prompts):
        """Sample a reply to each of {key: prompt}; yields (key, Completion) as soon as one ends, until all have.

        A reply ends with a stop token, or without one after max_new_tokens. The next call in a session goes on with
        that session's random numbers.
        """
        for request in self.requests(prompts):
            request.tokens, request.logprobs = self._reply(request)
            yield request.key, self.completion(request)

    @torch.no_grad()
    def _reply(self, request) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities in the whole distribution at the sampling temperature."""
        sampling, ids = self.sampling, torch.tensor([request.prompt], device=self.model.device)
        how = {"do_sample": False}
        if sampling.temperature:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        with torch.random.fork_rng([self.model.device] if ids.is_cuda else []):
            torch.manual_seed(request.stream)
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=self.stop_ids,
                                      pad_token_id=self.stop_ids[0], max_new_tokens=sampling.max_new_tokens,
                                      output_logits=True, return_dict_in_generate=True, **how)
        tokens = out.sequences[0, len(request.prompt):]  # (n,)
        logprobs = F.log_softmax(torch.cat(out.logits).float() / (sampling.temperature or 1.0), dim=-1)  # (n, V)
        return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
