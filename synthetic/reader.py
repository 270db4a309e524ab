"""What a problem's forward does: a list of steps with known shapes, read with Python's own parser. Part of the expert.

Every statement is split until each step is one operator or one pointwise expression, and evaluated on the meta device
for its shape. torch.f(x), F.f(x), x.f() and self.layer(x) are one form from here on.
"""

import ast
import copy
import re
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

from synthetic.codegen import Unsupported, diagonal
from synthetic.operators import ALIASES, ARITHMETIC, POINTWISE, ROWS, operator_of


@dataclass
class Step:
    """One assignment of the forward pass."""

    target: str  # the variable it assigns
    text: str  # the torch expression, as source
    kind: str  # "pointwise", "row", "norm", "matmul", "all" (reduction over everything), "torch"
    node: ast.AST = None  # the expression
    op: str = ""  # row: key of ROWS; all: sum or mean; norm: group or instance; pointwise: diagonal, or nothing
    source: str = ""  # the variable it reads, except for pointwise expressions
    layout: str = ""  # row: "last" or "spatial"
    module: str = ""  # attribute of the layer, if it is one
    weight: str = ""  # matmul: the second factor, as source
    shape: tuple = ()  # of the target
    reads: set = field(default_factory=set)  # variables
    values: dict = None  # every variable's value on the meta device when the step runs


@dataclass
class ParsedModel:
    """A problem's Model as steps, with what a ModelNew has to copy."""

    signature: str  # constructor arguments, verbatim
    init: list  # constructor lines, verbatim
    inputs: list  # names of forward's arguments
    steps: list[Step]
    result: str  # the variable that forward returns
    model: nn.Module  # on the meta device
    classes: str  # other classes of the file, verbatim
    has_init: bool
    reader: "_Reader"

    @property
    def operators(self) -> list[str]:
        """Names of the operators in the order of the forward pass."""
        names = []
        for step in self.steps:
            call = self.reader.call(step.node)
            name = "arithmetic" if call is None else call.name if call.module is None else type(call.module).__name__
            if names[-1:] != [name]:
                names.append(name)
        return names


def read(task) -> ParsedModel | None:
    """Parse a task (anything with `.source`). None when it uses Python that the reader does not follow."""
    try:
        return _Reader(task.source).parsed()
    except (Unsupported, AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, NotImplementedError,
            NameError, AssertionError):
        return None


@dataclass
class _Call:
    name: str
    arguments: list  # tensor operands first
    keywords: dict
    module: nn.Module = None
    attribute: str = ""  # of self, for a layer
    pointwise: bool = False
    view: bool = False  # not a computation on tensors


class _Reader:
    def __init__(self, source):
        self.source = source
        tree = ast.parse(source)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        model_class = next(node for node in classes if node.name == "Model")
        self.others = "\n\n".join(ast.get_source_segment(source, node) for node in classes if node is not model_class)
        methods = {node.name: node for node in model_class.body if isinstance(node, ast.FunctionDef)}
        if set(methods) - {"__init__", "forward"}:
            raise Unsupported
        self.forward, self.constructor = methods["forward"], methods.get("__init__")
        self.space = {}
        with torch.device("meta"):
            exec(compile(source, "problem", "exec"), self.space)
            self.model = self.space["Model"](*self.space["get_init_inputs"]())
            inputs = self.space["get_inputs"]()
        self.names = [a.arg for a in self.forward.args.args[1:]]
        self.values = dict(zip(self.names, inputs))  # variable -> meta tensor or number
        self.steps = []

    def parsed(self) -> ParsedModel:
        init, signature, result = [], "self", None
        if self.constructor:
            signature = ast.unparse(self.constructor.args)
            init = [ast.get_source_segment(self.source, node) for node in self.constructor.body
                    if not _is_docstring(node) and "super(" not in ast.unparse(node)]
        for node in self.forward.body:
            if _is_docstring(node):
                continue
            if isinstance(node, ast.Return):
                named = isinstance(node.value, ast.Name)
                result = node.value.id if named else self.assign(self.names[0], node.value)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.assign(node.targets[0].id, node.value)
            else:
                raise Unsupported
        return ParsedModel(signature, init, self.names, self.steps, result, self.model, self.others,
                           self.constructor is not None, self)

    # ---- one statement

    def assign(self, target, node) -> str:
        """Split an expression into steps, innermost first, and append them. Returns the target's name."""
        node = self.hoist(copy.deepcopy(node), target)
        if isinstance(node, ast.Name) and node.id == target:
            return target
        step = self.classify(target, node)
        step.reads = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in self.values}
        step.values = {name: value for name, value in self.values.items() if value is not None}
        value = self.evaluate(node, step.values)
        if isinstance(value, tuple):
            raise Unsupported
        self.values[target] = value
        step.shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        self.steps.append(step)
        return target

    def evaluate(self, node, values):
        """The value of an expression on the meta device: shapes without data."""
        space = dict(self.space, torch=torch, F=F, self=self.model, **values)
        with torch.device("meta"), torch.no_grad():
            return eval(compile(ast.Expression(ast.fix_missing_locations(copy.deepcopy(node))), "step", "eval"), space)

    def hoist(self, root, target):
        """Give every non-pointwise call inside an expression a statement of its own; returns what is left of it."""

        def named(node):  # turn a subexpression into a variable
            # `x = relu(conv(x))` may reuse x for the intermediate; `x = x + conv(x)` may not.
            name = target if _mentions(root, target) == _mentions(node, target) else self.fresh()
            self.assign(name, node)
            return ast.Name(name, ast.Load())

        def walk(node, top):
            picked = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else None
            if isinstance(picked, ast.Call) and (call := self.call(picked)).name in ("max", "min"):
                # torch.max(x, dim=1)[0]: one step, although the call alone returns a pair.
                if not isinstance(call.arguments[0], ast.Name):
                    raise Unsupported
                return node if top else named(node)
            for key, value in ast.iter_fields(node):
                if isinstance(value, ast.AST):
                    setattr(node, key, walk(value, False))
                elif isinstance(value, list):
                    value[:] = [walk(v, False) if isinstance(v, ast.AST) else v for v in value]
            call = self.call(node)
            if call is None or call.pointwise or call.view:
                return node
            # A reduction or a layer reads a variable: its operand becomes one if it is a larger expression.
            operand = call.arguments[0] if call.arguments else None
            if isinstance(operand, (ast.BinOp, ast.UnaryOp, ast.Call)) and diagonal(operand) is None:
                name = named(operand)
                if isinstance(node, ast.BinOp):
                    node.left = name
                elif node.args and node.args[0] is operand:
                    node.args[0] = name
                else:
                    node.func.value = name
            return node if top else named(node)

        root = _spell_out(root)
        return walk(root, True)

    def fresh(self) -> str:
        name = next(n for n in ["t"] + [f"t{i}" for i in range(1, 9)] if n not in self.values)
        self.values[name] = None
        return name

    # ---- expressions

    def call(self, node) -> _Call | None:
        """Resolve torch.f(x), F.f(x), x.f() and self.layer(x) to one form; None for anything that is not a call."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return _Call("matmul", [node.left, node.right], {})
        if not isinstance(node, ast.Call):
            return None
        arguments, keywords = list(node.args), {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Name):
            return _Call(node.func.id, arguments, keywords)
        owner, name = ast.unparse(node.func.value), node.func.attr
        if owner == "self":
            layer = getattr(self.model, name)
            operator = operator_of(layer)
            return _Call(operator or type(layer).__name__, arguments, keywords, layer, name, operator is not None)
        if owner not in ("torch", "F", "nn.functional", "torch.nn.functional"):
            arguments = [node.func.value] + arguments
        name = ALIASES.get(name, name)
        if name == "gelu" and "approximate" in keywords and ast.literal_eval(keywords["approximate"]) == "tanh":
            name = "gelu_tanh"
        reduced = name in ("smooth_l1_loss", "binary_cross_entropy_with_logits") and "reduction" not in keywords
        pointwise = (name in POINTWISE or name in ARITHMETIC or name == "pow") and not reduced
        return _Call(name, arguments, keywords, pointwise=pointwise,
                     view=name in ("size", "dim", "numel", "diag", "tensor"))

    def classify(self, target, node) -> Step:
        """The step that assigns an expression, without its shape."""
        call = self.call(node)
        step = Step(target, ast.unparse(node), "torch", node)
        if call is None or call.pointwise:
            step.kind = "pointwise" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)) else "torch"
            return step
        source = call.arguments[0] if call.arguments else None
        value = self.values.get(source.id) if isinstance(source, ast.Name) else None
        if not isinstance(value, torch.Tensor):
            if call.name == "matmul" and diagonal(source) is not None and isinstance(call.arguments[1], ast.Name):
                step.kind, step.op, step.source = "pointwise", "diagonal", call.arguments[1].id
            return step
        step.source = source.id
        layer = call.module
        name = type(layer).__name__ if layer is not None else call.name
        name = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "max": "amax", "min": "amin"}.get(name, name)
        if layer is not None:
            step.module = call.attribute
        if name in ("GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d") and value.dim() > 2:
            if not getattr(layer, "track_running_stats", False):
                step.kind, step.op = "norm", "group" if name == "GroupNorm" else "instance"
        elif name == "LayerNorm":
            if len(layer.normalized_shape) == 1 and layer.weight is not None and layer.bias is not None:
                step.kind, step.op, step.layout = "row", "layer_norm", "last"
        elif name in ROWS:
            self.classify_row(step, name, call, value)
        elif name in ("Linear", "matmul", "mm") and value.dim() == 2:
            weight = f"self.{call.attribute}.weight" if layer is not None else ast.unparse(call.arguments[1])
            factor = self.evaluate(ast.parse(weight, mode="eval").body, self.values)
            if isinstance(factor, torch.Tensor) and factor.dim() == 2 and re.fullmatch(r"[\w.]+", weight):
                step.kind, step.weight = "matmul", weight
        return step

    def classify_row(self, step, name, call, value):
        """A call over dimensions: fits a row kernel if those are the last one, or all spatial ones of (N, C, H, W)."""
        if call.module is not None:
            dim = call.module.dim
        else:
            norm = name in ("norm", "normalize")
            positional = call.arguments[2 if norm else 1:]
            dim = call.keywords.get("dim", positional[0] if positional else None)
            dim = self.evaluate(dim, self.values) if dim is not None else None
            if norm and (len(call.arguments) > 1 or "p" in call.keywords
                         and self.evaluate(call.keywords["p"], self.values) != 2):
                return
            if call.name in ("max", "min") and dim is not None:
                return  # returns (values, indices)
            if dim is None and name in ("sum", "mean"):
                step.kind, step.op = "all", name
                return
            if dim is None and name == "normalize":
                dim = 1
        if dim is None:
            return
        dims = [d % value.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
        spatial = list(range(2, value.dim()))
        if dims == [value.dim() - 1]:
            step.layout = "last"
        elif ROWS[name].reduces and dims == spatial and len(spatial) > 1:
            step.layout = "spatial"
        else:
            return
        step.kind, step.op = "row", name


def _is_docstring(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _mentions(node, name) -> int:
    """How often a variable stands in an expression."""
    return sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def _spell_out(node):
    """Rewrite loss functions as a pointwise expression under a mean, so that the general rules apply."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords \
            or len(node.args) != 2:
        return node
    a, b = (ast.unparse(arg) for arg in node.args)
    name = node.func.attr
    terms = {"mse_loss": f"({a} - {b}) ** 2", "l1_loss": f"torch.abs({a} - {b})"}.get(name)
    if name in ("smooth_l1_loss", "binary_cross_entropy_with_logits"):
        terms = f"F.{name}({a}, {b}, reduction='none')"
    return ast.parse(f"torch.mean({terms})", mode="eval").body if terms else node
