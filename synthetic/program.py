"""A program: the list of steps that a problem is made of. And its text as a problem, as a user may have written it.

    Value           a tensor or a number: what it is called in torch code, and its shape
    Step            one operator: its row of the table, its spelling, its operands and its result
    Program         the steps, the inputs, and the constructor with all that it needs
    problem_text    a program as a problem file: nested calls, docstrings, comments, layout, and what nothing uses

draft.py draws programs, planner.py writes them as solutions. Neither reads the text that is made here. Its prose is
random words: a model that reads it has nothing to learn from it but to look past it.
"""

import ast
import functools
import random
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Operator:
    """What an operator is called in problems, and what a kernel does for it: a row of operators.toml.

    kind: pointwise; row (over neighbouring dimensions); group (a norm over groups of channels); batch (a norm over all
    dimensions but the channels); all (a reduction to one number); matmul; convolution; or torch: no kernel of ours.
    """

    kind: str
    spellings: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    layer: str = ""
    reads: dict = field(default_factory=dict)
    technique: str = ""
    numbers: dict = field(default_factory=dict)
    common: bool = False
    counted: list = field(default_factory=list)


def table(name) -> dict:
    """A TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text())


OPERATORS = {}
for _kind, _rows in table("operators.toml").items():
    OPERATORS |= {name: Operator(_kind, **row) for name, row in _rows.items()}
EXPRESSIONS = table("expressions.toml")
WORDS = table("words.toml")
PROSE = WORDS["prose"].split()
SYLLABLES = WORDS["syllables"].split()
RESERVED = set(WORDS["reserved"].split())


class Dice:
    """A stream of random numbers of its own."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def chance(self, p) -> bool:
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)


@dataclass(frozen=True)
class Value:
    """A tensor or a number. Two values of one variable differ in their number."""

    text: str  # in torch code: a variable, an attribute of the model such as "self.scale", or a literal
    shape: tuple | None = None  # None: a Python number
    number: int = 0


@dataclass(frozen=True)
class Step:
    """One operator of a program. str(step) is its line of torch code."""

    name: str  # its row of OPERATORS
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


@dataclass(eq=False)  # hashed by identity
class Program:
    """A problem as steps, with what its constructor and its inputs need."""

    seed: int
    clutter: bool  # whether it is written with much that nothing uses
    family: str = ""
    elements: int = 0  # of inputs, parameters and output
    steps: list = field(default_factory=list)
    inputs: list = field(default_factory=list)  # (Value, expression in get_inputs)
    args: list = field(default_factory=list)  # constructor arguments: (name, annotation, constant that feeds it)
    init: list = field(default_factory=list)  # lines of the constructor
    consts: list = field(default_factory=list)  # module-level constants: (name, value)
    annotated: bool = False  # whether arguments have types
    returned: bool = False  # whether problems return the last step's expression, without a name for it
    signature: str = ""  # of the constructor; "" if there is none


# ----------------------------------------------------------------------------------------------------------------------
# Its text


class Style(Dice):
    """How one user writes, drawn from the program's seed."""

    def __init__(self, program):
        super().__init__(f"style {program.seed}")
        self.program = program
        self.clutter = program.clutter
        self.hollow = self.pick("", "", "    ", "        ")  # what stands on a blank line inside the class
        self.gap = [""] * self.pick(1, 1, 2)  # blank lines between the parts of the file
        self.documented = self.chance(0.65)

    def word(self) -> str:
        kind = self.r.random()
        if not self.clutter or kind < 0.6:
            return self.pick(*PROSE)
        return "".join(self.r.choices(SYLLABLES, k=self.r.randint(1, 4))) if kind < 0.8 else self.pick(*WORDS["noise"])

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
        inputs = [(value.text, "float" if value.shape is None else "torch.Tensor") for value, _ in program.inputs]
        arguments = [f"{name}: {kind}" if program.annotated else name for name, kind in inputs]
        out.append(f"    def forward(self, {', '.join(arguments)}){' -> torch.Tensor' * program.annotated}:")
        out += self.docstring("        ", inputs)
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
    node = ast.parse(text, mode="eval").body
    return isinstance(node, ast.Call) and "(" not in ast.unparse(node.func)


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
