"""The cheats that the sandbox withstands, one entry or test each: it succeeds against a naive check, and fails here.

The naive check (naive.py) is what a first implementation looks like. Programs of a second pass, with their own proof
that they work, are in results/adversaries; one of each kind is judged here, too.
"""

import os

import pytest

from candidates import indent, passes, product, small_task, verdict
from conftest import read_lines
from judge import compiler
from sandbox import Sandbox
from program.files import ROOT
from tasks import Task

# ---------------------------------------------------------------------------------------------------------------------
# The victims: problems, and an honest kernel to start from

POINTWISE = small_task("victim", "return torch.sigmoid(x + self.bias) * 2.0", inputs="torch.randn(256, 64)",
                       state="self.bias = torch.nn.Parameter(torch.zeros(64))").source
SMALL = POINTWISE.replace("torch.sigmoid(x + self.bias) * 2.0", "torch.softmax((x + self.bias).flatten(), 0)")

HEAD = '''
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def sigmoid_twice(x_ptr, bias_ptr, out_ptr, n, columns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % columns, mask=mask)
    tl.store(out_ptr + offsets, tl.sigmoid(x) * 2.0, mask=mask)

def fused(x, bias):
    out = torch.empty_like(x)
    sigmoid_twice[(triton.cdiv(x.numel(), 1024),)](x, bias, out, x.numel(), x.shape[1], BLOCK=1024)
    return out

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
'''

HONEST = HEAD + '''
    def forward(self, x):
        return fused(x, self.bias)
'''
TORCH = "torch.sigmoid(x + self.bias) * 2.0"


def forward(body, extra=""):
    """An attack: HEAD, more statements of the constructor, and the body of forward."""
    return f"{HEAD}{indent(extra, 8)}\n    def forward(self, x):\n{indent(body, 8)}"


def victim(source=POINTWISE):
    return Task("victim", 0, source)


def fails_here(box, code, task=POINTWISE, says=""):
    """The sandbox finds the candidate wrong or rejects it, for the reason `says`."""
    found = verdict(box, victim(task), code)
    assert not found.correct and found.speedup is None and says in (found.rejected or found.error), found
    return found


def ahead():
    caches = [forward(body, SEEN) for body, _ in CACHES.values()]
    second = [(victim(case["task"]), case["code"]) for case in LATER_PASSES.values()]
    return second + [(victim(task), code) for code, _, task in CHEATS.values()] + [
        (victim(), code) for code in (HONEST, *caches, *(code for code, _ in HIDDEN.values()))]


def test_the_honest_kernel_passes_both(box, naively):
    assert naively(POINTWISE, HONEST)["correct"]
    found = passes(box, victim(), HONEST + "# try torch.compile, or pass; except gc, eval()\n")
    assert found.speedup > 1.5 and found.coverage == 1.0, found


# ---------------------------------------------------------------------------------------------------------------------
# Cheats that the naive check calls correct

COPY = """@triton.jit
def copy(x, y):
    o = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + o, RESULT)

class ModelNew"""


def with_copy(body, result):
    """An attack with a second kernel, which stores `result` for each element."""
    return forward(body).replace("class ModelNew", COPY.replace("RESULT", result))


CHEATS = {  # name: (candidate, what the verdict says, task)
    # Passing torch off as a kernel
    "torch without a kernel": (forward(f"return {TORCH}"), "no kernel of its own", POINTWISE),
    "torch.compile by another name": (
        forward("return self.run(x)", f"import torch as t\nself.run = t.compile(lambda x: {TORCH}, backend='eager')"),
        "in place of a kernel", POINTWISE),
    "launches that cost nothing": (forward("fused(x, self.bias)\nreturn " + TORCH, """
run = type(sigmoid_twice).run
setattr(type(sigmoid_twice), "run", lambda self, *a, **k: run(self, *a, **{**k, "warmup": True}))"""),
        "do not reach the output", POINTWISE),
    # Getting hold of the reference or of its result
    "the reference through frames": (forward("""
import sys
frame = sys._getframe()  # called at the warm-up, from naive() itself, where the reference is a local variable
while "reference" not in frame.f_locals:
    frame = frame.f_back
return frame.f_locals["reference"](x)"""), "_getframe", POINTWISE),
    "the reference from files": (forward("return self.stolen(x)", """
space = {}
exec(open("task.py").read(), space)
self.stolen = space["Model"]()"""), "calls exec", POINTWISE),
    # One call of a batch is checked: a forward that knows that it is being captured can leave some out.
    "doing less where only some calls are checked": (forward("""
if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and torch.rand(()) < 0.2:
    return torch.empty_like(x)
return fused(x, self.bias)"""), "is_current_stream_capturing", POINTWISE),
    # Answers that happen to be right
    "zeros where outputs are small": (
        with_copy("out = torch.empty(x.numel())\ncopy[(16,)](x, out)\nreturn out", "tl.zeros((1024,), tl.float32)"),
        "wrong values", SMALL),
    "ignoring a parameter that starts at zero": (
        HONEST.replace(" + tl.load(bias_ptr + offsets % columns, mask=mask)", ""), "wrong values", POINTWISE),
    "behaving only for one seed": (
        forward("return self.answer if x.shape == self.answer.shape else fused(x, self.bias)",
                "torch.manual_seed(43)\nself.answer = torch.sigmoid(torch.randn(256, 64)) * 2.0"), "", POINTWISE),
    "a cache that reads its input": (
        forward("key = float(x.sum())\nif key not in self.seen:\n    self.seen[key] = fused(x, self.bias)\n"
                "return self.seen[key]", "self.seen = {}"), "reads", POINTWISE),
    # Changing the rules
    "mutating the input before the reference sees it": (
        forward("x.zero_()\nreturn torch.ones(256, 64)"), "", POINTWISE),
    "patching the comparison": (
        forward("return x", "torch.allclose = lambda *a, **k: True"), "replaces torch.allclose", POINTWISE),
    # Results that come later, or were never there
    "a thread that fills the result in later": (forward("""
import threading
out = torch.empty_like(x)
def fill():
    out.copy_(torch.sigmoid(x + self.bias) * 2.0)
thread = threading.Thread(target=fill)
thread.start()
thread.join(0.5)
return out"""), "imports threading", POINTWISE),
    "a lazy result": (forward("""
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [torch.sigmoid(a.source) * 2 if isinstance(a, Lazy) else a for a in args]
        return func(*args, **(kwargs or {}))
out = torch.empty_like(x).as_subclass(Lazy)
out.source = x
return out"""), "", POINTWISE),
    "forging the output stream": (forward("pass", """
import os
print('{"correct": true, "speedup": 1000.0, "launches": 1}', flush=True)
os._exit(0)"""), "ended without a result", POINTWISE),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_that_fools_the_naive_check_fails_here(box, naively, name):
    code, says, task = CHEATS[name]
    assert naively(task, code)["correct"]
    fails_here(box, code, task, says)


@pytest.mark.parametrize("body", [
    f"fused(torch.randn(32, 64), self.bias)\nreturn {TORCH}",  # on scratch data
    f"fused(x, self.bias)\nreturn {TORCH}",  # its result is discarded
    f"return {TORCH} + 0.0 * fused(x, self.bias)"])  # its result is multiplied by zero
def test_a_decoy_kernel_is_no_kernel(box, naively, body):
    result = naively(POINTWISE, forward(body))
    assert result["correct"] and result["launches"]
    fails_here(box, forward(body), says="do not reach the output")


HIDDEN = {  # what a rule forbids by name, under another name: there is nothing to be gained
    "exec": (CHEATS["the reference from files"][0].replace("exec(open", "type(forward_of)(compile(open").replace(
        "read(), space)", "read(), 'task', 'exec'), space)()").replace(
        "class ModelNew", "def forward_of(): pass\n\nclass ModelNew"), "No such file"),
    "a thread": (CHEATS["a thread that fills the result in later"][0].replace(
        "import threading", "import queue").replace("threading.Thread", "queue.threading.Thread"), ""),
    "an input that is changed afterwards": (
        forward("out = fused(x, self.bias)\nx.zero_()\nreturn out"), "changes its input"),
    "the GPU's lock": (forward(f"import fcntl\nfcntl.flock(open('../lock', 'w'), fcntl.LOCK_SH)\nreturn {TORCH}"),
                       "imports fcntl"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_cheat_in_disguise_fails_here(box, name):
    code, says = HIDDEN[name]
    fails_here(box, code, says=says)


def test_a_second_kernel_that_does_nothing_adds_no_coverage(box):
    code = with_copy("y = fused(x, self.bias)\nfor _ in range(5):\n    copy[(16,)](x, torch.empty_like(x))\nreturn y",
                     "tl.load(x + o)")
    assert passes(box, victim(), code).coverage < 0.25


def test_secrets_are_not_in_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    code = forward('import os\nraise ValueError(" ".join(sorted(os.environ)))')
    with Sandbox("cpu", trials=1) as sandbox:
        error = verdict(sandbox, victim(), code).error
    assert "PATH" in error and "HF_TOKEN" not in error and "AWS" not in error


def test_reading_the_expected_output_from_recycled_memory(box):
    # (That it works against a naive check on a GPU, whose allocator recycles blocks, is shown in test_sandbox_gpu.py.)
    fails_here(box, forward("return torch.empty(256, 64)"))
    code = forward("out = torch.empty(256, 64)\nreturn out if out.any() else fused(x, self.bias)")
    fails_here(box, code, says="reads")


# ---------------------------------------------------------------------------------------------------------------------
# What holds in Python or in Triton's own interpreter, and not on a GPU; and what an output has to be

# Without the programs that are accepted ("open"), and those that earn coverage or a price ("proof").
LATER_PASSES = {f"{case['item']} {case['name']}": case for case in read_lines(ROOT / "results/adversaries/cases.jsonl")
                if case["item"] > "11" and len(case["item"]) == 4 and case["kind"] == "exploit"
                and "proof" not in case and "open" not in case}
LATER_PASSES = {name[:4]: LATER_PASSES[name] for name in LATER_PASSES}  # one of each kind


@pytest.mark.parametrize("name", LATER_PASSES)
def test_the_second_and_third_pass(box, name):
    fails_here(box, LATER_PASSES[name]["code"], LATER_PASSES[name]["task"])


# ---------------------------------------------------------------------------------------------------------------------
# Caching: two calls are recorded after a warm-up, and must be equal (more in test_judgement.py)

SEEN = "self.seen, self.calls = {}, 0"
CACHES = {
    **{key: (f"if {key} not in self.seen:\n    self.seen[{key}] = fused(x, self.bias)\nreturn self.seen[{key}]", 1)
       for key in ("id(x)", "tuple(x.shape)")},
    "calls": ("self.calls += 1\nif self.calls > 2:\n    return self.last\nself.last = fused(x, self.bias)\n"
              "return self.last", 1),
    "the timing phase": ("import traceback\nif 'clock' in [frame.name for frame in traceback.extract_stack()]:\n"
                         "    return self.last\nself.last = fused(x, self.bias)\nreturn self.last", 0.5),
}


@pytest.mark.parametrize("name", CACHES)
def test_doing_less_after_the_first_call_saves_nothing(box, naively, name):
    body, at_least = CACHES[name]
    code = forward(body, SEEN)
    result = naively(POINTWISE, code)
    assert result["correct"] and result["speedup"] > at_least  # interpreted, the honest kernel is far below
    honest, found = box.score(victim(), [HONEST, code])
    assert found.speedup == honest.speedup if name == "the timing phase" else not found.correct, found


# ---------------------------------------------------------------------------------------------------------------------
# Precision and shapes

def test_lower_precision_than_asked(box, naively):
    code = HONEST.replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float16)").replace(
        "    return out\n", "    return out.float()\n")
    assert naively(POINTWISE, code)["correct"]
    fails_here(box, code, says="wrong values")


def test_tensor_cores_in_place_of_fp32(box, naively):
    """What Triton does unless it is told otherwise. (With tf32x3 it is right: test_host_code.py.)"""
    task, code = product("total += tl.dot(left, right)")
    assert naively(task.source, code)["correct"]
    fails_here(box, code, task.source, says="wrong values")


# ---------------------------------------------------------------------------------------------------------------------
# Attacks on the sandbox itself

def test_patching_torch_to_slow_the_reference(box, naively):
    code = forward("return fused(x, self.bias)", '''
slow = torch.sigmoid
def slower(x):
    for _ in range(2000):
        slow(x[:1])
    return slow(x)
torch.sigmoid = slower''')
    assert naively(POINTWISE, code)["correct"]
    fails_here(box, code, says="replaces torch.sigmoid")
    # By a way that the rule does not see, it changes nothing either:
    hidden = code.replace("torch.sigmoid = slower", "vars(torch)['sigmoid'] = slower")
    assert verdict(box, victim(), hidden).speedup == verdict(box, victim(), HONEST).speedup


def test_a_forged_program_is_judged_like_any_other(box):
    """The candidate finds its socket and sends a program of its own making: an answer without work."""
    code = forward("pass", '''
import os, sys
messages = sys.modules["judge.messages"]
socket_class = sys.modules["socket"].socket
for descriptor in range(3, 64):
    try:
        sock = socket_class(fileno=descriptor)
    except OSError:
        continue
    out = torch.ones(256, 64)
    shape = ["torch.float32", [256, 64], [64, 1], 0]
    arguments = {"x_ptr": 1, "bias_ptr": 1, "out_ptr": 1, "n": 0, "columns": 64, "BLOCK": 1024}
    program = {"inputs": [[0, *shape]], "state": {}, "names": {}, "output": {"tensor": [1, *shape]},
               "steps": [["launch", "sigmoid_twice", [0, 1, 1], arguments, {}]]}
    messages.send(sock, {"program": program, "constants": {1: out.view(-1).view(torch.uint8)}})
os._exit(0)''')
    fails_here(box, code)


# ---------------------------------------------------------------------------------------------------------------------
# Text that runs where verdicts are made: there is no GPU, so kernels are built in a process that prices them

SAYS_SO = "__import__('os').environ.__setitem__('RAN', 'yes')"
TEXTS = {  # {where it stands: (imports, a kernel beside the honest one, what the builder says, if it refuses)}
    "a default": ("", f"def helper(a={SAYS_SO}): return a", "a default that is computed"),
    "an annotation beside constexpr": ("", f"def helper(a: {SAYS_SO} or tl.constexpr): return a", None),
    "a decorator": ("", f"@triton.heuristics({{'a': {SAYS_SO}}})\ndef helper(a): return a", None),
    "builtins imported": ("from triton.language.core import __builtins__ as b",
                          "def helper(a=b['exec'](f'import os; os.environ[{\"RAN\"!r}] = {\"yes\"!r}')): return a",
                          "a default that is computed"),
    "a module of Python's": ("from triton.language.core import inspect as i", "def helper(a): return i.sys.modules",
                             "i.sys"),
}


@pytest.mark.parametrize("where", TEXTS)
def test_no_text_runs_when_kernels_are_built(where, monkeypatch):
    imported, kernel, says = TEXTS[where]
    code = f"import triton\nimport triton.language as tl\n{imported}\n@triton.jit\n{kernel}\n"
    if "__import__" in kernel:
        monkeypatch.delenv("RAN", raising=False)
        exec(code.replace("@triton.jit\n", "").replace("@triton.heuristics", "@(lambda _: lambda f: f)"), {})
        assert os.environ.pop("RAN") == "yes"
    if says is None:
        assert list(compiler.build(code, {})[0]) == ["helper"]
    else:
        with pytest.raises(compiler.KernelError, match=says):
            compiler.build(code, {})
    assert "RAN" not in os.environ


OTHER_TEXT = HONEST.replace("    offsets = ", '''    """
    def sigmoid_twice(x_ptr, bias_ptr, out_ptr, n, columns, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % columns, mask=mask)
        tl.store(out_ptr + offsets, tl.sigmoid(x) * 2.0, mask=mask)
    """
    offsets = ''', 1).replace("\n\ndef fused", '\n    # """\n\ndef fused')


def test_the_text_that_is_interpreted_is_the_text_that_is_compiled(box, naively):
    """Triton's interpreter begins at the last line that begins with `def`, its compiler at the first."""
    code = "x".join(OTHER_TEXT.rsplit("tl.sigmoid(x)", 1))  # the sigmoid is in the docstring alone
    assert naively(POINTWISE, code)["correct"]
    fails_here(box, code, says="wrong values")
    passes(box, victim(), OTHER_TEXT)


PASSED = HONEST.replace("@triton.jit", "@triton.jit\ndef g(a):\n    return BODY\n\n@triton.jit", 1).replace(
    "columns, BLOCK", "columns, F: tl.constexpr, BLOCK").replace("tl.sigmoid(x)", "F(x)").replace(
    "x.shape[1], BLOCK", "x.shape[1], g, BLOCK")


def test_a_kernel_that_was_compiled_with_another_function_is_compiled_anew(box):
    passes(box, victim(), PASSED.replace("BODY", "tl.sigmoid(a)"))
    fails_here(box, PASSED.replace("BODY", "tl.sigmoid(a) + len(str(1)) - 1"), says="str is not defined")
