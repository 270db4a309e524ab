"""A recorded forward: what a candidate does, as data. Both clocks run it; neither meets the candidate's Python.

The recorder writes it (recorder.py), JSON carries it, and `checked` looks at it once before anything of it is believed:
whatever passes may be wrong or slow, but names no memory that is not its own. `Program` then runs it on a device, step
by step: PyTorch's operators here, kernels by a launcher (interpreter.Kernels without a GPU, measured.Binaries on one).

    layout    [storage's number, dtype, shape, stride, offset] of a tensor, in elements; views share a storage
    step      ["operator", "name.overload", args, kwargs, [layouts of the results]]
              ["launch", launch]            ["tuned", [launch for each configuration of an autotuned kernel]]
    launch    {"kernel", "grid", "arguments": {parameter: value}, "options", "binary": its index, or None}
"""

import torch
import triton.language as tl
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.processes import TORCH_NAMES, decode, encode
from judge.rules import LAUNCH_OPTIONS, REFUSED_OPERATORS
from judge.verdict import Failed

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # operators that write nothing
MOST_STEPS, MOST_CONFIGS, MOST = 20_000, 16, 1 << 48  # of a program; of an autotuned kernel; elements of a tensor

# ---------------------------------------------------------------------------------------------------------------------
# Tensors in nested values


def tensors_in(tree) -> list:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copy_of(tree):
    return tree_map_only(torch.Tensor, torch.clone, tree)


def bytes_in(tree) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def address(tensor) -> int:
    """Where its storage begins."""
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Values of arguments and outputs as JSON

TRITON_TYPES = {str(value): value for value in vars(tl).values() if isinstance(value, tl.dtype)}


def write_value(value, tensor):
    """JSON for an argument or an output; `tensor` gives what stands for a tensor. Raises TypeError for others."""
    def other(value):
        if isinstance(value, tl.dtype):
            return {"triton": str(value)}
        if isinstance(value, tl.constexpr):
            return {"constexpr": write_value(value.value, tensor)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if hasattr(value, "fn") and callable(value.fn):  # a kernel as an argument of a kernel
            return {"kernel": value.fn.__name__}
        return None
    return encode(value, tensor, other)


def read_value(value, tensor, kernels=None):
    """The inverse. kernels: {name: function}, or None where functions are part of the compiled kernel."""
    def other(kind, content):
        if kind == "constexpr":
            return tl.constexpr(read_value(content, tensor, kernels))
        if kind == "triton":
            return TRITON_TYPES[content]
        if kind == "complex":
            return complex(*content)
        if kind == "kernel":
            return content if kernels is None else kernels[content]
        raise ValueError(f"unknown kind {kind}")
    return decode(value, tensor, other)


def layouts_in(value) -> list:
    """The layouts in a value as `write_value` wrote it."""
    if isinstance(value, dict) and "tensor" in value:
        return [value["tensor"]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = []
    for part in parts:
        found += layouts_in(part)
    return found


def launches_of(step) -> list:
    """The launches of a step: one, or one for each configuration of an autotuned kernel, or none."""
    if step[0] == "launch":
        return [step[1]]
    return step[1] if step[0] == "tuned" else []


def storages_in(step) -> set:
    """Numbers of the storages that a step uses."""
    layouts = layouts_in([launch["arguments"] for launch in launches_of(step)])
    if step[0] == "operator":
        layouts = [*layouts_in(step[2:4]), *step[4]]
    return {layout[0] for layout in layouts}


def elements_spanned(shape, stride) -> int:
    """How many elements lie between a tensor's first and its last one, both included."""
    if 0 in shape:
        return 0
    return sum((n - 1) * step for n, step in zip(shape, stride)) + 1


def dense(tensor):
    """The bytes from a tensor's first to its last element, as a uint8 tensor on its device."""
    size = elements_spanned(tensor.shape, tensor.stride()) * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
    return raw[start:start + size]


def operator_of(name):
    """PyTorch's operator of a recorded "name.overload". Raises ValueError for any other attribute."""
    base, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, base), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The schema


def checked(recording):
    """The recorder's {"program", "constants", "binaries"}, looked at once. Raises Failed for what makes no sense."""
    try:
        program, binaries = recording["program"], recording["binaries"]
        constants = {int(number): value for number, value in recording["constants"].items()}
        Schema(program, constants, len(binaries)).check()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise Failed(f"the recorded program makes no sense ({type(error).__name__})") from None
    return program, constants, binaries


class Schema:
    """Raises ValueError, or what Python raises by itself, unless a program is one."""

    def __init__(self, program, constants, binaries):
        self.program = program
        self.constants = constants
        self.binaries = binaries
        self.known = set()  # numbers of the storages that exist so far

    def check(self):
        program = self.program
        roots = [layout[0] for layout in program["inputs"]] + list(self.constants)
        roots += {layout[0] for layout in program["state"].values()} - set(self.constants)
        self.require(len(set(roots)) == len(roots) and len(program["steps"]) <= MOST_STEPS)
        self.known = set(roots)
        for value in self.constants.values():
            self.require(0 <= value < MOST if isinstance(value, int) else value.dtype == torch.uint8)
        for layout in [*program["inputs"], *program["state"].values()]:
            self.layout(layout)
        for step in program["steps"]:
            if step[0] == "operator":
                self.operator(*step[1:])
            else:
                self.require(step[0] in ("launch", "tuned") and 0 < len(launches_of(step)) <= MOST_CONFIGS)
                for launch in launches_of(step):
                    self.launch(launch)
        read_value(program["output"], self.layout)
        for value in program["names"].values():
            self.scalar(value)

    def require(self, condition):
        if not condition:
            raise ValueError

    def scalar(self, value):
        """A global constant: a kernel must not find a list in which it could keep something."""
        kind = value.keys() if isinstance(value, dict) else set()
        self.require(not isinstance(value, list) and kind <= {"constexpr", "triton"})
        for content in value.values() if kind else ():
            self.scalar(content)

    def layout(self, layout, created=False):
        number, dtype, shape, stride, offset = layout
        self.known |= {number} if created else set()
        self.require(type(number) is int and number in self.known and isinstance(TORCH_NAMES[dtype], torch.dtype))
        self.require(len(shape) == len(stride) <= 64)
        for size in [*shape, *stride, offset, elements_spanned(shape, stride)]:
            self.require(type(size) is int and 0 <= size < MOST)

    def operator(self, name, args, kwargs, results):
        if name.split(".")[0] in REFUSED_OPERATORS:
            raise Failed(f"aten.{name.split('.')[0]} is not supported in a recorded forward")
        operator_of(name)
        read_value([args, kwargs], self.layout)
        for layout in results:
            self.layout(layout, created=True)

    def launch(self, launch):
        grid, unknown = launch["grid"], sorted(set(launch["options"]) - LAUNCH_OPTIONS)
        if unknown:
            raise Failed(f"{launch['kernel']} has no argument or launch option {unknown[0]}", "compile")
        self.require(type(launch["kernel"]) is str and len(grid) == 3)
        self.require(all(type(size) is int and 0 <= size < 1 << 31 for size in grid))
        self.require(launch["binary"] is None if not self.binaries else 0 <= launch["binary"] < self.binaries)
        self.require(all(type(value) in (int, bool, str, type(None)) for value in launch["options"].values()))
        read_value(list(launch["arguments"].values()), self.layout)


# ---------------------------------------------------------------------------------------------------------------------
# Running it


class Program:
    """A checked program on a device. `kernels`: the names of those that it launches, each once."""

    def __init__(self, program, constants, device, launcher, shared=()):
        """shared: indices of outputs that need no memory of their own."""
        self.program = program
        self.device = torch.device(device)
        self.launcher = launcher
        self.steps, self.constants = program["steps"], constants
        self.kernels, self.chosen = [], {}  # chosen: {number of a tuned step: position of its best configuration}
        # A constant that is returned gets new memory in each forward: what an earlier one left there does not count.
        own = [layout[0] for i, layout in enumerate(layouts_in(program["output"])) if i not in shared]
        self.renewed = {number: constants[number] for number in own if number in constants}
        self.memory = {}  # {storage number: its bytes} of what lives from one forward to the next
        self.last_uses = {}  # {number of a step: storages that no later one uses}
        kept = {layout[0] for layout in [*program["inputs"], *layouts_in(program["output"])]}
        kept |= set(constants) | {layout[0] for layout in program["state"].values()}
        for number in reversed(range(len(self.steps))):
            self.last_uses[number] = storages_in(self.steps[number]) - kept
            kept |= self.last_uses[number]
        for step in self.steps:
            for launch in launches_of(step):
                if launch["kernel"] not in self.kernels:
                    self.kernels.append(launch["kernel"])

    def load(self, state):
        """Set all memory that outlives a forward to what it is at first. state: the reference's {name: tensor}.

        From then on, what a forward leaves there is there in the next one: an accumulator that is not set back, a flag
        that says `done`. Memory without values holds NaN.
        """
        values = {}
        for name, layout in self.program["state"].items():
            if layout[0] not in self.constants:
                if name not in state:
                    raise Failed(f"the recorded program makes no sense (no parameter {name})")
                values[layout[0]] = dense(state[name].contiguous())
        for number, value in self.constants.items():
            unknown = isinstance(value, int)
            values[number] = torch.full((value,), 255, dtype=torch.uint8, device=self.device) if unknown else value
        for number, value in values.items():
            if number in self.memory:
                self.memory[number].copy_(value)  # in place: graphs know the address
            else:
                self.memory[number] = value.to(self.device, copy=True)

    def run(self, inputs, mute=(), poison=None, observer=None):
        """One forward's output. Raises Failed, and what PyTorch's operators raise.

        inputs: tensors in the order of the recording, with its strides. mute: names of kernels that are left out.
        poison: what memory that no step has written holds: "nan", or "random" bytes; "noise", which is finite, where
        kernels are left out; None: whatever is there.
        observer: its `step` is called around each step, see judgement.py.
        """
        self.storages, self.poison = dict(self.memory), poison
        for number, value in self.renewed.items():
            size = value if isinstance(value, int) else len(value)
            self.storages[number] = self.poisoned(torch.empty(size, dtype=torch.uint8, device=self.device))
        for layout, tensor in zip(self.program["inputs"], inputs, strict=True):
            if [str(tensor.dtype), list(tensor.shape), list(tensor.stride())] != layout[1:4]:
                raise Failed("the shapes of the inputs change from one call to the next")
            self.storages[layout[0]] = dense(tensor)
        for number, step in enumerate(self.steps):
            if step[0] == "operator":
                self.operator(step, observer)
            elif launches_of(step)[0]["kernel"] not in mute:
                self.launch(self.configuration(number, step), observer)
            for storage in self.last_uses[number]:
                self.storages.pop(storage, None)
        return read_value(self.program["output"], self.tensor)

    def tensor(self, layout):
        """The tensor that has this layout. Raises Failed if it does not fit its storage."""
        number, dtype, shape, stride, offset = layout
        raw, dtype = self.storages[number], TORCH_NAMES[dtype]
        if (offset + elements_spanned(shape, stride)) * dtype.itemsize > raw.numel() and 0 not in shape:
            raise Failed("the recorded program makes no sense (a tensor does not fit its memory)")
        start = raw.storage_offset() // dtype.itemsize + offset
        if raw.storage_offset() % dtype.itemsize:
            raise Failed("the recorded program makes no sense (misaligned memory)")
        return torch.empty(0, dtype=dtype, device=self.device).set_(raw.untyped_storage(), start, shape, stride)

    def operator(self, step, observer):
        _, name, args, kwargs, layouts = step
        func = operator_of(name)
        args, kwargs = read_value(args, self.tensor), read_value(kwargs, self.tensor)
        args, kwargs = tree_map_only(torch.device, lambda device: self.device, (args, kwargs))
        if observer is None:
            out = func(*args, **kwargs)
        else:
            out = observer.step(name.split(".")[0], False, lambda: func(*args, **kwargs), func, args, kwargs)
        for layout, tensor in zip(layouts, tensors_in(out), strict=True):
            if layout[0] not in self.storages:
                # Looked at where outputs are checked, before any run is timed: a view would be a copy without a price.
                if self.poison and tensor.numel() and address(tensor) in map(address, tensors_in([args, kwargs])):
                    raise Failed("the recorded program makes no sense (a view is no new memory)")
                self.storages[layout[0]] = self.settled(name, layout, tensor)

    def settled(self, name, layout, tensor):
        """The storage of an operator's result, as it lay while recording, and poisoned where nothing was written."""
        _, dtype, shape, stride, offset = layout
        tensor = tensor.resolve_conj().resolve_neg().to(TORCH_NAMES[dtype])  # statistics may be as precise as a GPU's
        if 0 not in shape and list(tensor.shape) != shape:
            raise Failed(f"aten.{name} gives another shape than while recording")
        if 0 not in shape and (list(tensor.stride()) != stride or tensor.storage_offset() != offset):
            place = torch.empty(offset + elements_spanned(shape, stride), dtype=tensor.dtype, device=self.device)
            tensor = place.as_strided(shape, stride, offset).copy_(tensor)
        raw = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        if self.poison and name.split(".")[0] in UNWRITTEN:
            if self.poison == "noise" and tensor.is_floating_point():
                tensor.exponential_()  # not normal_(): drawn from the same seed as an input, it could be the input
            else:
                self.poisoned(raw, random=tensor.dtype != torch.bool)
        return raw

    def poisoned(self, raw, random=True):
        """Bytes that hold NaN, random values or zeros, as memory that nothing has written."""
        if self.poison == "random" and random:
            return raw.random_()
        return raw.fill_(255 if self.poison == "nan" else 0) if self.poison else raw

    def state(self) -> dict:
        """{name: tensor} of the module's parameters and buffers after the last forward."""
        return {name: self.tensor(layout) for name, layout in self.program["state"].items()}

    def launch(self, launch, observer):
        arguments = self.arguments(launch)
        if observer is None:
            return self.launcher.launch(launch, arguments)
        return observer.step(launch["kernel"], True, lambda: self.launcher.launch(launch, arguments), launch=launch)

    def arguments(self, launch) -> dict:
        functions = getattr(self.launcher, "functions", None)
        return {name: read_value(value, self.tensor, functions) for name, value in launch["arguments"].items()}

    def configuration(self, number, step):
        """The launch of a step: of an autotuned kernel's, the quickest. Each is tried once, on copies of its memory."""
        launches = launches_of(step)
        if len(launches) == 1 or number in self.chosen:
            return launches[self.chosen.get(number, 0)]
        originals = self.storages
        times = {}
        last = None
        for position, launch in enumerate(launches):
            used = storages_in(["launch", launch])
            self.storages = originals | {storage: originals[storage].clone() for storage in used}
            try:
                times[position] = self.launcher.trial(launch, self.arguments(launch))
            except Failed as error:
                last = Failed(str(error), error.stage, error.line)  # without its traceback, which holds tensors
        self.storages = originals
        if not times:
            raise last
        self.chosen[number] = min(times, key=times.get)
        return launches[self.chosen[number]]

    def tuned(self) -> list:
        """The chosen configurations, by what is different in others: ["scale: BLOCK=256, num_warps=8"]."""
        described = []
        for number, position in self.chosen.items():
            launches = self.steps[number][1]
            choices = [launch["arguments"] | launch["options"] for launch in launches]
            differing = []
            for key, value in choices[position].items():
                if type(value) is int and any(choice.get(key) != value for choice in choices):
                    differing.append(f"{key[:40]}={str(value)[:40]}")
            described.append(f"{launches[0]['kernel'][:40]}: " + ", ".join(differing))
        return described
