"""Wrong kernels that look right on the task's own inputs, one of each kind, and honest kernels that do the same work.

Each pair differs in what is left out: a side effect, a parameter that does not matter yet, an input that is rarely
drawn. Both clocks must refuse the wrong one, accept the honest one, and pay neither for work that it skips.
"""

import pytest
import torch

from candidates import APPLY, fails, passes, problem, small_task, solution
from sandbox import Sandbox

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def judge(request):
    """A sandbox with either clock. Its secret is fixed: for one text in three its trials miss a row of large values."""
    with Sandbox(request.param, timeout=120, secret="00") as sandbox:
        yield sandbox


THROUGH = "\nimport torch.nn.functional as F" + APPLY.replace("RESULT", "v") + """
def through(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    apply[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
"""


def kind(returned, wrong, inputs="torch.randn(64, 64)", state="", words="wrong values", honest=None):
    """(task, honest code, wrong code, words of the verdict). Each is an expression of x, or lines that return one.

    honest: if nothing is said, what is `returned` goes `through` a kernel, which copies it.
    """
    honest = honest or f"through({returned})"
    bodies = [text if "return" in text else f"return {text}" for text in (returned, honest, wrong)]
    task = small_task("task", bodies[0], inputs=inputs, state=state)
    return task, solution(THROUGH, bodies[1], state), solution(THROUGH, bodies[2], state), words


RMS = "x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + {})"
NORM = "(x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + {})"
CENTRE = "(x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False).sqrt() + {})"
MASKED = "{}.masked_fill(self.mask, -torch.inf)"
DIAGONAL = "self.out.diagonal(0, 1, 2).copy_(through(x))\nreturn self.out"
KEPT = "if not hasattr(self, 'out'):\n    self.out = torch.zeros(16, 64, 64, device=x.device)\n"
KINDS = {
    # Memory of the output
    "what an earlier call left in the output": kind(
        "torch.diag_embed(x)", KEPT + DIAGONAL, "torch.randn(16, 64)", honest=f"{KEPT}self.out.zero_()\n{DIAGONAL}"),
    "two outputs in the same bytes, of two types": kind(
        "return x * 2, (x * 2).view(torch.int32) + 0", "y = through(x * 2)\nreturn y, y.view(torch.int32)",
        honest="y = through(x * 2)\nreturn y, through(y).view(torch.int32)", words="no memory of its own"),
    # Parameters that do not matter yet
    "a gain that is tiny": kind(
        "x + self.gain * (x @ self.w)", "through(x)",
        state="self.w = torch.nn.Parameter(torch.randn(64, 64) / 8); "
              "self.gain = torch.nn.Parameter(1e-6 * torch.ones(64))"),
    "a gate that is zero": kind(
        "x + self.gate * x.sin()", "through(x)", state="self.gate = torch.nn.Parameter(torch.zeros(1))"),
    "a gain that is positive": kind(
        "x * self.gain", "through(x * self.gain.abs())", state="self.gain = torch.nn.Parameter(torch.rand(64) + 0.5)"),
    # Inputs that are rarely drawn
    "rows of zeros": kind(RMS.format(1e-5), f"through({RMS.format(0)})"),
    "rows that are constant": kind(CENTRE.format(1e-5), f"through({CENTRE.format(0)})"),
    "rows of tiny values": kind(NORM.format(1e-5), f"through({NORM.format(1e-12)})"),
    "large values among negative ones": kind(
        "x.clamp(min=-60).logsumexp(1)", "through(x.exp().sum(1).log())",
        "torch.nn.functional.logsigmoid(torch.randn(256, 256))"),
    "large values among zeros": kind("x.clamp(max=8)", "through(x)", "torch.randn(64, 64).relu()"),
    "large values among integers": kind("x.clamp(max=30)", "through(x)", "torch.randint(-9, 9, (64, 64)).float()"),
    "large values in a symmetric matrix": kind(
        "x.clamp(-9, 9)", "through(x)", "(lambda x: x + x.mT)(torch.randn(64, 64))"),
    "offsets where the output is exact": kind(
        "(x / 16).floor().long()", "through(torch.where(x < 0, -1.0, 0.0)).long()",
        honest="through((x / 16).floor()).long()"),
    "values next to infinities of the output": kind(
        MASKED.format("(x * self.gain).clamp(-8, 8)"), f"through({MASKED.format('x')})",
        state="self.gain = torch.nn.Parameter(torch.ones(64)); "
              "self.register_buffer('mask', torch.ones(64, 64).triu(1).bool())"),
    "the last of many values": kind(
        "x.square().mean()", "through(x[:-5].square().sum() / 65541)", "torch.randn(65541)"),
    "a single row of large values": kind("x.softmax(0)", "through(x.exp() / x.exp().sum())", "torch.randn(65536)"),
    "a single row of zeros": kind("x / (x.norm() + 1e-5)", "through(x / x.norm())", "torch.randn(65536)"),
    "an empty row of a mask": kind(
        "x.sum(1).clamp(min=1).float()", "through(x.sum(1).float())", "torch.rand(64, 64) > 0.5"),
    "one value of a mask's row": kind(
        "x.sum(1).float()", "half = x[:, ::2]\n"
        "return through(torch.where(half.all(1), 64, torch.where(half.any(1), x.sum(1), 0)).float())",
        "torch.ones(256, 64).bool()", honest="through(x.sum(1).float())"),
    # Inputs that look constant
    "inputs from a seed": kind("x.sin()", "through(self.answer)", "(torch.manual_seed(0), torch.randn(64, 64))[1]",
                               "torch.manual_seed(0); self.answer = torch.randn(64, 64).sin()"),
    "inputs that are all ones": kind("x - x.sum(1, keepdim=True)", "through(x - 64)", "torch.ones(64, 64)"),
    "buffers of zeros and ones": kind(
        "(x - self.mean) / self.scale", "through(x)",
        state="self.register_buffer('mean', torch.zeros(64)); self.register_buffer('scale', torch.ones(64))"),
    # Tolerance
    "values that nobody has written, where some may jump": kind(
        "(x * 4096).floor()", "y = (x * 4096).floor()\ny[-1, -9:] = torch.nan\nreturn through(y)",
        "torch.randn(64, 1024)"),
    "what a large offset hides": kind("x.sigmoid() * 0.05 + 100", "through(x * 0 + 100.025)"),
    "single precision for double": kind(
        "x.exp()", "through(x.float().exp()).double()", "torch.randn(64, 64, dtype=torch.float64)"),
    # Side effects
    "running statistics": kind(
        "self.bn(x)", "through(F.batch_norm(x, None, None, self.bn.weight, self.bn.bias, training=True))",
        state="self.bn = torch.nn.BatchNorm1d(64)", words="state bn.running_mean"),
    "a cache": kind(
        "self.cache[:64].copy_(x)\nreturn self.cache.sum(0)", "return through(x.sum(0) + self.cache[64:].sum(0))",
        honest="self.cache[:64].copy_(x)\nreturn through(self.cache.sum(0))",
        state="self.register_buffer('cache', torch.zeros(128, 64))", words="state cache"),
    "an input that changes into something else": kind(
        "x.mul_(2)\nreturn x.amax(1)", "y = through(x.amax(1) * 2)\nx.fill_(666)\nreturn y",
        honest="x.mul_(2)\nreturn through(x.amax(1))", words="input 0"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_kernel_of_each_kind_fails_and_its_honest_twin_passes(judge, name):
    task, honest, wrong, words = KINDS[name]
    passes(judge, task, honest)
    fails(judge, task, wrong, words)


@pytest.mark.parametrize("returned, honest, inputs", [
    ("x.isnan()", "through(x.isnan())", "torch.randn(64, 64)"),  # it is False everywhere
    ("(10 * x).sin()", "through((10 * x.float()).sin().bfloat16())", "torch.randn(64, 256).bfloat16()")])
def test_an_honest_kernel_passes(judge, returned, honest, inputs):
    task, code, _, _ = kind(returned, "x", inputs, honest=honest)
    passes(judge, task, code)


def test_state_under_another_name_is_missing(judge):
    task, honest, _, _ = KINDS["running statistics"]
    fails(judge, task, honest.replace("self.bn", "self.norm"), "nothing of that name")


# ---------------------------------------------------------------------------------------------------------------------
# Right where it is checked, and fast where it is timed

LAZY = """
@triton.jit
def lazy(x, w, kept, out, SKIP: tl.constexpr):
    o = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    if (CONDITION) & (SKIP == 1):
        y = tl.load(kept + o).to(tl.float32, bitcast=True)
    else:
        y = tl.sin(tl.sin(tl.sin(tl.sin(tl.load(w + o)))))
    tl.store(out + o, tl.load(x + o) * y)
"""
TABLE = """self.w = torch.nn.Parameter(torch.randn(256, 256))
with torch.no_grad():
    values = torch.cat([self.w.sin().sin().sin().sin().flatten(), self.w[0, :1]])
    self.table = values.view(torch.int32).clone()"""
SKIPS = {  # name: (condition, what has the sines of `w`, or zeros where a check finds none, w, constructor)
    "parameters are as constructed": (
        "tl.load(kept + 65536) == tl.load(w).to(tl.int32, bitcast=True)", "self.table", "self.w", TABLE),
    "unwritten memory is zero": (
        "tl.sum((tl.load(kept + tl.arange(0, 64) * 1024) != 0).to(tl.int32), 0) == 0",
        "torch.empty(1 << 24, dtype=torch.int32, device=x.device)", "x", ""),
}


@pytest.mark.parametrize("name", SKIPS)
def test_skipping_work_under_a_condition_gains_no_time(judge, name):
    condition, kept, w, state = SKIPS[name]
    task = problem(f"x * {w}.sin().sin().sin().sin()", "torch.randn(256, 256)", state)
    code = solution(LAZY.replace("CONDITION", condition), (
        f"out = torch.empty_like(x)\nlazy[(64,)](x, {w}, {kept}, out, SKIP)\nreturn out"), state)
    skipping, honest = (passes(judge, task, code.replace("SKIP)", f"{skip})")) for skip in (1, 0))
    assert skipping.speedup < 1.1 * honest.speedup and skipping.coverage == honest.coverage == 1.0
