"""Tasks with unusual signatures and values: the reference itself, as a candidate, is right on both clocks."""

import pytest
import torch

from candidates import copied, passes, replaced, small_task, solution, verdict
from judge.correctness import Reference, compare, identical, vary
from judge.replayer import far_apart
from sandbox import Sandbox
from tasks import Task, TaskError

X = "torch.randn(8, 8)"
RIGHT = {  # name: arguments, inputs, body
    "no inputs": ("", "", "return torch.arange(8.0) * 2"),
    "a number before a tensor that is changed": ("k, x", f"3.0, {X}", "return x.mul_(k)"),
    "the changed input is the output": ("x", X, "return x.add_(1)"),
    "numbers drawn at random": ("x, k", f"{X}, random.randint(1, 50)", "return x * k"),
    "an expanded input": ("x, y", f"torch.randn(8, 1).expand(8, 8), {X}", "return x * 2 + y"),
    "an input with gaps": ("x", "torch.randn(8, 16)[:, ::2]", "return x * 2"),
    "a constant input at the end of its domain": (
        "p, t", "torch.full((8, 8), 0.97), (torch.rand(8, 8) > 0.5).float()", "return F.binary_cross_entropy(p, t)"),
    "a reference that knows one type": ("x", X, "assert x.dtype == torch.float32\n        return x * 2"),
    "a complex output": ("x", X, "return torch.complex(x, x * 2) * 3"),
    "NaN": ("x", X, "return torch.log(x) * 2"),
    "a number within an operator": ("x", X, "return torch.where(x > 0, x, 5.0)"),
}


@pytest.fixture(scope="module", params=["modelled", "measured"])
def clock(request):
    with Sandbox("cpu", clock=request.param, trials=3, measure=0.001, workers=1, require_kernel=False, seed=5) as box:
        yield box


def unusual(arguments, inputs, body):
    source = small_task("", body, arguments, inputs).source
    return Task("unusual", 0, "import random\nimport torch.nn.functional as F\n" + source)


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


def test_results_of_timed_calls_are_compared_whatever_they_hold():
    x = torch.randn(4000)
    for value in (float("nan"), float("inf")):
        y = x.clone()
        y[7] = value
        assert not far_apart(y * (1 + 1e-6), y) and far_apart(torch.zeros_like(y), y)
    assert far_apart(torch.zeros(4000, dtype=torch.int64), torch.arange(4000))
    large = torch.randn(3 << 20)
    assert not far_apart(large * (1 + 1e-6), large) and far_apart(torch.zeros_like(large), large)


def test_equality_of_bytes():
    for dtype, n in ((torch.float32, 7), (torch.float32, 8), (torch.bfloat16, 1001), (torch.bool, 3)):
        a = (torch.randn(n) * 5).to(dtype)
        b = a.clone()
        assert identical(a, b) and identical(a[1:], b[1:])
        b[-1] = 1 - b[-1].float()
        assert not identical(a, b) and not identical(a[1:], b[1:])


POINTERS = '''
@triton.jit
def join(a, b, out, rows, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    at = tl.where(pid < rows, a + pid * BLOCK, b + (pid - rows) * BLOCK)
    tl.store(out + pid * BLOCK + offs, tl.load(at + offs) * 2)
'''


def test_a_program_may_choose_between_tensors():
    task = small_task("joined", "return torch.cat([x, y]) * 2", "x, y", "torch.randn(32, 64), torch.randn(16, 64)")
    launch = ("out = torch.empty(x.shape[0] + y.shape[0], 64, device=x.device)\n"
              "join[(48,)](x, y, out, x.shape[0], BLOCK=64)\nreturn out")
    with Sandbox("cpu", trials=2, seed=0) as box:
        right, wrong = box.score(task, [solution(POINTERS.replace("* 2)", f"* {n})"), launch, "x, y") for n in (2, 3)])
    assert right.correct and "wrong values" in wrong.error


def test_parameters_that_make_a_task_chaotic_are_not_perturbed(clock, tmp_path, monkeypatch):
    """Of the logistic map at 3.5 four values are left, at 3.7 the last bits of the first; nobody could be right.

    Of 20 million numbers from 0.45 to 0.55 none needs more steps than these at 3.5; from 0.4 to 0.6 133 do.
    """
    map_of = "for _ in range(160):\n            x = self.rate[2] * x * (1 - x)\n        return x"
    state = "self.rate = torch.nn.Parameter(torch.full((4,), 3.5))"
    task = small_task("logistic", map_of, inputs="torch.rand(8, 8) * 0.1 + 0.45", state=state)
    monkeypatch.chdir(tmp_path)
    job = {"name": task.name, "source": task.source, "seed": clock.seed, "known": []}
    reference = Reference(job, {"protocol": "strict", "device": "cpu"})
    assert reference.names is None
    reference.construct([("rate", [4])])
    assert 3.6 < reference.state["rate"][2].item() < 4
    passes(clock, task, replaced(copied(task), ("x * (1 - x)", "(x - x * x)")))


def test_a_mean_of_millions_needs_all_of_them(tmp_path, monkeypatch):
    """Every other one is within 1e-4 of all as they are drawn, but not where few of them decide. Symmetry is kept."""
    job = {"name": "mean", "source": unusual("x", "torch.rand(1 << 24)", "return x.mean()").source, "seed": 1,
           "known": []}
    monkeypatch.chdir(tmp_path)
    reference = Reference(job, {"protocol": "strict", "device": "cpu"})
    plain, few = reference.trial(0), reference.trial(1)
    assert compare(plain, [plain.inputs[0][::2].mean()], 2e-4) is None
    assert "wrong values" in compare(few, [few.inputs[0][::2].mean()], 2e-4)
    assert compare(few, [few.inputs[0].view(4096, -1).mean(1).mean()], 1e-4) is None
    [matrix] = vary([torch.ones(512, 512)], 1)
    assert torch.equal(matrix, matrix.T) and len(matrix.unique()) == 3
