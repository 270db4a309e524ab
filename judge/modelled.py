"""The modelled clock: what a forward would cost on a GPU, worked out on a machine that has none.

The trick is that a candidate is never timed, and is not even run where it is counted. Its own process only *records*:
each ATen operator and each Triton launch of one forward becomes a step of a straight-line program, written down with
the shapes, strides and storages of its tensors (`Recorder`). A second process, which holds no line of the candidate's
host code, *replays* that program on inputs that the candidate has never seen (`Replay`), interpreting the Triton
kernels in numpy, and prices every step as it goes. So whatever the candidate's Python did (cache, patch, thread, read
a clock, look for the reference), only the recorded program can produce the output that is compared, and it is exactly
the work that is paid for. Nothing of the recording is believed: a forged program is just a program, replayed and
priced like any other.

One step costs

    launch overhead + max(bytes / bandwidth, FLOPs / peak, programs / rate of programs)
                      (bytes / bandwidth + FLOPs / peak for a kernel with tl.dot, which hardly overlaps them)

on a device that is one 256th of an H200 (problems on the CPU are 256 times smaller than on the GPU, see tasks.py, and
a launch keeps its full price, that of a kernel in a CUDA graph, as the measured clock times it: so launches, bytes and
FLOPs keep the proportions they have on the card). Parameters are not smaller here, so their bytes cost a 256th.

Modelled
    ATen operators     the kernels that CUDA really launches for them: views are free; a convolution pays its bias as a
                       second pass; batch and group norm read once for the statistics and once more to normalise;
                       logsumexp, mse_loss and the like are several kernels; everything else is one kernel that reads
                       its inputs and writes its outputs. Many of PyTorch's kernels take longer than that, and by how
                       much was measured on an H200, operator by operator, at these problems' sizes: see `slowdown`,
                       `product` and the factors in `operator_kernels`.
    Triton kernels     the 32-byte sectors that are really loaded and stored, lane by lane (masked lanes are free), as a
                       cache of the card's (scaled) L2 size would fetch them: a broadcast parameter is paid once, a
                       second sweep over a tensor only if the tensor has left the cache. FLOPs: what the card takes for
                       each element of an operation, 15 for an exp, 30 for an integer division (interpreter.COST); 2MNK
                       for tl.dot, at a rate that depends on its input precision, on which dimension of its right
                       operand has its neighbours in memory, and on whether rows are whole multiples of 16 elements.
                       Programs: to start and end one takes the card 0.6 ns, so that one for every short row is slow.
Not modelled: occupancy, latency, bank conflicts, the tail of a grid that is too small for the card, small tiles of
tl.dot, parameters that are read again and again, atomics beyond their bytes, the host, several streams.
Kernels that are slow for these reasons look better here than they are; those that divide by a constant, which the
compiler turns into a multiplication, look worse. results/README.md compares modelled with measured times.

Replaying is as strict as a GPU: every kernel must first compile for one, an access outside every tensor is an error,
and memory from `torch.empty` is poisoned (interpreter.py is the interpreter).
"""

import hashlib
import inspect
import math
import re

import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from triton.runtime import autotuner, jit

from judge import compiler, interpreter
from judge.compiler import KernelError
from judge.processes import TORCH_NAMES, decode, encode, strided
from tasks import GPU_BATCH_FACTOR

# The device: an H200 (measured copy bandwidth and fp32 rate) divided by the factor by which CPU problems are smaller.
LAUNCH_MS = 0.002
BANDWIDTH = 4.2e12 / GPU_BATCH_FACTOR / 1e3  # bytes per millisecond
CACHE_SECTORS = int(4 * 50e6 / GPU_BATCH_FACTOR / 32)  # four times its share: neighbours on a GPU load things together
PEAK = 60e12 / GPU_BATCH_FACTOR / 1e3  # fp32 FLOPs per millisecond
PROGRAMS = 1.6e9 / GPU_BATCH_FACTOR / 1e3  # Triton programs per millisecond, as measured with kernels of tiny programs


def milliseconds(moved, flops=0):
    """The roofline price of one fp32 kernel that moves `moved` bytes."""
    return LAUNCH_MS + max(moved / BANDWIDTH, flops / PEAK)


# ---------------------------------------------------------------------------------------------------------------------
# Pricing ATen operators

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor", "set_", "resize_",
        "_local_scalar_dense", "sym_size", "lift_fresh"}
WRITE_ONLY = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_", "random_", "fill", "zeros_like",
              "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}
GATHERS = {"embedding", "index_select", "gather", "index", "take"}  # read as much of the table as they write
REFUSED = {"from_file", "set_", "resize_", "_resize_output_"}  # in a program: they reach outside of its tensors
CPU_ONLY = ("mkldnn", "fbgemm", "nnpack", "quantized", "slow_conv")  # what no GPU has cannot be priced for one
LOSSES = {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"}
REDUCTIONS = {"sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "var", "std",
              "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "nansum", "aminmax", "median",
              "nanmedian", "kthvalue", "mode", "count_nonzero"}
# More work than their bytes show. What is here has no price, so a candidate may call it only where the reference does.
UNPRICED = re.compile(r"_*(linalg_(?!vector_norm)|fft|trilinear|euclidean_dist|[cp]dist|int_mm|grouped_mm|scaled_mm|"
                      r"scaled_grouped|weight_int|native_multi_head|transformer|matrix_exp|cholesky|geqrf|orgqr|ormqr|"
                      r"lu_|triangular_solve|lstm|gru|rnn|thnn|fused_dropout|ctc_loss)")


def size_of(tensor, parameters=()):
    """Bytes of memory behind a tensor; dimensions that are expanded (stride 0) count once.

    parameters: addresses of storages that have the same size on a GPU, where all others are GPU_BATCH_FACTOR times
    larger; so their bytes count that much less.
    """
    if tensor.numel() == 0:
        return 0
    size = math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride) * tensor.element_size()
    return size / GPU_BATCH_FACTOR if tensor.untyped_storage().data_ptr() in parameters else size


def tensors_in(tree):
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


# PyTorch's own kernels take longer than their bytes and FLOPs. By how much was measured on an H200 by
# results/operators.py. A price is bytes and FLOPs at full rate, so what takes longer counts as more bytes. What matters
# beside the fit: the same work must not be cheaper under another operator's name.


def slowdown(name, func, args, sources, results):
    """How many times longer than its bytes take a reduction or an element-wise kernel runs."""
    if not sources or not results:
        return 1.0
    x, result = sources[0], results[0]
    if name in REDUCTIONS and result.numel() < x.numel():
        dims = next((arg for arg in args[2 if "norm" in name else 1:] if isinstance(arg, (int, list))), None)
        dims = range(x.dim()) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
        index = 1.6 if name in ("max", "min", "argmax", "argmin") and dims != range(x.dim()) else 1.0  # looks for where
        if result.numel() == 1:
            return 1.6 * index
        strides = {dim: stride for dim, (n, stride) in enumerate(zip(x.shape, x.stride())) if n > 1}
        rows = min(strides, key=strides.get) in [dim % x.dim() for dim in dims]  # of neighbours: short ones are slow
        return (1 + 13 / (x.numel() / result.numel()) ** 0.5 if rows else 1.2) * index
    if torch.Tag.pointwise in func.tags or name in ("copy_", "addr") or name.endswith("_copy") or "_foreach" in name:
        layout = [[(n, stride) for n, stride in zip(t.shape, t.stride()) if n > 1] for t in [*sources, result]]
        if any(one != layout[-1] for one in layout):
            return 1.5  # broadcasting and strides: every element's address is computed, and nothing vectorised
    return 1.0


def product(moved, flops):
    """(bytes, FLOPs) of a matrix product: at these sizes cuBLAS hardly overlaps loading and multiplying."""
    return 1.3 * (moved + flops / PEAK * BANDWIDTH), flops


def convolution(moved, flops, weight, groups, transposed):
    """(bytes, FLOPs) of a convolution: cuDNN multiplies tiles of 8 input by 32 output channels, filled or not.

    At least one group's tiles are charged in full: otherwise a convolution would be cheaper split into groups.
    """
    outer, inner = weight.shape[:2]
    inputs, outputs = (outer // groups, inner) if transposed else (inner, outer // groups)
    tiles = (-(-inputs // 8) * 8 / inputs) * (-(-outputs // 32) * 32 / outputs)
    time = 2.5 * moved + 1.25 * max(flops, flops / groups * tiles) / PEAK * BANDWIDTH
    return time * (1.5 if transposed else 1.0), flops


def by_rows(x, out, rows):
    """Bytes of a norm that gives each row of its input to a group of threads: every row costs something."""
    return 1.2 * (x + out) + 5000 * rows


def two_passes(x, out, rows, factor):
    """(bytes), (bytes): statistics, then normalising; in sum no fewer than those of a norm of the same rows."""
    more = max(factor, by_rows(x, out, rows) / max(2 * x + out, 1))
    return (more * x,), (more * (x + out),)


def in_training(func, args, kwargs):
    """Does this batch norm compute its statistics?"""
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    return given.get("training", not func._schema.name.endswith(("no_training", "no_update")))


def operator_kernels(func, args, kwargs, out, parameters=()):
    """The CUDA kernels of one ATen call, as [(bytes, FLOPs)]; empty for views and other free calls.

    parameters: see `size_of`.
    """
    name = func._schema.name.split("::")[1]
    sources = tensors_in([args, {key: value for key, value in kwargs.items() if key != "out"}])
    results = tensors_in([out, kwargs.get("out")])
    memory = {tensor.untyped_storage().data_ptr() for tensor in sources}
    if name in FREE or not func._schema.is_mutable and results and all(
            r.numel() == 0 or r.untyped_storage().data_ptr() in memory for r in results):
        return []
    if name in WRITE_ONLY:
        sources = sources[1:]
    written = sum({id(t): size_of(t) for t in results}.values())
    sizes = [size_of(t, parameters) for t in sources]
    read = min(written, sizes[0]) + sum(sizes[1:]) if name in GATHERS else \
        sum({id(t): size for t, size in zip(sources, sizes)}.values())
    x = sizes[0] if sources else 0
    result = results[0] if results else None
    elements = max([t.numel() for t in sources + results], default=0)

    def kernels(*passes):
        return [(work + (0,))[:2] for work in passes]

    if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation"):
        return kernels(product(read + written, 2 * result.numel() * sources[-2].shape[-1]))
    if name == "addbmm":
        return kernels(product(read + written, 2 * sources[-2].numel() * sources[-1].shape[-1]))
    if "conv" in name and len(sources) > 1:
        weight, transposed = sources[1], len(args) > 6 and args[6] is True
        groups = args[8] if len(args) > 8 and isinstance(args[8], int) else 1
        outputs = sources[0] if transposed else result  # a transposed convolution does its multiplications per input
        bias = kernels((1.5 * 2 * written,)) if len(sources) > 2 else []
        flops = 2 * outputs.numel() * weight[0].numel()
        return kernels(convolution(read + written, flops, weight, groups, transposed)) + bias
    if "batch_norm" in name:
        if in_training(func, args, kwargs):
            batch, channels = sources[0].shape[:2]  # a batch of one is an instance norm's, whose channels are many
            return kernels(*two_passes(x, size_of(result), channels if batch == 1 else 0, 3))
        return kernels((x + size_of(result),))
    if name == "native_group_norm":
        return kernels((0,), *two_passes(x, size_of(result), args[3] * args[6], 2.2))
    if name == "logsumexp":  # amax, subtract, exp, sum and four launches on small tensors
        slow = slowdown(name, func, args, sources, results)
        return kernels((slow * x,), (1.5 * 2 * x,), (2 * x,), (slow * x,), (0,), (0,), (0,), (0,))
    if name in LOSSES and result.numel() == 1 and elements > 1:
        return kernels((read + x,), (x,))
    if name == "binary_cross_entropy_with_logits":
        return kernels((2 * x,), (2 * x,), (3 * x,), (3 * x,)) + (kernels((x,)) if result.numel() == 1 else [])
    if name == "constant_pad_nd":
        return kernels((written,), (2 * x,))
    if name in ("sort", "argsort", "msort"):
        return kernels(*[(2 * written,)] * 4)
    if name == "topk":
        return kernels((x,), (x,), (x + written,))
    if name == "log_sigmoid_forward":
        return kernels((read + size_of(result), elements))
    if name == "native_layer_norm":
        return kernels((by_rows(read, size_of(result), elements // max(math.prod(args[1]), 1)), elements))
    if name in ("cumsum", "cumprod", "logcumsumexp"):
        return kernels((2.3 * (read + written), elements))
    if "_pool" in name:
        return kernels(((10 if "pool3d" in name else 2.3) * (read + written), elements))
    if name.startswith("_scaled_dot_product"):
        query, key = sources[:2]
        heads = math.prod(query.shape[:-2])
        return kernels((read + size_of(result), 4 * heads * query.shape[-2] * key.shape[-2] * query.shape[-1]))
    if name == "mkldnn_rnn_layer":  # cuDNN: one matmul for all inputs, then two kernels for each time step
        weights, steps = sum(sizes[1:5]), max(sources[0].shape[0], 1)
        flops = 2 * sources[0].shape[1] * sum(t.numel() for t in sources[1:3])
        return kernels((x + weights, flops), *[(weights, flops), (0,)] * steps)
    return kernels((slowdown(name, func, args, sources, results) * (read + written), elements))


class Mode(TorchDispatchMode):
    """A dispatch mode that torch.compile is not told to leave alone: for that PyTorch imports it, which takes a second.
    """

    @classmethod
    def _should_skip_dynamo(cls):  # where PyTorch does not ask (this is to be temporary), the second comes back
        return False


class Clock(Mode):
    """While active, prices every ATen call: `events` collects [milliseconds, label, own kernel?], `flops` the rest.

    parameters: see `size_of`.
    """

    def __init__(self, parameters=()):
        super().__init__()
        self.events, self.flops, self.parameters = [], 0, parameters

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for moved, flops in operator_kernels(func, args, kwargs or {}, out, self.parameters):
            self.events.append([milliseconds(moved, flops), func._schema.name.split("::")[1], False])
            self.flops += flops
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Triton's own values in programs and messages

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
    """The inverse; `kernels` maps names to functions."""
    def other(kind, content):
        if kind == "constexpr":
            return tl.constexpr(read_value(content, tensor, kernels))
        return {"triton": TRITON_TYPES, "kernel": kernels}[kind][content]
    return decode(value, tensor, other)


# ---------------------------------------------------------------------------------------------------------------------
# Recording, in the candidate's process

HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}


class Recorder(Mode):
    """While active, writes each ATen call and each Triton launch into `steps`. Kernels are recorded but not run.

    Tensors are written as [storage, dtype, shape, strides, offset] with storages numbered in order of appearance, so
    views need no step of their own. A storage that no step created (a parameter, a table) is kept in `constants`.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.constants, self.numbers, self.kept = [], {}, {}, []
        self.derived = set()  # storages that depend on the inputs or on a kernel, hence unknown while recording
        self.names = {}  # global constants that the launched kernels may refer to

    def reference(self, tensor, created=False):
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self.numbers or storage.nbytes() == 0:
            self.numbers[pointer] = number = len(self.kept)
            self.kept.append(storage)  # alive until the end: no address is used twice
            if not created:
                with _disable_current_modes():
                    self.constants[number] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        return [self.numbers[pointer], str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                tensor.storage_offset()]

    def inputs(self, tensors):
        """Number the inputs' storages first. Returns their references."""
        references = [self.reference(tensor, created=True) for tensor in tensors]
        self.derived.update(reference[0] for reference in references)
        return references

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        arguments = [write_value(args, self.reference), write_value(kwargs, self.reference)]
        touched = {self.reference(tensor)[0] for tensor in tensors_in([args, kwargs])}
        if name in HOST_READS and touched & self.derived:
            raise RuntimeError(f"forward reads computed values back to the host (aten.{name}): not supported here")
        out = func(*args, **kwargs)
        results = tensors_in(out)
        if name in FREE:
            for tensor in results:
                if tensor.untyped_storage().data_ptr() not in self.numbers:
                    tensor.zero_()  # kernels do not run here: what they would write must at least be a valid index
        fresh = any(t.untyped_storage().data_ptr() not in self.numbers or t.numel() == 0 for t in results)
        if fresh or func._schema.is_mutable:
            self.steps.append(["operator", f"{name}.{func._overloadname}", *arguments,
                               [self.reference(tensor, created=True) for tensor in results]])
            if touched & self.derived or name in FREE:
                self.derived.update(self.reference(tensor)[0] for tensor in results)
        elif name == "lift_fresh":
            self.steps.append(["upload", size_of(results[0])])
        return out

    def launch(self, kernel, args, kwargs, grid):
        """What `kernel[grid](*args, **kwargs)` does while recording."""
        parameters = inspect.signature(kernel.fn).parameters
        options = {key: value for key, value in kwargs.items() if key not in parameters}
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in parameters})
        bound.apply_defaults()
        grid = grid({**bound.arguments, **options}) if callable(grid) else grid
        grid = [int(size) for size in ((grid,) if isinstance(grid, int) else grid)]
        arguments = {key: write_value(value.value if isinstance(value, tl.constexpr) else value, self.reference)
                     for key, value in bound.arguments.items()}
        self.derived.update(self.reference(tensor)[0] for tensor in tensors_in(list(bound.arguments.values())))
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, (bool, int, float, str, tl.constexpr, tl.dtype)) and not name.startswith("__"):
                self.names[name] = write_value(value, self.reference)
        self.steps.append(["launch", kernel.fn.__name__, grid + [1] * (3 - len(grid)), arguments,
                           {key: write_value(value, self.reference) for key, value in options.items()}])


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run where there is none: device="cuda" means the CPU, `.cuda()` does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") in ("cuda", "to"):
            if func.__name__ == "cuda":
                return args[0]
            args = tuple("cpu" if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
        return func(*args, **kwargs)


def record(model, inputs):
    """Run one forward of the candidate's model and return (program, constants); called in the candidate's process.

    program: {"inputs", "steps", "output", "names", "state"}; constants: {storage number: its bytes as a uint8 tensor}.
    """
    recorder = Recorder()

    def run(kernel, *args, grid, warmup, **kwargs):
        if not warmup:
            recorder.launch(kernel, args, kwargs, grid)

    def tuned(tuner, *args, **kwargs):  # there is nothing to measure: the first configuration stands for all
        config = tuner.configs[0]
        named = {**dict(zip(tuner.arg_names, args)), **kwargs, **config.all_kwargs()}
        for hook in (config.pre_hook, tuner.pre_hook):
            if hook is not None:
                hook(named)
        return tuner.fn.run(*args, **kwargs, **config.all_kwargs())

    jit.JITFunction.run, autotuner.Autotuner.run = run, tuned
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    torch.cuda.synchronize = lambda *_: None
    with torch.no_grad(), PretendCuda(), recorder:
        references = recorder.inputs(tensors_in(list(inputs)))
        state = {name: recorder.reference(tensor) for name, tensor in
                 [*model.named_parameters(), *model.named_buffers()]}
        out = model(*inputs)
        output = write_value(out, recorder.reference)
    program = {"inputs": references, "steps": recorder.steps, "output": output, "names": recorder.names, "state": state}
    return program, recorder.constants


# ---------------------------------------------------------------------------------------------------------------------
# Replaying, in a process of its own


class Replay:
    """Executes a recorded program on given inputs. Raises KernelError, or RuntimeError for a step that fails."""

    def __init__(self, code, program, constants, known=()):
        """known: keys of kernels that need not be compiled again, because they have been."""
        self.program, self.constants = program, constants
        names = {name: read_value(value, None) for name, value in program["names"].items()}
        self.kernels, texts = compiler.build(code, names)
        self.compiled = set()  # what has been compiled here
        for step in program["steps"]:
            if step[0] == "launch":
                if step[1] not in self.kernels:
                    raise KernelError(f"{step[1]} is not a @triton.jit function at the top level of the file")
                types = [(k, v["tensor"][1] if isinstance(v, dict) and "tensor" in v else v)
                         for k, v in step[3].items()]
                key = hashlib.sha256(repr((texts[step[1]], types, step[4])).encode()).hexdigest()
                if key not in known and key not in self.compiled:
                    self.compiled.add(key)
                    arguments = self.arguments(
                        step, lambda reference: torch.empty(0, dtype=TORCH_NAMES[reference[1]], device="meta"))
                    compiler.compile_kernel(self.kernels[step[1]], arguments,
                                       {k: read_value(v, None) for k, v in step[4].items()})
        self.interpreter = interpreter.Interpreter(self.kernels)

    def arguments(self, step, tensor):
        """{parameter: value} of a recorded launch."""
        functions = self.interpreter.functions if hasattr(self, "interpreter") else self.kernels
        arguments = {key: read_value(value, tensor, functions) for key, value in step[3].items()}
        missing = sorted(set(self.kernels[step[1]].arg_names) - set(arguments))
        if missing:
            raise KernelError(f"{step[1]} is launched without its argument {missing[0]}", stage="launch")
        return arguments

    def run(self, inputs, seed, constants=None, price=False, mute=(), parameters=()):
        """One forward. Returns (output tree, events, live): live marks the events whose results reach the output.

        inputs: tensors in the order of the recording. With `price`, events are [milliseconds, label, own]. Kernels
        named in `mute` are skipped, and memory starts as finite noise: an output that is still right never needed
        them. parameters: the numbers of the constants that are priced as such.
        """
        self.storages, self.mute = {}, mute
        for reference, tensor in zip(self.program["inputs"], inputs, strict=True):
            if [str(tensor.dtype), list(tensor.shape), list(tensor.stride())] != reference[1:4]:
                raise RuntimeError("the shapes of the inputs change from one call to the next")
            self.storages[reference[0]] = tensor.untyped_storage()
        for number, data in {**self.constants, **(constants or {})}.items():
            self.storages[int(number)] = data.clone().untyped_storage()
        self.parameters = {self.storages[int(number)].data_ptr() for number in parameters}
        events, flow = [], []  # flow: (event indices, storages read, storages written) of every step
        torch.manual_seed(seed)
        with torch.no_grad():
            for step in self.program["steps"]:
                clock = Clock(self.parameters)
                if step[0] == "operator":
                    reads, writes = self.operator(step, clock if price else None)
                elif step[0] == "launch" and step[1] in mute:
                    continue
                elif step[0] == "launch":
                    reads, writes = self.launch(step, clock, price)
                else:
                    clock.events.append([milliseconds(0), "upload", False])
                    reads, writes = set(), set()
                self.parameters -= writes  # what is written may be as large as the batch
                flow.append((range(len(events), len(events) + len(clock.events)), reads, writes))
                events += clock.events
            output = read_value(self.program["output"], self.tensor)
        needed = {t.untyped_storage().data_ptr() for t in tensors_in(output)}
        live = [False] * len(events)
        for indices, reads, writes in reversed(flow):
            if writes & needed:
                needed |= reads
                for index in indices:
                    live[index] = True
        return output, events, live

    def tensor(self, reference):
        """The tensor that a recorded reference names. Raises ValueError if it does not fit its storage."""
        number, dtype, shape, strides, offset = reference
        raw = torch.empty(0, dtype=torch.uint8).set_(self.storages[number])
        return strided(raw[offset * TORCH_NAMES[dtype].itemsize:], TORCH_NAMES[dtype], shape, strides)

    def operator(self, step, clock):
        _, name, args, kwargs, outs = step
        base, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, base), overload)
        args, kwargs = read_value(args, self.tensor), read_value(kwargs, self.tensor)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if base in REFUSED or base != "mkldnn_rnn_layer" and base.lstrip("_").startswith(CPU_ONLY):
            raise RuntimeError(f"aten.{base} is not supported here")
        if func._schema.is_mutable and not func._schema.returns:  # what it writes would be nobody's result
            raise RuntimeError(f"aten.{base} in place is not supported here")
        if clock is None:
            out = func(*args, **kwargs)
        else:
            with clock:
                out = func(*args, **kwargs)
        results = tensors_in(out)
        for reference, tensor in zip(outs, results, strict=True):
            if reference[0] not in self.storages:
                if list(tensor.shape) != reference[2] or list(tensor.stride()) != reference[3]:
                    raise RuntimeError(f"aten.{base} gives another shape than it did while recording")
                self.storages[reference[0]] = tensor.untyped_storage()
        if base in FREE:
            self.poison(results)
        reads = {t.untyped_storage().data_ptr() for t in tensors_in([args, kwargs])}
        changed = [value for argument, value in zip(func._schema.arguments, args)
                   if argument.alias_info is not None and argument.alias_info.is_write]
        writes = {t.untyped_storage().data_ptr() for t in tensors_in([results, changed])}
        return reads, writes

    def poison(self, tensors):
        """What uninitialised memory holds: NaN (finite noise while kernels are muted): it cannot pass for a result."""
        for tensor in tensors:
            if tensor.is_floating_point():
                # (not normal_(): drawn from the same seed as an input, that could be the input itself)
                tensor.exponential_() if self.mute else tensor.fill_(float("nan"))
            else:
                tensor.fill_(0 if self.mute or tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)

    def launch(self, step, clock, price):
        _, name, grid, _, _ = step
        arguments = self.arguments(step, self.tensor)
        memory = interpreter.Memory(self.storages.values(), CACHE_SECTORS, price, self.parameters, 1 / GPU_BATCH_FACTOR)
        self.interpreter.launch(name, grid, arguments, memory)
        if price:
            moving, working = memory.bytes / BANDWIDTH, memory.work / PEAK
            busy = moving + working if memory.multiplies else max(moving, working)
            clock.events.append([LAUNCH_MS + max(busy, math.prod(grid) / PROGRAMS), name, True])
        return {t.untyped_storage().data_ptr() for t in tensors_in(list(arguments.values()))}, memory.written
