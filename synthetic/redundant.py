"""Problems in which an operator may be redundant: flip directly before sum is, cummax directly before sum is not.

A library pays in such a world. Each fact is one pair of operators, there are hundreds of pairs, and nobody tells the
model which of them hold: neither this file nor the expert knows it. Execution finds out.

    program = draw(rng, pair)       a Program: operators one after the other, applied to rows of numbers
    program.without(pairs)          the same without each A that stands directly before its B
    problem_text(program, rng)      its text as a PyTorch problem
    kernel_text(program)            a ModelNew: PyTorch up to the last operator that no kernel of ours computes, then
                                    one Triton kernel
    pair_skill(pair, rng)           the skill 'leave out A directly before B', whether it holds or not

HELD_OUT pairs are in no example of the cold start: a run that knows one of them has found it by execution.
"""

import itertools
import random
from dataclasses import dataclass, replace

from skills import Skill
from synthetic import families
from synthetic.kernels import ROW
from synthetic.operators import POINTWISE
from synthetic.planner import IMPORTS
from synthetic.training import SYNTHESISED, evaluation_fingerprints, unfit
from tasks import GPU_BATCH_FACTOR, Task, scale_batch

# Operators that our kernels leave to PyTorch, with their spellings.
TORCH = {
    "sort": ("torch.sort({x}, dim=-1)[0]", "{x}.sort(dim=-1)[0]", "{x}.sort(dim=-1).values"),
    "flip": ("torch.flip({x}, dims=[-1])", "torch.flip({x}, [1])", "{x}.flip(-1)"),
    "fliplr": ("torch.fliplr({x})", "{x}.fliplr()"),
    "roll": ("torch.roll({x}, 3, dims=-1)", "{x}.roll(1, dims=-1)", "torch.roll({x}, shifts=7, dims=1)"),
    "cummax": ("torch.cummax({x}, dim=-1)[0]", "{x}.cummax(dim=1)[0]", "torch.cummax({x}, dim=1).values"),
    "cummin": ("torch.cummin({x}, dim=-1)[0]", "{x}.cummin(dim=1)[0]", "torch.cummin({x}, dim=1).values"),
    "tile": ("torch.tile({x}, (1, 2))", "{x}.tile((1, 3))"),
    "repeat": ("{x}.repeat(1, 2)", "{x}.repeat(1, 3)"),
    "repeat_interleave": ("torch.repeat_interleave({x}, 2, dim=-1)", "{x}.repeat_interleave(2, dim=1)"),
    "cat": ("torch.cat([{x}, {x}], dim=-1)", "torch.cat(({x}, {x}), dim=1)"),
    "pad": ("F.pad({x}, (0, 16))", "F.pad({x}, (8, 8))"),
    "tril": ("torch.tril({x})", "{x}.tril()"),
    "triu": ("torch.triu({x})", "{x}.triu()"),
    "diff": ("torch.diff({x}, dim=-1)", "{x}.diff(dim=1)"),
    "topk": ("torch.topk({x}, 64, dim=-1)[0]", "{x}.topk(32, dim=-1)[0]", "torch.topk({x}, k=50).values"),
}
CHEAP = [name for name in TORCH if name not in ("sort", "topk")]  # nothing else matters beside those two
# Reductions of a row, which a kernel computes: name -> lines of Triton that assign {t}
_MAX, _MIN = ("tl.m%s(tl.where(mask, {x}, float(\"%sinf\")), 0)" % side for side in (("ax", "-"), ("in", "")))
_SUM, _SQUARES = "s = tl.sum(tl.where(mask, {x}, 0.0), 0)", "tl.sum(tl.where(mask, {x} * {x}, 0.0), 0)"
_SPREAD = _SUM, "d = {x} - s / cols", "q = " + _SQUARES.replace("{x}", "d")
_FIRST = "{t} = tl.min(tl.where(mask & ({x} == m), offs, 2147483647), 0)"
REDUCTIONS = {
    "sum": (_SUM.replace("s =", "{t} ="),), "mean": (_SUM, "{t} = s / cols"),
    "amax": ("{t} = " + _MAX,), "amin": ("{t} = " + _MIN,), "norm": ("s = " + _SQUARES, "{t} = tl.sqrt(s)"),
    "logsumexp": ("m = " + _MAX, "s = tl.sum(tl.where(mask, tl.exp({x} - m), 0.0), 0)", "{t} = m + tl.log(s)"),
    "var": (*_SPREAD, "{t} = q / (cols - 1)"), "std": (*_SPREAD, "{t} = tl.sqrt(q / (cols - 1))"),
    "argmax": ("m = " + _MAX, _FIRST), "argmin": ("m = " + _MIN, _FIRST)}
_ELEMENTWISE = "relu sigmoid tanh gelu silu mish softplus hardswish hardsigmoid softsign selu abs square sin"
ELEMENTWISE = {name: POINTWISE[name] for name in _ELEMENTWISE.split()}
NAMES = [*TORCH, *ELEMENTWISE, *REDUCTIONS]

# Of these pairs half are redundant and half are not. Only results/claims.py (HOLDS) says which, to count them later.
HELD_OUT = [("flip", "norm"), ("roll", "amax"), ("sort", "std"), ("cummax", "amax"), ("cat", "mean"),
            ("repeat", "amin"), ("pad", "sum"), ("fliplr", "logsumexp"),
            ("flip", "argmax"), ("roll", "cummax"), ("sort", "diff"), ("cummax", "mean"), ("cat", "sum"),
            ("repeat", "norm"), ("pad", "var"), ("cummin", "sum")]
TAUGHT = [pair for pair in itertools.product([*TORCH, *ELEMENTWISE], NAMES)
          if pair[0] != pair[1] and pair not in HELD_OUT]
NAME = "leave-out-{0}-before-{1}"


@dataclass(frozen=True)
class Step:
    """One operator of a program: its name and its spelling in PyTorch, with {x} for the operand."""

    name: str
    text: str


@dataclass(frozen=True)
class Program:
    """Steps that follow each other: operators on rows, then one reduction of each row, then perhaps pointwise ones."""

    steps: tuple[Step, ...]
    variable: str

    @property
    def last(self) -> int:
        """The place of the reduction."""
        return next(place for place, step in enumerate(self.steps) if step.name in REDUCTIONS)

    @property
    def torch_run(self) -> int:
        """How many steps PyTorch computes: all up to the last one that no kernel of ours computes."""
        return 1 + max((place for place, step in enumerate(self.steps) if step.name in TORCH), default=-1)

    def pairs(self) -> list[tuple[str, str]]:
        """Neighbours whose first one may be left out: it keeps the rows rows."""
        kept = [step.name for step in self.steps]
        return [(a, b) for a, b in zip(kept, kept[1:]) if a not in REDUCTIONS and kept.index(a) < self.last]

    def without(self, pairs):
        """The program without the steps that stand directly before what one of the `pairs` names."""
        following = [step.name for step in self.steps[1:]] + [""]
        kept = [step for step, after in zip(self.steps, following) if (step.name, after) not in pairs]
        return replace(self, steps=tuple(kept))


def draw_step(name, rng) -> Step:
    if name in TORCH:
        return Step(name, rng.choice(TORCH[name]))
    if name in ELEMENTWISE:
        return Step(name, rng.choice([text for text in ELEMENTWISE[name].spellings if f"{name}(" in text] or
                                     [f"torch.{name}({{x}})"]))
    along = rng.choice(["dim=-1", "dim=1"])
    return Step(name, rng.choice([f"torch.{name}({{x}}, {along})", f"{{x}}.{name}({along})"]))


# ----------------------------------------------------------------------------------------------------------------------
# Programs and their texts

VARIABLES = ["x", "inp", "values", "signal", "z", "scores"]
SIZES = {"batch_size": (16, 32, 48, 64, 96), "rows": (32, 64, 128)}, {"dim": (256, 500, 512, 640), "n": (300, 512)}


def draw(rng, pair=None, most=3, held_out=False) -> Program:
    """A program with `pair` somewhere in it, if there is one, and up to `most` operators that PyTorch computes.

    Without held_out it has no pair of HELD_OUT: so are all programs of the cold start.
    """
    while True:
        names = [*rng.sample(CHEAP, rng.randint(1, most)), *rng.sample([*ELEMENTWISE], rng.choice([0, 0, 1, 2]))]
        rng.shuffle(names)
        names.append(rng.choice([*REDUCTIONS]))
        if pair:
            names = with_pair(names, pair, most, rng)
        if rng.random() < 0.2 and not names[-1].startswith("arg"):
            names.append(rng.choice([*ELEMENTWISE]))
        program = Program(tuple(draw_step(name, rng) for name in names), rng.choice(VARIABLES))
        if held_out or not {*program.pairs()} & {*HELD_OUT}:
            return program


def with_pair(names, pair, most, rng) -> list[str]:
    """The names with A directly before B, and at most `most` operators of PyTorch's. A reduction B is the last."""
    others = [name for name in names if name not in pair and name not in REDUCTIONS]
    room = most - sum(name in TORCH for name in pair)  # for operators of PyTorch's
    spare = [name for name in others if name in TORCH][max(0, room):]
    others = [name for name in others if name not in spare]
    if pair[1] in REDUCTIONS:
        return [*others, *pair]
    place = rng.randint(0, len(others))
    return [*others[:place], *pair, *others[place:], names[-1]]


def problem_text(program, rng, brief=False) -> str:
    """The program as a PyTorch problem. brief: the class alone, as a lesson shows it."""
    x = program.variable
    lines = "\n        ".join(f"{x} = {step.text.format(x=x)}" for step in program.steps)
    superclass = rng.choice(["super().__init__()", "super(Model, self).__init__()"])
    model = (f"class Model(nn.Module):\n    def __init__(self):\n        {superclass}\n\n"
             f"    def forward(self, {x}):\n        {lines}\n        return {x}\n")
    if brief:
        return model
    sizes = [rng.choice([*group.items()]) for group in SIZES]
    (rows, of_rows), (cols, of_cols) = sizes
    source = rng.choice(["torch.randn", "torch.rand", "torch.randn"])
    return (f"import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n{model}\n\n"
            f"{rows} = {rng.choice(of_rows)}\n{cols} = {rng.choice(of_cols)}\n\n\ndef get_inputs():\n"
            f"    return [{source}({rows}, {cols})]\n\n\ndef get_init_inputs():\n    return []\n")


def kernel_text(program, brief=False) -> str:
    """The program as a ModelNew with one kernel. brief: the class without its kernel, as a lesson shows it."""
    x, steps = program.variable, program.steps
    called = "".join(f"        {x} = {step.text.format(x=x)}\n" for step in steps[:program.torch_run])
    model = ("class ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n\n"
             f"    def forward(self, {x}):\n{called}        return row({x})\n")
    if brief:
        return model
    lines = [f"{x} = tl.load({x}_ptr + idx, mask=mask, other=0.0)"]
    for step in steps[program.torch_run:]:
        formula = REDUCTIONS.get(step.name)
        if not formula:
            *before, value = ELEMENTWISE[step.name].lines
            formula = (*before, f"{{t}} = {value}")
        lines += [f"# {x} = {step.text.format(x=x)}", *(line.format(x=x, t=x) for line in formula)]
    index = ", dtype=torch.int64" if any(step.name.startswith("arg") for step in steps) else ""
    kernel = ROW.format(
        name="row", names=x, main=x, contiguous=f"{x} = {x}.contiguous()", cols=f"{x}.shape[-1]",
        out=f"{x}.new_empty({x}.shape[:-1]{index})", passed=x, sizes="", pointers=f"{x}_ptr", parameters="",
        body="\n    ".join([*lines, f"tl.store(dst_ptr + tl.program_id(0), {x})"]))
    return f"{IMPORTS}\n{model}\n{kernel}\n"


def techniques(program) -> list[str]:
    """The techniques of the program's kernel, as a plan names them."""
    row = "one-program-per-row" if program.steps[program.last].name == "logsumexp" else "row-reduction"
    return [row, "fuse-neighbours-into-row"] if len(program.steps) > program.torch_run + 1 else [row]


# ----------------------------------------------------------------------------------------------------------------------
# What is known about a pair, in words

MOTIVATION = ("`{a}` costs a pass over memory of its own.", "A call that does not change the result is wasted time.",
              "`{b}` may give the same without `{a}`.")
IDEA = ("Leave out `{a}` where it stands directly before `{b}`.", "Apply `{b}` to the operand of `{a}`.",
        "Where `{b}` follows directly after `{a}`, `{a}` is left out.")


def pair_skill(pair, rng, lines=None) -> Skill:
    """The skill 'leave out A directly before B'. lines: of a problem that has both, as the skill's example."""
    a, b = pair
    x = rng.choice(VARIABLES)
    lines = lines or [f"{x} = {draw_step(name, rng).text.format(x=x)}" for name in pair]
    motivation, idea = rng.choice(MOTIVATION).format(a=a, b=b), rng.choice(IDEA).format(a=a, b=b)
    content = f"Motivation: {motivation}\nKey Idea: {idea}\nExample:\n# {lines[0]}  is left out\n{lines[1]}"
    return Skill(NAME.format(a, b), f"Leave out `{a}` directly before `{b}`.", "task_specific/rows", (a, b),
                 content)


# ----------------------------------------------------------------------------------------------------------------------
# Problems to train on


def task(seed) -> Task:
    """A problem with one of the HELD_OUT pairs, a pure function of its seed. Its fitness is the caller's to check."""
    rng = random.Random(f"redundant {seed}")
    program = draw(rng, rng.choice(HELD_OUT), rng.choice([2, 2, 3]), held_out=True)
    return Task(f"redundant/{seed}", 0, problem_text(program, rng), "redundant")


def training_tasks(seed, device="cpu"):
    """Endless stream of problems that are fit to train on: of three, two are of this file and one of families.py's."""
    evaluation, others = evaluation_fingerprints(), families.training_tasks(seed, device)
    for n in itertools.count():
        if n % 3 == 2:
            yield next(others)
            continue
        drawn = task(seed * 1_000_003 + n)
        if unfit(drawn, evaluation) is None:
            yield drawn if device == "cpu" else scale_batch(drawn, GPU_BATCH_FACTOR)


SYNTHESISED["synth"] = training_tasks
