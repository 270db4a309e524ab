"""What a problem's forward does: a list of steps with known shapes, read with Python's own parser. Part of the expert.

Every statement is split until each step is one operator or one pointwise expression, and evaluated on the meta device
for its shape. torch.f(x), F.f(x), x.f() and self.layer(x) are one form from here on.
"""

import ast
import copy
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

from synthetic.codegen import FORMULAS, MODULES, REDUCES, ROWS, Unsupported, diagonal


@dataclass
class Step:
    target: str  # the variable it assigns
    text: str  # the torch expression, as source
    kind: str  # "pointwise", "row", "norm", "all" (reduction over everything), "torch"
    node: ast.AST = None  # the expression
    op: str = ""  # row: key of ROWS; all: sum or mean; norm: group or instance
    source: str = ""  # row, norm, all: the variable it reads
    keepdim: bool = False
    layout: str = ""  # row: "last" or "spatial"
    module: str = ""  # attribute of the layer, for layer_norm, norm and convolutions
    shape: tuple = ()  # of the target
    reads: set = field(default_factory=set)  # variables
    values: dict = None  # every variable's value on the meta device when the step runs


@dataclass
class Program:
    signature: str  # constructor arguments, verbatim
    init: list  # constructor lines, verbatim
    inputs: list  # names of forward's arguments
    steps: list
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
            layer = call.module if call else None
            word = type(layer).__name__ if layer is not None else call.name if call else "arithmetic"
            names += [word] if names[-1:] != [word] else []
        return names


def read(task) -> Program | None:
    """Parse a task (anything with `.source`). None when it uses Python that the reader does not follow."""
    try:
        return _Reader(task.source).program()
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

    def program(self):
        init, signature = [], "self"
        if self.constructor:
            signature = ast.unparse(self.constructor.args)
            for node in self.constructor.body:
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) or "super(" in ast.unparse(node):
                    continue
                init.append(ast.get_source_segment(self.source, node))
        result = None
        for node in self.forward.body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # docstring
            if isinstance(node, ast.Return):
                result = (
                    self.assign(self.names[0], node.value) if not isinstance(node.value, ast.Name) else node.value.id
                )
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.assign(node.targets[0].id, node.value)
            else:
                raise Unsupported
        return Program(signature, init, self.names, self.steps, result, self.model, self.others,
                       self.constructor is not None, self)

    # ---- one statement

    def assign(self, target, node):
        """Split an expression into steps, innermost first, and append them. Returns the target's name."""
        node = self.hoist(copy.deepcopy(node), target)
        if isinstance(node, ast.Name) and node.id == target:
            return target
        step = self.classify(target, node)
        step.reads = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in self.values}
        step.values = {name: v for name, v in self.values.items() if v is not None}
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
            mentions = sum(isinstance(n, ast.Name) and n.id == target for n in ast.walk(root))
            below = sum(isinstance(n, ast.Name) and n.id == target for n in ast.walk(node))
            # `x = relu(conv(x))` may reuse x for the intermediate; `x = x + conv(x)` may not.
            name = target if mentions == below else self.fresh()
            self.assign(name, node)
            return ast.Name(name, ast.Load())

        def walk(node, top):
            picked = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else None
            if isinstance(picked, ast.Call) and (call := self.call(picked)).name in ("max", "min"):
                # torch.max(x, dim=1)[0]: one step, although the call alone returns a pair.
                operand = call.arguments[0]
                if not isinstance(operand, ast.Name):
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
            if call.arguments and isinstance(call.arguments[0], (ast.BinOp, ast.UnaryOp, ast.Call)) \
                    and diagonal(call.arguments[0]) is None:
                operand = call.arguments[0]
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

    def fresh(self):
        name = next(n for n in ["t"] + [f"t{i}" for i in range(1, 9)] if n not in self.values)
        self.values[name] = None
        return name

    # ---- expressions

    def call(self, node):
        """Resolve torch.f(x), F.f(x), x.f() and self.layer(x) to one form; None for anything that is not a call."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return _Call("matmul", [node.left, node.right], {})
        if not isinstance(node, ast.Call):
            return None
        keywords = {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Name):
            return _Call(node.func.id, list(node.args), keywords)
        owner, name = node.func.value, node.func.attr
        text = ast.unparse(owner)
        if text in ("torch", "F", "nn.functional", "torch.nn.functional"):
            call = _Call(name, list(node.args), keywords)
        elif text == "self":
            module = getattr(self.model, name)
            known = MODULES.get(type(module))
            if known is None and type(module) is nn.GELU:
                known = ("gelu_tanh" if module.approximate == "tanh" else "gelu",)
            call = _Call(known[0] if known else type(module).__name__, list(node.args), keywords, module, name)
            call.pointwise = known is not None
            return call
        else:
            call = _Call(name, [owner] + list(node.args), keywords)
        if name == "gelu" and "approximate" in keywords:
            call.name = "gelu_tanh"
        aliases = {"hardtanh": "clamp", "clip": "clamp", "negative": "neg", "multiply": "mul", "subtract": "sub",
                   "divide": "div"}
        call.name = aliases.get(call.name, call.name)
        reduced = call.name in ("smooth_l1_loss", "binary_cross_entropy_with_logits") and "reduction" not in keywords
        call.pointwise = (call.name in FORMULAS or call.name in ("pow", "add", "sub", "mul", "div")) and not reduced
        call.view = call.name in ("size", "dim", "numel", "diag", "tensor")
        return call

    def classify(self, target, node):
        text = ast.unparse(node)
        call = self.call(node)
        if call is None or call.pointwise:
            return Step(
                target, text, "pointwise" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)) else "torch", node
            )
        step = Step(target, text, "torch", node)
        source = call.arguments[0] if call.arguments else None
        value = self.values.get(source.id) if isinstance(source, ast.Name) else None
        if not isinstance(value, torch.Tensor):
            if call.name == "matmul" and diagonal(source) is not None and isinstance(call.arguments[1], ast.Name):
                step.kind, step.op, step.source = "pointwise", "diagonal", call.arguments[1].id
            return step
        step.source = source.id
        if call.name == "clone" or call.name == "contiguous":
            return step
        kind = type(call.module).__name__ if call.module is not None else call.name
        name = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "max": "amax", "min": "amin"}.get(kind, kind)
        if call.module is not None:
            step.module = call.attribute
        if name in ("GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d") and value.dim() > 2:
            step.kind, step.op = "norm", "group" if name == "GroupNorm" else "instance"
            if getattr(call.module, "track_running_stats", False):
                step.kind = "torch"
        elif name == "LayerNorm":
            if (len(call.module.normalized_shape) == 1 and call.module.weight is not None
                and call.module.bias is not None):
                step.kind, step.op, step.layout = "row", "layer_norm", "last"
        elif name in ROWS:
            self.classify_row(step, name, call, value)
        return step

    def classify_row(self, step, name, call, value):
        """A call over dimensions: fits a row kernel if those are the last one, or all spatial ones of (N, C, H, W)."""
        if call.module is not None:
            dim = call.module.dim
        else:
            positional = call.arguments[2 if name in ("norm", "normalize") else 1:]
            dim = call.keywords.get("dim", positional[0] if positional else None)
            dim = self.evaluate(dim, self.values) if dim is not None else None
            if name in ("norm", "normalize") and len(call.arguments) > 1:
                return
            if (name in ("norm", "normalize") and "p" in call.keywords
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
        keep = call.keywords.get("keepdim")
        step.keepdim = bool(keep is not None and ast.literal_eval(keep))
        dims = [d % value.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
        if dims == [value.dim() - 1]:
            step.layout = "last"
        elif name in REDUCES and dims == list(range(2, value.dim())) and len(dims) > 1:
            step.layout = "spatial"
        else:
            return
        step.kind, step.op = "row", name


def _spell_out(node):
    """Rewrite loss functions as a pointwise expression under a mean, so that the general rules apply."""
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords
        and len(node.args) == 2):
        a, b = (ast.unparse(arg) for arg in node.args)
        text = {"mse_loss": f"torch.mean(({a} - {b}) ** 2)", "l1_loss": f"torch.mean(torch.abs({a} - {b}))"}.get(
            node.func.attr
        )
        if node.func.attr in ("smooth_l1_loss", "binary_cross_entropy_with_logits"):
            text = f"torch.mean(F.{node.func.attr}({a}, {b}, reduction='none'))"
        if text:
            return ast.parse(text, mode="eval").body
    return node
