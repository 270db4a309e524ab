"""Writes down what a forward does, as a program (program.py): operators and kernel launches, as data.

Nothing is computed from inputs here. They have no values (PyTorch's meta device); parameters and newly made tensors
do, and all tensors say that they are on a GPU. A forward is called three times: once to warm up, and twice to be
recorded; both programs must be equal.

Each tensor gets a number when it is first seen. One that no row has made is a constant: a parameter that equals the
reference's of the same name, or else bytes. Not supported: values that are read back, operators of one's own.
"""

import zlib

import torch
import triton.language as tl
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from judge.program import UNWRITTEN, Mode, copy_of, kind_of, numbers_in, raw, tensors_in, write
from judge.reference import CudaIsHere, fingerprint, state_of
from judge.trials import is_exact

MOST_CONFIGS = 16  # of an autotuned kernel
CALLS = 3  # forwards: a warm-up, and two that are recorded
WHOLE = set("batch_norm instance_norm dropout alpha_dropout feature_dropout scaled_dot_product_attention lstm gru "
            "rnn_tanh rnn_relu ctc_loss".split())  # operators that are recorded as one row
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
READ_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operators that read values
TO_HOST = set("cpu item tolist numpy __array__ __dlpack__ __reduce_ex__ __float__ __int__ __bool__".split())  # methods
SMALL = 1 << 26  # bytes: a larger tensor that a forward makes has no values while recording
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug"}

# ---------------------------------------------------------------------------------------------------------------------
# Tensors that say that they are on a GPU


class PretendCuda(CudaIsHere):
    """Lets code written for a GPU run without one. "cuda" means where a call's first tensor is, or else the CPU.

    Within a forward all tensors say that they are on a GPU. In a constructor (recorder: None), whose parameters go to
    the GPU afterwards, they say where they are.
    """

    def __init__(self, recorder=None):
        super().__init__()
        self.recorder = recorder
        self.reads_parameters = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.recorder is not None and func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func is torch.device:
            return func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], with_values(args[1]), *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cuda"
        sources = tensors_in([args, kwargs])
        if name in TO_HOST and self.recorder is not None:
            self.recorder.note_read(name, sources[0])
        self.reads_parameters |= name in TO_HOST and sources[0].requires_grad
        self.here = sources[0].untyped_storage().device if sources else "cpu"
        return super().__torch_function__(func, types, args, kwargs)


def with_values(index):
    """An index whose lists are tensors on the CPU: PyTorch makes them where the indexed tensor is, without values."""
    if isinstance(index, tuple):
        return tuple(map(with_values, index))
    return torch.as_tensor(index) if hasattr(index, "__len__") and not tensors_in(index) else index


# ---------------------------------------------------------------------------------------------------------------------
# Recording one forward


def identity(tensor) -> int:
    """A number for a tensor's storage, the same as long as the storage lives."""
    return tensor.untyped_storage()._cdata


class Recorder(Mode):
    """While active, writes each operator and each launch of a forward into `rows`.

    equal: {name: tensor} of the parameters and buffers that are as the reference's. room: bytes for constants.
    """

    active = None  # the recorder of the forward that runs

    def __init__(self, equal, room):
        super().__init__()
        self.rows, self.room = [], room
        self.numbers, self.first = {}, {}  # number of a tensor by its id; the first tensor of each storage
        self.tensors = []  # by their numbers; all are kept, so that no other gets the id of one
        self.constants, self.contents = {}, {}  # as in a program, and their bytes
        self.unknown = set()  # storages on the CPU whose values depend on the inputs or on a kernel
        self.written = set()  # storages that rows write to
        self.fixed = False
        self.calls = {}  # {id of a launch: (kernel, args, kwargs)}, to compile it
        self.state = {name: self.define(tensor) for name, tensor in equal.items()}

    def define(self, tensor) -> int:
        """A new number for a tensor."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise RuntimeError("sparse and quantized tensors are not supported here")
        number = self.numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.first.setdefault(identity(tensor), tensor)
        return number

    def number(self, tensor) -> int:
        """A tensor's number. One that no row has made is another view of known memory (x.data), or a constant."""
        if id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        base = self.first.get(identity(tensor))
        number = self.define(tensor)
        if base is None:
            self.add_constant(number, tensor)
        else:
            same = base if base.dtype == tensor.dtype else base.view(tensor.dtype)  # a row of its own
            kind = kind_of(tensor)
            arguments = write((same, *kind[1:], tensor.storage_offset()), self.number)
            self.rows.append(["operator", "as_strided.default", arguments, {"dict": []}, [[number, *kind]]])
        return number

    def add_constant(self, number, tensor):
        """Note what lies in a constant's memory. On the meta device it is not known."""
        storage = tensor.untyped_storage()
        self.constants[number] = [*kind_of(tensor), tensor.storage_offset(), storage.nbytes()]
        self.room -= storage.nbytes()
        if self.room < 0:
            raise RuntimeError("its constants take much more memory than the task's tensors: not supported here")
        if not tensor.is_meta:
            self.fixed |= not is_exact(tensor) and tensor.numel() > 1
            with _disable_current_modes():
                self.contents[number] = raw(tensor).clone()

    def is_unknown(self, tensor) -> bool:
        return tensor.is_meta or identity(tensor) in self.unknown

    def note_read(self, name, tensor):
        """The host reads a tensor. What is computed from inputs is not known while recording."""
        if self.is_unknown(tensor):
            raise RuntimeError(f"forward reads computed values back to the host ({name}): not supported here")
        self.number(tensor)
        self.fixed |= not is_exact(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
        arguments = [write(args, self.number), write(kwargs, self.number)]
        with torch.no_grad():
            out = self.run(name, func, args, kwargs)
        self.add_row(func, f"{name}.{func._overloadname}", arguments, tensors, tensors_in(out))
        return out

    def add_row(self, func, name, arguments, tensors, results):
        described = []
        for tensor in results:
            number = self.numbers[id(tensor)] if id(tensor) in self.numbers else self.define(tensor)
            described.append([number, *kind_of(tensor)])
        changed = [*results, *tensors] if func._schema.is_mutable else results  # or some of them
        new = [tensor for tensor in changed if func._schema.is_mutable or not func.is_view]
        self.written.update(map(identity, new))
        if any(map(self.is_unknown, tensors)):
            self.unknown.update(map(identity, new))
        if results or func._schema.is_mutable:
            self.rows.append(["operator", name, *arguments, described])

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
            numbers = [self.define(tensor) for tensor in tensors_in(inputs)]
            output = write(model(*inputs), self.number)
        used = {name: self.numbers[id(tensor)] for name, tensor in named.items() if id(tensor) in self.numbers}
        outputs = set(map(identity, (self.tensors[number] for number in numbers_in(output))))
        returned = [number for number in self.constants if identity(self.tensors[number]) in outputs]
        return {"inputs": numbers, "rows": self.rows, "output": output, "state": self.state, "named": used,
                "constants": self.constants, "returned": returned, "fixed": self.fixed}


def record(model, blueprint):
    """Call a model's forward CALLS times. blueprint: see Reference.blueprint.

    Returns the Recorder of the last call and its program. Raises what the forward raises, and RuntimeError where it
    reads computed values, or where the recorded calls are not equal.
    """
    named = state_of(model)
    equal = {}
    for name, tensor in named.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if whole and blueprint["state"].get(name) == fingerprint(tensor):
            equal[name] = tensor
    programs = []
    for _ in range(CALLS):
        recorder = Recorder(equal, blueprint["room"])
        program = recorder.record(model, copy_of(blueprint["inputs"]), named)
        contents = {number: zlib.crc32(value.numpy()) for number, value in recorder.contents.items()
                    if identity(recorder.tensors[number]) not in recorder.written}
        programs.append(repr((program, contents)))
    if programs[-1] != programs[-2]:
        raise RuntimeError("forward keeps state: from one call to the next it does something else, or counts")
    return recorder, program


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def launch(kernel, *args, grid, warmup, **kwargs):
    """Stands for JITFunction.run: records the launch. A kernel may write all memory that it is given."""
    recorder = Recorder.active
    if warmup or recorder is None:
        raise RuntimeError("kernels can only be launched, by kernel[grid](...) and within forward: there is no warmup "
                           "here")
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    options = {key: value for key, value in kwargs.items() if key not in kernel.signature.parameters}
    if unknown := sorted(set(options) - LAUNCH_OPTIONS):
        raise RuntimeError(f"{kernel.fn.__name__} has no argument or launch option {unknown[0]}")
    bound = kernel.signature.bind(*args, **{key: kwargs[key] for key in kwargs.keys() - options.keys()})
    bound.apply_defaults()
    grid = torch.Size(grid({**bound.arguments, **options}) if callable(grid) else grid)
    touched = [identity(tensor) for tensor in tensors_in(list(map(parts, bound.arguments.values())))]
    recorder.unknown.update(touched)
    recorder.written.update(touched)
    arguments = {name: argument(value, recorder.number) for name, value in bound.arguments.items()}
    row = {"kernel": kernel.fn.__name__, "grid": [*grid, *[1] * (3 - len(grid))], "arguments": arguments}
    recorder.calls[id(row)] = kernel, args, kwargs
    recorder.rows.append(["launch", row])


def parts(value):
    """A tensor descriptor that the host has made, as its tensor, shape and strides; anything else as it is."""
    value = value.value if isinstance(value, tl.constexpr) else value
    return (value.base, [*value.shape], [*value.strides]) if hasattr(value, "block_shape") else value


def argument(value, number):
    """JSON of a launch's argument. What is no tensor or number becomes part of the compiled kernel, so text will do."""
    try:
        return write(parts(value), number)
    except TypeError:
        return getattr(value, "__name__", str(value))


def launch_tuned(tuner, *args, **kwargs):
    """Stands for Autotuner.run: records a launch with each configuration. The judge takes the quickest."""
    recorder = Recorder.active
    alternatives = []
    rows = recorder.rows
    tuner.nargs = dict(zip(tuner.arg_names, args))
    recorder.rows = []
    configs = tuner.prune_configs(kwargs)[:MOST_CONFIGS]  # what pruning does happens once, not in every call
    for config in configs:
        recorder.rows = []
        chosen = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**tuner.nargs, **kwargs, **chosen})
        tuner.fn.run(*args, **kwargs, **chosen)
        alternatives.append(recorder.rows)
    recorder.rows = rows
    rows.append(["tuned", alternatives])
