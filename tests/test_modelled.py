"""What the modelled clock charges: kernels for memory traffic and arithmetic, operators for what CUDA launches."""

import pytest
import torch

from candidates import by_elements, passes, problem, product, replaced, small_task, solution, verdict
from judge import prices


def milliseconds(box, task, code, kernel):
    """Modelled time of the launches of one kernel, without their launch overhead."""
    found = passes(box, task, code)
    share = sum(entry.share for entry in found.profile if entry.name == kernel)
    return share * found.candidate_ms - prices.LAUNCH_MS


def moved(ms):
    """Elements of four bytes that are loaded and stored in this time."""
    return ms * prices.BANDWIDTH / 4


RELU = by_elements("tl.maximum(v, 0.0)")
BROADCAST = solution('''
@triton.jit
def apply(x, y, out, C, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * C
    v = tl.load(x + row + column, mask=column < C) + tl.load(y + column, mask=column < C)
    tl.store(out + row + column, v, mask=column < C)
''', "out = torch.empty_like(x)\napply[(32,)](x, y, out, 1500, BLOCK=2048)\nreturn out", "x, y")
SWEEPS = solution('''
@triton.jit
def apply(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(0) % 8 * n, tl.program_id(0) % 8 * n + n, BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))
''', "out = torch.empty(16)\napply[(16,)](x, out, x.numel() // 8, BLOCK=512)\nreturn out.sum()")
STRIDED = solution('''
@triton.jit
def apply(x, out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o * 64))
''', "out = torch.empty(x.shape[0])\napply[(4,)](x, out, BLOCK=256)\nreturn out")


@pytest.mark.parametrize("task, code, elements", [
    (problem("torch.relu(x)", "torch.randn(1024, 64)"), RELU, 2 * 1024 * 64),  # each tensor once
    (problem("torch.relu(x + 1)", "torch.randn(1024, 64)"), replaced(  # in place as well
        RELU, ("torch.empty_like(x)", "x = x + 1")), 2 * 1024 * 64),
    # Masked elements are free, and a broadcast vector costs once.
    (problem("x + y", "torch.randn(32, 1500), torch.randn(1500)"), BROADCAST, 2 * 32 * 1500 + 1500),
    # Sixteen programs, of which the last eight load what the first eight have loaded: free while it is in the cache.
    (problem("2 * x.sum()", "torch.randn(256, 64)"), SWEEPS, 256 * 64),
    (problem("2 * x.sum()", "torch.randn(4096, 64)"), SWEEPS, 2 * 4096 * 64),
    # Whole sectors of 32 bytes.
    (problem("x[:, 0].clone()", "torch.randn(1024, 64)"), STRIDED, 1024 * 8 + 1024),
], ids=["pointwise", "in place", "masks and a broadcast", "a sweep in the cache", "a sweep beyond it", "strided"])
def test_a_kernel_costs_what_it_moves(box, task, code, elements):
    assert moved(milliseconds(box, task, code, "apply")) == pytest.approx(elements, rel=0.01)


def test_many_tiny_programs_cost_what_it_takes_to_start_them(box):
    task, tiny = problem("torch.relu(x)", "torch.randn(64, 64)"), RELU.replace("512", "16")
    assert milliseconds(box, task, tiny, "apply") == pytest.approx(256 / prices.PROGRAMS, rel=0.01)
    assert milliseconds(box, task, RELU, "apply") < 0.2 * milliseconds(box, task, tiny, "apply")


SUM = problem("torch.exp(x).sum()", "torch.randn(256, 256)")
KERNELS = '''
@triton.jit
def sums(x, out, STEP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    total = 0.0
    for i in range(0, N, BLOCK):
        total += tl.sum(tl.exp(tl.load(x + tl.program_id(0) * STEP + i + tl.arange(0, BLOCK))), axis=0)
    tl.store(out + tl.program_id(0), total * SHARE)

@triton.jit
def atomics(x, out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + 0 * o, tl.exp(tl.load(x + o)))
'''
PARTS = "out = torch.empty(64)\nsums[(64,)](x, out, 1024, 1024, 1024, 1)\nreturn out.sum()"
CHEAP = {
    "one program": "out = torch.empty(1)\nsums[(1,)](x, out, 0, 65536, 1024, 1)\nreturn out.sum()",
    "every program": "out = torch.empty(8)\nsums[(8,)](x, out, 0, 65536, 4096, 1 / 8)\nreturn out.sum()",
    "one address": "out = torch.zeros(())\natomics[(64,)](x, out, BLOCK=1024)\nreturn out"}


def test_what_counts_bytes_alone_can_be_made_to_look_fast(box):
    """Each kernel moves no more bytes in fewer launches than the honest one, and still costs more."""
    fair = passes(box, SUM, solution(KERNELS, PARTS))
    for name, body in CHEAP.items():
        exploit = passes(box, SUM, solution(KERNELS, body))
        assert len(exploit.profile) <= len(fair.profile) and exploit.candidate_ms > 1.2 * fair.candidate_ms, name


def test_a_product_is_no_cheaper_by_another_road(box):
    def price(line):
        return milliseconds(box, *product(line), "product")

    ieee = price('total += tl.dot(left, right, input_precision="ieee")')
    assert price("total += tl.sum(left[:, :, None] * right[None, :, :], axis=1)") > ieee
    assert price("total += tl.sum(tl.fma(left[:, :, None], right[None, :, :], 0.0), axis=1)") > ieee
    assert price("total += tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)") > ieee


def test_parameters_cost_what_they_would_among_larger_tensors(box):
    task = small_task("bias", "return x + self.bias", inputs="torch.randn(256, 64)",
                      state="self.bias = torch.nn.Parameter(torch.randn(256, 64))")
    start = "class ModelNew(torch.nn.Module):\n"
    head = start + "    def __init__(self):\n        super().__init__()\n"
    add = by_elements("v + tl.load(y + o, mask=o < n)").replace("x, out", "x, y, out")
    code = add.replace("(x, y, out", "(x, self.bias, out", 2).replace("(x, self.bias, out", "(x, y, out", 1).replace(
        start, head + "        self.bias = torch.nn.Parameter(torch.randn(256, 64))\n\n")
    size = 256 * 64
    assert moved(milliseconds(box, task, code, "apply")) == pytest.approx((2 + 1 / 256) * size, rel=0.01)
    reference = prices.milliseconds((2 + 1 / 256) * size * 4)
    assert verdict(box, task, code).reference_ms == pytest.approx(reference, rel=0.01)

    # other constants are priced like that only up to the size of the task's own
    table = replaced(code, ("torch.nn.Parameter(torch.randn(256, 64))", "torch.zeros(512, 64)[:256]"))
    assert moved(milliseconds(box, problem("x.clone()"), table, "apply")) == pytest.approx(3 * size, rel=0.01)

    # a parameter that results are written to may be as large as the batch: no hiding place for them
    twice = problem("x * 2.0")
    doubled = replaced(by_elements("v * 2.0"), ("torch.empty_like(x)", "self.buffer"), (
        start, head + "        self.buffer = torch.nn.Parameter(torch.randn(256, 64))\n\n"), (
        "return out", "return out + 0.0"))
    assert passes(box, twice, doubled).candidate_ms == pytest.approx(2 * prices.milliseconds(2 * size * 4), rel=0.01)
    hidden = doubled.replace("        apply[", "        torch._foreach_copy_([out], [x])\n        apply[")
    assert "_foreach_copy has no modelled price" in verdict(box, twice, hidden).error


def test_what_all_programs_compute_counts_for_each(box):
    code = solution('''
@triton.jit
def share(x, out, BLOCK: tl.constexpr):
    total = tl.sum(tl.load(x + tl.arange(0, BLOCK)), axis=0)
    c = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + c, tl.load(x + c) - total)
''', "out = torch.empty_like(x)\nshare[(256,)](x, out, BLOCK=16384)\nreturn out")
    assert passes(box, problem("x - x.sum()"), code).candidate_ms > 256 * 16384 / prices.PEAK


def kernels_of(call):
    """[(bytes, FLOPs)] of every ATen call that `call` makes."""
    found = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found.extend(prices.operator_kernels(func, args, kwargs or {}, out))
            return out

    with torch.no_grad(), Watch():
        call()
    return found


def bytes_of(call):
    return [moved for moved, _ in kernels_of(call)]


def test_operators_cost_what_cuda_launches_for_them():
    x, y, image = torch.randn(128, 64), torch.randn(128, 64), torch.randn(2, 8, 16, 16)
    size = x.numel() * 4
    assert kernels_of(lambda: x.view(-1).t().detach()[1:]) == []
    assert kernels_of(lambda: x.contiguous()) == []
    assert bytes_of(lambda: torch.relu(x)) == bytes_of(lambda: x * 2.0) == [2 * size]
    assert bytes_of(lambda: x + y) == [3 * size]
    assert len(kernels_of(lambda: torch.softmax(x, 1))) == 1
    assert len(kernels_of(lambda: torch.nn.functional.layer_norm(x, (64,)))) == 1
    assert len(kernels_of(lambda: torch.nn.functional.group_norm(image, 2))) == 3
    assert len(kernels_of(lambda: torch.nn.functional.mse_loss(x, x + 1))) == 3
    assert len(kernels_of(lambda: torch.logsumexp(x, 1))) == 8
    linear, convolution = torch.nn.Linear(64, 32), torch.nn.Conv2d(8, 4, 3)
    assert [flops for _, flops in kernels_of(lambda: linear(x))] == [2 * 128 * 64 * 32]
    out = 2 * 4 * 14 * 14  # and the bias is a pass of its own
    assert [flops for _, flops in kernels_of(lambda: convolution(image))] == [2 * out * 8 * 9, 0]
    assert bytes_of(lambda: convolution(image))[1] == 1.5 * 2 * out * 4
