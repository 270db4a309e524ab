"""Triton kernels where there is no GPU, second half: run in numpy.

    interpreter = Interpreter(kernels)                    of compiler.build; from now on this process interprets
    interpreter.launch(name, grid, arguments, memory)     every access is checked; `memory` says what it cost

All programs of a launch run together, in lockstep (lockstep.py). When a branch or a loop bound differs between them,
what has been stored is undone and they run one by one, in the order of their numbers. So a result that depends on the
order in which a GPU runs programs may be accepted here: races are not looked for.
"""

import ast
import copy
import functools
import math
import types

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime import jit

from judge.compiler import BUILTINS, FILE, KernelError
from judge.lockstep import Diverged, Lockstep, uniform
from judge.verdict import line_in

STOCK_NAMES = ("_InterpreterComparison",)  # that its transformer of syntax trees writes, and interpreter_semantic
TOGETHER = 256  # programs at a time, fewer for large blocks:
ELEMENTS = 1 << 17  # numpy is fastest while an array fits into the processor's cache
GRID_LIMITS = (1 << 31) - 1, 65535, 65535


def later(node):
    """The syntax tree of `lambda: node`."""
    made = ast.parse("lambda: 0", mode="eval").body
    made.body = node
    return made


def is_block(value):
    return isinstance(value, tl.tensor) and value.type.is_block()


class Rewriter(ast.NodeTransformer):
    """Writes calls of KERNEL_SCOPE where Python would ask a block whether it is true, and Triton computes with it; and
    x += 1 as the assignment that it is.
    """

    def visit(self, node):
        """A node after those inside of it."""
        self.generic_visit(node)
        return getattr(self, f"visit_{type(node).__name__}", lambda same: same)(node)

    def visit_BoolOp(self, node):
        first, *others = node.values
        for other in others:
            name = "_and" if isinstance(node.op, ast.And) else "_or"
            first = ast.Call(ast.Name(name, ast.Load()), [first, later(other)], [])
        return ast.copy_location(first, node)

    def visit_IfExp(self, node):
        arguments = [node.test, later(node.body), later(node.orelse)]
        return ast.copy_location(ast.Call(ast.Name("_if", ast.Load()), arguments, []), node)

    def visit_UnaryOp(self, node):
        call = ast.Call(ast.Name("_not", ast.Load()), [node.operand], [])
        return ast.copy_location(call, node) if isinstance(node.op, ast.Not) else node

    def visit_Assert(self, node):
        return ast.copy_location(ast.Pass(), node)  # it means something with debug=True only

    def visit_AugAssign(self, node):
        read = copy.copy(node.target)
        read.ctx = ast.Load()
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(read, node.op, node.value)), node)


# ---------------------------------------------------------------------------------------------------------------------
# Python's numbers where Triton has its own: they divide in another way, know no bounds, and compare blocks as a whole


def assigned(value, _=None):
    """What a variable holds: of a number, or of those in a tuple, a tensor."""
    if type(value) is tuple:
        return tuple(map(assigned, value))
    return stock.interpreter_semantic.to_tensor(value, False)


def loop(*bounds, step=None, **_):
    """`range` and tl.range, whose variable is a tensor; that of tl.static_range is a number."""
    if step is not None:
        bounds = (*bounds, step) if len(bounds) == 2 else (0, *bounds, step)
    return map(assigned, range(*bounds))


def extreme(python, name, *values):
    """`min` or `max`: of each element, if there are tensors."""
    tensors = any(isinstance(value, tl.tensor) for value in values)
    return functools.reduce(getattr(tl, name), values) if tensors else python(*values)


def choose(test, body, other):
    """`body if test else other`: a tensor, where a kernel makes the test while it runs."""
    value = body() if test else other()
    return assigned(value) if isinstance(test, tl.tensor) else value


KERNEL_SCOPE = {
    "_and": lambda left, right: left.logical_and(right()) if is_block(left) else left and right(),
    "_or": lambda left, right: left.logical_or(right()) if is_block(left) else left or right(),
    "_if": choose, "_not": lambda value: value.__not__() if is_block(value) else not value,
    "interpreter_semantic": types.SimpleNamespace(to_tensor=assigned),
    "__builtins__": {**BUILTINS, "range": loop, "min": functools.partial(extreme, min, "minimum"),
                     "max": functools.partial(extreme, max, "maximum")}}


# ---------------------------------------------------------------------------------------------------------------------


class Interpreter:
    """Runs kernels. Making one turns this process into an interpreter of Triton for good: it cannot compile any more.

    (Triton decides at import whether its own helpers, tl.sum, tl.sigmoid and so on, are compiled or interpreted. The
    compiler was needed first, so they are converted here, once; the stock interpreter patches them at every call.)
    """

    def __init__(self, kernels):
        self.builder, self.converted = Lockstep(), {}  # {Python function of a compiled kernel: the interpreted one}
        stock.interpreter_builder = self.builder
        stock.interpreter_semantic = stock.TritonSemantic(self.builder)
        np.seterr(all="ignore")
        self.convert_triton()
        self.install_libdevice()
        self.functions = {name: self.convert(kernel) for name, kernel in kernels.items()}
        for function in self.functions.values():
            function.fn.__globals__.update(self.functions)  # a kernel that calls a kernel finds the interpreted one
        # kernels whose programs run one by one; {kernel: elements of its largest block so far}
        self.kernels, self.diverging, self.blocks = kernels, set(), {}

    def convert(self, function):
        """The interpreted function of a compiled one; of a candidate's, made of the syntax tree that was checked."""
        if function.fn not in self.converted:
            found = self.converted[function.fn] = stock.InterpretedFunction(function.fn)
            if function.fn.__code__.co_filename == FILE:
                tree = found.rewriter.ast_transformer.visit(Rewriter().visit(function.parse()))
                scope, made = function.fn.__globals__, {}
                scope.update(KERNEL_SCOPE)
                scope.update({name: functools.reduce(getattr, path.split(".")[1:], triton)  # by now it is another
                              for name, path in function.imported.items()})
                scope.update({name: vars(stock)[name] for name in STOCK_NAMES if name in vars(stock)})
                exec(compile(ast.fix_missing_locations(tree), FILE, "exec"), scope, made)
                found.rewritten_fn[function.fn] = made[function.fn.__name__]
        return self.converted[function.fn]

    def convert_triton(self):
        """Turn Triton's language into one that is interpreted, with our builder."""
        for module in (tl, tl.core, tl.standard, tl.math, tl.random):
            for name, value in list(vars(module).items()):
                if isinstance(value, jit.JITFunction):
                    setattr(module, name, self.convert(value))
        for name, value in list(vars(tl.tensor).items()):
            if isinstance(value, jit.JITFunction):
                setattr(tl.tensor, name, lambda *args, value=value, **kwargs: self.convert(value)(*args, **kwargs))
        stock.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
        stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for module in (tl, tl.core):
            module.reduce, module.associative_scan, module.range = self.builder.reduce, self.builder.scan, loop
            for name in ("multiple_of", "max_contiguous", "max_constancy"):  # hints to the compiler
                setattr(module, name, lambda tensor, *_, **__: tensor)
        tl.tensor.__index__ = lambda tensor: int(uniform(tensor))
        tl.tensor.__bool__ = lambda tensor: bool(uniform(tensor)) if not tensor.type.is_block() else True
        tl.tensor.T = property(lambda x: stock.interpreter_semantic.permute(x, (1, 0)))

    def install_libdevice(self):
        """Let CUDA's libdevice functions, which Triton describes, be computed by our builder, by their names."""
        def call(name, function, *args, **_):
            self.builder.libdevice_name = name
            return function(*args, _semantic=stock.interpreter_semantic)

        modules = tl.extra.libdevice, tl.extra.cuda.libdevice  # the first has only the names
        for name, function in list(vars(modules[1]).items()):
            for module in modules if tl.core.is_builtin(function) else ():
                setattr(module, name, functools.partial(call, name, function))

    def launch(self, name, grid, arguments, memory, options):
        """Run one launch on `memory`. Raises KernelError (stage "launch") with the candidate's line."""
        check_limits(name, grid, options)
        values = self.prepare(name, grid, arguments, memory)
        coordinates, done = np.indices(grid, dtype=np.int32).reshape(3, -1), 0  # programs
        while done < math.prod(grid):
            together = max(2, min(TOGETHER, ELEMENTS // self.blocks.get(name, ELEMENTS)))
            together = 1 if name in self.diverging else together
            self.builder.programs, self.builder.block = coordinates[:, done:done + together], 1
            running = self.builder.programs.shape[1]
            try:
                self.functions[name].rewrite()(**values)
                memory.flush(running)
            except Exception as error:
                while error.__cause__ is not None and not isinstance(error, Diverged):
                    error = error.__cause__
                if running == 1 or not isinstance(error, Diverged):
                    kind = "" if isinstance(error, KernelError) else f"{type(error).__name__}: "
                    raise KernelError(f"{name}: {kind}{error}", line_in(error, FILE), "launch") from None
                memory.roll_back()
                self.diverging.add(name)
            else:
                done += running
                self.blocks[name] = max(self.builder.block, self.blocks.get(name, 1))

    def prepare(self, name, grid, arguments, memory) -> dict:
        """Set the builder up for a launch. Returns the arguments as the interpreted kernel takes them."""
        self.builder.memory, self.builder.grid_idx = memory, (0, 0, 0)
        self.builder.set_grid_dim(*grid)
        self.builder.programs = np.zeros((3, 1), dtype=np.int32)  # for what describes a tensor, and for casts
        constexprs = {parameter.name for parameter in self.kernels[name].params if parameter.is_constexpr}
        values = {key: value if key in constexprs else stock._implicit_cvt(value) for key, value in arguments.items()}
        for key, kind in self.functions[name].fn.__annotations__.items():  # those that name a type, see compiler.build
            if key not in constexprs and isinstance(arguments[key], (int, float)):
                values[key] = stock.interpreter_semantic.cast(assigned(values[key]), tl.str_to_ty(kind, None))
        return values


def check_limits(name, grid, options):
    """Raises KernelError for a launch that a GPU refuses."""
    for what, value, most in [("dimensions of the grid", len(grid), 3),
                              ("num_warps", options.get("num_warps", 4), 32),
                              ("num_ctas", options.get("num_ctas", 1), 8),
                              *zip(("grid in x", "grid in y", "grid in z"), grid, GRID_LIMITS)]:
        if value > most:
            raise KernelError(f"{name}: {what}: {value} is more than the GPU's limit of {most}", stage="launch")
