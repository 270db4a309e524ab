"""Writes one Triton kernel and the function that launches it, line by line from torch expressions, for expert.py.

The kinds of kernels are templates (templates.py).
"""

import ast
import keyword
import re
from dataclasses import dataclass

import torch

from synthetic.operators import ARITHMETIC, POINTWISE, ROWS, unusual
from synthetic.templates import PIECES, POOLS, TEMPLATES


class Unsupported(Exception):
    """What the reader or a kernel cannot express; the step stays a torch call, or the problem is passed over."""


# Variables of the templates and formulas, which an operand or a step may not take.
RESERVED = set("rows k acc a b BM BN BK idx mask offs start cols n dst m d e u inner i lane grid width found BR BI "
               "mean rstd total square tl BLOCK".split())
_RESERVED_IN = {"sweep": {"s", "q", "top", "all", "at"},
                "matmul": {"as_", "am", "ak", "bs", "bk", "bn", "a_index", "b_index"}}
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_PRECEDENCE = {ast.Add: ("+", 1), ast.Sub: ("-", 1), ast.Mult: ("*", 2), ast.Div: ("/", 2)}
_ATOM = 9  # the precedence of a name, a number or a call


def diagonal(node):
    """The expression v of torch.diag(v), or None."""
    return node.args[0] if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.diag" else None


@dataclass
class _Operand:
    name: str  # in the kernel
    text: str  # outside it
    load: str = ""  # the line that reads it; "" for numbers passed by value
    full: bool = False  # has the shape of the tensor that the kernel walks
    factor: bool = False  # of a product: the template reads it


class Kernel:
    """One Triton kernel under construction.

    parsed: the Body whose steps are added. shape: of the tensor that the kernel walks (matmul: of its result).
    dims: of rows and sweeps, the first and the last of the dimensions that make a row. channels_last: it walks memory
    in which dimension 1 comes last (kind "fused"). Its methods raise Unsupported for what the kind cannot express.
    """

    def __init__(self, parsed, kind, shape, dims=(), channels_last=False):
        self.parsed, self.kind, self.shape, self.dims = parsed, kind, tuple(shape), dims
        self.channels_last = channels_last
        self.reserved = RESERVED | _RESERVED_IN.get(kind, set())
        self.operands = {}  # text outside the kernel -> _Operand
        self.extra = {}  # further integer parameters: name -> an operand (its size), or n (elements below n dimensions)
        self.lines, self.biased = [], []  # biased: what a norm's first loop adds
        self.plan = []  # the steps, each with the operands that it adds
        self.sections = []  # of a sweep: (lines of a step, "vector" or "row"), or (a reduction's fields, "reduction")
        self.length = ""  # how long a row is, where a layer's weight says it: dimensions need not be counted
        self.local = {}  # variable -> "vector" or "row" (one number for each row), once the kernel computes it
        self.last = None  # step
        self.groups = []  # of a norm: what its function gets besides the operands

    # ---- operands

    def operand(self, text, shape) -> str:
        """The kernel's name for a value outside: a tensor that broadcasts to self.shape, or (shape None) a number."""
        if text in self.operands:
            return self.operands[text].name
        name = re.findall(r"[A-Za-z_]\w*(?!\w*\()", re.sub(r"\.(T|mT|t\(\)|transpose\(.*?\))$", "", text))
        name = next((n for n in reversed(name) if not keyword.iskeyword(n)), "value")
        taken = {o.name for o in self.operands.values()} | self.reserved | set(self.local)
        name = next(n for n in [name] + [f"{name}{i}" for i in range(2, 9)] if n not in taken)
        operand = self.operands[text] = _Operand(name, text)
        if shape is not None:
            shape = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
            operand.full = shape == self.shape
            operand.load = f"{name} = {self.load(name, shape, operand.full)}"
        return name

    def load(self, name, shape, full) -> str:
        """The expression that reads a tensor whose shape is self.shape, or 1 outside one block of dimensions."""
        shape, whole = self.walked(shape), self.walked(self.shape)
        rank, block = len(whole), [i for i, size in enumerate(shape) if size != 1]
        # Of a tensor that has channels and more, but not all, the channels are not last in its own memory.
        otherwise = self.channels_last and not full and len(block) > 1 and block[-1] == rank - 1
        if len(shape) > rank or any(shape[i] != whole[i] for i in block) \
                or block and block[-1] - block[0] >= len(block) or otherwise:
            raise Unsupported
        masked = ", mask=mask" if self.kind in ("fused", "loss") else ", mask=mask, other=0.0"
        if full:
            return f"tl.load({name}_ptr + idx{masked})"
        if not block:
            return f"tl.load({name}_ptr)"
        first, last = block[0], block[-1]
        if self.kind == "matmul" and block == [rank - 1]:
            return f"tl.load({name}_ptr + cols, mask=cols < n, other=0.0)[None, :]"
        if self.kind == "row" and self.dims[0] == rank - 1 and block == [rank - 1]:
            return f"tl.load({name}_ptr + offs{masked})"
        if self.kind == "row" and last == self.dims[0] - 1:  # one number for each row
            index, masked = "tl.program_id(0)", ""
        else:
            index = f"idx // {self.elements_below(last + 1)}" if last < rank - 1 else "idx"
        if first > 0:
            self.extra[f"{name}_size"] = name
            index += f" % {name}_size"
        return f"tl.load({name}_ptr + {index}{masked})"

    def walked(self, shape) -> tuple:
        """A shape in the order in which the kernel walks its dimensions."""
        return (*shape[:1], *shape[2:], *shape[1:2]) if self.channels_last else shape

    def elements_below(self, dimensions) -> str:
        """The kernel's name for how many elements stand below the first so many dimensions."""
        # A sweep's template has an `inner` of its own.
        names = ["inner2", "inner3"] if self.kind == "sweep" else ["inner", "inner2", "inner3"]
        name = next(n for n in names if self.extra.get(n, dimensions) == dimensions)
        self.extra[name] = dimensions
        return name

    # ---- expressions

    def expression(self, node):
        """Translate a torch expression; returns (Triton text, precedence). Appends helper lines where needed."""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return repr(node.value), _ATOM
        if isinstance(node, ast.Name) and node.id in self.local:
            return node.id, _ATOM
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant):
                return repr(-node.operand.value), _ATOM
            return "-" + self.wrapped(node.operand, 3), 3
        if isinstance(node, ast.BinOp) and type(node.op) in _PRECEDENCE:
            symbol, level = _PRECEDENCE[type(node.op)]
            left, right = self.wrapped(node.left, level), self.wrapped(node.right, level + 1)
            return f"{left} {symbol} {right}", level
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            exponent = ast.literal_eval(node.right)
            if exponent not in (2, 3):
                raise Unsupported
            return " * ".join([self.repeatable(node.left)] * int(exponent)), 2
        call = self.parsed.call(node)
        if call and call.pointwise:
            return self.formula(call)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            left, right = self.wrapped(node.left, 1), self.wrapped(node.comparators[0], 1)
            return f"{left} {_COMPARED[type(node.ops[0])]} {right}", 0
        if {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(self.local):
            raise Unsupported  # it would read what the variable held before the kernel
        value = self.parsed.evaluate(node, self.last.values)
        if not isinstance(value, torch.Tensor) and type(value) not in (int, float):
            raise Unsupported
        return self.operand(ast.unparse(node), getattr(value, "shape", None)), _ATOM

    def wrapped(self, node, level) -> str:
        text, precedence = self.expression(node)
        return text if precedence >= level else f"({text})"

    def variable(self, name) -> str:
        return self.expression(ast.Name(name, ast.Load()))[0]

    def repeatable(self, node) -> str:
        """The expression as something that may stand several times: a name or a number."""
        text, precedence = self.expression(node)
        if precedence == _ATOM:
            return text
        self.lines.append(f"u = {text}")
        return "u"

    def formula(self, call):
        """The value of a pointwise call: (Triton text, precedence)."""
        name, arguments, keywords = call.name, list(call.arguments), call.keywords
        if name in ARITHMETIC and not keywords:
            return self.expression(ast.BinOp(arguments[0], ARITHMETIC[name](), arguments[1]))
        if call.module is not None:
            further = [self.operand(f"self.{call.attribute}.{a}", None) for a in POINTWISE[name].attributes]
        else:
            values = ("min", "max", "min_val", "max_val", "negative_slope", "alpha", "lambd")
            if keywords.keys() - {*values, "inplace", "reduction", "approximate"}:
                raise Unsupported
            arguments += [keywords[key] for key in values if key in keywords]
            if name == "clamp" and len(arguments) == 2:
                name = "clamp_max" if "max" in keywords else "clamp_min"
            further = [self.wrapped(a, _ATOM) for a in arguments[1:]] or list(POINTWISE[name].defaults)
        if len(further) > sum(f"{{{letter}}}" in "".join(POINTWISE[name].triton) for letter in "ab"):
            raise Unsupported
        fields = dict(zip("ab", further), x=self.repeatable(arguments[0]))
        *before, value = [line.format(**fields) for line in POINTWISE[name].triton]
        self.lines += before
        return value, _ATOM if re.fullmatch(r"tl\.\w+\([^()]*\)", value) else 1

    # ---- steps

    def add_bias(self, step):
        """Begin with the bias of a convolution that was called without it."""
        x = self.operand(step.target, step.shape)
        bias = self.operand(f"self.{step.module}.bias", (step.shape[1],) + (1,) * (len(step.shape) - 2))
        self.plan.append(f"{step} [{', '.join(self.operands)}]")
        self.lines += [f"# {step}", f"{step.target} = {x} + {bias}"]
        self.sections.append((list(self.lines), "vector"))
        self.biased = [self.operands[f"self.{step.module}.bias"].load, self.lines[-1]]
        self.local[step.target] = "vector"

    def add(self, step):
        """Append a step, and to the plan its torch line, the dimensions that make a row and the operands that it adds.

            x = torch.softmax(x, self.dim) over 1 [x]      x = y * self.scale + x [y, self.scale, x], as in the line
        """
        def place(operand):
            found = re.search(rf"(?<![\w.]){re.escape(operand.text)}(?!\w)", step.text)
            return found.start() if found else len(step.text)  # what a layer holds comes last

        before = len(self.operands)
        self.append(step)
        known = list(self.operands.items())
        added = sorted(known[before:], key=lambda item: place(item[1]))
        self.operands = dict(known[:before] + added)
        listed = ", ".join(operand.text for _, operand in added)
        over = " over " + "-".join(map(str, sorted(set(step.dims)))) if step.kind == "row" else ""
        self.plan.append(f"{step}{over}" + (f" [{listed}]" if listed else ""))

    def append(self, step):
        """The lines of a step, headed by the torch line that they replace."""
        before, operands = len(self.lines), len(self.operands)
        self.lines.append(f"# {step}")
        self.last = step
        reduced = step.kind == "row" and ROWS[step.op].reduces
        reduced |= step.kind == "pointwise" and tuple(step.shape) != self.shape
        if self.kind == "sweep" and step.kind == "row":
            fields, affine = self.row_fields(step)
            fields["i"] = sum(level == "reduction" for _, level in self.sections) or ""
            # The comment, which stands in self.lines already, goes where the reduction will be written.
            self.sections.append(((ROWS[step.op], fields, [self.lines.pop()] + affine), "reduction"))
        else:
            self.lines += getattr(self, f"{step.kind}_lines")(step)  # which may append helper lines before its own
            added = list(self.operands.values())[operands:]
            if step.kind == "pointwise" and reduced and any("idx" in operand.load for operand in added):
                raise Unsupported  # a tensor of the rows' numbers
            self.sections.append((self.lines[before:], "row" if reduced else "vector"))
        self.local[step.target] = "row" if reduced else "vector"

    def all_lines(self, step):
        x = self.variable(step.source)  # the template adds it up
        return [f"{step.source} = {x} * {x}"] if step.op == "norm" else []

    def pointwise_lines(self, step):
        if step.op != "diagonal":
            return [f"{step.target} = {self.expression(step.node)[0]}"]
        vector = diagonal(self.parsed.call(step.node).arguments[0])
        matrix = self.variable(step.source)
        shape = self.parsed.evaluate(vector, step.values).shape
        return [f"{step.target} = {self.operand(ast.unparse(vector), (*shape, 1))} * {matrix}"]

    def row_fields(self, step) -> tuple[dict, list]:
        """What a row operator's lines are filled with, and the lines that follow it."""
        fields, affine = {"x": self.variable(step.source), "t": step.target}, []
        if step.op == "layer_norm":
            fields["eps"] = self.operand(f"self.{step.module}.eps", None)
            weight, bias = self.affine(step, step.layer.normalized_shape)
            self.length = f"{weight}.numel()"
            affine = [f"{step.target} = {step.target} * {weight} + {bias}"]
        return fields, affine

    def affine(self, step, shape) -> list[str]:
        """The kernel's names for the weight and the bias of a layer."""
        return [self.operand(f"self.{step.module}.{name}", shape) for name in ("weight", "bias")]

    def row_lines(self, step):
        fields, affine = self.row_fields(step)
        return [line.format(**fields) for line in ROWS[step.op].triton] + affine

    def norm_lines(self, step):
        x = self.variable(step.source)
        eps = f"self.{step.module}.eps"
        if self.kind == "fused":  # from statistics that a torch call has worked out
            shape = [1 if d in step.dims else n for d, n in enumerate(step.shape)]
            mean, variance = (self.operand(name, shape) for name in step.statistics)
            line = f"{step.target} = ({x} - {mean}) / tl.sqrt({variance} + {self.operand(eps, None)})"
        else:
            self.operand(eps, None)  # which the template reads
            line = f"{step.target} = ({x} - mean) * rstd"
            self.groups = [f"self.{step.module}.num_groups" if step.op == "group" else f"{step.source}.shape[1]"]
        if step.layer.weight is not None:
            channels = (step.shape[1],) + (1,) * (len(step.shape) - 2)
            weight, bias = self.affine(step, step.layer.normalized_shape if step.op == "layer_norm" else channels)
            line += f" * {weight} + {bias}"
        return [line]

    def matmul_lines(self, step):
        self.factors = []
        for text in step.factors:
            self.factors.append(self.operand(text, None))
            operand = self.operands.pop(text)  # elsewhere in the kernel the same tensor would be another operand
            operand.load, operand.factor = "read by the template", True
            self.operands[f"factor {text}"] = operand
        if getattr(step.layer, "bias", None) is None:
            return [f"{step.target} = acc"]
        return [f"{step.target} = acc + {self.operand(f'self.{step.module}.bias', step.shape[-1:])}"]

    # ---- a sweep: rows read in pieces

    def sweep_lines(self, final) -> list[str]:
        """The kernel's body: a loop over the pieces of the row for each reduction, and one that stores elements."""
        loads = [operand.load for operand in self.operands.values() if operand.load]
        vector = [load for load in loads if "idx" in load]  # what makes elements: each loop repeats its part
        body = [load for load in loads if "idx" not in load]
        numbers = []  # names of what stands once for a row
        for what, level in self.sections:
            if level == "vector":
                vector += what
            elif level == "row":
                body += what
            else:
                self.add_reduction(what, vector, body)
                numbers += [what[1]["t"]] if what[0].reduces else []
        if self.local[final] == "vector" and any(line.split(" = ")[0] in numbers for line in vector):
            raise Unsupported  # elements have such a name, too, and would overwrite it for the next piece
        if self.local[final] == "row":
            return body + [f"tl.store(dst_ptr + tl.program_id(0) * inner + lane, {final}, mask=lane < inner)"]
        return body + _loop(vector, [f"tl.store(dst_ptr + idx, {final}, mask=mask)"])

    def add_reduction(self, what, vector, body):
        """Extend `body` by a loop that reduces the row, and `vector` by the elements that are made from the result.

        what: (row of the table of reductions, names for its lines, (comment, lines that scale and shift)).
        """
        operator, fields, (comment, *affine) = what
        start, sweep, end = ([line.format(**fields) for line in lines]
                             for lines in (operator.start, operator.sweep, operator.end))
        scan = operator.technique == "row-scan"
        for line in start:  # accumulators: one for each lane of a piece, for a scan one for the row
            name, first = line.split(" = ")
            kind = "tl.int32" if first == "0" else "tl.float32"
            body.append(f"{name} = tl.full(({'1' if scan else 'BR'}, BI), {first}, {kind})")
        if scan:
            vector.append(comment)
        else:
            body += [comment, *_loop(vector, sweep), *end]
        if operator.value:
            vector += [f"{fields['t']} = {operator.value.format(**fields)}", *affine]
        if scan:  # its only accumulator is what the next piece goes on from
            last = f"tl.where(offs == i + BR - 1, {fields['t']}, 0.0)"
            vector[-1] += f"\n        {name} = tl.sum({last}, 0)[None, :]"

    # ---- source text

    def call(self) -> str:
        """The arguments of the launching function where it is called."""
        return ", ".join([o.text for o in self.operands.values()] + self.groups)

    def text(self, name) -> str:
        """Source of the launching function `name` and of its kernel. Stored is what the last step assigns."""
        operands, step = self.operands.values(), self.last
        full = [o.name for o in operands if o.full]
        if not full and self.kind != "matmul":
            raise Unsupported
        # A product may have no operand of its result's shape.
        main, moved = full[0] if full else "dst", ".movedim(1, -1)" if self.channels_last else ""
        final = step.source if step.kind == "all" else step.target
        # Such as bias.numel() and x[0, 0].numel().
        extra = [f"{n}.numel()" if isinstance(n, str) else f"{main}{[0] * n}.numel()" for n in self.extra.values()]
        fields = {"name": name, "main": main, "out": f"torch.empty_like({main})",
                  "result": "dst.movedim(-1, 1)" if self.channels_last else "dst",
                  "names": ", ".join(o.name for o in operands),
                  "contiguous": "\n    ".join(f"{x} = {x}{moved}.contiguous()" for x in full),
                  "parameters": ", ".join(f"{o.name}_ptr" if o.load else o.name for o in operands),
                  "extra": "".join(f", {text}" for text in extra), "sizes": "".join(f", {n}" for n in self.extra),
                  "store": f"tl.store(dst_ptr + idx, {final}, mask=mask)",
                  "biased": "".join(f"\n        {line}" for line in self.biased)}
        lines = [o.load for o in operands if o.load and not o.factor] + self.lines
        if self.kind == "loss":
            fields["out"] = f"{main}.new_empty(triton.cdiv(n, 1024))"
            fields["result"] = {"mean": "dst.sum() / n", "sum": "dst.sum()", "norm": "torch.sqrt(dst.sum())"}[step.op]
            fields["store"] = f"tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, {final}, 0.0), 0))"
        elif self.kind == "norm":
            fields.update(groups=", groups", cols=f"{main}[0].numel() // groups", block="1024")
        elif self.kind == "row":
            last = self.dims[0] == self.dims[1]  # else all spatial dimensions
            fields.update(groups="", cols=f"{main}.shape[-1]" if last else f"{main}[0, 0].numel()",
                          block="triton.next_power_of_2(cols)")
            if self.local[final] == "row":
                ones = " + (1,)" if last else f" + (1,) * ({main}.dim() - 2)"
                lead = f"{main}.shape[:{-1 if last else 2}]"
                fields["out"] = f"{main}.new_empty({lead}{ones if len(step.shape) == len(self.shape) else ''})"
                fields["store"] = f"tl.store(dst_ptr + tl.program_id(0), {final})"
        elif self.kind == "sweep":
            fields.update(self.sweep_sizes(main, final))
            lines = self.sweep_lines(final)
        elif self.kind == "matmul":
            fields["a"], fields["b"] = self.factors
        indent = "\n        " if self.kind == "norm" else "\n    "
        text = TEMPLATES[self.kind].format(steps=indent.join(lines), **fields)
        return re.sub(r"\n +(?=\n    )", "", text)

    def sweep_sizes(self, main, final) -> dict:
        """Fields of the template: how many elements a row has, how far apart they are, the output."""
        first, last = self.dims
        inner = f"{main}{[0] * (last + 1)}.numel()" if last + 1 < len(self.shape) else "1"
        row = f"{main}{[0] * first}.numel()" if first else f"{main}.numel()"
        cols = self.length or (f"{main}.shape[{first}]" if first == last else f"{row} // inner")
        sizes = {"inner": inner, "cols": cols}
        if self.local[final] == "row":
            ones = f" + {(1,) * (last + 1 - first)}" if len(self.last.shape) == len(self.shape) else ""
            shape = f"{main}.shape[:{first}]{ones} + {main}.shape[{last + 1}:]"
            integer = any(level == "reduction" and what[0].integer for what, level in self.sections)
            sizes["out"] = f"{main}.new_empty({shape}{', dtype=torch.int64' if integer else ''})"
        return sizes


class Window:
    """A pooling or depthwise convolution as a kernel of its own, with nothing fused into it.

    kind, last, channels_last, text() and call() are as a Kernel's. Raises Unsupported for any other layer (cuDNN is
    faster at other convolutions), for options that change more than sizes, and for a stride that is left to the layer.
    """

    def __init__(self, step):
        layer, self.last, self.channels_last = step.layer, step, False
        found = re.fullmatch(r"(Conv|MaxPool|AvgPool|LPPool)[123]d", type(layer).__name__)
        if not found or isinstance(getattr(layer, "padding", 0), str) or layer.stride is None or not step.source \
                or unusual(layer, {"stride", "padding", "dilation", "groups", "bias"}) \
                or found[1] == "Conv" and not 1 < layer.groups == layer.in_channels == layer.out_channels \
                or getattr(layer, "norm_type", 2) != 2:
            raise Unsupported
        self.kind = "depthwise" if found[1] == "Conv" else found[1].lower()
        self.plan = [str(step)]

    def text(self, name) -> str:
        return TEMPLATES["pool"].format(name=name, pool=POOLS[self.kind], step=self.last)

    def call(self) -> str:
        options = ["weight", "bias"] * (self.kind == "depthwise") + ["kernel_size", "stride", "padding", "dilation"]
        absent = {"padding": "0", "dilation": "1"}  # what layers without such an option do
        passed = [f"self.{self.last.module}.{o}" if hasattr(self.last.layer, o) else absent[o] for o in options]
        return ", ".join([self.last.source, *passed])


def _loop(lines, last) -> list[str]:
    """A loop over the pieces of a row: those of `lines` that the lines `last` need, directly or not, and `last`."""
    wanted = {name for line in last for name in re.findall(r"[A-Za-z_]\w*", line)}
    kept, comment = [], False
    for line in reversed(lines):
        target = line.split(" = ")[0]
        if line.startswith("#"):
            kept += [line] if comment else []
            comment = False
        elif target in wanted:
            wanted = wanted - {target} | set(re.findall(r"[A-Za-z_]\w*", line.split(" = ", 1)[1]))
            kept.append(line)
            comment = True
    return [PIECES + "".join(f"\n        {line}" for line in [*reversed(kept), *last])]
