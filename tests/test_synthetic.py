"""The generator: programs, problems and solutions agree, techniques show up where asked for, how to add an operator;
and which problems are near each other."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from candidates import all_pass, small_task
from summarizer import lazy_advice
from synthetic import families
from synthetic.draft import Draft
from synthetic.families import FAMILIES, draw, task_of
from synthetic.heads import plain_input
from synthetic.kernels import SCANS
from synthetic.planner import ALL, TECHNIQUES, applicable, solution
from synthetic.program import EXPRESSIONS, OPERATORS, Operator, Value, problem_text
from synthetic.training import operators, unfit


@pytest.fixture(scope="module")
def programs():
    """Programs that between them have work for every technique; few, since judging one takes a second."""
    found, missing = [], set(TECHNIQUES)
    for seed in itertools.takewhile(lambda _: missing, range(2000)):
        program = draw(seed, clutter=seed % 2 > 0)
        if missing & applicable(program) and unfit(task_of(program), frozenset()) is None:
            found.append(program)
            missing -= applicable(program)
    assert not missing
    return found


def test_each_technique_can_stand_alone_and_shows_up_only_where_it_was_asked_for(programs):
    shown = set()
    for program in programs:
        bare = solution(program, set())
        for name in applicable(program):
            alone = solution(program, {name})
            shown |= alone.used & {name}
            # what shows up besides the technique asked for is what a solution needs to have a kernel at all
            assert alone.used <= {name} | bare.used or len(alone.used) == 1
    # These three join a kernel, which may be that of another technique.
    assert set(TECHNIQUES) - shown <= {"fuse-neighbours-into-row", "index-broadcast-parameter", "fold-convolution-bias"}


def test_solutions_are_correct_and_more_techniques_make_the_modelled_time_shorter(programs, box):
    pairs = [(task_of(program), solution(program, names).code) for program in programs[::2] for names in (set(), ALL)]
    verdicts = all_pass(box, pairs)
    gains = [full.speedup / bare.speedup for bare, full in zip(verdicts[::2], verdicts[1::2])]
    assert sum(gain > 1.2 for gain in gains) >= 0.6 * len(gains)


def test_every_name_in_a_solution_stands_in_its_problem():
    """A model that had to guess names would learn to invent them. And no usual name of a layer is withheld from it."""
    for seed in range(150):
        program = draw(seed, clutter=seed % 2 > 0)
        for names in (set(), ALL):
            found = solution(program, names)
            forward = re.search(r"def forward.*?(?=\n\S)", found.code, re.DOTALL)[0] if found else ""
            assigned = re.findall(r"^ +(\w+) = ", forward, re.MULTILINE)
            assert {*assigned} <= {"t", "out", *re.findall(r"\w+", problem_text(program))}
    assert Draft(0, plain=True).attribute("bn", "nn.BatchNorm1d(8)") == "self.bn"


def test_every_family_runs_and_nearly_always_has_a_solution():
    for name, row in FAMILIES.items():
        drawn = [draw(seed, seed % 2 > 0, {name: row}) for seed in range(12)]
        assert sum(unfit(task_of(program), frozenset()) is None for program in drawn) >= 8, name
        assert sum(solution(program, ALL) is not None for program in drawn) >= 10, name


def test_solutions_copy_the_constructor_and_skills_show_their_lines(programs):
    for program in programs:
        found = solution(program, ALL)
        assert not program.signature or f"def __init__({program.signature})" in found.code
        assert all(line in found.code for line in itertools.chain(program.init, *found.shown.values()))
        assert all(found.shown.values())


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_the_texts_of_a_skill_pass_the_checks_that_proposals_face(technique):
    texts = technique.description, *technique.motivation, *technique.idea
    assert not any(map(lazy_advice, texts)) and technique.tags
    assert technique.scope == "general" or technique.scope.startswith("task_specific/")


# ---- each row of the tables


def alone(name, rank=2, **fields):
    """A program of one operator between two pointwise ones. name: of OPERATORS or composed."""
    d = Draft(name, plain=True)
    plain_input(d, rank)
    d.apply("sigmoid", "torch.sigmoid({x})")  # above zero, since some divide by a sum
    spellings = OPERATORS[name].spellings if name in OPERATORS else ()  # not as a layer
    d.apply(name, *spellings, c=Value("1e-5"), **fields)
    if not name.startswith("arg"):
        d.apply("formula", "{x} * 0.5 - 0.1")
    return d.finish(name)


def test_row_operators_alone_have_correct_kernels(box):
    """Both kinds of kernels are written for each; judged are a few of both kinds, and of the others one in turn."""
    names = [name for name, row in OPERATORS.items() if row.kind == "row" and row.spellings]
    names += sorted(EXPRESSIONS["composed"])
    pairs = []
    for i, name in enumerate(names):
        row, sweep = alone(name, 2, d="-1", keep=""), alone(name, 3, d="1", keep="")
        codes = [solution(program, ALL).code for program in (row, sweep)]
        assert "def row(" in codes[0] and ("def sweep(" in codes[1]) == (name not in SCANS)
        both = [(task_of(row), codes[0]), (task_of(sweep), codes[1])]
        pairs += both if name in ("softmax", "argmax") else [both[i % 2]]
    all_pass(box, pairs)


def test_losses_and_products_have_correct_kernels(box):
    drawn = [draw(seed, families={"product": FAMILIES["product"]}) for seed in range(3)]
    for name in ("mse_loss", "huber_loss_sum", "binary_cross_entropy_with_logits"):
        d = Draft(name, plain=True)
        plain_input(d, 2)
        d.apply(name, y=d.input(d.dims, f"torch.rand({', '.join(d.dims)})"))
        drawn.append(d.finish("loss"))
    all_pass(box, [(task_of(program), solution(program, ALL).code) for program in drawn])


TL = SimpleNamespace(  # the few functions of triton.language that formulas use, on float64 tensors
    maximum=lambda a, b: torch.where(a > b, a, b), minimum=lambda a, b: torch.where(a < b, a, b),
    where=lambda condition, a, b: torch.where(condition != 0, a, b),
    **{name: getattr(torch, name) for name in "exp exp2 log erf abs sqrt sin cos sigmoid".split()})
KERNEL_TEXTS = dict(EXPRESSIONS["triton"])  # torch expression -> operands in their order, lines of Triton
for row in OPERATORS.values():
    if row.kind == "pointwise" and row.lines and not row.technique:
        for text in row.spellings:
            KERNEL_TEXTS.setdefault(text, ["", *row.lines])


@pytest.mark.parametrize("spelling", KERNEL_TEXTS)
def test_what_a_kernel_computes_agrees_with_torch(spelling):
    """Lines of Triton, executed on torch tensors, against the torch expression that they stand for."""
    y = torch.linspace(0.1, 0.9, 601, dtype=torch.float64)
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    space = {"tl": TL, "libdevice": torch, "torch": torch, "F": F, "math": math, "x": x, "y": y, "t": y + 1, "c": 0.7,
             "h": 2.0}
    order, *lines = KERNEL_TEXTS[spelling]
    fields = {name: name for name in "xytch"}
    for operand in order.split("; "):
        name, _, number = operand.partition(" = ")
        if number:
            fields[name] = f"({number.format(**fields)})"
    *before, value = [line.format(**fields) for line in lines]
    exec("\n".join(before), space)
    expected = eval(spelling.format(x="x", y="y", t="t", c="c", h="h"), space)
    assert torch.allclose(eval(value, space), expected, rtol=1e-5, atol=1e-6)


def applied(expression) -> list:
    """The operators that decontamination finds in a problem that returns this expression, or applies this layer."""
    if expression.startswith("nn."):
        return operators(small_task("", "return self.layer(x)", state=f"self.layer = {expression}").source)
    return operators(small_task("", f"return {expression}").source)


def test_a_new_operator_takes_a_row_of_the_table(box, monkeypatch):
    """It is drawn in each spelling, its kernel is correct, and decontamination knows it."""
    spellings = ("F.tanhshrink({x})", "{x} - torch.tanh({x})")
    lines = ("d = libdevice.tanh({x})", "{x} - d")
    monkeypatch.setitem(OPERATORS, "tanhshrink", Operator("pointwise", spellings, lines, "Tanhshrink()",
                                                          counted=["sub", "tanh"]))
    drawn = {}
    for seed in range(40):
        d = Draft(seed)
        plain_input(d, 2)
        families.activation(d, "tanhshrink")
        families.scale(d)
        drawn[d.program.steps[0].spelling] = d.finish("pointwise")
    assert set(drawn) == {*spellings, "{layer}({x})"}
    all_pass(box, [(task_of(program), solution(program, ALL).code) for program in drawn.values()])
    assert applied("F.tanhshrink(x)") == applied("x - torch.tanh(x)")


SPELLED = {name: row for name, row in OPERATORS.items() if len(row.spellings) + bool(row.layer) > 1
           and name not in ("formula", "exp", "alias", "clone", "transpose")}  # those differ on purpose


@pytest.mark.parametrize("name", SPELLED)
def test_all_spellings_of_an_operator_are_near_one_another(name):
    """Else an evaluation problem in another spelling could be trained on."""
    row = SPELLED[name]
    fields = {"x": "x", "y": "y", "c": "0.5", "h": "0.7", "d": "1", "keep": ""}
    found = [applied(spelling.format(**fields)) for spelling in row.spellings]
    if row.kind in ("pointwise", "row") and row.layer:
        found.append(applied(f"nn.{row.layer.format(**fields)}"))
    assert len(SPELLED) > 30 and found[0] and all(each == found[0] for each in found)


@pytest.mark.parametrize("one, other", [
    ("torch.mean(torch.relu(1 - x))", "torch.mean(torch.clamp(1 - x, min=0))"), ("x.relu_()", "torch.clamp_min(x, 0)"),
    ("nn.LeakyReLU(0.1)", "torch.where(x > 0, x, 0.1 * x)"), ("F.huber_loss(x, x)", "nn.SmoothL1Loss()"),
    ("F.normalize(x)", "x / torch.norm(x, dim=1, keepdim=True)"), ("F.layer_norm(x, (4,))", "nn.LayerNorm(4)"),
    ("x * torch.rsqrt(x.mean() + 1)", "x / torch.sqrt(x.mean() + 1)"),
    ("x * torch.tanh(0.79788456 * x)", "x * torch.tanh(math.sqrt(2.0 / math.pi) * x)"),
    ("nn.Sequential(nn.Linear(4, 4), nn.Tanh())", "torch.tanh(torch.matmul(x, x))"),
    ("nn.GELU()", "x * 0.5 * (1.0 + torch.erf(x / 1.41421))")])
def test_two_spellings_of_one_problem_are_near(one, other):
    assert applied(one) == applied(other) != []


def test_operators_in_a_class_of_the_problems_own_count():
    tail = "class Tail(nn.Module):\n    def forward(self, x):\n        x += x.softmax(1)\n        return x\n"
    task = small_task("", "return self.tail(x)", state="self.tail = Tail()")
    assert operators(task.source + tail) == applied("x + torch.softmax(x, 1)")
