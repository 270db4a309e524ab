"""The programmatic expert: what it reads, what it renders, that its kernels are right, and how to add an operator."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tasks
from conftest import make_task
from sandbox import Sandbox
from summarizer import lazy_advice
from synthetic import expert
from synthetic.expert import ALL, TECHNIQUES, read, render, techniques_in
from synthetic.generator import synthesize, training_tasks
from synthetic.operators import POINTWISE, Operator
from tasks import builtin_tasks, evaluation_fingerprints, fingerprint, unfit


@pytest.fixture(scope="module")
def problems():
    """(Task, ParsedModel) pairs that between them have work for every technique."""
    found, missing, evaluation = [], dict.fromkeys(TECHNIQUES, 3), evaluation_fingerprints()
    for seed in range(2000):
        if not any(missing.values()):
            break
        task = synthesize(seed, clutter=seed % 2 > 0)
        parsed = read(task) if unfit(task, evaluation) is None else None
        if parsed and any(missing[name] for name in expert.applicable(parsed)):
            found.append((task, parsed))
            for name in expert.applicable(parsed):
                missing[name] = max(0, missing[name] - 1)
    assert not any(missing.values())
    return found


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("cpu", trials=2, seed=0) as box:  # which remembers verdicts
        yield box


def test_each_technique_can_stand_alone_and_shows_up_only_where_it_was_asked_for(problems):
    shown = set()
    for _, parsed in problems:
        bare = render(parsed, set())
        for name in expert.applicable(parsed):
            alone = render(parsed, {name})
            shown |= alone.used & {name}
            # what shows up besides the technique asked for is what a solution needs to have a kernel at all
            assert alone.used <= {name} | bare.used or len(alone.used) == 1
    assert set(TECHNIQUES) - shown <= {"fuse-neighbours-into-row"}  # this one joins another technique's kernel


def test_solutions_are_correct_and_more_techniques_make_the_modelled_time_shorter(problems, sandbox):
    pairs = [(task, render(parsed, names).code) for task, parsed in problems for names in (set(), ALL)]
    verdicts = sandbox.score_pairs(pairs)
    assert not [(task.name, v.error or v.rejected) for (task, _), v in zip(pairs, verdicts) if not v.correct]
    gains = [full.speedup / bare.speedup for bare, full in zip(verdicts[::2], verdicts[1::2])]
    assert sum(g > 1.2 for g in gains) >= 0.7 * len(gains)


def test_every_built_in_problem_can_be_read_and_solved():
    for task in builtin_tasks():
        parsed = read(task)
        assert parsed is not None and render(parsed, ALL) is not None, task.name


@pytest.mark.parametrize("forward", [
    "for _ in range(2):\n            x = torch.relu(x)\n        return x", "return helper(x)",
    "if x.sum() > 0:\n            return x\n        return -x", "a, b = x.chunk(2)\n        return a + b"])
def test_what_the_reader_cannot_follow_is_none(forward):
    task = make_task()
    source = task.source.replace("return torch.relu(x) * 2", forward)
    assert read(task) and source != task.source and read(replace(task, source=source)) is None


def test_the_constructor_is_copied_to_the_letter(problems):
    for task, parsed in problems:
        code = render(parsed, ALL).code
        assert f"def __init__({parsed.signature})" in code or not parsed.has_init
        assert all(line in code for line in parsed.init)


def test_techniques_are_told_from_structure_not_from_plans():
    code = "Plan: fuse-pointwise-run\n# fuse-pointwise-run\nclass ModelNew: pass"
    assert techniques_in(code) == techniques_in("") == set()


def test_skill_texts_pass_the_checks_that_proposals_face():
    for t in TECHNIQUES.values():
        assert t.scope == "general" or t.scope.startswith("task_specific/")
        assert len(set(t.motivation)) >= 2 and len(set(t.idea)) >= 2 and t.tags
        assert not [text for text in (t.description, *t.motivation, *t.idea) if lazy_advice(text)]


TL = SimpleNamespace(  # the few functions of triton.language that formulas use, on float64 tensors
    maximum=lambda a, b: torch.where(a > b, a, b), minimum=lambda a, b: torch.where(a < b, a, b),
    **{name: getattr(torch, name) for name in "exp log erf abs sqrt sin cos sigmoid where".split()})
Y = torch.linspace(0.1, 0.9, 601, dtype=torch.float64)
# Of the formulas that need one: torch's function, and the further arguments.
EXPECTED = {"gelu_tanh": (lambda v: F.gelu(v, approximate="tanh"), ()), "neg": (torch.neg, ()),
            "leaky_relu": (lambda v: F.leaky_relu(v, 0.2), (0.2,)), "elu": (lambda v: F.elu(v, 0.7), (0.7,)),
            "clamp": (lambda v: torch.clamp(v, -0.5, 2.0), (-0.5, 2.0)),
            "clamp_min": (lambda v: torch.clamp(v, min=-0.5), (-0.5,)),
            "clamp_max": (lambda v: torch.clamp(v, max=2.0), (2.0,)),
            "smooth_l1_loss": (lambda v: F.smooth_l1_loss(v, Y, reduction="none"), (Y,)),
            "binary_cross_entropy_with_logits":
                (lambda v: F.binary_cross_entropy_with_logits(v, Y, reduction="none"), (Y,))}


@pytest.mark.parametrize("name", POINTWISE)
def test_formula_agrees_with_torch(name):
    """A Triton formula, executed on torch tensors, against the operator that it stands for."""
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    x = x.abs() + 0.1 if POINTWISE[name].positive else x
    function, further = EXPECTED.get(name) or (getattr(F, name, None) or getattr(torch, name), ())
    space = {"tl": TL, "x": x, **dict(zip("ab", further))}
    *before, value = [line.format(x="x", a="a", b="b") for line in POINTWISE[name].triton]
    for line in before:
        exec(line, space)
    assert torch.allclose(eval(value, space), function(x), rtol=1e-5, atol=1e-6)


def test_a_new_operator_takes_a_row_of_the_table_and_how_it_may_be_disguised(sandbox, monkeypatch):
    """The generator draws it in each spelling, the reader reads it, decontamination knows it, its kernel is right."""
    spellings = ("F.tanhshrink({x})", "{x} - torch.tanh({x})")
    formula = ("d = 2.0 * tl.sigmoid(2.0 * {x}) - 1.0", "{x} - d")
    monkeypatch.setitem(POINTWISE, "tanhshrink", Operator(formula, spellings, "Tanhshrink()"))  # the first place
    monkeypatch.setitem(tasks._WRITTEN_OUT, "tanhshrink", ["sub", "tanh"])  # the second
    texts = {"F.tanhshrink(": [], "nn.Tanhshrink()": [], "- torch.tanh(": []}
    for task in itertools.islice(training_tasks(5), 600):
        for text, found in texts.items():
            if text in task.source and len(found) < 2:
                found.append(task)
    drawn = [task for found in texts.values() for task in found]
    assert all(texts.values())
    solutions = [render(read(task), ALL) for task in drawn]
    assert any("2.0 * tl.sigmoid(2.0 *" in solution.code for solution in solutions)
    verdicts = sandbox.score_pairs([(task, solution.code) for task, solution in zip(drawn, solutions)])
    assert not [(v.error, solution.code) for v, solution in zip(verdicts, solutions) if not v.correct]
    source = texts["F.tanhshrink("][0].source
    call = source[source.index("F.tanhshrink("):].split("\n")[0].split(")")[0] + ")"
    variable = call[len("F.tanhshrink("):-1]
    assert fingerprint(source) == fingerprint(source.replace(call, f"{variable} - torch.tanh({variable})"))
