"""One Hugging Face causal LM that plays three roles.

The roles (paper: Selection, Policy, Summary) differ only in their system prompt and in the tool that they may
call; the weights are shared. This file holds what touches the model: the parsing of replies, sampling with
log-probabilities, rescoring with gradients, and how what is rescored is packed. Prompts, tools and the chat template
are in chat/.

It knows nothing of skills on disk, sandboxes or rewards. The messages of each role are built in selector.py, policy.py
and summarizer.py.

In comments: B sequences in a batch, L their padded length, T the length of the key/value cache, V the vocabulary.
"""

import ast
import contextlib
import functools
import itertools
import json
import logging
import re
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from chat.prompts import SELECT_TOOL, UPDATE_TOOL  # noqa: F401 (what the roles ask a model with)
from chat.template import Chat, Completion
from fast.attention import Float32Product, attention_kind, fuse_norms, name_of_cache
from fast.engine import Engine, PlainEngine
from fast.recompute import LOGITS, fewest_recomputed, forgetful, recomputed
from fast.slots import packed, padded
from tasks import UserError

hf_logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # an unreachable hub is told once, in Backbone.load

# ----------------------------------------------------------------------------------------------------------------------
# Parsing of replies. A reply is text that a model sampled: anything can be in it, and nothing here may raise.

# A fence begins a line, or stands behind words and code between single or double backticks.
_FENCE = re.compile(r"^(?:[^\n`]|(?<!`)`{1,2}(?!`))*`{3,}[ \t]*([\w+-]*)[^\n`]*\n(.*?)```", re.DOTALL | re.MULTILINE)


def after_thoughts(text) -> str:
    """What a reply says when it has thought; a thought that was cut off is no answer, either."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def extract_code(text):
    """The last fenced code block that defines `ModelNew`, or None; one within a thought does not count.

    >>> extract_code("Plan: x\\n```python\\nclass ModelNew:\\n    pass\\n```")
    'class ModelNew:\\n    pass\\n'
    """
    blocks = [body for _, body in _FENCE.findall(after_thoughts(text))
              if re.search(r"^\s*class\s+ModelNew\b", body, re.MULTILINE)]
    return blocks[-1] if blocks else None


def extract_tool_call(text, name):
    """The arguments (a dict) of the last well-formed call of tool `name` in a reply, or None. Never raises.

    Three forms are understood: JSON inside <tool_call> (Qwen3), <function=name><parameter=key>value</parameter>
    (Qwen3-Coder and the paper's release), and a fenced JSON block, either the whole call or only its arguments.

    >>> extract_tool_call('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "f")
    {'a': 1}
    """
    text = after_thoughts(text)
    calls = [_call_from_json(body, name) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    for function, body in re.findall(r"<function=([\w.-]+)>(.*?)</function>", text, re.DOTALL):
        if function == name:
            pairs = re.findall(r"<parameter=([\w.-]+)>(.*?)</parameter>", body, re.DOTALL)
            calls.append({key: _literal_or_text(value.strip()) for key, value in pairs})
    if not any(calls):
        calls = [_call_from_json(body, name, bare=True) for language, body in _FENCE.findall(text)
                 if language in ("json", "")]
    return next(filter(None, reversed(calls)), None)


def _literal_or_text(text):
    """What a text says in JSON, or as a list or dict in Python's spelling, as the released checkpoints write them."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False)
    with (contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError, SystemError),
          warnings.catch_warnings(action="ignore")):  # of "\\d" in a string
        value = ast.literal_eval(text) if text[:1] in ("[", "{") else text
        return json.loads(json.dumps(value))  # a transcript holds JSON: no sets, no bytes
    return text


def _call_from_json(text, name, bare=False):
    """Arguments from `{"name": ..., "arguments": {...}}`; with `bare`, also from the arguments object alone."""
    call = _literal_or_text(text.strip())
    if not isinstance(call, dict):
        return None
    if call.get("name") == name:
        arguments = call.get("arguments", call.get("args"))
        if isinstance(arguments, str):
            arguments = _literal_or_text(arguments)  # some models quote it twice
        return arguments if isinstance(arguments, dict) else None
    return call if bare and "name" not in call else None


# ----------------------------------------------------------------------------------------------------------------------


class Backbone(Chat):
    """The model, its tokenizer and what all three roles do with them."""

    def __init__(self, model, tokenizer):
        """model: a causal LM of transformers in eval mode. Raises UserError for one whose logits are something else
        than its head of its hidden states."""
        super().__init__(tokenizer)
        self.model = model
        self.device = model.device
        self.large = sum(p.numel() for p in model.parameters()) >= 1e9  # then the paper's sizes are the defaults
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 32768  # tokens
        self.layers = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.recompute = None  # how many of them the backward pass of logprobs recomputes; None: as memory asks for
        stops = {tokenizer.eos_token_id, *(self.end[-1:] if getattr(tokenizer, "chat_template", None) else ())}
        for config in (model.generation_config, model.config.get_text_config()):  # some models have several
            ids = getattr(config, "eos_token_id", None)
            stops |= set(ids if isinstance(ids, list) else [ids])
        self.stop_ids = sorted(stops - {None})
        plain = model.config._attn_implementation != "causal"
        self.engine = (PlainEngine if plain else Engine)(model, self._head, self.stop_ids, self._completion)
        if plain:
            print(f"backbone: {model.config.model_type} has attention of its own; sampling takes the plain path")
        if self.device.type == "cuda":
            fuse_norms(model)
        with torch.no_grad():  # logprobs and the engine take the head apart from the rest
            ids = torch.tensor([[1, 2, 3, 4]], device=self.device)
            hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
            want = model(input_ids=ids, use_cache=False).logits[0].float()
            seen = [self._head(hidden[0]) - want] if hidden is not None else [want + torch.inf]
            if plain:  # goes on from the cache that the model gives; some state-space models give none
                name = name_of_cache(model)
                cache = getattr(model(input_ids=ids[:, :3], use_cache=True), name, None)
                seen.append(model(input_ids=ids[:, 3:], **{name: cache}, use_cache=True).logits[0] - want[-1:])
            if max(difference.abs().max() for difference in seen) > 0.02 * (1 + want.abs().max()):
                raise UserError(f"{model.config.model_type}: not supported; its logits are not what its head makes of "
                                 "its hidden states, or it does not remember by a cache")

    def check_lengths(self, prompt, reply):
        """Raise UserError where a prompt and a reply of so many tokens do not fit into the model's context."""
        if prompt < 1 or prompt + reply > self.context:
            raise UserError(f"prompts of {prompt} tokens and replies of {reply}: the model's context is {self.context} "
                            "(bench.py: --max-prompt-tokens, --max-new-tokens; else --prompt-tokens, --policy-tokens)")

    @classmethod
    def load(cls, path, device="cpu", dtype=None):
        """Load a model folder or hub id. Raises UserError with one line when that cannot be done.

        dtype defaults to float32 below a billion parameters and to bfloat16 above.
        """
        looks_local = Path(path).exists() or str(path).startswith((".", "/", "checkpoints", "runs"))
        if looks_local and not Path(path).is_dir():
            raise UserError(f"{path}: no such model folder")
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            if dtype is None:
                with torch.device("meta"):
                    size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
                dtype = torch.float32 if size < 1e9 else torch.bfloat16
            model, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention_kind(config), output_loading_info=True)
            if found["missing_keys"]:  # transformers would leave them random
                raise ValueError(f"no weights for {', '.join(sorted(found['missing_keys']))}")
        except Exception as error:  # for a bad folder or hub id transformers and what is below it raise any type
            reason = str(error).strip().split("\n")[0][:200]
            if looks_local:
                raise UserError(f"{path}: cannot load the model ({type(error).__name__}: {reason})") from None
            raise UserError(f"{path}: no such folder, and the hub cannot give it ({reason}); without a network, "
                             "download it elsewhere and pass its folder") from None
        if not tokenizer.chat_template:
            raise UserError(f"{path}: the tokenizer has no chat template")
        return cls(model.to(device).eval(), tokenizer)

    def save(self, folder):
        """Write weights, config and tokenizer as a plain Hugging Face model folder."""
        if len(self.stop_ids) > 1:
            self.model.generation_config.eos_token_id = self.stop_ids  # whoever samples from it stops where we do
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # ---- sampling

    @contextlib.contextmanager
    def sampler(self, max_new_tokens, temperature=1.0, generator=None, top_p=1.0):
        """The engine, in a session of its own: one at a time, in which the weights must not change.

            with model.sampler(max_new_tokens=100) as sampler:
                sampler.add(prompt_ids, key)
                while sampler.waiting:
                    for key, completion in sampler.step(): ...

        Replies end with a stop token, or without one after max_new_tokens; those that have not ended at the end of the
        block are lost. temperature 0 is greedy. generator: a torch.Generator; the same state of it and the same order
        of calls give the same replies. top_p: draw only from the likeliest tokens that together have this probability
        (paper: 0.95 at evaluation). A Completion's log-probabilities are those of the whole distribution all the same.
        """
        self.engine.start(max_new_tokens, temperature, generator, top_p)
        try:
            yield self.engine
        finally:
            self.engine.stop()

    def _completion(self, request) -> Completion:
        prompt, tokens = list(request.prompt), request.tokens
        finished = tokens[-1] in self.stop_ids
        text = self.tokenizer.decode(tokens[:-1]) if finished else self.opened(prompt) + self.tokenizer.decode(tokens)
        return Completion(prompt, tokens, request.logprobs, text, finished)

    def sample(self, prompts, max_new_tokens, temperature=1.0, generator=None, top_p=1.0) -> list[Completion]:
        """One reply to each prompt (a list of token ids each), in their order. Arguments as of `sampler`."""
        replies = {}
        with self.sampler(max_new_tokens, temperature, generator, top_p) as sampler:
            for i, prompt in enumerate(prompts):
                sampler.add(prompt, i)
            while sampler.waiting:
                replies.update(sampler.step())
        return [replies[i] for i in range(len(prompts))]

    def release(self):
        """Give the memory of the sampler's cache back: before an update, and whenever somebody else needs it."""
        self.engine.release()

    # ---- rescoring

    def _head(self, hidden):
        """Hidden states (N, width) to logits (N, V) in float32, as the model's own forward would but for the rounding.

        In bfloat16 a logit of 20 is only known to 0.06; sampler and trainer would round differently.
        """
        head = self.model.get_output_embeddings()
        if hidden.is_cuda and hidden.dtype == torch.bfloat16 and getattr(head, "bias", None) is None:
            logits = Float32Product.apply(hidden, head.weight)
        else:
            logits = head(hidden).float()
        config = self.model.config.get_text_config()
        scale = getattr(config, "logits_scaling", None)  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        logits = logits / scale if scale else logits * getattr(config, "logit_scale", 1.0)  # Cohere
        return cap * torch.tanh(logits / cap) if cap else logits

    def logprobs(self, rows, temperature=1.0) -> list[torch.Tensor]:
        """Log-probabilities of given replies, with gradients: the trainer's view of what was sampled.

        rows: [(prompt_ids, token_ids), ...]; temperature: at which the replies were sampled. Returns one float32 tensor
        (len(token_ids),) per row. All rows run as one padded batch; the caller chooses how many fit. A row whose prompt
        extends another row's prompt + reply (a later turn of the same rollout) rides along in one sequence with it,
        since a causal model gives the same values.
        """
        sequences, home = [], {}  # home[i] = index of the sequence that contains row i
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i][0])):
            whole = list(rows[i][0]) + list(rows[i][1])
            holders = [s for s, sequence in enumerate(sequences) if sequence[:len(whole)] == whole]
            home[i] = holders[0] if holders else len(sequences)
            if not holders:
                sequences.append(whole)
        ids = padded(sequences)  # (B, L)
        # The logits at position p predict token p + 1. Only the replies' positions reach the vocabulary.
        starts = [home[i] * ids.shape[1] + len(prompt) - 1 for i, (prompt, _) in enumerate(rows)]
        lengths = [len(reply) for _, reply in rows]
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths)])  # (N,) of all rows
        targets = torch.tensor([token for _, reply in rows for token in reply], dtype=torch.long)  # (N,)
        ids, positions, targets = (tensor.to(self.device) for tensor in (ids, positions, targets))
        with recomputed(self.layers[:self.recomputed_layers(ids.numel())]):  # the first: they are needed last
            out = self.model.base_model(input_ids=ids, use_cache=False)
        states = out.last_hidden_state.flatten(0, 1).index_select(0, positions)  # (N, width of the model)
        size = max(1, LOGITS // self.model.get_output_embeddings().weight.shape[0])
        pieces = list(zip(states.split(size), targets.split(size)))
        score = functools.partial(self._token_logprobs, temperature=temperature)
        if len(pieces) > 1:  # then each piece's logits are forgotten, and computed again in the backward pass
            score = forgetful(score)
        return list(torch.cat([score(*piece) for piece in pieces]).split(lengths))

    def _token_logprobs(self, states, targets, temperature):
        """Hidden states (N, width), the tokens (N,) that follow them: their log-probabilities (N,) in float32."""
        logits = self._head(states)
        logits = logits if temperature == 1 else logits / temperature  # no copy of what may be a gigabyte
        return F.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]

    def recomputed_layers(self, tokens) -> int:
        """How many layers the backward pass over `tokens`, padding included, recomputes: each costs its forward again.

        As many as self.recompute says. Without it none on a CPU, on a GPU the fewest with which it fits.
        """
        if self.recompute is not None or self.device.type != "cuda" or not torch.is_grad_enabled():
            return self.recompute or 0
        return fewest_recomputed(self.model, len(self.layers), tokens)


def micro_batches(sequences, budget):
    """Pack `sequences` (lists of rows), longest first, into lists of sequences of at most `budget` tokens with padding.

    A rollout's turns stay together: Backbone.logprobs runs them as one where each prompt extends the turn before it.
    """
    sized = []  # (tokens of the longest row, sequences that the model sees, rows)
    for rows in sequences:
        ids = [row.completion.prompt_ids + row.completion.token_ids for row in rows]
        apart = sum(after[:len(before)] != before for before, after in itertools.pairwise(ids))
        sized.append((max(map(len, ids)), 1 + apart, rows))
    return packed(sorted(sized, key=lambda item: -item[0]), budget)
