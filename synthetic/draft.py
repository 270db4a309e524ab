"""A program while it is drawn.

Each step runs on PyTorch's meta device when it is drawn (tensors without data), so nothing here knows rules for shapes.
"""

import keyword
import math
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from synthetic.program import (EXPRESSIONS, OPERATORS, PROSE, RESERVED, SYLLABLES, WORDS, Dice, Program, Step, Value,
                               fields_of)


_OF_MODULES = dir(nn.Module)


class Draft(Dice):
    """A program while it is drawn: names, constants, constructor arguments, inputs, steps.

    Everything comes from one stream of random numbers, so a program is a pure function of its seed. Names are usual
    ones, and now and then nonsense: a small model learns to copy names only if they vary widely.

    clutter: much stands there that nothing uses. plain: ordinary names only.
    """

    def __init__(self, seed, clutter=False, plain=False):
        super().__init__(f"program {seed}")
        self.program = Program(seed, clutter)
        self.space = {"torch": torch, "nn": nn, "F": F, "math": math, "self": nn.Module()}  # of its torch code
        self.count = 0  # the number of the last value
        self.defaults = []  # constructor arguments that nobody passes: (name, type, value)
        self.clutter, self.plain = clutter, plain
        # "t" is the variable of steps inside an expression: no problem has another of this name.
        self.used = {"torch", "nn", "F", "Model", "math", "self", "t", *keyword.kwlist, *_OF_MODULES}
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
            return "_".join(self.r.choices(PROSE, k=self.pick(1, 1, 2))) + self.pick("", "", "", "1", "2")
        return "".join(self.r.choices("abcdefghijklmnopqrstuvwxyzaeiouaeiou", k=self.r.randint(3, 10)))

    def name(self, options, reserved=()) -> str:
        """An unused identifier: one of `options`, a string of usual ones, or now and then something else.

        draft.name("batch_size N B")    batch_size, N or B; if they are taken or `reserved`, such as N_lo
        """
        name = self.r.choice(options.split())
        odd = 0 if self.plain else self.r.random()
        if odd > (0.7 if self.clutter else 0.85):
            name = self.nonsense()
        elif odd > 0.55:
            name = self.r.choice(WORDS["usual"].split())
        elif odd > 0.4 and (others := self.program.args + self.defaults):
            name = self.r.choice(others)[0].split("_")[0] + "_" + name  # begins as another does: pool_size, pool_stride
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
        self.space[name] = self.evaluate(str(value))
        return name

    def arg(self, options, value, annotation="int") -> str:
        """A constructor argument with the module-level constant that feeds it; returns its name."""
        name = self.const(options, value)
        self.program.args.append((name, annotation, name))
        return name

    def default(self, options, value, annotation="int") -> str:
        """A constructor argument that nobody passes; returns its name."""
        name = self.name(options)
        self.defaults.append((name, annotation, value))
        self.space[name] = self.evaluate(value)
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
        name = value
        if options != value:  # else it is kept under its own name
            name = self.name(WORDS["functions"] if not self.plain and self.chance(0.12) else options)
        self.program.init.append(f"self.{name} = {value}")
        setattr(self.space["self"], name, self.evaluate(value))
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
        """A scalar operand: a constructor argument kept on self, a fixed attribute, a literal, or a number as input."""
        kind = self.r.random()
        if kind > 0.95 and self.program.inputs:
            return self.input([], value, self.new_variable(options))
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

    def input(self, dims, maker="", name="") -> Value:
        """An input of forward, most often a tensor. dims: expressions; maker: what makes it, torch.randn(dims) or so."""
        inputs = self.program.inputs
        if not name and not inputs:
            name = self.variable
        elif not name:
            name = "B" if self.variable == "A" and len(inputs) == 1 else self.new_variable(WORDS["others"])
        if not maker:
            maker = f"{self.pick('torch.randn', 'torch.rand', 'torch.randn')}({', '.join(dims)})"
            if self.clutter and "randn" in maker and self.chance(0.12):
                maker += self.pick(" * 2.0 + 0.5", " * 0.5", " + 0.2", " - 0.5", " * torch.rand(1) * 3")
        self.space[name] = self.evaluate(maker)
        value = self.value(name)
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

    def evaluate(self, text):
        """What torch code stands for, as tensors without data."""
        with torch.device("meta"):
            return eval(text, self.space)

    def value(self, text) -> Value:
        """The value that a text stands for, with a number of its own."""
        self.count += 1
        content = self.evaluate(text)
        return Value(text, tuple(content.shape) if isinstance(content, torch.Tensor) else None, self.count)

    def add(self, name, spelling, fields, target, inline=False) -> Value:
        """Run a step of any kind, which does not become the current tensor. Raises whatever torch raises.

        fields: of the spelling, each a Value or a text.
        """
        fields = {"x": self.x, "keep": ""} | fields
        operands, attributes = {}, {}
        for field_name in fields_of(spelling):
            if field_name not in fields:
                options, values = OPERATORS[name].numbers[field_name]
                fields[field_name] = self.scalar(options, self.pick(*values.split()))
            kind = operands if isinstance(fields[field_name], Value) else attributes
            kind[field_name] = fields[field_name]
        step = Step(name, spelling, operands, attributes, Value(target), inline)
        if "layer" in attributes:
            operands |= self.layer_values(step)
        for field_name, factor in zip("ab", fields.get("factors", ())):  # of a product: expressions such as "{x}.T"
            texts = {other: value.text for other, value in operands.items()}
            operands[field_name] = self.value(factor.format(**texts))
        if step.operator.kind in ("row", "group"):
            attributes["dims"] = self.dimensions(step, self.evaluate(fields.get("d", "-1")))
        self.space[target] = self.run(step)
        self.count += 1
        result = Value(target, tuple(self.space[target].shape), self.count)
        self.program.steps.append(replace(step, result=result))
        return self.program.steps[-1].result

    def run(self, step) -> torch.Tensor:
        """The result of a step, without data. Most need no call, which is slow: their operands are broadcast."""
        if step.operator.kind not in ("pointwise", "batch", "group") or step.name == "diagonal":
            return self.evaluate(step.expression())
        shapes = [value.shape for value in step.operands.values() if value.shape is not None]
        tensors = torch.broadcast_tensors(*[torch.empty(shape, device="meta") for shape in shapes])
        return torch.empty(tensors[0].shape, device="meta")

    def layer_values(self, step) -> dict:
        """What a kernel reads of a layer of the model: parameters, in a shape that broadcasts, and numbers."""
        values = {}
        path = step.attributes["layer"]
        for name, attribute in step.operator.reads.items():
            if getattr(self.evaluate(path), attribute, None) is None:
                continue
            values[name] = self.value(f"{path}.{attribute}")
            if values[name].shape and step.operator.kind in ("group", "batch", "convolution"):  # one for each channel
                ones = (1,) * (len(step.source.shape) - 2)
                values[name] = replace(values[name], shape=values[name].shape + ones)
        return values

    def dimensions(self, step, dims) -> tuple[int, int]:
        """The first and the last of `dims`, which make a row, or (group) of the dimensions normalised together."""
        rank = len(step.source.shape)
        if step.operator.kind == "group":
            return 1 + (step.name == "instance_norm"), rank - 1
        dims = [dims] if isinstance(dims, int) else dims
        return min(dims) % rank, max(dims) % rank

    def apply(self, name, *spellings, **fields):
        """The next operator, of operators.toml or composed, in one of these spellings or of its own, or as a layer."""
        if name in EXPRESSIONS["composed"]:
            return self.compose(name, fields)
        operator = OPERATORS[name]
        if operator.layer and not spellings and self.chance(0.4):
            given = {}
            for field_name, (options, values) in operator.numbers.items():
                given[operator.reads[field_name]] = self.arg(options, self.pick(*values.split()), "float")
            if not given:
                constructor = operator.layer.format(**fields)
            else:
                constructor = f"{operator.layer.partition('(')[0]}({self.layer_arguments(**given)})"
            self.layer(name, f"{name} act activation nonlin", constructor, **fields)
        else:
            self.x = self.add(name, self.pick(*spellings or operator.spellings), fields, self.next_name())

    def layer_arguments(self, **arguments) -> str:
        """Arguments of a layer: in_dim, out_dim     or now and then     in_features=in_dim, out_features=out_dim"""
        by_name = self.chance(0.15)
        return ", ".join(f"{name}={value}" if by_name else str(value) for name, value in arguments.items())

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
        """A row of EXPRESSIONS["composed"]: several steps, which problems write as one expression."""
        for variable, operator, spelling in self.pick(*EXPRESSIONS["composed"][name]):
            target = variable or self.next_name()
            fields[variable] = self.add(operator, spelling, fields, target, bool(variable))
        self.x = fields[""]

    # ---- the end

    def dress(self):
        """Complete the constructor: arguments and layers that nothing uses, types."""
        p = self.program
        if self.clutter or self.chance(0.15):
            self.add_unused()
        p.annotated = self.chance(0.4)
        fields = [f"{name}: {kind}" if p.annotated else name for name, kind, _ in p.args]
        for name, kind, value in self.defaults:
            fields.append(f"{name}: {kind} = {value}" if p.annotated else f"{name}={value}")
        if p.init or fields or self.chance(0.8):
            p.signature = ", ".join(["self", *fields])

    def add_unused(self):
        """Add arguments and layers that nothing uses."""
        p = self.program
        sizes = [name for name, kind, _ in p.args if kind == "int" and self.space.get(name, 0) > 1] or ["8"]
        for _ in range(self.pick(0, 0, 1, 1, 2, 3)):
            name, value = self.name(WORDS["unused_names"]), self.pick(*WORDS["unused_values"])
            if self.chance(0.6):
                self.defaults.append((name, self.pick("int", "float", "bool", "str"), value))
            else:
                p.consts.append((name + "_value", value))
                place = self.r.randint(0, len(p.args))
                p.args.insert(place, (name, self.pick("int", "float", "tuple", "bool"), name + "_value"))
            if self.chance(0.4):
                p.init.insert(self.r.randint(0, len(p.init)), f"self.{name} = {name}")
        for _ in range(self.pick(0, 0, 1, 1, 2)):  # their parameters must be created in the same order
            a = self.pick(*sizes, "4", "16")
            b = self.pick(*sizes, "2", "8")
            layer = "nn." + self.pick(*WORDS["unused_layers"]).format(a=a, b=b, k=self.pick(1, 2, 3))
            name = self.name("conv1 conv2 bn pool fc1 proj dropout embed rnn block extra head attn")
            setattr(self.space["self"], name, self.evaluate(layer))
            p.init.insert(self.r.randint(0, len(p.init)), f"self.{name} = {layer}")

    def finish(self, family) -> Program:
        """The finished program. family: what kind of problem it is.

        Some problems write one step inside the next: y = F.relu(self.fc(x)). The inner result then has the name of the
        outer one, since a model that reads the problem could not know another. For the same reason a result that is
        returned without a name is called x, like its operand, or out.
        """
        self.dress()
        steps, nesting = self.program.steps, self.pick(0, 0, 0.15, 0.4, 0.8)
        returned, last = self.chance(0.25), steps[-1]
        inputs = [value for value, _ in self.program.inputs]
        if returned and (last.result.text != last.source.text or last.source not in inputs):
            steps[-1] = replace(last, result=replace(last.result, text="out"))
        for i in range(len(steps) - 1, 0, -1):
            before, step = steps[i - 1:i + 1]
            if self.fits_inside(before, step) and self.chance(nesting):
                inner = replace(before.result, text=step.result.text)
                steps[i - 1] = replace(before, result=inner, inline=True)
                operands = {name: inner if value == before.result else value for name, value in step.operands.items()}
                steps[i] = replace(step, operands=operands)
        shapes = [value.shape or () for value, _ in self.program.inputs] + [last.result.shape]
        shapes += [parameter.shape for parameter in self.space["self"].parameters()]
        elements = sum(map(math.prod, shapes))
        return replace(self.program, family=family, returned=returned, elements=elements)

    def fits_inside(self, before, step) -> bool:
        """Whether problems can write `before` inside the next step, which reads its result once and alone."""
        readers = [other for other in self.program.steps if before.result in other.operands.values()]
        others = [value.text for value in step.operands.values() if value != before.result]
        once = step.spelling.count(f"{{{next(iter(step.operands))}}}") == 1 and step.source == before.result
        return readers == [step] and once and step.result.text not in others and not before.inline
