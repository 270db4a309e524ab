"""Which candidates may share a process on a GPU, one after the other.

To start and end a CUDA process takes the driver a quarter of a second, and it does so for one at a time: more than
everything else that a small kernel's verdict takes. So a process whose candidate has left nothing behind is given to
the next one of the same task. That it leaves nothing is read off its source, which is *side-effect-free* if it keeps to
a small language:

    a module              imports, constants, functions, Triton kernels, classes derived from nn.Module; nothing nested
    a class               methods; `self.name = ...` is the only way to set an attribute, of the model and nothing else:
                          classes and layers can only be called, never named otherwise, so that no method ever runs
                          with anything but a model in the place of `self`
    what can be named     PyTorch's operators, layers and dtypes, `math`, a few of Python's functions, and within
                          kernels Triton's language; no getattr, no files, nothing that begins with an underscore but
                          the name of a kernel or function (the tables are in rules.py)

What the expert writes lies within, and most of what a policy gets wrong, too; everything else (an autotuned kernel,
for example) runs in a process of its own. `unchanged` looks in addition whether anything is different after a
candidate from what it was before.

A side-effect-free kernel that writes beyond its tensors writes into memory that is given back before the next candidate
comes, or that the next one's inputs overwrite; one that crashes or hangs takes its process with it. A kernel that
computes addresses out of numbers could do more: like native code, it is not stopped (sandbox.py).
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

from judge import rules

# Attributes of tensors and layers, with what layers declare to be their constants.
KNOWN_ATTRIBUTES = rules.ATTRIBUTES.union(*(getattr(layer, "__constants__", ()) for layer in vars(nn).values()))


@functools.cache
def operators() -> tuple:
    """Names of what computes with tensors, and does nothing else: (of torch, of its functional module, methods)."""
    table = get_overridable_functions()
    return tuple({f.__name__ for f in table[part] if not f.__name__.startswith(rules.BARRED_PREFIXES)} - rules.BARRED
                 for part in (torch, nn.functional, torch.Tensor))


@functools.lru_cache(1024)
def is_side_effect_free(code) -> bool:
    """Can this source, when it runs, change nothing but objects of its own? No, if it does not parse."""
    try:
        Source(code).check()
        return True
    except (NotAllowed, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class NotAllowed(Exception):
    """Something that is not part of the small language."""


def has_extension(code) -> bool:
    """Does it have nvcc compile CUDA sources? That takes most of a minute, and its kernels are no operator's."""
    return "load_inline" in code


def require(condition):
    if not condition:
        raise NotAllowed


class Source:
    """A source text and what its names stand for. Every method raises NotAllowed where the text leaves the language.

    modules: {name in the source: module}; registered: names that register_buffer and the like are given; fields:
    attributes that are set somewhere; known: attributes of anything; own: those of `self`. All names mean the same
    wherever they stand (`check_names`), so no scopes are needed.
    """

    def __init__(self, code):
        self.code, self.tree = code, rules.parse(code)
        self.nodes = list(ast.walk(self.tree))
        self.functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]
        self.classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.methods = [node for part in self.classes for node in part.body if isinstance(node, ast.FunctionDef)]
        self.class_names = {node.name for node in self.classes}
        kernels = [node for node in self.functions if node.decorator_list]
        self.kernels = {node.name for node in kernels}
        self.parameters = {argument.arg for node in kernels for argument in ast.walk(node.args)
                           if isinstance(argument, ast.arg)}
        registering = [node for node in self.nodes if isinstance(node, ast.Call)
                       and isinstance(node.func, ast.Attribute) and node.func.attr in rules.REGISTERING]
        self.registered = {getattr(node.args[0], "value", None) if node.args else None for node in registering}
        self.fields = self.registered | {node.attr for node in self.nodes if isinstance(node, ast.Attribute)
                                         and not isinstance(node.ctx, ast.Load)}
        self.modules = {}
        self.known = KNOWN_ATTRIBUTES | operators()[2]
        self.own = self.known | rules.OWN_METHODS | self.fields | {method.name for method in self.methods}

    def check(self):
        self.check_text()
        for name, path in rules.imports(self.tree):
            require(path in rules.MODULES and "." not in name and not name.startswith("_"))
            require(self.modules.setdefault(name, path) == path)
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

    def check_names(self):
        """Every name means the same wherever it stands, and `self` is the first argument of methods and nothing else.
        """
        require(all(isinstance(name, str) and not name.startswith("_") for name in self.registered))
        stored = {node.id for node in self.nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        used = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        arguments = [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        functions, methods = {node.name for node in self.functions}, {method.name for method in self.methods}
        variables = stored | set(arguments) | functions
        first = [method.args.args[0].arg for method in self.methods if method.args.args]
        require(first == ["self"] * len(self.methods) and arguments.count("self") == len(first))
        require("self" not in stored | functions | self.class_names | set(self.modules))
        # Kernels, classes and modules are never assigned, and no name is one of Python's own.
        require(len(self.class_names) == len(self.classes) and not (stored | set(arguments)) & self.kernels)
        require(not variables & self.class_names and not (variables | self.class_names) & set(self.modules))
        require(not (variables | self.class_names | set(self.modules)) & set(dir(builtins)))
        for name in self.class_names | self.parameters:
            require(name not in rules.TRITON_NAMES and not hasattr(ast, name))
        # Methods and attributes hide nothing that nn.Module or a tensor has.
        hidden = self.known | rules.OWN_METHODS | variables | used | set(dir(nn.Module)) - {"__init__", "forward"}
        require(not methods & hidden and not self.fields & set(dir(nn.Module)) - {"training"})
        # Kernels and functions may be called _so; __so might mean something to Python.
        self.private = {name for name in functions if name.startswith("_")}
        require(not any(name.startswith("__") for name in self.private))
        others = stored | set(arguments) | self.fields | methods | self.class_names
        require(not any(name.startswith("_") for name in others - {"_", "__init__"}))

    def check_class(self, node):
        require(not node.decorator_list and not node.keywords)
        require([self.path(base) for base in node.bases] == ["torch.nn.Module"])
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                require(not part.decorator_list)
                self.check_function(part, node.name)
            else:
                is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                require(is_text or isinstance(part, ast.Pass))

    def check_function(self, node, class_name=None):
        """A function, a method of a class, or a kernel, whose only decorator is `triton.jit`."""
        require([self.path(decorator) for decorator in node.decorator_list] in ([], ["triton.jit"]))
        require(self.is_annotation(node.returns))
        self.check_arguments(node.args)
        starts = ("super().__init__()", f"super({class_name}, self).__init__()") if class_name else ()
        for part in node.body:
            if not (isinstance(part, ast.Expr) and ast.unparse(part) in starts):
                self.check_part(part, kernel=bool(node.decorator_list))

    def check_arguments(self, node):
        require(not node.posonlyargs)
        for argument in [*node.args, *node.kwonlyargs, node.vararg, node.kwarg]:
            require(argument is None or self.is_annotation(argument.annotation))
        for default in filter(None, [*node.defaults, *node.kw_defaults]):
            self.check_part(default)

    def is_annotation(self, node) -> bool:
        """May this stand as an annotation? None: there is none."""
        if node is None or isinstance(node, ast.Constant):
            return True
        return (self.path(node) or ast.unparse(node)) in rules.ANNOTATIONS

    def path(self, node) -> str:
        """The full dotted name of something in a module, such as torch.nn.Linear, or an empty string."""
        root, *rest = rules.dotted(node) or [""]
        return ".".join([self.modules[root], *rest]) if rest and root in self.modules else ""

    def check_part(self, node, kernel=False, called=False):
        """A statement or an expression. kernel: of a Triton kernel; called: it is what a call calls."""
        if isinstance(node, ast.Name):
            self.check_name(node.id, kernel, called)
        elif isinstance(node, ast.Attribute):
            self.check_attribute(node, kernel, called)
        elif isinstance(node, ast.Call):
            self.check_call(node, kernel)
        elif isinstance(node, ast.Lambda):
            self.check_arguments(node.args)
            self.check_part(node.body, kernel)
        elif isinstance(node, ast.AnnAssign):  # SIZE: tl.constexpr = 1024
            require(isinstance(node.target, ast.Name) and self.is_annotation(node.annotation))
            if node.value is not None:
                self.check_part(node.value, kernel)
        elif isinstance(node, ast.With):
            # Only made on the spot, so that none is entered twice.
            require(self.modules.get("torch") == "torch")
            require(all(ast.unparse(item) == "torch.no_grad()" for item in node.items))
            for part in node.body:
                self.check_part(part, kernel)
        else:
            require(isinstance(node, rules.SYNTAX))
            for part in ast.iter_child_nodes(node):
                self.check_part(part, kernel)

    def check_name(self, name, kernel, called):
        require(not name.startswith("_") or name == "_" or name in self.private)
        require(name not in self.modules and (called or name not in self.class_names))
        require(name not in self.kernels or kernel and called)  # launches are calls of another form, see check_call
        require(not (kernel and called) or name in rules.JIT_BUILTINS | self.kernels)
        require(name in rules.BUILTINS or not hasattr(builtins, name))  # a name that nothing has only raises an error

    def check_call(self, node, kernel):
        path, parts = self.path(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
        named = {keyword.arg for keyword in node.keywords}
        require(all(name and not name.startswith("_") for name in named))
        if isinstance(node.func, ast.Subscript):  # a launch, kernel[grid](...), and nothing else
            require(not kernel and isinstance(node.func.value, ast.Name) and node.func.value.id in self.kernels)
            require(named <= self.parameters | rules.LAUNCH_OPTIONS)
            self.check_part(node.func.slice)
        else:
            require(not kernel or isinstance(node.func, (ast.Name, ast.Attribute)))
            self.check_part(node.func, kernel, called=True)
        if path in ("triton.language.reduce", "triton.language.associative_scan"):
            combine = node.args[2:3] + [keyword.value for keyword in node.keywords if keyword.arg == "combine_fn"]
            require(len(combine) == 1 and isinstance(combine[0], ast.Name) and combine[0].id in self.kernels)
            parts.remove(combine[0])
        for part in parts:
            require(not kernel or not isinstance(part, ast.Starred))
            self.check_part(part, kernel)

    def check_attribute(self, node, kernel, called):
        load = isinstance(node.ctx, ast.Load)
        if load and self.reachable(self.path(node), kernel, called):
            return
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            require(node.attr in self.own or not node.attr.startswith("_") and not hasattr(nn.Module, node.attr))
            require(called or node.attr not in rules.REGISTERING)
        else:
            require(load and node.attr in (rules.JIT_ATTRIBUTES if kernel else self.known))
            self.check_part(node.value, kernel)

    def reachable(self, path, kernel, called) -> bool:
        """May this dotted name be used here?"""
        module, _, name = path.rpartition(".")
        if name.startswith("_"):
            return False
        if module == "torch":
            return name in rules.TORCH or name in operators()[0] or isinstance(getattr(torch, name, None), torch.dtype)
        if module == "torch.nn":
            layer = getattr(nn, name, None)
            is_layer = isinstance(layer, type) and issubclass(layer, (nn.Module, nn.Parameter))
            return is_layer and called and name not in rules.NO_LAYERS
        if module == "torch.nn.functional":
            return name in rules.FUNCTIONAL or name in operators()[1]
        if module == "torch.nn.init":
            return name.endswith("_") and called
        if module in ("triton.language", "triton.language.math"):
            value = getattr(tl, name, None) if name in tl.__all__ else None
            if isinstance(value, tl.dtype) or name == "constexpr" and called:
                return True
            is_function = callable(value) and not isinstance(value, type)
            return is_function and called and kernel and name not in rules.NOT_IN_KERNELS
        return module == "triton" and name in rules.KERNEL_HELPERS or module == "math" and name in dir(math)


# ---------------------------------------------------------------------------------------------------------------------
# A second look, at the process itself


def state() -> dict:
    """What a candidate could have changed: settings, what modules hold, everything about classes."""
    found = {("settings", 0): (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cuda"),
                               torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
                               torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled())}
    for module in (builtins, math, torch, nn.functional, nn.init, triton, tl, tl.math):
        found |= {(module.__name__, name): id(value) for name, value in list(vars(module).items())
                  if not isinstance(value, types.ModuleType) and not name.startswith("_")}
    layers = [layer for layer in vars(nn).values() if isinstance(layer, type)]
    for kind in (torch.Tensor, triton.runtime.jit.JITFunction, triton.runtime.Autotuner, tl.tensor, *layers):
        found[kind.__name__, None] = {name: id(value) for name, value in vars(kind).items()
                                      if name != "__annotations__"}
    return found


def unchanged(before) -> bool:
    """Is everything as it was? Something new in a module, which may have been imported on the way, is no change."""
    after = state()
    return all(after.get(key) == value for key, value in before.items())
