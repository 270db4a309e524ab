"""One function of a problem, read with Python's own parser: a list of steps with known shapes. Part of the expert.

Statements are split until each step is one operator or one pointwise expression, and evaluated on the meta device for
their shapes. torch.f(x), F.f(x), x.f() and self.layer(x) are one form from here on. What does not fit (loops,
conditions, several targets) stays one step, as it is written.
"""

import ast
import contextlib
import copy
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F

from synthetic.codegen import RESERVED, Unsupported, diagonal
from synthetic.operators import ALIASES, ARITHMETIC, POINTWISE, ROWS, SPELLED_OUT, operator_of, unusual

# Expressions that must stay together: what is inside them is evaluated under names or conditions of their own.
_WHOLE = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda, ast.IfExp, ast.Starred, ast.JoinedStr,
          ast.NamedExpr)


@dataclass
class Step:
    """One assignment, or a statement that stays as it is."""

    target: str  # the variable it assigns; "" for a statement
    text: str  # the torch expression, or the statement, as source
    kind: str  # "pointwise", "row", "norm", "matmul", "all" (reduction over everything), "torch", "statement"
    node: ast.AST = None  # the expression
    op: str = ""  # row: key of ROWS; all: sum or mean; norm: group, instance or batch; pointwise: diagonal, or nothing
    source: str = ""  # the variable it reads, except for pointwise expressions
    dims: tuple = ()  # row: the first and the last of its dimensions, which lie side by side
    module: str = ""  # path of the layer from self, if it is one
    layer: nn.Module = None
    factors: tuple = ()  # matmul: the two operands as source
    statistics: tuple = ()  # norm: variables that hold mean and variance, if it is computed from them
    shape: tuple = ()  # of the target
    reads: set = field(default_factory=set)  # variables
    values: dict = None  # every variable's value on the meta device when the step runs

    def __str__(self):
        return f"{self.target} = {self.text}" if self.target else self.text


@contextlib.contextmanager
def without_data():
    """Everything on the meta device, silently; recurrent layers, which would go step by step there, by their shapes.
    """

    def shapes(layer, x, state=None):
        directions = 2 if layer.bidirectional else 1
        hidden = x.new_empty(directions * layer.num_layers, x.shape[0 if layer.batch_first else 1], layer.hidden_size)
        out = x.new_empty(*x.shape[:-1], directions * layer.hidden_size)
        return out, (hidden, hidden.clone()) if isinstance(layer, nn.LSTM) else hidden

    with (contextlib.ExitStack() as patches, torch.device("meta"), torch.no_grad(),
          warnings.catch_warnings(action="ignore")):  # of shapes, for one; what does not run is left out
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            patches.enter_context(mock.patch.object(kind, "forward", shapes))
        yield


@dataclass
class _Call:
    name: str
    arguments: list  # tensor operands first
    keywords: dict
    module: nn.Module = None
    attribute: str = ""  # path from self, for a layer
    pointwise: bool = False


class Body:
    """One function as steps, for one object that it is called on.

    node: its definition; owner: what `self` is; values: its arguments on the meta device.
    """

    def __init__(self, space, node, owner, values, expand):
        self.space, self.model, self.expand = space, owner, expand
        self.inputs = [a.arg for a in node.args.args[1:]]  # names of its arguments
        self.values = dict(values)  # variable -> meta tensor, number or other object
        self.steps, self.result = [], ""  # result: the variable that it returns, or "None"
        self.known = {}  # expressions evaluated so far
        self.read(node.body)

    def read(self, statements):
        for node in self.unrolled(copy.deepcopy(statements)):
            if is_docstring(node):
                continue
            if self.result:
                raise Unsupported("several returns")
            if isinstance(node, ast.Return):
                self.result = self.returned(node.value)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.assign(node.targets[0].id, node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.assign(node.target.id, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))
            else:
                if isinstance(node, ast.Assign) and not _contains(node, _WHOLE):  # several targets
                    node.value = self.hoist(copy.deepcopy(node.value), self.fresh())
                self.statement(node)
        if not self.result:
            raise Unsupported("no return at the end")

    # ---- one statement

    def unrolled(self, nodes):
        """The statements, with loops over a list of layers written out."""
        for node in nodes:
            over, item, index = getattr(node, "iter", None), getattr(node, "target", None), None  # of a loop
            if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate" and isinstance(item, ast.Tuple):
                (index, item), over = item.elts, over.args[0]
            layers = self.resolve(over)
            if not isinstance(layers, nn.ModuleList) or not self.expand:
                yield node
                continue
            for i in range(len(layers)):
                known = {item.id: ast.Subscript(over, ast.Constant(i), ast.Load())}
                known.update({index.id: ast.Constant(i)} if index is not None else {})
                yield from self.unrolled([_Substitute(known).visit(copy.deepcopy(n)) for n in node.body])

    def returned(self, node) -> str:
        """Source of what is returned: a variable, and the steps that compute it."""
        if node is None or isinstance(node, ast.Name):
            return ast.unparse(node) if node else "None"
        usual = self.inputs and self.inputs[0] not in RESERVED
        return self.assign(self.inputs[0] if usual else self.fresh(), node)

    def statement(self, node):
        """A statement that stays as it is."""
        if _contains(node, (ast.Return, ast.Yield)):
            raise Unsupported("a return inside a statement")
        text, space, before = ast.unparse(node), self.namespace(self.values), dict(self.values)
        with without_data():
            exec(text, space)
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in space:
                self.values[n.id] = space[n.id]
        self.steps.append(Step("", text, "statement", node, reads=self.values.keys() & _names(node), values=before))

    def assign(self, target, node) -> str:
        """Split an expression into steps, innermost first, and append them. Returns the target's name."""
        if not _contains(node, _WHOLE):
            node = self.hoist(copy.deepcopy(node), target)
        step = self.classify(target, node)
        step.reads = self.values.keys() & _names(node)
        step.values = {name: value for name, value in self.values.items() if value is not None}
        value = self.values[target] = self.evaluate(node, step.values)
        step.shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        self.steps.append(step)
        return target

    def namespace(self, values) -> dict:
        return dict(self.space, torch=torch, F=F, self=self.model, **values)

    def evaluate(self, node, values):
        """The value of an expression on the meta device: shapes without data."""
        text, read = ast.unparse(node), [values.get(name) for name in sorted(_names(node))]
        key = text, *map(id, read)
        if key not in self.known:  # beside what it was made from, so that no identity is given to another value
            with without_data():
                self.known[key] = eval(text, self.namespace(values)), read
        return self.known[key][0]

    def resolve(self, node):
        """What a chain of names, attributes and constant subscripts stands for; None for anything else."""
        if isinstance(node, ast.Name):
            return self.model if node.id == "self" else None if node.id in self.values else self.space.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.resolve(node.value), node.attr, None)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.resolve(node.value)
            return owner[node.slice.value] if isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) else None

    def hoist(self, root, target):
        """Give every non-pointwise call inside an expression a statement of its own; returns what is left of it."""

        def named(node):  # turn a subexpression into a variable
            # `x = relu(conv(x))` may reuse x for the intermediate; `x = x + conv(x)` may not.
            alone = _names(root)[target] == _names(node)[target]
            name = self.assign(target if alone and not spelled_out else self.fresh(), node)
            return ast.Name(name, ast.Load())

        spelled_out = False  # then `root` does not show any more where the target is mentioned

        def walk(node, top):
            nonlocal spelled_out
            sequence = isinstance(node, ast.Call) and isinstance(self.resolve(node.func), nn.Sequential)
            before, node = node, self.spelled_out(node)
            spelled_out |= node is not before and not sequence
            children.generic_visit(node)
            call = self.call(node)
            if call is None or call.pointwise:
                return node
            # A reduction or a layer reads a variable: its operand becomes one if it is a larger expression.
            operand = call.arguments[0] if call.arguments else None
            if isinstance(operand, (ast.BinOp, ast.UnaryOp, ast.Call)) and diagonal(operand) is None \
                    and isinstance(self.evaluate(operand, self.values), torch.Tensor):
                name = named(operand)
                if node.args and node.args[0] is operand:
                    node.args[0] = name
                else:
                    node.func.value = name
            if top or call.name in ("diag", "tensor") or not isinstance(self.evaluate(node, self.values), torch.Tensor):
                return node
            return named(node)

        children = ast.NodeTransformer()
        children.visit = lambda child: walk(child, False)  # what generic_visit puts in the place of each child
        return walk(root, True)

    def spelled_out(self, node):
        """Rewrite what is made of simpler operators: sequences of layers, losses and the like (SPELLED_OUT)."""
        if not isinstance(node, ast.Call):
            return node
        layer = self.resolve(node.func)
        if type(layer) is nn.Sequential and self.expand:
            inner = node.args[0]
            for i in range(len(layer)):
                called = ast.Subscript(node.func, ast.Constant(i), ast.Load())
                inner = self.spelled_out(ast.Call(called, [inner], []))
            return inner
        is_layer = isinstance(layer, nn.Module)
        name = type(layer).__name__ if is_layer else getattr(node.func, "attr", "")
        if name == "einsum" and len(node.args) == 3 and isinstance(node.args[0], ast.Constant):
            a, b, out = re.split(",|->", node.args[0].value.replace(" ", "") + "->")[:3]
            if b[:-2] in ("", a[:-2]) and a[-1] == b[-2] and out == a[:-1] + b[-1]:
                return ast.BinOp(node.args[1], ast.MatMult(), node.args[2])
        row = SPELLED_OUT.get(name)
        if row is None or not is_layer and self.resolve(node.func.value) not in (torch, F) \
                or is_layer and unusual(layer, {*row.options, "reduction", "size_average", "reduce"}):
            return node
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        reduction = given.pop("reduction", f"'{getattr(layer, 'reduction', 'mean')}'")
        outer = {row.reduction: "torch.mean(", "'sum'": "torch.sum(", "'none'": "("}.get(reduction)
        if not outer or given.keys() - row.options.keys() or len(node.args) != row.arguments \
                or reduction != row.reduction and not row.expression.startswith("torch.mean(") \
                or reduction == "'none'" and name in row.expression \
                or not all((row.options | given).values()) \
                or any(isinstance(k.value, (ast.Tuple, ast.List)) for k in node.keywords):  # several dimensions
            return node
        if is_layer:
            given = {option: f"{ast.unparse(node.func)}.{option}" for option in row.options}
        variables = [argument.id if isinstance(argument, ast.Name) else self.assign(self.fresh(), argument)
                     for argument in node.args]  # each may stand several times
        expression = re.sub(r"^torch\.mean\(", outer, row.expression)
        return ast.parse(expression.format(*variables, **{**row.options, **given}), mode="eval").body

    def fresh(self) -> str:
        name = next(n for n in ["t"] + [f"t{i}" for i in range(1, 99)] if n not in self.values)
        self.values[name] = None
        return name

    # ---- expressions

    def call(self, node) -> _Call | None:
        """Resolve torch.f(x), F.f(x), x.f() and self.layer(x) to one form; None for anything that is not a call."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return _Call("matmul", [node.left, node.right], {})
        picked = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else None
        if isinstance(picked, ast.Call) and getattr(picked.func, "attr", "") in ("max", "min"):
            # One of two results: torch.max(x, dim=1)[0] and x.max(1).values are amax, the indices are argmax.
            call = self.call(picked)
            call.name = ("arg" if ast.unparse(node).endswith(("[1]", ".indices")) else "a") + call.name
            return call
        if not isinstance(node, ast.Call):
            return None
        arguments, keywords = list(node.args), {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Name):
            return _Call(node.func.id, arguments, keywords)
        layer = self.resolve(node.func)
        if isinstance(layer, nn.Module):
            operator = operator_of(layer)
            path = ast.unparse(node.func).removeprefix("self.")
            return _Call(operator or type(layer).__name__, arguments, keywords, layer, path, operator is not None)
        name = getattr(node.func, "attr", "")
        owner = self.resolve(node.func.value)
        if owner is self.model:
            return _Call(f"self.{name}", arguments, keywords)  # another method
        if owner is None or isinstance(owner, torch.Tensor):
            arguments = [node.func.value] + arguments
        elif owner not in (torch, F, torch.linalg):
            return _Call(f"{owner}.{name}", arguments, keywords)
        name = ALIASES.get(name, name)
        if name in ("max", "min") and len(arguments) == 2 and not isinstance(arguments[1], ast.Constant) \
                and isinstance(self.evaluate(arguments[1], self.values), torch.Tensor):
            name += "imum"
        if name == "gelu" and "approximate" in keywords and ast.literal_eval(keywords["approximate"]) == "tanh":
            name = "gelu_tanh"
        reduced = name in ("smooth_l1_loss", "binary_cross_entropy_with_logits") and "reduction" not in keywords
        return _Call(name, arguments, keywords, pointwise=not reduced and name in {*POINTWISE, *ARITHMETIC})

    def classify(self, target, node) -> Step:
        """The step that assigns an expression, without its shape."""
        call = self.call(node)
        step = Step(target, ast.unparse(node), "torch", node)
        if call is None or call.pointwise:
            step.kind = "pointwise" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)) else "torch"
            return step
        source = call.arguments[0] if call.arguments else None
        value = self.values.get(source.id) if isinstance(source, ast.Name) else None
        step.layer, step.module = call.module, call.attribute
        names = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "max": "amax", "min": "amin"}
        name = names.get(call.name, call.name)
        if name in ("Linear", "matmul", "mm", "bmm"):
            self.classify_product(step, call)
        elif isinstance(value, torch.Tensor):
            step.source = source.id
            if norm := re.fullmatch(r"(Group|Instance|Batch)Norm[123]?d?", name):
                batch = norm[1] == "Batch" and call.module.training
                if value.dim() > 2 and not getattr(call.module, "track_running_stats", False) or batch:
                    step.kind, step.op = "norm", norm[1].lower()
            elif name == "LayerNorm" and call.module.bias is not None:
                step.kind, step.op, rank = "row", "layer_norm", value.dim()
                step.dims = rank - len(call.module.normalized_shape), rank - 1
            elif name in ROWS:
                self.classify_row(step, name, call, value)
        return step

    def classify_product(self, step, call):
        """A product of matrices, or of stacks of them; the factors must be names, attributes or their transposes."""
        factors = [ast.unparse(argument) for argument in call.arguments]
        if diagonal(call.arguments[0]) is not None and isinstance(call.arguments[1], ast.Name):
            step.kind, step.op, step.source = "pointwise", "diagonal", call.arguments[1].id
            return
        if call.module is not None:
            factors = [factors[0], f"self.{call.attribute}.weight.t()"]
        a, b = (self.evaluate(ast.parse(factor, mode="eval").body, self.values) for factor in factors)
        stacked = a.dim() == b.dim() >= 3 and a.shape[:-2] == b.shape[:-2]
        if a.dim() >= 2 and (b.dim() == 2 or stacked) and a.dtype == b.dtype == torch.float32 and len({*factors}) > 1:
            step.kind, step.factors = "matmul", tuple(factors)

    def classify_row(self, step, name, call, value):
        """A call over neighbouring dimensions, or over everything."""
        if call.keywords.keys() - {"dim", "keepdim", "p", "ord", "input"}:
            return
        if call.module is not None:
            dim = call.module.dim
        else:
            norm = name in ("norm", "normalize")  # an argument stands at its place or by its name, or is as usual
            p, *_ = *call.arguments[1:], call.keywords.get("ord", ast.Constant(2))
            if norm and self.evaluate(call.keywords.get("p", p), self.values) not in (2, "fro"):
                return
            usual = ast.Constant(1 if name == "normalize" else None)
            dim, *_ = *call.arguments[2 if norm else 1:], call.keywords.get("dim", usual)
            dim = self.evaluate(dim, self.values)
        if dim is None:
            if name in ("sum", "mean", "norm"):
                step.kind, step.op = "all", name
            return
        dims = sorted(d % value.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim]))
        if dims == list(range(dims[0], dims[-1] + 1)):
            step.kind, step.op, step.dims = "row", name, (dims[0], dims[-1])


class _Substitute(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, known):
        self.known = known

    def visit_Name(self, node):
        return copy.deepcopy(self.known.get(node.id, node)) if isinstance(node.ctx, ast.Load) else node


def is_docstring(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _contains(node, kinds) -> bool:
    return any(isinstance(n, kinds) for n in ast.walk(node))


def _names(node) -> Counter:
    """How often each name stands in an expression or a statement."""
    return Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
