"""The programmatic expert: what it reads, what it renders, and that its kernels are right."""

import pytest

from sandbox import Sandbox
from synthetic import expert
from synthetic.codegen import FORMULAS
from synthetic.expert import ALL, TECHNIQUES, read, render, techniques_in
from synthetic.generator import synthesize
from tasks import Task, builtin_tasks, evaluation_fingerprints, unfit


@pytest.fixture(scope="module")
def programs():
    """(task, program) pairs that between them have work for every technique."""
    found, missing, evaluation = [], dict.fromkeys(TECHNIQUES, 3), evaluation_fingerprints()
    for seed in range(2000):
        if not any(missing.values()):
            break
        task = synthesize(seed, clutter=seed % 2 > 0)
        program = read(task) if unfit(task, evaluation) is None else None
        if program and any(missing[name] for name in expert.applicable(program)):
            found.append((task, program))
            for name in expert.applicable(program):
                missing[name] = max(0, missing[name] - 1)
    assert not any(missing.values())
    return found


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("cpu", trials=2, seed=0) as box:  # which remembers verdicts
        yield box


def test_solutions_with_every_technique_are_correct(programs, sandbox):
    verdicts = sandbox.score_pairs([(task, render(program, ALL).code) for task, program in programs])
    wrong = [(task.name, v.error or v.rejected) for (task, _), v in zip(programs, verdicts) if not v.correct]
    assert not wrong


def test_each_technique_can_stand_alone_and_shows_up_only_where_it_was_asked_for(programs):
    shown = set()
    for _, program in programs:
        bare = render(program, set())
        for name in expert.applicable(program):
            alone = render(program, {name})
            shown |= alone.used & {name}
            # what shows up besides the technique asked for is what a solution needs to have a kernel at all
            assert alone.used <= {name} | bare.used or len(alone.used) == 1
    assert set(TECHNIQUES) - shown <= {"fuse-neighbours-into-row"}  # this one joins another technique's kernel


def test_more_techniques_make_the_modelled_time_shorter(programs, sandbox):
    pairs = [(task, render(program, names).code) for task, program in programs for names in (set(), ALL)]
    speedups = [v.speedup for v in sandbox.score_pairs(pairs)]
    gains = [full / bare for bare, full in zip(speedups[::2], speedups[1::2])]
    assert sum(g > 1.2 for g in gains) >= 0.7 * len(gains)


def test_every_built_in_problem_can_be_read_and_solved():
    for task in builtin_tasks():
        program = read(task)
        assert program is not None and render(program, ALL) is not None, task.name


@pytest.mark.parametrize(
    "forward",
    [
        "for _ in range(2):\n            x = torch.relu(x)\n        return x",
        "return helper(x)",
        "if x.sum() > 0:\n            return x\n        return -x",
        "a, b = x.chunk(2)\n        return a + b",
    ],
)
def test_what_the_reader_cannot_follow_is_none(forward):
    source = f"""
import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        {forward}
def get_inputs():
    return [torch.randn(8, 8)]
def get_init_inputs():
    return []
"""
    assert read(Task("t", 0, source)) is None


def test_the_constructor_is_copied_to_the_letter(programs):
    for task, program in programs:
        code = render(program, ALL).code
        assert f"def __init__({program.signature})" in code or not program.has_init
        assert all(line in code for line in program.init)


def test_techniques_are_told_from_structure_not_from_plans():
    code = "Plan: fuse-pointwise-run\n# fuse-pointwise-run\nclass ModelNew: pass"
    assert techniques_in(code) == set()
    assert techniques_in("") == set()


def test_skill_texts_pass_the_checks_that_proposals_face():
    for t in TECHNIQUES.values():
        assert t.scope == "general" or t.scope.startswith("task_specific/")
        assert len(set(t.motivation)) >= 2 and len(set(t.idea)) >= 2 and t.tags


def test_formulas_agree_with_torch():
    """Every Triton formula, as numpy-like torch code, against the operator it stands for."""
    import torch
    import torch.nn.functional as F

    class tl:  # the few functions that formulas use, in float64
        maximum, minimum, exp, log, erf, abs, sqrt, sin, cos, sigmoid, where = (
            torch.maximum, torch.minimum, torch.exp, torch.log, torch.erf, torch.abs, torch.sqrt, torch.sin, torch.cos,
            torch.sigmoid, torch.where)

    tensor = lambda v: v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=torch.float64)  # noqa: E731
    tl.maximum = lambda a, b: torch.maximum(*torch.broadcast_tensors(tensor(a), tensor(b)))
    tl.minimum = lambda a, b: torch.minimum(*torch.broadcast_tensors(tensor(a), tensor(b)))
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    y = torch.linspace(0.1, 0.9, 601, dtype=torch.float64)
    functions = {
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "leaky_relu": lambda v: F.leaky_relu(v, 0.2),
        "elu": lambda v: F.elu(v, 0.7),
        "clamp": lambda v: torch.clamp(v, -0.5, 2.0),
        "neg": torch.neg,
        "clamp_min": lambda v: torch.clamp(v, min=-0.5),
        "clamp_max": lambda v: torch.clamp(v, max=2.0),
        "smooth_l1_loss": lambda v: F.smooth_l1_loss(v, y, reduction="none"),
        "binary_cross_entropy_with_logits": lambda v: F.binary_cross_entropy_with_logits(v, y, reduction="none"),
    }
    further = {"leaky_relu": (0.2,), "elu": (0.7,), "clamp": (-0.5, 2.0), "clamp_min": (-0.5,), "clamp_max": (2.0,),
               "smooth_l1_loss": (y,), "binary_cross_entropy_with_logits": (y,)}
    for name, lines in FORMULAS.items():
        v = x.abs() + 0.1 if name in ("log", "sqrt", "rsqrt") else x
        space = {"tl": tl, "x": v, "a": 0.0, "b": 0.0} | dict(zip("ab", further.get(name, ())))
        fill = dict(x="x", a="a", b="b")
        for line in lines[:-1]:
            exec(line.format(**fill), space)
        got = eval(lines[-1].format(**fill), space)
        want = functions.get(name) or getattr(F, name, None) or getattr(torch, name)
        assert torch.allclose(got, want(v), rtol=1e-5, atol=1e-6), name
