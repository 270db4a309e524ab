"""A whole problem as steps: its classes, what their methods are called with, what a ModelNew has to copy.

The model runs once without data (PyTorch's meta device), which tells what each method of the problem's classes is
called with. reader.py then reads the methods one by one; those that it cannot follow are copied as they are.
"""

import ast
import contextlib
import inspect
import symtable
from collections import defaultdict
from dataclasses import dataclass

from synthetic.codegen import Unsupported
from synthetic.reader import Body, is_docstring, without_data

_IMPORTED = {"torch", "nn", "F", "triton", "tl"}  # by every solution


@dataclass
class Method:
    name: str
    signature: str
    lines: list[str]  # as they are, without docstring
    body: Body | None = None  # its steps; None if it cannot be followed or is not called


@dataclass
class Part:
    """A class of the problem."""

    name: str
    bases: str
    lines: list[str]  # outside its methods
    methods: list[Method]


@dataclass
class ParsedModel:
    """A problem as steps, with what a ModelNew has to copy."""

    parts: list[Part]  # Model is the last one
    preamble: str  # imports, constants and functions that the classes use

    @property
    def bodies(self) -> list[Body]:
        """All that was followed."""
        return [method.body for part in self.parts for method in part.methods if method.body]

    @property
    def operators(self) -> list[str]:
        """Names of the operators in the order of the forward pass."""
        names = []
        for body in self.bodies[::-1]:
            for step in body.steps:
                call = body.call(step.node)
                name = "arithmetic" if call is None else type(call.module).__name__ if call.module else call.name
                if names[-1:] != [name] and step.kind != "statement":
                    names.append(name)
        return names


def read(task) -> ParsedModel | None:
    """`follow`, or None when the problem cannot be followed."""
    with contextlib.suppress(Unsupported):
        return follow(task)


def follow(task) -> ParsedModel:
    """Parse a task (anything with `.source`). Raises Unsupported when the reader can follow none of its methods."""
    source, tree, space = task.source, ast.parse(task.source), {}
    classes = sorted((n for n in tree.body if isinstance(n, ast.ClassDef)), key=lambda node: node.name == "Model")
    try:
        with without_data():
            exec(compile(source, "problem", "exec"), space)
            model, inputs = space["Model"](*space["get_init_inputs"]()), space["get_inputs"]()
            calls = _record_calls([space[node.name] for node in classes])
            model(*inputs)
    except Exception as error:  # whatever a problem may raise
        raise Unsupported("does not run without data") from error
    parts, why = [], ""
    for node in classes:
        part = Part(node.name, ", ".join(map(ast.unparse, node.bases)), [], [])
        parts.append(part)
        for item in node.body:
            if not isinstance(item, ast.FunctionDef):
                part.lines += [] if is_docstring(item) else [ast.get_source_segment(source, item)]
                continue
            lines = [ast.get_source_segment(source, n) for n in item.body if not is_docstring(n)]
            method = Method(item.name, ast.unparse(item.args), lines)
            part.methods.append(method)
            called = list(calls[node.name, item.name].values())
            for expand in (True, False):
                try:
                    method.body = method.body or _same_steps(space, item, called, expand)
                except Exception as error:  # what an expression without data may raise
                    why = str(error) if isinstance(error, Unsupported) else "an expression"
    parsed = ParsedModel(parts, _preamble(tree, source, classes))
    if not parsed.bodies:
        raise Unsupported(why)
    return parsed


def _same_steps(space, node, called, expand) -> Body | None:
    """A method's steps if they are the same for all objects, which may hold sequences of different layers; else None.

    called: (object, {argument: value}) pairs. expand: write loops over layers, and sequences of them, out.
    """
    bodies = [Body(space, node, owner, values, expand) for owner, values in called]
    return bodies[0] if len({tuple(step.text for step in body.steps) for body in bodies}) == 1 else None


def _record_calls(classes) -> dict:
    """Record what each method is called with from here on: (class, method) -> {id: (object, {argument: value})}."""
    calls = defaultdict(dict)

    def recorded(function, seen):
        signature = inspect.signature(function)

        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            seen.setdefault(id(args[0]), (args[0], dict(list(bound.arguments.items())[1:])))
            return function(*args, **kwargs)
        return wrapper

    for cls in classes:
        for name, function in list(vars(cls).items()):
            if inspect.isfunction(function) and not name.startswith("__"):
                setattr(cls, name, recorded(function, calls[cls.__name__, name]))
    return calls


def _preamble(tree, source, classes) -> str:
    """What stands outside the classes and is used inside them: imports, constants, functions."""
    used, kept = set().union(*map(_from_outside, classes)), []
    for node in reversed(tree.body):  # a function may use what stands before it
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names} - _IMPORTED
        elif isinstance(node, ast.Assign):
            names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        else:
            names = {node.name} if isinstance(node, ast.FunctionDef) else set()
        if names & used:
            kept.append(ast.get_source_segment(source, node))
            used |= _from_outside(node)
    return "\n".join(reversed(kept))


def _from_outside(node) -> set[str]:
    """Names that a statement reads and does not define itself, as an argument or a variable of a function would be."""
    names, scopes = set(), [symtable.symtable(ast.unparse(node), "", "exec")]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        names |= {symbol.get_name() for symbol in scope.get_symbols()
                  if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module")}
    return names
