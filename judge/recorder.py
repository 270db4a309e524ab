"""Runs a candidate's Python in a jail, and writes down what its forward does: operators and kernel launches, as data.

    python -m judge.recorder FD SETTINGS        a server: it forks one recorder for each order (processes.serve_orders)

Nothing is computed from inputs here. They have no values (PyTorch's meta device); parameters and newly made tensors
do, and everything pretends that there is a GPU (pretend.py). A forward is called three times: once to warm up, and
twice to be recorded; both programs must be equal. Then Triton compiles each kernel that was launched for the real GPU.
With a GPU the judge is given the machine code, without one the text of Triton's IR.

The format is in program.py. Each tensor gets a number when it is first seen. One that no row has made is a constant: a
parameter that equals the reference's of the same name, or else bytes.
Not supported: values that are read back, operators of one's own; with a GPU, tensor descriptors made by the host.
"""

import os
import pickle
import resource
import sys
import zlib

import torch
import triton
import triton.language as tl
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import autotuner, jit

from judge import rules
from judge.comparison import is_exact
from judge.pretend import H200, SHARED_MEMORY, PretendCuda, pretend_gpu
from judge.processes import begin_server, serve_orders
from judge.program import MOST_CONFIGS, TORCH_NAMES, UNWRITTEN, launches_in, numbers_in, packed, raw, tensors_in, write
from judge.reference import load_module, seed_everything, state_of
from judge.verdict import Failed, describe

COMPILE_SECONDS = 20  # of a CPU, for all kernels of a candidate
CALLS = 3  # forwards: a warm-up, and two that are recorded
KEEPS_STATE = "forward keeps state: from one call to the next it does something else, or counts"
WHOLE = set("batch_norm instance_norm dropout alpha_dropout feature_dropout scaled_dot_product_attention lstm gru "
            "rnn_tanh rnn_relu ctc_loss".split())  # operators that are recorded as one row
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
READ_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operators that read values
SMALL = 1 << 26  # bytes: a larger tensor that a forward makes has no values while recording
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug"}
RUN = jit.JITFunction.run  # another stands in its place


def identity(tensor) -> int:
    """A number for a tensor's storage, the same as long as the storage lives."""
    return tensor.untyped_storage()._cdata


# ---------------------------------------------------------------------------------------------------------------------
# Recording one forward


class Recorder(TorchDispatchMode):
    """While active, writes each operator and each launch of a forward into `rows`.

    equal: {name: tensor} of the parameters and buffers that are as the reference's. room: bytes for constants.
    """

    active = None  # the recorder of the forward that runs
    _should_skip_dynamo = classmethod(lambda cls: False)  # or its first use loads all of torch.compile, for a second

    def __init__(self, equal, room):
        super().__init__()
        self.rows, self.room = [], room
        self.numbers, self.first = {}, {}  # number of a tensor by its id; the first tensor of each storage
        self.tensors = []  # by their numbers; all are kept, so that no other gets the id of one
        self.constants, self.contents = {}, {}  # as in a program, and their bytes
        self.unknown = set()  # storages on the CPU whose values depend on the inputs or on a kernel
        self.read, self.written = set(), set()  # storages whose values the host reads, and that rows write to
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
            place = [[*tensor.shape], [*tensor.stride()], tensor.storage_offset()]
            self.rows.append(["operator", "as_strided.default", write((same, *place), self.number), {"dict": []},
                              [[number, str(tensor.dtype), *place[:2]]]])
        return number

    def add_constant(self, number, tensor):
        """Note what lies in a constant's memory. On the meta device it is not known."""
        storage = tensor.untyped_storage()
        self.constants[number] = [str(tensor.dtype), [*tensor.shape], [*tensor.stride()], tensor.storage_offset(),
                                  storage.nbytes()]
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
        self.read.add(identity(tensor))
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
            described.append([number, str(tensor.dtype), [*tensor.shape], [*tensor.stride()]])
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
        if {identity(self.tensors[number]) for number in self.constants} & self.read & self.written:
            raise RuntimeError(KEEPS_STATE)
        used = {name: self.numbers[id(tensor)] for name, tensor in named.items() if id(tensor) in self.numbers}
        outputs = set(map(identity, (self.tensors[number] for number in numbers_in(output))))
        returned = [number for number in self.constants if identity(self.tensors[number]) in outputs]
        return {"inputs": numbers, "rows": self.rows, "output": output, "state": self.state, "named": used,
                "constants": self.constants, "returned": returned, "fixed": self.fixed}


def record(model, inputs, blueprint):
    """Call a model's forward CALLS times. inputs: a function that makes them; blueprint: see Reference.blueprint.

    Returns the Recorder of the last call and its program. Raises what the forward raises, and RuntimeError where it
    reads computed values, or where the recorded calls are not equal.
    """
    named, equal = state_of(model), {}
    for name, tensor in named.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        values = [str(tensor.dtype), list(tensor.shape), zlib.crc32(raw(tensor).numpy())] if whole else None
        if whole and blueprint["state"].get(name) == values:
            equal[name] = tensor
    programs = []
    for _ in range(CALLS):
        recorder = Recorder(equal, blueprint["room"])
        program = recorder.record(model, inputs(), named)
        contents = {number: zlib.crc32(value.numpy()) for number, value in recorder.contents.items()
                    if identity(recorder.tensors[number]) not in recorder.written}
        programs.append(repr((program, contents)))
    if programs[-1] != programs[-2]:
        raise RuntimeError(KEEPS_STATE)
    return recorder, program


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def launch(kernel, *args, grid, warmup, **kwargs):
    """Stands for JITFunction.run: records the launch. A kernel may write all memory that it is given."""
    recorder = Recorder.active
    if warmup or recorder is None:
        raise RuntimeError("kernels can only be launched, and only within forward: warmup is not supported here")
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
    row = {"kernel": kernel.fn.__name__, "grid": [*grid, *[1] * (3 - len(grid))], "options": options,
           "arguments": arguments, "compiled": None}
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
    recorder, alternatives = Recorder.active, []
    rows = recorder.rows
    tuner.nargs = dict(zip(tuner.arg_names, args))
    recorder.rows = []
    configs = tuner.prune_configs(kwargs)[:MOST_CONFIGS]  # what pruning does happens once, not in every call
    choices = [config.all_kwargs() for config in configs]
    for config, chosen in zip(configs, choices):
        recorder.rows = []
        if config.pre_hook is not None:
            config.pre_hook({**tuner.nargs, **kwargs, **chosen})
        tuner.fn.run(*args, **kwargs, **chosen)
        alternatives.append([f"{tuner.base_fn.__name__}: {differences(chosen, choices)}"[:200], recorder.rows])
    recorder.rows = rows
    rows.append(["tuned", alternatives])


def differences(chosen, choices) -> str:
    """What of a configuration is different in others: "BLOCK=256, num_warps=4"."""
    named = []
    for key, value in chosen.items():
        if value is not None and any(other.get(key) != value for other in choices):
            named.append(f"{key}={value}")
    return ", ".join(named)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling what was launched


def compile_all(recorder, text, clock) -> list:
    """Compile each kernel of a recorded forward, once for each specialisation. Returns what the judge needs of each.

    As with Triton, a configuration that does not compile is not tried, unless none is left.
    """
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = int(used.ru_utime + used.ru_stime) + COMPILE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (min(most, hard), hard))  # see processes.watch
    compiled = {}  # {a kernel as Triton has compiled it: its number}
    for row in recorder.rows:
        alternatives = row[1] if row[0] == "tuned" else [["", [row]]]
        good, failed = [], None
        for label, rows in alternatives:
            try:
                for entry in launches_in(rows):
                    compile_launch(entry, recorder.calls[id(entry)], compiled, text)
                good.append([label, rows])
            except Failed as error:
                failed = error
        if failed and not good:
            raise failed
        if row[0] == "tuned":
            row[1] = good
    return [description(result, clock) for result in compiled]


def compile_launch(entry, call, compiled, text):
    """Compile the kernel of a launch, and keep those of its arguments that the compiled kernel takes. Raises Failed."""
    kernel, args, kwargs = call
    try:
        result = RUN(kernel, *args, grid=None, warmup=True, **kwargs)
        check_limits(result.metadata, entry["grid"])
    except Exception as error:
        raise compile_error(error, kernel, text) from None
    entry["compiled"] = compiled.setdefault(result, len(compiled))
    values = []
    for name, kind in result.src.signature.items():
        values += taken(kind, entry["arguments"][name])
    entry["arguments"] = values


def taken(kind, value) -> list:
    """The values of a parameter that a compiled kernel takes. kind: its type in the signature; a tuple has several."""
    if isinstance(kind, tuple):
        return sum(map(taken, kind, value["tuple"]), [])
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):  # the descriptor is followed by its shape and strides
        return [value, *value["tuple"][1], *value["tuple"][2]]
    return [value]


def check_limits(metadata, grid):
    """Raise OutOfResources for a launch that no GPU takes."""
    for used, limit, what in ((metadata.shared, SHARED_MEMORY, "shared memory"), (metadata.num_warps, 32, "warps"),
                              (metadata.num_ctas, 8, "CTAs in a cluster"), (max(grid[1:]), 65_535, "grid in y or z")):
        if used > limit:
            raise triton.OutOfResources(used, limit, what)


def kinds_of(signature) -> list:
    """The types of what a compiled kernel takes, in their order."""
    kinds = []
    for kind in signature:
        if isinstance(kind, tuple):
            kinds += kinds_of(kind)
        elif kind != "constexpr":
            kinds.append(kind)
    return kinds


def description(result, clock) -> dict:
    """What the judge needs to launch a kernel: with a GPU its machine code, without one the text of Triton's IR."""
    metadata = result.metadata
    if clock == "modelled":
        return {"name": metadata.name, "code": str(result.asm["ttir"]).encode()}
    return {"name": metadata.name, "shared": metadata.shared, "scratch": metadata.global_scratch_size,
            "num_warps": metadata.num_warps, "num_ctas": metadata.num_ctas, "code": result.asm["cubin"],
            "signature": kinds_of(result.src.signature.values())}


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


def answer(order) -> bytes:
    """The recording of a candidate. order: (its text, the blueprint, the clock), pickled by the trainer."""
    text, blueprint, clock = pickle.loads(order)
    text, blueprint = text.removeprefix("\ufeff"), pickle.loads(blueprint)
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
        recorder, program = record(model, lambda: list(map(without_values, blueprint["inputs"])), blueprint)
        program["fixed"] |= constructor.reads_parameters
        compiled = compile_all(recorder, text, clock)
        return packed({"program": program, "constants": recorder.contents, "compiled": compiled})
    except BaseException as error:  # also SystemExit
        why, line = describe(error, path)
        if isinstance(error, Failed):
            stage, why, line = error.stage, str(error)[:300], error.line or line
        return packed({"failed": stage, "error": why, "line": line})


@triton.jit
def warm(x):
    pass


def warm_up():
    """Record and compile something: forks of this process find imported and loaded what that takes."""
    pretend_gpu(H200)
    record(torch.nn.Linear(1, 1), lambda: [torch.empty(1, 1, device="meta")], {"state": {}, "room": 1 << 20})
    RUN(warm, 1.0, grid=None, warmup=True)
    Recorder.active = None


def main():
    connection, settings = begin_server(sys.argv)
    jit.JITFunction.run, autotuner.Autotuner.run = launch, launch_tuned
    if settings["clock"] == "modelled":
        CUDABackend.make_cubin = lambda *_: b""  # up to PTX: assembling takes a third of the time, and nobody runs it
    warm_up()
    serve_orders(connection, answer, settings)


if __name__ == "__main__":
    main()
