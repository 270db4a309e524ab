"""What a candidate is compared with: the reference model, the inputs of each trial, and the tolerance.

Trial 0 uses the task's inputs as drawn and the parameters as constructed. The others use structured inputs (sorted
rows, clusters of large values, offsets, ties) and, where the candidate's parameters are the reference's by name and
value, perturbed ones, so that work which rarely matters must still be done. For a value r of the reference, |candidate
- r| <= t * (|r| + s).

    s   the root mean square of the reference's output
    t   in trial 0: max(1e-4, 2 units in the last place, min(10 e, 1e-2)); in the others: max(t, min(10 t, 1e-2)).
        1e-4 is Settings.tolerance; e: the reference's error against float64, on inputs changed by up to 1e-6

Integers and bools must be equal. Not looked for: errors in small values of an output that has far larger ones.
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

STRENGTHS = (30.0, 10.0, 3.0, 1.0)  # of structured inputs. A task gets the first that its reference can take; 1: none
MARGIN, MOST = 10, 1e-2  # t is at least MARGIN times the error of the reference itself, up to MOST
NEARBY = 1e-6  # about 8 units in the last place of float32
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


class Answer(NamedTuple):
    leaves: list  # the output's tensors
    structure: str  # how they are nested, such as "(tensor, [tensor])"
    changed: list  # indices of inputs that the forward changed in place


class Reference:
    """A task's reference model. Raises TaskError if it cannot be run, or if no candidate could be compared with it."""

    def __init__(self, name, source, settings, secret):
        """secret: at most 64 bytes. Every seed is a keyed hash with it."""
        self.source, self.secret = source, secret
        self.tolerance = settings["tolerance"]
        self.device = torch.device(settings["device"])
        self.place = CudaIsCpu() if self.device.type == "cpu" else contextlib.nullcontext()
        try:
            with self.place:
                folder = Path(tempfile.mkdtemp(dir=settings.get("scratch")))
                self.construct(load_module(source, folder / "reference.py"))
            self.example = self.inputs("example", 0)
            self.domains = list(map(domain, self.example, self.inputs("another example", 0)))
            self.load_bounds()
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
        self.perturbed = {name: self.perturb(name, tensor) for name, tensor in self.constructed.items()}

    def perturb(self, name, tensor):
        """A parameter moved a little. Buffers are constants of the task, except for running statistics."""
        if not tensor.is_floating_point() or not (name in dict(self.model.named_parameters()) or "running_" in name):
            return tensor
        torch.manual_seed(self.derive("perturbed", name))
        noise = torch.rand(2, *tensor.shape).to(tensor)  # 0 to 1, so a variance stays positive
        return tensor * (0.8 + 0.4 * noise[0]) + 0.1 * noise[1] * (min(1.0, scale_of(tensor)) or 1.0)

    def state(self, perturbed) -> dict:
        """{name: tensor} of parameters and buffers, as constructed or perturbed (where the reference can take that)."""
        return self.perturbed if perturbed else self.constructed

    def load(self, perturbed):
        """Set the model's state. Until the next load, a forward goes on from the buffers that the last one left."""
        for name, tensor in state_of(self.model).items():
            tensor.detach().copy_(self.state(perturbed)[name])

    def run(self, inputs, seed, model=None) -> Answer:
        """The reference's answer, on copies of the inputs. model: one to be used in place of it."""
        copies = copy_of(inputs)
        torch.manual_seed(seed)
        with torch.no_grad(), self.place:
            output = (model or self.model)(*copies)
        changed = [i for i, x in enumerate(copies) if isinstance(x, torch.Tensor) and x._version]
        return Answer(tree_leaves(output), structure(output), changed)

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
                    drawn[i] = vary(drawn[i], self.domains[i], trial, self.strength, self.ties)
            elif tensors_in(x):
                raise TaskError("tensors within a list or dict of inputs are not supported")
        return drawn

    def bounds(self, trial) -> list:
        """t of each output in this trial."""
        return self.structured_bounds if trial else self.plain_bounds

    def load_bounds(self):
        """Choose the tolerances, and the strength of structured inputs."""
        leaves = self.run(self.example, 0).leaves
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TaskError("it returns something other than tensors")
        self.ties = not any(map(is_exact, leaves))  # where values are equal, indices are ambiguous
        self.plain_bounds = self.structured_bounds = self.measure([0], False, math.inf)
        self.load(False)
        if compare(leaves, self.run(self.example, 1).leaves, loose(self.plain_bounds)):
            raise TaskError("its output is random (dropout in training mode?), so no kernel can be compared with it")
        most = max(MOST / 100, max(self.plain_bounds) / 2)  # beyond, honest kernels would fail
        for self.perturbed in (self.perturbed, self.constructed):
            for self.strength in STRENGTHS:
                with contextlib.suppress(Exception):
                    self.measure(range(1, 9), True, most)
                    self.structured_bounds = [max(t, min(MARGIN * t, MOST)) for t in self.plain_bounds]
                    return

    def measure(self, trials, perturbed, most) -> list:
        """t of each output in these trials. Raises an exception if the reference fails, or errs by more than `most`."""
        bounds = []
        for trial in trials:
            inputs = self.inputs("errors", trial)
            self.load(perturbed)
            leaves = exact = self.run(inputs, 0).leaves
            bounds = bounds or [self.tolerance] * len(leaves)
            self.load(perturbed)
            with contextlib.suppress(Exception):  # too little memory, or code that mixes in tensors of a fixed type
                twin = copy.deepcopy(self.model)._apply(precise)
                exact = self.run(list(map(nearby, inputs, self.domains)), 0, twin).leaves
            for index, (x, y) in enumerate(zip(leaves, exact)):
                if not is_exact(x):
                    error = float(errors_of(y, x).max())
                    if trial and (error > most or not x.isfinite().all()):
                        raise OverflowError
                    bounds[index] = max(bounds[index], 2 * torch.finfo(x.dtype).eps, min(MARGIN * error, MOST))
        return bounds


# ---------------------------------------------------------------------------------------------------------------------
# Structured inputs


def domain(x, other) -> str:
    """What an input's values are, which a structured draw keeps. other: the same input of another draw.

    signed, positive (or zero), unit (0 to 1), sums (probabilities: rows sum to one) or fixed: left as drawn. Fixed are
    constants, integers (masks, labels), floats of 8 bits, and what may have a form of its own: complex, sparse,
    triangular, symmetric.
    """
    floats = isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1
    if not floats or x.numel() <= 4 or torch.equal(x, other):
        return "fixed"
    symmetric = x.dim() > 1 and x.shape[-1] == x.shape[-2] and torch.allclose(x, x.mT)
    sparse = int((x == 0).sum()) > 0.05 * x.numel()
    if symmetric or sparse or torch.equal(x, x.round()) or not x.isfinite().all() or x.max() <= 0:
        return "fixed"
    if x.min() < 0:
        return "signed"
    sums = (x.sum(-1, dtype=torch.float32) - 1).abs().max() < 2e-3
    return "sums" if sums else "unit" if x.max() <= 1 else "positive"


def vary(x, kind, trial, strength, ties):
    """A structured version of an input, with the same strides. kind: its domain.

    Values along some dimensions, a row, have something in common: along the last one, the one before it (time, in
    sequences), all but the first (samples), or all but the second (channels), in turn.
    """
    if kind == "fixed" or strength == 1:
        return x
    dims = list(range(x.dim()))
    within = [dims[-1:], dims[-2:][:1], dims[1:] or dims, [0, *dims[2:]]][(trial - 1) % 4]
    result = x.clone()
    turned = result.permute([dim for dim in dims if dim not in within] + within)
    rows = turned.reshape(-1, math.prod(turned.shape[-len(within):]))
    pieces = [structured(piece, kind, strength, ties) for piece in rows.split(max(1, PIECE // rows.shape[1]))]
    turned.copy_(torch.cat(pieces).view(turned.shape))
    return result / result.sum(-1, keepdim=True) if kind == "sums" else result


def structured(rows, kind, strength, ties):
    """Structured rows. number % 4 is 0: offset all values; 1: neighbours; 2: sort, offset every Nth; 3: sort, scale."""
    count, n = rows.shape
    number = torch.arange(count, device=rows.device)[:, None] + random.randrange(120)  # (R, 1)
    rising = rows.sort(dim=1).values
    rows = torch.where(number % 4 < 2, rows, torch.where(number % 3 == 0, rising, rising.flip(1)))
    if not ties:  # offsets, too, make different values equal
        return rows
    tied = (number % 20 == 5) & (torch.rand_like(rows) < 0.5)
    rows = torch.where(tied, rows.amax(1, keepdim=True), rows)
    uniform = torch.rand(3, count, 1, device=rows.device)
    # Half of the amounts are 2 to 5, with which gates of a recurrence are nearly, but not entirely open.
    amount = strength ** torch.where(uniform[0] < 0.5, 0.15 + 0.7 * uniform[0], 1.0)
    large = 1 - (1 - rows) / amount if kind == "unit" else rows + amount
    small = rows - amount if kind == "signed" else rows / amount
    members = 2 ** (uniform[1] ** 2 * (math.log2(n) + 1)).int()
    place, column = (uniform[2] * n).int(), torch.arange(n, device=rows.device)
    stride = n // members.clamp(2, n)
    neighbours = column // members == place // members
    chosen = torch.where(number % 4 == 1, neighbours, column % stride == place % stride)
    chosen |= (number % 4 == 0) | (number % 4 == 3)
    extreme = torch.where(number % 8 < 4, large, small)
    scaled = rows / amount if kind == "unit" else rows * amount
    return torch.where(chosen, torch.where(number % 4 == 3, scaled, extreme), rows)


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(expected, got, bounds):
    """None if every output agrees, else one line that says what is wrong. bounds: t of each, see the top."""
    got = [y for y in got if isinstance(y, torch.Tensor)]
    if len(expected) != len(got):
        return f"wrong output: {len(got)} tensors instead of {len(expected)}"
    for index, (x, y, t) in enumerate(zip(expected, got, bounds)):
        name = "output" if len(got) == 1 else f"output {index}"
        if x.shape != y.shape:
            return f"wrong {name}: shape {list(y.shape)} instead of {list(x.shape)}"
        if x.dtype != y.dtype or x.device != y.device:
            return f"wrong {name}: {y.dtype} on {y.device} instead of {x.dtype} on {x.device}"
        errors = errors_of(x, y)
        if count := int((errors > t).sum()):
            place = tuple(map(int, numpy.unravel_index(int(errors.argmax()), x.shape)))
            return (f"wrong values: {max(count / x.numel(), 0.01):.0%} of {name} {list(x.shape)}, worst at "
                    f"{list(place)}: expected {x[place].item():.4g}, got {y[place].item():.4g}")
    return None


def loose(bounds) -> list:
    """Bounds for outputs of timed calls, in which only gross errors are looked for."""
    return [max(t, MOST) for t in bounds]


def errors_of(x, y):
    """|y - x| / (|x| + s) for each value, x being the reference's; 0 where both are the same, also NaN or infinite."""
    scale = 0.0 if is_exact(x) else scale_of(x)
    errors = torch.zeros(x.numel() + 1, device=x.device)
    for a, b, out in zip(x.reshape(-1).split(PIECE), y.reshape(-1).split(PIECE), errors[:-1].split(PIECE)):
        same, a, b = (a == b) | (a.isnan() & b.isnan()), precise(a), precise(b)
        error = math.inf if is_exact(x) else ((b - a).abs() / (a.abs() + scale)).nan_to_num(math.inf)
        out.copy_(torch.where(same, 0.0, error))
    return errors


def scale_of(x) -> float:
    """Root mean square of the values that are finite."""
    values = x.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(max(x.numel(), 1))


def own_memory(outputs, others) -> set:
    """Indices of outputs that do not have memory of their own, one place for each element.

    Both are layouts [storage, dtype, shape, strides, offset]; others: inputs, parameters and buffers. Outputs that are
    interleaved in one storage, such as columns of one matrix, count as if they shared elements.
    """
    lacking, ends = set(), dict.fromkeys((layout[0] for layout in others), math.inf)
    for index, (storage, _, shape, strides, offset) in sorted(enumerate(outputs), key=lambda entry: entry[1][4]):
        reach, shares = 0, offset < ends.get(storage, 0)
        for stride, n in sorted(zip(strides, shape)):
            shares |= n > 1 and stride <= reach
            reach += (n - 1) * stride
        ends[storage] = max(ends.get(storage, 0), offset + reach + 1)
        if shares and 0 not in shape:
            lacking.add(index)
    return lacking


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


def layout_of(tensor) -> list:
    """A tensor's layout as in program.py, with another number for its storage."""
    return [tensor.untyped_storage()._cdata, str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
            tensor.storage_offset()]


def structure(tree) -> str:
    """How the tensors of an output are nested. A named tuple is a tuple."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        inside = ", ".join(map(structure, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return "tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__


def is_exact(x) -> bool:
    """Are its values integers or bools?"""
    return not (x.is_floating_point() or x.is_complex())


def precise(x):
    """A tensor in double precision; anything but floats and complex numbers as it is."""
    exact = not isinstance(x, torch.Tensor) or is_exact(x)
    return x if exact else x.to(torch.promote_types(x.dtype, torch.float64))


def nearby(x, kind):
    """An input in float64, changed by up to NEARBY of each value: another order of operations can do as much."""
    return precise(x) if kind == "fixed" else precise(x) * (1 - NEARBY * torch.rand(x.shape, device=x.device))
