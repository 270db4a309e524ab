"""One Triton kernel and the function that launches it, from the steps of a program.

    fused           one program for each 1,024 elements; a run of pointwise steps
    partial_sums    the same, and a sum for each program; a short torch sum finishes it
    row             one program for each row (last dimension, or all spatial ones), which it holds whole
    sweep           one program for a tile of rows that are read in pieces: long rows, rows along any dimensions, groups
                    of channels; a loop for each reduction, and one more if elements are stored
    matmul          one program for each output tile of a product, or of a stack of products; pointwise steps on the
                    tile before it is stored

All address memory by the flat offset `idx`, so one rule indexes broadcast operands.
"""

import re
from dataclasses import dataclass, replace

from synthetic.program import EXPRESSIONS, RESERVED, Value, table

_WORD = r"[A-Za-z_]\w*"
TEMPLATES = table("kernels.toml")
REDUCTIONS = TEMPLATES["reductions"]
SCANS = ("cumsum", "cumprod")  # running ones: only in a kernel that holds the whole row


class Unsupported(Exception):
    """What a kernel cannot express."""


@dataclass
class Line:  # how: "element", "number" (one for each row), or what makes a number of the elements
    target: str
    text: str
    how: str = "element"
    comment: tuple = ()  # the torch line that it begins to replace

    def __str__(self):
        return f"{self.target} = {self.text}"

    @property
    def many(self) -> bool:  # it makes elements
        return self.how in ("element", *SCANS)


@dataclass
class Operand:  # what a kernel gets from outside
    name: str  # in the kernel
    text: str  # outside
    tensor: bool
    full: bool = False  # has the shape of the tensor that the kernel walks
    load: Line | None = None  # the line that reads it; None for numbers, and for what a template reads


class Kernel:
    """A kernel under construction. Its methods raise Unsupported for what its kind cannot express.
    shape: of the tensor that it walks (of a product: of the result). dims: of rows, the first and last dimension.
    taken: variables of the program, which no operand may hide."""

    def __init__(self, kind, shape, dims=(), taken=()):
        self.kind = kind
        self.shape = tuple(shape)
        self.dims = dims
        self.taken = set(taken)
        self.operands = {}  # text outside -> Operand
        self.sizes = {}  # further integers: name -> the expression outside
        self.lines = []
        self.steps = []
        self.local = {}  # number of a value that the kernel computes -> its variable
        self.body = []  # lines of its code, filled in by `complete`

    # ---- operands

    def operand(self, value) -> str:
        """The kernel's name for a value from outside."""
        if value.text in self.operands:
            return self.operands[value.text].name
        words = re.findall(_WORD + r"(?!\w*\()", re.sub(r"\.(T|mT|t\(\))$", "", value.text))
        name = first = ["value", *words][-1]
        taken = {operand.name for operand in self.operands.values()}
        if value.text != name:  # not a variable of the program
            taken |= self.taken | RESERVED
        while name in taken:
            name = f"{first}{int(name.removeprefix(first) or 1) + 1}"
        operand = self.operands[value.text] = Operand(name, value.text, value.shape is not None)
        if operand.tensor:
            shape = (1,) * (len(self.shape) - len(value.shape)) + tuple(value.shape)
            operand.full = shape == self.shape
            operand.load = Line(name, self.load(name, shape), "number")
            if re.search("idx|offs", operand.load.text):
                operand.load.how = "element"
        return name

    def load(self, name, shape) -> str:
        """The expression that reads a tensor whose shape is self.shape, or 1 outside one block of dimensions."""
        rank = len(self.shape)
        block = [i for i, size in enumerate(shape) if size != 1]
        if block and block[-1] - block[0] >= len(block):
            raise Unsupported
        masked = ", mask=mask" if self.kind in ("fused", "partial_sums") else ", mask=mask, other=0.0"
        if shape == self.shape:
            return f"tl.load({name}_ptr + idx{masked})"
        if not block:
            return f"tl.load({name}_ptr)"
        if self.kind == "matmul" and block == [rank - 1]:
            return f"tl.load({name}_ptr + cols, mask=cols < n, other=0.0)[None, :]"
        if self.kind == "row" and self.dims[0] == rank - 1 and block == [rank - 1]:
            return f"tl.load({name}_ptr + offs{masked})"
        index = "idx"
        if self.kind == "row" and block[-1] == self.dims[0] - 1:  # one number for each row
            index, masked = "tl.program_id(0)", ""
        elif block[-1] < rank - 1:
            index = f"idx // {self.elements_below(block[-1] + 1)}"
        if block[0] > 0:
            self.sizes[f"{name}_size"] = f"{name}.numel()"
            index += f" % {name}_size"
        return f"tl.load({name}_ptr + {index}{masked})"

    def elements_below(self, dimensions) -> str:
        """The kernel's name for how many elements stand below the first so many dimensions."""
        text = "{main}[" + ", ".join("0" * dimensions) + "].numel()"
        name = "inner"
        if self.kind == "sweep" or self.sizes.get(name, text) != text:  # a sweep has an `inner` of its own
            name = "inner2"
        self.sizes[name] = text
        return name

    def value(self, value) -> str:
        """The kernel's text for a value: its own variable, a number, or an operand."""
        if value.number in self.local:
            return self.local[value.number]
        return value.text if re.fullmatch(r"-?[\d.]+(e-?\d+)?", value.text) else self.operand(value)

    # ---- steps

    def add(self, step):
        """Append the lines of a step."""
        first = len(self.lines)
        operands = len(self.operands)
        if step.operator.kind == "matmul":
            self.product(step)
        else:
            self.write(step)
        if step.operator.kind == "pointwise" and tuple(step.result.shape) != self.shape:  # a number for each row
            for line in self.lines[first:]:
                line.how = "number"
            if any(operand.load and "idx" in operand.load.text for operand in list(self.operands.values())[operands:]):
                raise Unsupported  # a tensor of the rows' numbers
        self.lines[first].comment = (f"# {step}",)
        self.local[step.result.number] = self.lines[-1].target
        self.steps.append(step)

    def product(self, step):
        """A product, which the template writes into acc."""
        for field in "ab":  # the template reads them; elsewhere in the kernel the same tensor is another operand
            name = self.operand(replace(step.operands[field], shape=None))
            text = step.operands[field].text
            self.operands[f"factor {field}"] = Operand(name, text, True)
            del self.operands[text]
        bias = step.operands.get("bias")
        self.lines.append(Line(step.result.text, f"acc + {self.operand(bias)}" if bias else "acc"))

    def write(self, step):
        """The lines of any other operator, as the tables have them."""
        kind = step.operator.kind
        order, *lines = EXPRESSIONS["triton"].get(step.spelling, ["", *(step.operator.lines or [step.spelling])])
        fields = self.fields(step, order.split("; ") if order else step.operands)
        target = step.result.text
        if kind == "all":
            lines = lines[:-1]  # the last is torch's
            target = "value"
        elif kind != "pointwise":
            count = sum(other.operator.kind != "pointwise" for other in self.steps)
            for name in "msedq":  # variables of its own
                fields.setdefault(name, name + (str(count + 1) if count else ""))
            fields |= {"x": self.value(step.source), "t": target}
            lines = lines + ["{t} = {t} * {weight} + {bias}"] * ("weight" in step.operands)
        for line in lines:
            name, _, text = line.format(**fields).rpartition(" = ")
            how, _, text = text.rpartition(": ")
            if not how and kind not in ("pointwise", "all") and not self.elements() & {*re.findall(_WORD, text)}:
                how = "number"
            self.lines.append(Line(name or target, text, how or "element"))

    def fields(self, step, order) -> dict:
        """The kernel's texts for the operands of a step. order: fields, or "n = 2 * {c}", a number of numbers."""
        texts = {}
        for field in order:
            field, _, text = field.partition(" = ")
            outside = {name: value.text for name, value in step.operands.items()}
            value = Value(text.format(**outside)) if text else step.operands[field]
            if step.name == "diagonal" and field == "y":
                value = replace(value, shape=(*value.shape, 1))
            texts[field] = self.value(value)
            if step.name == "clamp" and texts[field].startswith("-"):
                texts[field] = f"({texts[field]})"
        return texts

    def elements(self) -> set:
        """Variables that hold elements."""
        many = {line.target: line.many for line in self.loads() + self.lines}  # the last line of a variable counts
        return {name for name in many if many[name]}

    # ---- source text

    def loads(self) -> list[Line]:
        return [operand.load for operand in self.operands.values() if operand.load]

    def complete(self):
        """Write the body: the lines that load, compute and store. After this, no step can be added."""
        self.body = self.sweep() if self.kind == "sweep" else self.straight()

    def straight(self) -> list[str]:
        """The body without a loop: a program holds all elements that it needs."""
        out = [str(line) for line in self.loads()]
        for line in self.lines:
            text = line.text
            if line.how in REDUCTIONS:
                _, element, _, reduce = REDUCTIONS[line.how]
                text = f"{reduce}({element.format(v=text)}, 0)"
            elif line.how in SCANS:
                text = f"tl.{line.how}({text}, 0)"
            out += [*line.comment, f"{line.target} = {text}"]
        last = self.lines[-1]
        if self.kind == "partial_sums":
            out[-1] = f"tl.store(dst_ptr + tl.program_id(0), tl.sum(tl.where(mask, {last.text}, 0.0), 0))"
        elif last.many:
            out.append(f"tl.store(dst_ptr + idx, {last.target}, mask=mask)")
        else:
            out.append(f"tl.store(dst_ptr + tl.program_id(0), {last.target})")
        return out

    def sweep(self) -> list[str]:
        """The body with a loop over the pieces of the row for each reduction, and one that stores elements."""
        elements = [line for line in self.loads() if line.many]
        out = [str(line) for line in self.loads() if not line.many]
        last = self.lines[-1]
        for line in self.lines:
            if line.how == "element":
                elements.append(line)
            elif line.how == "number":
                out += [*line.comment, str(line)]
            elif line.how in SCANS:
                raise Unsupported
            else:
                start, element, join, reduce = REDUCTIONS[line.how]
                joined = join.format(v=element.format(v=line.text))
                dtype = "tl.int32" if line.how == "first" else "tl.float32"
                out += [*line.comment, f"acc = tl.full((BR, BI), {start}, {dtype})"]
                out += [_loop(elements, f"acc = {joined}"), f"{line.target} = {reduce}(acc, 0)[None, :]"]
        numbers = {line.target for line in self.lines if not line.many}
        if not last.many:
            return out + [f"tl.store(dst_ptr + tl.program_id(0) * inner + lane, {last.target}, mask=lane < inner)"]
        if numbers & {line.target for line in elements}:
            raise Unsupported  # elements of that name would overwrite the number
        return out + [_loop(elements, f"tl.store(dst_ptr + idx, {last.target}, mask=mask)")]

    def text(self, name) -> str:
        """Source of the launching function `name` and of its kernel."""
        operands = self.operands.values()
        full = [operand.name for operand in operands if operand.full]
        main = [*full, "dst"][0]  # a product may have no operand of its result's shape
        fields = {"name": name, "main": main, "out": f"torch.empty_like({main})", "result": "dst",
                  "names": ", ".join(operand.name for operand in operands),
                  "pointers": ", ".join(operand.name + "_ptr" * operand.tensor for operand in operands),
                  "contiguous": "\n    ".join(f"{n} = {n}.contiguous()" for n in full),
                  "sizes": "".join(f", {text.format(main=main)}" for text in self.sizes.values()),
                  "parameters": "".join(f", {size}" for size in self.sizes)}
        if self.kind == "partial_sums":
            fields |= {"out": f"{main}.new_empty(triton.cdiv(n, 1024))", "result": self.steps[-1].operator.lines[-1]}
        elif self.kind == "matmul":
            fields |= {field: self.operands[f"factor {field}"].name for field in "ab"}
        elif self.dims:
            fields |= self.row_fields(main)
        template = TEMPLATES["elements" if self.kind in ("fused", "partial_sums") else self.kind]
        text = template.format(body="\n    ".join(self.body), **fields)
        return re.sub(r"\n +(?=\n    )", "", text)

    def row_fields(self, main) -> dict:
        """How many elements a row has, how far apart they are, the output."""
        first, last = self.dims
        rest = last + 1 < len(self.shape)
        fields = {"inner": f"{main}[{', '.join('0' * (last + 1))}].numel()" if rest else "1",
                  "cols": f"{main}.shape[{first if rest else -1}]"}
        groups = [operand.name for operand in self.operands.values() if operand.text.endswith(".num_groups")]
        if groups:
            fields["cols"] = f"{main}[0].numel() // {groups[0]}"
        elif first < last:
            row = f"{main}[{', '.join('0' * first)}].numel()" if first else f"{main}.numel()"
            fields["cols"] = row + " // inner" * rest
        if not self.lines[-1].many:
            ones = f" + {(1,) * (last + 1 - first)}" if len(self.steps[-1].result.shape) == len(self.shape) else ""
            before, after = first if first < last or rest else -1, f" + {main}.shape[{last + 1}:]" * rest
            index = ", dtype=torch.int64" * (self.lines[-1].how == "first")
            fields["out"] = f"{main}.new_empty({main}.shape[:{before}]{ones}{after}{index})"
        return fields


def _loop(elements, last) -> str:
    """A loop over the pieces of a row: those of the lines that the line `last` needs, directly or not, and `last`."""
    wanted = set(re.findall(_WORD, last))
    kept = [last]
    for line in reversed(elements):
        if line.target in wanted:
            wanted = wanted - {line.target} | set(re.findall(_WORD, line.text))
            kept[:0] = [*line.comment, str(line)]
    return "\n        ".join([TEMPLATES["pieces"], *kept])
