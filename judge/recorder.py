"""The modelled clock, first half: record a forward of a candidate, in the candidate's own process.

    recording, constants = record(model, calls, device)

A recording is a straight-line list of steps: every ATen operator and every Triton launch, as data. Kernels are
recorded but not run. A tensor is written as its layout, [storage, dtype, shape, strides, offset], with storages
numbered in order of appearance, so that views need no step of their own. modelled.py replays it in another process
without a GPU, replayer.py in one with a GPU; both believe nothing of it.

Without a GPU, inputs have values ("cpu"); for the measured clock they have none ("meta"): a GPU's inputs are too large
to be computed with here. Parameters have their values all the same. Operators then are recorded as they are on any
device, except those in WHOLE, which a GPU takes apart in another way: these are one step.

Three forwards run, on inputs of other values in the same memory. The first is a warm-up: it may make a mask, or a
buffer. The next two are recorded and must be equal, and the last one is judged: what a candidate does in other calls
does not count. What a kernel wrote in an earlier call is zero here, so that a result kept for later is wrong. Not
noticed: a forward that decides by the clock, by chance or by a file; and which tensors it makes on the CPU: a recorded
program has them all on the GPU. Refused: a kernel's `warmup`, and hooks of an autotuned kernel's configurations.
"""

import contextlib
import inspect
import operator
import types

import torch
import triton.language as tl
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, jit
from triton.tools.tensor_descriptor import TensorDescriptor

from judge.prices import FREE_OPERATORS, UNWRITTEN, Mode, operator_name, size_of, tensors_in
from judge.messages import decode, encode
from judge.perturbation import state_of, written_by
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
        if isinstance(value, TensorDescriptor):
            return {"descriptor": write_value({key: list(field) if isinstance(field, tuple) else field
                                               for key, field in vars(value).items()}, tensor)}
        return None
    return encode(value, tensor, other)


def read_value(value, tensor, kernels=None):
    """The inverse; `kernels` maps names to functions. Raises what `decode` does for anything else."""
    def other(kind, content):
        if kind == "constexpr":
            return tl.constexpr(read_value(content, tensor, kernels))
        if kind == "descriptor":
            return TensorDescriptor(**read_value(content, tensor, kernels))
        return {"triton": TRITON_TYPES, "kernel": kernels}[kind][content]
    return decode(value, tensor, other)


# ---------------------------------------------------------------------------------------------------------------------
# Recording

H200 = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 141 << 30, "major": 9, "minor": 0,
        "warp_size": 32, "max_threads_per_multi_processor": 2048, "L2_cache_size": 60 << 20,
        "shared_memory_per_block_optin": 227 << 10}  # what a candidate finds where no GPU is
GIVEN_VALUES = {"tensor", "as_tensor", "asarray"}  # functions that are given a tensor's values as Python's numbers
NAMESPACES = {"aten", "prim", "prims"}  # of PyTorch's own operators
WHOLE = {"batch_norm", "instance_norm", "dropout", "alpha_dropout", "feature_dropout", "scaled_dot_product_attention",
         "lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss"}  # ATen operators that a GPU takes apart in its own way
CALLS = 3  # forwards: a warm-up, and two that are recorded
KEEPS_STATE = "forward keeps state: from one call to the next it does something else, or counts"
MOST_CONFIGS = 16  # of an autotuned kernel that are recorded and tried


def launches_of(step) -> list:
    """The Triton launches of a recorded step: one, or one for each configuration of an autotuned kernel, or none."""
    return {"launch": [step], "tuned": step[1]}.get(step[0], [])


def as_cudnn_leaves(out, arguments):
    """What a convolution gives, as it lies on a GPU; without data PyTorch gives it in contiguous memory.

    cuDNN works in channels-last memory if the input or the weight does (ATen/native/ConvUtils.h). Depthwise
    convolutions are PyTorch's own. arguments: of aten.convolution.
    """
    x, weight, _, _, _, _, transposed, _, groups = arguments
    memory = {suggest_memory_format(tensor) for tensor in (x, weight)} - {torch.contiguous_format}
    depthwise = 1 < groups == x.shape[1] and not transposed
    return out.contiguous(memory_format=memory.pop()) if memory and not depthwise else out


def identity(tensor) -> int:
    """A number for a tensor's storage, the same as long as the storage lives."""
    return tensor.untyped_storage()._cdata


class Recorder(Mode):
    """While active, writes each ATen call and each Triton launch into `steps`.

    A storage that no step created (a parameter, a table) is kept in `constants`, as bytes; one without values, which
    an earlier call has made, as its size. copies: {identity: a copy} of storages that need no other.
    """

    active = None  # the recorder of the forward that runs

    def __init__(self, device="cpu", copies=None):
        super().__init__()
        self.device, self.copies, self.steps, self.constants = device, copies or {}, [], {}
        self.numbers, self.storages = {}, []  # number of a storage by its identity; all of them, so that all live
        self.derived = set()  # storages that depend on the inputs or on a kernel, hence unknown while recording
        self.names = {}  # global constants that the launched kernels may refer to
        self.read, self.written = set(), set()  # storages that the host reads; that operators write

    def layout(self, tensor, created=False):
        """The tensor as data. created: by a step, or an input; otherwise a new storage is a constant."""
        storage = tensor.untyped_storage()
        key = identity(tensor)
        if key not in self.numbers:
            self.numbers[key] = number = len(self.storages)
            self.storages.append(storage)
            if not created and storage.device.type == "meta":
                self.constants[number] = storage.nbytes()
            elif not created:
                with _disable_current_modes():
                    copy = self.copies[key] if key in self.copies else storage.clone()
                    self.constants[number] = torch.empty(0, dtype=torch.uint8).set_(copy)
        return [self.numbers[key], str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                tensor.storage_offset()]

    def is_new(self, tensor):
        return identity(tensor) not in self.numbers

    def note_read(self, name, numbers):
        """The host reads storages by an operator or a method: what is computed is not known while recording."""
        self.read |= numbers
        if numbers & self.derived:
            raise RuntimeError(f"forward reads computed values back to the host ({name}): not supported here")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operator_name(func)
        if func.namespace not in NAMESPACES:
            raise RuntimeError(f"{func.name()} is an operator of your own: not supported here, call its function")
        if self.device == "meta" and name not in WHOLE:
            with self:  # an operator that is made of others is recorded as these
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        arguments = [write_value(args, self.layout), write_value(kwargs, self.layout)]
        touched = {self.layout(tensor)[0] for tensor in tensors_in([args, kwargs])}
        if name in HOST_READS:
            self.note_read(f"aten.{name}", touched)
        self.written |= {self.layout(tensor)[0] for tensor in tensors_in(written_by(func, args, kwargs))}
        out = self.run(func, args, kwargs)
        if self.device == "meta" and name == "convolution":
            out = as_cudnn_leaves(out, args)
        results = tensors_in(out)
        for tensor in results:
            if name in UNWRITTEN and self.is_new(tensor):
                tensor.zero_()  # kernels do not run here: what they would write must at least be a valid index
        if func._schema.is_mutable or any(self.is_new(tensor) or tensor.numel() == 0 for tensor in results):
            self.steps.append(["operator", f"{name}.{func._overloadname}", *arguments,
                               [self.layout(tensor, created=True) for tensor in results]])
            if touched & self.derived or name in FREE_OPERATORS:
                self.derived.update(self.layout(tensor)[0] for tensor in results)
        elif name == "lift_fresh":
            self.steps.append(["upload", size_of(results[0])])
        return out

    def run(self, func, args, kwargs):
        """What an operator returns; of no values if not all of its inputs have values."""
        if len({tensor.device for tensor in tensors_in([args, kwargs])}) < 2:
            return func(*args, **kwargs)
        originals = {}

        def without_values(value):
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return value
            double = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            originals[id(double)] = value, double  # kept, so that nothing else gets its id
            return double

        args, kwargs = tree_map(without_values, (args, kwargs))
        return tree_map(lambda value: originals.get(id(value), [value])[0], func(*args, **kwargs))

    def launch(self, kernel, args, kwargs, grid):
        """What `kernel[grid](*args, **kwargs)` does while recording."""
        signature = inspect.signature(kernel.fn)
        options = {key: value for key, value in kwargs.items() if key not in signature.parameters}
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in options})
        bound.apply_defaults()
        grid = grid({**bound.arguments, **options}) if callable(grid) else grid
        grid = [operator.index(size) for size in ((grid,) if isinstance(grid, int) else grid)]
        if any(isinstance(value, list) for value in bound.arguments.values()):
            raise TypeError("a kernel takes no list")
        arguments = {key: write_value(value.value if isinstance(value, tl.constexpr) else value, self.layout)
                     for key, value in bound.arguments.items()}
        tensors = tensors_in([getattr(value, "base", value) for value in bound.arguments.values()])  # of descriptors
        self.derived.update(self.layout(tensor)[0] for tensor in tensors)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, (bool, int, float, str, tl.constexpr, tl.dtype)) and not name.startswith("__"):
                self.names[name] = write_value(value, self.layout)
        self.steps.append(["launch", kernel.fn.__name__, grid + [1] * (3 - len(grid)), arguments,
                           {key: write_value(value, self.layout) for key, value in options.items()}])


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run where there is none: for device="cuda" stands the recorder's device, `.cuda()`
    does nothing.

    Within a forward all tensors say that they are on a GPU. In a constructor, whose parameters go to the GPU
    afterwards, they say where they are.
    """

    def __init__(self, recorder, in_forward=True):
        super().__init__()
        self.recorder, self.in_forward = recorder, in_forward

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        sources = tensors_in([args, kwargs])
        if self.in_forward and func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if self.in_forward and name == "get_device":
            return 0
        if self.in_forward and sources and name in ("numpy", "__array__", "__dlpack__"):
            raise TypeError(f"{name}: a tensor on the GPU has to be moved to the CPU first")
        if self.in_forward and sources and name in ("tolist", "__reduce_ex__"):
            self.recorder.note_read(name, {self.recorder.layout(sources[0])[0]})
        named = [kwargs.get("device"), *(args[1:] if name == "to" else [])]
        device = name if name in ("cpu", "cuda") else "".join(
            str(torch.device(value).type) for value in named if isinstance(value, (str, torch.device)))
        if device == "cpu" and name in ("cpu", "to") and \
                self.recorder.numbers.get(identity(args[0])) in self.recorder.derived:
            raise RuntimeError("forward moves computed values to the CPU")
        if name == "cuda":
            return args[0]
        if device == "cuda":
            there = sources[0].device if sources else "cpu" if name in GIVEN_VALUES else self.recorder.device
            kwargs = {key: there if key == "device" else value for key, value in kwargs.items()}
            args = tuple(there if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
        return func(*args, **kwargs)


def pretend_gpu(properties):
    """Let PyTorch and Triton speak of a GPU in a process that has none. properties: of the GPU, by PyTorch's names."""
    found = types.SimpleNamespace(**properties)
    done, memory = lambda *_, **__: None, found.total_memory
    stream = types.SimpleNamespace(cuda_stream=0, elapsed_time=lambda other: 0.0, **dict.fromkeys(
        ("synchronize", "wait_stream", "wait_event", "record_event", "record", "wait"), done))
    instead = {"is_available": True, "device_count": 1, "current_device": 0, "synchronize": None,
               "get_device_properties": found, "get_device_name": found.name,
               "get_device_capability": (found.major, found.minor), "mem_get_info": (memory, memory),
               **dict.fromkeys(("device", "device_of", "stream"), contextlib.nullcontext()),
               **dict.fromkeys(("current_stream", "default_stream", "Stream", "Event"), stream)}
    for name, value in instead.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.library.wrap_triton = lambda kernel: kernel  # it matters to torch.compile only
    there = {"multiprocessor_count": found.multi_processor_count, "max_shared_mem": 227 << 10, "warpSize": 32,
             "max_num_regs": 65536}
    driver.set_active(types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=types.SimpleNamespace(get_device_properties=lambda device: there, launch=None),
        get_current_target=lambda: GPUTarget("cuda", 10 * found.major + found.minor, 32)))


def launch(kernel, *args, grid, warmup, **kwargs):
    """Stands for JITFunction.run in the candidate's process."""
    if warmup:
        raise RuntimeError("warmup of a kernel is not supported here: nothing is compiled while recording")
    Recorder.active.launch(kernel, args, kwargs, grid)


def launch_tuned(tuner, *args, **kwargs):
    """Stands for Autotuner.run: records a launch with each configuration. The replaying process takes the quickest."""
    steps, launches = Recorder.active.steps, []
    tuner.nargs = dict(zip(tuner.arg_names, args))
    start = len(steps)
    configs = tuner.prune_configs(kwargs)[:MOST_CONFIGS]
    del steps[start:]  # what pruning does happens once, not in every call
    if any(config.pre_hook for config in configs):
        raise RuntimeError("configurations of an autotuned kernel with hooks are not supported here")
    for config in configs:
        tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        launches.append(steps.pop())
    steps.append(["tuned", launches] if launches[1:] else launches[0])


def record(model, calls, device="cpu"):
    """Run forwards of the candidate's model. Patches this process for good: nothing else can run in it.

    calls: the arguments of each of CALLS forwards; on the device "meta" the same in all. Returns (program, constants)
    of the last one: {"inputs", "steps", "output", "names", "state"} with `state` the layouts of the parameters and
    buffers; {storage number: its bytes as a uint8 tensor, or its size}. Raises what the forward raises, and
    RuntimeError where it reads computed values, or where the recorded calls are not equal.
    """
    jit.JITFunction.run = launch
    autotuner.Autotuner.run = launch_tuned
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    inputs, programs = list(calls[0]), []
    copies = {}  # {name of a parameter or buffer: as the constructor left it}
    for call in calls:
        if device == "cpu":
            for tensor, other in zip(tensors_in(inputs), tensors_in(list(call)), strict=True):
                tensor.untyped_storage().copy_(other.untyped_storage())
        for name, tensor in state_of(model):
            storage = tensor.untyped_storage()
            storage.copy_(copies.setdefault(name, storage.clone()))  # a forward may change buffers
        programs.append(record_call(model, inputs, device, copies))
    program, constants, fixed = programs[-1]
    earlier, _, earlier_fixed = programs[-2]
    if repr(program) != repr(earlier) or not same_constants(fixed, earlier_fixed):
        raise RuntimeError(KEEPS_STATE)
    return program, constants


def record_call(model, inputs, device, copies):
    """One forward: (program, its constants, those that it does not write)."""
    named = dict(state_of(model))
    recorder = Recorder.active = Recorder(device, {identity(tensor): copies[name] for name, tensor in named.items()})
    # In inference mode operators that are made of others are seen, too: see WHOLE.
    with torch.inference_mode(device == "meta"), torch.no_grad(), PretendCuda(recorder), recorder:
        layouts = [recorder.layout(tensor, created=True) for tensor in tensors_in(inputs)]
        recorder.derived.update(layout[0] for layout in layouts)
        state = {name: recorder.layout(tensor) for name, tensor in named.items()}
        output = model(*inputs)
        output = write_value(output, recorder.layout)
    if recorder.read & recorder.written & recorder.constants.keys():
        raise RuntimeError(KEEPS_STATE)
    program = {"inputs": layouts, "steps": recorder.steps, "output": output, "names": recorder.names, "state": state}
    fixed = {number: data for number, data in recorder.constants.items() if number not in recorder.written}
    return program, recorder.constants, fixed


def same_constants(one, other) -> bool:
    """Are these {storage number: bytes or size} equal?"""
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])) for key, value in one.items())
