"""Memory for time: what a layer has computed is forgotten, and computed again in the backward pass."""

import contextlib
import functools
import math

import torch
from torch.utils.checkpoint import checkpoint

LOGITS = 2**28  # logits that are computed at a time: 1 GiB in float32, of which about four exist at once


def forgetful(function):
    """The function, which computes again in the backward pass what it has computed. Activation checkpointing.

    transformers' own acts only in train mode, and then takes the sampler's cache away. There is no dropout here (the
    model is in eval mode), so no random state has to be kept.
    """
    return functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def recomputed(layers):
    """What these layers compute within is forgotten, all but their output."""
    for layer in layers:
        layer.forward = forgetful(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def fewest_recomputed(model, layers, tokens) -> int:
    """How many layers, of so many, must be recomputed for the backward pass over `tokens` to fit into the GPU's memory.

    What is free now counts, less the gradients that are not there yet and the work on one layer and on the head.
    """
    free = torch.cuda.mem_get_info(model.device)[0]
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    free -= sum(p.nbytes for p in model.parameters() if p.grad is None and p.requires_grad)
    vocabulary, width = model.get_output_embeddings().weight.shape
    free -= 20 * min(tokens * vocabulary, LOGITS) + 2 * vocabulary * width * model.dtype.itemsize
    saved, kept = tokens * saved_bytes(model), tokens * width * model.dtype.itemsize
    missing = layers * saved + 2 * saved - 0.9 * free
    return min(layers, max(0, math.ceil(missing / (saved - kept))))


def saved_bytes(model) -> int:
    """Bytes that a layer leaves for the backward pass for each token, as a rule of thumb.

    The feed-forward part leaves four tensors of its width; attention, norms and residuals leave about sixteen of the
    model's. For Qwen3-8B that is 8.3 MB in all layers together; 6 to 8 MB were measured.
    """
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (16 * config.hidden_size + 4 * inner) * model.dtype.itemsize
