"""The programmatic expert behind the built-in cold start.

It reads a problem's `forward` with Python's own parser, turns it into a list of steps with known shapes, and renders a
`ModelNew` in which Triton kernels take over as many steps as the given techniques allow. Each technique is also a skill
(name, description, tags, body), so the same expert writes what the skill library says.

    program = read(task)                         steps, shapes, constructor text; None if the reader cannot follow it
    program.applicable                           the techniques that change anything for this problem
    solution = render(program, techniques)       .code, and .used: the techniques that really show up in it

The expert is fixed: it knows techniques, not when they pay. Which of them are worth it, and where, is what
reinforcement learning has to find out.

Kernels come in five kinds. All address memory by the flat offset `idx`, so one rule indexes broadcast operands:

    fused    one program per 1,024 elements; a run of pointwise steps
    row      one program per row (last dimension, or all spatial ones); pointwise steps, reductions, softmax, scans
    norm     one program per normalisation group, in two sweeps (GroupNorm, InstanceNorm)
    loss     pointwise steps and a partial sum per program, finished by a short torch sum
    matmul   one program per output tile; pointwise steps on the tile before it is stored
"""

import ast
import copy
import math
import re
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

# ----------------------------------------------------------------------------------------------------------------------
# Techniques, as skills. Paraphrases are drawn from when the cold start is written, so that a policy must read a skill
# rather than recognise one fixed string.


@dataclass(frozen=True)
class Technique:
    name: str
    description: str
    scope: str
    tags: tuple
    motivation: tuple  # paraphrases
    idea: tuple  # paraphrases


TECHNIQUES = {t.name: t for t in [
    Technique("fuse-pointwise-run", "Compute a run of pointwise operators in one Triton kernel.", "general",
              ("pointwise", "fusion", "activation"),
              ("Every pointwise operator of PyTorch reads and writes the whole tensor once.",
               "A chain of elementwise calls is bound by memory traffic and by one launch per call."),
              ("Load each element once, apply all operators in registers, store once.",
               "Put the whole chain into a single kernel so that intermediates never reach memory.")),
    Technique("index-broadcast-parameter", "Read a broadcast parameter inside the kernel by channel index.", "general",
              ("broadcast", "parameter", "bias", "scale"),
              ("A bias or scale of shape (C, 1, 1) that stays in torch costs a full extra pass.",
               "Broadcast adds and multiplications break a chain of fused operators in two."),
              ("Load the parameter with idx // inner % size, where inner is the number of elements per channel.",
               "Compute the channel from the flat offset and load the parameter next to the element.")),
    Technique("fold-convolution-bias", "Add the bias of a convolution inside the kernel that follows it.",
              "task_specific/convolution", ("convolution", "bias", "epilogue"),
              ("A convolution with bias adds it in a pass of its own over the output.",
               "The library convolution launches a second kernel just to add its bias."),
              ("Call the convolution without bias and add the bias as the first operator of the fused kernel.",
               "Pass bias None to F.conv and treat the bias as a broadcast parameter of the tail.")),
    Technique("one-program-per-row", "Softmax, log-softmax, layer norm or logsumexp with one program per row.",
              "task_specific/row", ("softmax", "layer_norm", "logsumexp", "row"),
              ("A row operator written as several torch calls reads the row several times.",
               "Statistics over a row need the row only once if one program holds it."),
              ("Let one program load a full row, reduce it with tl.max and tl.sum, and write the result.",
               "Use BLOCK = next_power_of_2(cols) with a mask, and keep the row in registers.")),
    Technique("fuse-neighbours-into-row", "Move pointwise operators beside a row operator into its kernel.",
              "task_specific/row", ("row", "fusion", "prologue", "epilogue"),
              ("Pointwise operators before and after a row operator each cost a pass over memory.",
               "A row kernel already holds the row in registers when its neighbours need it."),
              ("Apply the operators before the reduction right after the load, those after it right before the store.",
               "Extend the row kernel by the pointwise steps around it instead of launching more kernels.")),
    Technique("row-reduction", "Sum, mean, max or min over the last dimensions with one program per row.",
              "task_specific/reduction", ("reduction", "sum", "mean", "max"),
              ("A reduction reads a large tensor to write a small one; what precedes it should not be written at all.",
               "Reducing in torch forces the operand into memory first."),
              ("One program per row loads the row, reduces it and stores one number.",
               "Reduce in registers with tl.sum or tl.max and store a single value per row.")),
    Technique("one-program-per-group", "Group or instance norm with one program per group, in two sweeps.",
              "task_specific/normalization", ("group_norm", "instance_norm", "statistics"),
              ("Library group norm takes several kernels for statistics, scale and shift.",
               "A normalisation group is contiguous in memory, so one program can own it."),
              ("Sum x and x * x in one sweep, then normalise, scale and shift in a second.",
               "Accumulate both moments in a loop, form mean and rstd, and write the result in a second loop.")),
    Technique("partial-sums-loss", "Compute a mean or sum over everything by partial sums inside the kernel.",
              "task_specific/loss", ("loss", "mean", "partial_sum"),
              ("A loss writes a full tensor of terms only to average it again.",
               "Elementwise loss terms need not be stored before their mean is taken."),
              ("Each program computes its terms and stores their sum; a short torch sum finishes the loss.",
               "Mask the terms, reduce them with tl.sum to one value per program, and add those up.")),
    Technique("diagonal-as-scaling", "Replace a product with a diagonal matrix by scaling the rows.",
              "task_specific/diagonal", ("diagonal", "matmul", "structure"),
              ("torch.diag(d) @ x builds a dense matrix of zeros and multiplies by it.",
               "A diagonal factor does cubic work where one multiplication per element is enough."),
              ("Multiply row i by d[i] inside a pointwise kernel, with index idx // cols.",
               "Load d by the row index and scale; no matrix is built.")),
    Technique("tile-matmul-tf32x3", "Multiply matrices in tiles with tl.dot in tf32x3 and finish the tile in place.",
              "task_specific/matmul", ("matmul", "linear", "tl.dot", "epilogue"),
              ("Library fp32 products do not use the tensor cores, and what follows them reads the result again.",
               "A product kept in torch writes its output before the next operator can start."),
              ("Accumulate a tile with tl.dot and input_precision tf32x3, then apply bias and activation to the tile.",
               "Three TF32 products keep fp32 accuracy on tensor cores; the epilogue runs on the accumulator.")),
    Technique("row-scan", "Cumulative sum along the last dimension with one program per row.",
              "task_specific/scan", ("scan", "cumsum", "row"),
              ("A scan kept in torch cannot be fused with what surrounds it.",
               "Cumulative sums over rows that fit a block need no second pass."),
              ("Load the row into one program and apply tl.cumsum along it.",
               "Use tl.cumsum on a masked row and store it directly.")),
]}
ALL = frozenset(TECHNIQUES)


def techniques_in(code) -> set[str]:
    """Which techniques a kernel source shows, judged from its structure (also for code that a model wrote)."""
    found = set()
    for body in re.findall(r"@triton\.jit\s*\ndef \w+\(.*?\):\n(.*?)(?=\n\S|\Z)", code, re.DOTALL):
        # Every step is headed by the torch line that it replaces; a folded bias is no step of its own.
        folded = len(re.findall(r"# \w+ = self\.\w+\(\w+\)\n\s+(\w+) = \1 \+ bias\d?$", body, re.MULTILINE))
        operators = len(re.findall(r"^\s+# ", body, re.MULTILINE)) - folded
        row = "start" in body and ("offs" in body)
        norm = row and re.search(r"for \w+ in range", body)
        product = "tl.dot(" in body
        partial = re.search(r"tl\.store\(out_ptr \+ tl\.program_id\(0\), tl\.sum\(", body)
        if not norm and len(re.findall(r"(?:idx|idx // \w+|tl\.program_id\(0\)) % \w+", body)) > folded:
            found.add("index-broadcast-parameter")
        if partial:
            found.add("partial-sums-loss")
        elif norm:
            found.add("one-program-per-group")
        elif row and "tl.cumsum" in body:
            found.add("row-scan")
        elif row and re.search(r"/ tl\.sum\(|tl\.log\(tl\.sum|d = tl\.where\(mask|tl\.maximum\(tl\.sqrt\(tl\.sum", body):
            found.add("one-program-per-row")
        if row and not norm and re.search(r"# .*\b(sum|mean|amax|amin|norm)\(", body):
            found.add("row-reduction")
        if (row or norm) and operators >= 2:
            found.add("fuse-neighbours-into-row")
        if product:
            found.add("tile-matmul-tf32x3")
        if not row and not partial and operators >= (3 if product else 2):
            found.add("fuse-pointwise-run")
        if re.search(r"# .*torch\.diag\(", body):
            found.add("diagonal-as-scaling")
    if re.search(r"F\.conv\w*\(\w+, self\.\w+\.weight, None", code):
        found.add("fold-convolution-bias")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Triton formulas of pointwise operators: lines with {x} for the operand, {a}, {b} for further arguments; the last line
# is the value. Chosen for fp32 accuracy: no overflow in exp, no cancellation beyond 1e-6.

FORMULAS = {
    "relu": ["tl.maximum({x}, 0.0)"],
    "sigmoid": ["tl.sigmoid({x})"],
    "tanh": ["2.0 * tl.sigmoid(2.0 * {x}) - 1.0"],
    "gelu": ["0.5 * {x} * (1.0 + tl.erf({x} * 0.70710678))"],
    "gelu_tanh": ["{x} * tl.sigmoid(1.59576912 * ({x} + 0.044715 * {x} * {x} * {x}))"],
    "silu": ["{x} * tl.sigmoid({x})"],
    "softplus": ["tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))"],
    "mish": ["e = tl.exp(tl.minimum({x}, 20.0))", "{x} * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)"],
    "hardswish": ["{x} * tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0"],
    "hardsigmoid": ["tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0"],
    "softsign": ["{x} / (1.0 + tl.abs({x}))"],
    "selu": ["1.05070099 * tl.where({x} > 0.0, {x}, 1.67326324 * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))"],
    "relu6": ["tl.minimum(tl.maximum({x}, 0.0), 6.0)"],
    "logsigmoid": ["tl.minimum({x}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({x})))"],
    "abs": ["tl.abs({x})"],
    "square": ["{x} * {x}"],
    "exp": ["tl.exp({x})"],
    "log": ["tl.log({x})"],
    "sin": ["tl.sin({x})"],
    "cos": ["tl.cos({x})"],
    "sqrt": ["tl.sqrt({x})"],
    "rsqrt": ["1.0 / tl.sqrt({x})"],
    "neg": ["-{x}"],
    "leaky_relu": ["tl.where({x} > 0.0, {x}, {x} * {a})"],
    "elu": ["tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))"],
    "clamp": ["tl.minimum(tl.maximum({x}, {a}), {b})"],
    "clamp_min": ["tl.maximum({x}, {a})"],
    "clamp_max": ["tl.minimum({x}, {a})"],
    "smooth_l1_loss": ["d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)"],
    "binary_cross_entropy_with_logits": ["tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))"],
}
# nn.Module class -> (operator, attributes that become its further arguments)
MODULES = {nn.ReLU: ("relu",), nn.Sigmoid: ("sigmoid",), nn.Tanh: ("tanh",), nn.SiLU: ("silu",), nn.Mish: ("mish",),
           nn.Softplus: ("softplus",), nn.Hardswish: ("hardswish",), nn.Hardsigmoid: ("hardsigmoid",),
           nn.Softsign: ("softsign",), nn.SELU: ("selu",), nn.ReLU6: ("relu6",), nn.LogSigmoid: ("logsigmoid",),
           nn.LeakyReLU: ("leaky_relu", "negative_slope"), nn.ELU: ("elu", "alpha"),
           nn.Hardtanh: ("clamp", "min_val", "max_val")}
# Row operators: lines over the row `{x}` (masked lanes hold 0) that assign `{t}`. Scalars of the row are plain variables.
_NEG = 'tl.where(mask, {x}, float("-inf"))'
_SUM = "tl.sum(tl.where(mask, {0}, 0.0), 0)"
ROWS = {
    "softmax": [f"m = tl.max({_NEG}, 0)", "{t} = tl.where(mask, tl.exp({x} - m), 0.0)", "{t} = {t} / tl.sum({t}, 0)"],
    "log_softmax": [f"m = tl.max({_NEG}, 0)", "{t} = {x} - m", "{t} = {t} - tl.log(" + _SUM.format("tl.exp({t})") + ")"],
    "logsumexp": [f"m = tl.max({_NEG}, 0)", "{t} = m + tl.log(" + _SUM.format("tl.exp({x} - m)") + ")"],
    "sum": ["{t} = " + _SUM.format("{x}")],
    "mean": ["{t} = " + _SUM.format("{x}") + " / cols"],
    "amax": [f"{{t}} = tl.max({_NEG}, 0)"],
    "amin": ['{t} = tl.min(tl.where(mask, {x}, float("inf")), 0)'],
    "norm": ["{t} = tl.sqrt(" + _SUM.format("{x} * {x}") + ")"],
    "normalize": ["{t} = {x} / tl.maximum(tl.sqrt(" + _SUM.format("{x} * {x}") + "), 1e-12)"],
    "layer_norm": ["m = " + _SUM.format("{x}") + " / cols", "d = tl.where(mask, {x} - m, 0.0)",
                   "{t} = d / tl.sqrt(tl.sum(d * d, 0) / cols + {eps})"],
    "cumsum": ["{t} = tl.cumsum({x}, 0)"],
}
ROW_TECHNIQUE = {"sum": "row-reduction", "mean": "row-reduction", "amax": "row-reduction", "amin": "row-reduction",
                 "norm": "row-reduction", "cumsum": "row-scan"}  # the others: one-program-per-row
_REDUCES = {"sum", "mean", "amax", "amin", "norm", "logsumexp"}

# ----------------------------------------------------------------------------------------------------------------------
# Reading a problem.


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

    @property
    def applicable(self) -> set[str]:
        """The techniques that show up in the fullest solution."""
        solution = render(self, ALL)
        return solution.used if solution else set()


def read(task) -> Program | None:
    """Parse a task (anything with `.source`). None when it uses Python that the reader does not follow."""
    try:
        return _Reader(task.source).program()
    except (_Unsupported, AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, NotImplementedError,
            NameError, AssertionError):
        return None


class _Unsupported(Exception):
    pass


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
            raise _Unsupported
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
                result = self.assign(self.names[0], node.value) if not isinstance(node.value, ast.Name) else node.value.id
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.assign(node.targets[0].id, node.value)
            else:
                raise _Unsupported
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
            raise _Unsupported
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
                    and _diagonal(call.arguments[0]) is None:
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
        aliases = {"hardtanh": "clamp", "clip": "clamp", "negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div"}
        call.name = aliases.get(call.name, call.name)
        reduced = call.name in ("smooth_l1_loss", "binary_cross_entropy_with_logits") and "reduction" not in keywords
        call.pointwise = (call.name in FORMULAS or call.name in ("pow", "add", "sub", "mul", "div")) and not reduced
        call.view = call.name in ("size", "dim", "numel", "diag", "tensor")
        return call

    def classify(self, target, node):
        text = ast.unparse(node)
        call = self.call(node)
        if call is None or call.pointwise:
            return Step(target, text, "pointwise" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)) else "torch", node)
        step = Step(target, text, "torch", node)
        source = call.arguments[0] if call.arguments else None
        value = self.values.get(source.id) if isinstance(source, ast.Name) else None
        if not isinstance(value, torch.Tensor):
            if call.name == "matmul" and _diagonal(source) is not None and isinstance(call.arguments[1], ast.Name):
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
            if len(call.module.normalized_shape) == 1 and call.module.weight is not None and call.module.bias is not None:
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
            if name in ("norm", "normalize") and "p" in call.keywords and self.evaluate(call.keywords["p"], self.values) != 2:
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
        elif name in _REDUCES and dims == list(range(2, value.dim())) and len(dims) > 1:
            step.layout = "spatial"
        else:
            return
        step.kind, step.op = "row", name


def _spell_out(node):
    """Rewrite loss functions as a pointwise expression under a mean, so that the general rules apply."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords and len(node.args) == 2:
        a, b = (ast.unparse(arg) for arg in node.args)
        text = {"mse_loss": f"torch.mean(({a} - {b}) ** 2)", "l1_loss": f"torch.mean(torch.abs({a} - {b}))"}.get(node.func.attr)
        if node.func.attr in ("smooth_l1_loss", "binary_cross_entropy_with_logits"):
            text = f"torch.mean(F.{node.func.attr}({a}, {b}, reduction='none'))"
        if text:
            return ast.parse(text, mode="eval").body
    return node


def _diagonal(node):
    """The expression v of torch.diag(v), or None."""
    return node.args[0] if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.diag" else None


# ----------------------------------------------------------------------------------------------------------------------
# Rendering.


@dataclass
class Solution:
    code: str
    used: set  # techniques that show up in it


@dataclass
class _Operand:
    name: str  # in the kernel
    text: str  # on the host
    load: str  # the line that reads it; "" for scalars passed by value
    full: bool = False  # has the shape of the tensor that the kernel walks


_RESERVED = {"rows", "k", "acc", "a", "b", "BM", "BN", "BK", "idx", "mask", "offs", "start", "cols", "n", "out", "m", "d", "e", "u", "inner", "i", "mean", "rstd", "total",
             "square", "tl", "BLOCK"}
_PRECEDENCE = {ast.Add: ("+", 1), ast.Sub: ("-", 1), ast.Mult: ("*", 2), ast.Div: ("/", 2)}


class _Kernel:
    """One Triton kernel under construction, with the host function that launches it."""

    def __init__(self, program, kind, name, shape, layout=""):
        self.program, self.kind, self.name, self.shape, self.layout = program, kind, name, shape, layout
        self.operands = {}  # host text -> _Operand
        self.extra = {}  # further kernel arguments: name -> host expression
        self.lines = []
        self.local = {}  # variable -> "vector" or "row", once the kernel computes it
        self.values = {}  # of the step being translated

    # ---- operands

    def operand(self, text, shape):
        """The kernel's name for a host value: a tensor that broadcasts to self.shape, or (shape None) a number."""
        if text in self.operands:
            return self.operands[text].name
        name = text.split(".")[-1]
        taken = {o.name for o in self.operands.values()} | _RESERVED | set(self.local)
        name = next(n for n in [name] + [f"{name}{i}" for i in range(2, 9)] if n not in taken)
        if shape is None:
            operand = _Operand(name, text, "")
        else:
            shape = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
            block = [i for i, size in enumerate(shape) if size != 1]
            if len(shape) > len(self.shape) or any(shape[i] != self.shape[i] for i in block):
                raise _Unsupported
            if block and block != list(range(block[0], block[-1] + 1)):
                raise _Unsupported
            full = shape == tuple(self.shape)
            operand = _Operand(name, text, self.load(name, shape, block, full), full)
        self.operands[text] = operand
        return name

    def load(self, name, shape, block, full):
        if full:
            return f"{name} = tl.load({name}_ptr + idx, mask=mask" + (")" if self.kind in ("fused", "loss") else ", other=0.0)")
        if not block:
            return f"{name} = tl.load({name}_ptr)"
        first, last = block[0], block[-1]
        rank = len(self.shape)
        if self.kind == "matmul" and block == [1]:
            return f"{name} = tl.load({name}_ptr + cols, mask=cols < n, other=0.0)[None, :]"
        if self.kind == "row":
            if self.layout == "last" and block == [rank - 1]:
                return f"{name} = tl.load({name}_ptr + offs, mask=mask, other=0.0)"
            if self.layout == "last" and first == 0 and last == rank - 2:
                return f"{name} = tl.load({name}_ptr + tl.program_id(0))"
            if self.layout == "spatial" and block == [1]:
                return f"{name} = tl.load({name}_ptr + tl.program_id(0) % {self.argument(name + '_size', name)})"
        index = "idx"
        if last < rank - 1:
            index += f" // {self.argument('inner', last)}"
        if first > 0:
            index += f" % {self.argument(name + '_size', name)}"
        return f"{name} = tl.load({name}_ptr + {index}, mask=mask" + (")" if self.kind in ("fused", "loss") else ", other=0.0)")

    def argument(self, name, what):
        """An extra integer argument: the size of a parameter, or the elements below dimension `what`."""
        if name == "inner":
            name = next((n for n, w in self.extra.items() if w == what), "inner" if "inner" not in self.extra else "inner2")
        self.extra[name] = what
        return name

    # ---- expressions

    def expression(self, node):
        """Translate a torch expression; returns (Triton text, precedence). Appends helper lines where needed."""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return repr(node.value), 9
        if isinstance(node, ast.Name) and node.id in self.local:
            return node.id, 9
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant):
                return repr(-node.operand.value), 9
            return "-" + self.wrapped(node.operand, 3), 3
        if isinstance(node, ast.BinOp) and type(node.op) in _PRECEDENCE:
            symbol, level = _PRECEDENCE[type(node.op)]
            left, right = self.wrapped(node.left, level), self.wrapped(node.right, level + 1)
            return f"{left} {symbol} {right}", level
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self.power(node.left, node.right)
        call = self.program.reader.call(node)
        if call and call.pointwise:
            return self.formula(call)
        value = self.program.reader.evaluate(node, self.values)
        if isinstance(value, torch.Tensor):
            return self.operand(ast.unparse(node), value.shape), 9
        if type(value) in (int, float):
            return self.operand(ast.unparse(node), None), 9
        raise _Unsupported

    def wrapped(self, node, level):
        text, precedence = self.expression(node)
        return text if precedence >= level else f"({text})"

    def atom(self, node):
        """The expression as something that may be repeated: a name or a number."""
        text, precedence = self.expression(node)
        if precedence == 9:
            return text
        self.lines.append(f"u = {text}")
        return "u"

    def power(self, base, exponent):
        exponent = ast.literal_eval(exponent)
        base = self.atom(base)
        if exponent in (2, 3):
            return " * ".join([base] * int(exponent)), 2
        if exponent == 0.5:
            return f"tl.sqrt({base})", 9
        raise _Unsupported

    def formula(self, call):
        name, arguments, keywords = call.name, list(call.arguments), dict(call.keywords)
        if name == "pow":
            return self.power(arguments[0], arguments[1])
        if name in ("add", "sub", "mul", "div"):
            if keywords:
                raise _Unsupported
            operator = {"add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult(), "div": ast.Div()}[name]
            return self.expression(ast.BinOp(arguments[0], operator, arguments[1]))
        further = [self.operand(f"self.{call.attribute}.{a}", None) for a in MODULES.get(type(call.module), ())[1:]]
        if call.module is None:
            for key in ("min", "max", "min_val", "max_val", "negative_slope", "alpha"):
                if key in keywords:
                    arguments.append(keywords[key])
            if name == "clamp" and len(arguments) == 2:
                name = "clamp_max" if "max" in keywords else "clamp_min"
            if keywords.keys() - {"min", "max", "min_val", "max_val", "negative_slope", "alpha", "inplace", "reduction",
                                  "approximate"}:
                raise _Unsupported
            further = [self.wrapped(a, 9) for a in arguments[1:]]
            defaults = {"leaky_relu": ["0.01"], "elu": ["1.0"], "clamp": ["-1.0", "1.0"]}.get(name, [])
            further = further or defaults
        elif type(call.module) is nn.Softplus and (call.module.beta != 1 or call.module.threshold != 20):
            raise _Unsupported
        lines = FORMULAS[name]
        if sum(line.count("{a}") > 0 for line in lines) > len(further):
            raise _Unsupported
        values = dict(zip("ab", further), x=self.atom(arguments[0]))
        self.lines += [line.format(**values) for line in lines[:-1]]
        value = lines[-1].format(**values)
        simple = re.fullmatch(r"tl\.\w+\([^()]*\)", value)
        return value, 9 if simple else 3 if value.startswith("-{") else 1

    # ---- steps

    def add(self, step):
        self.lines.append(f"# {step.target} = {step.text}")
        self.values = step.values
        if step.op == "diagonal":
            vector = _diagonal(self.program.reader.call(step.node).arguments[0])
            matrix = self.expression(ast.Name(step.source, ast.Load()))[0]
            shape = self.program.reader.evaluate(vector, step.values).shape
            if len(shape) != 1:
                raise _Unsupported
            scale = self.operand(ast.unparse(vector), tuple(shape) + (1,))
            self.lines.append(f"{step.target} = {scale} * {matrix}")
        elif step.kind == "pointwise":
            self.lines.append(f"{step.target} = {self.expression(step.node)[0]}")
        elif step.kind == "row":
            source = self.expression(ast.Name(step.source, ast.Load()))[0]
            target = step.target
            eps = self.operand(f"self.{step.module}.eps", None) if step.op == "layer_norm" else ""
            self.lines += [line.format(x=source, t=target, eps=eps) for line in ROWS[step.op]]
            if step.op == "layer_norm":
                shape = (self.shape[-1],)
                weight = self.operand(f"self.{step.module}.weight", shape)
                bias = self.operand(f"self.{step.module}.bias", shape)
                self.lines.append(f"{target} = {target} * {weight} + {bias}")
        row = step.kind == "row" and step.op in _REDUCES or \
            step.kind == "pointwise" and tuple(step.shape) != tuple(self.shape)
        self.local[step.target] = "row" if row else "vector"

    # ---- source text

    def ordered(self):
        """Operands in the order of the host function's arguments: the tensors walked, other tensors, numbers."""
        return sorted(self.operands.values(), key=lambda o: (not o.full, not o.load))

    def call(self):
        """The host call's arguments."""
        return ", ".join(o.text for o in self.ordered())

    def texts(self, final, keepdim=False, mean=False):
        """(host function, kernel) as source. `final` is the variable to store."""
        operands = self.ordered()
        if self.kind == "matmul":
            return self.matmul_texts(final, [o for o in operands if o.name not in self.factors])
        full = [o for o in operands if o.full]
        if not full:
            raise _Unsupported
        main = full[0].name
        names = [o.name for o in operands]
        extra = {}
        for name, what in self.extra.items():
            if isinstance(what, str):
                extra[name] = f"{what}.numel()"
            else:
                extra[name] = f"{main}[{', '.join(['0'] * (what + 1))}].numel()"
        host = [f"def {self.name}({', '.join(names)}):"] + [f"    {o.name} = {o.name}.contiguous()" for o in full]
        scalar = self.kind == "row" and self.local[final] == "row"
        count = {"row": "cols", "norm": "cols"}.get(self.kind, "n")
        block = "BLOCK=1024"
        if self.kind in ("fused", "loss"):
            host.append(f"    n = {main}.numel()")
            grid = "triton.cdiv(n, 1024)"
            host.append(f"    out = torch.empty_like({main})" if self.kind == "fused" else f"    out = {main}.new_empty({grid})")
        else:
            if self.kind == "norm":
                host.append(f"    cols = {main}[0].numel() // groups")
                names.append("groups")
                host[0] = f"def {self.name}({', '.join(names)}):"
                names.pop()
            else:
                host.append(f"    cols = {main}.shape[-1]" if self.layout == "last" else f"    cols = {main}[0, 0].numel()")
            grid = f"{main}.numel() // cols"
            if scalar:
                lead = f"{main}.shape[:-1]" if self.layout == "last" else f"{main}.shape[:2]"
                ones = "(1,)" if self.layout == "last" else "(" + ", ".join(["1"] * (len(self.shape) - 2)) + ")"
                host.append(f"    out = {main}.new_empty({lead}{' + ' + ones if keepdim else ''})")
            else:
                host.append(f"    out = torch.empty_like({main})")
            if self.kind == "row":
                block = "BLOCK=triton.next_power_of_2(cols)"
        arguments = names + ["out", count] + list(extra.values()) + [block]
        host.append(f"    {self.name}_kernel[({grid},)]({', '.join(arguments)})")
        host.append("    return " + ("out" if self.kind != "loss" else "out.sum() / n" if mean else "out.sum()"))

        formal = [f"{o.name}_ptr" if o.load else o.name for o in operands] + ["out_ptr", count] + list(extra)
        kernel = ["@triton.jit", f"def {self.name}_kernel({', '.join(formal)}, BLOCK: tl.constexpr):"]
        loads = [o.load for o in operands if o.load]
        if self.kind in ("fused", "loss"):
            body = ["idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = idx < n"] + loads + self.lines
            if self.kind == "fused":
                body.append(f"tl.store(out_ptr + idx, {final}, mask=mask)")
            else:
                body.append(f"tl.store(out_ptr + tl.program_id(0), tl.sum(tl.where(mask, {final}, 0.0), 0))")
        elif self.kind == "row":
            body = ["start = tl.program_id(0) * cols", "offs = tl.arange(0, BLOCK)", "mask = offs < cols", "idx = start + offs"]
            body += loads + self.lines
            body.append(f"tl.store(out_ptr + tl.program_id(0), {final})" if scalar
                        else f"tl.store(out_ptr + idx, {final}, mask=mask)")
        else:
            sweep = ["for i in range(0, cols, BLOCK):", "    offs = i + tl.arange(0, BLOCK)", "    mask = offs < cols",
                     "    idx = start + offs"]
            body = ["start = tl.program_id(0) * cols", "total = tl.zeros((BLOCK,), tl.float32)",
                    "square = tl.zeros((BLOCK,), tl.float32)"] + sweep
            body += [f"    {full[0].load}", f"    total += {main}", f"    square += {main} * {main}",
                     "mean = tl.sum(total, 0) / cols",
                     "rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)"] + sweep
            body += ["    " + line for line in loads + self.lines]
            body.append(f"    tl.store(out_ptr + idx, {final}, mask=mask)")
        return "\n".join(host), "\n".join(kernel + ["    " + line for line in body])


    def matmul_texts(self, final, operands):
        """The tiled product of self.factors, (M, K) by (N, K) transposed or (K, N), with self.lines as its epilogue."""
        x, w = self.factors
        names = [x, w] + [o.name for o in operands]
        host = [f"def {self.name}({', '.join(names)}):"] + [f"    {name} = {name}.contiguous()" for name in
                                                              [x, w] + [o.name for o in operands if o.full]]
        host += [f"    m, k = {x}.shape", f"    n = {w}.shape[{0 if self.transposed else 1}]", f"    out = {x}.new_empty(m, n)"]
        extra = [f"{what}.numel()" for what in self.extra.values()]
        if any(not isinstance(what, str) for what in self.extra.values()):
            raise _Unsupported
        arguments = names + ["out", "m", "n", "k"] + extra + ["BM=128", "BN=64", "BK=32"]
        host += [f"    {self.name}_kernel[(triton.cdiv(n, 64), triton.cdiv(m, 128))]({', '.join(arguments)})", "    return out"]
        formal = [f"{x}_ptr", f"{w}_ptr"] + [f"{o.name}_ptr" if o.load else o.name for o in operands]
        formal += ["out_ptr", "m", "n", "k"] + list(self.extra)
        kernel = ["@triton.jit",
                  f"def {self.name}_kernel({', '.join(formal)}, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):"]
        weight = "cols[None, :] * k + i[:, None]" if self.transposed else "i[:, None] * n + cols[None, :]"
        body = ["rows = tl.program_id(1) * BM + tl.arange(0, BM)", "cols = tl.program_id(0) * BN + tl.arange(0, BN)",
                "acc = tl.zeros((BM, BN), tl.float32)",
                "for start in range(0, k, BK):",
                "    i = start + tl.arange(0, BK)",
                f"    a = tl.load({x}_ptr + rows[:, None] * k + i[None, :], mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)",
                f"    b = tl.load({w}_ptr + {weight}, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)",
                '    acc = tl.dot(a, b, acc, input_precision="tf32x3")',
                "idx = rows[:, None] * n + cols[None, :]", "mask = (rows[:, None] < m) & (cols[None, :] < n)"]
        body += [o.load for o in operands if o.load] + self.lines + [f"tl.store(out_ptr + idx, {final}, mask=mask)"]
        return "\n".join(host), "\n".join(kernel + ["    " + line for line in body])


class _Renderer:
    def __init__(self, program, techniques, lazy=True):
        self.p, self.techniques, self.lazy = program, techniques, lazy
        self.forward, self.texts = [], []
        self.names = {}

    def on(self, technique):
        return technique in self.techniques

    def kernel_name(self, kind):
        variables = set(self.p.inputs) | {step.target for step in self.p.steps}
        base = f"{kind}_kernel" if kind in variables else kind  # a local variable would hide the function
        self.names[kind] = self.names.get(kind, 0) + 1
        return base if self.names[kind] == 1 else f"{base}{self.names[kind]}"

    def run(self):
        i, steps = 0, self.p.steps
        while i < len(steps):
            i = self.loss(i) or self.rows(i) or self.norm(i) or self.fused(i) or self.matmul(i) or self.torch(i)
        return self

    # ---- windows of steps that one kernel may replace

    def closed(self, i, j):
        """Whether steps[i:j] can be one kernel: nothing that it computes but its last target is read later."""
        final = self.p.steps[j - 1].target
        inner = {s.target for s in self.p.steps[i:j]} - {final}
        for step in self.p.steps[j:]:
            if step.reads & inner:
                return False
            inner -= {step.target}
        return self.p.result not in inner

    def pointwise(self, step, alone=False):
        """Whether a pointwise step may enter a kernel under the current techniques."""
        if step.kind != "pointwise" or not step.shape:
            return False
        if step.op == "diagonal":
            return self.on("diagonal-as-scaling")
        if alone or self.on("index-broadcast-parameter"):
            return True
        kernel = self.build("fused", [step], step.shape)
        return kernel is not None and not any("% " in o.load for o in kernel.operands.values())

    def emit(self, kernel, steps, keepdim=False, mean=False, extra_call=""):
        kernel.name = self.kernel_name(kernel.kind)
        final = steps[-1].target
        host, body = kernel.texts(final, keepdim, mean)
        self.forward.append(f"{final} = {kernel.name}({kernel.call()}{extra_call})")
        self.texts += [host, body]

    def build(self, kind, steps, shape, layout="", prefix=None, final=None):
        """A kernel over `steps`, or None if one of them cannot be translated. `final`: what it stores if there are none."""
        kernel = _Kernel(self.p, kind, kind, shape, layout)
        try:
            if prefix:
                prefix(kernel)
            for step in steps:
                if step.target in _RESERVED:
                    return None
                if step.kind == "pointwise" and tuple(step.shape) == tuple(shape) and any(
                        kernel.local.get(v) == "row" and step.values[v].dim() != len(shape) for v in step.reads):
                    return None  # a row's number without keepdim does not broadcast along the row
                kernel.add(step)
            kernel.texts(steps[-1].target if steps else final)
        except (_Unsupported, ValueError, TypeError, KeyError, AttributeError):
            return None
        return kernel

    def fused(self, i, prefix=None):
        steps = self.p.steps
        alone = not self.on("fuse-pointwise-run")
        if not self.pointwise(steps[i], alone=False) or (alone and self.texts and prefix is None):
            return None
        j = i + 1
        while not alone and j < len(steps) and self.pointwise(steps[j]) and steps[j].shape == steps[i].shape:
            j += 1
        while j > i:
            kernel = self.build("fused", steps[i:j], steps[i].shape, prefix=prefix) if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j])
                return j
            j -= 1
        return None

    def rows(self, i, prefix=None):
        steps = self.p.steps
        k = i
        if self.on("fuse-neighbours-into-row"):
            while k < len(steps) and self.pointwise(steps[k]):
                k += 1
        if k == len(steps) or steps[k].kind != "row":
            return None
        first = steps[k]
        if not self.on(ROW_TECHNIQUE.get(first.op, "one-program-per-row")):
            return None
        shape = tuple(first.values[first.source].shape)
        cols = shape[-1] if first.layout == "last" else math.prod(shape[2:])
        if any(s.shape != shape for s in steps[i:k]) or cols > 16384 or cols < 2:
            return None
        j = k + 1
        if self.on("fuse-neighbours-into-row"):
            reduced = shape[:-1] if first.layout == "last" else shape[:2]
            while j < len(steps):
                s = steps[j]
                row = s.kind == "row" and s.layout == first.layout and tuple(s.values[s.source].shape) == shape \
                    and self.on(ROW_TECHNIQUE.get(s.op, "one-program-per-row"))
                small = s.kind == "pointwise" and math.prod(s.shape) == math.prod(reduced)
                if not (row or self.pointwise(s) and (s.shape == shape or small)):
                    break
                j += 1
        while j > k:
            kernel = self.build("row", steps[i:j], shape, first.layout, prefix) if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j], keepdim=len(steps[j - 1].shape) == len(shape))
                return j
            j -= 1
        return None

    def loss(self, i):
        """Pointwise steps and the reduction over everything that ends them."""
        if not self.on("partial-sums-loss"):
            return None
        steps = self.p.steps
        k = i
        while k < len(steps) and steps[k].kind == "pointwise" and steps[k].shape == steps[i].shape:
            k += 1
        if k == len(steps) or steps[k].kind != "all":
            return None
        shape = tuple(steps[k].values[steps[k].source].shape)
        # Without the fusion technique only the last pointwise step joins the reduction.
        start = i if self.on("fuse-pointwise-run") else max(i, k - 1)
        if start != i or not self.closed(i, k + 1):
            return None
        kernel = _Kernel(self.p, "loss", "loss", shape)
        try:
            for step in steps[i:k]:
                kernel.add(step)
            kernel.values = steps[k].values
            kernel.expression(ast.Name(steps[k].source, ast.Load()))
            kernel.lines.append(f"# {steps[k].target} = {steps[k].text}")
            host, body = kernel.texts(steps[k].source, mean=steps[k].op == "mean")
        except (_Unsupported, ValueError, TypeError, KeyError, AttributeError):
            return None
        kernel.name = self.kernel_name("loss")
        host, body = kernel.texts(steps[k].source, mean=steps[k].op == "mean")
        self.forward.append(f"{steps[k].target} = {kernel.name}({kernel.call()})")
        self.texts += [host, body]
        return k + 1

    def norm(self, i):
        steps, step = self.p.steps, self.p.steps[i]
        if step.kind != "norm" or not self.on("one-program-per-group"):
            return None
        layer, shape = getattr(self.p.model, step.module), step.shape
        j = i + 1
        while self.on("fuse-neighbours-into-row") and j < len(steps) and self.pointwise(steps[j]) and steps[j].shape == shape:
            j += 1

        def prefix(kernel):
            x = kernel.operand(step.source, shape)
            kernel.operand(f"self.{step.module}.eps", None)
            line = f"{step.target} = ({x} - mean) * rstd"
            if layer.weight is not None:
                channel = (shape[1],) + (1,) * (len(shape) - 2)
                line += f" * {kernel.operand(f'self.{step.module}.weight', channel)}"
                line += f" + {kernel.operand(f'self.{step.module}.bias', channel)}"
            kernel.lines += [f"# {step.target} = {step.text}", line]
            kernel.local[step.target] = "vector"

        groups = f"self.{step.module}.num_groups" if step.op == "group" else f"{step.source}.shape[1]"
        while j > i:
            kernel = self.build("norm", steps[i + 1:j], shape, prefix=prefix, final=step.target) if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j], extra_call=f", {groups}")
                return j
            j -= 1
        return None

    def matmul(self, i):
        """A product of two matrices, with its bias and the pointwise steps that follow as the epilogue."""
        steps, step = self.p.steps, self.p.steps[i]
        call = self.p.reader.call(step.node)
        if not self.on("tile-matmul-tf32x3") or call is None or step.kind != "torch" or len(step.shape) != 2:
            return None
        layer = call.module if isinstance(call.module, nn.Linear) else None
        if layer is None and call.name not in ("matmul", "mm") or not isinstance(call.arguments[0], ast.Name):
            return None
        x = call.arguments[0].id
        weight = f"self.{call.attribute}.weight" if layer else ast.unparse(call.arguments[1])
        value = self.p.reader.evaluate(ast.parse(weight, mode="eval").body, step.values)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or step.values[x].dim() != 2 or \
                not re.fullmatch(r"[\w.]+", weight):
            return None

        def prefix(kernel):
            kernel.transposed = layer is not None
            kernel.factors = (kernel.operand(x, tuple(step.shape)), kernel.operand(weight, tuple(step.shape)))
            kernel.lines += [f"# {step.target} = {step.text}", f"{step.target} = acc"]
            kernel.local[step.target] = "vector"
            if layer and layer.bias is not None:
                bias = kernel.operand(f"self.{call.attribute}.bias", (step.shape[1],))
                kernel.lines[-1] += f" + {bias}"

        j = i + 1
        while self.on("fuse-pointwise-run") and j < len(steps) and self.pointwise(steps[j]) and steps[j].shape == step.shape:
            j += 1
        while j > i:
            kernel = self.build("matmul", steps[i + 1:j], step.shape, prefix=prefix, final=step.target) \
                if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j])
                return j
            j -= 1
        return None

    def torch(self, i):
        """A step that stays a torch call; a convolution may hand its bias to the kernel that follows."""
        steps, step = self.p.steps, self.p.steps[i]
        layer = getattr(self.p.model, step.module) if step.module else None
        if self.on("fold-convolution-bias") and isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
                                                                   nn.ConvTranspose2d, nn.ConvTranspose3d)) \
                and layer.bias is not None and layer.padding_mode == "zeros" and i + 1 < len(steps):

            def prefix(kernel):
                x = kernel.operand(step.target, step.shape)
                bias = kernel.operand(f"self.{step.module}.bias", (step.shape[1],) + (1,) * (len(step.shape) - 2))
                kernel.lines += [f"# {step.target} = {step.text}", f"{step.target} = {x} + {bias}"]
                kernel.local[step.target] = "vector"

            attribute, rank = f"self.{step.module}", len(step.shape) - 2
            transposed = "Transpose" in type(layer).__name__
            order = ["stride", "padding", "output_padding", "groups", "dilation"] if transposed else \
                ["stride", "padding", "dilation", "groups"]
            options = ", ".join(f"{attribute}.{o}" for o in order)
            function = f"F.conv{'_transpose' if transposed else ''}{rank}d"
            self.forward.append(f"{step.target} = {function}({step.source}, {attribute}.weight, None, {options})")
            following = steps[i + 1]
            if step.target in following.reads and following.shape == step.shape and self.closed_over(i):
                j = self.rows(i + 1, prefix) or self.fused(i + 1, prefix)
                if j:
                    return j
            self.forward.pop()
        self.forward.append(f"{step.target} = {step.text}")
        return i + 1

    def closed_over(self, i):
        """Whether the value that step i assigns is read by nobody but the kernel that starts with step i + 1."""
        step, following = self.p.steps[i], self.p.steps[i + 1]
        if following.target == step.target:
            return True
        return not any(step.target in s.reads for s in self.p.steps[i + 2:])


def render(program, techniques) -> Solution | None:
    """Write `ModelNew` with the given techniques where they apply. None when no kernel of any kind is possible.

    A solution needs at least one kernel of its own; if the techniques allow none, the first one that would is added.
    """
    for forced in [set()] + [{name} for name in TECHNIQUES] + [{"one-program-per-row", "fuse-neighbours-into-row"}]:
        renderer = _Renderer(program, set(techniques) | forced).run()
        if renderer.texts:
            break
    else:
        return None
    code = ["import torch", "import torch.nn as nn", "import torch.nn.functional as F", "import triton",
            "import triton.language as tl", ""]
    if program.classes:
        code += [program.classes, ""]
    code.append("class ModelNew(nn.Module):")
    if program.has_init:
        code += [f"    def __init__({program.signature}):", "        super().__init__()"]
        code += ["        " + line for line in program.init] + [""]
    code.append(f"    def forward(self, {', '.join(program.inputs)}):")
    lines = list(renderer.forward)
    target, _, value = lines[-1].partition(" = ")
    lines = lines[:-1] + [f"return {value}"] if target == program.result else lines + [f"return {program.result}"]
    code += ["        " + line for line in lines]
    code = "\n".join(code) + "\n\n" + "\n\n".join(renderer.texts) + "\n"
    return Solution(code, techniques_in(code))
