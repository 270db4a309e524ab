"""The measured clock on a GPU. Skips itself where there is none."""

import functools
import subprocess
import sys
import time

import pytest
import torch

import candidates
from candidates import WITHOUT_LAYER, replaced, small_task
from conftest import read_lines
from sandbox import Sandbox, feedback
from synthetic import expert
from program.files import ROOT
from tasks import Task

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

# The task of the tests without a GPU, but larger and only what the kernel does
TASK = Task("scaled_silu", 0, replaced(candidates.TASK.source, *WITHOUT_LAYER, ("rows = 64\n\n", ""),
                                       ("torch.randn(rows, 32)", "torch.randn(8192, 2048)"),
                                       ("[32, 2.5]", "[2048, 2.5]")))
HONEST = replaced(candidates.HONEST, *WITHOUT_LAYER)
changed = functools.partial(replaced, HONEST)


def model(result):
    """The class ModelNew of HONEST with a forward that only returns this expression."""
    return HONEST[HONEST.index("class ModelNew"):HONEST.index("        out = torch")] + f"        return {result}\n"


IMPORTS = "import torch\nimport torch.nn as nn\n"
TORCH = IMPORTS + model("torch.nn.functional.silu(x + self.bias) * self.factor")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("cuda", trials=3, timeout=40) as box:
        yield box


def verdict(sandbox, code, task=TASK):
    return sandbox.score(task, [code])[0]


def test_an_honest_fusion_is_measured_near_its_share_of_the_memory_traffic(sandbox):
    v = verdict(sandbox, HONEST)
    assert v.correct and v.clock == "measured" and v.rejected is None and v.error is None, v
    # Eager makes three passes over 64 MB (six transfers), the kernel one (two): 3x at best.
    assert 2.0 < v.speedup < 3.6 and v.speedup_low <= v.speedup
    assert 0.02 < v.candidate_ms < 0.2
    assert v.coverage > 0.9 and v.profile[0].name == "bias_silu_scale" and v.profile[0].own
    assert "measured" in feedback(v)


CASES = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/measured.jsonl")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] != "open"])
def test_programs_that_cheat_the_measured_clock(name, sandbox):
    """And honest ones that do the same work. A naive checker (the reference's values, once) believes all of them."""
    task, code, kind = Task(name, 0, CASES[name]["task"]), CASES[name]["code"], CASES[name]["kind"]
    verdicts = sandbox.score(task, [code, code + "# again"])
    if kind == "harmless":  # it may be right, but is paid no more than honest work, which is judged as before
        honest = sandbox.score(task, [CASES[name + "_honest"]["code"]])[0]
        assert honest.correct and all(not v.correct or v.speedup < 1.15 * honest.speedup for v in verdicts), verdicts
    else:
        assert [v.correct for v in verdicts] == [kind == "honest"] * 2, verdicts


def test_the_reference_itself_is_as_fast_as_itself():
    waits = Task("waits", 0, replaced(TASK.source, ("        return torch", "        torch.cuda.synchronize()\n"
                                                    "        return torch")))  # cannot be captured
    with Sandbox("cuda", trials=2, require_kernel=False) as box:
        (v,), (slow,) = box.score(TASK, [TORCH]), box.score(waits, [TORCH])
    assert v.correct and 0.97 < v.speedup < 1.03, v
    # Steps that Python calls: behind a long pause the candidate's are launched ahead, the reference waits for its end.
    assert slow.correct and 0.9 < slow.speedup < 5, slow


def test_a_busy_gpu_is_noticed(sandbox):
    """Another process that computes without pause slows both sides evenly: the scatter alone would not show it."""
    busy = subprocess.Popen([sys.executable, "-c",
                             "import torch\nx = torch.randn(8192, 8192, device='cuda')\nprint(flush=True)"
                             "\nwhile True:\n    x = x * 1.0\n    torch.cuda.synchronize()"], stdout=subprocess.PIPE)
    try:
        busy.stdout.readline()
        disturbed = verdict(sandbox, HONEST + "# busy\n")
    finally:
        busy.kill()
        busy.wait()
    quiet = verdict(sandbox, HONEST + "# quiet\n")
    assert disturbed.correct and disturbed.disturbed and quiet.correct and not quiet.disturbed, (disturbed, quiet)


@pytest.mark.parametrize("old, new, compiled, says", [
    ("tl.sigmoid(x) * factor", "tl.sigmoid(x)", True, "wrong values"),
    ("tl.sigmoid(x)", "tl.sigmoyd(x)", False, "sigmoyd"),
    ("BLOCK=1024", "BLOCK=1000", False, "power of 2"),
    ("return out", "return out.cpu()", True, "to the CPU"),
    ("return out", "return out.half()", True, "dtype"),
])
def test_mistakes_are_named(sandbox, old, new, compiled, says):
    v = verdict(sandbox, changed((old, new)))
    assert not v.correct and v.speedup is None and v.compiled == compiled and says in v.error, v


def test_a_kernel_that_only_copies_is_no_decoy(sandbox):
    copy = Task("copy", 0, TASK.source.replace("torch.nn.functional.silu(x + self.bias) * self.factor", "x.clone()"))
    v = verdict(sandbox, changed(("x * tl.sigmoid(x) * factor", "tl.load(x_ptr + offsets, mask=mask)")), copy)
    assert v.correct and v.coverage > 0.9, v


def test_a_transposed_convolution_is_quicker_in_channels_last_memory(sandbox):
    source = f"{IMPORTS}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n" \
        "        self.conv = nn.ConvTranspose3d(16, 32, 3, stride=2)\n\n    def forward(self, x):\n" \
        "        x = self.conv(x)\n        return torch.sigmoid(x) * 2.0\n\ndef get_inputs():\n" \
        "    return [torch.randn(8, 16, 16, 32, 32)]\n\ndef get_init_inputs():\n    return []\n"
    task = Task("convolution", 0, source)
    codes = [expert.render(expert.read(task), names).code
             for names in (expert.ALL, expert.ALL - {"channels-last-convolution"})]
    last, other = sandbox.score(task, codes)
    assert last.correct and other.correct and last.speedup > 1.2 * other.speedup, (last, other)


@pytest.mark.parametrize("batch", [2, 32])  # of the second, 2 ** 27 elements, there is no float64 run
def test_another_order_of_tf32_sums_is_right_and_bfloat16_is_not(sandbox, batch):
    source = f"{IMPORTS}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n" \
        "        self.conv = nn.Conv2d(64, 64, 3, padding=1)\n\n    def forward(self, x):\n" \
        "        x = self.conv(x)\n        return torch.sigmoid(x) * 2.0\n\ndef get_inputs():\n" \
        f"    return [torch.randn({batch}, 64, 256, 256)]\n\ndef get_init_inputs():\n    return []\n"
    task = Task("convolution", 0, source)
    code = expert.render(expert.read(task), {"fuse-pointwise-run"}).code
    call = "x = self.conv(x)"
    assert call in code
    other = code.replace(call, "x = self.conv(x.contiguous(memory_format=torch.channels_last))")
    half = code.replace(call, "x = F.conv2d(x.bfloat16(), self.conv.weight.bfloat16(), self.conv.bias.bfloat16(), "
                              "padding=1).float()")
    same, reordered, rounded = sandbox.score(task, [code, other, half])
    assert same.correct and reordered.correct and not rounded.correct, (same, reordered, rounded)


def test_torch_passed_off_as_a_kernel_is_rejected(sandbox):
    assert verdict(sandbox, TORCH).rejected == "launches no kernel of its own"


def test_an_illegal_access_costs_one_verdict(sandbox):
    bad = changed(("tl.store(out_ptr + offsets,", "tl.store(out_ptr + offsets * 1000003,"))
    broken, good = sandbox.score(TASK, [bad, HONEST + "\n# again\n"])
    assert not broken.correct and broken.error and good.correct, (broken, good)


@pytest.mark.parametrize("fault", [
    "while True: pass", "import os; os._exit(0)", "raise SystemExit(0)", "import os; os.abort()",
    "while True: print('correct ' * 10000)", "hoard = torch.zeros(1 << 37, device='cuda')",
    "bias_silu_scale[(1,)](x, x, x, 1.0, 1, 1, BLOCK=1 << 30)",
])
def test_a_fault_costs_one_verdict(fault):
    with Sandbox("cuda", trials=1, timeout=8) as box:
        began = time.monotonic()
        bad, good = box.score(TASK, [changed(("return out", fault + "\n        return out")), HONEST])
        assert not bad.correct and bad.error and good.correct, (bad, good)
        assert time.monotonic() - began < 60


def test_what_would_keep_the_others_waiting_fails_soon():
    """A forward that hangs, after 30 seconds of the GPU; a block that the compiler would work on for long, at once."""
    hangs = changed(("    tl.store", "    for i in range(n):\n        for j in range(columns):\n"
                     "            x = tl.sin(x)\n    tl.store"))
    with Sandbox("cuda", trials=1) as box:
        began = time.monotonic()
        hung, too_wide, good = box.score(TASK, [hangs, HONEST.replace("1024", "1 << 17"), HONEST])
        assert time.monotonic() - began < 60
    assert "no result within 30 s" in hung.error and not hung.correct, hung
    assert "a block of 131072 elements for 128 threads" in too_wide.error and good.correct, (too_wide, good)


CHEATS = {
    "does less after some calls": (("return out", "self.calls = getattr(self, 'calls', 0) + 1\n"
                                    "        return out if self.calls < 2 else self.last"),
                                   ("out = torch.empty_like(x)", "out = torch.empty_like(x)\n"
                                    "        if getattr(self, 'calls', 0) < 2: self.last = out")),
    "caches by shape": (("out = torch.empty_like(x)", "out = torch.empty_like(x)\n"
                         "        if getattr(self, 'n', 0) > 1: return self.last\n"
                         "        self.n, self.last = getattr(self, 'n', 0) + 1, out"),),
    "one launch for several calls": (("        bias_silu", "        self.outs = getattr(self, 'outs', []) + [out]\n"
                                      "        if len(self.outs) % 8 == 0:\n            bias_silu"),),
    "decoy": (("return out", "return torch.nn.functional.silu(x + self.bias) * self.factor"),),
    "decoy times zero": (("return out", "return torch.nn.functional.silu(x + self.bias) * self.factor + 0 * out"),),
    "kernel in another stream, not waited for, with a patched synchronize": (
        ("out = torch.empty_like(x)", "out = torch.empty_like(x)\n        torch.cuda.synchronize = lambda *a: None"),
        ("        bias_silu", "        with torch.cuda.stream(torch.cuda.Stream()):\n"
         "            torch.cuda._sleep(40000000)\n            bias_silu")),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_of_the_timed_path_are_caught(sandbox, cheat):
    v = verdict(sandbox, changed(*CHEATS[cheat]))
    assert not v.correct, v


def test_a_kernel_that_recognises_repeated_inputs_gains_nothing(sandbox):
    """Each block of it works only if the first number it reads is not that of the last time. No inputs come twice."""
    v = verdict(sandbox, changed(
        ("n, columns, BLOCK: tl.constexpr):", "n, columns, seen_ptr, BLOCK: tl.constexpr):\n"
         "    first, seen = tl.load(x_ptr + tl.program_id(0) * BLOCK), tl.load(seen_ptr + tl.program_id(0))\n"
         "    if first == seen:\n"
         "        return\n"
         "    tl.debug_barrier()\n"
         "    tl.store(seen_ptr + tl.program_id(0), first)"),
        ("self.factor = factor", "self.factor, self.seen = factor, torch.zeros(16384, device='cuda')"),
        ("x.shape[1], BLOCK", "x.shape[1], self.seen, BLOCK")))
    assert not v.correct or v.speedup < 3.6, v


def test_an_autotuned_kernel_is_timed_in_its_best_configuration(sandbox):
    configs = "triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 1024, 2048) for w in (4, 8)"
    tuned = changed(("@triton.jit", f"@triton.autotune([{configs}], key=['n'])\n@triton.jit"), (", BLOCK=1024", ""),
                    ("(triton.cdiv(n, 1024),)", "lambda meta: (triton.cdiv(n, meta['BLOCK']),)"))
    v = verdict(sandbox, tuned)
    assert v.correct and 2.0 < v.speedup < 3.6, v


def test_random_numbers_state_and_libraries_are_those_of_the_reference():
    """Operators that a GPU takes apart in its own way: dropout, batch norm in training, an LSTM."""
    kernel = HONEST[HONEST.index("import triton\n"):HONEST.index("class ModelNew")].replace(
        "tl.store(out_ptr + offsets, x * tl.sigmoid(x) * factor", "tl.store(out_ptr + offsets, tl.maximum(x, 0.0) * 2")
    with Sandbox("cuda", trials=3, timeout=40) as box:
        for layer in ("nn.Dropout(0.5)", "nn.BatchNorm1d(64)", "nn.LSTM(64, 64, batch_first=True)"):
            task = small_task(layer, "y = self.layer(x)\n        y = y[0] if isinstance(y, tuple) else y\n"
                              "        return torch.relu(y) * 2", inputs="torch.randn(512, 64, 64)",
                              state=f"self.layer = {layer}")
            code = replaced(candidates.copied(task), ("class ModelNew", kernel + "class ModelNew"), (
                "return torch.relu(y) * 2", "out = torch.empty_like(y)\n        n = y.numel()\n"
                "        bias_silu_scale[(n // 1024,)](y, torch.zeros(1, device='cuda'), out, 2.0, n, 1, BLOCK=1024)\n"
                "        return out"))
            v = verdict(box, code, task)
            assert v.correct and 0.9 < v.speedup < 2, (layer, v)


def test_recycled_memory_holds_the_expected_output_only_in_a_naive_check(sandbox):
    x = torch.randn(1024, 2048, device="cuda")
    expected = torch.sigmoid(x).cpu()  # the block on the GPU is free again
    assert torch.equal(torch.empty_like(x).cpu(), expected)
    assert not verdict(sandbox, IMPORTS + model("torch.empty_like(x)")).correct
    assert not verdict(sandbox, changed(("        bias_silu", "        if False: bias_silu"))).correct


CUDA = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
__global__ void run(const float* x, const float* bias, float* out, float factor, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    long i = blockIdx.y * (long)columns + column;
    if (column < columns) { float v = x[i] + bias[column]; out[i] = v / (1.0f + expf(-v)) * factor; }
}
torch::Tensor fused(torch::Tensor x, torch::Tensor bias, double factor) {
    auto out = torch::empty_like(x);
    run<<<dim3((x.size(1) + 255) / 256, x.size(0)), 256>>>(x.data_ptr<float>(), bias.data_ptr<float>(),
                                                           out.data_ptr<float>(), factor, x.size(1));
    return out;
}
"""
header = "torch::Tensor fused(torch::Tensor x, torch::Tensor bias, double factor);"
module = load_inline(name="fused", cpp_sources=header, cuda_sources=source, functions=["fused"])

''' + model("module.fused(x, self.bias, self.factor)")


def test_cuda_sources_are_compiled_and_scored(sandbox):
    good, bad, waits, remembers = sandbox.score(TASK, [CUDA, CUDA.replace("expf(-v)", "expf(-v"), replaced(
        CUDA, ("        return module", "        torch.cuda.synchronize()\n        return module")), replaced(
        CUDA, ("        return module", "        key = x.data_ptr(), x[0, 0].item()\n        if key not in KNOWN:\n"
                                        "            KNOWN[key] = module"),
        ("\nmodule = ", "\nKNOWN = {}\nmodule = ")) + "        return KNOWN[key]\n"])
    assert good.correct and 1.7 < good.speedup < 3.6 and good.coverage > 0.8, good
    assert not bad.correct and not bad.compiled, bad
    assert waits.correct and 0.7 < waits.speedup < 3.6, waits  # cannot be captured, so the reference is not either
    assert not remembers.correct or remembers.speedup < 3.6, remembers  # each call has inputs of its own
    after = verdict(sandbox, f"{HONEST}# after it\n")
    assert after.correct and 2.0 < after.speedup < 3.6, after


def test_a_large_task_is_judged_between_others(sandbox):
    """Its inputs and outputs take 0.7 GB each; little else fits beside it, so references of others may have to go."""
    large = Task("large", 0, TASK.source.replace("torch.randn(8192, 2048)", "torch.randn(90000, 2048)"))
    for task, note in ((TASK, "before"), (large, ""), (TASK, "after")):
        v = verdict(sandbox, f"{HONEST}# {note}\n", task)
        assert v.correct and 2.0 < v.speedup < 3.6, v
