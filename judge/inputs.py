"""Structured inputs: versions of a task's inputs on which work that rarely matters does matter.

Values along some dimensions of an input, a *row*, get one structure: they are shifted, scaled, sorted, all equal, zero,
tiny ... An input keeps its domain: what is positive stays positive, what is sparse stays sparse.
"""

import math
from typing import NamedTuple

import torch

from judge.comparison import precise

STRENGTHS = (30.0, 10.0, 3.0)  # of a structure. Each gets the first that the reference can take
NEARBY = 1e-6  # relative change of inputs, about 8 units in the last place of float32


class Domain(NamedTuple):
    """What the values of an input are, which a structured version keeps."""

    kind: str  # signed, positive, negative, unit (0 to 1), sums (rows sum to one), or fixed: left as drawn
    zero: bool = False  # may they be zero?
    sparse: bool = False  # are there many zeros, which stay where they are?
    whole: bool = False  # are they integers?
    symmetric: bool = False


def domain_of(x, other) -> Domain:
    """The domain of an input. other: the same input of another draw.

    Fixed are constants, masks, integers (labels, indices), floats of 8 bits, complex numbers, and what is not finite.
    """
    floats = isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1
    if not floats or x.numel() <= 4 or torch.equal(x, other) or not x.isfinite().all():
        return Domain("fixed")
    low, high, size = float(x.min()), float(x.max()), float(x.abs().max())
    whole = torch.equal(x, x.round())
    if whole and 0 <= low and high <= 1:
        return Domain("fixed")
    sums = low >= 0 and bool((x.sum(-1, dtype=torch.float32) - 1).abs().max() < 2e-3)
    if low < 0:
        kind = "negative" if high <= 0 else "signed"
    elif sums:
        kind = "sums"
    else:
        kind = "unit" if high <= 1 else "positive"
    sparse = int((x == 0).sum()) > 0.05 * x.numel()
    symmetric = x.dim() > 1 and x.shape[-1] == x.shape[-2] and torch.allclose(x, x.mT)
    return Domain(kind, not sums and float(x.abs().min()) < 0.01 * size, sparse, whole, symmetric)


def up(x, kind, amount):
    return 1 - (1 - x) / amount if kind == "unit" else x + amount


def down(x, kind, amount):
    return x - amount if kind == "signed" else x / amount


def neighbours(x):
    """A mask of some neighbours in each row, few or many."""
    n, uniform = x.shape[1], torch.rand(2, len(x), 1, device=x.device)
    members = 2 ** (uniform[0] ** 2 * (math.log2(n) + 1)).int()
    return torch.arange(n, device=x.device) // members == (uniform[1] * n).int() // members


def spread(x):
    """A mask of every Nth value in each row."""
    n, uniform = x.shape[1], torch.rand(2, len(x), 1, device=x.device)
    members = 2 ** (uniform[0] ** 2 * (math.log2(n) + 1)).int()
    stride = n // members.clamp(2, n)
    return torch.arange(n, device=x.device) % stride == (uniform[1] * n).int() % stride


def constant(x):
    """The power of two below each row's largest value: any sum of equal powers is exact, in any order."""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    return (largest.sign() * largest.abs().log2().floor().exp2()).expand_as(x)


def partly_sorted(x):
    """Half of the rows sorted, up or down."""
    rising, uniform = x.sort(1).values, torch.rand(len(x), 1, device=x.device)
    return torch.where(uniform < 0.25, rising, torch.where(uniform < 0.5, rising.flip(1), x))


def chance(x, share):
    return torch.rand(x.shape, device=x.device) < share


AS_DRAWN = "as drawn"
# name: function of rows, their domain's kind, and an amount for each row
STRONG = {
    "high": up,
    "low": down,
    "high neighbours": lambda x, kind, amount: torch.where(neighbours(x), up(x, kind, amount), x),
    "low neighbours": lambda x, kind, amount: torch.where(neighbours(x), down(x, kind, amount), x),
    "every Nth high": lambda x, kind, amount: torch.where(spread(x), up(x, kind, amount), x),
    "every Nth low": lambda x, kind, amount: torch.where(spread(x), down(x, kind, amount), x),
    "scaled": lambda x, kind, amount: x / amount if kind == "unit" else x * amount,
    "large constant": lambda x, kind, amount: constant(x) * (1 if kind == "unit" else amount.log2().round().exp2()),
}
PLAIN = {
    "sorted": lambda x, kind, amount: x,
    "half equal": lambda x, kind, amount: torch.where(chance(x, 0.5), x.amax(1, keepdim=True), x),
    "constant": lambda x, kind, amount: constant(x),
    "negative": lambda x, kind, amount: -x.abs() if kind == "signed" else x,
}
NEAR_ZERO = {
    "zero": lambda x, kind, amount: torch.zeros_like(x),
    "tiny": lambda x, kind, amount: x / amount ** 4,
    "sparse": lambda x, kind, amount: torch.where(chance(x, 0.1), x, 0.0),
    "whole": lambda x, kind, amount: x.round(),
}
STRUCTURES = STRONG | PLAIN | NEAR_ZERO


def vary(x, domain, trial, start, strengths):
    """A structured version of an input, with the same strides. strengths: {name of a structure: its strength}.

    Values along some dimensions, a row, have something in common: along the last one, the one before it (time, in
    sequences), all but the first (samples), or all but the second (channels), in turn. Rows get one structure after the
    other, beginning with number `start`, and a trial goes on where the one before it ended.
    """
    names = [name for name in strengths if domain.zero or name not in NEAR_ZERO]
    if domain.kind == "fixed" or not names:
        return x
    dims = list(range(x.dim()))
    within = [dims[-1:], dims[-2:][:1], dims[1:] or dims, [0, *dims[2:]]][(trial - 1) % 4]
    result, sign = x.clone(), -1 if domain.kind == "negative" else 1
    kind = "positive" if domain.kind == "negative" else domain.kind
    turned = result.permute([dim for dim in dims if dim not in within] + within)
    rows = turned.reshape(-1, math.prod(turned.shape[-len(within):])) * sign
    for number, name in enumerate(names):
        part = rows[(number - start - trial * len(rows)) % len(names)::len(names)]
        if name != AS_DRAWN and len(part):
            uniform = torch.rand(len(part), 1, device=x.device)
            # Half of the amounts are 2 to 5, with which gates of a recurrence are nearly, but not entirely open.
            exponent = torch.where(uniform < 0.5, 0.15 + 0.7 * uniform, 1.0)
            part.copy_(STRUCTURES[name](partly_sorted(part), kind, strengths[name] ** exponent))
    turned.copy_((rows * sign).view(turned.shape))
    if domain.sparse:
        result = torch.where(x == 0, x, result)
    if domain.whole:
        result = result.round()
    if domain.symmetric:
        result.copy_(result.tril() + result.tril(-1).mT)
    return result / result.sum(-1, keepdim=True) if kind == "sums" else result


def nearby(x, domain, apart):
    """An input in float64, changed by up to NEARBY of each value: another order of operations can do as much.

    Equal values stay equal unless `apart`.
    """
    if domain.kind == "fixed" or domain.whole:
        return precise(x)
    mantissa, exponent = precise(x).frexp()
    noise = (mantissa * 12345.678 + exponent * 0.618).frac().abs()  # any function of x that looks random
    if apart:
        noise = torch.rand(x.shape, device=x.device)
    return precise(x) * (1 - min(NEARBY, 8 * torch.finfo(x.dtype).eps) * noise)
