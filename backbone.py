"""One Hugging Face causal LM that plays three roles: how a prompt becomes tokens, how a reply is sampled and rescored.

The roles (paper: Selection, Policy, Summary) share the weights. They differ in their prompts and limits on length.
Selection and Summary answer by calling a tool. selector.py, policy.py and summarizer.py build the messages.

    call             takes                          returns
    chat_ids         messages, tool                 token ids of the prompt
    sampler.write    prompts                        a Completion for each: the reply's tokens, log-probabilities, text
    next_ids         the Completion, messages       the next turn's prompt: all tokens so far, then the feedback
    tool_call        the reply's text, a tool       the arguments of the call, or None
    logprobs         (prompt_ids, token_ids)        log pi(token | tokens before it), with gradients, for the update

`Backbone` inherits from `Chat` (chat/template.py), which has the tokenizer and the model's own chat template. Chat
defines chat_ids, next_ids and tool_call. It also has `encode(text)`, which returns token ids, and `end`, the tokens
that end a message.

Sampling (fast/engine.py): a prompt's keys and values are computed once. Then each step feeds the last token of every
open reply through the model and divides its logits by the temperature. It draws the next token from their softmax and
keeps its log-probability. With top_p below 1 it draws from the likeliest tokens only; at temperature 0 it takes the
likeliest one. A reply ends with a stop token or at its limit. The trainer computes the same log-probabilities again, so
the ratio rho of their probabilities is 1 up to rounding.

In this file's comments: B sequences in a batch, L their padded length, N tokens that are scored, V the vocabulary.
"""

import contextlib
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from chat.template import Chat, Completion
from fast.attention import attention_kind, fuse_norms
from fast.engine import Engine
from fast.rescore import RECOMPUTED, head_logits, recompute_layers, token_logprobs
from fast.slots import padded
from command.process import UserError

hf_logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # Backbone.load reports an unreachable hub itself


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled. The paper trains at temperature 1.0 and verifies greedily."""

    max_new_tokens: int  # a reply that is longer is cut off
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # draw only from the likeliest tokens that together have this probability (evaluation: 0.95)
    max_prompt_tokens: int | None = None  # the caller must shorten or drop a longer prompt; None: no limit


def check_device(device):
    """Raise UserError if the device is a GPU that is not there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no GPU is available here")


class Backbone(Chat):
    """The model, its tokenizer and what all three roles do with them. See the table above."""

    def __init__(self, model, tokenizer):
        """model: a causal LM of transformers in eval mode; fast/attention.py lists the architectures."""
        super().__init__(tokenizer)
        self.model = model
        self.device = model.device
        size = sum(p.numel() for p in model.parameters())
        self.large = size >= 1e9  # then the paper's sizes are the defaults
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 32768  # tokens
        # A reply ends with a stop token of the tokenizer, the chat template or the model's configuration.
        stops = {tokenizer.eos_token_id}
        if getattr(tokenizer, "chat_template", None):
            stops |= set(self.end[-1:])
        for config in (model.generation_config, model.config.get_text_config()):
            ids = getattr(config, "eos_token_id", None)
            stops |= set(ids if isinstance(ids, list) else [ids])  # some configurations name several
        self.stop_ids = sorted(stops - {None})
        self.recompute = size >= RECOMPUTED  # large: the backward pass computes activations again, to save memory

        # Hidden states (N, width) to float32 logits (N, V). Sampler and trainer share this function, because the ratio
        # of their probabilities must begin at 1.
        self._head = functools.partial(head_logits, model)
        self.engine = Engine(model, self._head, self.stop_ids, self._completion)
        if self.device.type == "cuda":
            fuse_norms(model)

    def check_lengths(self, prompt, reply):
        """Raise UserError where a prompt and a reply of so many tokens do not fit into the model's context."""
        if prompt < 1 or prompt + reply > self.context:
            raise UserError(f"prompts of {prompt} tokens and replies of {reply}: the model's context is {self.context} "
                            "(bench.py: --max-prompt-tokens, --max-new-tokens; else --prompt-tokens, --policy-tokens)")

    @classmethod
    def load(cls, path, device="cpu", dtype=None, template=""):
        """Load a model folder or hub id. Raises UserError with one line when that cannot be done.

        dtype defaults to float32 below a billion parameters and to bfloat16 above. template: a chat template in place
        of the tokenizer's own.
        """
        # What exists, or looks like a folder of ours, is never looked up on the hub.
        looks_local = Path(path).exists() or str(path).startswith((".", "/", "checkpoints", "runs"))
        if looks_local and not Path(path).is_dir():
            raise UserError(f"{path}: no such model folder")
        if Path(path, "checkpoint").exists():
            raise UserError(f"{path}: a run, whose model is {path}/checkpoint")
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
        except Exception as error:  # transformers may raise any type for a bad folder or hub id
            what = "cannot load the model" if looks_local else (
                "no such folder, and the hub cannot give it; without a network, download it and pass its folder")
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(f"{path}: {what} ({type(error).__name__}: {reason})") from None
        tokenizer.chat_template = template or tokenizer.chat_template
        if not tokenizer.chat_template:
            raise UserError(f"{path}: the tokenizer has no chat template")
        return cls(model.to(device).eval(), tokenizer)

    def save(self, folder):
        """Write weights, config and tokenizer as a plain Hugging Face model folder."""
        if len(self.stop_ids) > 1:
            self.model.generation_config.eos_token_id = self.stop_ids  # other programs then stop where we do
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # ---- sampling

    @contextlib.contextmanager
    def sampler(self, sampling, generator=None):
        """Open the engine for sampling. Only one sampler may be open, and the weights must not change meanwhile.

            with model.sampler(Sampling(max_new_tokens=100)) as sampler:
                for key, completion in sampler.write({key: prompt_ids, ...}): ...     as each reply ends
                for key, completion in sampler.write({key: next_ids, ...}): ...       the next turns

        Replies end with a stop token, or without one after max_new_tokens. generator: a torch.Generator; an equal state
        and an equal order of calls give equal replies. A Completion's log-probabilities take the temperature into
        account, and ignore top_p.
        """
        self.engine.start(sampling, generator)
        try:
            yield self.engine
        finally:
            self.engine.stop()

    def _completion(self, request) -> Completion:
        prompt, tokens = list(request.prompt), request.tokens
        finished = tokens[-1] in self.stop_ids
        # The prompt may have opened a thought. If the reply was cut off, its text begins with that `<think>`, so that a
        # reader drops code in an unfinished thought (chat.template.Chat.opened).
        text = self.tokenizer.decode(tokens[:-1]) if finished else self.opened(prompt) + self.tokenizer.decode(tokens)
        return Completion(prompt, tokens, request.logprobs, text, finished)

    def sample(self, prompts, sampling, generator=None) -> list[Completion]:
        """One reply to each prompt (a list of token ids each), in their order. Arguments as of `sampler`."""
        with self.sampler(sampling, generator) as sampler:
            replies = dict(sampler.write(dict(enumerate(prompts))))
        return [replies[i] for i in range(len(prompts))]

    def release(self):
        """Give the memory of the sampler's cache back: before an update, and when another process needs it."""
        self.engine.release()

    # ---- rescoring

    def logprobs(self, rows, temperature=1.0) -> list[torch.Tensor]:
        """Log-probabilities of given replies, with gradients: the trainer's view of what was sampled.

        rows: [(prompt_ids, token_ids), ...]; temperature: at which the replies were sampled. Returns one float32 tensor
        (len(token_ids),) per row. All rows run as one padded batch; the caller chooses how many fit. A rollout's turns
        share one sequence if each prompt extends the turn before. A causal model gives the same values.
        """
        sequences, home = [], {}  # home[i]: index of the sequence that begins with row i
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i][0])):  # the longest first: it contains the others
            whole = list(rows[i][0]) + list(rows[i][1])
            containing = [s for s, other in enumerate(sequences) if other[:len(whole)] == whole]
            if not containing:
                containing = [len(sequences)]
                sequences.append(whole)
            home[i] = containing[0]
        ids = padded(sequences)  # (B, L)
        positions, replies = [], []  # of all rows, N each; positions in the flattened (B L)
        for i, (prompt, reply) in enumerate(rows):
            start = home[i] * ids.shape[1] + len(prompt) - 1  # the logits at position p predict token p + 1
            positions += range(start, start + len(reply))
            replies += reply
        positions, targets = (torch.tensor(each, device=self.device) for each in (positions, replies))
        recompute = self.recompute and torch.is_grad_enabled()
        if recompute:
            recompute_layers(self.model)
        self.model.train(recompute)  # only because transformers recomputes layers in training mode alone
        logprobs = token_logprobs(self.model, self._head, ids.to(self.device), positions, targets, temperature)  # (N,)
        self.model.eval()
        return list(logprobs.split([len(reply) for _, reply in rows]))
