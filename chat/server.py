"""A model behind a server that speaks OpenAI's chat protocol, such as vLLM, SGLang or `transformers serve`.

A Server answers what an evaluation asks of a backbone.Backbone: chat_ids, next_ids, sampler, sample. It has messages
where that has token ids, and leaves the chat template, thinking included, to the server.
"""

import contextlib
import itertools
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chat.calls import extract_tool_call
from chat.template import Completion, with_tools
from command.process import UserError

PARALLEL = 64  # requests at a time
REFUSED = (400, 413, 422)  # statuses of a prompt that cannot be answered, such as one that is too long


@dataclass
class Messages:
    """A prompt: what stands for its token ids. Its length is an estimate, at four characters for a token."""

    messages: list[dict]

    def __len__(self):
        return sum(len(message["content"]) for message in self.messages) // 4


class Server:
    """A model that is served at a URL."""

    large = True  # the paper's sizes: Selection sees the whole task
    tool_call = staticmethod(extract_tool_call)

    def __init__(self, url, name="", timeout=3600):
        """url: with or without /v1. name: of the model there; without one the first that is listed. timeout: seconds
        for a reply. Raises UserError where no server answers.
        """
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1") + "/v1", timeout
        listed = {entry["id"]: entry for entry in self._ask("/models").get("data", ())}
        self.name = name or next(iter(listed), None)
        if not self.name:
            raise UserError(f"--server {url}: it lists no model; name one with --served-model")
        self.context = listed.get(self.name, {}).get("max_model_len") or 32768  # tokens; vLLM tells

    def _ask(self, path, body=None) -> dict:
        """What the server answers to a GET, or to the POST of a body.

        Raises UserError, but HTTPError for one of REFUSED.
        """
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
            if isinstance(error, urllib.error.HTTPError) and error.code in REFUSED:
                raise
            raise UserError(f"--server {self.url}{path}: {type(error).__name__}: {error}") from None

    def check_lengths(self, prompt, reply):
        """The server knows its model's context, and refuses what is too long: see _reply."""

    def chat_ids(self, messages, tool=None) -> Messages:
        """The prompt for the next reply. A tool is told in words, because a server may not have switched tools on."""
        return Messages(with_tools(messages, [tool]) if tool else messages)

    def next_ids(self, completion, messages, tool=None) -> Messages:
        return self.chat_ids(messages, tool)

    @contextlib.contextmanager
    def sampler(self, sampling, generator=None):
        """See Backbone.sampler. generator: its seed, counted on, is sent with the requests."""
        self.sampling = sampling
        self.seeds = itertools.count(generator.initial_seed() % 2**30 if generator else 0)
        yield self

    def write(self, prompts):
        """Yields (key, Completion) for each of {key: prompt}, in their order. Requests run in parallel."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            yield from zip(prompts, pool.map(self._reply, prompts.values(), itertools.islice(self.seeds, len(prompts))))

    def sample(self, prompts, sampling, generator=None) -> list[Completion]:
        """One reply to each prompt, in their order."""
        with self.sampler(sampling, generator) as sampler:
            return [reply for _, reply in sampler.write(dict(enumerate(prompts)))]

    def _reply(self, prompt, seed) -> Completion:
        """Its token_ids only have the right number. A prompt that the server refuses gets an empty reply."""
        s = self.sampling
        body = {"model": self.name, "messages": prompt.messages, "max_tokens": s.max_new_tokens, "seed": seed,
                "temperature": s.temperature, "top_p": s.top_p}
        try:
            answer = self._ask("/chat/completions", body)
        except urllib.error.HTTPError as error:
            print(f"--server refuses a prompt: {error.read()[:200].decode(errors='replace')}", file=sys.stderr)
            return Completion(prompt, [], [], "", False)
        [choice] = answer["choices"]
        text = choice["message"].get("content") or ""
        tokens = (answer.get("usage") or {}).get("completion_tokens") or len(text) // 4
        return Completion(prompt, [0] * tokens, [], text, choice.get("finish_reason") != "length")
