"""The modelled clock, first half: record a forward of a candidate, in the candidate's own process.

    recording, constants = record(model, calls, device)

A recording is a straight-line list of steps: every ATen operator and every Triton launch, as data. Kernels are
recorded but not run. A tensor is written as its layout, [storage, dtype, shape, strides, offset], with storages
numbered in order of appearance, so that views need no step of their own. modelled.py replays it in another process
without a GPU, replayer.py in one with a GPU; both believe nothing of it.

Without a GPU, inputs have values ("cpu"); for the measured clock they have none ("meta"): a GPU's inputs are too large
to be computed with here. Parameters have their values all the same. Operators then are recorded as they are on any
device, but for those in WHOLE, which a GPU takes apart in another way: these are one step.

A forward may not do its work in some calls only. So several are recorded, on inputs of other values in the same
memory, and the last one is judged. The first may differ (it makes a mask, or a buffer); from the second on the
programs must be equal, and so must be all numbers and strings that the candidate's objects, functions and module hold:
a counter would differ. What a kernel wrote in an earlier call is zero here, so that a result kept for later is wrong.
Not noticed: a forward that decides by the clock, by chance, by a file, or by what it hides in another module.
"""

import contextlib
import functools
import gc
import inspect
import operator
import sys
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
MOST_CONFIGS = 16  # of an autotuned kernel that are recorded and tried


def launches_of(step) -> list:
    """The Triton launches of a recorded step: one, or one for each configuration of an autotuned kernel, or none."""
    return {"launch": [step], "tuned": step[1]}.get(step[0], [])


def as_cudnn_leaves(out, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """What a convolution gives, as it lies on a GPU; without data PyTorch gives it in contiguous memory.

    cuDNN works in channels-last memory if the input or the weight does (ATen/native/ConvUtils.h), but for depthwise
    convolutions, which are PyTorch's own.
    """
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

    def __init__(self, device="cpu", copies=None):
        super().__init__()
        self.device, self.steps, self.constants, self.copies = device, [], {}, copies or {}
        self.numbers, self.storages = {}, []  # number of a storage by its identity; all of them, so that all live
        self.derived = set()  # storages that depend on the inputs or on a kernel, hence unknown while recording
        self.names = {}  # global constants that the launched kernels may refer to
        self.read, self.written = set(), set()  # storages that the host reads; that operators write
        self.on_host = {}  # {identity: storage} of tensors that the forward asks for on the CPU by name

    def layout(self, tensor, created=False):
        """The tensor as data. created: by a step, or an input; otherwise a new storage is a constant."""
        storage, key = tensor.untyped_storage(), identity(tensor)
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

    def is_derived(self, tensor):
        return self.numbers.get(identity(tensor)) in self.derived

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
            out = as_cudnn_leaves(out, *args)
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

    def refuse_on_host(self, tensors):
        """What is passed to a kernel or returned must be on the GPU."""
        if self.on_host.keys() & set(map(identity, tensors)):
            raise RuntimeError("a tensor on the CPU is returned, or passed to a kernel")

    def launch(self, kernel, args, kwargs, grid):
        """What `kernel[grid](*args, **kwargs)` does while recording."""
        signature = inspect.signature(kernel.fn)
        options = {key: value for key, value in kwargs.items() if key not in signature.parameters}
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in options})
        bound.apply_defaults()
        grid = grid({**bound.arguments, **options}) if callable(grid) else grid
        grid = [operator.index(size) for size in ((grid,) if isinstance(grid, int) else grid)]
        for name, value in bound.arguments.items():
            if isinstance(value, list):
                raise TypeError(f"{name}: a kernel takes no list")
        arguments = {key: write_value(value.value if isinstance(value, tl.constexpr) else value, self.layout)
                     for key, value in bound.arguments.items()}
        tensors = tensors_in([getattr(value, "base", value) for value in bound.arguments.values()])  # of descriptors
        self.refuse_on_host(tensors)
        self.derived.update(self.layout(tensor)[0] for tensor in tensors)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, (bool, int, float, str, tl.constexpr, tl.dtype)) and not name.startswith("__"):
                self.names[name] = write_value(value, self.layout)
        self.steps.append(["launch", kernel.fn.__name__, grid + [1] * (3 - len(grid)), arguments,
                           {key: write_value(value, self.layout) for key, value in options.items()}])


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run where there is none: for device="cuda" stands the recorder's device, `.cuda()`
    does nothing.

    Within a forward tensors say that they are on a GPU, except those that are asked for on the CPU by name, and what
    is computed from these alone. (Where no device is named, nothing is said: on a GPU such a tensor would be on the
    CPU.) In a constructor, whose parameters go to the GPU afterwards, they say where they are.
    """

    def __init__(self, recorder, in_forward=True):
        super().__init__()
        self.recorder, self.on_host, self.in_forward = recorder, recorder.on_host, in_forward

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        sources = tensors_in([args, kwargs])
        on_host = bool(sources) and all(identity(tensor) in self.on_host for tensor in sources)
        if func == torch.Tensor.device.__get__ and self.in_forward:
            return torch.device("cpu") if on_host else torch.device("cuda", 0)
        if name == "get_device" and self.in_forward:
            return -1 if on_host else 0
        if self.in_forward and sources and not on_host:
            if name in ("numpy", "__array__", "__dlpack__"):
                raise TypeError(f"{name}: a tensor on the GPU has to be moved to the CPU first")
            if name in ("tolist", "__reduce_ex__"):
                self.recorder.note_read(name, {self.recorder.layout(sources[0])[0]})
        named = [kwargs.get("device"), *(args[1:] if name == "to" else [])]
        device = "cpu" if name == "cpu" else "cuda" if name == "cuda" else "".join(
            str(torch.device(value).type) for value in named if isinstance(value, (str, torch.device)))
        if device == "cpu" and name in ("cpu", "to") and not on_host and self.recorder.is_derived(args[0]):
            raise RuntimeError("forward moves computed values to the CPU")
        if device == "cuda" and sources:
            self.on_host.pop(identity(sources[0]), None)
        if name == "cuda":
            return args[0]
        if device == "cuda":
            there = sources[0].device if sources else "cpu" if name in GIVEN_VALUES else self.recorder.device
            kwargs = {key: there if key == "device" else value for key, value in kwargs.items()}
            args = tuple(there if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
        out = func(*args, **kwargs)
        if self.in_forward and (device == "cpu" and name not in ("cpu", "to") or device != "cuda" and on_host):
            self.on_host.update((identity(tensor), tensor.untyped_storage()) for tensor in tensors_in(out))
        return out


def pretend_gpu(properties):
    """Let PyTorch and Triton speak of a GPU in a process that has none. properties: of the GPU, by PyTorch's names."""
    found = types.SimpleNamespace(**properties)
    done, memory = (lambda *_, **__: None), found.total_memory
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


class WarmedUp:
    """What `kernel.warmup(...)` gives, for code that asks it how many programs fit on a GPU. Nothing is compiled here,
    so registers and bytes of shared memory are plausible numbers.
    """

    n_regs, n_spills, metadata = 64, 0, types.SimpleNamespace(shared=16 << 10)

    def __init__(self, kernel, kwargs):
        self.kernel = kernel
        self.options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names}

    def _init_handles(self):
        pass

    def __getitem__(self, grid):
        return functools.partial(self.kernel[grid], **self.options)


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


def record(model, calls, device="cpu"):
    """Run forwards of the candidate's model. Patches this process for good: nothing else can run in it.

    calls: the arguments of each; on the device "meta" the same in all. Returns (recording, constants) of the last one:
    {"inputs", "steps", "output", "names", "state"} with `state` the layouts of the parameters and buffers; {storage
    number: its bytes as a uint8 tensor, or its size}. Raises what the forward raises, and RuntimeError where it reads
    computed values, or is not the same in every call.
    """
    recorder = None

    def run(kernel, *args, grid, warmup, **kwargs):
        if warmup:
            return WarmedUp(kernel, kwargs)
        recorder.launch(kernel, args, kwargs, grid)

    def run_tuned(tuner, *args, **kwargs):
        """Record a launch with each configuration. Who replays them takes the quickest."""
        launches, tuner.nargs, start = [], dict(zip(tuner.arg_names, args)), len(recorder.steps)
        configs = tuner.prune_configs(kwargs)[:MOST_CONFIGS]
        del recorder.steps[start:]  # what pruning does happens once, not in every call
        if len({config.pre_hook for config in configs}) > 1:
            raise RuntimeError("configurations of an autotuned kernel with different hooks are not supported here")
        for config in configs:
            before = len(recorder.steps)
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
            launches.append(recorder.steps.pop())
            if launches[1:]:  # what a hook does counts once
                del recorder.steps[before:]
        recorder.steps.append(["tuned", launches] if launches[1:] else launches[0])

    jit.JITFunction.run, autotuner.Autotuner.run = run, run_tuned
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    inputs, earlier, copies = list(calls[0]), None, {}  # {name of a parameter or buffer: as the constructor left it}
    for number, call in enumerate(calls):
        for tensor, other in zip(tensors_in(inputs), tensors_in(list(call)), strict=True):
            if device == "cpu":
                tensor.untyped_storage().copy_(other.untyped_storage())
        named = dict(state_of(model))
        for name, tensor in named.items():
            if name in copies:  # a forward may change buffers, as the reference does
                tensor.untyped_storage().copy_(copies[name])
            else:
                copies[name] = tensor.untyped_storage().clone()
        recorder = Recorder(device, {identity(tensor): copies[name] for name, tensor in named.items()})
        # In inference mode operators that are made of others are seen, too: see WHOLE.
        with torch.inference_mode(device == "meta"), torch.no_grad(), PretendCuda(recorder), recorder:
            layouts = [recorder.layout(tensor, created=True) for tensor in tensors_in(inputs)]
            recorder.derived.update(layout[0] for layout in layouts)
            state = {name: recorder.layout(tensor) for name, tensor in named.items()}
            output = model(*inputs)
            recorder.refuse_on_host(tensors_in(output))
            output = write_value(output, recorder.layout)
        recording = {"inputs": layouts, "steps": recorder.steps, "output": output, "names": recorder.names,
                     "state": state}
        fixed = {number: data for number, data in recorder.constants.items() if number not in recorder.written}
        now = repr([recording, plain_values([model, vars(sys.modules["candidate"])])]), fixed
        if number > 1 and now[0] != earlier[0] or recorder.read & recorder.written & recorder.constants.keys() or \
                number > 1 and not same_constants(fixed, earlier[1]):
            raise RuntimeError("forward keeps state: from one call to the next it does something else, or counts")
        earlier = now
    return recording, recorder.constants


def same_constants(one, other) -> bool:
    """Are these {storage number: bytes or size} equal?"""
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])) for key, value in one.items())
