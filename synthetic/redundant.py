"""Problems in which an operator may be redundant: flip directly before sum is, cummax directly before sum is not.

A library pays in such a world. Each fact is one pair of operators, there are hundreds of pairs, and nobody tells the
model which of them hold: neither this file nor the expert knows it. Execution finds out.

    chain = draw(rng, pair)         a Chain: operators one after the other, applied to rows of numbers
    chain.without(pairs)            the same without each A that stands directly before its B
    problem_text(chain, rng)        its text as a PyTorch problem
    answer(chain)                   the expert's Solution: PyTorch up to the last operator of TORCH, then one kernel
    pair_skill(pair, rng)           the skill 'leave out A directly before B', whether it holds or not

HELD_OUT pairs are in no example of the cold start: a run that knows one of them has found it by execution.
"""

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from skills import Skill
from synthetic.planner import Solution, Technique, solution, write_skill
from synthetic.program import OPERATORS, Program, Step, Value, table
from tasks import Task

TEXTS = table("redundant.toml")
TORCH = TEXTS["torch"].split()  # operators that our kernels leave to PyTorch
ELEMENTWISE = TEXTS["elementwise"].split()
REDUCTIONS = TEXTS["reductions"].split()
NAMES = [*TORCH, *ELEMENTWISE, *REDUCTIONS]
CHEAP = [name for name in TORCH if name not in ("sort", "topk")]  # nothing else matters beside those two

HELD_OUT = list(map(tuple, TEXTS["held_out"]))
TAUGHT = [pair for pair in itertools.product([*TORCH, *ELEMENTWISE], NAMES)
          if pair[0] != pair[1] and pair not in HELD_OUT]
NAME = "leave-out-{0}-before-{1}"
VARIABLES = TEXTS["variables"].split()


class Call(NamedTuple):
    """One operator of a chain: its name, and its torch code in which {x} is the operand."""

    name: str
    spelling: str

    def line(self, x) -> str:
        return f"{x} = {self.spelling.format(x=x)}"


@dataclass(frozen=True)
class Chain:
    """Operators that follow each other: some on rows, then one reduction of each row, then perhaps pointwise ones."""

    calls: tuple[Call, ...]
    variable: str

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def lines(self) -> list[str]:
        return [call.line(self.variable) for call in self.calls]

    def pairs(self) -> list[tuple[str, str]]:
        """Neighbours whose first one may be left out: it keeps the rows rows."""
        last = next(place for place, name in enumerate(self.names) if name in REDUCTIONS)
        return [*zip(self.names[:last], self.names[1:])]

    def without(self, pairs):
        """The chain without the operators that stand directly before what one of the `pairs` names."""
        following = [*self.names[1:], ""]
        kept = [call for call, after in zip(self.calls, following) if (call.name, after) not in pairs]
        return replace(self, calls=tuple(kept))


def draw_call(name, rng) -> Call:
    """One call, in a spelling that says the operator's name."""
    spellings = [text for text in OPERATORS[name].spellings if f".{name}(" in text]
    return Call(name, rng.choice(spellings).format(x="{x}", d=rng.choice(["-1", "1"]), keep=""))


# ----------------------------------------------------------------------------------------------------------------------
# Chains and their texts


def draw(rng, pair=None, most=3, held_out=False) -> Chain:
    """A chain with `pair` somewhere in it, if there is one, and up to `most` operators that PyTorch computes.

    Without held_out it has no pair of HELD_OUT: so are all chains of the cold start.
    """
    while True:
        names = [*rng.sample(CHEAP, rng.randint(1, most)), *rng.sample(ELEMENTWISE, rng.choice([0, 0, 1, 2]))]
        rng.shuffle(names)
        names.append(rng.choice(REDUCTIONS))
        if pair:
            names = with_pair(names, pair, most, rng)
        if rng.random() < 0.2 and not names[-1].startswith("arg"):
            names.append(rng.choice(ELEMENTWISE))
        chain = Chain(tuple(draw_call(name, rng) for name in names), rng.choice(VARIABLES))
        if held_out or not {*chain.pairs()} & {*HELD_OUT}:
            return chain


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


def problem_text(chain, rng, brief=False) -> str:
    """The chain as a PyTorch problem. brief: the class alone, as a lesson shows it."""
    superclass = rng.choice(["super().__init__()", "super(Model, self).__init__()"])
    model = TEXTS["model"].format(superclass=superclass, x=chain.variable, lines="\n        ".join(chain.lines))
    if brief:
        return model
    (rows, of_rows), (cols, of_cols) = [rng.choice([*group.items()]) for group in TEXTS["sizes"]]
    source = rng.choice(["torch.randn", "torch.rand", "torch.randn"])
    return TEXTS["problem"].format(model=model, source=source, rows=rows, number_of_rows=rng.choice(of_rows), cols=cols,
                                   number_of_cols=rng.choice(of_cols))


@functools.lru_cache(maxsize=8)  # a later turn often repeats the turn before it
def answer(chain) -> Solution:
    """The expert's solution. Shapes only say what is a row, so any will do: nothing is run."""
    x = chain.variable
    shape = (1024, 256)
    value = Value(x, shape)
    steps = []
    program = Program(0, False, steps=steps, inputs=[(value, "")], signature="self")
    for number, call in enumerate(chain.calls, start=1):
        if call.name in REDUCTIONS:
            shape = shape[:1]
        steps.append(Step(call.name, call.spelling, {"x": value}, {"dims": (1, 1)}, Value(x, shape, number)))
        value = steps[-1].result
    return solution(program, {"one-program-per-row", "row-reduction", "fuse-neighbours-into-row"})


# ----------------------------------------------------------------------------------------------------------------------
# What is known about a pair, in words

def pair_skill(pair, rng, lines=None) -> Skill:
    """The skill 'leave out A directly before B'. lines: of a problem that has both, as the skill's example."""
    a, b = pair
    x = rng.choice(VARIABLES)
    lines = lines or [draw_call(name, rng).line(x) for name in pair]
    skill = write_skill(Technique(NAME, **TEXTS["skill"]), rng, [f"# {lines[0]}  is left out", lines[1]])
    description = skill.description.format(a=a, b=b)
    content = skill.content.replace("{a}", a).replace("{b}", b)
    return replace(skill, name=NAME.format(a, b), description=description, tags=pair, content=content)


# ----------------------------------------------------------------------------------------------------------------------
# Problems to train on


def task(seed) -> Task:
    """A problem with one of the HELD_OUT pairs, a pure function of its seed. Its fitness is the caller's to check."""
    rng = random.Random(f"redundant {seed}")
    chain = draw(rng, rng.choice(HELD_OUT), rng.choice([2, 2, 3]), held_out=True)
    return Task(f"redundant/{seed}", 0, problem_text(chain, rng), "redundant")
