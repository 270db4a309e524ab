"""Which candidates may share a process on a GPU, one after the other.

To start and end a CUDA process takes the driver a quarter of a second, and it does so for one at a time: more than
everything else that a small kernel's verdict takes. So a process whose candidate has left nothing behind is given to
the next one of the same task. That it has left nothing is read off the source, which is *plain* if it keeps to a small
language:

    a module              imports, constants, functions, Triton kernels, classes derived from nn.Module; nothing nested
    a class               methods; `self.name = ...` is the only way to set an attribute, of the model and nothing else:
                          classes and layers can only be called, never named otherwise, so that no method ever runs
                          with anything but a model in the place of `self`
    what can be named     PyTorch's operators, layers and dtypes, `math`, a few of Python's functions, and within
                          kernels Triton's language; no getattr, no files, nothing that begins with an underscore but
                          the name of a kernel or function

What the expert writes lies within, and most of what a policy gets wrong, too; everything else runs in a process of its
own. `unchanged` looks in addition whether anything is different after a candidate from what it was before.

A plain kernel that writes beyond its tensors writes into memory that is given back before the next candidate comes, or
that the next one's inputs overwrite; one that crashes or hangs takes its process with it. A kernel that computes
addresses out of numbers could do more: like native code, it is not stopped (sandbox.py).
"""

import ast
import builtins
import functools
import math
import re
import types

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.overrides import get_overridable_functions

MODULES = {"math", "torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "triton", "triton.language",
           "triton.language.math"}
BUILTINS = {"abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "range",
            "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip", "AssertionError",
            "NotImplementedError", "RuntimeError", "TypeError", "ValueError"}
TORCH = {"arange", "device", "empty", "empty_strided", "eye", "finfo", "full", "linspace", "ones", "rand", "randint",
         "randn", "randperm", "tensor", "zeros"}
FUNCTIONAL = {"hardsigmoid", "hardswish", "logsigmoid", "sigmoid", "tanh", "threshold"}
NO_LAYERS = {"DataParallel", "ModuleDict", "ParameterDict", "ParameterList"}  # threads; items that are attributes
# Among PyTorch's overridable functions, what reaches beyond the tensors that it is given, or might.
BARRED = {"apply_", "autocast", "backward", "map2_", "map_", "module_load", "numpy", "pin_memory", "record_stream",
          "register_hook", "register_post_accumulate_grad_hook", "set_", "share_memory_", "storage", "storage_type",
          "untyped_storage", "const_data_ptr", "data_ptr"}
BARRED_KINDS = ("_", "fbgemm_", "miopen_", "quantized_")
# Attributes of tensors, layers and Python's containers, beside the operators that are methods of a tensor and what
# layers declare to be their constants.
ATTRIBUTES = {
    "T", "append", "bias", "data", "device", "dtype", "element_ty", "extend", "is_cuda", "items", "keys", "mT", "ndim",
    "new_empty", "new_full", "new_ones", "new_zeros", "num_heads", "running_mean", "running_var", "shape", "stride",
    "to", "training", "values", "weight"}
for layer in vars(nn).values():
    ATTRIBUTES.update(getattr(layer, "__constants__", ()))
NAMING = {"add_module", "register_buffer", "register_parameter"}  # methods of nn.Module that set an attribute
LAYER = NAMING | {"buffers", "children", "modules", "named_parameters", "parameters"}  # that act on `self` alone
# In a kernel Triton calls what it meets while it compiles, so there only these, its own language and other kernels.
KERNEL_BUILTINS = {"abs", "float", "int", "len", "max", "min", "range"}
KERNEL_ATTRIBUTES = {"T", "broadcast_to", "cast", "dtype", "element_ty", "expand_dims", "max", "min", "permute",
                     "reshape", "shape", "sum", "to", "trans", "view"}
OPTIONS = {"num_ctas", "num_stages", "num_warps"}  # of a launch
SHADOWS = {"JITCallable", "JITFunction", "backend", "constexpr", "dtype", "specialize_impl"}  # names of Triton's own
ANNOTATIONS = {"bool", "float", "int", "list", "str", "tuple", "torch.Tensor", "triton.language.constexpr"}
NODES = (  # beside those with a rule of their own
    ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Raise, ast.Assert, ast.Expr, ast.Pass,
    ast.Break, ast.Continue, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.Set, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.Compare, ast.FormattedValue, ast.JoinedStr,
    ast.Constant, ast.Subscript, ast.Starred, ast.List, ast.Tuple, ast.Slice, ast.expr_context, ast.boolop,
    ast.operator, ast.unaryop, ast.cmpop)


@functools.cache
def operators() -> tuple:
    """Names of what computes with tensors, and does nothing else: (of torch, of its functional module, methods)."""
    table = get_overridable_functions()
    return tuple({f.__name__ for f in table[part] if not f.__name__.startswith(BARRED_KINDS)} - BARRED
                 for part in (torch, nn.functional, torch.Tensor))


@functools.lru_cache(1024)
def is_plain(code) -> bool:
    """Can this source, when it runs, change nothing but objects of its own? No, if it does not parse."""
    try:
        Source(code).check()
        return True
    except (NotPlain, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class NotPlain(Exception):
    """It leaves the small language."""


def has_extension(code) -> bool:
    """Does it have nvcc compile CUDA sources? That takes most of a minute, and its kernels are no operator's."""
    return "load_inline" in code


def require(condition):
    if not condition:
        raise NotPlain


class Source:
    """A source text and what its names stand for. Every method raises NotPlain where the text leaves the language."""

    def __init__(self, code):
        self.code, self.tree = code, ast.parse(code)
        self.nodes = list(ast.walk(self.tree))
        self.functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]
        self.classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.methods = [node for part in self.classes for node in part.body if isinstance(node, ast.FunctionDef)]
        self.class_names = {node.name for node in self.classes}
        self.modules = {}  # {name in the source: module}
        self.fields = {node.attr for node in self.nodes if isinstance(node, ast.Attribute)
                       and not isinstance(node.ctx, ast.Load)}
        self.fields |= {node.args[0].value for node in self.nodes if isinstance(node, ast.Call) and node.args
                        and isinstance(node.func, ast.Attribute) and node.func.attr in NAMING
                        and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)}
        kernels = [node for node in self.functions if node.decorator_list]
        self.kernels = {node.name for node in kernels}
        self.parameters = {argument.arg for node in kernels for argument in ast.walk(node.args)
                           if isinstance(argument, ast.arg)}
        self.known = ATTRIBUTES | operators()[2]
        self.own = self.known | LAYER | self.fields | {method.name for method in self.methods}

    def check(self):
        self.check_text()
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.check_import(node)
        self.check_names()
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self.check_class(node)
            elif isinstance(node, ast.FunctionDef):
                self.check_function(node)
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                require(isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)))
                self.check_part(node)

    def check_text(self):
        """Triton takes a kernel's text from the file, from the first line that looks like a `def`: no other may."""
        rows = re.split("\r\n|\r|\n", self.code)
        require("\f" not in self.code and not any("coding" in row for row in rows[:2]))  # or it is decoded otherwise
        starts = {number for number, row in enumerate(rows, 1) if re.match(r"\s*def\b", row)}
        require(starts == {node.lineno for node in self.nodes if isinstance(node, ast.FunctionDef)})
        require(all(re.match(r"\s*def\s+\w+\s*\(", rows[number - 1]) for number in starts))

    def check_import(self, node):
        for alias in node.names:
            path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            name = alias.asname or alias.name
            require(path in MODULES and not getattr(node, "level", 0))
            require("." not in name and not name.startswith("_") and self.modules.setdefault(name, path) == path)

    def check_names(self):
        """Every name means the same wherever it stands, and `self` is the first argument of methods and nothing else.
        """
        stored = [node.id for node in self.nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
        arguments = [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        functions = [node.name for node in self.functions]
        first = [method.args.args[0].arg for method in self.methods if method.args.args]
        require(first == ["self"] * len(self.methods) and arguments.count("self") == len(first))
        bound = {*stored, *arguments, *functions}
        require("self" not in {*stored, *functions, *self.class_names, *self.modules})
        require(len(self.class_names) == len(self.classes) and not {*stored, *arguments} & self.kernels)
        require(not any(name in SHADOWS or hasattr(ast, name) for name in self.class_names | self.parameters))
        require(not (bound | self.class_names | set(self.modules)) & set(dir(builtins)))
        require(not bound & self.class_names and not (bound | self.class_names) & set(self.modules))
        named = {method.name for method in self.methods}
        used = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        require(not named & (self.known | LAYER | bound | used | (set(dir(nn.Module)) - {"__init__", "forward"})))
        require(not self.fields & set(dir(nn.Module)) - {"training"})
        others = {*stored, *arguments, *self.fields, *named, *self.class_names} - {"_", "__init__"}
        require(not any(name.startswith("_") for name in others))
        # Kernels and functions may be called _so; __so might mean something to Python.
        self.private = {name for name in functions if name.startswith("_")}
        require(not any(name.startswith("__") for name in self.private))

    def check_class(self, node):
        require(not node.decorator_list and not node.keywords)
        require([self.path(base) for base in node.bases] == ["torch.nn.Module"])
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                require(not part.decorator_list)
                self.check_function(part, node.name)
            else:
                text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                require(text or isinstance(part, ast.Pass))

    def check_function(self, node, class_name=None):
        """A kernel, if it has decorators: then `triton.jit`, before it perhaps `triton.autotune`."""
        require(not node.args.posonlyargs)
        for decorator in node.decorator_list:
            self.check_decorator(decorator)
        require(not node.decorator_list or self.path(node.decorator_list[-1]) == "triton.jit")
        require(node.returns is None or self.is_annotation(node.returns))
        self.check_arguments(node.args)
        starts = ("super().__init__()", f"super({class_name}, self).__init__()") if class_name else ()
        for part in node.body:
            if not (isinstance(part, ast.Expr) and ast.unparse(part) in starts):
                self.check_part(part, kernel=bool(node.decorator_list))

    def check_decorator(self, node):
        call, path = isinstance(node, ast.Call), self.path(node.func if isinstance(node, ast.Call) else node)
        require(path == ("triton.autotune" if call else "triton.jit"))
        if call:
            require(len(node.args) <= 2 and {keyword.arg for keyword in node.keywords} <= {"configs", "key"})
            for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
                self.check_part(part, decorator=True)

    def check_config(self, node):
        """triton.Config({parameter of a kernel: value, ...}, num_warps=...)"""
        require(len(node.args) == 1 and isinstance(node.args[0], ast.Dict))
        require(all(isinstance(key, ast.Constant) and key.value in self.parameters for key in node.args[0].keys))
        require({keyword.arg for keyword in node.keywords} <= OPTIONS)

    def check_arguments(self, node):
        for argument in [*node.args, *node.kwonlyargs, node.vararg, node.kwarg]:
            require(argument is None or argument.annotation is None or self.is_annotation(argument.annotation))
        for default in [*node.defaults, *node.kw_defaults]:
            if default is not None:
                self.check_part(default)

    def is_annotation(self, node) -> bool:
        return isinstance(node, ast.Constant) or (self.path(node) or ast.unparse(node)) in ANNOTATIONS

    def path(self, node) -> str:
        """The full dotted name of something in a module, such as torch.nn.Linear, or an empty string."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if inner is node or not isinstance(inner, ast.Name) or inner.id not in self.modules:
            return ""
        return self.modules[inner.id] + ast.unparse(node).removeprefix(inner.id)

    def check_part(self, node, kernel=False, decorator=False, called=False):
        """A statement or an expression. kernel: of a Triton kernel; called: it is what a call calls."""
        inner = functools.partial(self.check_part, kernel=kernel, decorator=decorator)
        if isinstance(node, ast.Name):
            require(not node.id.startswith("_") or node.id == "_" or node.id in self.private)
            require(node.id not in self.modules and (called or node.id not in self.class_names | self.kernels))
            require(not called or node.id in KERNEL_BUILTINS | self.kernels if kernel else node.id not in self.kernels)
            # A name that nothing has, a slip of the pen, only raises an error.
            require(node.id in BUILTINS or not hasattr(builtins, node.id))
        elif isinstance(node, ast.Attribute):
            self.check_attribute(node, inner, kernel, decorator, called)
        elif isinstance(node, ast.Call):
            self.check_call(node, inner, kernel)
        elif isinstance(node, ast.Lambda):
            require(not node.args.posonlyargs)
            self.check_arguments(node.args)
            inner(node.body)
        elif isinstance(node, ast.AnnAssign):
            require(isinstance(node.target, ast.Name) and self.is_annotation(node.annotation))
            if node.value is not None:
                inner(node.value)
        elif isinstance(node, ast.With):
            for item in node.items:  # `with torch.no_grad():`, which cannot be entered twice
                call = item.context_expr
                require(isinstance(call, ast.Call) and self.path(call.func) == "torch.no_grad")
                require(not call.args and not call.keywords and item.optional_vars is None)
            for part in node.body:
                inner(part)
        else:
            require(isinstance(node, NODES))
            for part in ast.iter_child_nodes(node):
                inner(part)

    def check_call(self, node, inner, kernel):
        path, parts = self.path(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
        named = {keyword.arg for keyword in node.keywords}
        require(all(name and not name.startswith("_") for name in named))
        if path == "triton.Config":
            self.check_config(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in NAMING:
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            require(isinstance(name, str) and not name.startswith("_"))
        if isinstance(node.func, ast.Subscript):  # a launch, kernel[grid](...), and nothing else
            require(not kernel and isinstance(node.func.value, ast.Name) and node.func.value.id in self.kernels)
            require(named <= self.parameters | OPTIONS)
            inner(node.func.slice)
        else:
            require(not kernel or isinstance(node.func, (ast.Name, ast.Attribute)))
            inner(node.func, called=True)
        if path in ("triton.language.reduce", "triton.language.associative_scan"):
            combine = node.args[2:3] + [keyword.value for keyword in node.keywords if keyword.arg == "combine_fn"]
            require(len(combine) == 1 and isinstance(combine[0], ast.Name) and combine[0].id in self.kernels)
            parts.remove(combine[0])
        for part in parts:
            require(not kernel or not isinstance(part, ast.Starred))
            inner(part)

    def check_attribute(self, node, inner, kernel, decorator, called):
        load = isinstance(node.ctx, ast.Load)
        if load and self.reachable(self.path(node), kernel, decorator, called):
            return
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            require(node.attr in self.own or not node.attr.startswith("_") and not hasattr(nn.Module, node.attr))
            require(called or node.attr not in NAMING)
        else:
            require(load and node.attr in (KERNEL_ATTRIBUTES if kernel else self.known))
            inner(node.value)

    def reachable(self, path, kernel, decorator, called) -> bool:
        """May this dotted name be used here?"""
        module, _, name = path.rpartition(".")
        if name.startswith("_"):
            return False
        if module == "torch":
            return name in TORCH or name in operators()[0] or isinstance(getattr(torch, name, None), torch.dtype)
        if module == "torch.nn":
            layer = getattr(nn, name, None)
            able = isinstance(layer, type) and issubclass(layer, (nn.Module, nn.Parameter)) and name not in NO_LAYERS
            return able and called
        if module == "torch.nn.functional":
            return name in FUNCTIONAL or name in operators()[1]
        if module == "torch.nn.init":
            return name.endswith("_") and called
        if module in ("triton.language", "triton.language.math"):
            value = getattr(tl, name, None) if name in tl.__all__ else None
            if isinstance(value, tl.dtype) or name == "constexpr" and called:
                return True
            able = callable(value) and not isinstance(value, type) and called and kernel
            return able and name not in ("inline_asm_elementwise", "map_elementwise")
        if module == "triton":
            return name in ("cdiv", "next_power_of_2") or name == "Config" and decorator and called
        return module == "math" and name in dir(math)


# ----------------------------------------------------------------------------------------------------------------------
# A second look, at the process itself


def state() -> dict:
    """What a candidate could have changed: settings, what modules hold, everything about classes."""
    found = {("settings", 0): (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cuda"),
                               torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
                               torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled())}
    modules = [builtins, math, torch, nn.functional, nn.init, triton, tl, tl.math]
    classes = [torch.Tensor, triton.runtime.jit.JITFunction, triton.runtime.Autotuner, tl.tensor]
    classes += [layer for layer in vars(nn).values() if isinstance(layer, type)]
    for where in modules:
        found |= {(where.__name__, name): id(value) for name, value in list(vars(where).items())
                  if not isinstance(value, types.ModuleType) and not name.startswith("_")}
    for where in classes:
        found[where.__name__, None] = {name: id(value) for name, value in vars(where).items()
                                       if name != "__annotations__"}
    return found


def unchanged(before) -> bool:
    """Is everything as it was? Something new in a module, which may have been imported on the way, is no change."""
    after = state()
    return all(after.get(key) == value for key, value in before.items())
