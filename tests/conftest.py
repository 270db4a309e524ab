"""Tests import the modules from the repository root. Here: a tiny random model with its tokenizer, a model whose
replies are scripted, and a sandbox that reads its verdict out of the code."""

import contextlib
import itertools
import json
import math
import re
import statistics
import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import transformers

torch.set_num_threads(1)  # these models are so small that a second thread only waits, longest on a busy machine

from candidates import small_task
from backbone import Backbone, Completion
from chat.prompts import PROMPTS, UPDATE_TOOL
from fast.attention import attention_kind
from judge.verdict import KernelTime
from reinforce import configure  # noqa: F401 (for the tests)
from sandbox import Sandbox, Settings, Verdict, feedback
from synthetic.tiny import random_qwen3, train_tokenizer
from command.process import run_command
from tasks import Task, TaskError

ROLES = "policy", "selection", "summary"
SOURCE = small_task("relu", "return torch.relu(x) * {factor}", inputs="torch.randn(4, 8)").source
CONTENT = "Motivation: relu reads memory twice.\nKey Idea: fuse.\nExample:\nx = tl.maximum(x, 0.0)"  # of a skill


def make_task(n=0) -> Task:
    return Task(f"task{n}", 0, SOURCE.format(factor=n + 2))


def tiny_model(name, tokenizer, **config):
    """A model with random weights of any architecture that is supported, Llama or another."""
    needed = {"Qwen3": {"head_dim": 16}, "Mistral": {"head_dim": 8, "sliding_window": None}}
    config = needed.get(name, {}) | {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.15,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id} | config
    config = getattr(transformers, name + "Config")(**config)
    torch.manual_seed(0)
    kind = getattr(transformers, name + "ForCausalLM")
    return kind._from_config(config, attn_implementation=attention_kind(config)).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([*(PROMPTS[f"{role}_system"] for role in ROLES), SOURCE, kernel(1.5),
                            json.dumps(UPDATE_TOOL), feedback(Verdict())], 900)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A Qwen3 of 100 thousand parameters with random weights (large ones, so that its answers are not uniform).

    Two ranks cannot split its vectors of 49 evenly.
    """
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = random_qwen3(len(tokenizer), 49, 96, 2, head_dim=16, max_position_embeddings=8192, initializer_range=0.15,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_folder):
    return Backbone.load(model_folder)


@pytest.fixture
def inputs(model):
    """Shapes of the token ids that the model is called with: (R, L) prompts, (n, 1) steps that are no replays."""
    shapes = []
    hook = model.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    yield shapes
    hook.remove()


def plain_logprobs(model, prompt, reply):
    """The slow twin of Backbone.logprobs: one row by itself, through the model's own forward, without a cache."""
    logits = model.model(torch.tensor([prompt + reply]), use_cache=False).logits[0, len(prompt) - 1:-1].float()
    return logits.log_softmax(-1)[range(len(reply)), reply]


@pytest.fixture
def refusal(capsys, monkeypatch):
    """A function that runs a program's main with arguments, and returns the one line with which it refuses them."""
    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["program.py"])
        with pytest.raises(SystemExit) as end:
            run_command(lambda: main([str(argument) for argument in arguments]))
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and err.count("\n") == 1 and ": error: " in err, (out, err)
        return err

    return run


@pytest.fixture(scope="session")
def box():
    """One sandbox for every test that needs no special one: its processes take seconds to start."""
    with Sandbox("cpu", trials=3, timeout=120, secret="00", workers=1) as sandbox:  # slow machines need the timeout
        yield sandbox


@pytest.fixture
def borrowed(box, monkeypatch):
    """A function after which a module's sandboxes use the processes of `box`, and leave them open."""
    class Borrowed(Sandbox):
        def __init__(self, device="cpu", **settings):
            self.settings = Settings(device, **settings).completed()
            self.device, self.waited, self.pool = self.settings.device, 0.0, box.pool

        def close(self):
            pass

    return lambda module: monkeypatch.setattr(module, "Sandbox", Borrowed)


def write_lines(path, *rows):
    """A file of JSON lines. A row that is a text stands there as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def learnt(chat, ids, mask) -> list:
    """The texts of what is learnt, reply by reply."""
    runs = itertools.groupby(zip(ids.tolist(), mask.tolist()), key=lambda pair: pair[1])
    return [chat.tokenizer.decode([token for token, _ in run]) for on, run in runs if on]


class Scripted(Backbone):
    """A real model that may only answer with one of the replies that `script(role, prompt)` lists.

    Which one, it draws by how likely the model finds each, so its choices follow the weights and the generator, and the
    log-probabilities are the model's own. Everything but the choice of words is the real thing.
    """

    script = None  # (role, prompt text) -> list of replies
    asked = None  # (role, prompt text) of every prompt so far
    draws = set()  # (temperature, top_p) of every sampler of all these models

    @contextlib.contextmanager
    def sampler(self, sampling, generator=None):
        self.draws.add((sampling.temperature, sampling.top_p))
        yield ScriptedSampler(self, sampling, generator)


class ScriptedSampler:
    """Backbone.sampler with Scripted's choice of words: each step writes whole replies."""

    def __init__(self, model, sampling, generator):
        self.model, self.sampling = model, sampling
        self.options = {}  # prompt text -> (replies, their ids, their log-probabilities)
        self.seed = torch.randint(2**31, (), generator=generator).item() if sampling.temperature else 0
        self.count = Counter()  # of a prompt: a draw depends on the seed, the prompt and this, as the engine's do

    def write(self, prompts):
        for key, prompt in prompts.items():
            yield key, self.answer(prompt)

    @torch.no_grad()
    def answer(self, prompt) -> Completion:
        model, text = self.model, self.model.tokenizer.decode(prompt)
        role = next(role for role in ROLES if PROMPTS[f"{role}_system"] in text)
        model.asked = (model.asked or []) + [(role, text)]
        if text not in self.options:
            replies = model.script(role, text)
            limit = self.sampling.max_new_tokens
            ids = [(model.encode(reply) + [model.tokenizer.eos_token_id])[:limit] for reply in replies]
            self.options[text] = replies, ids, model.logprobs([(prompt, reply) for reply in ids])
        replies, ids, logprobs = self.options[text]
        likely = torch.stack([p.mean() for p in logprobs])
        if self.sampling.temperature == 0:
            chosen = likely.argmax().item()
        else:
            self.count[tuple(prompt)] += 1
            generator = torch.Generator().manual_seed(hash((self.seed, *prompt, self.count[tuple(prompt)])))
            chosen = torch.multinomial((2 * likely).softmax(0), 1, generator=generator).item()
        finished = ids[chosen][-1] == model.tokenizer.eos_token_id
        return Completion(list(prompt), ids[chosen], logprobs[chosen].tolist(), replies[chosen], finished)


class FakeSandbox(Sandbox):
    """Believes what the code says of itself: `# speedup 1.5 coverage 0.8`; without that line the code is wrong.

    lives: the number of kernels after which it is killed.
    """

    def __init__(self, device="cpu", lives=math.inf, **_):
        self.device, self.lives, self.scored, self.waited = device, lives, [], 0.0
        self.pool = Mock(settings={"gpu": None})

    def submit(self, pairs):
        self.lives -= len(pairs)
        if self.lives < 0:
            raise KeyboardInterrupt
        self.scored += pairs
        futures = [Future() for _ in pairs]
        for future, pair in zip(futures, pairs):
            try:
                future.set_result(self.verdict(*pair))
            except TaskError as error:
                future.set_exception(error)
        return futures

    def verdict(self, task, code):
        claim = re.search(r"# speedup ([\d.]+) coverage ([\d.]+)", code)
        if not claim:
            return Verdict(compiled=True, error="wrong values")
        speedup, coverage = map(float, claim.groups())
        return Verdict(compiled=True, correct=True, speedup=speedup, coverage=coverage, reference_ms=1.0,
                       candidate_ms=1 / speedup, speedup_low=speedup,
                       profile=[KernelTime("fused_kernel", coverage, True)])


def kernel(speedup, coverage=0.8, note="") -> str:
    """A policy reply whose kernel has this speedup in the eyes of FakeSandbox."""
    return f"Plan: x.\n\n```python\nclass ModelNew:\n    # speedup {speedup} coverage {coverage} {note}\n    pass\n```"


def entry(**changes) -> dict:
    """A well-formed entry of new_skills."""
    return {"name": "learnt", "description": "relu forward randn", "scope": "general", "tags": ["relu"],
            "content": CONTENT} | changes


def proposing(*skills) -> str:
    return call("update_skill_library", new_skills=list(skills))


def selecting(*names) -> str:
    return call("select_skills", selected_skills=[{"name": name, "reason": "r"} for name in names])


def call(name, **arguments) -> str:
    """A reply that is a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'think': 't'} | arguments})}</tool_call>"


def slow_policy_advantages(rewards, members, tokens, gamma=1.0, baseline="leave-one-out", cross_scheme=True):
    """The double loop: every turn looks for its own group."""
    returns = [[sum(gamma ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in rewards]
    places = [(i, t) for i, row in enumerate(members) for t, member in enumerate(row) if member]
    advantages = [[None] * len(row) for row in rewards]
    for i, t in places:
        group = [returns[j][u] for j, u in places if u == t or baseline == "group-norm"]
        if baseline == "leave-one-out":
            advantages[i][t] = returns[i][t] - (sum(group) - returns[i][t]) / max(1, len(group) - 1)
        else:
            advantages[i][t] = returns[i][t] - statistics.fmean(group)
        if baseline == "group-norm":
            advantages[i][t] /= max(statistics.pstdev(group), 1e-6)
    each = [abs(advantages[i][t]) for i, t in places for _ in range(tokens[i][t])]  # token by token
    scale = max(statistics.fmean(each), 0.05) if cross_scheme and each else 1.0
    return [[a and a / scale for a in row] for row in advantages]


def by_hand(model, data):
    """The mean loss over learnt tokens, each predicted from those before it; without padding."""
    losses = []
    for ids, mask in data:
        ids = torch.tensor(ids, dtype=torch.long)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        losses += [-logprobs[i - 1, ids[i]] for i in range(1, len(ids)) if mask[i]]
    return torch.stack(losses).mean()
