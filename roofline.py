"""The modelled clock: what a forward would cost on a GPU, worked out on a machine that has none.

The trick is that a candidate is never timed, and is not even run where it is counted. Its own process only *records*: each
ATen operator and each Triton launch of one forward becomes a step of a straight-line program, written down with the
shapes, strides and storages of its tensors (`Recorder`). A second process, which holds no line of the candidate's host
code, *replays* that program on inputs that the candidate has never seen (`Replay`), interpreting the Triton kernels in
numpy, and prices every step as it goes. So whatever the candidate's Python did (cache, patch, thread, read a clock, look
for the reference), only the recorded program can produce the output that is compared, and it is exactly the work that
is paid for. Nothing of the recording is believed: a forged program is just a program, replayed and priced like any other.

One step costs

    launch overhead + max(bytes / bandwidth, FLOPs / peak)

on a device that is one 256th of an H200 (problems on the CPU are 256 times smaller than on the GPU, see tasks.py, and
the launch overhead keeps its full price, so that launches, bytes and FLOPs keep the proportions they have on the card).

Modelled
    ATen operators     the kernels that CUDA really launches for them: views are free; a convolution pays its bias as a
                       second pass; batch and group norm read once for the statistics and once more to normalise;
                       logsumexp, mse_loss and the like are several kernels; everything else is one kernel that reads its
                       inputs and writes its outputs.
    Triton kernels     the 32-byte sectors that are really loaded and stored, lane by lane (masked lanes are free), as a
                       cache of the card's (scaled) L2 size would fetch them: a broadcast parameter is paid once, a second
                       sweep over a tensor only if the tensor has left the cache. FLOPs: 2MNK for tl.dot at the rate of
                       its input precision, one for each element of any other arithmetic.
Not modelled: occupancy, latency, bank conflicts, the tail of a grid that is too small for the card, the cost of special
functions and atomics beyond their bytes, the host, several streams. Kernels that are slow for these reasons look better
here than they are.

The interpreter computes as the hardware does where it matters for correctness: an fp32 `tl.dot` rounds its operands to
TF32 unless told otherwise (`input_precision="ieee"` or "tf32x3"), memory from `torch.empty` is poisoned, an access
outside every tensor is an error, and each kernel must first compile to PTX for sm_90 (triton needs no GPU for that).
"""

import ast
import inspect
import linecache
import math
import re
import types

import numpy as np
import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from triton.runtime import autotuner, interpreter, jit

from jail import TORCH_NAMES, decode, encode, strided
from tasks import GPU_BATCH_FACTOR

# The device: an H200 (measured copy bandwidth and fp32 rate) divided by the factor by which CPU problems are smaller.
LAUNCH_MS = 0.005
BANDWIDTH = 4.2e12 / GPU_BATCH_FACTOR / 1e3  # bytes per millisecond
CACHE_SECTORS = int(50e6 / GPU_BATCH_FACTOR / 32)
SECTOR = 5  # log2 of the 32 bytes in which memory is fetched
PEAK = {name: rate / GPU_BATCH_FACTOR / 1e3 for name, rate in {  # FLOPs per millisecond
    "fp32": 60e12, "tf32x3": 80e12, "tf32": 250e12, "half": 600e12}.items()}


class KernelError(Exception):
    """A kernel that a GPU would refuse: `line` is the candidate's line, where known, and `stage` is compile or launch."""

    def __init__(self, message, line=None, stage="compile"):
        super().__init__(message)
        self.line, self.stage = line, stage


def milliseconds(moved, flops=0, rate="fp32"):
    """The roofline price of one kernel that moves `moved` bytes."""
    return LAUNCH_MS + max(moved / BANDWIDTH, flops / PEAK[rate])


# ---------------------------------------------------------------------------------------------------------------------
# Pricing ATen operators

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor", "set_", "resize_",
        "_local_scalar_dense", "sym_size", "lift_fresh"}
WRITE_ONLY = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_", "random_", "fill", "zeros_like", "ones_like",
              "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}  # what they read is not `self`
GATHERS = {"embedding", "index_select", "gather", "index", "take"}  # read as much of the table as they write
LOSSES = {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"}


def size_of(tensor):
    """Bytes of memory behind a tensor; dimensions that are expanded (stride 0) count once."""
    if tensor.numel() == 0:
        return 0
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride) * tensor.element_size()


def tensors_in(tree):
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def operator_kernels(func, args, kwargs, out):
    """The CUDA kernels of one ATen call, as [(milliseconds, label)]; empty for views and other free calls."""
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
    read = min(written, size_of(sources[0])) + sum(map(size_of, sources[1:])) if name in GATHERS else \
        sum({id(t): size_of(t) for t in sources}.values())
    x = size_of(sources[0]) if sources else 0
    result = results[0] if results else None
    elements = max([t.numel() for t in sources + results], default=0)

    def kernels(*passes):
        return [(milliseconds(*work), name) for work in passes]

    if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation"):
        left = sources[-2]
        return kernels((read + written, 2 * result.numel() * left.shape[-1]))
    if name == "convolution":
        weight = sources[1]
        outputs = sources[0] if args[6] else result  # a transposed convolution does its multiplications per input
        bias = kernels((2 * written,)) if args[2] is not None else []
        return kernels((read + written, 2 * outputs.numel() * weight[0].numel(), "tf32")) + bias  # cuDNN's default
    if name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"):
        if name != "_native_batch_norm_legit_no_training" and (args[5] if name == "native_batch_norm" else True):
            return kernels((x,), (x + size_of(result),))
        return kernels((x + size_of(result),))
    if name == "native_group_norm":
        return kernels((x,), (0,), (x + size_of(result),))
    if name == "logsumexp":  # amax, subtract, exp, sum and four launches on small tensors
        return kernels((x,), (2 * x,), (2 * x,), (x,), (0,), (0,), (0,), (0,))
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
    if name in ("log_sigmoid_forward", "native_layer_norm"):
        return kernels((read + size_of(result), elements))
    if name.startswith("_scaled_dot_product"):
        query, key = sources[:2]
        heads = math.prod(query.shape[:-2])
        return kernels((read + size_of(result), 4 * heads * query.shape[-2] * key.shape[-2] * query.shape[-1]))
    if name == "mkldnn_rnn_layer":  # cuDNN: one matmul for all inputs, then two kernels for each time step
        weights, steps = sum(map(size_of, sources[1:5])), max(sources[0].shape[0], 1)
        flops = 2 * sources[0].shape[1] * sum(t.numel() for t in sources[1:3])
        return kernels((x + weights, flops), *[(weights, flops), (0,)] * steps)
    return kernels((read + written, elements))


class Clock(TorchDispatchMode):
    """While active, prices every ATen call; `events` collects [milliseconds, label, is it a kernel of the candidate]."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.events += [[ms, label, False] for ms, label in operator_kernels(func, args, kwargs or {}, out)]
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Triton's own values in programs and messages

TRITON_TYPES = {str(value): value for value in vars(tl).values() if isinstance(value, tl.dtype)}


def write_value(value, tensor):
    """JSON for an argument of an operator or a kernel (see jail.encode), with Triton's types, constants and functions."""
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


class Recorder(TorchDispatchMode):
    """While active, writes each ATen call and each Triton launch into `steps`. Kernels are recorded but not run.

    Tensors are written as [storage, dtype, shape, strides, offset] with storages numbered in order of appearance, so
    views need no step of their own. A storage that no step created (a parameter, a table) is kept in `constants`.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.constants, self.numbers, self.kept = [], {}, {}, []
        self.derived = set()  # storages whose content depends on the inputs or on a kernel, hence unknown while recording
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
            raise RuntimeError(f"forward reads computed values back to the host (aten.{name}), which is not supported here")
        out = func(*args, **kwargs)
        results = tensors_in(out)
        if name in FREE:
            for tensor in results:
                if tensor.untyped_storage().data_ptr() not in self.numbers:
                    tensor.zero_()  # kernels do not run here: what they would have written must at least be a valid index
        fresh = any(t.untyped_storage().data_ptr() not in self.numbers or t.numel() == 0 for t in results)
        if fresh or func._schema.is_mutable:
            self.steps.append(["operator", f"{name}.{func._overloadname}", *arguments,
                               [self.reference(tensor, created=True) for tensor in results]])
            if touched & self.derived:
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
    """Lets code written for a GPU run where there is none: device="cuda" becomes the CPU, and `.cuda()` does nothing."""

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
# Rebuilding the kernels from the candidate's text: only Triton's own language, nothing else of Python

STATEMENTS = (ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If,
              ast.Expr, ast.Return, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.operator, ast.unaryop, ast.boolop,
              ast.cmpop, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.IfExp, ast.Attribute,
              ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Name, ast.Constant, ast.JoinedStr, ast.FormattedValue,
              ast.Starred, ast.expr_context)
BUILTINS = {"range", "min", "max", "len", "int", "float", "bool", "abs", "tuple", "print", "isinstance", "sum", "str"}
MEMBERS = {name for cls in (tl.tensor, tl.dtype, tl.block_type, tl.tensor_descriptor) for name in dir(cls)
           if not name.startswith("_")} | {"value", "type", "dtype", "shape", "element_ty"}
HOST_HELPERS = {"cdiv", "next_power_of_2"}  # of the module triton itself


def is_kernel(node):
    """Is this AST node a function under @triton.jit (or @jit), whatever other decorators it carries?"""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(getattr(decorator, "func", decorator)).split(".")[-1] == "jit" for decorator in node.decorator_list)


def check_kernel(node, scope):
    """Raise KernelError unless the function uses only what Triton's language has.

    The interpreter runs a kernel's body as Python, so this is the border: no imports, no names but Triton's, the kernels
    and the constants in `scope`, no attribute that is not a member of Triton's tensors and types.
    """
    local = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def refuse(child, what):
        raise KernelError(f"{what} is not available inside a Triton kernel", getattr(child, "lineno", node.lineno))

    def resolve(child):
        """The object that a dotted name rooted in a module stands for, or None when it is not rooted in one."""
        if isinstance(child, ast.Name):
            return None if child.id in local else scope.get(child.id)
        owner = resolve(child.value) if isinstance(child, ast.Attribute) else None
        if not inspect.ismodule(owner):
            return None
        found = getattr(owner, child.attr, None)
        home = getattr(found, "__name__", "") if inspect.ismodule(found) else getattr(found, "__module__", "") or ""
        if owner is triton and not inspect.ismodule(found):
            allowed = child.attr in HOST_HELPERS
        else:
            allowed = home.startswith("triton.language") or isinstance(found, (tl.dtype, jit.JITFunction))
        if not allowed or child.attr.startswith("_"):
            refuse(child, ast.unparse(child))
        return found

    for child in ast.walk(node):
        if child is not node and isinstance(child, ast.FunctionDef) or not isinstance(child, STATEMENTS):
            refuse(child, type(child).__name__)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and child.id not in local:
            if child.id not in scope and child.id not in BUILTINS:
                raise KernelError(f"NameError: {child.id} is not defined for the kernel", child.lineno)
        if isinstance(child, ast.Attribute):
            if resolve(child) is None and (inspect.ismodule(resolve(child.value)) or child.attr not in MEMBERS):
                refuse(child, ast.unparse(child))


def build_kernels(code, names):
    """{name: JITFunction} for the @triton.jit functions of a candidate's source, and nothing else of it.

    `names` are the recorded global constants. Raises KernelError for a kernel that reaches outside Triton's language.
    """
    body = ast.parse(code).body
    scope = {"triton": triton, "tl": tl, "__name__": "kernels", **read_value({"dict": [*names.items()]}, None)}
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) and all(
        re.match(r"triton(\.language|$)", getattr(node, "module", None) or alias.name) for alias in node.names)]
    exec(compile(ast.Module(imports, []), "<imports>", "exec"), scope)
    kernels = [node for node in body if is_kernel(node)]
    scope.update({node.name: True for node in kernels})
    for node in kernels:
        node.decorator_list = [decorator for decorator in node.decorator_list[-1:]]
        line = node.decorator_list[0].lineno
        check_kernel(ast.copy_location(ast.FunctionDef(**{**vars(node), "decorator_list": []}), node), scope)
        node.decorator_list = [ast.copy_location(ast.Name("__jit__", ast.Load()), node.decorator_list[0])]
        assert line == node.decorator_list[0].lineno  # inspect finds the text of a function by its decorator's line
    scope.update(__jit__=triton.jit, __builtins__={name: __builtins__[name] for name in BUILTINS} if isinstance(
        __builtins__, dict) else {name: getattr(__builtins__, name) for name in BUILTINS})
    linecache.cache["<candidate>"] = (len(code), None, [line + "\n" for line in code.split("\n")], "<candidate>")
    exec(compile(ast.fix_missing_locations(ast.Module(kernels, [])), "<candidate>", "exec"), scope)
    return {node.name: scope[node.name] for node in kernels}


# ---------------------------------------------------------------------------------------------------------------------
# Compiling for a real target


def compile_kernel(kernel, arguments, options):
    """Compile one specialisation to PTX for sm_90 without a GPU. Raises KernelError with the compiler's message."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    first = kernel.fn.__code__.co_firstlineno
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or value is True or isinstance(value, int) and value == 1 or not \
                isinstance(value, (torch.Tensor, int, float)):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = jit.mangle_type(value)
        else:
            signature[parameter.name] = jit.mangle_type(value)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    try:
        unknown = set(options) - set(backend.parse_options({}).__dict__)
        if unknown:
            raise KernelError(f"unknown launch option or argument {sorted(unknown)[0]}", first)
        source = ASTSource(kernel, signature, constexprs=constants)
        settings = backend.parse_options(options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        stages, metadata = {}, {"hash": "", "target": target, **settings.__dict__}
        backend.add_stages(stages, settings, source.language)
        module = source.make_ir(target, settings, backend.get_codegen_implementation(settings),
                                backend.get_module_map(), context)
        for stage, lower in stages.items():
            if stage == "cubin":
                break
            module = lower(module, metadata)
    except KernelError:
        raise
    except Exception as error:
        while error.__cause__ is not None and hasattr(error.__cause__, "node"):
            error = error.__cause__  # an error inside a called function is wrapped in its caller's
        text = getattr(error, "error_message", None) or str(error).strip().split("\n")[-1] or type(error).__name__
        node = getattr(error, "node", None)
        skipped = sum(1 for line in linecache.cache["<candidate>"][2][first - 1:] if not line) if node is None else 0
        line = None if node is None else definition_line(kernel) + node.lineno - 1 + skipped
        raise KernelError(f"{type(error).__name__}: {text}", line) from None
    if metadata.get("shared", 0) > 227 * 1024:
        raise KernelError(f"out of resource: shared memory, required {metadata['shared']} bytes, limit 232448", first)


def definition_line(kernel):
    """The line of `def` in the candidate's source (decorators come before it)."""
    lines, first = linecache.cache["<candidate>"][2], kernel.fn.__code__.co_firstlineno
    return next(i for i in range(first, len(lines) + 1) if lines[i - 1].lstrip().startswith("def "))


# ---------------------------------------------------------------------------------------------------------------------
# Interpreting, with every access checked and counted


class Memory:
    """The storages that a replayed kernel may touch: bounds for every access, and what the accesses cost.

    The cost model is a cache of CACHE_SECTORS 32-byte sectors. `clock` counts the sectors fetched so far; each sector
    remembers when it was last touched, and one that has not been touched for a cache's worth of fetches is paid again.
    """

    def __init__(self, storages):
        spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes())
        self.starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self.spans = spans
        self.counting, self.written = False, set()
        self.begin()

    def begin(self):
        """A new launch: the cache is cold, the bill is empty."""
        self.touched, self.clock, self.bytes, self.flops = {}, 0, 0, {}

    def access(self, pointers, mask, itemsize, store):
        addresses = pointers[mask] if mask is not None else pointers.reshape(-1)
        if addresses.size == 0:
            return
        low, high = int(addresses.min()), int(addresses.max())
        index = int(np.searchsorted(self.starts, low, side="right")) - 1
        if index < 0 or high + itemsize > self.spans[index][1]:
            inside = index >= 0 and low < self.spans[index][1]
            what = f"{(high + itemsize - self.spans[index][1]) // itemsize} elements past the end of" if inside else "outside"
            raise KernelError(f"out-of-bounds {'store' if store else 'load'}: {what} the tensor", stage="launch")
        if store:
            self.written.add(self.spans[index][0])
        if self.counting:
            if index not in self.touched:
                sectors = ((self.spans[index][1] - self.spans[index][0]) >> SECTOR) + 2
                self.touched[index] = np.full(sectors, -CACHE_SECTORS - 1, dtype=np.int64)
            last = self.touched[index]
            sectors = np.unique((addresses.reshape(-1) >> np.uint64(SECTOR)).astype(np.int64)
                                - (self.spans[index][0] >> SECTOR))
            missed = int((self.clock - last[sectors] > CACHE_SECTORS).sum())
            self.clock += missed
            last[sectors] = self.clock
            self.bytes += missed << SECTOR

    def arithmetic(self, count, rate="fp32"):
        if self.counting:
            self.flops[rate] = self.flops.get(rate, 0) + count

    def milliseconds(self):
        return LAUNCH_MS + max(self.bytes / BANDWIDTH, sum(n / PEAK[rate] for rate, n in self.flops.items()))


def round_to_tf32(values):
    """fp32 with the 10 mantissa bits that the tensor cores keep, rounded to nearest."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def interpret_from_now_on(memory):
    """Turn this process into an interpreter of Triton whose memory operations go through `memory()`. For good.

    Triton decides at import whether its own helpers (tl.sum, tl.sigmoid, ...) are compiled or interpreted; this process
    needed the compiler first, so they are converted here. The stock interpreter also re-installs its patches at every
    call of a helper; installing them once makes it three times as fast.
    """
    converted = {}

    def convert(function):
        if function.fn not in converted:
            converted[function.fn] = interpreter.InterpretedFunction(function.fn)
        return converted[function.fn]

    modules = [tl, tl.core, tl.standard, tl.math, tl.random]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                setattr(module, name, convert(value))
    for name, value in list(vars(tl.tensor).items()):
        if isinstance(value, jit.JITFunction):
            setattr(tl.tensor, name, lambda *args, _run=convert(value), **kwargs: _run(*args, **kwargs))
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    builder, base = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    plain = {name: getattr(base, name) for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw",
                                                    "create_atomic_cas", "binary_op", "unary_op", "ternary_op")}

    def lanes(mask):
        return None if mask is None else np.asarray(getattr(mask, "data", mask))

    def masked_load(self, ptrs, mask, *rest, **options):
        size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        memory().access(ptrs.data, np.broadcast_to(lanes(mask), ptrs.data.shape), size, store=False)
        return plain["create_masked_load"](self, ptrs, mask, *rest, **options)

    def masked_store(self, ptrs, value, mask, *rest, **options):
        memory().access(ptrs.data, np.broadcast_to(lanes(mask), ptrs.data.shape), value.data.itemsize, store=True)
        return plain["create_masked_store"](self, ptrs, value, mask, *rest, **options)

    def atomic_rmw(self, op, ptr, value, mask, *rest):
        memory().access(ptr.data, np.broadcast_to(lanes(mask), ptr.data.shape), value.data.itemsize, store=True)
        return plain["create_atomic_rmw"](self, op, ptr, value, mask, *rest)

    def atomic_cas(self, ptr, compare, value, *rest):
        memory().access(ptr.data, None, value.data.itemsize, store=True)
        return plain["create_atomic_cas"](self, ptr, compare, value, *rest)

    def counted(name):
        def run(self, *args):
            out = plain[name](self, *args)
            memory().arithmetic(out.data.size)
            return out
        return run

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, rate = a.data, b.data, "half"
        if a.dtype.scalar == tl.float32:
            kind = str(input_precision).split(".")[-1].lower()
            rate = {"ieee": "fp32", "tf32x3": "tf32x3"}.get(kind, "tf32")
            if rate == "tf32":
                left, right = round_to_tf32(left), round_to_tf32(right)
        elif a.dtype.scalar == tl.bfloat16:
            left, right = ((x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        memory().arithmetic(2 * left.size * right.shape[-1], rate)
        out = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(out, d.dtype.scalar)

    def erf(self, x):
        memory().arithmetic(x.data.size)
        return interpreter.TensorHandle(torch.erf(torch.from_numpy(np.ascontiguousarray(x.data))).numpy(), x.dtype.scalar)

    base.create_masked_load, base.create_masked_store = masked_load, masked_store
    base.create_atomic_rmw, base.create_atomic_cas = atomic_rmw, atomic_cas
    base.binary_op, base.unary_op, base.ternary_op = counted("binary_op"), counted("unary_op"), counted("ternary_op")
    base.create_dot, base.create_erf = dot, erf
    install_libdevice(memory)
    return builder, convert


def install_libdevice(memory):
    """Give CUDA's libdevice functions a meaning in the interpreter: the torch function of the same name."""
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    special = {"pow": torch.pow, "fast_expf": torch.exp, "fast_logf": torch.log, "fast_sinf": torch.sin, "rint": torch.round,
               "fast_cosf": torch.cos, "fast_powf": torch.pow, "fast_tanhf": torch.tanh, "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
               "fabs": torch.abs, "rcp_rn": torch.reciprocal, "div_rn": torch.div, "sqrt_rn": torch.sqrt,
               "normcdf": torch.special.ndtr, "isnan": torch.isnan, "isinf": torch.isinf, "isfinited": torch.isfinite,
               "finitef": torch.isfinite, "tgamma": lambda x: torch.lgamma(x).exp(), "j0": torch.special.bessel_j0}

    def wrap(function):
        def call(*args, **_):
            tensors = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) if isinstance(a, tl.tensor) else
                       torch.tensor(float(a.value if isinstance(a, tl.constexpr) else a)) for a in args]
            shaped = next(a for a in args if isinstance(a, tl.tensor))
            memory().arithmetic(tensors[0].numel())
            out = function(*tensors).numpy()
            kind = tl.int1 if out.dtype == bool else shaped.dtype.scalar
            block = tl.block_type(kind, list(out.shape)) if shaped.type.is_block() else kind
            return tl.tensor(interpreter.TensorHandle(out, kind), block)
        return call

    for module in (libdevice, cuda_libdevice):
        for name in [name for name in vars(module) if not name.startswith("_")]:
            function = special.get(name) or getattr(torch, name, None) or getattr(torch.special, name, None)
            if inspect.isfunction(getattr(module, name)) and callable(function):
                setattr(module, name, wrap(function))


# ---------------------------------------------------------------------------------------------------------------------
# Replaying, in a process of its own


class Replay:
    """Executes a recorded program on given inputs. Raises KernelError, or RuntimeError for a step that fails."""

    def __init__(self, code, program, constants):
        self.program, self.constants = program, constants
        self.kernels = build_kernels(code, program["names"])
        self.memory = None
        compiled = set()
        for step in program["steps"]:
            if step[0] == "launch":
                key = repr((step[1], [(k, v["tensor"][1] if isinstance(v, dict) and "tensor" in v else v)
                                      for k, v in step[3].items()], step[4]))
                if key not in compiled:
                    compiled.add(key)
                    if step[1] not in self.kernels:
                        raise KernelError(f"{step[1]} is not a @triton.jit function at the top level of the file")
                    meta = self.arguments(step, lambda ref: torch.empty(0, dtype=TORCH_NAMES[ref[1]], device="meta"))
                    compile_kernel(self.kernels[step[1]], meta,
                                   {k: read_value(v, None) for k, v in step[4].items()})
        self.builder, convert = interpret_from_now_on(lambda: self.memory)
        self.functions = {name: convert(kernel) for name, kernel in self.kernels.items()}
        for function in self.functions.values():
            function.fn.__globals__.update(self.functions)  # a kernel that calls a kernel finds the interpreted one
        self.constexprs = {name: {p.name for p in kernel.params if p.is_constexpr} for name, kernel in self.kernels.items()}

    def arguments(self, step, tensor):
        arguments = {key: read_value(value, tensor, getattr(self, "functions", self.kernels)) for key, value in step[3].items()}
        missing = set(self.kernels[step[1]].arg_names) - set(arguments)
        if missing:
            raise KernelError(f"{step[1]} is launched without its argument {sorted(missing)[0]}", stage="launch")
        return arguments

    def run(self, inputs, seed, constants=None, price=False, mute=()):
        """One forward. Returns (output tree, events, live): live marks the events whose results reach the output.

        inputs: tensors in the order of the recording. With `price`, events are [milliseconds, label, own]. Kernels named
        in `mute` are skipped, and memory starts as finite noise: an output that is still right never needed them.
        """
        self.storages, self.mute = {}, mute
        for reference, tensor in zip(self.program["inputs"], inputs, strict=True):
            if [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)] != [reference[2], reference[3], reference[1]]:
                raise RuntimeError("the shapes of the inputs change from one call to the next")
            self.storages[reference[0]] = tensor.untyped_storage()
        for number, data in {**self.constants, **(constants or {})}.items():
            self.storages[int(number)] = data.clone().untyped_storage()
        events, flow = [], []  # flow: (event indices, storages read, storages written) of every step
        torch.manual_seed(seed)
        with torch.no_grad():
            for step in self.program["steps"]:
                clock = Clock()
                if step[0] == "operator":
                    reads, writes = self.operator(step, clock if price else None)
                elif step[0] == "launch" and step[1] in mute:
                    continue
                elif step[0] == "launch":
                    reads, writes = self.launch(step, clock, price)
                else:
                    clock.events.append([milliseconds(0), "upload", False])
                    reads, writes = set(), set()
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
        number, dtype, shape, strides, offset = reference
        dtype = TORCH_NAMES[dtype]
        storage = self.storages[number]
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if all(shape) else 0
        if min([offset, *shape, *strides]) < 0 or last * dtype.itemsize > storage.nbytes():
            raise RuntimeError("a recorded tensor does not fit its memory")
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    def operator(self, step, clock):
        _, name, args, kwargs, outs = step
        base, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, base), overload)
        args, kwargs = read_value(args, self.tensor), read_value(kwargs, self.tensor)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if base in ("from_file", "set_", "resize_", "_resize_output_"):
            raise RuntimeError(f"aten.{base} is not supported here")
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
        writes = {t.untyped_storage().data_ptr() for t in results}
        return reads, writes

    def poison(self, tensors):
        """What uninitialised memory holds: NaN (finite noise while kernels are muted): it cannot pass for a result."""
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.normal_() if self.mute else tensor.fill_(float("nan"))
            else:
                tensor.fill_(0 if self.mute or tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)

    def launch(self, step, clock, price):
        _, name, grid, _, _ = step
        arguments = self.arguments(step, self.tensor)
        self.memory = Memory(self.storages.values())
        self.memory.counting = price
        tensors = tensors_in(list(arguments.values()))
        function, constexprs = self.functions[name], self.constexprs[name]
        body = function.rewrite()
        values = {key: value if key in constexprs else interpreter._implicit_cvt(value) for key, value in arguments.items()}
        self.builder.set_grid_dim(*grid)
        try:
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        self.builder.set_grid_idx(x, y, z)
                        body(**values)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            frames, line = error.__traceback__, None
            while frames is not None:
                line = frames.tb_lineno if frames.tb_frame.f_code.co_filename == "<candidate>" else line
                frames = frames.tb_next
            text = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
            raise KernelError(f"{name}: {text}", line, "launch") from None
        if price:
            clock.events.append([self.memory.milliseconds(), name, True])
        return {t.untyped_storage().data_ptr() for t in tensors}, self.memory.written
