"""One problem while it is being written: its names, constants, constructor arguments and lines.

`Draft` knows no operator: chain.py, heads.py, habits.py and networks.py add what is computed, and wording.py makes a
file of it. Everything is drawn from one stream of random numbers, so the order of the draws is part of what a seed
means: a change of it changes every problem, and the shipped checkpoint was trained on these.
"""

import keyword
import random

import torch

from synthetic.wording import SYLLABLES, WORDS

# Variables of the expert's kernels, which a problem's own may not hide. Of the kernels' own names norm, loss and matmul
# are free: where a problem has one, the expert calls its kernel otherwise.
_IN_KERNELS = set("idx mask offs start cols rows n m k i a b d e u t inner acc mean rstd total square tl triton cdiv "
                  "fused row".split())


class Draft:
    """The parts of a problem file, and the current tensor of its forward pass.

    Names are drawn from usual ones, and now and then are nonsense: a small model learns to copy names only if they
    vary widely.
    """

    def __init__(self, seed, clutter):
        self.r = random.Random(seed)
        self.clutter = clutter
        self.formal = False  # typed arguments with defaults, all of them described in docstrings
        self.args = []  # constructor arguments: (name, annotation, module-level constant that feeds it)
        self.defaults = []  # constructor arguments that nobody passes: (name, value)
        self.init = []  # lines of the constructor
        self.consts = []  # module-level constants: (name, value)
        self.inputs = []  # arguments of forward: (name, expression in get_inputs)
        self.forward = []  # lines of forward
        self.methods = []  # other methods of the model: (name, argument, lines)
        self.classes = []  # texts of other classes
        self.used = {"self", "torch", "nn", "F", "Model", "math", *keyword.kwlist, *dir(torch.nn.Module)} | _IN_KERNELS
        self.x = self.r.choice(["x"] * 8 + ["inputs", "inp", "A", "feats", self.nonsense(), self.nonsense()])
        self.x = "x" if self.x in self.used else self.x  # the current tensor's variable
        self.used.add(self.x)
        self.shape = []  # the current tensor's: (expression, size) for each dimension; size 0 where it does not matter
        self.dims = []  # expressions of the last input's dimensions
        self.saved = None  # another tensor of the same shape, for a residual step
        self.rows_last = True  # whether a broadcast parameter of a 3-D tensor is over the last dimension
        self.rename = self.r.choice([0, 0, 0, 0.1, 0.4, 1])  # how often a result gets a variable of its own
        self.ops = 0  # operators so far

    def chance(self, p) -> bool:
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)

    # ---- names

    def nonsense(self) -> str:
        """An identifier that means nothing here: syllables, words of prose, or letters."""
        kind = self.r.random()
        if kind < 0.4:
            return "_".join(self.r.choice(SYLLABLES) for _ in range(self.r.randint(1, 3)))
        if kind < 0.75:
            words = "_".join(self.r.choice(WORDS) for _ in range(self.r.choice([1, 1, 2])))
            return words + self.pick("", "", "", "1", "2")
        if kind < 0.85:
            return "".join(self.r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.r.randint(3, 12)))
        letters = [self.r.choice("bcdfghjklmnprstvwz") + self.r.choice("aeiou") for _ in range(self.r.randint(1, 4))]
        return "".join(letters) + self.pick("", "", "t", "ns")

    def name(self, options) -> str:
        """An unused identifier: one of `options`, a string of the usual ones, or now and then nonsense.

        draft.name("batch_size N B")    batch_size, N or B; if they are taken, such as N_lo
        """
        for _ in range(5):
            name = self.nonsense() if self.chance(0.3 if self.clutter else 0.15) else self.r.choice(options.split())
            name += self.pick("1", "2", "0", "_1") if self.clutter and self.chance(0.06) else ""
            if name not in self.used:
                break
        while name in self.used:
            name += "_" + self.r.choice(SYLLABLES)
        self.used.add(name)
        return name

    # ---- constants, arguments, attributes

    def const(self, options, value) -> str:
        """A new module-level constant; returns its name."""
        name = self.name(options)
        self.consts.append((name, str(value)))
        return name

    def arg(self, options, value, annotation="int") -> str:
        """A constructor argument with the module-level constant that feeds it; returns its name."""
        name = self.const(options, value)
        self.args.append((name, annotation, name))
        return name

    def inside(self, name) -> str:
        """Make a module-level constant known to the constructor, so that `ModelNew` can be built from its arguments."""
        if name.isidentifier() and name not in [arg for arg, _, _ in self.args]:
            self.args.append((name, "int", name))
        return name

    def attribute(self, options, value) -> str:
        """An attribute of the model; returns the expression that reads it."""
        name = self.name(options)
        self.init.append(f"self.{name} = {value}")
        return f"self.{name}"

    def kept(self, options, value, annotation="int") -> str:
        """A constructor argument that is kept on self; returns the expression that reads it."""
        name = self.arg(options, value, annotation)
        self.init.append(f"self.{name} = {name}")
        return f"self.{name}"

    def number(self) -> str:
        if self.clutter and self.chance(0.08):  # digits to be copied one by one
            value = self.r.uniform(0.2, 3)
            return str(value if self.chance(0.4) else round(value, self.r.randint(3, 6)))
        return self.r.choice(["0.1", "0.5", "1.5", "2.0", "3.0", "0.25", "0.7", "-0.5", "1.2", "4.0", "2", "3",
                              str(round(self.r.uniform(-3, 4), 2) or 0.5)])

    def scalar(self, options, value) -> str:
        """A scalar operand: a constructor argument kept on self, a fixed attribute, or a literal."""
        kind = self.r.random()
        if kind < 0.55:
            return self.kept(options, value, "float")
        return self.attribute(options, value) if kind < 0.7 else value

    def size(self, *choices) -> int:
        """A size near one of `choices`; now and then an odd one, which exercises masks."""
        n = self.r.choice(choices)
        return max(2, n - self.r.randint(1, n // 4)) if n >= 8 and self.chance(0.25) else n

    # ---- forward

    def tensor_input(self, dims, maker=None) -> str:
        """A tensor among the inputs of forward, with dimensions that are expressions; returns its name."""
        self.dims = dims
        maker = maker or self.pick("torch.randn", "torch.rand", "torch.randn")
        name = self.input_name()
        adjusted = self.clutter and maker == "torch.randn" and self.chance(0.12)
        spread = self.pick(" * 2.0 + 0.5", " * 0.5", " + 0.2", " - 0.5", " * torch.rand(1) * 3",
                           " * (torch.rand(()) + 0.5)") if adjusted else ""
        self.inputs.append((name, f"{maker}({', '.join(dims)}){spread}"))
        return name

    def input_name(self) -> str:
        """What the next tensor among the inputs is called."""
        return self.name("y other target targets labels") if self.inputs else self.x

    def another_input(self) -> str:
        """A second tensor of the current shape."""
        return self.tensor_input([name for name, _ in self.shape])

    def line(self, *spellings, **fields):
        """The next operator, in one of its spellings ({x} is the current tensor); mostly the variable's name stays."""
        expression = spellings[0] if len(spellings) == 1 else self.r.choice(spellings)
        expression = expression.format(x=self.x, **fields)
        if self.chance(self.rename):
            self.x = self.name("out y h z hidden logits scores features result")
        self.forward.append(f"{self.x} = {expression}")
        self.ops += 1

    def apply(self, options, constructor):
        """The next operator as a layer of torch.nn, kept on self under one of `options`."""
        layer = self.attribute(options, f"nn.{constructor}")
        self.line(f"{layer}({{x}})")
