"""Cheats, one adversary of each kind: it succeeds against a naive check, and fails here.

The naive check (naive.py) is what a first implementation looks like. Programs of later red-team passes, with their own
proof that they work, are in results/adversaries; one of each kind is judged here, too. Cheats with the recorder's
answer are in test_program.py, attempts to leave the jail in test_jail.py, well-behaved inputs in test_reference.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from candidates import fails, indent, passes, product, replaced, small_task
from conftest import read_lines
from command.files import ROOT
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


def test_honest_kernels_pass(box):
    found = passes(box, victim(), HONEST + "# try torch.compile, or pass; except gc, eval()\n")
    assert found.speedup > 1.5 and found.coverage == 1.0, found
    passes(box, victim(), OTHER_TEXT)


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


# Triton's interpreter begins at the last line that begins with `def`, its compiler at the first.
OTHER_TEXT = HONEST.replace("    offsets = ", '''    """
    def sigmoid_twice(x_ptr, bias_ptr, out_ptr, n, columns, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % columns, mask=mask)
        tl.store(out_ptr + offsets, tl.sigmoid(x) * 2.0, mask=mask)
    """
    offsets = ''', 1).replace("\n\ndef fused", '\n    # """\n\ndef fused')
PRODUCT, TF32 = product("total += tl.dot(left, right)")  # (with tf32x3 it is right: test_interpreter.py)

DECOY = "do not reach the output"
CHEATS = {  # name: (candidate, what the verdict says, task)
    # Passing torch off as a kernel
    "torch without a kernel": (forward(f"return {TORCH}"), "no kernel of its own", POINTWISE),
    "a decoy whose result is discarded": (forward(f"fused(x, self.bias)\nreturn {TORCH}"), DECOY, POINTWISE),
    "a decoy times zero": (forward(f"return {TORCH} + 0.0 * fused(x, self.bias)"), DECOY, POINTWISE),
    # Answers that happen to be right
    "zeros where outputs are small": (
        with_copy("out = torch.empty(x.numel())\ncopy[(16,)](x, out)\nreturn out", "tl.zeros((1024,), tl.float32)"),
        "wrong values", SMALL),
    "ignoring a parameter that starts at zero": (
        HONEST.replace(" + tl.load(bias_ptr + offsets % columns, mask=mask)", ""), "wrong values", POINTWISE),
    "memory that held the answer": (forward("""
out = torch.empty(256, 64)
return out if out.abs().sum() > 0 and torch.allclose(out, TORCH) else fused(x, self.bias)""".replace("TORCH", TORCH)),
        "reads", POINTWISE),
    # Changing the rules
    "mutating the input before the reference sees it": (
        forward("x.zero_()\nreturn torch.ones(256, 64)"), "", POINTWISE),
    "patching the comparison": (
        forward("return x", "torch.allclose = lambda *a, **k: True"), "", POINTWISE),
    # What Triton does unless it is told otherwise
    "tensor cores in place of fp32": (TF32, "wrong values", PRODUCT.source),
    # Its sigmoid is in the docstring alone
    "a kernel in a docstring": ("x".join(OTHER_TEXT.rsplit("tl.sigmoid(x)", 1)), "wrong values", POINTWISE),
}


@pytest.fixture(scope="module")
def fooled(tmp_path_factory):
    """The cheats that naive.py calls correct, and whether it calls the honest kernel so."""
    pairs = [(task, code) for code, _, task in CHEATS.values()] + [(POINTWISE, HONEST)]
    done = subprocess.run([sys.executable, Path(__file__).with_name("naive.py"), tmp_path_factory.mktemp("naive")],
                          input=json.dumps(pairs), text=True, capture_output=True,
                          env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    verdicts = map(json.loads, done.stdout.splitlines())
    return [name for name, correct in zip([*CHEATS, "honest"], verdicts, strict=True) if correct]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_that_fools_the_naive_check_fails_here(box, fooled, name):
    code, says, task = CHEATS[name]
    assert name in fooled and "honest" in fooled
    fails(box, victim(task), code, says)


# ---------------------------------------------------------------------------------------------------------------------
# Cheats that gain nothing, though their result is right

HARMLESS = {  # name: body of a forward, statements of the constructor
    "the time of day": ("import time\nif time.time() < 0:\n    return self.last\nreturn fused(x, self.bias)", ""),
    "asking who calls": ("import traceback\nif 'time' in [frame.name for frame in traceback.extract_stack()]:\n"
                         "    return self.last\nself.last = fused(x, self.bias)\nreturn self.last", ""),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_gains_nothing(box, name):
    assert passes(box, victim(), forward(*HARMLESS[name])).speedup == passes(box, victim(), HONEST).speedup


def test_a_second_kernel_that_does_nothing_adds_no_coverage(box):
    code = with_copy("y = fused(x, self.bias)\nfor _ in range(5):\n    copy[(16,)](x, torch.empty_like(x))\nreturn y",
                     "tl.load(x + o)")
    assert passes(box, victim(), code).coverage < 0.25


def test_reading_memory_that_was_not_written(box):
    fails(box, victim(), forward("return torch.empty(256, 64)"), "wrong values")
    fails(box, victim(), replaced(HONEST, ("tl.sigmoid(x) * 2.0", "tl.load(out_ptr + offsets)")), "wrong values")
    for kind in "int32", "bool", "uint8":  # an accumulator that is not set to zero
        add = f"torch.empty(x.shape, dtype=torch.{kind})\n        out += (x > 0)\n        return out > 0"
        task = small_task("counts", "return x > 0", inputs="torch.randn(64, 64)")
        head = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        out = "
        fails(box, task, head + add)


# ---------------------------------------------------------------------------------------------------------------------
# Later passes

LATER = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/cases.jsonl")
         if "open" not in case and "proof" not in case and case["kind"] != "memory"}


@pytest.mark.parametrize("name", LATER)
def test_one_of_each_kind_of_later_passes(box, name):
    fails(box, victim(LATER[name]["task"]), LATER[name]["code"])
