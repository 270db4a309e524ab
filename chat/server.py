"""A model behind a server that speaks OpenAI's chat protocol, such as vLLM, SGLang or `transformers serve`.

A Server answers what an evaluation asks of a backbone.Backbone: chat_ids, next_ids, sampler, sample. It has messages
where that has token ids, and leaves the chat template, thinking included, to the server.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from queue import SimpleQueue

from tqdm import tqdm

from chat.calls import extract_tool_call, text_of
from chat.template import Completion, with_tools
from command.process import UserError
from command.progress import count

PARALLEL = 64  # requests at a time
PAUSES = (1, 4, 15, 60)  # seconds before a request is sent again
# Statuses of a request that would fail again: a prompt is too long, or the key or the model's name is wrong.
REFUSED = (400, 401, 403, 404, 405, 413, 422)
KEY = "OPENAI_API_KEY"  # the environment variable that the protocol's clients read the API key from


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
        self.seconds = []  # of each reply
        self.slots = threading.Semaphore(PARALLEL)
        self.failures = Counter()  # reason -> number of prompts without a reply
        listed = {entry["id"]: entry for entry in self._models()}
        self.name = name or next(iter(listed), None)
        if not self.name:
            raise UserError(f"--server {url}: it lists no model; name one with --served-model")
        self.context = listed.get(self.name, {}).get("max_model_len") or 32768  # tokens; vLLM tells

    def _ask(self, path, body=None) -> dict:
        """What the server answers to a GET, or to the POST of a body. Raises errors of many types."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        key = os.environ.get(KEY, "").strip()
        if key:
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # no other server gets the key
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return json.load(answer)

    def _models(self) -> list[dict]:
        """The models that the server lists. Raises UserError where it does not answer."""
        try:
            return [entry for entry in self._ask("/models").get("data") or () if entry.get("id")]
        except Exception as error:
            raise UserError(f"--server {self.url}/models: {reason_of(error)}") from None

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
        """Yields (key, Completion) for each of {key: prompt} as soon as it is there. Requests run in parallel.

        A prompt that gets no reply has an empty one, at the end; stderr tells each reason once. Raises UserError if no
        prompt was ever answered or the server has gone: its figures would say nothing of the model.
        """
        replies, lost = SimpleQueue(), []

        def ask(key, seed):
            with self.slots:
                replies.put((key, self._reply(prompts[key], seed)))

        for key in prompts:  # in daemons: Ctrl-C does not wait for replies
            threading.Thread(target=ask, args=(key, next(self.seeds)), daemon=True).start()
        for _ in prompts:
            key, reply = replies.get()
            if isinstance(reply, Completion):
                yield key, reply
                continue
            lost.append(key)
            if reply not in self.failures:
                tqdm.write(f"--server gives no reply to a prompt: {reply}", file=sys.stderr)
            self.failures[reply] += 1
        if lost and not self.seconds:
            raise UserError(f"--server {self.url}: it answered no prompt: {self.failures.most_common(1)[0][0]} (of a "
                            "small context: --max-prompt-tokens, --max-new-tokens)")
        if lost:
            self._models()
        for key in lost:
            yield key, Completion(prompts[key], [], [], "", False)

    def sample(self, prompts, sampling, generator=None) -> list[Completion]:
        """One reply to each prompt, in their order."""
        with self.sampler(sampling, generator) as sampler:
            replies = dict(sampler.write(dict(enumerate(prompts))))
        return [replies[number] for number in range(len(prompts))]

    def _reply(self, prompt, seed) -> Completion | str:
        """Its token_ids only have the right number. For a prompt without a reply: the reason, in one line.

        Whatever fails is asked again after each of PAUSES, except a prompt that the server refuses, and a reply that
        takes longer than the timeout.
        """
        s = self.sampling
        body = {"model": self.name, "messages": prompt.messages, "max_tokens": s.max_new_tokens, "seed": seed,
                "temperature": s.temperature, "top_p": s.top_p}
        for pause in (0, *PAUSES):
            time.sleep(pause)
            began = time.monotonic()
            try:
                text, tokens, finished = read_answer(self._ask("/chat/completions", body))
                self.seconds.append(time.monotonic() - began)
                count("replies")
                return Completion(prompt, [0] * tokens, [], text, finished)
            except Exception as error:  # no connection, a bad status, an answer in another layout
                reason = reason_of(error)
                if getattr(error, "code", None) in REFUSED or isinstance(error, TimeoutError):
                    break
        return reason

    def statistics(self) -> dict:
        """Number of replies, median seconds of one, and number of prompts without a reply by reason."""
        return {"replies": len(self.seconds), "median_seconds": round(statistics.median(self.seconds or [0.0]), 2),
                "without_reply": dict(self.failures)}


def read_answer(answer) -> tuple[str, int, bool]:
    """(text, number of tokens, has it ended by itself?) of a server's answer. Raises any error for another layout."""
    if not answer.get("choices"):
        raise ValueError(f"an answer without choices: {json.dumps(answer)}")
    choice = answer["choices"][0]
    text = text_of(choice["message"].get("content"))
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    return text, tokens if isinstance(tokens, int) else len(text) // 4, choice.get("finish_reason") != "length"


def reason_of(error) -> str:
    """What went wrong, as one short line: of an HTTP status what the server says of it, too."""
    said = ""
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(Exception):  # the connection may end here, too
            said = error.read(2000).decode(errors="replace")
        said += f" (the key is read from {KEY})" if error.code in (401, 403) else ""
    return " ".join(f"{type(error).__name__}: {error} {said}".split())[:200]
