"""What a candidate would get away with if only one forward were recorded, with parameters as they are constructed.

Each exploit is beside the reason why it fails. Honest candidates that look like one must pass. (That a naive check lets
caches and ignored parameters pass is shown in test_cheats.py.)
"""

import pytest
import torch

from candidates import indent, passes, replaced, small_task, verdict
from judge.perturbation import construct, parameter_names

AFFINE = small_task("affine", "return torch.relu(self.norm(x)) * self.scale", inputs="torch.randn(32, 64)", state=(
    "self.norm, self.scale = torch.nn.BatchNorm1d(64).eval(), torch.nn.Parameter(torch.ones(64))"))

HEAD = '''
import torch
import torch.nn as nn
import triton
import triton.language as tl

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
HONEST = "return fused(x, self.by, self.plus) * self.scale"


def candidate(forward, more="", top="", state=FOLD):
    """A candidate with these statements in forward; more: in the constructor; top: at the top level."""
    return (HEAD + top + "\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            + indent(f"{state}\n{more}", 8) + "    def forward(self, x):\n" + indent(forward, 8))


HONEST_ONES = {
    "batch norm folded in the constructor": candidate(HONEST),
    "folded tensors as parameters and buffers": candidate(
        "return fused(x, self.a, self.b) * self.scale",
        "self.a = nn.Parameter(self.by)\nself.register_buffer('b', self.plus.clone())"),
    "a parameter of another name": candidate(HONEST.replace("self.scale", "self.s"), state=FOLD.replace(
        "self.scale", "self.s")),
    "a mask that the first call makes": candidate(
        "if self.ones is None:\n    self.ones = torch.tril(torch.ones(64, 64, device=x.device))[-1]\n"
        + HONEST + " * self.ones", "self.ones = None"),
    "a buffer that every call fills": candidate(
        "self.out.copy_(x)\nreturn fused(self.out, self.by, self.plus) * self.scale", "self.out = torch.zeros(32, 64)"),
    "a counter, of which only the recorded calls count": candidate(
        f"self.calls += 1\nif self.calls <= 100:\n    self.last = {HONEST.removeprefix('return ')}\nreturn self.last",
        "self.calls = 0"),
}
IGNORED = "return fused(x, torch.ones(64), torch.zeros(64))"  # right only while no parameter is anything but 1 or 0
RIGHT = HONEST.removeprefix("return ")
STATE = "forward keeps state"
EXPLOITS = {  # what does not work: (candidate, why)
    "parameters ignored": (candidate(IGNORED), "wrong values"),
    "parameters replaced by ones after the constructor has looked at them": (candidate(
        IGNORED + " * self.one", "self.one = float(self.scale.mean() > 0)"), "wrong values"),
    "counted in a buffer that the host reads": (candidate(
        f"if int(self.calls) <= 100:\n    self.last = {RIGHT}\nself.calls += 1\nreturn self.last",
        "self.register_buffer('calls', torch.zeros((), dtype=torch.int32))"), STATE),
    "a flag in memory that the kernel looks at": (replaced(candidate(
        "affine[(32,)](x, self.by, self.plus, self.out, self.done)\nself.done += 1\nreturn self.out * self.scale",
        "self.done = torch.zeros(1, dtype=torch.int32)\nself.out = torch.zeros(32, 64)"),
        ("shift, out):", "shift, out, done):"), ("0.0))", "0.0), mask=tl.load(done) == 0)")), "wrong values"),
    "another nesting": (candidate(f"return [{RIGHT}]"), "wrong output: [tensor] instead of tensor"),
    "a result on the CPU": (candidate(f"return ({RIGHT}).cpu()"), "moves computed values to the CPU"),
}


def ahead():
    return [(AFFINE, code) for code in (*HONEST_ONES.values(), *(code for code, _ in EXPLOITS.values()))]


@pytest.mark.parametrize("name", HONEST_ONES)
def test_honest_candidates_pass(box, name):
    assert passes(box, AFFINE, HONEST_ONES[name]).coverage > 0.2


@pytest.mark.parametrize("name", EXPLOITS)
def test_exploits_fail(box, name):
    code, why = EXPLOITS[name]
    found = verdict(box, AFFINE, code)
    assert not found.correct and why in (found.rejected or found.error), found


# ---------------------------------------------------------------------------------------------------------------------
# The parts


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        torch.nn.init.xavier_uniform_(self.fc.weight)
        torch.nn.init.zeros_(self.fc.bias)
        self.tied = self.fc.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.copy = self.fc.weight.detach().t().contiguous()
        self.drawn = torch.rand(3)


def test_parameters_are_moved_once_and_what_is_computed_from_them_follows():
    plain = construct(Model, [], 1, None)
    names = parameter_names(plain)
    moved, again = construct(Model, [], 1, names), construct(Model, [], 1, names)
    for name, value in plain.state_dict().items():
        if value.is_floating_point():
            assert not (moved.state_dict()[name] == value).any(), name
        assert torch.equal(moved.state_dict()[name], again.state_dict()[name])
    assert moved.tied is moved.fc.weight and torch.equal(moved.copy, moved.fc.weight.t())
    assert (moved.norm.running_var > 0.5).all() and torch.equal(moved.drawn, plain.drawn)
    noise = torch.empty(8, 8).uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    once = plain.fc.weight + (0.2 * plain.fc.weight.abs() + 0.1) * noise
    assert torch.allclose(moved.fc.weight, once)
