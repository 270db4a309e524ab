"""The modelled clock, first half: record one forward of a candidate, in the candidate's own process.

    recording, constants = record(model, inputs)

A recording is a straight-line list of steps: every ATen operator and every Triton launch, as data. Kernels are
recorded but not run. A tensor is written as its layout, [storage, dtype, shape, strides, offset], with storages
numbered in order of appearance, so that views need no step of their own. modelled.py replays it in another process,
which believes nothing of it.
"""

import inspect

import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import autotuner, jit

from judge.prices import FREE_OPERATORS, Mode, operator_name, size_of, tensors_in
from judge.messages import decode, encode
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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operator_name(func)
        arguments = [write_value(args, self.layout), write_value(kwargs, self.layout)]
        touched = {self.layout(tensor)[0] for tensor in tensors_in([args, kwargs])}
        if name in HOST_READS and touched & self.derived:
            raise RuntimeError(f"forward reads computed values back to the host (aten.{name}): not supported here")
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

    def launch(self, kernel, args, kwargs, grid):
        """What `kernel[grid](*args, **kwargs)` does while recording."""
        signature = inspect.signature(kernel.fn)
        options = {key: value for key, value in kwargs.items() if key not in signature.parameters}
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in options})
        bound.apply_defaults()
        grid = grid({**bound.arguments, **options}) if callable(grid) else grid
        grid = [int(size) for size in ((grid,) if isinstance(grid, int) else grid)]
        arguments = {key: write_value(value.value if isinstance(value, tl.constexpr) else value, self.layout)
                     for key, value in bound.arguments.items()}
        self.derived.update(self.layout(tensor)[0] for tensor in tensors_in(list(bound.arguments.values())))
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, (bool, int, float, str, tl.constexpr, tl.dtype)) and not name.startswith("__"):
                self.names[name] = write_value(value, self.layout)
        self.steps.append(["launch", kernel.fn.__name__, grid + [1] * (3 - len(grid)), arguments,
                           {key: write_value(value, self.layout) for key, value in options.items()}])


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run where there is none: device="cuda" means the CPU, `.cuda()` does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if name == "cuda":
            return args[0]
        if name == "to":
            args = tuple("cpu" if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
        return func(*args, **kwargs)


def record(model, inputs):
    """Run one forward of the candidate's model. Patches this process for good: nothing else can run in it.

    Returns (recording, constants): {"inputs", "steps", "output", "names", "state"} with `state` the layouts of the
    parameters and buffers; {storage number: its bytes as a uint8 tensor}. Raises what the forward raises, and
    RuntimeError where it reads computed values.
    """
    recorder = Recorder()

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
    with torch.no_grad(), PretendCuda(), recorder:
        layouts = recorder.inputs(tensors_in(list(inputs)))
        named = [*model.named_parameters(), *model.named_buffers()]
        state = {name: recorder.layout(tensor) for name, tensor in named}
        output = write_value(model(*inputs), recorder.layout)
    recording = {"inputs": layouts, "steps": recorder.steps, "output": output, "names": recorder.names, "state": state}
    return recording, recorder.constants
