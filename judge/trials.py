"""Trials: structured inputs, on which work that rarely matters does matter, and how closely tensors must agree.

Values along some dimensions of an input, a *row*, get one structure: they are shifted, scaled, sorted, all equal, zero,
tiny ... An input keeps its domain: what is positive stays positive, what is sparse stays sparse.

For a value r of the reference, |candidate - r| <= t * (|r - m| + s) + u * |r|. Values that are not finite, integers and
bools must be equal.

    m   in trial 0: the mean of the reference's finite values, so that an offset hides nothing; in the others, where
        honest kernels lose more digits: 0
    s   their root mean square about m, or a tenth of that about 0 if it is more
    u   2 units in the last place
    t   in trial 0: max(1e-4, u, min(10 e, 1e-2)); in the others: max(t, min(10 t, 1e-2)), or if that fails the first
        formula with 50 e, from e on just these inputs. 1e-4 is Settings.tolerance; float64 gets a millionth of it
    e   the reference's largest error against float64, on inputs changed by up to 1e-6

A few values may jump, where something is rounded, compared or sorted: if some of the reference's differ in float64, or
by more than 1e-2, ten times as many of a candidate's may differ (up to 1 %, or twice as many), ten times as far. If
most do, t is 10 e or, where e is more than 0.3, 1,000 e: the output is rounding noise, of which another order of
operations may have far more. Not looked for: errors in small values of an output that has far larger ones.
"""

import math
from typing import NamedTuple

import numpy
import torch

STRENGTH, WEAK = 30.0, 3.0  # of a structure; the latter where the reference cannot take the former
NEARBY = 1e-6  # relative change of inputs, about 8 units in the last place of float32
MARGIN, MOST = 10, 1e-2  # t is at least MARGIN times the error of the reference itself, up to MOST
WIDE = 50  # on structured inputs: a variance as E[x^2] - E[x]^2 errs up to 36 times as much as PyTorch's
NOISE = 0.3, 1000  # e of an output that is nothing but rounding noise, and its margin
UNITS = 2  # in the last place, by which any value may be off
DOUBLE = 1e-6  # t of float64 is this much of float32's
PIECE = 1 << 24  # values of a tensor that are processed together, which limits temporary memory
SORTED = 1 << 25  # values of a tensor that are sorted, at most

# ---------------------------------------------------------------------------------------------------------------------
# Inputs


class Domain(NamedTuple):
    """What the values of an input are, which a structured version keeps."""

    kind: str  # signed, positive, negative, unit (0 to 1), sums (rows sum to one), mask (0 or 1), fixed: left as drawn
    zero: bool = False  # may they be zero?
    sparse: bool = False  # are there many zeros, which stay where they are?
    whole: bool = False  # are they integers?
    symmetric: bool = False


def domain_of(x, other) -> Domain:
    """The domain of an input. other: the same input of another draw.

    Fixed are integers (labels, indices), floats of 8 bits, complex numbers, what is not finite, and what is the same in
    each draw and consists of several integers, such as a triangular mask.
    """
    if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
        x, other = x.float(), other.float()
    if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1 and x.numel() > 4):
        return Domain("fixed")
    low, high = [float(end) for end in x.aminmax()]  # NaN if any value is
    if not math.isfinite(high - low):
        return Domain("fixed")
    whole = torch.equal(x, x.round())
    if whole and torch.equal(x, other) and (low < high or low not in (0, 1)):
        return Domain("fixed")
    if whole and 0 <= low and high <= 1:
        return Domain("mask")
    sums = low >= 0 and bool((x.sum(-1, dtype=torch.float32) - 1).abs().max() < 2e-3)
    kinds = {"sums": sums, "negative": low < 0 and high <= 0, "signed": low < 0, "unit": high <= 1, "positive": True}
    kind = next(kind for kind, holds in kinds.items() if holds)
    zero = not sums and float(x.abs().min()) < 0.01 * max(-low, high)
    sparse = int((x == 0).count_nonzero()) > 0.05 * x.numel()
    symmetric = x.dim() > 1 and x.shape[-1] == x.shape[-2] and torch.allclose(x, x.mT)
    return Domain(kind, zero, sparse, whole, symmetric)


def up(x, kind, amount):
    return 1 - (1 - x) / amount if kind == "unit" else x + amount


def down(x, kind, amount):
    return x - amount if kind == "signed" else x / amount


def some(x, spread):
    """A mask of some values in each row, few or many: neighbours, or every Nth if `spread`."""
    n = x.shape[1]
    uniform = torch.rand(2, len(x), 1, device=x.device)
    members = 2 ** (uniform[0] ** 2 * (math.log2(n) + 1)).int()
    place, first = torch.arange(n, device=x.device), (uniform[1] * n).int()
    stride = n // members.clamp(2, n)
    return place % stride == first % stride if spread else place // members == first // members


def constant(x):
    """The power of two below each row's largest value: any sum of equal powers is exact, in any order."""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    return (largest.sign() * largest.abs().log2().floor().exp2()).expand_as(x)


def sort_some(rows, share):
    """Sort this share of the rows in place, up or down; of a large tensor fewer, since sorting takes longest."""
    uniform = torch.rand(2, len(rows), device=rows.device)
    chosen = uniform[0] < min(share, SORTED / max(rows.numel(), 1))
    for which, descending in (uniform[1] < 0.5, False), (uniform[1] >= 0.5, True):
        rows[chosen & which] = rows[chosen & which].sort(1, descending=descending).values


def chance(x, share):
    return torch.rand(x.shape, device=x.device) < share


def end_alone(x):
    """Zeros but for three values at a row's end."""
    place = torch.arange(x.shape[1], device=x.device)
    return torch.where(place < x.shape[1] - 3, 0.0, constant(x).abs())


END, MASK = "zero but for the end", "zeros and ones"  # where rows are few; of masks alone
# name: function of rows, their domain's kind, and an amount for each row
STRONG = {
    "high": up,
    "low": down,
    "high neighbours": lambda x, kind, amount: torch.where(some(x, False), up(x, kind, amount), x),
    "low neighbours": lambda x, kind, amount: torch.where(some(x, False), down(x, kind, amount), x),
    "every Nth high": lambda x, kind, amount: torch.where(some(x, True), up(x, kind, amount), x),
    "every Nth low": lambda x, kind, amount: torch.where(some(x, True), down(x, kind, amount), x),
    "scaled": lambda x, kind, amount: x / amount if kind == "unit" else x * amount,
    "large constant": lambda x, kind, amount: constant(x) * (1 if kind == "unit" else amount.log2().round().exp2()),
    MASK: None,  # see vary_mask
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
    END: lambda x, kind, amount: end_alone(x),
}
STRUCTURES = STRONG | PLAIN | NEAR_ZERO
# Where rows are few: what tells most
FIRST = ["scaled", "zero", END, "large constant", "high", "tiny", "every Nth high", "low", "sparse"]


def vary_mask(x, strength):
    """A quarter of the rows become ones, and a quarter zeros unless `strength` is WEAK. The others stay as drawn, or
    become random if x is zeros or ones alone. In a fifth of the rows one value is flipped: a mask must be read whole.
    """
    uniform = torch.rand(*x.shape[:-1], 1, device=x.device)
    base = x.bool() if x.any() and not x.all() else chance(x, 0.5)
    mask = (uniform > (0.25 if strength > WEAK else 0)) & base | (uniform > 0.75)
    order = torch.rand(x.shape, device=x.device)
    return x.clone().copy_(mask ^ (order == order.amax(-1, keepdim=True)) & ((uniform - 0.5).abs() > 0.4))


def vary(x, domain, trial, start, strengths):
    """A structured version of an input, with the same strides. strengths: {name of a structure: its strength}.

    Values along some dimensions, a row, have something in common: along the last one, the one before it (time, in
    sequences), all but the first (samples), or all but the second (channels), in turn. Rows get one structure after the
    other, beginning with number `start`, and a trial goes on where the last one with such rows ended. The last values
    are high.
    """
    if domain.kind == "mask":
        return vary_mask(x, strengths[MASK]) if MASK in strengths else x
    if domain.kind == "negative":
        return -vary(-x, domain._replace(kind="positive"), trial, start, strengths)
    names = [name for name in strengths if name != MASK and (domain.zero or name not in NEAR_ZERO)]
    if domain.kind == "fixed" or not names:
        return x
    dims = list(range(x.dim()))
    choices = [dims[-1:], dims[-2:][:1], dims[1:] or dims, [0, *dims[2:]]]
    within = choices[(trial - 1) % 4]
    earlier = (choices * trial)[:trial - 1].count(within)  # trials before this one with the same rows
    result = x.clone()
    turned = result.permute([dim for dim in dims if dim not in within] + within)
    length = math.prod(turned.shape[-len(within):])
    slots = x.numel() // length * choices.count(within)  # rows, in four trials
    if slots < len(names):
        names = [name for name in FIRST if name in names][:max(4, slots)]
        mild = 0.0  # each structure comes about once, so it has its full strength
        share = (start + (trial + 1) // 2) % 2  # all rows are sorted in two of four trials, none in the others
    else:
        mild = share = 0.5
        names = [name for name in names if name != END]
        last = result.as_strided([x.numel()], [1])[-(4 ** (trial % 4)):]  # a mean of all values would not miss them
        last.copy_(up(last, domain.kind, strengths.get("high", 1.0)))
    rows = turned.reshape(-1, length)  # a view, if that is possible
    sort_some(rows, share)
    for number, name in enumerate(names):
        part = rows[(number - start - earlier * len(rows)) % len(names)::len(names)]
        if len(part):
            uniform = torch.rand(len(part), 1, device=x.device)
            # Mild amounts are 2 to 5, with which gates of a recurrence are nearly, but not entirely open.
            exponent = torch.where(uniform < mild, 0.15 + 0.7 * uniform, 1.0)
            part.copy_(STRUCTURES[name](part, domain.kind, strengths[name] ** exponent))
    if rows.data_ptr() != result.data_ptr():
        turned.copy_(rows.view(turned.shape))
    return fitted(result, x, domain)


def fitted(result, x, domain):
    """A structured version of x, with what all of the task's inputs have: zeros, whole numbers, symmetry, sums of 1."""
    if domain.sparse:
        result = torch.where(x == 0, x, result)
    if domain.whole:
        result = result.round()
    if domain.symmetric:
        result.copy_(result.tril() + result.tril(-1).mT)
    return result / result.sum(-1, keepdim=True) if domain.kind == "sums" else result


def nearby(x, domain, apart):
    """An input in float64, changed by up to NEARBY of each value: another order of operations can do as much.

    Equal values stay equal unless `apart`.
    """
    if domain.kind in ("fixed", "mask") or domain.whole:
        return precise(x)
    result = x.to(torch.float64, copy=True)
    change = min(NEARBY, 8 * torch.finfo(x.dtype).eps)
    for part in result.as_strided([x.numel()], [1]).split(PIECE):
        mantissa, exponent = part.frexp()
        noise = (mantissa * 12345.678 + exponent * 0.618).frac().abs()  # any function of x that looks random
        if apart:
            noise = torch.rand(len(part), device=x.device)
        part.mul_(1 - change * noise)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


class Bound(NamedTuple):
    """How far a tensor may be from the reference's."""

    t: float
    share: float = 0.0  # of its values, up to which more is allowed
    spread: bool = True  # do errors count in proportion to the spread of its values, or to their size?
    most: float = math.inf  # what none may exceed


def width(e, dtype, tolerance, margin=MARGIN) -> float:
    """t of a tensor, from the reference's error: in trial 0, or with WIDE as the margin on structured inputs."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    least = max(UNITS * eps, tolerance * (DOUBLE if eps < 1e-12 else 1))
    if e > MOST:
        return max(least, e * (NOISE[1] if e > NOISE[0] else margin))
    return max(least, min(margin * e, MOST))


def bound_of(error, dtype, tolerance, spread, margin=MARGIN) -> Bound:
    """How far a tensor may be from the reference's. error: the reference's own, see Reference.errors."""
    share = max(min(MARGIN * error.share, MOST), 2 * error.share)  # of two values that tie, either may be taken
    return Bound(width(error.t, dtype, tolerance, margin), share, spread, MARGIN * error.most)


def difference(expected, got, bounds):
    """What is wrong with a candidate's Answer, in one line, or None. bounds: a Bound of each tensor."""
    if got.structure != expected.structure:
        return f"wrong output: {got.structure} instead of {expected.structure}"
    return compare(expected.leaves, got.leaves, bounds)


def named(outputs) -> dict:
    """{name: tensor} of a forward's outputs."""
    return {f"output {i}" if len(outputs) > 1 else "output": tensor for i, tensor in enumerate(outputs)}


def compare(expected, got, bounds):
    """The same of two {name: tensor}."""
    for (name, x), (t, share, spread, most) in zip(expected.items(), bounds):
        if name not in got:
            return f"wrong {name}: the reference changes it, and nothing of that name is there"
        y = got[name]
        if x.shape != y.shape:
            return f"wrong {name}: shape {list(y.shape)} instead of {list(x.shape)}"
        if x.dtype != y.dtype or x.device != y.device:
            return f"wrong {name}: {y.dtype} on {y.device} instead of {x.dtype} on {x.device}"
        if (x == y).all():  # quick, and often so
            continue
        errors = errors_of(x, y, spread, UNITS)
        count = int((errors > t).count_nonzero())
        if count > share * x.numel() or count and errors.max() > most:
            place = tuple(map(int, numpy.unravel_index(int(errors.argmax()), x.shape)))  # torch's imports sympy
            return (f"wrong values: {max(count / x.numel(), 0.01):.0%} of {name} {list(x.shape)}, worst at "
                    f"{list(place)}: expected {x[place].item():.4g}, got {y[place].item():.4g}")
    return None


def loose(bounds) -> list:
    """Bounds for outputs of timed calls, in which only gross errors are looked for."""
    return [bound._replace(t=max(bound.t, MOST)) if bound.t else bound for bound in bounds]


def errors_of(x, y, spread, units=0):
    """|y - x| / (|x - m| + s) for each value, x being the reference's; 0 where both are the same, also NaN or infinite.

    spread: see Bound; units: errors of so many units in the last place are subtracted. For integers and bools: 1 where
    they differ.
    """
    if is_exact(x):
        return torch.nn.functional.pad((x != y).flatten().float(), (0, 1))
    mean, scale = scale_of(x, spread)
    unit = units * torch.finfo(x.dtype).eps
    wide = torch.promote_types(y.dtype, torch.float32 if scale < 1e30 else torch.float64)
    errors = torch.zeros(x.numel() + 1, device=x.device)  # the last one is always zero, so that none is empty
    for a, b, out in zip(x.reshape(-1).split(PIECE), y.reshape(-1).split(PIECE), errors[:-1].split(PIECE)):
        same = (a == b) | (a.isnan() & b.isnan())
        a = a.to(wide)
        error = (b.to(wide) - a).abs().sub_(a.abs(), alpha=unit).clamp_(min=0).div_((a - mean).abs().add_(scale))
        out.copy_(error.nan_to_num_(math.inf).masked_fill_(same, 0.0))
    return errors


def scale_of(x, spread) -> tuple:
    """(m, s) of a tensor's finite values, see the top. Of one value, s is its size."""
    finite = x.isfinite()
    count = int(finite.count_nonzero())
    values = x if count == x.numel() else torch.where(finite, x, 0)
    count = max(count, 1)
    square = float(torch.linalg.vector_norm(values, dtype=precise_type(x.dtype))) ** 2 / count
    if count == 1 or not spread:
        return 0.0, math.sqrt(square)
    mean = values.sum(dtype=precise_type(x.dtype)).item() / count
    return mean, math.sqrt(max(square - abs(mean) ** 2, 0.01 * square))


def sharing(outputs, others) -> list:
    """Indices of outputs whose bytes are not theirs alone, or have several elements in one place.

    Outputs that are interleaved in one piece of memory, such as columns of one matrix, count as if they shared bytes.
    """
    shared = set()
    reach = 0
    taken = [span_of(tensor) for tensor in others if tensor.numel()]
    for i, tensor in sorted(enumerate(outputs), key=lambda entry: entry[1].data_ptr()):
        if tensor.numel() == 0:
            continue
        first, last = span_of(tensor)
        ends = 0  # of the elements in the dimensions so far
        for step, n in sorted(zip(tensor.stride(), tensor.shape)):
            if n > 1 and step <= ends:
                shared.add(i)
            ends += (n - 1) * step
        if first < reach or any(first < end and start < last for start, end in taken):
            shared.add(i)
        reach = max(reach, last)
    return sorted(shared)


def span_of(tensor) -> tuple:
    """Addresses of a tensor's first byte and of the byte behind its last one."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def is_same(x, y) -> bool:
    """Have two tensors the same shape and values, NaN included?"""
    return x is y or x.shape == y.shape and bool(((x == y) | (x != x) & (y != y)).all())


def is_exact(x) -> bool:
    """Are its values integers or bools?"""
    return not (x.is_floating_point() or x.is_complex())


def precise_type(dtype):
    """float64 or complex128 for a type of less precision; any other type as it is."""
    inexact = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float64) if inexact else dtype


def precise(x):
    """A tensor in double precision; anything but floats and complex numbers as it is."""
    return x.to(precise_type(x.dtype)) if isinstance(x, torch.Tensor) else x
