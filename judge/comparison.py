"""How closely a candidate's tensors must agree with the reference's.

For a value r of the reference, |candidate - r| <= t * (|r - m| + s) + u * |r|. Values that are not finite, integers and
bools must be equal.

    m   in trial 0: the mean of the reference's finite values, so that an offset hides nothing; in the others, where
        honest kernels lose more digits: 0
    s   their root mean square about m, or a tenth of that about 0 if it is more
    u   2 units in the last place
    t   in trial 0: max(1e-4, u, min(10 e, 1e-2)); in the others: max(t, min(10 t, 1e-2)). 1e-4 is Settings.tolerance;
        float64 gets a millionth of it
    e   the reference's largest error against float64, on inputs changed by up to 1e-6

A few values may jump, where something is rounded, compared or sorted: if some of the reference's differ in float64, or
by more than 1e-2, ten times as many of a candidate's may differ. If most do, t is 10 e or, where e is more than 0.3,
1,000 e: the output is rounding noise, of which another order of operations may have far more. Not looked for: errors in
small values of an output that has far larger ones.
"""

import math
from typing import NamedTuple

import numpy
import torch

MARGIN, MOST = 10, 1e-2  # t is at least MARGIN times the error of the reference itself, up to MOST
NOISE = 0.3, 1000  # e of an output that is nothing but rounding noise, and its margin
UNITS = 2  # in the last place, by which any value may be off
DOUBLE = 1e-6  # t of float64 is this much of float32's
PIECE = 1 << 24  # values of a tensor that are processed together, which limits temporary memory


class Bound(NamedTuple):
    """How far a tensor may be from the reference's."""

    t: float
    share: float = 0.0  # of its values, up to which more is allowed
    spread: bool = True  # do errors count in proportion to the spread of its values, or to their size?


def width(e, dtype, tolerance) -> float:
    """t of a tensor in trial 0, from the reference's error."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    least = max(UNITS * eps, tolerance * (DOUBLE if eps < 1e-12 else 1))
    if e > MOST:
        return max(least, e * (NOISE[1] if e > NOISE[0] else MARGIN))
    return max(least, min(MARGIN * e, MOST))


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
    for (name, x), (t, share, spread) in zip(expected.items(), bounds):
        if name not in got:
            return f"wrong {name}: the reference changes it, and nothing of that name is there"
        y = got[name]
        if x.shape != y.shape:
            return f"wrong {name}: shape {list(y.shape)} instead of {list(x.shape)}"
        if x.dtype != y.dtype or x.device != y.device:
            return f"wrong {name}: {y.dtype} on {y.device} instead of {x.dtype} on {x.device}"
        errors = errors_of(x, y, spread, UNITS)
        count = int((errors > t).sum())
        if count > share * x.numel():
            place = tuple(map(int, numpy.unravel_index(int(errors.argmax()), x.shape)))
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
    errors = torch.zeros(x.numel() + 1, device=x.device)  # the last one is always zero, so that none is empty
    for a, b, out in zip(x.reshape(-1).split(PIECE), y.reshape(-1).split(PIECE), errors[:-1].split(PIECE)):
        same = (a == b) | (a.isnan() & b.isnan())
        a = precise(a)
        b = precise(b)
        error = ((b - a).abs() - unit * a.abs()).clamp(min=0) / ((a - mean).abs() + scale)
        out.copy_(torch.where(same, 0.0, error.nan_to_num(math.inf)))
    return errors


def scale_of(x, spread) -> tuple:
    """(m, s) of a tensor's finite values, see the top. Of one value, s is its size."""
    finite = x.isfinite()
    values, count = torch.where(finite, x, 0), max(int(finite.sum()), 1)
    square = float(torch.linalg.vector_norm(values, dtype=precise_type(x.dtype))) ** 2 / count
    if count == 1 or not spread:
        return 0.0, math.sqrt(square)
    mean = precise(values).sum().item() / count
    return mean, math.sqrt(max(square - abs(mean) ** 2, 0.01 * square))


def sharing(outputs, others) -> list:
    """Indices of outputs whose bytes are not theirs alone, or have several elements in one place.

    Outputs that are interleaved in one piece of memory, such as columns of one matrix, count as if they shared bytes.
    """
    shared, reach = set(), 0
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
