"""Cheats that fool a checker which runs the candidate beside the reference and compares once: they fail here.

Programs of later red-team passes, with their own proof that they work, are in results/adversaries; one of each kind is
judged here, too. Forged recordings are in test_program.py, attempts to leave the jail in test_jail.py.
"""

import pytest

from candidates import by_elements, fails, indent, passes, product, replaced, small_task
from conftest import read_lines
from command.files import ROOT
from tasks import Task

POINTWISE = small_task("victim", "return torch.sigmoid(x + self.bias) * 2.0", inputs="torch.randn(256, 64)",
                       state="self.bias = torch.nn.Parameter(torch.zeros(64))").source
SMALL = POINTWISE.replace("torch.sigmoid(x + self.bias) * 2.0", "torch.softmax((x + self.bias).flatten(), 0)")

COPY = '''
@triton.jit
def copy(x, y):
    o = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + o, RESULT)
'''
CONSTRUCTOR = '''
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(64))
'''


def forward(body, result="tl.load(x + o)") -> str:
    """A candidate with this body of forward, which calls `fused`. result: what the kernel `copy` stores."""
    fused = by_elements("tl.sigmoid(v + tl.load(bias + o % 64)) * 2.0")
    return replaced(fused, ("def apply(x, out", "def apply(x, bias, out"), ("](x, out", "](x, self.bias, out"),
                    ("class", COPY.replace("RESULT", result) + "\nclass"), ("    def forward", CONSTRUCTOR + (
                        f"\n    def forward(self, x):\n{indent(body, 8)}\n    def fused")))


def victim(source=POINTWISE):
    return Task("victim", 0, source)


HONEST = forward("return self.fused(x)")
TORCH = "torch.sigmoid(x + self.bias) * 2.0"
PRODUCT, TF32 = product("total += tl.dot(left, right)")
WRONG = "wrong values"
CHEATS = {  # name: (candidate, what the verdict says, task)
    "a decoy times zero": (
        forward(f"return {TORCH} + 0.0 * self.fused(x)"), "do not reach the output", POINTWISE),
    "zeros where outputs are small": (
        forward("out = torch.empty(x.numel())\ncopy[(16,)](x, out)\nreturn out", result="tl.zeros((1024,), tl.int1)"),
        WRONG, SMALL),
    "mutating the input": (forward("x.zero_()\nreturn torch.ones(256, 64)"), "", POINTWISE),
    "tensor cores in place of fp32": (TF32, WRONG, PRODUCT.source),
    "what is in memory": (replaced(HONEST, ("tl.store(out + o, ", "tl.store(out + o, tl.load(out + o) + 0 * ")), WRONG, POINTWISE),
    **{f"an accumulator of {kind} that is not set to zero": (
        forward(f"out = torch.empty(x.shape, dtype=torch.{kind})\nout += (x > 0)\nreturn out > 0"), WRONG,
        POINTWISE.replace(TORCH, "x > 0")) for kind in ("int32", "bool", "uint8")},
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_fails(box, name):
    code, says, task = CHEATS[name]
    fails(box, victim(task), code, says)


def test_a_second_kernel_that_does_nothing_adds_no_coverage(box):
    code = forward("y = self.fused(x)\nfor _ in range(5):\n    copy[(16,)](x, torch.empty_like(x))\nreturn y")
    assert passes(box, victim(), code).coverage < 0.25


LATER = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/cases.jsonl")
         if "open" not in case and "proof" not in case and case["kind"] != "memory"}


@pytest.mark.parametrize("name", LATER)
def test_one_of_each_kind_of_later_passes(box, name):
    fails(box, victim(LATER[name]["task"]), LATER[name]["code"])
