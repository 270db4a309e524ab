"""Tasks with unusual signatures and values: the reference itself, as a candidate, is right on both clocks."""

import pytest
import torch

from candidates import copied, passes, replaced, small_task, verdict
from judge.correctness import Reference, compare, vary
from sandbox import Sandbox
from tasks import Task, TaskError

X = "torch.randn(8, 8)"
RIGHT = {  # name: arguments, inputs, body
    "no inputs": ("", "", "return torch.arange(8.0) * 2"),
    "a number before a tensor that is changed": ("k, x", f"3.0, {X}", "return x.mul_(k)"),
    "the changed input is the output": ("x", X, "return x.add_(1)"),
    "an input with gaps": ("x", "torch.randn(8, 16)[:, ::2]", "return x * 2"),
    "a constant input at the end of its domain": (
        "p, t", "torch.full((8, 8), 0.97), (torch.rand(8, 8) > 0.5).float()", "return F.binary_cross_entropy(p, t)"),
    "a reference that knows one type": ("x", X, "assert x.dtype == torch.float32\n        return x * 2"),
    "a complex output": ("x", X, "return torch.complex(x, x * 2) * 3"),
    "NaN": ("x", X, "return torch.log(x) * 2"),
}


@pytest.fixture(scope="module", params=["modelled", "measured"])
def clock(request):
    with Sandbox("cpu", clock=request.param, trials=3, measure=0.001, workers=1, require_kernel=False, seed=5) as box:
        yield box


def unusual(arguments, inputs, body):
    source = small_task("", body, arguments, inputs).source
    return Task("unusual", 0, "import torch.nn.functional as F\n" + source)


@pytest.mark.parametrize("name", RIGHT)
def test_the_reference_is_right(clock, name):
    task = unusual(*RIGHT[name])
    assert not passes(clock, task, copied(task)).rejected


def test_tensors_within_other_inputs_make_a_task_unusable(clock):
    with pytest.raises(TaskError, match="tensors within a list or dict"):
        clock.score(unusual("xs, y", f"[{X}, {X}], {X}", "return xs[0] * y"), [""])


def test_a_wrong_complex_output_is_told(clock):
    task = unusual(*RIGHT["a complex output"])
    found = verdict(clock, task, replaced(copied(task), ("* 3", "* 4")))
    assert not found.correct and "wrong values" in found.error


def test_half_precision_may_be_rounded_once_less(clock):
    task = unusual("x", "torch.randn(64, 64).bfloat16()", "return F.silu(x * 2) * x")
    better = "return (F.silu(x.float() * 2) * x.float()).bfloat16()"
    passes(clock, task, replaced(copied(task), ("return F.silu(x * 2) * x", better)))


def test_a_mean_of_millions_needs_all_of_them(tmp_path, monkeypatch):
    """Every other one is within 1e-4 of all as they are drawn, but not where few of them decide. Symmetry is kept."""
    job = {"name": "mean", "source": unusual("x", "torch.rand(1 << 24)", "return x.mean()").source, "seed": 1,
           "known": []}
    monkeypatch.chdir(tmp_path)
    reference = Reference(job, {"device": "cpu", "tolerance": 1e-4})
    plain, few = reference.trial(0), reference.trial(1)
    assert compare(plain, [plain.inputs[0][::2].mean()], 2e-4) is None
    assert "wrong values" in compare(few, [few.inputs[0][::2].mean()], 2e-4)
    assert compare(few, [few.inputs[0].view(4096, -1).mean(1).mean()], 1e-4) is None
    [matrix] = vary([torch.ones(512, 512)], 1)
    assert torch.equal(matrix, matrix.T) and len(matrix.unique()) == 3
