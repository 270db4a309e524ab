"""Triton kernels where there is no GPU: taken from a candidate's text, checked, and run by Triton's own interpreter.

Only the kernels of the text are executed, and of these only a syntax tree in which `check` found nothing but Triton's
language, because their bodies run here as Python. `Counter` is Triton's interpreter with a check of every address and
a count of bytes and FLOPs, which prices.py turns into time.

Refused with a message: bf16 and fp8; `and`, `or`, `not`, a < b < c, min and max of blocks; other names for functions of
Triton (sine = tl.math.sin). Not looked for: races (the programs of a launch run one after the other), two kernels of
one name (the last counts). Constants, loop variables and what a kernel computes from them alone are Python's numbers,
without overflow and without methods. A kernel's own function in tl.reduce or tl.associative_scan is called for each
element (0.1 s for a thousand).

A process that imports this file needs TRITON_INTERPRET=1 in its environment before it imports triton: then Triton's own
helpers (tl.sum, tl.softmax) are interpreted, too. It cannot compile kernels.
"""

import ast
import builtins
import functools
import sys
import types

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter as stock

from judge.prices import ACROSS_COST, DOT_COST, ERF_COST, INSTRUCTION_COST, SECTOR, launch_milliseconds
from judge.program import address, tensors_in
from judge.rules import KERNEL_BUILTINS, KERNEL_HELPERS, KERNEL_SYNTAX, dotted, imports, parse
from judge.verdict import Failed, describe

FILE = "<candidate>"  # the file's name in tracebacks of kernels; their lines are those of the candidate's text

# ---------------------------------------------------------------------------------------------------------------------
# What a kernel may use


def silent(*_, **__):
    """Stands for print, tl.device_print, tl.device_assert and the like."""


BUILTINS = {name: getattr(builtins, name) for name in KERNEL_BUILTINS} | {"print": silent}  # Python's in a kernel
PUBLIC = {*tl.__all__, "core", "standard", "random"}
LIBDEVICE = {name for name in vars(libdevice) if tl.core.is_builtin(vars(libdevice)[name])}
LANGUAGE = dict.fromkeys((tl, tl.core, tl.standard, tl.random, tl.math), PUBLIC)  # {module: names in it}
LANGUAGE |= {triton: {"language", *KERNEL_HELPERS}, tl.extra: {"libdevice", "cuda"}, tl.extra.cuda: {"libdevice"},
             libdevice: LIBDEVICE}
MEMBERS = {"value", "type", "dtype", "shape", "numel", "element_ty", *vars(tl.int32), *vars(tl.float32)}
for kind in (tl.tensor, tl.dtype, tl.block_type, tl.tensor_descriptor):  # members of values
    MEMBERS |= {name for name in dir(kind) if not name.startswith("_")}


def refuse(what, line=None):
    raise Failed(f"{what} is not available inside a Triton kernel without a GPU", "compile", line)


def names_in(owner, otherwise):
    """What a kernel may name in one of Triton's modules: nothing in other modules, `otherwise` in what is none."""
    return LANGUAGE.get(owner, ()) if isinstance(owner, types.ModuleType) else otherwise


def found_at(path, scope):
    """What a dotted path stands for in a kernel, as long as it leads through Triton's modules. None: something else."""
    found = scope.get(path[0]) if path else None
    for name in path[1:]:
        found = getattr(found, name, None) if name in names_in(found, ()) else None
    return found


def check(node, scope):
    """Raise Failed unless a kernel uses only what Triton's language has: this is the border to the judge's Python.

    No imports, no names but Triton's, the kernels and the constants in `scope`, no attribute that is not a member of
    Triton's tensors and types. Defaults run when the kernel is defined, so they call nothing.
    """
    local = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    local |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}
    outside = {name: value for name, value in scope.items() if name not in local}
    for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
        if not isinstance(default, (ast.Constant, ast.Name)):
            refuse(f"the default {ast.unparse(default)}", default.lineno)
    for child in ast.walk(node):
        line = getattr(child, "lineno", node.lineno)
        if not isinstance(child, KERNEL_SYNTAX) or isinstance(child, ast.FunctionDef) and child is not node:
            refuse(f"`{ast.unparse(child).strip().splitlines()[0][:60]}`", line)
        if isinstance(child, ast.Name) and child.id not in local | scope.keys() | BUILTINS.keys():
            refuse(child.id, line)
        if isinstance(child, ast.Attribute):
            if child.attr not in names_in(found_at(dotted(child.value), outside), MEMBERS):
                refuse(ast.unparse(child), line)
        if isinstance(child, (ast.Attribute, ast.Subscript)) and isinstance(child.ctx, ast.Store):
            refuse(f"writing to {ast.unparse(child)}", line)


def names_of_triton(tree):
    """{name: object} of what a text imports of Triton's language."""
    scope = {"triton": triton, "tl": tl}
    for name, path in imports(tree):
        root = name.split(".")[0]  # `import a.b` binds a
        found = found_at(path.split(".") if root == name else [root], {"triton": triton})
        if found is not None:
            scope[root] = found
    return scope


# ---------------------------------------------------------------------------------------------------------------------
# Triton's interpreter, which checks and counts

stock_type = functools.cache(stock._get_np_dtype)


def numpy_type(kind):
    """Stands for the interpreter's function. numpy has no bf16 and fp8: it would compute with their bits."""
    kind = kind.scalar
    if isinstance(kind, tl.pointer_type):
        return np.dtype(np.uint64)
    if kind.name.startswith(("bf16", "fp8")):
        refuse(kind)
    return stock_type(kind)


def truth(tensor):
    """Stands for tl.tensor.__bool__. Triton's compiler takes `and` of blocks element by element; Python cannot."""
    if sys._getframe(1).f_code.co_filename != FILE:
        return True  # Triton itself asks whether it was given a mask
    if tensor.handle.data.size > 1:
        raise Failed("`and`, `or`, `not`, chained comparisons, min and max of a block are not available without a GPU: "
                     "use &, |, ~, tl.minimum", "compile")
    return bool(tensor.handle.data.item())


def begin_reduction(self, values):
    """Stands for ReduceScanOpInterface.check_tensor: the interpreter's loops over elements take no negative axis."""
    dimensions = len(values[0].shape)
    if self.axis is not None:
        self.axis = int(self.axis) % dimensions
    stock.interpreter_builder.count(values[0].handle, 1 if self.axis in (None, dimensions - 1) else ACROSS_COST)


def round_to_tf32(block):
    """A block of fp32 with the 10 bits of mantissa that the tensor cores keep."""
    bits = np.ascontiguousarray(block.data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return stock.TensorHandle(np.where(np.isfinite(block.data), rounded.view(np.float32), block.data), tl.float32)


class Counter(stock.InterpreterBuilder):
    """Triton's interpreter for one launch at a time. It may touch the memory of that launch's tensors only."""

    create_print = create_assert = silent
    create_int_to_ptr = stock.InterpreterBuilder.cast_impl  # a bitcast gives fewer addresses than there are numbers
    create_erf = lambda self, arg: self.create_extern_elementwise("", "", "erf", [arg], arg.dtype, True)  # noqa: E731

    def start(self, tensors, grid):
        self.sizes = {0: 0} | {address(x): x.untyped_storage().nbytes() for x in tensors}
        self.starts = np.array(sorted(self.sizes), dtype=np.uint64)
        self.set_grid_dim(*grid)
        self.touched = {"load": {}, "store": {}}  # of each kind: {address of a storage: a mask of its sectors}
        self.flops = self.products = 0  # FLOPs of all but tl.dot, and of tl.dot
        self.requested = 0  # bytes of the sectors of every load and store by itself

    def access(self, pointers, mask, kind, value=None):
        """Check the addresses of a "load" or a "store" (an atomic, too), and note them: all lie in one tensor."""
        size = numpy_type(pointers.get_element_ty()).itemsize if value is None else value.data.itemsize
        if isinstance(mask, stock.TensorHandle):  # it may be a single value; a descriptor's mask is an array
            mask.data = np.ascontiguousarray(np.broadcast_to(mask.data, pointers.data.shape).astype(bool))
        active = pointers.data if mask is None else pointers.data[np.asarray(mask.data)]
        if not active.size:
            return
        if (active & np.uint64(size - 1)).any():
            raise Failed(f"misaligned {kind}", "launch")
        low, high = int(active.min()), int(active.max()) + size
        start = int(self.starts[np.searchsorted(self.starts, np.uint64(low), side="right") - 1])
        end = start + self.sizes[start]
        if high > end:
            where = f"{-((end - high) // size)} elements past the end" if low < end else "no tensor there"
            raise Failed(f"out-of-bounds {kind} ({where})", "launch")
        sectors = (active - np.uint64(start)).astype(np.int64).ravel() >> SECTOR
        self.touched[kind].setdefault(start, np.zeros((self.sizes[start] >> SECTOR) + 1, dtype=bool))[sectors] = True
        self.requested += (1 + int(np.count_nonzero(np.diff(sectors)))) << SECTOR

    def create_masked_load(self, ptrs, mask, *rest, **options):
        self.access(ptrs, mask, "load")
        return super().create_masked_load(ptrs, mask, *rest, **options)

    def create_masked_store(self, ptrs, value, mask, *rest):
        self.access(ptrs, mask, "store", value)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op, ptr, value, mask, *rest):
        self.access(ptr, mask, "store", value)
        return super().create_atomic_rmw(op, ptr, value, mask, *rest)

    def create_atomic_cas(self, ptr, compared, value, *rest):
        self.access(ptr, None, "store", value)
        return super().create_atomic_cas(ptr, compared, value, *rest)

    # --- arithmetic

    def count(self, out, cost):
        self.flops += out.data.size * cost
        return out

    def unary_op(self, arg, op):
        return self.count(super().unary_op(arg, op), INSTRUCTION_COST.get(op, 1))

    def binary_op(self, lhs, rhs, op):
        return self.count(super().binary_op(lhs, rhs, op), INSTRUCTION_COST.get(op, 1))

    def create_fma(self, x, y, z):
        return self.count(super().create_fma(x, y, z), 2)

    def create_dot(self, a, b, d, precision, *rest):
        name = str(precision).split(".")[-1].lower() if a.dtype.scalar == tl.float32 else "half"
        if name == "tf32":
            a, b = round_to_tf32(a), round_to_tf32(b)
        filled = float(a.data.any(axis=-1).mean())  # rows past a tensor's end are free: at a GPU's sizes tiles are full
        self.products += 2 * d.data.size * a.data.shape[-1] * filled * DOT_COST.get(name, 1)
        return super().create_dot(a, b, d, precision, *rest)

    def create_extern_elementwise(self, library, path, symbol, args, kind, pure):
        """CUDA's libdevice functions that PyTorch has, too: __nv_tanhf is torch.tanh."""
        name = symbol.removeprefix("__nv_").removeprefix("fast_")
        function = getattr(torch, name, None) or getattr(torch, name.removesuffix("f"), None)
        if function is None or name.startswith(("round", "remainder", "isnan")):  # others than those of this name
            refuse(f"libdevice's {symbol}")
        values = function(*[torch.from_numpy(np.ascontiguousarray(arg.data)) for arg in args]).numpy()
        return self.count(stock.TensorHandle(values.astype(numpy_type(kind)), kind.scalar), ERF_COST)


@functools.cache
def interpreted_language() -> Counter:
    """Let Triton's functions be interpreted by a Counter, once and for good. (Triton does so in each launch anew.)"""
    stock._get_np_dtype = numpy_type
    stock.interpreter_builder = builder = Counter()
    builder.options = stock.InterpreterOptions(sanitize_overflow=False)  # as compiled: integers wrap around
    stock.interpreter_semantic = stock.TritonSemantic(builder)
    scope = stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    stock._patch_builtin(libdevice, builder, scope)
    tl.extra.libdevice = libdevice  # by itself it has names only, for the compiler
    tl.static_print = tl.core.static_print = silent
    tl.tensor.__bool__ = truth
    tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
    stock.ReduceScanOpInterface.check_tensor = begin_reduction
    stock.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    np.seterr(all="ignore")
    return builder


# ---------------------------------------------------------------------------------------------------------------------


def is_kernel(node):
    """Has a function's syntax tree the decorator @jit, @triton.jit, @triton.jit(...) or @triton.constexpr_function?"""
    names = {ast.unparse(getattr(decorator, "func", decorator)).split(".")[-1] for decorator in node.decorator_list}
    return bool(names & {"jit", "constexpr_function"}) and not node.name.startswith("__")  # __builtins__ is ours


class Kernels:
    """The @triton.jit functions of a candidate's text, as a launcher for program.Program.

    names: values of the global constants that they use. functions: {name: the kernel as a Python function}; one that
    uses what is not available raises Failed when it is called. counter: what the last launch did.
    """

    def __init__(self, code, names):
        self.counter = interpreted_language()
        self.functions = {}
        self.constexprs = {}
        tree = parse(code)
        kernels = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_kernel(node)]
        self.scope = {**names_of_triton(tree), **names, **{node.name: None for node in kernels}}
        self.globals = {**self.scope, "__builtins__": BUILTINS}
        for node in kernels:
            self.define(node)

    def define(self, node):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.constexprs[node.name] = {each.arg for each in parameters if "constexpr" in ast.unparse(each)}
        node.decorator_list, node.returns = [], None
        for parameter in parameters:
            parameter.annotation = None
        try:
            check(node, self.scope)
            exec(compile(ast.Module([node], []), FILE, "exec"), self.globals)
        except Exception as error:
            self.globals[node.name] = functools.partial(fail, error)
        function = self.functions[node.name] = self.globals[node.name]
        function.fn = function  # as tl.reduce calls it

    def launch(self, launch, arguments):
        """Run all programs of a launch, in the order of their numbers. Raises Failed with the candidate's line."""
        name, grid = launch["kernel"], launch["grid"]
        if name not in self.functions:
            raise Failed(f"{name} is not a @triton.jit function of the candidate's file", "compile")
        try:
            self.counter.start(tensors_in(list(arguments.values())), grid)
            for key in arguments.keys() - self.constexprs[name]:
                if not isinstance(arguments[key], bool):  # triton 3.6's _implicit_cvt takes it for a number
                    arguments = arguments | {key: stock._implicit_cvt(arguments[key])}
            for position in np.ndindex(*grid):
                self.counter.grid_idx = position
                self.functions[name](**arguments)
        except Exception as error:
            text, line = describe(error, FILE)
            raise Failed(f"{name}: {text.removeprefix('Failed: ')}", getattr(error, "stage", "launch"),
                         getattr(error, "line", None) or line) from None

    def trial(self, launch, arguments):
        """The milliseconds of a launch, by which one of an autotuned kernel's configurations is chosen."""
        self.launch(launch, arguments)
        return launch_milliseconds(self.counter)


def fail(error, /, *args, **kwargs):
    raise error
