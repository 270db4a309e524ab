"""What a candidate's own Python may look like, what of it is recorded, and what is refused, with its line.

Host code around honest kernels finds an H200, allocates and launches as it likes. What a forward does only for some
calls, or only because values are known, is refused.
"""

import pytest

from candidates import APPLY, by_rows, fails, indent, passes, problem, replaced, solution, verdict

# ---------------------------------------------------------------------------------------------------------------------
# Host code that doubles x by this kernel

DOUBLE = replaced(APPLY, ("apply", "double"), ("RESULT", "v * 2"))
TASK = problem("x * 2")
CALL = "double[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out"
NEW = "out = torch.empty_like(x)\n"
FORWARDS = {  # bodies of a forward: how it allocates, asks and launches
    "grid of a lambda": NEW + "grid = lambda META: (triton.cdiv(x.numel(), META['BLOCK']),)\n" +
                        CALL.replace("(16,)", "grid"),
    "keywords": NEW + "double[(16, 1, 1)](x=x, out=out, n=x.numel(), BLOCK=256, num_warps=8, num_stages=3)\nreturn out",
    "to the device": "scale = torch.tensor(2.0, device=x.device)\nx = x.to('cuda', non_blocking=True)\n" + NEW + CALL,
    "a fallback without a GPU": "if not torch.cuda.is_available() or not x.is_cuda:\n    return x * 2\n" + NEW + CALL,
    **{f"with {context}": f"with {context}:\n{indent(NEW + CALL)}" for context in (
        "torch.no_grad()", "torch.cuda.device(x.device.index)", "torch.cuda.device_of(x)", "torch.device('cuda')",
        "torch.cuda.stream(torch.cuda.current_stream())", "torch.autocast('cuda', enabled=False)")},
    **{f"assert {question}": f"assert {question}\n{NEW}{CALL}" for question in (
        "x.device.type == 'cuda' and x.is_cuda", "x.get_device() == 0 and x.device == torch.device('cuda', 0)",
        "torch.cuda.get_device_properties(x.device).multi_processor_count == 132", "torch.cuda.is_bf16_supported()",
        "torch.cuda.get_device_capability() >= (9, 0) and 'H200' in torch.cuda.get_device_name(0)",
        "triton.runtime.driver.active.get_current_target().arch == 90", "torch.version.cuda and not torch.version.hip",
        "triton.runtime.driver.active.utils.get_device_properties(0)['multiprocessor_count'] == 132",
        "x.is_contiguous() and x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1",
        "torch.conv2d(x.view(1, 4, 32, 32).permute(0, 3, 1, 2), x.new_ones(8, 32, 3, 3)).stride(1) == 1",  # cuDNN
        "x.element_size() == 4 and x.nbytes == 4 * x.numel() and x.data_ptr() % 16 == 0")},
}


def test_host_code_finds_an_h200(box):
    """All in one candidate; the error shows the line that is not like on a GPU."""
    functions = "".join(f"def run{i}(x):\n{indent(body)}" for i, body in enumerate(FORWARDS.values()))
    calls = ", ".join(f"run{i}(x)" for i in range(len(FORWARDS)))
    task = problem(f"[{', '.join(['x * 2'] * len(FORWARDS))}]")
    passes(box, task, solution(DOUBLE + functions, f"return [{calls}]"))


LOADED = "tl.load(x + o, mask=o < n)"
JIT = "@triton.jit"
TUNED = CALL.replace("(16,)", "lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)").replace(", BLOCK=256", "")


def doubling(*changes, head="", body=NEW + CALL) -> str:
    """A whole file: what stands before the kernel, the kernel with these changes, and a model."""
    return solution(head + replaced(DOUBLE, *changes), body)


CONFIGS = "[triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 256) for w in (4, 8)], key=['n']"
INDUCTOR = """
from torch._inductor.runtime import triton_helpers
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
"""
INDUCTOR_CALLS = """
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    out = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    get_raw_stream(0)
    double[(16,)](x, out, 4096, BLOCK=256, num_warps=4, num_stages=1)
return out"""
SOURCES = {
    "a byte order mark": "\ufeff" + doubling(),
    "what inductor writes": doubling(head=INDUCTOR, body=INDUCTOR_CALLS),
    "a hook of each configuration": doubling(
        (JIT, f"@triton.autotune({CONFIGS.replace('num_warps=w', 'num_warps=w, pre_hook=zero')})\n{JIT}"),
        ("v * 2", "tl.load(out + o, mask=o < n) + v * 2"), body=NEW + TUNED,
        head="def zero(arguments):\n    arguments['out'].zero_()\n"),
    "a hook of a kernel": doubling(
        ("    tl.store(out + o, ", "    tl.atomic_add(out + o, "), body=(
            "if not double.pre_run_hooks:\n    double.add_pre_run_hook(zero)\n" + NEW + CALL),
        head="def zero(x, out, n, **_):\n    out.zero_()\n"),
    "a compiled helper that is not called": doubling(head="@torch.compile(dynamic=True)\ndef idea(x):\n    pass\n\n"),
    "a buffer of bytes": doubling(("v * 2", "(v > 0).to(tl.float32).to(tl.float8e4nv)"), body=(
        "signs = torch.empty_like(x, dtype=torch.float8_e4m3fn)\n" + CALL.replace("x, out", "x, signs").replace(
            "return out", "return 2 * x.abs() * (2 * signs.float() - 1)"))),
    "a heuristic": doubling((JIT, f"@triton.heuristics({{'BLOCK': lambda a: 256 if a['n'] > 9 else 1}})\n{JIT}"),
                            body=NEW + TUNED),
    "an argument that is a dtype": doubling(
        (LOADED, f"{LOADED}.to(KIND)"), ("constexpr):", "constexpr, KIND: tl.constexpr = tl.float32):")),
    "a tensor descriptor made by the host": doubling(
        ("(x, out, n, BLOCK", "(x, out, n, d, BLOCK"), (LOADED, "tl.ravel(d.load([tl.program_id(0) * 4, 0]))"),
        body=NEW + CALL.replace("x.numel(),", "x.numel(), TensorDescriptor(x, x.shape, x.stride(), [4, 64]),"),
        head="from triton.tools.tensor_descriptor import TensorDescriptor\n"),
    "a tuple of tensors": doubling(("(x, out, n, BLOCK", "(tensors, n, BLOCK"), ("(out + o", "(tensors[1] + o"),
                                   ("(x + o", "(tensors[0] + o"), body=NEW + CALL.replace("x, out", "(x, out)")),
}


def test_of_a_row_for_each_program_the_largest_has_its_place(box):
    """Places are the same in all programs, values are not."""
    passes(box, problem("torch.argmax(x, 1)"), by_rows("tl.argmax(v, 0)", dtype="torch.int64"))


@pytest.mark.parametrize("name", SOURCES)
def test_files_that_double(box, name):
    passes(box, TASK, SOURCES[name])


def test_of_an_autotuned_kernels_configurations_the_cheapest_counts(box):
    tuned = verdict(box, TASK, doubling((JIT, f"@triton.autotune({CONFIGS})\n{JIT}"), body=NEW + TUNED))
    small = doubling(body=NEW + CALL.replace("(16,)", "(256,)").replace("BLOCK=256", "BLOCK=16"))
    assert tuned.candidate_ms == verdict(box, TASK, doubling()).candidate_ms < verdict(box, TASK, small).candidate_ms


# ---------------------------------------------------------------------------------------------------------------------
# Refused

READ_BACK = "reads computed values back to the host"
REFUSED = {  # name: (file, words, does the excerpt show this line?)
    "if": (doubling(body="if x.sum() > 0:\n    x = -x\n" + NEW + CALL), READ_BACK, "if x.sum()"),
    "a mask": (doubling(body="x[x > 0]\n" + NEW + CALL), READ_BACK, "x[x > 0]"),
    "a global that is no constexpr": (doubling(("* 2", "* TWO"), head="TWO = 2\n"), "TWO", "* TWO"),
    "a missing argument": (doubling(body=NEW + CALL.replace(", BLOCK=256", "")), "BLOCK", "double["),
    "a compiler": (doubling(body="return torch.compile(torch.mul)(x, 2)"), "uses torch.compile", "torch.compile"),
    "CUDA C++": ("from torch.utils.cpp_extension import load_inline\nkernel = load_inline('x', '')\n" + doubling(),
                 "write the kernel in Triton", "load_inline('x'"),
    "another class": (doubling().replace("ModelNew", "Model"), "no class ModelNew", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name_and_line(box, name):
    code, words, line = REFUSED[name]
    assert line in fails(box, TASK, code, words).excerpt


# ---------------------------------------------------------------------------------------------------------------------
# From call to call

SCALE = "self.scale = torch.nn.Parameter(torch.rand(64) + 0.5)"
SCALED = problem("x / self.scale", state=SCALE)
FUSED = '''
@triton.jit
def scaled(x, by, out):
    c = tl.arange(0, 64)
    o = tl.program_id(0) * 64 + c
    tl.store(out + o, tl.load(x + o) * tl.load(by + c))

def fused(x, by):
    out = torch.empty_like(x)
    scaled[(64,)](x, by, out)
    return out
'''


def folded(forward="return fused(x, self.by)", more=""):
    """A candidate for SCALED that divides once, with these statements in forward; more: in the constructor."""
    return solution(FUSED, forward, f"{SCALE}\nself.by = (1 / self.scale).detach()\n{more}")


HONEST_ONES = {  # name: candidate. All of them have values of parameters in them, so parameters are not perturbed
    "parameters folded in the constructor": folded(),
    "a buffer that every call fills": folded(
        "self.out.copy_(x)\nreturn fused(self.out, self.by)", "self.out = torch.zeros(64, 64)"),
    "a parameter that the host reads": folded("return fused(x, 1 / self.scale) if self.scale.sum().item() > 0 else x"),
}


@pytest.mark.parametrize("name", HONEST_ONES)
def test_honest_candidates_that_compute_with_parameters_pass(box, name):
    found = passes(box, SCALED, HONEST_ONES[name])
    assert found.coverage > 0.2 and "its parameters were not perturbed" in found.note, found


def test_two_recordings_must_be_equal(box):
    """One that draws at random may be recorded alike twice, so several are tried."""
    counting = folded("self.calls += 1\nreturn fused(x, self.by) * self.calls", "self.calls = 0")
    fails(box, SCALED, counting, "forward keeps state")
    drawing = folded("import os\ny = fused(x, self.by)\nreturn y if os.urandom(1)[0] < 128 else y + 0")
    found = box.score(SCALED, [f"{drawing}# {i}\n" for i in range(14)])
    assert any("forward keeps state" in (v.error or "") for v in found), found
