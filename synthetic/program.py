"""A program: the list of steps that a problem is made of, and `Draft`, a program while it is drawn.

    Value     a tensor or a number: what it is called in torch code, and its shape
    Step      one operator: its row of the table, its spelling, its operands and its result
    Program   the steps, the inputs, and the constructor with all that it needs

Each step runs on PyTorch's meta device when it is drawn (tensors without data), so nothing here knows rules for shapes.
wording.py writes a program as a problem, planner.py as a solution. Neither reads the other's text.
"""

import functools
import keyword
import math
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from synthetic.operators import COMPOSED, OPERATORS, RESERVED, Operator

WORDS = Path(__file__).with_name("words.txt").read_text().split()
SYLLABLES = ("ka lo mi ne tu ra so vi da pe gro bal fin kor tem sha wei gat mul div sub nor act drop gam bet sig "
             "lam fac val vec out inp dim siz num cur pre post head ext reg alt adj off base mask").split()
TEMPORARY = "t"  # the variable of steps inside an expression; no problem has another of this name


class Unsupported(Exception):
    """What a kernel cannot express."""


@dataclass(frozen=True)
class Value:
    """A tensor or a number. Two values of one variable differ in their number."""

    text: str  # in torch code: a variable, an attribute of the model such as "self.scale", or a literal
    shape: tuple | None = None  # None: a Python number
    number: int = 0


@dataclass(frozen=True)
class Step:
    """One operator of a program. str(step) is its line of torch code."""

    name: str  # its row of operators.OPERATORS
    spelling: str  # an expression with the fields of operands and attributes
    operands: dict  # field -> Value; those of the spelling come first, in its order
    attributes: dict  # field -> text; "layer" is the model's attribute, "dims" the first and last dimension of a row
    result: Value
    inline: bool = False  # problems write it inside the next step

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.name]

    @property
    def source(self) -> Value:
        """The operand that the step is about."""
        return next(iter(self.operands.values()))

    def expression(self, **instead) -> str:
        """Its torch code. instead: what stands in place of an operand: field=text."""
        texts = {name: value.text for name, value in self.operands.items()}
        return self.spelling.format(**texts | self.attributes | instead)

    def __str__(self):
        return f"{self.result.text} = {self.expression()}"


@functools.cache
def fields_of(spelling) -> tuple:
    """Names of the fields of a spelling, in their order, each once."""
    return tuple(dict.fromkeys(re.findall(r"{(\w+)}", spelling)))


class Meta:
    """Runs torch code on tensors without data, and makes steps of it."""

    def __init__(self):
        self.space = {"torch": torch, "nn": nn, "F": F, "math": math, "self": SimpleNamespace()}
        self.count = 0  # the number of the last value

    def evaluate(self, text):
        with torch.device("meta"):
            return eval(text, self.space)

    def value(self, text, content=None) -> Value:
        """The value that a text stands for, with a number of its own. content: what it is, if that is known."""
        self.count += 1
        content = self.evaluate(text) if content is None else content
        return Value(text, tuple(content.shape) if isinstance(content, torch.Tensor) else None, self.count)

    def run(self, name, spelling, fields, target, inline=False) -> Step:
        """Run one step. fields: of the spelling, each a Value or a text. Raises whatever torch raises."""
        operands, attributes = {}, {}
        for field_name in fields_of(spelling):
            kind = operands if isinstance(fields[field_name], Value) else attributes
            kind[field_name] = fields[field_name]
        step = Step(name, spelling, operands, attributes, Value(target), inline)
        if attributes.get("layer"):
            operands |= self.layer_values(step)
        if "factors" in fields:  # of a product: expressions such as "{x}.T"
            attributes["factors"] = fields["factors"]
            texts = {field_name: value.text for field_name, value in operands.items()}
            for field_name, factor in zip("ab", fields["factors"]):
                operands[field_name] = self.value(factor.format(**texts))
        if step.operator.kind in ("row", "group"):
            attributes["dims"] = self.dimensions(step, fields.get("d"))
        content = self.space[target] = self.evaluate(step.expression())
        return replace(step, result=self.value(target, content))

    def layer_values(self, step) -> dict:
        """What a kernel reads of a layer of the model: parameters, in a shape that broadcasts, and numbers."""
        values, path = {}, step.attributes["layer"]
        for name, attribute in step.operator.reads.items():
            content = getattr(self.evaluate(path), attribute, None)
            if content is None:
                continue
            values[name] = self.value(f"{path}.{attribute}", content)
            if values[name].shape and step.operator.kind in ("group", "batch", "convolution"):  # one for each channel
                ones = (1,) * (len(step.source.shape) - 2)
                values[name] = replace(values[name], shape=values[name].shape + ones)
        return values

    def dimensions(self, step, text) -> tuple[int, int]:
        """The first and the last of the dimensions that make a row, or (group) that are normalised together."""
        rank = len(step.source.shape)
        if step.operator.kind == "group":
            return 1 + (step.name == "instance_norm"), rank - 1
        layer = self.evaluate(step.attributes.get("layer", "None"))
        if hasattr(layer, "normalized_shape"):
            return rank - len(layer.normalized_shape), rank - 1
        dims = layer.dim if layer else self.evaluate(text)
        dims = sorted(dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else [dims]))
        return dims[0], dims[-1]


@dataclass
class Program:
    """A problem as steps, with what its constructor and its inputs need."""

    seed: int
    clutter: bool  # whether it is written with much that nothing uses
    family: str = ""
    steps: list = field(default_factory=list)
    inputs: list = field(default_factory=list)  # (Value, expression in get_inputs)
    args: list = field(default_factory=list)  # constructor arguments: (name, annotation, constant that feeds it)
    defaults: list = field(default_factory=list)  # constructor arguments that nobody passes: (name, value)
    init: list = field(default_factory=list)  # lines of the constructor
    consts: list = field(default_factory=list)  # module-level constants: (name, value)
    annotated: bool = False  # whether arguments have types
    returned: bool = False  # whether problems return the last step's expression, without a name for it
    signature: str = ""  # of the constructor; "" if there is none

    @property
    def operators(self) -> list[str]:
        """Names of the operators in the order of the forward pass, each once."""
        names = ["arithmetic" if step.name == "formula" else step.name for step in self.steps]
        return list(dict.fromkeys(names))


# Names that problems are full of. What one stands for says its definition, not the name.
_USUAL = ("gemm linear conv conv_transpose bn norm loss ln fc pool max_pool gap act relu gelu softmax hardtanh dropout "
          "scaling_factor add_value subtract_value multiply_value divide_value divisor constant_value min_value "
          "max_value sum_tensor multiplier weight bias scale dim").split()


# What the second input of forward may be called.
_OTHERS = "y other target targets labels outcomes gate skip weights keys values context"


class Draft:
    """A program while it is drawn: names, constants, constructor arguments, inputs, steps.

    Everything comes from one stream of random numbers, so a program is a pure function of its seed. Names are usual
    ones, and now and then nonsense: a small model learns to copy names only if they vary widely.

    clutter: much stands there that nothing uses. plain: ordinary names only.
    """

    def __init__(self, seed, clutter=False, plain=False):
        self.r, self.meta, self.program = random.Random(f"program {seed}"), Meta(), Program(seed, clutter)
        self.clutter, self.plain = clutter, plain
        self.used = {"torch", "nn", "F", "Model", "math", "self", TEMPORARY, *keyword.kwlist}
        self.used.update(dir(nn.Module))
        usual = "x x x x x x x x A A inputs inp feats tokens signal scores logits"
        self.variable = self.pick(*usual.split()) if self.chance(0.7) else self.new_variable(usual)
        self.used |= {self.variable, "B"}
        self.x = None  # the current tensor
        self.saved = None  # another tensor, for a residual step
        self.dims = []  # expressions for the sizes of the current tensor, for another input of this shape
        self.sizes = {}  # size of a dimension -> a name for it that constructors may use
        self.rows_last = True  # whether a broadcast parameter of a 3-D tensor is over the last dimension
        self.rename = self.pick(0, 0, 0, 0.1, 0.4, 1)  # how often a result gets a variable of its own
        self.literal = self.pick(0, 0, 0, 0, 0.1, 0.8)  # how often a layer's size is a literal

    def chance(self, p) -> bool:
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)

    @property
    def shape(self) -> tuple:
        return self.x.shape

    # ---- names

    def nonsense(self) -> str:
        """An identifier that means nothing here: syllables, words of prose, or letters."""
        kind = self.r.random()
        if kind < 0.4:
            return "_".join(self.r.choices(SYLLABLES, k=self.r.randint(1, 3)))
        if kind < 0.75:
            return "_".join(self.r.choices(WORDS, k=self.pick(1, 1, 2))) + self.pick("", "", "", "1", "2")
        return "".join(self.r.choices("abcdefghijklmnopqrstuvwxyzaeiouaeiou", k=self.r.randint(3, 10)))

    def name(self, options, reserved=()) -> str:
        """An unused identifier: one of `options`, a string of usual ones, or now and then something else.

        draft.name("batch_size N B")    batch_size, N or B; if they are taken or `reserved`, such as N_lo
        """
        name, odd = self.r.choice(options.split()), 0 if self.plain else self.r.random()
        if odd > (0.7 if self.clutter else 0.85):
            name = self.nonsense()
        elif odd > 0.55:
            name = self.r.choice(_USUAL)
        elif odd > 0.45 and self.program.args:  # one that begins as another does: pool_size, pool_stride
            name = self.r.choice(self.program.args)[0].split("_")[0] + "_" + name
        while name in self.used or name in reserved:
            name += self.pick("2", "3", "_b") if self.plain else "_" + self.r.choice(SYLLABLES)
        self.used.add(name)
        return name

    def new_variable(self, options) -> str:
        """An unused identifier for a tensor or a number in forward, which kernels may use, too."""
        return self.name(options, RESERVED)

    # ---- constants, constructor arguments, attributes

    def const(self, options, value) -> str:
        """A new module-level constant; returns its name."""
        name = self.name(options)
        self.program.consts.append((name, str(value)))
        self.meta.space[name] = self.meta.evaluate(str(value))
        return name

    def arg(self, options, value, annotation="int") -> str:
        """A constructor argument with the module-level constant that feeds it; returns its name."""
        name = self.const(options, value)
        self.program.args.append((name, annotation, name))
        return name

    def inside(self, name) -> str:
        """Make a module-level constant known to the constructor, if it is one and no literal."""
        if name.isidentifier() and (name, "int", name) not in self.program.args:
            self.program.args.append((name, "int", name))
        return name

    def sized(self, options, value) -> str:
        """A size in the constructor: an argument, or in some problems a literal."""
        return str(value) if self.chance(self.literal) else self.arg(options, value)

    def size(self, i) -> str:
        """How the constructor can name the size of dimension i of the current tensor."""
        n = self.shape[i]
        return self.inside(self.sizes[n]) if n in self.sizes else str(n)

    def attribute(self, options, value) -> str:
        """An attribute of the model; returns the expression that reads it."""
        name = options if options == value else self.name(options)
        self.program.init.append(f"self.{name} = {value}")
        setattr(self.meta.space["self"], name, self.meta.evaluate(value))
        return f"self.{name}"

    def kept(self, options, value, annotation="int") -> str:
        """A constructor argument that is kept on self; returns the expression that reads it."""
        name = self.arg(options, value, annotation)
        return self.attribute(name, name)

    def number(self) -> str:
        if self.clutter and self.chance(0.08):  # digits to be copied one by one
            return str(round(self.r.uniform(0.2, 3), self.pick(3, 4, 5, 6, 16)))
        return self.pick("0.1", "0.5", "1.5", "2.0", "3.0", "0.25", "0.7", "-0.5", "1.2", "4.0", "2", "3",
                         str(round(self.r.uniform(-3, 4), 2) or 0.5))

    def scalar(self, options, value) -> Value:
        """A scalar operand: a constructor argument kept on self, a fixed attribute, or a literal."""
        kind = self.r.random()
        if kind < 0.55:
            return Value(self.kept(options, value, "float"))
        return Value(self.attribute(options, value) if kind < 0.7 else value)

    def dimension(self, *values) -> str:
        """A dimension: a literal, or now and then a constructor argument kept on self."""
        value = self.pick(*values)
        return self.kept("dim axis reduce_dim", value) if self.chance(0.12) else value

    def near(self, *choices) -> int:
        """A size near one of `choices`; now and then an odd one, which exercises masks."""
        n = self.r.choice(choices)
        return max(2, n - self.r.randint(1, n // 4)) if n >= 8 and self.chance(0.25) else n

    # ---- inputs and steps

    def input(self, dims, maker="") -> Value:
        """A tensor among the inputs of forward. dims: expressions; maker: what makes it, torch.randn(dims) or so."""
        inputs, name = self.program.inputs, self.variable
        if inputs:
            name = "B" if self.variable == "A" and len(inputs) == 1 else self.new_variable(_OTHERS)
        if not maker:
            maker = f"{self.pick('torch.randn', 'torch.rand', 'torch.randn')}({', '.join(dims)})"
            if self.clutter and "randn" in maker and self.chance(0.12):
                maker += self.pick(" * 2.0 + 0.5", " * 0.5", " + 0.2", " - 0.5", " * torch.rand(1) * 3")
        self.meta.space[name] = self.meta.evaluate(maker)
        value = self.meta.value(name, self.meta.space[name])
        inputs.append((value, maker))
        self.x = self.x or value
        return value

    def another_input(self) -> Value:
        """A second tensor of the current shape, or one that is broadcast to it."""
        return self.input(self.dims[self.pick(0, 0, 0, len(self.dims) - 1):])

    def turn_to(self, value):
        """Make another tensor the current one."""
        self.x = value
        self.variable = value.text

    def next_name(self) -> str:
        """The variable of the next result: mostly the one that the current tensor has."""
        if self.chance(self.rename):
            self.variable = self.new_variable("out y h z hidden logits scores features result")
        return self.variable

    def add(self, name, spelling, fields, target, inline=False) -> Value:
        """A step of any kind, which does not become the current tensor."""
        fields = {"x": self.x, "keep": ""} | fields
        for field_name, (options, values) in OPERATORS[name].numbers.items():
            if field_name in fields_of(spelling) and field_name not in fields:
                fields[field_name] = self.scalar(options, self.pick(*values.split()))
        step = self.meta.run(name, spelling, fields, target, inline)
        self.program.steps.append(step)
        return step.result

    def apply(self, name, *spellings, **fields):
        """The next operator, a row of OPERATORS or COMPOSED, in one of these spellings or of its own, or as a layer."""
        if name in COMPOSED:
            return self.compose(name, fields)
        operator = OPERATORS[name]
        if operator.layer and not spellings and self.chance(0.4):
            given = dict(fields)
            for field_name, (options, values) in operator.numbers.items():
                given[field_name] = self.arg(options, self.pick(*values.split()), "float")
            self.layer(name, f"{name} act activation nonlin", operator.layer.format(**given), **fields)
        else:
            self.x = self.add(name, self.pick(*spellings or operator.spellings), fields, self.next_name())

    def layer(self, name, options, constructor, **fields) -> str:
        """The next operator as a layer of torch.nn, kept on self under one of `options`. Returns where: self.act"""
        path = self.attribute(options, f"nn.{constructor}")
        self.apply_layer(name, path, **fields)
        return path

    def apply_layer(self, name, path, **fields):
        """Apply a layer, for the first time or again."""
        self.x = self.add(name, "{layer}({x})", {"layer": path, **fields}, self.next_name())

    def save(self) -> Value:
        """Keep the current tensor under a second name, for a connection around what follows: residual = x"""
        self.saved = self.add("alias", self.pick(*OPERATORS["alias"].spellings), {},
                              self.new_variable("identity residual skip shortcut"))
        return self.saved

    def compose(self, name, fields):
        """A row of COMPOSED: several steps, which problems write as one expression."""
        for variable, operator, spelling in self.pick(*COMPOSED[name]):
            target = variable or self.next_name()
            fields[variable] = self.add(operator, spelling, fields, target, bool(variable))
        self.x = fields[""]

    def finish(self, family) -> Program:
        """The finished program. family: what kind of problem it is.

        Some problems write one step inside the next: y = F.relu(self.fc(x)). The inner result then has the name of the
        outer one, since a model that reads the problem could not know another. For the same reason a result that is
        returned without a name is called x, like its operand, or out.
        """
        steps, nesting = self.program.steps, self.pick(0, 0, 0.15, 0.4, 0.8)
        returned, last = self.chance(0.25), steps[-1]
        if returned and last.result.text != last.source.text:
            steps[-1] = replace(last, result=replace(last.result, text="out"))
        for i in range(len(steps) - 1, 0, -1):
            before, step = steps[i - 1:i + 1]
            if self.fits_inside(before, step) and self.chance(nesting):
                inner = replace(before.result, text=step.result.text)
                steps[i - 1] = replace(before, result=inner, inline=True)
                operands = {name: inner if value == before.result else value for name, value in step.operands.items()}
                steps[i] = replace(step, operands=operands)
        return replace(self.program, family=family, returned=returned)

    def fits_inside(self, before, step) -> bool:
        """Whether problems can write `before` inside the next step, which reads its result once and alone."""
        readers = [other for other in self.program.steps if before.result in other.operands.values()]
        others = [value.text for value in step.operands.values() if value != before.result]
        once = step.spelling.count(f"{{{next(iter(step.operands))}}}") == 1 and step.source == before.result
        return (readers == [step] and once and step.result.text not in others and before.name != "alias"
                and not before.inline and "factors" not in step.attributes)
