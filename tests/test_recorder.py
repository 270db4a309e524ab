"""What a candidate's own Python may look like, what of it is recorded, and what is refused, with its line.

Host code around honest kernels finds an H200, allocates and launches as it likes. What a forward does only for some
calls, or only because values are known, is refused.
"""

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from candidates import agrees, copied, fails, indent, passes, problem, replaced, small_task, solution, verdict
from judge.measured import MOST_GLOBALS, bytes_of_globals
from tasks import Task

# ---------------------------------------------------------------------------------------------------------------------
# Host code that doubles x by this kernel

FLOATS = "torch.randn(64, 64)"
DOUBLE = """
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
"""
TASK = problem("x * 2", FLOATS)
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
    passes(box, problem(f"[{', '.join(['x * 2'] * len(FORWARDS))}]", FLOATS),
           solution(DOUBLE + functions, f"return [{calls}]"))


def model(body=NEW + CALL, more=""):
    return f"\nclass ModelNew(nn.Module):\n{indent(more)}    def forward(self, x):\n{indent(body, 8)}"


HEAD = "import torch\nimport torch.nn as nn\nimport triton\nimport triton.language as tl\n"
LOADED = "tl.load(x + o, mask=o < n)"
JIT = "@triton.jit"
TUNED = CALL.replace("(16,)", "lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)").replace(", BLOCK=256", "")


def doubling(*changes, head="", body=NEW + CALL) -> str:
    """A whole file: what stands before the kernel, the kernel with these changes, and a model."""
    return HEAD + head + replaced(DOUBLE, *changes) + model(body)


CONFIGS = "[triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 256) for w in (4, 8)], key=['n']"
INDUCTOR = """
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
"""
INDUCTOR_CALLS = """
assert_size_stride(x, (64, 64), (64, 1))
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    out = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    get_raw_stream(0)
    double[(16,)](x, out, 4096, BLOCK=256, num_warps=4, num_stages=1)
return out"""
SOURCES = {
    "a byte order mark": "\ufeff" + doubling(),
    "inspect": doubling((JIT, f"@triton.autotune({CONFIGS}, **KEPT)\n{JIT}"), body=NEW + TUNED, head=(
        "import inspect\nKEPT = {'cache_results': True} if 'cache_results' in "
        "inspect.signature(triton.autotune).parameters else {}\n")),
    "what inductor writes": doubling(head=INDUCTOR, body=INDUCTOR_CALLS),
    "a helper that is not launched and names something missing": doubling(head=(
        "@triton.jit\ndef first_idea(x):\n    tl.store(x, not_written_yet(tl.load(x)))\n\n")),
    "a hook of each configuration": doubling(
        (JIT, f"@triton.autotune({CONFIGS.replace('num_warps=w', 'num_warps=w, pre_hook=zero')})\n{JIT}"),
        (f"{LOADED} * 2", f"tl.load(out + o, mask=o < n) + {LOADED} * 2"), body=NEW + TUNED,
        head="def zero(arguments):\n    arguments['out'].zero_()\n"),
    "a hook of a kernel": doubling(
        ("    tl.store(out + o, ", "    tl.atomic_add(out + o, "), body=(
            "if not double.pre_run_hooks:\n    double.add_pre_run_hook(zero)\n" + NEW + CALL),
        head="def zero(x, out, n, **_):\n    out.zero_()\n"),
    "a compiled helper that is not called": doubling(head="@torch.compile(dynamic=True)\ndef idea(x):\n    pass\n\n"),
    "a buffer of bytes": doubling((f"{LOADED} * 2", f"({LOADED} > 0).to(tl.float32).to(tl.float8e4nv)"), body=(
        "signs = torch.empty_like(x, dtype=torch.float8_e4m3fn)\n" + CALL.replace("x, out", "x, signs").replace(
            "return out", "return 2 * x.abs() * (2 * signs.float() - 1)"))),
    "a heuristic": doubling((JIT, f"@triton.heuristics({{'BLOCK': lambda a: 256 if a['n'] > 9 else 1}})\n{JIT}"),
                            body=NEW + TUNED),
    "jit is called": doubling((JIT, ""), (" * 2, mask=o < n)", " * 2, mask=o < n)\n\ndouble = triton.jit(double)")),
    "constants on the left, with a sign, as a dtype": doubling(
        (f"{LOADED} * 2", f"(-MINUS_TWO * {LOADED}).to(KIND)"), ("BLOCK: tl.constexpr", (
            "BLOCK: tl.constexpr, MINUS_TWO: tl.constexpr = -2, KIND: tl.constexpr = tl.float32"))),
    "a branch that a constant switches off": doubling(
        ("    tl.store", "    if BLOCK < 0:\n        not_there(x)\n    tl.store")),
    "a tensor descriptor made by the host": doubling(
        ("(x, out, n, BLOCK", "(x, out, n, d, BLOCK"), (LOADED, "tl.ravel(d.load([tl.program_id(0) * 4, 0]))"),
        body=NEW + CALL.replace("x.numel(),", "x.numel(), TensorDescriptor(x, x.shape, x.stride(), [4, 64]),"),
        head="from triton.tools.tensor_descriptor import TensorDescriptor\n"),
    "a tuple of tensors": doubling(("(x, out, n, BLOCK", "(tensors, n, BLOCK"), ("(out + o", "(tensors[1] + o"),
                                   ("(x + o", "(tensors[0] + o"), body=NEW + CALL.replace("x, out", "(x, out)")),
}


def test_of_a_row_for_each_program_the_largest_has_its_place(box):
    """Places are the same in all programs, values are not."""
    kernel = """
@triton.jit
def largest(x, out, BLOCK: tl.constexpr):
    row = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.argmax(row, 0))
"""
    passes(box, problem("torch.argmax(x, 1)", FLOATS), solution(kernel, (
        "out = torch.empty(64, dtype=torch.int64, device=x.device)\nlargest[(64,)](x, out, BLOCK=64)\nreturn out")))


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
    "a launch option": (doubling(body=NEW + CALL.replace("BLOCK=256", "BLOCK=256, launch_pdl=True")),
                        "no argument or launch option launch_pdl", ""),
    "a compiler": (doubling(body="return torch.compile(torch.mul)(x, 2)"), "uses torch.compile", "torch.compile"),
    "CUDA C++": ("from torch.utils.cpp_extension import load_inline\nkernel = load_inline('x', '')\n" + doubling(),
                 "write the kernel in Triton", "load_inline('x'"),
    "no text of Python": (doubling(body="return ("), "SyntaxError", "return ("),
    "another class": (doubling().replace("ModelNew", "Model"), "no class ModelNew", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name_and_line(box, name):
    code, words, line = REFUSED[name]
    assert line in fails(box, TASK, code, words).excerpt


# ---------------------------------------------------------------------------------------------------------------------
# From call to call

AFFINE = small_task("affine", "return torch.relu(self.norm(x)) * self.scale", inputs="torch.randn(32, 64)", state=(
    "self.norm, self.scale = torch.nn.BatchNorm1d(64).eval(), torch.nn.Parameter(torch.ones(64))"))
FUSED = HEAD + '''
@triton.jit
def affine(x, scale, shift, out):
    c = tl.arange(0, 64)
    o = tl.program_id(0) * 64 + c
    tl.store(out + o, tl.maximum(tl.load(x + o) * tl.load(scale + c) + tl.load(shift + c), 0.0))

def fused(x, scale, shift):
    out = torch.empty_like(x)
    affine[(32,)](x, scale, shift, out)
    return out
'''
FOLD = '''self.scale = nn.Parameter(torch.ones(64))
self.norm = nn.BatchNorm1d(64).eval()
self.by = (self.norm.weight / torch.sqrt(self.norm.running_var + 1e-5)).detach()
self.plus = (self.norm.bias - self.norm.running_mean * self.by).detach()'''
RIGHT = "fused(x, self.by, self.plus) * self.scale"


def affine(forward, more="", state=FOLD):
    """A candidate for AFFINE with these statements in forward; more: in the constructor."""
    return FUSED + model(forward, f"def __init__(self):\n    super().__init__()\n{indent(state + chr(10) + more)}")


HONEST_ONES = {  # name: candidate. All of them have values of parameters in them, so parameters are not perturbed
    "batch norm folded in the constructor": affine("return " + RIGHT),
    "a buffer that every call fills": affine(
        "self.out.copy_(x)\nreturn fused(self.out, self.by, self.plus) * self.scale", "self.out = torch.zeros(32, 64)"),
    "a parameter that the host reads": affine(f"return {RIGHT} if self.scale.abs().sum().item() > 0 else x"),
}


@pytest.mark.parametrize("name", HONEST_ONES)
def test_honest_candidates_that_compute_with_parameters_pass(box, name):
    found = passes(box, AFFINE, HONEST_ONES[name])
    assert found.coverage > 0.2 and "its parameters were not perturbed" in found.note, found


def test_two_recordings_must_be_equal(box):
    """One that draws at random may be recorded alike twice, so several are tried."""
    counting = affine(f"self.calls += 1\nreturn {RIGHT} * self.calls", "self.calls = 0")
    fails(box, AFFINE, counting, "forward keeps state")
    drawing = affine(f"import os\nreturn {RIGHT} if os.urandom(1)[0] < 128 else {RIGHT} + 0")
    found = box.score(AFFINE, [f"{drawing}# {i}\n" for i in range(14)])
    assert any("forward keeps state" in (v.error or "") for v in found), found


def test_a_kernel_that_does_less_after_the_first_call_fails(box):
    """It looks at a flag."""
    once = affine(
        "affine[(32,)](x, self.by, self.plus, self.out, self.done)\nself.done += 1\nreturn self.out * self.scale",
        "self.done = torch.zeros(1, dtype=torch.int32)\nself.out = torch.zeros(32, 64)")
    fails(box, AFFINE, replaced(once, ("shift, out):", "shift, out, done):"), (
        "0.0))", "0.0), mask=tl.load(done) == 0)")), "wrong values")


def test_buffers_that_the_reference_changes_are_compared_as_they_change(box):
    """A forward that is right at the first call only: the reference counts up."""
    count = "self.register_buffer('n', torch.zeros(1))"
    task = small_task("counts", "self.n += 1\n        return x * self.n", state=count, inputs=FLOATS)
    agrees(box, task, copied(task))
    fails(box, task, replaced(copied(task), ("x * self.n", "x * 1.0")), "wrong values")
    twice = Task("twice", 0, replaced(task.source, ("self.n += 1\n", "self.n.mul_(0).add_(1)\n")))
    agrees(box, twice, replaced(copied(twice), ("x * self.n", "x * 1.0")))


@triton.jit
def roots(x):
    tl.store(x, tl.sqrt(tl.load(x)))


def test_a_binary_says_how_much_memory_of_its_own_it_has(monkeypatch, tmp_path):
    """Libdevice asks for switches by their names, which are global variables. A kernel's text can smuggle in more."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def memory(number):
        source = triton.compiler.ASTSource(roots, {"x": "*fp32"}, {})
        options = {"num_warps": number}  # or the second would be the first, which Triton keeps
        return bytes_of_globals(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"])

    assert memory(1) < MOST_GLOBALS
    make = CUDABackend.make_ptx
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *arguments: make(*arguments).replace(
        ".visible .entry", ".global .align 16 .b8 MEMO[65536];\n.visible .entry"))
    assert memory(2) >= 65536
