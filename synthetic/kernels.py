"""One Triton kernel and the function that launches it, from the steps of a program.

    fused    one program for each 1,024 elements; a run of pointwise steps
    loss     the same, and a partial sum for each program, finished by a short torch sum
    row      one program for each row (last dimension, or all spatial ones), which it holds whole
    sweep    one program for a tile of rows that are read in pieces: long rows, rows along any dimensions, groups of
             channels; a loop for each reduction, and one more if elements are stored
    matmul   one program for each output tile of a product, or of a stack of products; pointwise steps on the tile
             before it is stored

All address memory by the flat offset `idx`, so one rule indexes broadcast operands.
"""

import ast
import functools
import re
from dataclasses import dataclass, replace

from synthetic.operators import ALIASES, ARITHMETIC, DEFAULTS, OPERATORS, REDUCTIONS, SCANS
from synthetic.program import Unsupported, Value, fields_of

_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_PRECEDENCE = {ast.Add: ("+", 1), ast.Sub: ("-", 1), ast.Mult: ("*", 2), ast.Div: ("/", 2)}
_ATOM = 9  # the precedence of a name, a number or a call
_KEYWORDS = ("min", "max", "min_val", "max_val", "negative_slope", "alpha", "lambd")  # of functions, in their order

# Templates. {names}: the tensors and numbers that the launching function gets; {main}: the first of the tensors that
# the kernel walks; {sizes}, {parameters}: further integers outside and inside the kernel; {body}: loads and steps.
_ELEMENTS = """def {name}({names}):
    {contiguous}
    n = {main}.numel()
    dst = {out}
    {name}_kernel[(triton.cdiv(n, 1024),)]({passed}, dst, n{sizes}, BLOCK=1024)
    return {finished}

@triton.jit
def {name}_kernel({pointers}, dst_ptr, n{parameters}, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    {body}"""
_ROW = """def {name}({names}):
    {contiguous}
    cols = {cols}
    dst = {out}
    {name}_kernel[({main}.numel() // cols,)]({passed}, dst, cols{sizes}, BLOCK=triton.next_power_of_2(cols))
    return dst

@triton.jit
def {name}_kernel({pointers}, dst_ptr, cols{parameters}, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    {body}"""
_SWEEP = """def {name}({names}):
    {contiguous}
    inner = {inner}
    cols = {cols}
    dst = {out}
    width = min(64, triton.next_power_of_2(inner))
    grid = ({main}.numel() // (cols * inner), triton.cdiv(inner, width))
    {name}_kernel[grid]({passed}, dst, cols, inner{sizes}, BR=2048 // width, BI=width)
    return dst

@triton.jit
def {name}_kernel({pointers}, dst_ptr, cols, inner{parameters}, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    {body}"""
_PIECES = """for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner"""
_MATMUL = """def {name}({names}):
    {contiguous}
    k, n = {b}.shape[-2:]
    dst = {a}.new_empty(*{a}.shape[:-1], n)
    {b} = {b}.mT.contiguous().mT.reshape(-1, k, n)
    {a} = {a}.contiguous().reshape(len({b}), -1, k)
    m = {a}.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len({b}))
    {name}_kernel[grid]({passed}, dst, m, n, k, *{a}.stride(), *{b}.stride(){sizes}, BM=128, BN=64, BK=32)
    return dst

@triton.jit
def {name}_kernel({pointers}, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn{parameters}, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load({a}_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load({b}_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    {body}"""
_TEMPLATES = {"fused": _ELEMENTS, "loss": _ELEMENTS, "row": _ROW, "sweep": _SWEEP, "matmul": _MATMUL}


@dataclass
class Operand:
    """What a kernel gets from outside."""

    name: str  # in the kernel
    text: str  # outside
    load: str = ""  # the line that reads it; "" for numbers, and for the factors of a product, which a template reads
    full: bool = False  # has the shape of the tensor that the kernel walks
    pointer: bool = False  # a tensor
    outside: bool = False  # only the launching function gets it


@dataclass
class Line:
    """A line of the kernel. how: "element", "number" (one for each row), or what reduces elements to a number."""

    target: str
    text: str
    how: str
    comment: str = ""  # the torch line that it begins to replace

    def reads(self) -> set:
        return set(re.findall(r"[A-Za-z_]\w*", self.text))


@functools.cache
def _tree(spelling):
    """The syntax tree of a spelling, in which fields are names."""
    return ast.parse(spelling.format(**{name: name for name in fields_of(spelling)}), mode="eval").body


class Kernel:
    """A kernel under construction. Its methods raise Unsupported for what its kind cannot express.

    shape: of the tensor that it walks (of a product: of the result). dims: of rows, the first and last dimension.
    taken: variables of the program, which no operand may hide.
    """

    def __init__(self, kind, shape, dims=(), taken=()):
        self.kind, self.shape, self.dims, self.taken = kind, tuple(shape), dims, set(taken)
        self.operands = {}  # text outside -> Operand
        self.sizes = {}  # further integers: name -> the expression outside
        self.lines, self.steps = [], []
        self.local = {}  # number of a value that the kernel computes -> its variable
        self.groups = ""  # of a norm over groups of channels: how many elements a group has

    # ---- operands

    def operand(self, value) -> str:
        """The kernel's name for a value from outside."""
        if value.text in self.operands:
            return self.operands[value.text].name
        words = re.findall(r"[A-Za-z_]\w*(?!\w*\()", re.sub(r"\.(T|mT|t\(\)|transpose\(.*?\))$", "", value.text))
        name = words[-1] if words else "value"
        taken = {operand.name for operand in self.operands.values()}
        if value.text != name:  # not a variable of the program
            taken |= self.taken
        name = next(n for n in [name] + [f"{name}{i}" for i in range(2, 99)] if n not in taken)
        operand = self.operands[value.text] = Operand(name, value.text, pointer=value.shape is not None)
        if value.shape is not None:
            shape = (1,) * (len(self.shape) - len(value.shape)) + tuple(value.shape)
            operand.full = shape == self.shape
            operand.load = self.load(name, shape, operand.full)
        return name

    def load(self, name, shape, full) -> str:
        """The expression that reads a tensor whose shape is self.shape, or 1 outside one block of dimensions."""
        rank, block = len(self.shape), [i for i, size in enumerate(shape) if size != 1]
        different = [i for i in block if i >= rank or shape[i] != self.shape[i]]
        if len(shape) > rank or different or block and block[-1] - block[0] >= len(block):
            raise Unsupported
        masked = ", mask=mask" if self.kind in ("fused", "loss") else ", mask=mask, other=0.0"
        if full:
            return f"tl.load({name}_ptr + idx{masked})"
        if not block:
            return f"tl.load({name}_ptr)"
        if self.kind == "matmul" and block == [rank - 1]:
            return f"tl.load({name}_ptr + cols, mask=cols < n, other=0.0)[None, :]"
        if self.kind == "row" and self.dims[0] == rank - 1 and block == [rank - 1]:
            return f"tl.load({name}_ptr + offs{masked})"
        if self.kind == "row" and block[-1] == self.dims[0] - 1:  # one number for each row
            index, masked = "tl.program_id(0)", ""
        else:
            index = f"idx // {self.elements_below(block[-1] + 1)}" if block[-1] < rank - 1 else "idx"
        if block[0] > 0:
            self.sizes[f"{name}_size"] = f"{name}.numel()"
            index += f" % {name}_size"
        return f"tl.load({name}_ptr + {index}{masked})"

    def elements_below(self, dimensions) -> str:
        """The kernel's name for how many elements stand below the first so many dimensions."""
        text = "{main}[" + ", ".join("0" * dimensions) + "].numel()"
        names = ["inner2", "inner3"] if self.kind == "sweep" else ["inner", "inner2", "inner3"]
        name = next(n for n in names if self.sizes.get(n, text) == text)
        self.sizes[name] = text
        return name

    # ---- expressions: a syntax tree of torch code as (Triton text, precedence)

    def value(self, value) -> tuple[str, int]:
        if value.number in self.local:
            return self.local[value.number], _ATOM
        if value.shape is None and re.fullmatch(r"-?[\d.]+(e-?\d+)?", value.text):
            return value.text, 3 if value.text.startswith("-") else _ATOM
        return self.operand(value), _ATOM

    def expression(self, node, values):
        """Translate an expression. values: fields -> Value. Appends lines where a part is needed twice."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Constant):
            return repr(node.value), _ATOM
        if isinstance(node, ast.Name):
            return self.value(values[node.id])
        if names & values.keys() and all(values[n].shape is None for n in names & values.keys()):
            text = ast.unparse(node)  # of numbers alone, which are worked out outside
            for name in names & values.keys():
                text = re.sub(rf"(?<![\w.]){name}\b", values[name].text, text)
            return self.operand(Value(text)), _ATOM
        if isinstance(node, ast.UnaryOp):
            return "-" + self.wrapped(node.operand, values, 3), 3
        if isinstance(node, ast.BinOp) and type(node.op) in _PRECEDENCE:
            symbol, level = _PRECEDENCE[type(node.op)]
            left = self.wrapped(node.left, values, level)
            return f"{left} {symbol} {self.wrapped(node.right, values, level + 1)}", level
        if isinstance(node, ast.BinOp):  # a power
            return " * ".join([self.repeatable(node.left, values)] * node.right.value), 2
        if isinstance(node, ast.Compare):
            left = self.wrapped(node.left, values, 1)
            return f"{left} {_COMPARED[type(node.ops[0])]} {self.wrapped(node.comparators[0], values, 1)}", 0
        return self.call(node, values)

    def wrapped(self, node, values, level) -> str:
        text, precedence = self.expression(node, values)
        return text if precedence >= level else f"({text})"

    def repeatable(self, node, values) -> str:
        """The expression as something that may stand several times: a name or a number."""
        text, precedence = self.expression(node, values)
        if precedence == _ATOM:
            return text
        self.lines.append(Line("w", text, "element"))
        return "w"

    def call(self, node, values):
        """torch.f(x, ...), F.f(x, ...) or x.f(...)"""
        name, arguments = ALIASES.get(node.func.attr, node.func.attr), list(node.args)
        if not isinstance(node.func.value, ast.Name) or node.func.value.id not in ("torch", "F"):
            arguments.insert(0, node.func.value)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in ("zeros_like", "ones_like"):
            return ("0.0" if name == "zeros_like" else "1.0"), _ATOM
        if name in ARITHMETIC:
            return self.expression(ast.BinOp(arguments[0], ARITHMETIC[name](), arguments[1]), values)
        arguments += [keywords[key] for key in _KEYWORDS if key in keywords]
        if name == "clamp" and len(arguments) == 2:
            name = "clamp_max" if "max" in keywords else "clamp_min"
        if "approximate" in keywords:
            name = "gelu_tanh"
        if name not in OPERATORS or OPERATORS[name].kind != "pointwise":
            raise Unsupported
        further = [self.wrapped(argument, values, _ATOM) for argument in arguments[1:]] or DEFAULTS.get(name, ())
        return self.formula(name, self.repeatable(arguments[0], values), further)

    def formula(self, name, x, further):
        """The value of a function of the table: (Triton text, precedence)."""
        fields = dict(zip("ab", further), x=x)
        *before, value = [line.format(**fields) for line in OPERATORS[name].lines]
        for line in before:
            target, _, text = line.partition(" = ")
            self.lines.append(Line(target, text, "element"))
        return value, _ATOM if re.fullmatch(r"tl\.\w+\([^()]*\)", value) else 1

    # ---- steps

    def add(self, step):
        """Append the lines of a step."""
        first = len(self.lines)
        kind = step.operator.kind
        if kind == "pointwise":
            self.pointwise(step)
        elif kind == "all":
            self.lines.append(Line("value", step.operator.lines[0].format(x=self.value(step.source)[0]), "element"))
        elif kind == "matmul":
            for field in "ab":
                self.factor(step.operands[field])
            bias = step.operands.get("bias")
            self.lines.append(Line(step.result.text, f"acc + {self.operand(bias)}" if bias else "acc", "element"))
        else:
            self.reduction(step)
        self.lines[first].comment = f"# {step}"
        self.local[step.result.number] = self.lines[-1].target
        self.steps.append(step)

    def factor(self, value):
        """A factor of a product, which the template reads. Elsewhere in the kernel its tensor is another operand."""
        name = self.operand(replace(value, shape=None))
        self.operands[f"factor {value.text}"] = Operand(name, value.text, pointer=True)
        del self.operands[value.text]

    def pointwise(self, step):
        number = tuple(step.result.shape) != self.shape  # one for each row
        before, first = len(self.operands), len(self.lines)
        if "layer" in step.attributes:
            further = [self.value(value)[0] for field, value in step.operands.items() if field != "x"]
            text = self.formula(step.name, self.value(step.source)[0], further)[0]
        elif step.operator.lines and step.name == "diagonal":
            weights, x = step.operands["y"], self.value(step.operands["x"])[0]
            text = f"{self.operand(replace(weights, shape=(*weights.shape, 1)))} * {x}"
        else:
            text = self.expression(_tree(step.spelling), step.operands)[0]
        self.lines.append(Line(step.result.text, text, "element"))
        for line in self.lines[first:] if number else ():
            line.how = "number"
        added = list(self.operands.values())[before:]
        if number and [operand for operand in added if "idx" in operand.load]:
            raise Unsupported  # a tensor of the rows' numbers

    def reduction(self, step):
        """The lines of an operator over rows, groups or channels."""
        values = {name: self.value(value)[0] for name, value in step.operands.items()
                  if name not in ("weight", "bias", "groups")}
        values |= {"x": self.value(step.source)[0], "t": step.result.text}
        count = sum(other.operator.kind == "row" for other in self.steps) + 1
        lines = list(step.operator.lines)
        if "weight" in step.operands:
            lines.append("{t} = {t} * {weight} + {bias}")
            values |= {name: self.operand(step.operands[name]) for name in ("weight", "bias")}
        for name in ("m", "s", "e", "d", "q"):
            values.setdefault(name, name + (str(count) if count > 1 else ""))
        numbers = {line.target for line in self.lines if line.how not in ("element", *SCANS)}
        for line in lines:
            target, _, text = line.format(**values).partition(" = ")
            how, colon, rest = text.partition(": ")
            written = Line(target, rest if colon else text, how if colon else "element")
            reduced = bool(colon) and how not in SCANS
            if not colon and not written.reads() & self.elements(numbers):
                written.how = "number"
            if reduced or written.how == "number":
                numbers.add(target)
            self.lines.append(written)
        if "groups" in step.operands:
            groups = step.operands["groups"]
            self.operands[groups.text] = Operand("groups", groups.text, outside=True)
        if step.operator.kind == "group":
            self.groups = "{main}[0].numel() // groups" if "groups" in step.operands else "{main}[0, 0].numel()"

    def elements(self, numbers) -> set:
        """Names that stand for elements."""
        names = {line.target for line in self.lines} | {o.name for o in self.operands.values() if "idx" in o.load}
        names |= {operand.name for operand in self.operands.values() if "offs" in operand.load}
        return names - numbers

    # ---- source text

    def loads(self) -> list[Line]:
        return [Line(operand.name, operand.load, "element" if re.search("idx|offs", operand.load) else "number")
                for operand in self.operands.values() if operand.load]

    def body(self) -> list[str]:
        """The lines that load, compute and store."""
        last = self.lines[-1]
        if self.kind == "sweep":
            return self.sweep_body(last)
        out = [f"{line.target} = {line.text}" for line in self.loads()]
        for line in self.lines:
            out += [line.comment] * bool(line.comment)
            text = line.text
            if line.how in REDUCTIONS:
                _, element, _, reduce = REDUCTIONS[line.how]
                text = f"{reduce}({element.format(v=text)}, 0)"
            elif line.how in SCANS:
                text = f"tl.{line.how}({text}, 0)"
            out.append(f"{line.target} = {text}")
        if self.kind == "loss":
            out[-1:] = [f"tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, {last.text}, 0.0), 0))"]
        elif self.row_result():
            out.append(f"tl.store(dst_ptr + tl.program_id(0), {last.target})")
        else:
            out.append(f"tl.store(dst_ptr + idx, {last.target}, mask=mask)")
        return out

    def row_result(self) -> bool:
        """Whether the kernel stores one number for each row."""
        return self.kind in ("row", "sweep") and self.lines[-1].how not in ("element", *SCANS)

    def sweep_body(self, last) -> list[str]:
        """A loop over the pieces of the row for each reduction, and one that stores elements."""
        elements = [line for line in self.loads() if line.how == "element"]
        out = [f"{line.target} = {line.text}" for line in self.loads() if line.how == "number"]
        scanned = False
        for line in self.lines:
            if line.how == "element":
                elements.append(line)
            elif line.how == "number":
                out += [line.comment] * bool(line.comment) + [f"{line.target} = {line.text}"]
            elif line.how in SCANS:
                sign, scanned = "+" if line.how == "cumsum" else "*", True
                out.append(f"s = tl.full((1, BI), {SCANS[line.how]}, tl.float32)")
                # The next piece goes on from the last element of this one.
                carry = f"s = tl.sum(tl.where(offs == i + BR - 1, {line.target}, 0.0), 0)[None, :]"
                text = f"s {sign} tl.{line.how}({line.text}, 0)\n        {carry}"
                elements.append(Line(line.target, text, "element", line.comment))
            else:
                start, element, join, reduce = REDUCTIONS[line.how]
                kind = "tl.int32" if line.how == "first" else "tl.float32"
                out += [line.comment] * bool(line.comment) + [f"acc = tl.full((BR, BI), {start}, {kind})"]
                joined = join.format(s="acc", u=element.format(v=line.text), v=element.format(v=line.text))
                out += _loop(elements, [f"acc = {joined}"]) + [f"{line.target} = {reduce}(acc, 0)[None, :]"]
                if scanned:
                    raise Unsupported  # the scan would have to begin again
        if self.row_result():
            return out + [f"tl.store(dst_ptr + tl.program_id(0) * inner + lane, {last.target}, mask=lane < inner)"]
        numbers = {line.target for line in self.lines if line.how != "element" and line.how not in SCANS}
        if numbers & {line.target for line in elements}:
            raise Unsupported  # elements of that name would overwrite the number
        return out + _loop(elements, [f"tl.store(dst_ptr + idx, {last.target}, mask=mask)"])

    def call_text(self) -> str:
        """The arguments of the launching function where it is called."""
        return ", ".join(operand.text for operand in self.operands.values())

    def text(self, name) -> str:
        """Source of the launching function `name` and of its kernel."""
        operands = list(self.operands.values())
        inside = [operand for operand in operands if not operand.outside]
        full = [operand.name for operand in operands if operand.full]
        if not full and self.kind != "matmul":
            raise Unsupported
        main = full[0] if full else "dst"  # a product may have no operand of its result's shape
        fields = {"name": name, "main": main, "out": f"torch.empty_like({main})", "finished": "dst",
                  "names": ", ".join(operand.name for operand in operands),
                  "passed": ", ".join(operand.name for operand in inside),
                  "pointers": ", ".join(operand.name + "_ptr" * operand.pointer for operand in inside),
                  "contiguous": "\n    ".join(f"{n} = {n}.contiguous()" for n in full),
                  "sizes": "".join(f", {text.format(main=main)}" for text in self.sizes.values()),
                  "parameters": "".join(f", {size}" for size in self.sizes)}
        fields |= getattr(self, f"{self.kind}_fields")(main)
        text = _TEMPLATES[self.kind].format(body="\n    ".join(self.body()), **fields)
        return re.sub(r"\n +(?=\n    )", "", text)

    def fused_fields(self, main) -> dict:
        return {}

    def loss_fields(self, main) -> dict:
        finished = self.steps[-1].operator.lines[1]
        return {"out": f"{main}.new_empty(triton.cdiv(n, 1024))", "finished": finished}

    def matmul_fields(self, main) -> dict:
        a, b = [operand.name for operand in self.operands.values() if operand.pointer and not operand.load][:2]
        return {"a": a, "b": b}

    def row_fields(self, main) -> dict:
        last = self.dims[0] == self.dims[1]  # else all spatial dimensions
        fields = {"cols": f"{main}.shape[-1]" if last else f"{main}[0, 0].numel()"}
        if self.row_result():
            kept = len(self.steps[-1].result.shape) == len(self.shape)
            ones = " + (1,)" if last else f" + (1,) * ({main}.dim() - 2)"
            fields["out"] = f"{main}.new_empty({main}.shape[:{-1 if last else 2}]{ones if kept else ''}{self.dtype()})"
        return fields

    def sweep_fields(self, main) -> dict:
        """How many elements a row has, how far apart they are, the output."""
        first, last = self.dims
        inner = f"{main}[{', '.join('0' * (last + 1))}].numel()" if last + 1 < len(self.shape) else "1"
        row = f"{main}[{', '.join('0' * first)}].numel()" if first else f"{main}.numel()"
        cols = f"{main}.shape[{first}]" if first == last else f"{row} // inner"
        fields = {"inner": inner, "cols": self.groups.format(main=main) or cols}
        if self.row_result():
            kept = len(self.steps[-1].result.shape) == len(self.shape)
            ones = f" + {(1,) * (last + 1 - first)}" if kept else ""
            fields["out"] = f"{main}.new_empty({main}.shape[:{first}]{ones} + {main}.shape[{last + 1}:]{self.dtype()})"
        return fields

    def dtype(self) -> str:
        """Of a result that is an index."""
        return ", dtype=torch.int64" if self.lines[-1].how == "first" else ""


def _loop(elements, last) -> list[str]:
    """A loop over the pieces of a row: those of the lines that the lines `last` need, directly or not, and `last`."""
    wanted = set(re.findall(r"[A-Za-z_]\w*", " ".join(last)))
    kept = []
    for line in reversed(elements):
        if line.target in wanted:
            wanted = wanted - {line.target} | line.reads()
            kept[:0] = [line.comment] * bool(line.comment) + [f"{line.target} = {line.text}"]
    return [_PIECES + "".join(f"\n        {text}" for text in [*kept, *last])]
