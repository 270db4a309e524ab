"""The modelled clock, first half: record a forward of a candidate, in the candidate's own process.

    recording, constants = record(model, calls)

A recording is a straight-line list of steps: every ATen operator and every Triton launch, as data. Kernels are
recorded but not run. A tensor is written as its layout, [storage, dtype, shape, strides, offset], with storages
numbered in order of appearance, so that views need no step of their own. modelled.py replays it in another process,
which believes nothing of it.

A forward may not do its work in some calls only. So several are recorded, on inputs of other values in the same
memory, and the last one is judged. The first may differ (it makes a mask, or a buffer); from the second on the
programs must be equal, and so must be all numbers and strings that the candidate's objects, functions and module hold:
a counter would differ. What a kernel wrote in an earlier call is zero here, so that a result kept for later is wrong.
Not noticed: a forward that decides by the clock, by chance, by a file, or by what it hides in another module.
"""

import gc
import inspect
import sys
import types

import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import autotuner, jit

from judge.prices import FREE_OPERATORS, Mode, operator_name, size_of, tensors_in
from judge.messages import decode, encode
from judge.perturbation import written_by
from judge.rules import HOST_READS

# ---------------------------------------------------------------------------------------------------------------------
# Triton's own values in recordings and messages

TRITON_TYPES = {str(value): value for value in vars(tl).values() if isinstance(value, tl.dtype)}


def write_value(value, tensor):
    """JSON for an argument of an operator or a kernel (processes.encode); also Triton's types, constants, functions."""
    def other(value):
        if isinstance(value, tl.dtype):
            return {"triton": str(value)}
        if isinstance(value, tl.constexpr):
            return {"constexpr": write_value(value.value, tensor)}
        if isinstance(value, jit.JITFunction):
            return {"kernel": value.fn.__name__}
        return None
    return encode(value, tensor, other)


def read_value(value, tensor, kernels=None):
    """The inverse; `kernels` maps names to functions. Raises ValueError, KeyError or TypeError for anything else."""
    def other(kind, content):
        if kind == "constexpr":
            return tl.constexpr(read_value(content, tensor, kernels))
        return {"triton": TRITON_TYPES, "kernel": kernels}[kind][content]
    return decode(value, tensor, other)


# ---------------------------------------------------------------------------------------------------------------------
# Recording


class Recorder(Mode):
    """While active, writes each ATen call and each Triton launch into `steps`.

    A storage that no step created (a parameter, a table) is kept in `constants`, as bytes.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.constants = [], {}
        self.numbers, self.storages = {}, []  # number of a storage by its address; all of them, so that none is reused
        self.derived = set()  # storages that depend on the inputs or on a kernel, hence unknown while recording
        self.names = {}  # global constants that the launched kernels may refer to
        self.read, self.written = set(), set()  # storages that the host reads; that operators write
        self.on_host = {}  # {address: storage} of tensors that the forward asks for on the CPU by name

    def layout(self, tensor, created=False):
        """The tensor as data. created: by a step, or an input; otherwise a new storage is a constant."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.numbers or storage.nbytes() == 0:
            self.numbers[address] = number = len(self.storages)
            self.storages.append(storage)
            if not created:
                with _disable_current_modes():
                    self.constants[number] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        return [self.numbers[address], str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                tensor.storage_offset()]

    def inputs(self, tensors):
        """Number the inputs' storages first. Returns their layouts."""
        layouts = [self.layout(tensor, created=True) for tensor in tensors]
        self.derived.update(layout[0] for layout in layouts)
        return layouts

    def is_new(self, tensor):
        return tensor.untyped_storage().data_ptr() not in self.numbers

    def is_derived(self, tensor):
        return self.numbers.get(tensor.untyped_storage().data_ptr()) in self.derived

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operator_name(func)
        arguments = [write_value(args, self.layout), write_value(kwargs, self.layout)]
        touched = {self.layout(tensor)[0] for tensor in tensors_in([args, kwargs])}
        if name in HOST_READS:
            self.read |= touched
            if touched & self.derived:
                raise RuntimeError(f"forward reads computed values back to the host (aten.{name}): not supported here")
        self.written |= {self.layout(tensor)[0] for tensor in tensors_in(written_by(func, args, kwargs))}
        out = func(*args, **kwargs)
        results = tensors_in(out)
        for tensor in results:
            if name in FREE_OPERATORS and self.is_new(tensor):
                tensor.zero_()  # kernels do not run here: what they would write must at least be a valid index
        if func._schema.is_mutable or any(self.is_new(tensor) or tensor.numel() == 0 for tensor in results):
            self.steps.append(["operator", f"{name}.{func._overloadname}", *arguments,
                               [self.layout(tensor, created=True) for tensor in results]])
            if touched & self.derived or name in FREE_OPERATORS:
                self.derived.update(self.layout(tensor)[0] for tensor in results)
        elif name == "lift_fresh":
            self.steps.append(["upload", size_of(results[0])])
        return out

    def to_device(self, value):
        """`write_value` of what is passed to a kernel or returned: a tensor must be on the GPU."""
        if self.on_host.keys() & {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}:
            raise RuntimeError("a tensor on the CPU is returned, or passed to a kernel")
        return write_value(value, self.layout)

    def launch(self, kernel, args, kwargs, grid):
        """What `kernel[grid](*args, **kwargs)` does while recording."""
        signature = inspect.signature(kernel.fn)
        options = {key: value for key, value in kwargs.items() if key not in signature.parameters}
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in options})
        bound.apply_defaults()
        grid = grid({**bound.arguments, **options}) if callable(grid) else grid
        grid = [int(size) for size in ((grid,) if isinstance(grid, int) else grid)]
        arguments = {key: self.to_device(value.value if isinstance(value, tl.constexpr) else value)
                     for key, value in bound.arguments.items()}
        self.derived.update(self.layout(tensor)[0] for tensor in tensors_in(list(bound.arguments.values())))
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, (bool, int, float, str, tl.constexpr, tl.dtype)) and not name.startswith("__"):
                self.names[name] = write_value(value, self.layout)
        self.steps.append(["launch", kernel.fn.__name__, grid + [1] * (3 - len(grid)), arguments,
                           {key: write_value(value, self.layout) for key, value in options.items()}])


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run where there is none: device="cuda" means the CPU, `.cuda()` does nothing.

    Tensors say that they are on a GPU, except those that are asked for on the CPU by name, and what is computed from
    these alone. (Where no device is named, nothing is said: on a GPU such a tensor would be on the CPU.)
    """

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.on_host = recorder, recorder.on_host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        sources = [tensor.untyped_storage() for tensor in tensors_in([args, kwargs])]
        on_host = bool(sources) and all(storage.data_ptr() in self.on_host for storage in sources)
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu") if on_host else torch.device("cuda", 0)
        named = [kwargs.get("device"), *(args[1:] if name == "to" else [])]
        device = "cpu" if name == "cpu" else "cuda" if name == "cuda" else "".join(
            str(torch.device(value).type) for value in named if isinstance(value, (str, torch.device)))
        if device == "cpu" and name in ("cpu", "to") and not on_host and self.recorder.is_derived(args[0]):
            raise RuntimeError("forward moves computed values to the CPU")
        if device == "cuda" and sources:
            self.on_host.pop(sources[0].data_ptr(), None)
        if name == "cuda":
            return args[0]
        if device == "cuda":
            kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
            args = tuple("cpu" if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
        out = func(*args, **kwargs)
        if device == "cpu" and name not in ("cpu", "to") or device != "cuda" and on_host:
            self.on_host.update((tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
                                for tensor in tensors_in(out))
        return out


def plain_values(root) -> list:
    """Every number and string that the candidate's own objects hold, in a fixed order."""
    found, seen, waiting = [], {}, [root]
    while waiting:
        value = waiting.pop()
        mine = getattr(value, "__module__", None) == "candidate" or isinstance(value, torch.nn.Module)
        if value is None or isinstance(value, (bool, int, float, str)):
            found.append(value)
        elif id(value) not in seen:
            seen[id(value)] = value  # kept, so that nothing else gets its id
            if mine or isinstance(value, (list, tuple, set, dict, types.CellType)):  # a cell is part of a closure
                waiting += gc.get_referents(value)
    return found


def record(model, calls):
    """Run forwards of the candidate's model. Patches this process for good: nothing else can run in it.

    calls: the arguments of each. Returns (recording, constants) of the last one: {"inputs", "steps", "output", "names",
    "state"} with `state` the layouts of the parameters and buffers; {storage number: its bytes as a uint8 tensor}.
    Raises what the forward raises, and RuntimeError where it reads computed values, or is not the same in every call.
    """
    recorder = None

    def run(kernel, *args, grid, warmup, **kwargs):
        if not warmup:
            recorder.launch(kernel, args, kwargs, grid)

    def run_tuned(tuner, *args, **kwargs):  # there is nothing to measure: the first configuration stands for all
        config = tuner.configs[0]
        named = {**dict(zip(tuner.arg_names, args)), **kwargs, **config.all_kwargs()}
        for hook in (config.pre_hook, tuner.pre_hook):
            if hook is not None:
                hook(named)
        return tuner.fn.run(*args, **kwargs, **config.all_kwargs())

    jit.JITFunction.run, autotuner.Autotuner.run = run, run_tuned
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    torch.cuda.synchronize = lambda *_: None
    inputs, first, earlier = list(calls[0]), {}, None
    for number, call in enumerate(calls):
        for tensor, other in zip(tensors_in(inputs), tensors_in(list(call)), strict=True):
            tensor.untyped_storage().copy_(other.untyped_storage())
        named = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in named.items():  # a forward may change buffers, as the reference does
            tensor.untyped_storage().copy_(first.setdefault(name, tensor.untyped_storage().clone()))
        recorder = Recorder()
        with torch.no_grad(), PretendCuda(recorder), recorder:
            layouts = recorder.inputs(tensors_in(inputs))
            state = {name: recorder.layout(tensor) for name, tensor in named.items()}
            output = recorder.to_device(model(*inputs))
        recording = {"inputs": layouts, "steps": recorder.steps, "output": output, "names": recorder.names,
                     "state": state}
        fixed = {number: data for number, data in recorder.constants.items() if number not in recorder.written}
        now = repr([recording, plain_values([model, vars(sys.modules["candidate"])])]), fixed
        differs = number > 1 and (now[0] != earlier[0] or fixed.keys() != earlier[1].keys() or
                                  not all(map(torch.equal, fixed.values(), earlier[1].values())))
        if differs or recorder.read & recorder.written & recorder.constants.keys():
            raise RuntimeError("forward keeps state: from one call to the next it does something else, or counts")
        earlier = now
    return recording, recorder.constants
