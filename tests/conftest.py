"""Tests import the modules from the repository root. Here: a tiny random model with its tokenizer, a model whose
replies are scripted, and a sandbox that reads its verdict out of the code."""

import contextlib
import json
import re
import sys
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch

torch.set_num_threads(1)  # these models are so small that a second thread only waits, longest on a busy machine

import backbone
from backbone import Backbone, Completion
from sandbox import KernelTime, Sandbox, Verdict, feedback
from tasks import Task, TaskError

TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% if loop.first and tools %}
{% for t in tools %}# Tool {{ t.function.name }}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SOURCE = """import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * {factor}

def get_inputs():
    return [torch.randn(4, 8)]

def get_init_inputs():
    return []
"""


def make_task(n=0) -> Task:
    return Task(f"task{n}", 0, SOURCE.format(factor=n + 2))


def tiny_tokenizer():
    """A byte-level BPE of at most 900 tokens with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = [*backbone.SYSTEM.values(), SOURCE, kernel(1.5), json.dumps(backbone.UPDATE_TOOL), feedback(Verdict())]
    tokenizer.train_from_iterator(texts * 2, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def tiny_qwen(tokenizer, seed=0):
    """A Qwen3 of 100 thousand parameters with random weights (large ones, so that its answers are not uniform)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
                         max_position_embeddings=4096, initializer_range=0.15, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_folder):
    return Backbone.load(model_folder)


def role_of(prompt) -> str:
    return next(role for role, system in backbone.SYSTEM.items() if system in prompt)


class Scripted(Backbone):
    """A real model that may only answer with one of the replies that `script(role, prompt)` lists.

    Which one, it draws by how likely the model finds each, so its choices follow the weights and the generator, and the
    log-probabilities are the model's own. Everything but the choice of words is the real thing.
    """

    script = None  # (role, prompt text) -> list of replies
    asked = None  # (role, prompt text) of every prompt so far
    at_a_time = None  # replies that one step of the sampler writes; None: all

    def sampler(self, max_new_tokens, temperature=1.0, generator=None):
        return ScriptedSampler(self, max_new_tokens, temperature, generator)


class ScriptedSampler:
    """Backbone.sampler with Scripted's choice of words: each step writes whole replies."""

    def __init__(self, model, max_new_tokens, temperature, generator):
        self.model, self.limit, self.temperature, self.generator = model, max_new_tokens, temperature, generator
        self.added, self.options = [], {}  # options: prompt text -> (replies, their ids, their log-probabilities)

    @property
    def waiting(self) -> int:
        return len(self.added)

    def add(self, prompt_ids, key):
        self.added.append((key, prompt_ids))

    @torch.no_grad()
    def step(self) -> list:
        now = self.added[:self.model.at_a_time]
        del self.added[:self.model.at_a_time]
        return [(key, self.answer(prompt)) for key, prompt in now]

    def answer(self, prompt) -> Completion:
        model, text = self.model, self.model.tokenizer.decode(prompt)
        model.asked = (model.asked or []) + [(role_of(text), text)]
        if text not in self.options:
            replies = model.script(role_of(text), text)
            ids = [(model.encode(reply) + [model.tokenizer.eos_token_id])[:self.limit] for reply in replies]
            self.options[text] = replies, ids, model.logprobs([(prompt, reply) for reply in ids])
        replies, ids, logprobs = self.options[text]
        likely = torch.stack([p.mean() for p in logprobs])
        if self.temperature == 0:
            chosen = likely.argmax().item()
        else:
            chosen = torch.multinomial((2 * likely).softmax(0), 1, generator=self.generator).item()
        finished = ids[chosen][-1] == model.tokenizer.eos_token_id
        return Completion(list(prompt), ids[chosen], logprobs[chosen].tolist(), replies[chosen], finished)

    def pause(self):
        pass

    close = pause

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def completed(judge, *arguments) -> Future:
    """What Sandbox.submit returns for a pair, once that is judged; it may be a TaskError."""
    future = Future()
    try:
        future.set_result(judge(*arguments))
    except TaskError as error:
        future.set_exception(error)
    return future


class FakeSandbox:
    """Believes what the code says of itself: `# speedup 1.5 coverage 0.8`; without that line the code is wrong."""

    def __init__(self, device="cpu", **_):
        self.device, self.scored, self.waited = device, [], 0.0

    def prepare(self, tasks):
        pass

    def sampling(self):
        return contextlib.nullcontext()

    def submit(self, pairs):
        self.scored += pairs
        return [completed(self.verdict, task, code) for task, code in pairs]

    def wait(self, futures):
        assert any(future.done() for future in futures)

    score_pairs = Sandbox.score_pairs

    def verdict(self, task, code):
        claim = re.search(r"# speedup ([\d.]+) coverage ([\d.]+)", code)
        if not claim:
            return Verdict(compiled=True, error="wrong values")
        speedup, coverage = map(float, claim.groups())
        return Verdict(compiled=True, correct=True, speedup=speedup, coverage=coverage, reference_ms=1.0,
                       candidate_ms=1 / speedup, speedup_low=speedup, correct_loose=True,
                       profile=[KernelTime("fused_kernel", coverage, True)])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def kernel(speedup, coverage=0.8, note="") -> str:
    """A policy reply whose kernel has this speedup in the eyes of FakeSandbox."""
    return f"Plan: x.\n\n```python\nclass ModelNew:\n    # speedup {speedup} coverage {coverage} {note}\n    pass\n```"


def call(name, **arguments) -> str:
    """A reply that is a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'think': 't'} | arguments})}</tool_call>"
