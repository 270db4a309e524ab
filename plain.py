"""Which candidates may share a process on a GPU, one after the other.

To start and end a CUDA process takes the driver a quarter of a second, and it does so for one at a time: more than
everything else that a small kernel's verdict takes. So a process whose candidate has left nothing behind is given to
the next one of the same task. That it has left nothing is not tested but read off the source: a source is *plain* if
all that it can reach are its own objects, PyTorch's operators and layers, and Triton. That is a small language, without
getattr, files, `global`, names that begin with an underscore, and assignments to attributes of anything but `self`.
What the teacher writes lies within; everything else runs in a process of its own.

A plain kernel that writes beyond its tensors writes into memory that is given back before the next candidate comes, or
that the next one's inputs overwrite; one that crashes or hangs takes its process with it.
"""

import ast
import builtins
import functools
import math

import torch
import torch.nn as nn
import triton.language as tl
from torch.overrides import get_overridable_functions

NODES = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.arg, ast.Lambda,
    ast.ClassDef, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.With,
    ast.withitem, ast.Raise, ast.Assert, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.NamedExpr,
    ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.FormattedValue, ast.JoinedStr, ast.Constant,
    ast.Attribute, ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.expr_context, ast.boolop,
    ast.operator, ast.unaryop, ast.cmpop)
BUILTINS = {"abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
            "print", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "zip",
            "AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError"}
MODULES = {"math", "torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "triton", "triton.language",
           "triton.language.math"}
TORCH = {"Size", "Tensor", "arange", "device", "empty", "empty_strided", "eye", "finfo", "full", "linspace", "no_grad",
         "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
FUNCTIONAL = {"hardsigmoid", "hardswish", "logsigmoid", "sigmoid", "tanh", "threshold"}
TRITON = {"Config", "autotune", "cdiv", "heuristics", "jit", "next_power_of_2"}
# Attributes of tensors, layers and Python's containers, beside the operators that are methods of a tensor and what
# layers declare to be their constants.
ATTRIBUTES = {
    "T", "append", "bias", "data", "device", "dtype", "element_ty", "extend", "is_cuda", "items", "keys", "mT", "ndim",
    "new_empty", "new_full", "new_ones", "new_zeros", "num_heads", "running_mean", "running_var", "shape", "stride",
    "to", "training", "values", "weight"}
for layer in vars(nn).values():
    ATTRIBUTES.update(getattr(layer, "__constants__", ()))
LAYER = {"add_module", "buffers", "children", "modules", "named_parameters", "parameters", "register_buffer",
         "register_parameter"}  # methods of nn.Module that act on `self` alone
# Among PyTorch's overridable functions, what reaches beyond the tensors that it is given, or might.
BARRED = {"apply_", "autocast", "backward", "map2_", "map_", "module_load", "numpy", "pin_memory", "record_stream",
          "register_hook", "register_post_accumulate_grad_hook", "set_", "share_memory_", "storage", "storage_type",
          "untyped_storage"}


@functools.cache
def operators() -> tuple:
    """Names of what computes with tensors, and does nothing else: (of torch, of its functional module, methods)."""
    table = get_overridable_functions()
    return tuple({f.__name__ for f in table[part] if not f.__name__.startswith("_")} - BARRED
                 for part in (torch, nn.functional, torch.Tensor))


def reachable(path) -> bool:
    """May a plain source use this dotted name, such as torch.nn.Linear?"""
    module, _, name = path.rpartition(".")
    if module == "torch":
        return name in TORCH or name in operators()[0] or isinstance(getattr(torch, name, None), torch.dtype)
    if module == "torch.nn":
        layer = getattr(nn, name, None)
        return isinstance(layer, type) and issubclass(layer, (nn.Module, nn.Parameter)) and name != "DataParallel"
    if module == "torch.nn.functional":
        return name in FUNCTIONAL or name in operators()[1]
    if module == "torch.nn.init":
        return name.endswith("_") and not name.startswith("_")
    if module in ("triton.language", "triton.language.math"):
        return name in tl.__all__ and name not in ("extra", "inline_asm_elementwise", "math", "target_info")
    return name in TRITON if module == "triton" else module == "math" and name in dir(math)


@functools.lru_cache(1024)
def is_plain(code) -> bool:
    """Can this source, when it runs, change nothing but objects of its own? No, if it does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    modules = modules_in(nodes)
    if modules is None or not all(isinstance(node, NODES) for node in nodes):
        return False
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [node for part in classes for node in part.body if isinstance(node, ast.FunctionDef)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node not in methods}
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
    fields = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)}
    fields |= {node.args[0].value for node in nodes if isinstance(node, ast.Call) and node.args
               and ast.unparse(node.func) in ("self.register_buffer", "self.register_parameter")
               and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)}
    named = {method.name for method in methods}
    known = ATTRIBUTES | operators()[2]
    # `self` is the model: the first argument of methods and nothing else. Were a method to be had by another name, or
    # by one that any object may have, it could be called with something else in the place of `self`.
    first = [method.args.args[0].arg for method in methods if method.args.args and not method.decorator_list]
    if first != ["self"] * len(methods) or arguments.count("self") != len(methods) or "self" in bound:
        return False
    bound |= set(arguments)
    if named & (known | LAYER | bound | {node.id for node in nodes if isinstance(node, ast.Name)}) or any(
            part.keywords or part.decorator_list for part in classes):
        return False
    # Names mean what they say, in whatever scope: nothing is called like a module, or like anything that Python has.
    own = bound | fields | named
    if bound & {*modules, *dir(builtins)} or any(name.startswith("_") for name in own - {"_", "__init__"}):
        return False
    return fits(tree, modules, known, known | LAYER | fields | named)


def modules_in(nodes) -> dict | None:
    """{name in the source: module} of what is imported, or None if that is anything but MODULES."""
    modules = {}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                name = alias.asname or alias.name
                if path not in MODULES or "." in name or modules.setdefault(name, path) != path:
                    return None
    return modules


def fits(node, modules, known, own) -> bool:
    """Does this part of a source keep to plain names and attributes? known: of any object; own: of `self`.

    A name that nothing has, a slip of the pen, only raises an error.
    """
    if isinstance(node, ast.Name):
        taken = node.id in modules or hasattr(builtins, node.id) or node.id.startswith("_") and node.id != "_"
        return node.id in BUILTINS or not taken
    if isinstance(node, ast.Attribute):
        root, _, rest = ast.unparse(node).partition(".")
        load = isinstance(node.ctx, ast.Load)
        if load and root in modules and reachable(f"{modules[root]}.{rest}"):
            return True
        if load and node.attr == "__init__":  # super().__init__()
            return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr in own or not (node.attr.startswith("_") or hasattr(nn.Module, node.attr))
        return load and node.attr in known and fits(node.value, modules, known, own)
    return all(fits(child, modules, known, own) for child in ast.iter_child_nodes(node))
