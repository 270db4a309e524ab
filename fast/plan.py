"""What fits where: the memory of a training step on each GPU, told before anything is loaded (reinforce.py --plan).

Each rank holds, in bytes for P parameters in bfloat16 and N ranks (optimizer.py, ranks.py):

    weights 2 P      gradients 2 P      optimiser's state 8 P / N, with --offload none (it lies in the host's memory)
    of a micro-batch of T tokens, for each layer: its input, 2 T width; or, where the layer is not recomputed, all that
        its backward pass needs, about 2 T (8 width + 4 inner)
    logits and the gradients of embedding and head, which do not depend on T above 2,000 tokens

The options in the order of their price: recomputing a layer costs its forward again (all of them: a third of the
update); the state in the host's memory 16 P / N bytes over PCIe in a step (8B on one GPU: 2.6 s). While it samples,
a rank has neither gradients nor activations; what is left is for the cache and the sandbox (slots.py). So --offload
may be the faster way also where a step fits without it: 8B on one card of 141 GB then has a cache of 494,000 tokens
instead of 182,000.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fast.attention import shape_of_cache
from fast.recompute import LOGITS
from fast.slots import room_for_cache

RESERVED = 5e9  # CUDA contexts of this process and of the sandbox's, NCCL's buffers, the allocator's gaps
CARDS = {24: 25.3e9, 48: 47.7e9, 80: 85.0e9, 141: 150.0e9}  # GB in a card's name: bytes that its driver gives away
NODES = [(1, 24), (1, 48), (1, 80), (1, 141), (8, 80), (8, 141)]  # GPUs, card


@dataclass(frozen=True)
class Shape:
    """What a model's memory depends on."""

    parameters: int
    layers: int
    width: int
    inner: int  # of the feed-forward part
    vocabulary: int
    cache: int  # bytes of a token's keys and values in all layers


SHAPES = {  # Qwen3
    "1.7B": Shape(1_720_574_976, 28, 2048, 6144, 151936, 28 * 2 * 8 * 128 * 2),
    "4B": Shape(4_022_468_096, 36, 2560, 9728, 151936, 36 * 2 * 8 * 128 * 2),
    "8B": Shape(8_190_735_360, 36, 4096, 12288, 151936, 36 * 2 * 8 * 128 * 2),
    "14B": Shape(14_768_307_200, 40, 5120, 17408, 151936, 40 * 2 * 8 * 128 * 2),
}


@dataclass
class Plan:
    """The cheapest way in which a step fits."""

    offload: bool  # the optimiser's state in the host's memory?
    recomputed: int  # layers
    cache: int  # tokens of all sequences together that are left to the sampler's cache


def shape_of(path) -> Shape:
    """Of a model folder or hub id, without its weights. Raises OSError or ValueError."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    text, (heads, dim, layers) = config.get_text_config(), shape_of_cache(config)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Shape(parameters, layers, text.hidden_size, inner, text.vocab_size, 4 * layers * heads * dim)


def longest(args) -> int:
    """Tokens of a micro-batch of the update: at least a whole prompt with its reply."""
    return max(args.update_tokens, args.prompt_tokens + args.policy_tokens)


def resident(shape, gpus, offload) -> float:
    """Bytes that a rank holds at any time: weights and its part of the optimiser's state."""
    return 2 * shape.parameters + (0 if offload else 8 * shape.parameters / gpus)


def peak(shape, gpus, tokens, recomputed, offload) -> float:
    """Bytes of all tensors of a rank in the update, with micro-batches of so many tokens.

    As measured; to be safe the update expects more of a layer (recompute.saved_bytes) and recomputes more of them.
    """
    inputs, within = 2 * tokens * shape.width, 2 * tokens * (8 * shape.width + 4 * shape.inner)
    layers = shape.layers * inputs + (shape.layers - recomputed) * (within - inputs)
    head = 16 * min(LOGITS, tokens * shape.vocabulary) + 2 * shape.vocabulary * shape.width
    one = 1.5 * within if recomputed else 0  # the layer whose backward pass runs, when the logits are gone
    return resident(shape, gpus, offload) + 2 * shape.parameters + layers + max(head, one)


def plan(shape, gpus, memory, tokens) -> Plan | None:
    """The cheapest way on so many GPUs of so many bytes each; None if there is none.

    tokens: of a micro-batch, and at least those of the longest prompt and its reply, which cannot be split.
    """
    room = memory - RESERVED
    for offload in (False, True):
        for recomputed in range(shape.layers + 1):
            if peak(shape, gpus, tokens, recomputed, offload) <= room:
                cache = room_for_cache(room - resident(shape, gpus, offload)) / shape.cache
                return Plan(offload, recomputed, int(cache))
    return None


def refusal(name, shape, gpus, memory, tokens, offload) -> str | None:
    """One line that says what would fit, where a step with these options does not; else None."""
    found = plan(shape, gpus, memory, tokens)
    if found is None:
        need = peak(shape, gpus, tokens, shape.layers, True) + RESERVED
        return (f"{name}: an update of {tokens} tokens does not fit on {gpus} GPU(s) of {memory / 1e9:.0f} GB; with "
                f"everything that saves memory it needs {need / 1e9:.0f} GB (fewer tokens: --update-tokens, "
                "--prompt-tokens, --policy-tokens; what fits where: --plan)")
    if found.offload and not offload:
        return (f"{name}: does not fit on {gpus} GPU(s) of {memory / 1e9:.0f} GB without --offload, which takes "
                f"{8 * shape.parameters / 1e9:.0f} GB of the host's memory")


def table(shapes, tokens) -> str:
    """What fits where, for {name: Shape}, as text."""
    row = ("{:<12}" + "{:>21}" * len(NODES)).format
    lines = [f"Update of {tokens} tokens in a micro-batch: layers that must be recomputed, of all; then the tokens "
             "that the sampler's cache can hold.", row("", *(f"{gpus} x {card} GB" for gpus, card in NODES))]
    for name, shape in shapes.items():
        plans = [plan(shape, gpus, CARDS[card], tokens) for gpus, card in NODES]
        cells = [f"{'offload, ' * p.offload}{p.recomputed}/{shape.layers}, {p.cache / 1000:.0f}k" if p else "-"
                 for p in plans]
        lines.append(row(name[-12:], *cells))
    return "\n".join(lines)
