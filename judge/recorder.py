"""Runs a candidate's Python in a jail, and writes down what its forward does: operators and kernel launches, as data.

    python -m judge.recorder FD SETTINGS        a server: it forks one recorder for each order (processes.serve_orders)

Nothing is computed from inputs here. They have no values (PyTorch's meta device); parameters and newly made tensors
do, and everything pretends that there is a GPU. A forward is called three times: once to warm up, and twice to be
recorded; both programs must be equal. Then Triton compiles each kernel that was launched, with a GPU into the binary
that the judge will launch, without one only to refuse what a GPU would refuse.

The program's format is in program.py. A tensor is written as a layout in a numbered storage, so views need no step. A
storage that no step has made is a constant: a parameter that equals the reference's of the same name, or else bytes.
Not supported: values that are read back, operators of one's own, tensor descriptors made by the host, hooks of configs.
"""

import json
import os
import socket
import sys
import types
import zlib
from unittest.mock import MagicMock

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import autotuner, driver, jit

from judge import rules
from judge.comparison import is_exact
from judge.processes import TORCH_NAMES, serve_orders
from judge.program import MOST_CONFIGS, UNWRITTEN, dense, launches_of, tensors_in, write_value
from judge.reference import load_module, seed_everything, state_of
from judge.verdict import Failed, describe

H200 = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 141 << 30, "major": 9, "minor": 0,
        "warp_size": 32, "max_threads_per_multi_processor": 2048, "L2_cache_size": 60 << 20,
        "shared_memory_per_block_optin": 227 << 10}  # what a candidate finds where no GPU is
SHARED_MEMORY = 227 << 10  # bytes that a program of a kernel may use
CALLS = 3  # forwards: a warm-up, and two that are recorded
KEEPS_STATE = "forward keeps state: from one call to the next it does something else, or counts"
WHOLE = set("batch_norm instance_norm dropout alpha_dropout feature_dropout scaled_dot_product_attention lstm gru "
            "rnn_tanh rnn_relu ctc_loss conj_physical".split())  # operators that are recorded as one step
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
PHYSICAL = {torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
            torch.ops.aten._neg_view.default: torch.ops.aten.neg.default}  # lazy ones set marks that no layout shows
READ_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operators that read values
TO_HOST = set("cpu item tolist numpy __array__ __dlpack__ __reduce_ex__ __float__ __int__ __bool__".split())  # methods
SMALL = 1 << 26  # bytes: a larger tensor that a forward makes has no values while recording
RUN = jit.JITFunction.run  # another stands in its place
TENSOR = torch.tensor


def identity(tensor) -> int:
    """A number for a tensor's storage, the same as long as the storage lives."""
    return tensor.untyped_storage()._cdata


def plain(value):
    return value.value if isinstance(value, tl.constexpr) else value


# ---------------------------------------------------------------------------------------------------------------------
# Recording one forward


class Recorder(TorchDispatchMode):
    """While active, writes each operator and each launch of a forward into `steps`.

    equal: identities of the parameters and buffers that are as the reference's.
    """

    active = None  # the recorder of the forward that runs
    _should_skip_dynamo = classmethod(lambda cls: False)  # or its first use loads all of torch.compile, for a second

    def __init__(self, equal):
        super().__init__()
        self.equal = equal
        self.steps, self.constants = [], {}
        self.numbers, self.storages = {}, []  # number of a storage by its identity; all of them, so that all live
        self.unknown = set()  # storages on the CPU whose values depend on the inputs or on a kernel
        self.read = set()
        self.written = set()
        self.fixed = False
        self.names, self.calls = {}, {}  # global constants; {id of a launch: (kernel, args, kwargs)}, to compile it

    def layout(self, tensor, created=False):
        """The tensor as data. created: by a step, or an input; otherwise a new storage is a constant."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise RuntimeError("sparse and quantized tensors are not supported here")
        key, storage = identity(tensor), tensor.untyped_storage()
        if key not in self.numbers:
            self.numbers[key] = number = len(self.storages)
            self.storages.append(storage)
            if not created and key not in self.equal:
                self.constants[number] = storage.nbytes()
                if storage.device.type != "meta":
                    self.fixed |= not is_exact(tensor) and storage.nbytes() > tensor.element_size()
                    with _disable_current_modes():
                        self.constants[number] = torch.empty(0, dtype=torch.uint8).set_(storage.clone())
        return [self.numbers[key], str(tensor.dtype), [*tensor.shape], [*tensor.stride()], tensor.storage_offset()]

    def is_unknown(self, tensor) -> bool:
        return tensor.is_meta or identity(tensor) in self.unknown

    def note_read(self, name, tensor):
        """The host reads a tensor. What is computed from inputs is not known while recording."""
        if self.is_unknown(tensor):
            raise RuntimeError(f"forward reads computed values back to the host ({name}): not supported here")
        self.read.add(self.layout(tensor)[0])
        self.fixed |= not is_exact(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = PHYSICAL.get(func, func)
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if func.namespace not in ("aten", "prim", "prims"):
            raise RuntimeError(f"{func.name()} is an operator of your own: not supported here, call its function")
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE)
        if made_of_others and name not in WHOLE:
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        tensors = tensors_in([args, kwargs])
        to_cpu = name == "_to_copy" and kwargs.get("device") == torch.device("cpu") and self.is_unknown(args[0])
        # The values of a mask say how many values an index by it gives; numbers are as many as they are.
        by_numbers = name == "index" and not {torch.bool, torch.uint8} & {x.dtype for x in tensors_in(args[1])}
        if READ_VALUES & set(func.tags) and not by_numbers or to_cpu:
            for tensor in tensors:
                self.note_read(f"aten.{name}", tensor)
        arguments = [write_value(args, self.layout), write_value(kwargs, self.layout)]
        with torch.inference_mode(func not in PHYSICAL.values()), torch.no_grad():  # as if their results were views
            out = self.run(name, func, args, kwargs)
        results = tensors_in(out)
        new = any(identity(tensor) not in self.numbers or tensor.numel() == 0 for tensor in results)
        if func._schema.is_mutable and name != "detach_" or new:
            self.steps.append(["operator", f"{name}.{func._overloadname}", *arguments,
                               [self.layout(tensor, created=True) for tensor in results]])
            changed = [*results, *tensors] if func._schema.is_mutable else results  # or some of them
            written = set(map(identity, changed))
            self.written |= {self.numbers[key] for key in written}
            if any(map(self.is_unknown, tensors)):
                self.unknown |= written
        return out

    def run(self, name, func, args, kwargs):
        """What an operator returns: without values, unless all of its arguments have values.

        New tensors have values, too, so that a mask that only the first call makes is a constant in the others.
        """
        tensors = tensors_in([args, kwargs])
        if name in UNWRITTEN or not tensors and "device" in kwargs:
            out = func(*args, **{**kwargs, "device": "meta"})
            if name in UNWRITTEN or out.nbytes > SMALL:
                return out
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        originals = {}

        def without_values(tensor):
            double = tensor.to("meta")
            originals[id(double)] = tensor, double  # kept, so that nothing else gets its id
            return double

        args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
        out = func(*args, **kwargs)
        if name == "convolution":  # PyTorch leaves open how its result lies: as on a GPU, where cuDNN decides
            last = [kind for kind in map(suggest_memory_format, args[:2]) if kind != torch.contiguous_format]
            out = out.to(memory_format=last[0]) if last and out.dtype != torch.float64 else out
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), [tensor])[0], out)

    def record(self, model, inputs, named) -> dict:
        """One forward as a program. named: the model's parameters and buffers."""
        Recorder.active = self
        # In inference mode operators that are made of others are seen, too: see WHOLE.
        with torch.inference_mode(), PretendCuda(self), self:
            layouts = [self.layout(tensor, created=True) for tensor in tensors_in(inputs)]
            for tensor in named.values():
                if identity(tensor) in self.equal:
                    self.layout(tensor)
            output = write_value(model(*inputs), self.layout)
        if self.read & self.written & self.constants.keys():
            raise RuntimeError(KEEPS_STATE)
        state = {name: self.layout(tensor) for name, tensor in named.items() if identity(tensor) in self.numbers}
        return {"inputs": layouts, "steps": self.steps, "output": output, "state": state,
                "names": self.names, "fixed": self.fixed}


def record(model, inputs, entries):
    """Call a model's forward CALLS times. inputs: a function that makes them; entries: the reference's state.

    Returns the Recorder of the last call and its program. Raises what the forward raises, and RuntimeError where it
    reads computed values, or where the recorded calls are not equal.
    """
    named, equal = state_of(model), set()
    for name, tensor in named.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if whole and entries.get(name) == [str(tensor.dtype), list(tensor.shape), zlib.crc32(dense(tensor).numpy())]:
            equal.add(identity(tensor))
    programs = []
    for _ in range(CALLS):
        recorder = Recorder(equal)
        program = recorder.record(model, inputs(), named)
        contents = {number: zlib.crc32(torch.as_tensor(value).numpy()) for number, value in recorder.constants.items()
                    if number not in recorder.written}
        programs.append(repr((program, contents)))
    if programs[-1] != programs[-2]:
        raise RuntimeError(KEEPS_STATE)
    return recorder, program


# ---------------------------------------------------------------------------------------------------------------------
# A GPU that is not there


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run without one. "cuda" means where a call's first tensor is, or else the CPU.

    Within a forward all tensors say that they are on a GPU. In a constructor (recorder: None), whose parameters go to
    the GPU afterwards, they say where they are.
    """

    def __init__(self, recorder=None):
        super().__init__()
        self.recorder, self.reads_parameters = recorder, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.recorder is not None and func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], with_values(args[1]), *args[2:])
        sources = tensors_in([args, kwargs])
        place = sources[0].untyped_storage().device if sources else torch.device("cpu")
        if name in TO_HOST and self.recorder is not None:
            self.recorder.note_read(name, sources[0])
        self.reads_parameters |= name in TO_HOST and sources[0].requires_grad
        args = args if func is torch.device else tuple(place if is_cuda(value) else value for value in args)
        if is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = place
        return func(*args, **kwargs)


def with_values(index):
    """An index whose lists are tensors on the CPU: PyTorch makes them where the indexed tensor is, without values."""
    if isinstance(index, tuple):
        return tuple(map(with_values, index))
    return torch.as_tensor(index) if hasattr(index, "__len__") and not tensors_in(index) else index


def is_cuda(value) -> bool:
    return isinstance(value, (str, torch.device)) and "cuda" in str(value)


def pretend_gpu(properties):
    """Let PyTorch and Triton speak of a GPU in a process that has none. properties: of the GPU, by PyTorch's names.

    It changes this process for good: Triton's kernels can be recorded and compiled, but not run.
    """
    found = types.SimpleNamespace(**properties)
    anything = MagicMock(cuda_stream=0)  # streams, events, contexts: their methods do nothing
    names = {"is_available is_bf16_supported": True, "device_count": 1, "current_device memory_allocated": 0,
             "synchronize set_device empty_cache": None, "get_device_properties": found, "get_device_name": found.name,
             "get_device_capability": (found.major, found.minor),
             "Stream Event current_stream default_stream stream device device_of _DeviceGuard": anything}
    for together, value in names.items():
        for name in together.split():
            setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.set_default_device = lambda device: None
    torch.library.wrap_triton = lambda kernel: kernel  # it matters to torch.compile only
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # what files that inductor wrote import
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda")
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    torch.Tensor.get_device = lambda tensor: 0
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.tensor = lambda data, device=None, **more: TENSOR(data, **more)  # with values, if PyTorch's functions call it
    torch.Tensor.new_tensor = lambda x, data, dtype=None, **_: TENSOR(data, dtype=dtype or x.dtype)
    jit.JITFunction.run, autotuner.Autotuner.run = launch, launch_tuned
    there = {"multiprocessor_count": found.multi_processor_count, "max_shared_mem": SHARED_MEMORY, "warpSize": 32,
             "max_num_regs": 65536}
    driver.set_active(types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: there), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_target=lambda: GPUTarget("cuda", 10 * found.major + found.minor, 32)))


def launch(kernel, *args, grid, warmup, **kwargs):
    """Stands for JITFunction.run: records the launch. A kernel may write all memory that it is given."""
    recorder = Recorder.active
    if warmup or recorder is None:
        raise RuntimeError("kernels can only be launched, and only within forward: warmup is not supported here")
    options = {key: value for key, value in kwargs.items() if key not in kernel.signature.parameters}
    bound = kernel.signature.bind(*args, **{key: kwargs[key] for key in kwargs.keys() - options.keys()})
    bound.apply_defaults()
    grid = torch.Size(grid({**bound.arguments, **options}) if callable(grid) else grid)
    for name, value in kernel.fn.__globals__.items():
        if isinstance(plain(value), (bool, int, float, str, tl.dtype)) and not name.startswith("__"):
            recorder.names[name] = write_value(value, recorder.layout)
    recorder.unknown.update(map(identity, tensors_in(bound.arguments)))
    arguments = {name: write_value(plain(value), recorder.layout) for name, value in bound.arguments.items()}
    step = {"kernel": kernel.fn.__name__, "grid": [*grid, *[1] * (3 - len(grid))],
            "options": options, "arguments": arguments, "binary": None}
    recorder.calls[id(step)] = kernel, args, kwargs
    recorder.steps.append(["launch", step])


def launch_tuned(tuner, *args, **kwargs):
    """Stands for Autotuner.run: records a launch with each configuration. The judge takes the quickest."""
    launches, before = [], list(Recorder.active.steps)
    tuner.nargs = dict(zip(tuner.arg_names, args))
    configs = tuner.prune_configs(kwargs)[:MOST_CONFIGS]
    Recorder.active.steps = before  # what pruning does happens once, not in every call
    for config in configs:
        if config.pre_hook is not None:
            raise RuntimeError("an autotuned configuration with a pre_hook is not supported here")
        tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        launches += launches_of(Recorder.active.steps.pop())
    Recorder.active.steps.append(["tuned", launches])


# ---------------------------------------------------------------------------------------------------------------------
# Compiling what was launched


def compile_all(recorder, text, clock) -> list:
    """Compile each kernel of a recorded forward, once for each specialisation. Returns the binaries; without GPU none.

    As with Triton, a configuration that does not compile is not tried, unless none is left.
    """
    compiled = {}  # {a kernel as Triton has compiled it: its number}
    for step in recorder.steps:
        good, failed = [], None
        for found in launches_of(step):
            kernel, args, kwargs = recorder.calls[id(found)]
            try:
                result = RUN(kernel, *args, grid=None, warmup=True, **kwargs)
                check_limits(result.metadata, found["grid"])
            except Exception as error:
                failed = compile_error(error, kernel, text)
                continue
            if clock == "measured":
                found["binary"] = compiled.setdefault(result, len(compiled))
            good.append(found)
        if failed is not None and not good:
            raise failed
        if step[0] == "tuned":
            step[1] = good
    return [binary(result.metadata, result.asm["cubin"], result.src.signature) for result in compiled]


def check_limits(metadata, grid):
    """Raise OutOfResources for a launch that no GPU takes."""
    for used, limit, what in ((metadata.shared, SHARED_MEMORY, "shared memory"), (metadata.num_warps, 32, "warps"),
                              (metadata.num_ctas, 8, "CTAs in a cluster"), (max(grid[1:]), 65_535, "grid in y or z")):
        if used > limit:
            raise triton.OutOfResources(used, limit, what)


def binary(metadata, cubin, signature) -> dict:
    """What the judge needs to launch a kernel."""
    return {"name": metadata.name, "shared": metadata.shared, "scratch": metadata.global_scratch_size,
            "num_warps": metadata.num_warps, "num_ctas": metadata.num_ctas,
            "cubin": torch.frombuffer(bytearray(cubin), dtype=torch.uint8),
            "signature": [[name, kind] for name, kind in signature.items() if kind != "constexpr"]}


def compile_error(error, kernel, text):
    """What compiling raised, as Failed, with the line of the candidate's text where that is known."""
    while hasattr(error.__cause__, "node"):  # an error in a called function is wrapped in its caller's
        error = error.__cause__
    line, source = kernel.fn.__code__.co_firstlineno, getattr(error, "src", None)
    if source and error.node is not None and source in text:
        line = text[:text.index(source)].count("\n") + error.node.lineno
    why = getattr(error, "error_message", None) or str(error).strip().split("\n")[-1]
    return Failed(f"{type(error).__name__}: {why}", "compile", line)


# ---------------------------------------------------------------------------------------------------------------------
# One candidate


def without_values(entry):
    """An input from the blueprint."""
    if "value" in entry:
        return entry["value"]
    return torch.empty_strided(entry["shape"], entry["stride"], dtype=TORCH_NAMES[entry["dtype"]], device="meta")


def answer(order) -> dict:
    """What the recorder says to an order."""
    text, blueprint = order["code"].removeprefix("\ufeff"), order["blueprint"]
    path, stage = os.path.abspath("candidate.py"), "parse"
    try:
        rules.static_check(text)
        stage = "compile"
        pretend_gpu(blueprint.get("gpu") or H200)
        with PretendCuda() as constructor:
            module = load_module(text, path)
            stage = "forward"
            seed_everything(blueprint["seed"])
            model = module.ModelNew(*blueprint["arguments"], **blueprint["keywords"])
        recorder, program = record(model, lambda: list(map(without_values, blueprint["inputs"])), blueprint["state"])
        program["fixed"] |= constructor.reads_parameters
        binaries = compile_all(recorder, text, order["clock"])
        return {"program": program, "constants": recorder.constants, "binaries": binaries}
    except BaseException as error:  # also SystemExit
        why, line = describe(error, path)
        if isinstance(error, Failed):
            stage, why, line = error.stage, str(error)[:300], error.line or line
        return {"failed": stage, "error": why, "line": line}


@triton.jit
def warm(x):
    pass


def warm_up():
    """Record and compile something: forks of this process find imported and loaded what that takes."""
    pretend_gpu(H200)
    record(torch.nn.Linear(1, 1), lambda: [torch.empty(1, 1, device="meta")], {})
    RUN(warm, 1.0, grid=None, warmup=True)
    Recorder.active = None


def main():
    sock, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if settings["clock"] == "modelled":
        CUDABackend.make_cubin = lambda *_: b""  # up to PTX: assembling takes a third of the time, and nobody runs it
    if serve_orders(sock, answer, settings, most=1):  # it may be the only one, which would have to wait
        warm_up()
        serve_orders(sock, answer, settings)


if __name__ == "__main__":
    main()
