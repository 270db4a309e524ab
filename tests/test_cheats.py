"""The cheats that the sandbox withstands, one entry or test each: it succeeds against a naive check, and fails here.

The naive check is what a first implementation looks like: execute the candidate beside the reference, compare the
outputs with allclose at 1e-2, take the time with time.perf_counter, count Triton launches, believe what the process
prints. It runs in a helper process (this file with --naive) that has Triton's interpreter switched on and forks for
every candidate.
"""

import json
import os
import sys
from pathlib import Path

import pytest


# ---------------------------------------------------------------------------------------------------------------------
# The naive check


def naive(task, code):
    """{"correct", "speedup", "launches"}, all in one process, as a first implementation would."""
    import time

    import torch
    import triton

    space = {"__name__": "task"}
    exec(compile(task, "task.py", "exec"), space)
    launches, launch = [0], triton.runtime.interpreter.InterpretedFunction.run

    def counted(*args, **kwargs):
        launches[0] += 1
        return launch(*args, **kwargs)

    triton.runtime.interpreter.InterpretedFunction.run = counted
    Path("task.py").write_text(task)
    Path("candidate.py").write_text(code)
    exec(compile(code, "candidate.py", "exec"), space)
    torch.manual_seed(42)
    reference = space["Model"](*space["get_init_inputs"]())
    torch.manual_seed(42)
    candidate = space["ModelNew"](*space["get_init_inputs"]())

    def clock(model, inputs):
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            model(*inputs)
            seconds.append(time.perf_counter() - began)
        return min(seconds)  # however busy the machine is, one of them is not disturbed

    with torch.no_grad():
        torch.manual_seed(43)
        inputs = space["get_inputs"]()
        candidate(*inputs)  # warm up, so that nothing is compiled later on
        expected = reference(*inputs).clone()
        got = candidate(*inputs)
        correct = bool(torch.allclose(got, expected, atol=1e-2, rtol=1e-2))
        speedup = clock(reference, inputs) / max(clock(candidate, inputs), 1e-9)
    return {"correct": correct, "speedup": speedup, "launches": launches[0]}


def naive_server():
    """Answer each line {"task", "code"} on stdin with a line of JSON, each from a fork of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.chdir(os.environ["SCRATCH"])
            os.dup2(write, 1)  # the candidate's prints and the result go the same way, and the last line counts
            try:
                print(json.dumps(naive(**json.loads(line))), flush=True)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            lines = [text for text in pipe.read().splitlines() if text.startswith("{")]
        os.waitpid(child, 0)
        print(lines[-1] if lines else "{}", flush=True)


if __name__ == "__main__" and sys.argv[1:] == ["--naive"]:
    naive_server()
    sys.exit(0)

import torch  # noqa: E402

from judge import compiler, prices, recorder  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from tasks import Task  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# The victims: problems, and an honest kernel to start from

POINTWISE = '''
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return torch.sigmoid(x + self.bias) * 2.0

rows = 256

def get_inputs():
    return [torch.randn(rows, 64)]

def get_init_inputs():
    return []
'''

SMALL = POINTWISE.replace("torch.sigmoid(x + self.bias) * 2.0", "torch.softmax((x + self.bias).flatten(), 0)")
NEAR_IDENTITY = POINTWISE.replace("torch.sigmoid(x + self.bias) * 2.0", "x + 0.002 * torch.sigmoid(x + self.bias)")
PRODUCT = POINTWISE.replace("torch.zeros(64)", "torch.zeros(512)").replace("64", "512").replace(
    "torch.sigmoid(x + self.bias) * 2.0", "(x + self.bias) @ x.T")

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


def forward(body, extra="", head=HEAD):
    """An attack: HEAD, more statements of the constructor, and the body of forward."""
    lines = "\n".join("        " + line for line in body.strip("\n").split("\n"))
    more = "\n".join("        " + line for line in extra.strip("\n").split("\n")) if extra else ""
    return f"{head}{more}\n    def forward(self, x):\n{lines}\n"


def fails_here(box, code, task=POINTWISE, says=None):
    """The sandbox finds the candidate wrong or rejects it, for the reason `says`."""
    verdict = box.score(Task("victim", 0, task), [code])[0]
    assert not verdict.correct and verdict.speedup is None, verdict
    if says is not None:
        assert says in (verdict.rejected or verdict.error), verdict
    return verdict


def ahead():
    caches = [forward(body, SEEN) for body, _ in CACHES.values()]
    return [(Task("victim", 0, task), code) for code, _, task in CHEATS.values()] + [
        (Task("victim", 0, POINTWISE), code) for code in (HONEST, *caches, *(code for code, _ in HIDDEN.values()))]


def test_the_honest_kernel_passes_both(box, naively):
    assert naively(POINTWISE, HONEST)["correct"]
    verdict = box.score(Task("victim", 0, POINTWISE), [HONEST])[0]
    assert verdict.correct and verdict.speedup > 1.5 and verdict.coverage == 1.0, verdict


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
    "torch behind try and except": (
        forward(f"try:\n    return fused(x.nothing, self.bias)\nexcept AttributeError:\n    return {TORCH}"),
        "no kernel of its own", POINTWISE),
    "torch.compile in place of a kernel": (
        forward("return self.run(x)", f"self.run = torch.compile(lambda x: {TORCH}, backend='eager')"),
        "torch.compile", POINTWISE),
    "torch.compile by another name": (
        forward("return self.run(x)", f"import torch as t\nself.run = t.compile(lambda x: {TORCH}, backend='eager')"),
        "in place of a kernel", POINTWISE),
    "launches that cost nothing": (forward("fused(x, self.bias)\nreturn " + TORCH, """
run = type(sigmoid_twice).run
setattr(type(sigmoid_twice), "run", lambda self, *a, **k: run(self, *a, **{**k, "warmup": True}))"""),
        "do not reach the output", POINTWISE),
    # Getting hold of the reference or of its result
    "subclassing the reference": (HEAD.replace("class ModelNew(nn.Module)", "class ModelNew(Model)").replace(
        "super().__init__()", "super().__init__()\n        return").rstrip() + "\n", "Model", POINTWISE),
    "the reference through modules": (forward("return self.stolen(x)", """
import sys
spaces = [vars(m) for m in list(sys.modules.values()) if hasattr(m, "__dict__")]
found = [space["Model"] for space in spaces if "Model" in space and "get_inputs" in space]
self.stolen = (found or [Model])[0]()"""), "Model", POINTWISE),
    "the reference through the garbage collector": (forward("return self.stolen[0](x)", """
import gc
self.stolen = [o for o in gc.get_objects() if isinstance(o, nn.Module) and type(o).__name__ == "Model"]"""),
        "gc", POINTWISE),
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
    # Of a recorded batch one call's result is looked at: who knows that it is being recorded can leave some out.
    "doing less where only some calls are checked": (forward("""
if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and torch.rand(()) < 0.2:
    return torch.empty_like(x)
return fused(x, self.bias)"""), "is_current_stream_capturing", POINTWISE),
    # Answers that happen to be right
    "zeros where outputs are small": (
        with_copy("out = torch.empty(x.numel())\ncopy[(16,)](x, out)\nreturn out", "tl.zeros((1024,), tl.float32)"),
        "wrong values", SMALL),
    "identity where the change is small": (
        with_copy("out = torch.empty_like(x)\ncopy[(16,)](x, out)\nreturn out", "tl.load(x + o)"),
        "only move data", NEAR_IDENTITY),
    "ignoring a parameter that starts at zero": (
        HONEST.replace(" + tl.load(bias_ptr + offsets % columns, mask=mask)", ""), "wrong values", POINTWISE),
    "ignoring an input that is nearly constant": (
        HONEST.replace("def forward(self, x):", "def forward(self, x, scale):"), "wrong values",
        POINTWISE.replace("def forward(self, x):", "def forward(self, x, scale):").replace("* 2.0", "* scale").replace(
            "[torch.randn(rows, 64)]", "[torch.randn(rows, 64), 2.0 + 1e-3 * torch.rand(1)]")),
    "behaving only for one seed": (
        forward("return self.answer if x.shape == self.answer.shape else fused(x, self.bias)",
                "torch.manual_seed(43)\nself.answer = torch.sigmoid(torch.randn(256, 64)) * 2.0"), "", POINTWISE),
    # Changing the rules
    "mutating the input before the reference sees it": (
        forward("x.zero_()\nreturn torch.ones(256, 64)"), "", POINTWISE),
    "patching the comparison": (
        forward("return x", "torch.allclose = lambda *a, **k: True"), "replaces torch.allclose", POINTWISE),
    "patching the clock": (
        forward("return fused(x, self.bias)",
                "import time\ntime.perf_counter = lambda ticks=iter(range(10**6, 0, -1)): next(ticks)"),
        "replaces time.perf_counter", POINTWISE),
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
    "numpy behind the recorder's back": (
        forward("import numpy\nreturn torch.from_numpy((2 / (1 + numpy.exp(-x.numpy()))).astype('float32'))"),
        "", POINTWISE),
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


@pytest.mark.parametrize("result", [  # in place of what torch has computed already
    "tl.load(x + o)", "tl.load(x + o) * 1.0", "tl.minimum(tl.load(x + o), 1e30)",
    "(tl.load(x + o).to(tl.int32, bitcast=True) + 0).to(tl.float32, bitcast=True)",
    "tl.where(o < 1600, 2.0 * tl.sigmoid(tl.load(z + o)), tl.load(x + o))"])  # a few of them are computed
def test_a_kernel_that_only_moves_data_is_no_kernel(box, naively, result):
    task = POINTWISE.replace("torch.zeros(64)", "torch.zeros(256, 64)")
    code = with_copy(f"y, out = {TORCH}, torch.empty_like(x)\ncopy[(16,)](y, out, x + self.bias)\nreturn out", result)
    code = code.replace("copy(x, y)", "copy(x, y, z)").replace("torch.zeros(64)", "torch.zeros(256, 64)")
    answer = naively(task, code)
    assert answer["correct"] and answer["launches"]
    fails_here(box, code, task, says="only move data")


@pytest.mark.parametrize("expression, result", [
    ("x.flip(1)", "tl.load(x + o // 64 * 64 + 63 - o % 64)"),  # the task is to move data
    ("torch.relu(x)", "tl.maximum(tl.load(x + o), 0.0)"), ("x.clamp(-3, 3)", "tl.clamp(tl.load(x + o), -3.0, 3.0)"),
    ("torch.where(x > 0.5, x, 2 * x)", "tl.where(tl.load(x + o) > 0.5, tl.load(x + o), 2 * tl.load(x + o))"),
    ("torch.nn.functional.elu(x)", "tl.where(tl.load(x + o) > 0, tl.load(x + o), tl.exp(tl.load(x + o)) - 1)"),
    ("x.cummax(1)[0]", "tl.associative_scan(tl.load(x + o).reshape(16, 64), 1, larger).reshape(1024)")])
def test_a_kernel_that_stores_what_it_has_loaded_may_have_worked(box, expression, result):
    task = POINTWISE.replace("torch.sigmoid(x + self.bias) * 2.0", expression)
    if "elu(" in expression:  # where its inputs are never negative
        task = task.replace("torch.randn", "torch.rand")
    code = with_copy("out = torch.empty_like(x)\ncopy[(16,)](x, out)\nreturn out", result).replace(
        "@triton.jit\ndef copy", "@triton.jit\ndef larger(a, b):\n    return tl.maximum(a, b)\n\n@triton.jit\ndef copy")
    [verdict] = box.score(Task("victim", 0, task), [code])
    assert verdict.correct and verdict.coverage == 1.0, verdict


HIDDEN = {  # what a rule forbids by name, under another name: there is nothing to be gained
    "the garbage collector": (CHEATS["the reference through the garbage collector"][0].replace(
        "import gc", "gc = __builtins__['__im' + 'port__']('gc')"), ""),
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


def test_the_word_try_in_a_comment_is_no_offence(box):
    code = HONEST + "\n# try torch.compile, or pass; except gc, eval()\n"
    assert box.score(Task("victim", 0, POINTWISE), [code])[0].correct


def test_a_second_kernel_that_does_nothing_adds_no_coverage(box):
    code = with_copy("y = fused(x, self.bias)\nfor _ in range(5):\n    copy[(16,)](x, torch.empty_like(x))\nreturn y",
                     "tl.load(x + o)")
    verdict = box.score(Task("victim", 0, POINTWISE), [code])[0]
    assert verdict.correct and verdict.coverage < 0.25, verdict


def test_secrets_are_not_in_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    code = forward('import os\nraise ValueError(" ".join(sorted(os.environ)))')
    with Sandbox("cpu", trials=1) as sandbox:
        verdict = sandbox.score(Task("victim", 0, POINTWISE), [code])[0]
    assert "PATH" in verdict.error and "HF_TOKEN" not in verdict.error and "AWS" not in verdict.error


def test_reading_the_expected_output_from_recycled_memory(box):
    # (That it works against a naive check on a GPU, whose allocator recycles blocks, is shown in test_sandbox_gpu.py.)
    fails_here(box, forward("return torch.empty(256, 64)"))
    code = forward("out = torch.empty(256, 64)\nreturn out if out.any() else fused(x, self.bias)")
    fails_here(box, code, says="reads")


# ---------------------------------------------------------------------------------------------------------------------
# What holds in Python or in Triton's own interpreter, and not on a GPU

ONLY_HERE = {  # name: (the reference's expression, statements of a kernel, what it stores, what the verdict says)
    "a hint that is not true": ("x * 2", "", "tl.load(x + 1 + tl.multiple_of(o - 1, 16)) * 2", "not true"),
    "neighbours that are none": ("x * 2", "i = tl.max_contiguous(2 * o, 4)", "tl.load(x + i // 2) * 2", "not true"),
    "Python's division of a loop's variable": (
        "x * 2 - 4", "v = 0\n    for i in range(1):\n        v = (i - 7) // 2", "tl.load(x + o) * 2 + v",
        "wrong values"),
    "Python's division in a tuple": ("x * 2 - 4", "a, b = -7, 2", "tl.load(x + o) * 2 + a // b", "wrong values"),
    "Python's division after +=": ("x * 2 - 4", "n += -7", "tl.load(x + o) * 2 + n // 2", "wrong values"),
    "Python's max of blocks": ("x.abs() * 3", "v = tl.load(x + o)", "max(v + 100, tl.abs(v)) * 3", "wrong values"),
    "a number of more bits than annotated": ("x * 300", "", "tl.load(x + o) * byte", "wrong values"),
    "a reduction in order": (
        "x[:, 63:].repeat(1, 64) * 2", "v = tl.reduce(tl.load(x + o).reshape(16, 64), 1, last)",
        "tl.broadcast_to(v[:, None], (16, 64)).reshape(1024) * 2", "wrong values"),
    "a view in order": ("x * 2", "p = tl.program_id(0) * 1024", "tl.view(tl.load(x + o), (32, 32)).reshape(1024) * 2",
                        "wrong values"),
    "a gather by negative indices": ("x * 2", "", "tl.gather(tl.load(x + o), o % 1024 - 1024, 0) * 2", "negative"),
}


@pytest.mark.parametrize("name", ONLY_HERE)
def test_what_no_gpu_does_is_wrong_here(box, naively, name):
    expression, statements, result, says = ONLY_HERE[name]
    task = POINTWISE.replace(TORCH, expression)
    code = with_copy("out = torch.empty_like(x)\ncopy[(16,)](x, out)\nreturn out", result).replace(
        "    tl.store(y", f"    {statements}\n    tl.store(y").replace(
        "@triton.jit\ndef copy(x, y)", "@triton.jit\ndef last(a, b):\n    return b\n\n"
        "@triton.jit\ndef copy(x, y, byte: tl.int8 = 300, n: tl.constexpr = 0)")
    assert naively(task, code)["correct"]
    fails_here(box, code, task, says)


@pytest.mark.parametrize("order, holds", [("", True), (', sem="relaxed"', False), (', scope="cta"', False),
                                          (', sem="acquire"', False), (', sem="release"', False)])
def test_an_atomic_that_orders_nothing_is_no_signal(box, naively, order, holds):
    task = POINTWISE.replace(TORCH, "x.sum().reshape(1)")
    code = forward("""
parts, out, count = torch.empty(16), torch.empty(1), torch.zeros(1, dtype=torch.int32)
last_adds[(16,)](x, parts, count, out)
return out""").replace("class ModelNew", f"""@triton.jit
def last_adds(x, parts, count, out):
    i = tl.program_id(0)
    tl.store(parts + i, tl.sum(tl.load(x + i * 1024 + tl.arange(0, 1024))))
    if tl.atomic_add(count, 1{order}) == 15:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 16))))

class ModelNew""")
    assert naively(task, code)["correct"]
    verdict = box.score(Task("victim", 0, task), [code])[0]
    assert verdict.correct == holds and (holds or "same launch" in verdict.error), verdict


INFINITE = "torch.log(torch.relu(x))"
CONTRACTS = {  # name: (the reference's expression, the candidate's forward, what `copy` stores, what the verdict says)
    **{f"{kind} memory that is zero by chance": (
        "x.sum().reshape(1)", f"out = torch.empty(8, dtype=torch.{kind})\nout = out.view(torch.float32)[:1]\n"
        "copy[(16,)](x, out)\nreturn out", "0, mask=o < 0)\n    tl.atomic_add(y, tl.sum(tl.load(x + o))",
        "wrong values")
       for kind in ("bool", "int32", "int64")},
    "a number for infinity": (
        INFINITE, "out = torch.empty_like(x)\ncopy[(16,)](x, out)\nreturn out",
        "tl.where(tl.load(x + o) > 0, tl.log(tl.load(x + o)), 0.0)", "expected -inf, got 0"),
    "small values beside huge ones": (
        "torch.exp(6 * x)", "out = torch.empty_like(x)\ncopy[(16,)](x, out)\nreturn out",
        "tl.where(tl.load(x + o) > 1, tl.exp(6 * tl.load(x + o)), 0.0)", "wrong values"),
    "a parameter that every call changes": (
        TORCH, "self.bias.data.add_(1)\nreturn fused(x, self.bias - 1)", "0", "wrong values"),
    "an expanded output": (
        "torch.sigmoid(x[:, :1]).repeat(1, 64)", "return torch.sigmoid(x[:, :1]).expand(256, 64)", "0",
        "no memory of its own"),
    "an input as an output": (
        "(torch.sigmoid(x), x.clone())", "return torch.sigmoid(x), x", "0", "no memory of its own"),
    "one output twice": ("(x * 2, x + x)", "y = x * 2\nreturn y, y", "0", "no memory of its own"),
    "two kernels of one name": (TORCH, "return fused(x, self.bias)",
                                "0)\n\n@triton.jit\ndef copy(x, y):\n    tl.store(y, 0", "same name"),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_output_is_what_the_reference_promises(box, name):
    expression, body, result, says = CONTRACTS[name]
    fails_here(box, with_copy(body, result), POINTWISE.replace(TORCH, expression), says)


def test_a_text_on_which_the_check_runs_out_of_stack_gets_a_verdict(box):
    fails_here(box, HONEST + f"\nif False:\n    setattr({' + '.join(['1'] * 900)}, 'a', 1)\n", says="does not parse")


# ---------------------------------------------------------------------------------------------------------------------
# Caching: several calls are recorded, and the last one is judged (more in test_judgement.py)

SEEN = "self.seen, self.calls = {}, 0"
CACHES = {
    **{key: (f"if {key} not in self.seen:\n    self.seen[{key}] = fused(x, self.bias)\nreturn self.seen[{key}]", 1)
       for key in ("id(x)", "x.data_ptr()", "tuple(x.shape)")},
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
    honest, verdict = box.score(Task("victim", 0, POINTWISE), [HONEST, code])
    assert verdict.speedup == honest.speedup if name == "the timing phase" else not verdict.correct, verdict


def test_a_cache_that_reads_its_input_is_refused(box, naively):
    code = forward("key = float(x.sum())\nif key not in self.seen:\n    self.seen[key] = fused(x, self.bias)\n"
                   "return self.seen[key]", "self.seen = {}")
    assert naively(POINTWISE, code)["correct"]
    fails_here(box, code, says="reads")


# ---------------------------------------------------------------------------------------------------------------------
# Precision and shapes

def test_lower_precision_than_asked(box, naively):
    code = HONEST.replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float16)").replace(
        "    return out\n", "    return out.float()\n")
    assert naively(POINTWISE, code)["correct"]
    verdict = fails_here(box, code, says="wrong values")
    assert verdict.correct_loose  # right at 1e-2, and reported as such


def test_tensor_cores_in_place_of_fp32(box, naively):
    code = '''
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def product(x, bias, y, out, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, INNER, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        a = tl.load(x + rows[:, None] * INNER + inner[None, :]) + tl.load(bias + inner)[None, :]
        b = tl.load(y + columns[None, :] * INNER + inner[:, None])
        total = tl.dot(a, b, acc=total, input_precision="PRECISION")
    tl.store(out + rows[:, None] * ROWS + columns[None, :], total)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(512))

    def forward(self, x):
        out = torch.empty(256, 256)
        product[(4, 4)](x, self.bias, x, out, ROWS=256, INNER=512, BLOCK=64)
        return out
'''
    assert naively(PRODUCT, code.replace("PRECISION", "tf32"))["correct"]
    fails_here(box, code.replace("PRECISION", "tf32"), PRODUCT, says="wrong values")
    assert box.score(Task("victim", 0, PRODUCT), [code.replace("PRECISION", "tf32x3")])[0].correct


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
    verdict = box.score(Task("victim", 0, POINTWISE), [code.replace("torch.sigmoid = slower",
                                                                    "vars(torch)['sigmoid'] = slower")])[0]
    assert verdict.speedup == box.score(Task("victim", 0, POINTWISE), [HONEST])[0].speedup


def test_patching_the_recorder(box):
    code = forward("return fused(x, self.bias)", '''
import sys
recorder = sys.modules["judge.recorder"].Recorder
vars(sys.modules["judge.recorder"])["Recorder"] = type("Blind", (recorder,), {"launch": lambda *a: None})''')
    fails_here(box, code)  # a program without the launch computes nothing


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


def test_forging_result_files(box, tmp_path):
    target = tmp_path / "verdict.json"
    code = forward("return fused(x, self.bias) + 1", f'''
try:
    open({str(target)!r}, "w").write('{{"correct": true, "speedup": 1000.0}}')
except OSError:
    pass
open("verdict.json", "w").write('{{"correct": true, "speedup": 1000.0}}')''')
    fails_here(box, code, says="wrong values")


def test_a_kernel_that_reaches_into_python(box):
    for statement, says in {"import os": "import os", "tl.core.os.system('true')": "tl.core.os",
                            "x.__class__": "__class__", "x.handle.data.tofile('f')": "handle", "open('f', 'w')": "open",
                            "(lambda: 0)()": "lambda"}.items():
        code = HONEST.replace("    tl.store(out_ptr", f"    {statement}\n    tl.store(out_ptr")
        verdict = fails_here(box, code, says=says)
        assert not verdict.compiled


# ---------------------------------------------------------------------------------------------------------------------
# Text that runs where verdicts are made: there is no GPU, so kernels are built in a process that prices them

SAYS_SO = "__import__('os').environ.__setitem__('RAN', 'yes')"
TEXTS = {  # {where it stands: (imports, a kernel beside the honest one, what the builder says, if it refuses)}
    "a default": ("", f"def helper(a={SAYS_SO}): return a", "a default that is computed"),
    "a keyword's default": ("", f"def helper(a, *, b={SAYS_SO}): return a", "a default that is computed"),
    "an annotation": ("", f"def helper(a: {SAYS_SO}): return a", None),
    "an annotation beside constexpr": ("", f"def helper(a: {SAYS_SO} or tl.constexpr): return a", None),
    "an annotation of *args": ("", f"def helper(*a: {SAYS_SO}): return a", None),
    "a return annotation": ("", f"def helper(a) -> {SAYS_SO}: return a", None),
    "a decorator": ("", f"@triton.heuristics({{'a': {SAYS_SO}}})\ndef helper(a): return a", None),
    "builtins imported": ("from triton.language.core import __builtins__ as b",
                          "def helper(a=b['exec'](f'import os; os.environ[{\"RAN\"!r}] = {\"yes\"!r}')): return a",
                          "a default that is computed"),
    "builtins in the body": ("from triton.language.core import __builtins__ as b",
                             "def helper(a): return b['len']('')", "b is not defined"),
    "a module of Python's": ("from triton.language.core import inspect as i", "def helper(a): return i.sys.modules",
                             "i.sys"),
    "a helper of Triton's": ("import triton.language.core as c", "def helper(a): return c.builtin(a)", "c.builtin"),
    "a module of Triton's": ("from triton.runtime import jit as j", "def helper(a): return j.JITFunction(a)",
                             "j.JITFunction"),
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
    assert box.score(Task("victim", 0, POINTWISE), [OTHER_TEXT])[0].correct
    fails_here(box, "# \r# \f\n" + HONEST, says="carriage return")  # lines to some readers of a text, not to others


def test_functions_imported_by_name(box):
    by_name = HONEST.replace("tl.sigmoid", "f")
    good, bad = (f"from triton.language.{path} as f\n{by_name}"
                 for path in ("standard import sigmoid", "math import cos"))
    assert box.score(Task("victim", 0, POINTWISE), [good])[0].correct
    fails_here(box, bad, says="wrong values")


PASSED = HONEST.replace("@triton.jit", "@triton.jit\ndef g(a):\n    return BODY\n\n@triton.jit", 1).replace(
    "columns, BLOCK", "columns, F: tl.constexpr, BLOCK").replace("tl.sigmoid(x)", "F(x)").replace(
    "x.shape[1], BLOCK", "x.shape[1], g, BLOCK")


def test_a_kernel_that_was_compiled_with_another_function_is_compiled_anew(box):
    assert box.score(Task("victim", 0, POINTWISE), [PASSED.replace("BODY", "tl.sigmoid(a)")])[0].correct
    fails_here(box, PASSED.replace("BODY", "tl.sigmoid(a) + len(str(1)) - 1"), says="str is not defined")


# ---------------------------------------------------------------------------------------------------------------------
# Operators that do more than their price says, or write where an index says

WEIGHTS = "self.weights = torch.randn(512, 512)"
MATRICES = POINTWISE.replace("self.bias = nn.Parameter(torch.zeros(64))", WEIGHTS).replace("64", "512").replace(
    "torch.sigmoid(x + self.bias)", "torch.sigmoid(x @ self.weights)")
PRICED_ALIKE = {  # {an operator in place: what it may not be cheaper than}
    "torch.zeros(256, 512).addmm_(x, w)": "x @ w", "torch.zeros(1, 256, 512).baddbmm_(x[None], w[None])[0]": "x @ w",
    "torch.zeros(256, 512).addbmm_(x[None], w[None])": "x @ w", "(x + 0).cumsum_(1)": "(x + 0).cumsum(1)",
    "x.topk(512, 1).values": "x.sort(1).values",
    "x.add(0).masked_fill_(x[:1] > 0, 1)": "x.add(0).masked_fill(x[:1] > 0, 1)"}


@pytest.mark.parametrize("name", PRICED_ALIKE)
def test_no_operator_is_cheaper_under_another_name(name):
    x, w = torch.randn(256, 512), torch.randn(512, 512)
    prices_of = []
    for call in (name, PRICED_ALIKE[name]):
        with torch.no_grad(), prices.Clock() as clock:
            eval(call, {"torch": torch, "x": x, "w": w})
        prices_of.append(sum(milliseconds for milliseconds, _, _ in clock.events))
    assert prices_of[0] >= prices_of[1]


UNKNOWN = [  # products, sorts and indices that are not checked
    "torch.ops.aten._foreach_mm([x], [w])[0]", "torch.ops.aten._compute_linear_combination(w, x)",
    "torch.nn.functional.embedding_bag(torch.arange(512).repeat(256, 1), w, per_sample_weights=x, mode='sum')",
    "(torch.complex(x, x) @ torch.complex(w, w)).real", "x.to(torch.cfloat) @ w.to(torch.cfloat)",
    "torch.nn.functional.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None])",
    "x.median(1, keepdim=True).values", "torch.searchsorted(x, x)", "torch.bilinear(x, x, w.view(1, 512, 512))",
    "torch.ops.aten.max_pool2d_with_indices_backward(x[None], x[None], [1, 1], [1, 1], [0, 0], [1, 1], False, far)",
    "torch.ops.aten._segment_reduce_backward(x, x, x, 'sum', lengths=far)", "torch.ops.aten._unsafe_index(x, [far])",
    "torch.ops.aten._reshape_alias_copy(x, [4], [1 << 20])", "torch.empty_permuted((4, 4), (0, 1))",
    "torch.ops.aten.embedding_renorm_(x, far, 1.0, 2.0)", "torch.ops.aten.resize(x, [1 << 20])"]


class Steps(prices.Mode):
    """Notes the steps that a candidate's process would record, and runs none of them that may not be called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def layout(tensor):
            return [0, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), 0]

        step = ["operator", f"{prices.operator_name(func)}.{func._overloadname}",
                *(recorder.write_value(value, layout) for value in (args, kwargs or {})), []]
        reason = prices.refusal(step, set())
        if reason is not None:
            raise PermissionError(reason)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", UNKNOWN)
def test_an_operator_whose_work_is_not_known_is_refused(call):
    far = torch.zeros(1, 256, 512).long()
    names = {"torch": torch, "x": torch.randn(256, 512), "w": torch.randn(512, 512), "far": far}
    with torch.no_grad(), Steps(), pytest.raises(PermissionError, match="has no modelled price"):
        eval(call, names)


def test_the_refusal_comes_before_the_replay_and_names_the_operator(box):
    product = "torch.ops.aten._foreach_mm([x], [self.weights])[0]"
    code = forward(f"return fused({product}, torch.zeros(512))", WEIGHTS)
    fails_here(box, code, MATRICES, says="aten._foreach_mm has no modelled price")
    same = MATRICES.replace("x @ self.weights", product)
    assert box.score(Task("victim", 0, same), [code])[0].correct


def test_prices_that_are_not_those_of_the_program():
    layout = [0, "torch.float32", [4], [1], 0]
    steps = [["operator", "relu.default", {"tuple": [{"tensor": layout}]}, {"dict": []}, [layout]],
             ["launch", "kernel", [1, 1, 1], {}, {}]]
    prices.check_events(steps, [[0.003, "relu", False], [0.002, "kernel", True]])
    for events in ([], [[0.002, "kernel", True]], [[0.003, "relu", False], [1e-6, "kernel", True]],
                   [[0.002, "kernel", True], [0.003, "relu", False]], [[0.003, "relu", False], [-1, "kernel", True]],
                   [[0.003, "relu", False], [float("nan"), "kernel", True]],
                   [[0.003, "relu", True], [0.002, "kernel", True]]):
        with pytest.raises(ValueError):
            prices.check_events(steps, events)
