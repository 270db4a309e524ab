"""Log-probabilities of given tokens, with gradients, in little memory.

Two things would fill a GPU: logits (a reply of 8,192 tokens of Qwen3 has 1.2 billion) and what each layer keeps for the
backward pass. Both are forgotten and computed again there: the head chunk by chunk, the layers one by one.
"""

import itertools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fast.slots import packed

RECOMPUTED = 2e8  # parameters of a model whose layers are: those of Qwen3-0.6B keep about 2 MB for each token
CHUNK = 2**28  # logits that are computed at a time: 1 GiB in float32, of which about four exist at once
# How a function is checkpointed: called, and called again in the backward pass. No random state is kept, as no random
# number is drawn.
RECOMPUTE = {"use_reentrant": False, "preserve_rng_state": False}


def recompute_layers(model):
    """From now on the backward pass of a causal LM in training mode computes its layers again."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(RECOMPUTE)  # the second name is that of transformers before 5.24


class Float32Product(torch.autograd.Function):
    """hidden (N, width) @ weight (V, width)^T in float32, of bfloat16 operands: the tensor cores' own sums."""

    @staticmethod
    def forward(context, hidden, weight):
        context.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(context, gradient):
        hidden, weight = context.saved_tensors
        gradient = gradient.to(hidden.dtype)
        return gradient @ weight, gradient.T @ hidden


def head_logits(model, hidden):
    """Hidden states (N, width) to logits (N, V) in float32.

    In bfloat16 a logit of 20 has an error of up to 0.06, and sampler and trainer would round differently: for that
    alone MRS would mask one in six of Selection's short replies (results/tried.md).
    """
    head = model.get_output_embeddings()
    if hidden.is_cuda and hidden.dtype == head.weight.dtype == torch.bfloat16:
        return Float32Product.apply(hidden, head.weight)
    return F.linear(hidden.float(), head.weight.float())


def token_logprobs(model, head, ids, positions, targets, temperature=1.0):
    """Log-probabilities (N,), in float32 with gradients, of the tokens `targets` (N,) that follow `positions` (N,).

    model: a causal LM. head: states (n, width) to logits (n, V). ids: (B, L). positions: into ids.flatten().
    """
    def score(states, targets):
        logprobs = F.log_softmax(head(states).div_(temperature), dim=-1)  # in place: logits may be a gigabyte
        return logprobs.gather(-1, targets[:, None])[:, 0]

    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)  # (B L, width)
    states = states.index_select(0, positions)  # only these reach the vocabulary
    size = max(1, CHUNK // model.get_output_embeddings().weight.shape[0])  # tokens
    return torch.cat([checkpoint(score, *chunk, **RECOMPUTE) for chunk in zip(states.split(size), targets.split(size))])


def micro_batches(sequences, budget):
    """Pack `sequences` (lists of rows), longest first, into lists of sequences of at most `budget` tokens with padding.

    A rollout's turns stay together: Backbone.logprobs computes them as one sequence where each prompt extends the turn
    before it.
    """
    sized = []  # (tokens of the longest row, sequences that the model sees, rows)
    for rows in sequences:
        ids = [row.completion.prompt_ids + row.completion.token_ids for row in rows]
        apart = sum(after[:len(before)] != before for before, after in itertools.pairwise(ids))
        sized.append((max(map(len, ids)), 1 + apart, rows))
    return packed(sorted(sized, key=lambda item: -item[0]), budget)
