"""What a candidate is compared with: the reference model, the inputs of each trial, and the tolerance.

Trial 0 uses inputs as the task draws them, the others structured ones: rows that are sorted, shifted, constant, zero ...
Parameters are perturbed, where the candidate's are the reference's by name and value, but for the last trial, which has
them as constructed. So work that rarely matters, or not yet, must still be done. A structure or a perturbation that the
reference cannot take is dropped, and `note` says so.

Compared are the outputs, the inputs that the reference changes, and the parameters and buffers that it changes. For a
value r of the reference, |candidate - r| <= t * (|r - m| + s) + u * |r|. Values that are not finite, integers and bools
must be equal.

    m   the mean of the reference's finite values
    s   their standard deviation, or a tenth of their root mean square if that is more
    u   2 units in the last place
    t   in trial 0: max(1e-4, u, min(10 e, 1e-2)); in the others: max(t, min(10 t, 1e-2)). 1e-4 is Settings.tolerance;
        float64 gets a millionth of it
    e   the reference's largest error against float64, on inputs changed by up to 1e-6

A few values may jump, where something is rounded, compared or sorted: if some of the reference's differ in float64, or
by more than 1e-2, ten times as many of a candidate's may differ. If most do, t is 10 e or, where e is more than 0.3,
1,000 e: the output is rounding noise, of which another order of operations may have far more. Not looked for: errors in
small values of an output that has far larger ones.
"""

import contextlib
import copy
import hashlib
import inspect
import math
import random
import sys
import tempfile
import types
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.program import copy_of, tensors_in
from judge.verdict import describe
from tasks import TaskError

STRENGTHS = (30.0, 10.0, 3.0)  # of a structure. Each gets the first that the reference can take
MARGIN, MOST = 10, 1e-2  # t is at least MARGIN times the error of the reference itself, up to MOST
NOISE = 0.3, 1000  # e of an output that is nothing but rounding noise, and its margin
NEARBY = 1e-6  # relative change of inputs, about 8 units in the last place of float32
UNITS = 2  # in the last place, by which any value may be off
DOUBLE = 1e-6  # t of float64 is this much of float32's
PIECE = 1 << 24  # values of a tensor that are processed together, which limits temporary memory


class CudaIsCpu(torch.overrides.TorchFunctionMode):
    """While active, .cuda(), .to("cuda") and device="cuda" mean the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map_only((str, torch.device), self.on_cpu, (args, kwargs or {}))
        return func(*args, **kwargs)

    def on_cpu(self, place):
        return "cpu" if str(place).split(":")[0] == "cuda" else place


class InDouble(torch.overrides.TorchFunctionMode):
    """While active, every floating-point type that PyTorch is asked for is float64: casts lose no precision."""

    CASTS = torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view and torch.dtype in map(type, [*args, *(kwargs or {}).values()]):
            raise TypeError("the bits of a float64 are not those of another type")
        func = torch.Tensor.double if func in self.CASTS else func
        args, kwargs = tree_map_only(torch.dtype, precise_type, (args, kwargs or {}))
        return func(*args, **kwargs)


class Bound(NamedTuple):
    """How far a tensor may be from the reference's."""

    t: float
    share: float = 0.0  # of its values, up to which more is allowed


class Answer(NamedTuple):
    leaves: dict  # {name: tensor}: the outputs, then the inputs, then the state that the reference changes
    structure: str  # how the outputs are nested, such as "(tensor, [tensor])"
    changed: list  # indices of inputs that the forward changed in place
    shared: list  # indices of outputs that have no memory of their own


class Reference:
    """A task's reference model. Raises TaskError if it cannot be run, or if no candidate could be compared with it."""

    def __init__(self, name, source, settings, secret):
        """secret: at most 64 bytes. Every seed is a keyed hash with it."""
        self.source, self.secret = source, secret
        self.tolerance = settings["tolerance"]
        self.device = torch.device(settings["device"])
        self.place = CudaIsCpu() if self.device.type == "cpu" else contextlib.nullcontext()
        self.notes = []  # what trials leave out, and why
        try:
            with self.place:
                folder = Path(tempfile.mkdtemp(dir=settings.get("scratch")))
                self.construct(load_module(source, folder / "reference.py"))
            self.strengths = {}
            self.example = self.inputs("example", 0)
            self.domains = list(map(domain_of, self.example, self.inputs("another example", 0)))
            self.find_side_effects()
            self.choose_perturbation()
            self.choose_structure()
        except Exception as error:
            why = error if isinstance(error, TaskError) else f"the reference fails: {describe(error)[0]}"
            raise TaskError(f"{name}: {why}") from None

    def derive(self, *purpose) -> int:
        """A seed for one purpose."""
        text = repr((self.source, *purpose)).encode()
        return int.from_bytes(hashlib.blake2b(text, key=self.secret, digest_size=4).digest(), "little")

    # -----------------------------------------------------------------------------------------------------------------
    # The model

    def construct(self, module):
        """Construct the model on the CPU, as candidates are: a GPU draws other random values."""
        seed_everything(self.derive("arguments"))
        self.get_inputs = module.get_inputs
        self.arguments, self.keywords = list(module.get_init_inputs()), {}
        if list(map(type, self.arguments)) == [list, dict]:  # KernelBook: [arguments, keywords]
            self.arguments, self.keywords = self.arguments
        self.seed = self.derive("parameters")
        seed_everything(self.seed)
        self.model = module.Model(*self.arguments, **self.keywords)
        self.summary = {}
        for name, tensor in state_of(self.model).items():
            raw = tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
            self.summary[name] = [str(tensor.dtype), list(tensor.shape), zlib.crc32(raw.numpy())]
        self.model.to(self.device)
        self.constructed = {name: tensor.detach().clone() for name, tensor in state_of(self.model).items()}
        self.perturbed = self.constructed

    def perturb(self, name, tensor, flip):
        """A parameter moved by a fifth, away from zero, and half of its signs flipped if `flip`.

        A gain of 1e-6 or a gate of zero becomes as large as parameters usually are, so that what it scales matters.
        Buffers are constants of the task, except for running statistics, which keep their sign.
        """
        parameter = name in dict(self.model.named_parameters())
        if not tensor.is_floating_point() or not (parameter or "running_" in name):
            return tensor
        torch.manual_seed(self.derive("perturbed", name))
        noise = torch.rand(3, *tensor.shape).to(tensor)
        matrix = tensor.dim() > 1 and len(tensor) > 1
        usual = 1 / math.sqrt(max(tensor[0].numel(), 1)) if matrix else 1.0
        least = 0.2 * max(usual, min(1.0, scale_of(tensor)[1]))
        size = torch.maximum(tensor.abs() * (0.8 + 0.4 * noise[0]), least * (0.5 + 0.5 * noise[1]))
        negative = tensor < 0
        if parameter and flip:
            negative ^= noise[2] <= noise[2].median()
        return torch.where(negative, -size, size)

    def state(self, perturbed) -> dict:
        """{name: tensor} of parameters and buffers, as constructed or perturbed (where the reference can take that)."""
        return self.perturbed if perturbed else self.constructed

    def load(self, perturbed):
        """Set the model's state. Until the next load, a forward goes on from the buffers that the last one left."""
        for name, tensor in state_of(self.model).items():
            tensor.detach().copy_(self.state(perturbed)[name])

    def run(self, inputs, seed, model=None) -> Answer:
        """The reference's answer, on copies of the inputs. model: one to be used in place of it."""
        model, copies = model or self.model, copy_of(inputs)
        torch.manual_seed(seed)
        with torch.no_grad(), self.place:
            output = model(*copies)
        return self.answer(output, copies, state_of(model), self.changed_inputs)

    def answer(self, output, inputs, state, changed, others=()) -> Answer:
        """What a forward of the reference or of a candidate amounts to.

        inputs, state ({name: tensor}): after the forward; changed: indices of inputs that it changed; others: tensors
        in whose memory no output may lie either.
        """
        outputs = tensors_in(output)
        leaves = named(outputs)
        leaves |= {f"input {i}": inputs[i] for i in self.changed_inputs}
        leaves |= {f"state {name}": state[name].detach().clone() for name in self.changed_state if name in state}
        shared = sharing(outputs, [*tensors_in(inputs), *state.values(), *others])
        return Answer(leaves, structure(output), list(changed), shared)

    def find_side_effects(self):
        """Find which inputs, parameters and buffers the forward changes, and which outputs share memory with others."""
        self.changed_inputs, self.changed_state = [], []
        copies = copy_of(self.example)
        with torch.no_grad(), self.place:
            output = self.model(*copies)
        if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output)):
            raise TaskError("it returns something other than tensors")
        self.changed_inputs = [i for i, x in enumerate(copies) if isinstance(x, torch.Tensor) and x._version]
        state = state_of(self.model)
        self.changed_state = [name for name, x in self.constructed.items() if not is_same(x, state[name])]
        self.shared = self.answer(output, copies, state, self.changed_inputs).shared

    def blueprint(self) -> dict:
        """What a recorder needs to construct ModelNew, and inputs without values."""
        blueprint = {"arguments": self.arguments, "keywords": self.keywords, "seed": self.seed, "state": self.summary}
        blueprint["inputs"] = [{"dtype": str(x.dtype), "shape": list(x.shape), "stride": list(x.stride())}
                               if isinstance(x, torch.Tensor) else {"value": x} for x in self.example]
        if self.device.type == "cuda":
            found = inspect.getmembers(torch.cuda.get_device_properties(self.device))
            blueprint["gpu"] = {name: value for name, value in found if isinstance(value, (int, float, str))}
        return blueprint

    # -----------------------------------------------------------------------------------------------------------------
    # Trials

    def inputs(self, key, trial) -> list:
        """Fresh inputs for a trial of a candidate. key: its text, or another purpose.

        Those that are not tensors must be the same each time, as they become part of the program.
        """
        seed_everything(self.derive(key, trial))
        try:
            with self.place, self.device:  # a GPU draws much faster
                drawn = list(self.get_inputs())
        except (RuntimeError, TypeError):  # not all of PyTorch works with it as the default device
            with self.place:
                drawn = list(self.get_inputs())
        for i, x in enumerate(drawn):
            if isinstance(x, torch.Tensor):
                drawn[i] = x.detach().to(self.device).clone()  # contiguous, unless it is dense otherwise
                if trial:
                    drawn[i] = vary(drawn[i], self.domains[i], trial, self.derive(key), self.strengths)
            elif tensors_in(x):
                raise TaskError("tensors within a list or dict of inputs are not supported")
        return drawn

    def bounds(self, trial, perturbed) -> list:
        """The Bound of each compared tensor in this trial."""
        widths = self.widths[perturbed]
        if trial:
            widths = [max(t, min(MARGIN * t, MOST)) for t in widths]
        return [Bound(t, min(MARGIN * share, MOST)) for t, share in zip(widths, self.jumps)]

    def choose_perturbation(self):
        """Measure the bounds of trial 0, and perturb parameters in a way that the reference can take."""
        self.load(False)
        leaves = self.run(self.example, 0).leaves
        self.load(False)
        if compare(leaves, self.run(self.example, 1).leaves, [Bound(MOST, MOST)] * len(leaves)):
            raise TaskError("its output is random (dropout in training mode?), so no kernel can be compared with it")
        self.dtypes = [x.dtype for x in leaves.values()]
        errors, self.missing = self.measure(0, False)
        constructed = self.widths_for(errors)
        self.widths = {False: constructed, True: constructed}
        self.jumps = [e.share for e in errors]
        for flip in True, False:
            self.perturbed = {name: self.perturb(name, tensor, flip) for name, tensor in self.constructed.items()}
            if all(map(is_same, self.perturbed.values(), self.constructed.values())):
                return
            with contextlib.suppress(Exception):
                errors, missing = self.measure(0, True)
                if missing <= 2 * self.missing and all(e.t <= max(MOST, t) for e, t in zip(errors, constructed)):
                    self.widths[True] = self.widths_for(errors)
                    self.jumps = [max(share, e.share) for share, e in zip(self.jumps, errors)]
                    return
        self.perturbed = self.constructed
        self.notes.append("parameters were not perturbed: the reference fails with others")

    def choose_structure(self):
        """Choose the structures of inputs, and their strengths: all at once, or else one by one."""
        if all(domain.kind == "fixed" for domain in self.domains):
            return
        self.strengths = dict.fromkeys(STRUCTURES, STRENGTHS[0])
        if self.takes(*range(1, 9)):
            return
        kept = {AS_DRAWN: 1.0}
        for name in STRUCTURES:
            for strength in STRENGTHS if name in STRONG else STRENGTHS[:1]:
                self.strengths = {AS_DRAWN: 1.0, name: strength}
                if name not in kept and self.takes(1, 4):
                    kept[name] = strength
        weak = {name: strength for name, strength in kept.items() if name not in STRONG}
        choices = [{name: min(strength, most) for name, strength in kept.items()} for most in STRENGTHS]
        for self.strengths in *choices, weak, {}:
            if self.takes(*range(1, 9)):
                break
        if dropped := [name for name in STRUCTURES if name not in self.strengths]:
            what = f"rows of some kinds ({', '.join(dropped)})" if self.strengths else "structure"
            self.notes.append(f"inputs had no {what}: the reference fails on them")

    def takes(self, *trials) -> bool:
        """Can the reference take the inputs of these trials: is it as finite and nearly as accurate as in trial 0?"""
        for trial in trials:
            perturbed = trial < 5
            try:
                errors, missing = self.measure(trial, perturbed)
            except Exception:
                return False
            if missing > 2 * self.missing:
                return False
            for e, bound, t, share in zip(errors, self.bounds(trial, perturbed), self.widths[perturbed], self.jumps):
                # An honest kernel may err as much as the reference, so half of the bound is left to each.
                if e.t > max(bound.t / MARGIN, t / 2) or e.share > max(MOST / MARGIN, share):
                    return False
            self.jumps = [max(share, e.share) for share, e in zip(self.jumps, errors)]
        return True

    def measure(self, trial, perturbed) -> tuple:
        """(e and share of jumps of each compared tensor, largest share of one's values that are not finite)."""
        inputs = self.inputs("errors", trial)
        self.load(perturbed)
        leaves = self.run(inputs, 0).leaves
        exact = self.in_double(inputs, perturbed, leaves)
        errors, missing = [], 0.0
        for name, x in leaves.items():
            found = errors_of(x, exact[name])
            jumps = found > MOST
            share = int(jumps.sum()) / max(x.numel(), 1)
            noise = share > 0.5 and not is_exact(x)
            worst = float(found.max() if noise else torch.where(jumps, 0.0, found).max())
            errors.append(Bound(worst, 0.0 if noise else share))
            missing = max(missing, 1 - int(x.isfinite().sum()) / max(x.numel(), 1))
        return errors, missing

    def widths_for(self, errors) -> list:
        """t of each compared tensor in trial 0, from the reference's errors."""
        widths = []
        for (e, _), dtype in zip(errors, self.dtypes):
            t = NOISE[1] * e if e > NOISE[0] else MARGIN * e if e > MOST else min(MARGIN * e, MOST)
            if dtype.is_floating_point or dtype.is_complex:
                eps = torch.finfo(dtype).eps
                t = max(t, UNITS * eps, self.tolerance * (DOUBLE if eps < 1e-12 else 1))
            widths.append(t)
        return widths

    def in_double(self, inputs, perturbed, leaves) -> dict:
        """What the reference computes in float64 on inputs nearby, or `leaves` where it cannot."""
        before = torch.get_default_dtype()
        result = {}
        try:
            # Where values are equal, indices are ambiguous: that shows if equal values do not stay equal.
            for apart in sorted(set(map(is_exact, leaves.values()))):
                self.load(perturbed)
                twin = copy.deepcopy(self.model)._apply(precise)
                near = [nearby(x, domain, apart) for x, domain in zip(inputs, self.domains)]
                torch.set_default_dtype(torch.float64)
                with InDouble():
                    found = self.run(near, 0, twin).leaves
                result |= {name: found[name] for name, x in leaves.items() if is_exact(x) == apart}
        except Exception:  # too little memory, or code that mixes in tensors of a fixed type
            return leaves
        finally:
            torch.set_default_dtype(before)
        return result if all(x.shape == result[name].shape for name, x in leaves.items()) else leaves


# ---------------------------------------------------------------------------------------------------------------------
# Structured inputs


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
    positive = "sums" if sums else "unit" if high <= 1 else "positive"
    kind = positive if low >= 0 else "negative" if high <= 0 else "signed"
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


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


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
    for (name, x), (t, share) in zip(expected.items(), bounds):
        if name not in got:
            return f"wrong {name}: the reference changes it, and nothing of that name is there"
        y = got[name]
        if x.shape != y.shape:
            return f"wrong {name}: shape {list(y.shape)} instead of {list(x.shape)}"
        if x.dtype != y.dtype or x.device != y.device:
            return f"wrong {name}: {y.dtype} on {y.device} instead of {x.dtype} on {x.device}"
        errors = errors_of(x, y, UNITS)
        count = int((errors > t).sum())
        if count > share * x.numel():
            place = tuple(map(int, numpy.unravel_index(int(errors.argmax()), x.shape)))
            return (f"wrong values: {max(count / x.numel(), 0.01):.0%} of {name} {list(x.shape)}, worst at "
                    f"{list(place)}: expected {x[place].item():.4g}, got {y[place].item():.4g}")
    return None


def loose(bounds) -> list:
    """Bounds for outputs of timed calls, in which only gross errors are looked for."""
    return [Bound(max(t, MOST) if t else t, share) for t, share in bounds]


def errors_of(x, y, units=0):
    """|y - x| / (|x - m| + s) for each value, x being the reference's; 0 where both are the same, also NaN or infinite.

    units: errors of so many units in the last place are subtracted. For integers and bools: 1 where they differ.
    """
    mean, scale = (0.0, 1.0) if is_exact(x) else scale_of(x)
    unit = 0.0 if is_exact(x) else units * torch.finfo(x.dtype).eps
    errors = torch.zeros(x.numel() + 1, device=x.device)
    for a, b, out in zip(x.reshape(-1).split(PIECE), y.reshape(-1).split(PIECE), errors[:-1].split(PIECE)):
        same, a, b = (a == b) | (a.isnan() & b.isnan()), precise(a), precise(b)
        if not is_exact(x):
            error = ((b - a).abs() - unit * a.abs()).clamp(min=0) / ((a - mean).abs() + scale)
        out.copy_(torch.where(same, 0.0, 1.0 if is_exact(x) else error.nan_to_num(math.inf)))
    return errors


def scale_of(x) -> tuple:
    """(m, s) of a tensor's finite values, see the top. Of one value, s is its size."""
    finite = x.isfinite()
    values, count = torch.where(finite, x, 0), max(int(finite.sum()), 1)
    mean = precise(values).sum().item() / count
    square = float(torch.linalg.vector_norm(values, dtype=precise_type(x.dtype))) ** 2 / count
    variance = square if count == 1 else max(square - abs(mean) ** 2, 0.01 * square)
    return mean, math.sqrt(variance)


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


# ---------------------------------------------------------------------------------------------------------------------
# Tensors and modules


def load_module(text, path):
    """Execute a text as the module of a new file, where inspect and Triton find it. Its name is the file's."""
    path = Path(path)
    path.write_text(text, encoding="utf-8", newline="")
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def seed_everything(seed):
    """Seed every generator that a task may use."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def state_of(model) -> dict:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def structure(tree) -> str:
    """How the tensors of an output are nested. A named tuple is a tuple."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        inside = ", ".join(map(structure, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return "tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__


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
