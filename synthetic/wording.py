"""How a synthesised problem reads: nested calls, docstrings, comments, layout, signatures, and what nothing uses.

`problem_text` writes a program as a user may have written it. Prose is random words: a model that reads it has nothing
to learn from it but to look past it.
"""

import random
import re

from synthetic.program import SYLLABLES, WORDS

# Layers that a constructor may hold besides what the forward pass uses. {a}, {b}: sizes.
_UNUSED_LAYERS = ("Conv2d({a}, {b}, {k})", "Linear({a}, {b})", "LSTM({a}, {b}, num_layers={k}, batch_first=True)",
                  "Embedding({b}, {a})", "Dropout(p=0.{k})", "MaxPool2d(kernel_size={k}, stride={k}, padding=0)",
                  "Identity()", "BatchNorm2d({a}, eps=1e-5)", "LayerNorm([{a}, {b}])", "GroupNorm(1, {a})",
                  "Sequential(nn.Linear({a}, {b}), nn.ReLU())", "Parameter(torch.randn({a}, 1) * 0.02)")
_UNUSED_VALUES = ("1", "2", "4", "0.1", "1e-5", "True", "False", "None", "'mean'", "(1, 1)", "(0, 0)", "[1, 2]")
_UNUSED_NAMES = "eps momentum stride padding dilation groups bias dim num_heads dropout_p mode num_layers axis margin"
_NOISE = ("`True`.", "1D", "2D", "(N, C, H, W),", "e.g.,", "C = A * B,", "(batch_size, *)", "GELU,", "Conv2d,", "x,",
          "A", "GEMM", "-", "Defaults to 1.", "Defaults to None", "[0, 1]")  # what stands in real docstrings


def dress(d):
    """Complete a draft's constructor: arguments and layers that nothing uses, types."""
    p = d.program
    if d.clutter or d.chance(0.15):
        _add_unused(d)
    p.annotated = d.chance(0.4)
    fields = [f"{name}: {kind}" if p.annotated else name for name, kind, _ in p.args]
    for name, value in p.defaults:
        kind = d.pick("int", "float", "bool", "str")
        fields.append(f"{name}: {kind} = {value}" if p.annotated else f"{name}={value}")
    if p.init or fields or d.chance(0.8):
        p.signature = ", ".join(["self", *fields])


def _add_unused(d):
    """Arguments and layers of real problems that the forward pass does not need."""
    p = d.program
    sizes = [name for name, kind, _ in p.args if kind == "int" and d.meta.space.get(name, 0) > 1] or ["8"]
    for _ in range(d.pick(0, 0, 1, 1, 2, 3)):
        name, value = d.name(_UNUSED_NAMES), d.pick(*_UNUSED_VALUES)
        if d.chance(0.6):
            p.defaults.append((name, value))
        else:
            p.consts.append((name + "_value", value))
            place = d.r.randint(0, len(p.args))
            p.args.insert(place, (name, d.pick("int", "float", "tuple", "bool"), name + "_value"))
        if d.chance(0.4):
            p.init.insert(d.r.randint(0, len(p.init)), f"self.{name} = {name}")
    for _ in range(d.pick(0, 0, 1, 1, 2)):  # their parameters must be created in the same order
        a = d.pick(*sizes, "4", "16")
        b = d.pick(*sizes, "2", "8")
        layer = "nn." + d.pick(*_UNUSED_LAYERS).format(a=a, b=b, k=d.pick(1, 2, 3))
        name = d.name("conv1 conv2 bn pool fc1 proj dropout embed rnn block extra head attn")
        p.init.insert(d.r.randint(0, len(p.init)), f"self.{name} = {layer}")


class Style:
    """How one user writes, drawn from the program's seed."""

    def __init__(self, program):
        self.r = random.Random(f"style {program.seed}")
        self.program = program
        self.clutter = program.clutter
        self.hollow = self.pick("", "", "    ", "        ")  # what stands on a blank line inside the class
        self.gap = [""] * self.pick(1, 1, 2)  # blank lines between the parts of the file
        self.documented = self.chance(0.65)

    def chance(self, p) -> bool:
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)

    def word(self) -> str:
        kind = self.r.random()
        if not self.clutter or kind < 0.6:
            return self.pick(*WORDS)
        return "".join(self.r.choices(SYLLABLES, k=self.r.randint(1, 4))) if kind < 0.8 else self.pick(*_NOISE)

    def words(self, low, high) -> str:
        """`low` to `high` words, with clutter sometimes up to twice as many."""
        text = self.word()
        for _ in range(self.r.randint(low, high * (1 + (self.clutter and self.chance(0.3)))) - 1):
            text += self.pick(*[" "] * 32, ", ", "; ", ": ", " (") + self.word()
        return text[:1].upper() + text[1:]

    def docstring(self, indent, fields) -> list[str]:
        """A docstring's lines, or none. fields: (name, type) of the arguments, which it may describe."""
        if not self.documented or self.chance(0.2):
            return []
        lines = [f'{indent}"""', f"{indent}{self.words(4, 16)}."]
        if fields and self.chance(0.4):
            lines += ["", f"{indent}{self.pick('Args', 'Args', 'Parameters')}:"]
            for name, kind in fields:
                lines.append(f"{indent}    {name} ({kind}{self.pick('', '', ', optional')}): {self.words(2, 10)}.")
            if self.chance(0.4):
                lines += ["", f"{indent}Returns:", f"{indent}    torch.Tensor: {self.words(2, 8)}."]
        return lines + [f'{indent}"""']

    def comment(self, p, most=5) -> str:
        """Now and then a comment at the end of a line."""
        return f"  # {self.words(1, most).lower()}" if self.chance(p) else ""

    # ---- the parts of the file

    def body(self) -> list[str]:
        """The lines of forward: each step's, with an inline step inside the next one."""
        out, inner = [], None
        for step in self.program.steps:
            instead = {}
            if inner:
                text = out.pop().partition(" = ")[2]
                field = next(name for name, value in step.operands.items() if value == inner.result)
                argument = f"({{{field}}})" in step.spelling or f"({{{field}}}," in step.spelling
                instead[field] = text if argument or _is_call(text) else f"({text})"
            out.append(f"{step.result.text} = {step.expression(**instead)}")
            inner = step if step.inline else None
        target, _, value = out[-1].partition(" = ")
        if self.program.returned:
            out[-1] = f"return {value}"
        else:
            out.append(f"return {target}")
        return [line + self.comment(0.05) for line in out]

    def model(self) -> list[str]:
        """The lines of Model."""
        program = self.program
        fields = [arg[:2] for arg in program.args]
        out = ["class Model(nn.Module):"] + self.docstring("    ", fields)
        if program.signature:
            out.append(f"    def __init__({program.signature}):")
            out += self.docstring("        ", fields) if self.clutter and self.chance(0.3) else []
            out.append("        " + self.pick("super().__init__()", "super(Model, self).__init__()"))
            out += [f"        {line}" + self.comment(0.05) for line in program.init] + [self.hollow]
        arguments = ["self"]
        for value, _ in program.inputs:
            arguments.append(value.text + ": torch.Tensor" * program.annotated)
        out.append(f"    def forward({', '.join(arguments)}){' -> torch.Tensor' * program.annotated}:")
        out += self.docstring("        ", [(value.text, "torch.Tensor") for value, _ in program.inputs])
        return out + [f"        {line}" for line in self.body()]

    def constants_and_inputs(self) -> list[str]:
        """The lines after Model: module-level constants, get_inputs, get_init_inputs."""
        program = self.program
        out = [f"{name} = {value}" + self.comment(0.06, 3) for name, value in program.consts]
        out += self.gap + ["def get_inputs():"]
        if self.chance(0.6):
            out.append(f"    return [{', '.join(maker for _, maker in program.inputs)}]")
        else:
            out += [f"    {value.text} = {maker}" for value, maker in program.inputs]
            out.append(f"    return [{', '.join(value.text for value, _ in program.inputs)}]")
        passed = ", ".join(constant for _, _, constant in program.args)
        return out + self.gap + ["def get_init_inputs():", f"    return [{passed}]" + self.comment(0.06)]


def _is_call(text) -> bool:
    """Whether an expression is one call, such as torch.tanh(x + (y))."""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and (letter == ")" and i < len(text) - 1 or letter in " -"):
            return False
    return text.endswith(")") and not text.startswith("(")


def problem_text(program) -> str:
    """A program as a problem file in KernelBench's format. The same program always gives the same text."""
    style = Style(program)
    model = "\n".join(style.model())
    if style.chance(0.15):
        model = re.sub(r"\bF\.", "torch.nn.functional.", model)
    out = ["import torch", "import torch.nn as nn"]
    out += ["import torch.nn.functional as F"] * (re.search(r"\bF\.", model) is not None or style.chance(0.3))
    out += ["import math"] * ("math." in model or style.chance(0.04))
    out += style.gap + [model] + style.gap + style.constants_and_inputs()
    return "\n".join(out).replace("'", style.pick("'", "'", '"')) + style.pick("\n", "\n", "")
