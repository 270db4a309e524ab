"""What a candidate is compared with: the reference, trials, tolerance.

The reference model and its expected outputs live in the scorer's process. A trial is a draw from the task's
`get_inputs` under a seed that no candidate knows. Only the first is taken as drawn; later ones come from other
distributions (scaled, negated), and parameters are perturbed (perturbation.py), so that work which happens not to
matter for one distribution, or for weights of 1, must still be done.
"""

import contextlib
import hashlib
import random
import sys
import tempfile
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch.utils._pytree import tree_leaves

from judge.messages import elements_spanned
from judge.perturbation import construct, parameter_names, state_of
from judge.prices import bytes_in, tensors_in
from judge.verdict import Failed, describe, out_of_memory
from tasks import TaskError


def load_module(name, code, path):
    """Execute a source text as a module that inspect can find."""
    path = Path(path).absolute()
    path.write_text(code)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# The reference


def derive(seed, *parts) -> int:
    """A seed for one purpose, from the run's secret seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *parts)).encode()).digest()[:4], "little") // 2


def seed_everything(seed):
    """Seed every generator that a problem's get_inputs may use."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def identical(a, b):
    """Bitwise equality of two tensors (so that NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = as_bytes(a), as_bytes(b)
    if not (a.numel() % 8 or a.storage_offset() % 8 or b.storage_offset() % 8):
        a, b = a.view(torch.int64), b.view(torch.int64)
    return all(map(torch.equal, a.split(PIECE), b.split(PIECE)))


def as_bytes(tensor):
    """A tensor's elements as bytes, in their order, as the recorder keeps constants."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


LARGE = 4 << 30  # bytes of a trial: the processes of such a task hold a few times as much, and keep nothing for later
PIECE = 1 << 25  # values of a tensor that are looked at together: temporary ones of all would fill the GPU's memory
FEW = 1 << 16  # values of a large tensor that decide in one of the trials


def vary(inputs, kind):
    """Inputs of another distribution that stay in the domain of the first: zeros stay zero, ranges are not left.

    kind: 1, 2 or 3; 0: as they are.
    Scaling and sign flips leave triangular, diagonal, symmetric and masked inputs what they are, so that a kernel that
    exploits such structure honestly passes, and one that relies on mean 0.5, on small values, or on a part to stand for
    all does not.
    """
    def one(x):
        if kind == 0 or not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
            return x
        signed = bool(x.min() < 0) and bool(x.max() > 0)
        x = x * {1: -1.0 if signed else 0.5, 2: 3.0 if signed else 0.8, 3: 0.1 if signed else 0.3}[kind]
        return thin_out(x) if kind == 1 and x.numel() > FEW else x
    return [one(x) for x in inputs]


def thin_out(x):
    """All but some FEW values of a large tensor made small, in place: of so few none may be missing in a mean.

    Which ones is drawn along each dimension, but alike where two have the same length: what is symmetric stays so.
    """
    share = (FEW / x.numel()) ** (1 / x.dim())
    kept = {n: torch.rand(n, device=x.device) < share for n in x.shape}
    for dim, n in enumerate(x.shape):
        factor = torch.where(kept[n], 1.0, 0.001 ** (1 / x.dim())).to(x.dtype)
        x.mul_(factor.view([n if other == dim else 1 for other in range(x.dim())]))
    return x


def without_gaps(tensor):
    """The tensor, contiguous if its elements do not fill its memory, or share it."""
    return tensor if elements_spanned(tensor.shape, tensor.stride()) == tensor.numel() else tensor.contiguous()


def structure(tree) -> str:
    """How the tensors of an output are nested: "(tensor, [tensor])". A named tuple is a tuple."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        inside = ", ".join(map(structure, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return "tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__


def placed(tensor) -> list:
    """A tensor as the recorder writes it, with another number for its storage."""
    return [tensor.untyped_storage()._cdata, "", tensor.shape, tensor.stride(), tensor.storage_offset()]


def sharing(outputs, others) -> list:
    """For each output: has it no memory of its own, being expanded, the same as another, or in one of `others`?

    Both are layouts: [storage, dtype, shape, strides, offset].
    """
    found, known = [], {storage for storage, *_ in others}
    for storage, _, shape, strides, offset in outputs:
        expanded = any(n > 1 and stride == 0 for n, stride in zip(shape, strides))
        found.append(0 not in shape and (expanded or bool({storage, (storage, offset)} & known)))
        known.add((storage, offset))
    return found


def finite(leaves) -> bool:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            if not all(bool(piece.isfinite().all()) for piece in leaf.reshape(-1).split(PIECE)):
                return False
    return True


@dataclass
class Trial:
    inputs: list
    seed: int  # for random operators in the forward
    expected: list = None  # the leaves of the reference's output
    allowed: list = None  # for each, see Reference.rounding
    changed: list = None  # indices of inputs that the reference itself changes in place


class Reference:
    """A task's reference model in the scorer: trials, their expected outputs, the comparison.

    Raises TaskError when the reference cannot be built or run, or gives nothing that could be compared.
    """

    def __init__(self, job, settings, shared=contextlib.nullcontext):
        """shared: makes a context in which the GPU may be used. Constructing, which takes longer, is outside of it."""
        self.job = job
        self.tolerance = settings["tolerance"]  # see `compare`
        # Under the measured clock all construct on the CPU, where candidates do: a GPU draws other random numbers.
        self.device, self.lock, self.kept = torch.device(settings["device"]), threading.RLock(), {}
        self.plain = None  # the first draw's inputs: what is no tensor is part of the program, and stays as it was
        self.chaotic = False  # are results of the reference mostly its own rounding errors?
        self.known = set(job["known"])  # keys of kernels that have been compiled (modelled.Replay)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            path = Path(tempfile.mkdtemp(dir=".")) / "reference.py"
            self.module = load_module("reference", job["source"], path)
            seed_everything(derive(job["seed"], "arguments"))
            self.arguments = list(self.module.get_init_inputs())
            self.parameter_seed = derive(job["seed"], "parameters")
            with shared():
                self.on_device = self.draws_on_device()
            self.construct()
            self.construct(parameter_names(self.model))
            with shared():
                usable = finite(self.trial(0).expected) and not self.chaotic
            if not usable:  # perturbed parameters may leave a function's domain
                self.kept.clear()
                self.construct()
                with shared():
                    self.trial(0)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"{job['name']}: the reference fails: {describe(error)[0]}") from None

    def construct(self, names=None):
        """Set `model`, and `state` to its parameters and buffers. names: see perturbation.construct."""
        self.names = names
        self.model = construct(self.module.Model, self.arguments, self.parameter_seed, names).to(self.device)
        self.state = {name: t.detach().clone() for name, t in state_of(self.model)}

    def draws_on_device(self) -> bool:
        """Does get_inputs work with the device as default? Some need their tensors on the CPU."""
        self.on_device = self.device.type != "cpu"
        try:
            self.draw("example")
            return self.on_device
        except (RuntimeError, TypeError) as error:
            if out_of_memory(describe(error)[0]):  # beside others, perhaps; on the CPU drawing takes far longer
                raise
            return False

    def construction(self) -> dict:
        """What another process needs to construct the same model from a class."""
        return {"arguments": self.arguments, "names": self.names, "seed": self.parameter_seed}

    def draw(self, *purpose):
        """Fresh inputs from the task's get_inputs, made on the device if that works."""
        with self.lock, self.device if self.on_device else contextlib.nullcontext():
            seed_everything(derive(self.job["seed"], self.job["source"], *purpose))
            inputs = list(self.module.get_inputs())
        self.plain = self.plain or [None if isinstance(x, torch.Tensor) else x for x in inputs]
        if tensors_in([x for x in inputs if not isinstance(x, torch.Tensor)]):
            raise TaskError(f"{self.job['name']}: tensors within a list or dict of inputs are not supported")
        return [without_gaps(x.detach().to(self.device)) if isinstance(x, torch.Tensor) else first
                for x, first in zip(inputs, self.plain, strict=True)]

    def trial(self, index):
        """Trial number `index`. The first is as the task draws it. Others are fresh draws, of varied distributions as
        long as the reference stays finite there.
        """
        with self.lock:
            if index in self.kept:
                return self.kept[index]
            kinds = [1 + (index - 1) % 3, 0] if index else [0]
            for kind in kinds:
                inputs = vary(self.draw("trial", index), kind)
                trial = Trial(inputs, derive(self.job["seed"], self.job["source"], "trial", index))
                try:
                    trial.expected, trial.changed = self.run(trial)
                except RuntimeError:
                    if kind == kinds[-1]:
                        raise
                    continue
                if not trial.expected or not all(isinstance(t, torch.Tensor) for t in trial.expected):
                    raise TaskError(f"{self.job['name']}: the reference returns something other than tensors")
                if finite(trial.expected):
                    break
            trial.allowed = self.rounding(trial)
            if bytes_in([trial.inputs, trial.expected]) < (1 << 29 if index else LARGE):
                self.kept[index] = trial
            elif self.device.type == "cuda":
                torch.cuda.empty_cache()  # the workers need the room
            return trial

    def run(self, trial, around=None, dtype=None):
        """(leaves of the output, indices of inputs that the forward changed), on private copies of a trial's inputs.

        Also sets what every forward has in common: `structure`, `sharing`, and `rewritten`, names of changed state.
        """
        with self.lock, torch.no_grad():
            inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in trial.inputs]
            for name, tensor in state_of(self.model):
                tensor.copy_(self.state[name])
            if dtype is not None:
                self.model.to(dtype)
                inputs = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
            torch.manual_seed(trial.seed)
            with around or contextlib.nullcontext():
                out = self.model(*inputs)
            pairs = zip(tensors_in(trial.inputs), tensors_in(inputs)) if dtype is None else ()
            changed = [i for i, (old, new) in enumerate(pairs) if not identical(old, new)]
            state = state_of(self.model)
            if dtype is None:
                self.rewritten = [name for name, tensor in state if not identical(tensor, self.state[name])]
            self.structure = structure(out)
            self.sharing = sharing(map(placed, tensors_in(out)), map(placed, tensors_in([inputs, state])))
            return tree_leaves(out), changed

    def rounding(self, trial):
        """For each output (a, b, c): |difference| may be up to tolerance * s + min(b, c * s), with s = a + |expected|.

        a is the output's own size where that is below 1 (zeros must not pass because all values are small). b
        and c are the rounding error of the reference itself against float64, absolute and relative: we never require
        more accuracy than the reference has, and the error of one huge value does not excuse all small ones. Where
        float64 would not fit into memory, b is, on a GPU, at least four times what cuDNN's TF32 alone changes.
        """
        exact = [None] * len(trial.expected)
        large = sum(t.numel() for t in tensors_in([trial.inputs, trial.expected, self.state])) >= 1 << 27
        with contextlib.suppress(Exception):  # no memory, or what it may raise that mixes in tensors of a fixed type
            if not large:
                exact = self.run(trial, dtype=torch.float64)[0]
            elif self.device.type == "cuda":
                cudnn = torch.backends.cudnn
                exact = self.run(trial, around=cudnn.flags(enabled=cudnn.enabled, allow_tf32=False))[0]
        for name, tensor in state_of(self.model):
            tensor.data = tensor.data.to(self.state[name].dtype)
        most = 5e-3 if self.device.type == "cuda" else 1e-3  # cuDNN convolves in TF32 by default
        allowed = []
        for mine, other in zip(trial.expected, exact):
            if not mine.is_floating_point() or mine.numel() == 0:
                allowed.append((1.0, 0.0, 0.0))
                continue
            pieces = mine.reshape(-1).split(PIECE)
            size = (sum(float(p.float().nan_to_num(0, 0, 0).square().sum()) for p in pieces) / mine.numel()) ** 0.5
            rounding, relative = 1e-5 * size, most
            if other is not None:
                errors, shares = [], []
                for piece, precise in zip(pieces, other.reshape(-1).split(PIECE)):
                    error = (piece - precise).nan_to_num(0, 0, 0).abs()
                    errors.append(error.max())
                    shares.append((error / (precise.abs() + min(1.0, size))).max())
                worst, share = (float(torch.stack(found).max()) for found in (errors, shares))
                self.chaotic |= worst > 0.1 * size
                rounding, relative = (max(rounding, 4 * worst), most) if large else (4 * worst, 4 * share)
            allowed.append((min(1.0, size), min(rounding, most * size + 1e-7), relative))
        return allowed


def check_structure(found, expected):
    """Raise Failed unless an output is nested like the reference's. Both: `structure` of it."""
    if found != expected:
        raise Failed({"failed": "forward", "error": f"wrong output: {found} instead of {expected}"})


def differences(x, y, tolerance, bound):
    """(|x - y|, where that is too much) of two flat tensors, x being the reference's. bound: see Reference.rounding."""
    if not x.is_floating_point():
        return (x - y if x.is_complex() else x.double() - y.double()).abs(), x != y
    size, rounding, relative = bound
    least = max(tolerance, torch.finfo(x.dtype).eps)  # in half precision the last place is more
    x, y = (x, y) if x.dtype == torch.float64 else (x.float(), y.float())
    difference, scale = (x - y).abs(), x.abs() + size
    allowed = (scale * relative).clamp_(max=rounding).add_(scale, alpha=least)
    wrong = ~(difference <= allowed) | x.isinf()  # any number is below an infinite limit
    if wrong.any():
        wrong &= ~((x == y) | (x.isnan() & y.isnan()))  # infinities, and NaN where the reference has it
    return difference, wrong


def compare(trial, got, tolerance, spared=0.0):
    """None when every output agrees, else one line saying what is wrong, where and by how much. got: leaves.

    spared: share of an output's elements that may be wrong.
    """
    if len(trial.expected) != len(got):
        return f"wrong output: {len(got)} tensors instead of {len(trial.expected)}"
    for index, (a, b, bound) in enumerate(zip(trial.expected, got, trial.allowed)):
        name = "output" if len(got) == 1 else f"output {index}"
        if not isinstance(b, torch.Tensor):
            return f"wrong {name}: a {b if isinstance(b, str) else type(b).__name__} instead of a tensor"
        if a.shape != b.shape:
            return f"wrong {name}: shape {list(b.shape)} instead of {list(a.shape)}"
        if a.dtype != b.dtype:
            return f"wrong {name}: dtype {b.dtype} instead of {a.dtype}"
        if b.device.type != a.device.type:
            return f"wrong {name}: on another device"
        shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
        count, worst, where = 0, -1.0, 0
        for start, x, y in zip(range(0, a.numel(), PIECE), a.split(PIECE), b.split(PIECE)):
            difference, wrong = differences(x, y, tolerance, bound)
            if wrong.any():
                count += int(wrong.sum())
                difference = torch.where(wrong, difference.nan_to_num(float("inf")), torch.zeros_like(difference))
                if float(difference.max()) > worst:
                    worst, where = float(difference.max()), start + int(difference.argmax())
        if count > spared * a.numel():
            x, y = a[where].item(), b[where].item()
            position = [int(i) for i in numpy.unravel_index(where, shape)]
            return (f"wrong values: {max(count / a.numel(), 0.01):.0%} of {name} {list(shape)}, worst at {position}: "
                    f"expected {x:.4g}, got {y:.4g}")
    return None
