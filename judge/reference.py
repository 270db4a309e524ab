"""What a candidate is compared with: the reference model, its state, and the inputs and bounds of each trial.

Trial 0 uses inputs as the task draws them, the others structured ones (trials.py). Parameters, and buffers of zeros or
ones, are perturbed where the candidate's are the reference's by name and value, but for the last trial, which has them
as constructed. So work that rarely matters, or not yet, must still be done. Structure on which the reference fails is
dropped, and `notes` say so.

An Answer has the outputs, the inputs that the reference changes, and the parameters and buffers that it changes. How
closely a candidate's must agree (trials.py) follows the reference's own error against float64. It is measured when a
task is loaded, on inputs as drawn, and once more on structured inputs on which a candidate differs.
"""

import contextlib
import copy
import functools
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

import numpy.random
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.processes import CHECK, gpu_lock
from judge.program import bytes_in, copy_of, tensors_in
from judge.trials import (MARGIN, MOST, STRENGTH, STRONG, STRUCTURES, WEAK, WIDE, Bound, bound_of, compare, difference,
                          domain_of, errors_of, is_exact, is_same, named, nearby, precise, precise_type, scale_of,
                          sharing, vary, width)
from tasks import TaskError, init_arguments

RECORDING, ROOM = 8, 16 << 20  # a recorder may send so many times the bytes of the task's tensors, and so many more


class CudaIsHere(torch.overrides.TorchFunctionMode):
    """While active, .cuda(), .to("cuda") and device="cuda" mean `here`: the CPU."""

    here = "cpu"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map_only((str, torch.device), self.place, (args, kwargs or {}))
        return func(*args, **kwargs)

    def place(self, device):
        return self.here if str(device).split(":")[0] == "cuda" else device


class InDouble(torch.overrides.TorchFunctionMode):
    """While active, every floating-point type that PyTorch is asked for is float64: casts lose no precision."""

    CASTS = torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view and torch.dtype in map(type, [*args, *(kwargs or {}).values()]):
            raise TypeError("the bits of a float64 are not those of another type")
        func = torch.Tensor.double if func in self.CASTS else func
        args, kwargs = tree_map_only(torch.dtype, precise_type, (args, kwargs or {}))
        return func(*args, **kwargs)


class Answer(NamedTuple):
    leaves: dict  # {name: tensor}: the outputs, then the inputs, then the state that the reference changes
    structure: str  # how the outputs are nested, such as "(tensor, [tensor])"
    changed: list  # indices of inputs that the forward changed in place
    shared: list  # indices of outputs that have no memory of their own


class Reference:
    """A task's reference model. Raises what its code raises, and TaskError if nothing can be compared with it."""

    FACTS = "found dtypes flip strengths notes".split()  # attributes that are measured, which takes most of the time

    def __init__(self, source, settings, secret, facts=None):
        """secret: at most 64 bytes. Every seed is a keyed hash with it. facts: `facts()` of an earlier Reference."""
        self.source, self.secret = source, secret
        self.tolerance = settings["tolerance"]
        self.device = torch.device(settings["device"])
        self.place = CudaIsHere() if self.device.type == "cpu" else contextlib.nullcontext()
        # Other judges may take times between two pieces of work on the GPU, so that none of them waits for long.
        self.lock = functools.partial(gpu_lock, settings.get("gpu"), CHECK)
        self.notes = []  # what trials leave out, and why
        with self.place:
            folder = Path(tempfile.mkdtemp(dir=settings.get("scratch")))
            self.construct(load_module(source, folder / "reference.py"))
        with self.lock():
            self.model.to(self.device)
            self.constructed = {name: tensor.detach().clone() for name, tensor in state_of(self.model).items()}
            self.example = self.inputs("example", 0)
            self.domains = list(map(domain_of, self.example, self.inputs("another example", 0)))
            self.find_side_effects()
        if facts:
            vars(self).update(facts)
            self.perturb_state(self.flip)
        else:
            self.choose_perturbation()
            self.choose_structure()

    def facts(self) -> dict:
        return {name: getattr(self, name) for name in self.FACTS}

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
        self.arguments, self.keywords = init_arguments(module.get_init_inputs)
        self.seed = self.derive("parameters")
        seed_everything(self.seed)
        self.model = module.Model(*self.arguments, **self.keywords)
        self.summary = {name: fingerprint(tensor) for name, tensor in state_of(self.model).items()}

    def perturb(self, name, tensor, flip):
        """A parameter moved by a fifth, away from zero, and half of its signs flipped if `flip`.

        A gain of 1e-6 or a gate of zero becomes as large as parameters usually are, so that what it scales matters.
        Buffers are constants of the task, except for running statistics and zeros or ones, which keep their sign.
        """
        if not tensor.is_floating_point():
            return tensor
        parameter = name in dict(self.model.named_parameters())
        flat = tensor.numel() > 4 and tensor.min() == tensor.max() and tensor.max() in (0, 1)
        if not (parameter or flat or "running_" in name):
            return tensor
        seed_torch(self.derive("perturbed", name))
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        noise = functools.partial(torch.rand, tensor.shape, dtype=dtype, device=tensor.device)
        matrix = tensor.dim() > 1 and len(tensor) > 1
        usual = 1 / math.sqrt(max(tensor[0].numel(), 1)) if matrix else 1.0
        least = 0.2 * max(usual, min(1.0, scale_of(tensor, False)[1]))
        size = tensor.abs() * (0.8 + 0.4 * noise())
        size = torch.maximum(size, least * (0.5 + 0.5 * noise()))
        negative = tensor < 0
        if parameter and flip:
            order = noise()
            negative ^= order <= order.median()
        return torch.where(negative, -size, size).to(tensor.dtype)

    def state(self, perturbed) -> dict:
        """{name: tensor} of parameters and buffers, as constructed or perturbed (where the reference can take that)."""
        return self.perturbed if perturbed else self.constructed

    def load(self, perturbed):
        """Set the model's state. Until the next load, a forward goes on from the buffers that the last one left."""
        self.restore(self.state(perturbed))

    def restore(self, state):
        for name, tensor in state_of(self.model).items():
            if name in state:
                tensor.detach().copy_(state[name])

    def changing(self) -> dict:
        """A copy of the parameters and buffers that a forward changes."""
        state = state_of(self.model)
        return {name: state[name].detach().clone() for name in self.changed_state}

    def run(self, inputs, seed, model=None) -> Answer:
        """The reference's answer, on copies of the inputs. model: one to be used in place of it, on the inputs."""
        given = copy_of(inputs) if model is None else inputs
        model = self.model if model is None else model
        seed_torch(seed)
        with torch.no_grad(), self.place:
            output = model(*given)
        return self.answer(output, given, state_of(model), self.changed_inputs)

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
        """Find which inputs, parameters and buffers the forward changes, and which outputs share memory with others.

        And `room`, how many bytes a recording and its constants may have.
        """
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
        self.room = RECORDING * bytes_in([copies, output, state]) + ROOM

    def blueprint(self) -> dict:
        """What a recorder needs to construct ModelNew, and inputs without values."""
        inputs = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="meta"), self.example)
        blueprint = {"arguments": self.arguments, "keywords": self.keywords, "seed": self.seed, "state": self.summary,
                     "room": self.room, "inputs": inputs}
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
        with self.place, unseeded():
            try:
                with self.device:  # a GPU draws much faster
                    drawn = list(self.get_inputs())
            except (RuntimeError, TypeError):  # not all of PyTorch works with it as the default device
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
        bounds = []
        for error, dtype in zip(self.found[perturbed], self.dtypes):
            bound = bound_of(error, dtype, self.tolerance, spread=not trial)
            if trial:
                bound = bound._replace(t=max(bound.t, min(MARGIN * bound.t, MOST)))
            bounds.append(bound)
        return bounds

    def mistake(self, trial, perturbed, inputs, before, expected, got):
        """What is wrong with a candidate's Answer in this trial, in one line, or None.

        expected: the reference's Answer; before: what `changing` was when it began. If the two differ on structured
        inputs, the reference's own errors are measured on just these.
        """
        bounds = self.bounds(trial, perturbed)
        problem = difference(expected, got, bounds)
        if not problem or not trial:
            return problem
        after = self.changing()
        errors = self.errors(inputs, before, spread=False)
        self.restore(after)
        wider = []
        for bound, error, dtype in zip(bounds, errors, self.dtypes):
            wider.append(Bound(*map(max, bound, bound_of(error, dtype, self.tolerance, False, WIDE))))
        return difference(expected, got, wider)

    def choose_perturbation(self):
        """Measure the bounds of trial 0, and perturb parameters in a way that the reference can take."""
        with self.lock():
            self.load(False)
            leaves = self.run(self.example, 0).leaves
            self.load(False)
            again = self.run(self.example, 1).leaves
        if compare(leaves, again, [Bound(MOST, MOST)] * len(leaves)):
            raise TaskError("its output is random (dropout in training mode?), so no kernel can be compared with it")
        self.dtypes = [x.dtype for x in leaves.values()]
        self.missing = missing(leaves)
        constructed = self.measure(self.constructed)
        self.found = {False: constructed, True: constructed}
        for flip in True, False:
            self.perturb_state(flip)
            if all(map(is_same, self.perturbed.values(), self.constructed.values())):
                return
            with contextlib.suppress(Exception):
                errors = self.measure(self.perturbed)
                limits = [max(MOST, width(e.t, dtype, self.tolerance)) for e, dtype in zip(constructed, self.dtypes)]
                sound = all(e.t <= t and e.share <= MOST for e, t in zip(errors, limits))
                if sound and self.takes(0):
                    self.found[True] = errors
                    return
        self.perturb_state(None)
        self.notes.append("parameters were not perturbed: the reference fails with others")

    def perturb_state(self, flip):
        """Perturb the parameters, with half of their signs flipped or not. flip: None leaves them as constructed."""
        self.flip = flip
        self.perturbed = self.constructed
        if flip is not None:
            self.perturbed = {name: self.perturb(name, tensor, flip) for name, tensor in self.constructed.items()}

    def choose_structure(self):
        """Choose the structures of inputs, and their strengths: all of them, but for what the reference cannot take."""
        self.strengths = dict.fromkeys(STRUCTURES, STRENGTH)
        failing = [trial for trial in range(1, 5) if not self.takes(trial)]
        if not failing:
            return
        kept = {}
        for name in STRUCTURES:
            for strength in (STRENGTH, WEAK) if name in STRONG else (STRENGTH,):
                self.strengths = {name: strength}
                if name not in kept and all(map(self.takes, failing)):
                    kept[name] = strength
        self.strengths = kept
        if dropped := [name for name in STRUCTURES if name not in kept]:
            self.notes.append(f"inputs had no rows of some kinds ({', '.join(dropped)}): the reference fails on them")

    def takes(self, trial) -> bool:
        """Can the reference take the inputs of a trial: is its answer as finite as in trial 0?

        As with candidates, parameters are perturbed but for the last trial.
        """
        with contextlib.suppress(Exception), self.lock():
            self.load(perturbed=trial < 4)
            return missing(self.run(self.inputs("finite", trial), 0).leaves) <= 2 * self.missing
        return False

    def measure(self, state) -> list:
        """`errors` on inputs as they are drawn."""
        with self.lock():
            return self.errors(self.inputs("errors", 0), state, spread=True)

    def errors(self, inputs, state, spread) -> list:
        """e of each compared tensor, and the share of its values that jump, as a Bound."""
        self.restore(state)
        leaves = self.run(inputs, 0).leaves
        exact = self.in_double(inputs, state, leaves)
        errors = []
        for name, x in leaves.items():
            found = errors_of(x, exact[name], spread)
            jumps = found > MOST
            share = int(jumps.count_nonzero()) / max(x.numel(), 1)
            noise = share > 0.5 and not is_exact(x)
            most = float(found.max())
            worst = most if noise else float(torch.where(jumps, 0.0, found).max())
            errors.append(Bound(worst, 0.0 if noise else share, most=most))
        return errors

    def in_double(self, inputs, state, leaves) -> dict:
        """What the reference computes in float64 on inputs nearby, or `leaves` where it cannot."""
        before = torch.get_default_dtype()
        result = {}
        try:
            # Where values are equal, indices are ambiguous: that shows if equal values do not stay equal.
            for apart in sorted(set(map(is_exact, leaves.values()))):
                self.restore(state)
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
# Tensors and modules


def load_module(text, path):
    """Execute a text as the module of a new file, where inspect and Triton find it. Its name is the file's."""
    path = Path(path)
    path.write_text(text, encoding="utf-8", newline="")
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def seed_torch(seed):
    """torch.manual_seed, which in PyTorch 2.13 first imports torch.compile, for a second."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def unseeded():
    """While active, seeding does nothing: what seeds its inputs would have the same ones in each trial."""
    names = [(torch, "manual_seed"), (torch.cuda, "manual_seed"), (torch.cuda, "manual_seed_all"),
             (numpy.random, "seed"), (random, "seed")]
    before = [getattr(owner, name) for owner, name in names]
    try:
        for owner, name in names:
            setattr(owner, name, lambda *_: torch.default_generator)
        yield
    finally:
        for (owner, name), function in zip(names, before):
            setattr(owner, name, function)


def seed_everything(seed):
    """Seed every generator that a task may use."""
    random.seed(seed)
    numpy.random.seed(seed)
    seed_torch(seed)


def state_of(model) -> dict:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fingerprint(tensor) -> list:
    """Dtype, shape and a checksum of the values of a tensor."""
    memory = tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
    return [str(tensor.dtype), list(tensor.shape), zlib.crc32(memory.numpy())]


def missing(leaves) -> float:
    """The largest share of a tensor's values that are not finite."""
    return max([1 - int(x.isfinite().count_nonzero()) / max(x.numel(), 1) for x in leaves.values()], default=0.0)


def structure(tree) -> str:
    """How the tensors of an output are nested. A named tuple is a tuple."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        inside = ", ".join(map(structure, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return "tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__
