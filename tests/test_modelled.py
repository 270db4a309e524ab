"""What the modelled clock charges: kernels for memory traffic and arithmetic, operators for what CUDA launches."""

import re

import pytest
import torch

from candidates import APPLY, by_elements, passes, problem, product, replaced, small_task, solution, verdict
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


SUM = "torch.exp(x).sum()", "torch.randn(256, 256)"
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

@triton.jit
def scalars(x, y, out):
    n, m = tl.arange(0, 256), tl.program_id(0)
    total = tl.zeros((256,), tl.float32)
    for k in range(0, 256):
        total += tl.load(x + m * 256 + k) * tl.load(y + k * 256 + n)
    tl.store(out + m * 256 + n, tl.maximum(total, 0.0))

@triton.jit
def convolution(x, y, out):
    image, channel, p = tl.program_id(0), tl.program_id(1), tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    for i in range(0, 144):
        place = i // 9 * 324 + i % 9 // 3 * 18 + i % 3 + p // 16 * 18 + p % 16
        total += tl.load(x + image * 5184 + place) * tl.load(y + channel * 144 + i)
    tl.store(out + (image * 32 + channel) * 256 + p, tl.maximum(total, 0.0))
'''
PARTS = (SUM, "out = torch.empty(64)\nsums[(64,)](x, out, 1024, 1024, 1024, 1)\nreturn out.sum()")
PRODUCT = ("torch.relu(x @ y)", "torch.randn(64, 256), torch.randn(256, 256)")
CONVOLUTION = ("torch.relu(torch.conv2d(x, y))", "torch.randn(4, 16, 18, 18), torch.randn(32, 16, 3, 3)")
ON_TORCH = "out = torch.empty_like(y)\napply[(y.numel() // 1024,)](y, out, y.numel(), BLOCK=1024)\nreturn out"
CHEAP = {  # name: ((task, forward), an honest forward)
    "one program": ("out = torch.empty(1)\nsums[(1,)](x, out, 0, 65536, 1024, 1)\nreturn out.sum()", PARTS),
    "every program": ("out = torch.empty(8)\nsums[(8,)](x, out, 0, 65536, 4096, 1 / 8)\nreturn out.sum()", PARTS),
    "one address": ("out = torch.zeros(())\natomics[(64,)](x, out, BLOCK=1024)\nreturn out", PARTS),
    "scalar loads": ("out = torch.empty(64, 256)\nscalars[(64,)](x, y, out)\nreturn out",
                     (PRODUCT, f"y = x @ y\n{ON_TORCH}")),
    "a direct convolution": ("out = torch.empty(4, 32, 16, 16)\nconvolution[(4, 32)](x, y, out)\nreturn out",
                             (CONVOLUTION, f"y = torch.conv2d(x, y)\n{ON_TORCH}")),
}


def test_what_counts_bytes_alone_can_be_made_to_look_fast(box):
    """Each kernel moves no more bytes in fewer launches than the honest ones, and still costs more."""
    def score(task, body):
        code = solution(KERNELS + APPLY.replace("RESULT", "tl.maximum(v, 0.0)"), body, "x" if task == SUM else "x, y")
        return passes(box, problem(*task), code)

    for name, (body, (task, honest)) in CHEAP.items():
        exploit, fair = score(task, body), score(task, honest)
        assert len(exploit.profile) <= len(fair.profile) and exploit.candidate_ms > 1.2 * fair.candidate_ms, name


def flops(ms):
    return ms * prices.PEAK


def test_slow_instructions_cost_what_they_take(box):
    task, nested = problem("torch.sin(torch.sin(torch.sin(x)))"), by_elements("tl.sin(tl.sin(tl.sin(v)))")
    assert flops(milliseconds(box, task, nested, "apply")) == pytest.approx(256 * 64 * 3 * 70, rel=0.05)

    def divisions(first, second):
        """FLOPs' worth of eight integer divisions for each element."""
        sums = " + ".join([f"o // ({first}) + o // ({second})"] * 4)
        code = by_elements("v").replace("x + o", f"x + o + 0 * ({sums})").replace("n, BLOCK", "n, m, BLOCK")
        code = code.replace("x.numel(), BLOCK", "x.numel(), 3, BLOCK")
        return flops(milliseconds(box, problem("x.clone()", "torch.randn(1024, 64)"), code, "apply")) / (1024 * 64)

    assert 8 * 30 < divisions("m", "m + 1") < 8 * 30 + 60
    assert divisions("m", "m") < 120  # what has just been divided is not divided again: the bytes cost more


DOT = """
@triton.jit
def product(x, y, out, M, N, K, BM: tl.constexpr, B: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((BM, B), dtype=tl.float32)
    for k in range(0, K, B):
        i = k + tl.arange(0, B)
        a = tl.load(x + m[:, None] * K + i[None, :], mask=(m[:, None] < M) & (i[None, :] < K), other=0.0)
        b = LOAD
        total += tl.dot(a, b, input_precision="tf32x3")
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))
"""
ALONG_N = "tl.load(y + i[:, None] * N + n[None, :], mask=(i[:, None] < K) & (n[None, :] < N), other=0.0)"
ALONG_K = "tl.load(y + n[None, :] * K + i[:, None], mask=(i[:, None] < K) & (n[None, :] < N), other=0.0)"
R = "tl.arange(0, 64)[:, None]"
ORDERS = (f"(2 * {R}) % 64 + (2 * {R}) // 64", f"tl.where({R} == 1, 2, tl.where({R} == 2, 1, {R}))", f"63 - {R}")
TURNED = "tl.load(y + n[:, None] * K + i[None, :], mask=(i[None, :] < K) & (n[:, None] < N), other=0.0)"


def test_a_product_costs_by_how_its_operands_lie_in_memory(box):
    tile = "tl.load(x + m[:, None] * K + i[None, :], mask=(m[:, None] < M) & (i[None, :] < K), other=0.0)"
    same = ("{} * 1.0", "tl.permute({}, (0, 1))", "tl.reshape({}, (64, 64))", "{}.to(tl.float64).to(tl.float32)")
    roads = (*same, "tl.reshape(tl.reshape({}, (64, 8, 8)), (64, 64))", "tl.trans(tl.trans({}))",
             "tl.split(tl.join({0}, {0}))[0]", "tl.sum({}[:, :, None], axis=2)")
    kinds = {  # name: (how the right operand is loaded, what is different)
        "along K": (ALONG_K, {}), "along N": (ALONG_N, {}),
        "tl.trans": (f"tl.trans({TURNED})", {}), "T": (f"({TURNED}).T", {}),
        "uneven N": (ALONG_N, {"N": 72}), "uneven K": (ALONG_N, {"K": 72}), "masked rows": (ALONG_K, {"BM": 128}),
        **{f"{road} along K": (road.format(ALONG_K), {}) for road in same},
        **{f"{road} uneven N": (road.format(ALONG_N), {"N": 72}) for road in same},
        **{f"{road} left": (ALONG_N, {"K": 72, "left": road.format(tile)}) for road in roads},
        **{f"{order} rows": (f"tl.load(y + ({order}) * N + n[None, :], mask=n[None, :] < N, other=0.0)", {
            "N": 72, "left": f"tl.load(x + m[:, None] * K + tl.trans({order}))"}) for order in ORDERS},
        **{f"filled, {rows}": (ALONG_K, {"left": tile.replace("(m[:, None] < M)", f"(m[:, None] {rows})").replace(
            "other=0.0", f"other={tile}")}) for rows in ("< 0", "!= 7")},
    }

    def pair(load, M=192, N=64, K=64, BM=64, left=None):
        turned = ALONG_N not in load and "* N +" not in load
        task = problem("x @ y.t()" if turned else "x @ y",
                       f"torch.randn({M}, {K}), torch.randn({[N, K] if turned else [K, N]})")
        kernel = DOT.replace("LOAD", load)
        if left is not None:
            kernel = re.sub("a = tl.load.*", f"a = {left}", kernel)
        return task, solution(kernel, f"""
out = torch.empty({M}, {N})
product[(triton.cdiv({M}, {BM}), triton.cdiv({N}, 64))](x, y, out, {M}, {N}, {K}, BM={BM}, B=64)
return out""", "x, y")

    box.score_pairs([pair(load, **options) for load, options in kinds.values()])  # together; it remembers the verdicts

    def cost(kind):
        """fp32 FLOPs for each FLOP of the tiles, beyond what loading and storing takes."""
        load, options = kinds[kind]
        M, N, K = 192, options.get("N", 64), options.get("K", 64)
        moving = (M * K + K * N + M * N) * 4 / prices.BANDWIDTH
        tiles = 2 * M * -(-N // 64) * 64 * -(-K // 64) * 64
        return flops(milliseconds(box, *pair(load, **options), "product") - moving) / tiles

    assert cost("along K") == pytest.approx(0.8, rel=0.15)
    assert cost("tl.trans") == pytest.approx(cost("along K"), rel=0.01)
    assert cost("T") == pytest.approx(cost("along K"), rel=0.01)
    assert cost("along N") == pytest.approx(1.1, rel=0.15)
    assert cost("uneven N") == pytest.approx(3.7, rel=0.1) and cost("uneven K") == pytest.approx(1.7, rel=0.15)
    for road in same:
        assert cost(f"{road} uneven N") > 0.99 * cost("uneven N")
        assert cost(f"{road} along K") == pytest.approx(cost("along K"), rel=0.05)
    assert cost("masked rows") == pytest.approx(cost("along K"), rel=0.15)  # rows masked at the end are free,
    assert all(cost(f"{road} left") > 0.99 * cost("uneven K") for road in roads)
    assert all(cost(f"{order} rows") > 0.99 * cost("uneven N") for order in ORDERS)  # all of a tile's rows count
    for rows in ("< 0", "!= 7"):  # but not if something else is put in their place
        assert cost(f"filled, {rows}") > 0.99 * cost("along K")


def test_a_product_is_no_cheaper_by_another_road(box):
    def price(line):
        return milliseconds(box, *product(line), "product")

    ieee = price('total += tl.dot(left, right, input_precision="ieee")')
    assert price("total += tl.sum(left[:, :, None] * right[None, :, :], axis=1)") > ieee
    assert price("total += tl.sum(tl.fma(left[:, :, None], right[None, :, :], 0.0), axis=1)") > ieee
    assert price("total += tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)") > ieee


def test_arithmetic_is_no_cheaper_by_another_road(box):
    def price(result):
        code = by_elements("v").replace("    tl.store", f"    for _ in range(100):\n        v = {result}\n    tl.store")
        return milliseconds(box, problem("x.clone()", "torch.randn(256, 64)"), code, "apply")

    assert price("tl.fma(v, 1.0, 0.0)") >= price("v * 1.0 + 0.0")
    task = problem("x * torch.sin(torch.sin(torch.sin(y)))", "torch.randn(1024, 64), torch.randn(64)")
    kernel = """
@triton.jit
def scale(x, y, out, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    u = tl.load(y + r)
    for _ in range(3):
        u = SINE(u)
    o = tl.program_id(0) * BLOCK + r
    tl.store(out + o, tl.load(x + o) * u)
"""
    for sine in ("tl.sin", "libdevice.sin"):  # of what all programs share, in each of them
        code = solution(kernel.replace("SINE", sine),
                        "out = torch.empty_like(x)\nscale[(1024,)](x, y, out, BLOCK=64)\nreturn out", "x, y")
        assert flops(milliseconds(box, task, code, "scale")) > 0.99 * 1024 * 64 * 3 * 70


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
    early = doubled.replace("    v = tl.load", """    if tl.program_id(0) == 0:
        for i in range(0, n, BLOCK):
            tl.load(out + i + tl.arange(0, BLOCK))
    v = tl.load""")  # one program touches all of it before most of it is written: a race
    assert "another program of the same launch stored" in verdict(box, twice, early).error


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


def test_what_torch_is_slow_at_costs_more_than_its_bytes():
    x = torch.randn(128, 64)
    size = x.numel() * 4
    assert bytes_of(lambda: x.t().contiguous()) == [1.5 * 2 * size]
    assert bytes_of(lambda: x + x[0]) == [1.5 * (2 * size + 64 * 4)]
    assert bytes_of(lambda: x.sum(1)) == bytes_of(lambda: x.mean((-1,), keepdim=True)) == \
        [pytest.approx((1 + 13 / 8) * (size + 128 * 4))]
    assert bytes_of(lambda: torch.linalg.vector_norm(x, 2, 1)) == bytes_of(lambda: x.amax(1)) == bytes_of(
        lambda: x.sum(1))
    assert bytes_of(lambda: x.sum(0)) == [1.2 * (size + 64 * 4)]
    assert bytes_of(lambda: x.max(0)) == [pytest.approx(1.2 * 1.6 * (size + 64 * (4 + 8)))]
    assert bytes_of(lambda: x.sum()) == [1.6 * (size + 4)]
    assert bytes_of(lambda: x.expand(3, 128, 64).sum()) == [1.6 * (size + 4)]
    assert bytes_of(lambda: x.cumsum(1)) == [2.3 * 2 * size]
    assert bytes_of(lambda: torch.nn.functional.layer_norm(x, (64,))) == [1.2 * 2 * size + 5000 * 128]
    per_flop = prices.BANDWIDTH / prices.PEAK
    work = 2 * 128 * 64 * 32
    assert bytes_of(lambda: x @ torch.ones(64, 32))[-1:] == [
        1.3 * (size + (64 * 32 + 128 * 32) * 4 + work * per_flop)]

    def convolution(inputs, outputs, kind=torch.nn.Conv1d, groups=1):
        layer, image = kind(inputs, outputs, 1, bias=False, groups=groups), torch.randn(2, inputs, 128)
        return bytes_of(lambda: layer(image))[0]

    def price(inputs, outputs, flops):
        return pytest.approx(2.5 * 4 * (2 * 128 * (inputs + outputs) + inputs * outputs) + 1.25 * flops * per_flop)

    tile = 2 * 2 * 128 * 8 * 32  # FLOPs
    assert convolution(8, 32) == price(8, 32, tile) and convolution(16, 32) == price(16, 32, 2 * tile)
    assert convolution(3, 4) == price(3, 4, tile)  # filled or not
    assert convolution(8, 32, torch.nn.ConvTranspose1d) == pytest.approx(1.5 * convolution(8, 32))


def price_of(call):
    return sum(prices.milliseconds(*kernel) for kernel in kernels_of(call))


def test_the_same_work_is_not_cheaper_under_another_name():
    x, one = torch.randn(4096, 64), torch.randn(8, 1, 34, 34)
    norms, sums = torch.nn.functional, price_of(lambda: x.sum(1))
    layer = price_of(lambda: norms.layer_norm(x, (64,)))
    assert price_of(lambda: norms.group_norm(x, 1)) > 0.98 * layer
    assert price_of(lambda: norms.instance_norm(x[None])) > 0.98 * layer
    for respelled in (lambda: x.unsqueeze(-1).sum(1), lambda: x.t().sum(0), lambda: x.nansum(1)):
        assert price_of(respelled) == pytest.approx(sums)
    assert price_of(lambda: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1])) == price_of(lambda: x.norm(dim=1))
    image, statistics = torch.randn(8, 32, 20, 20), [torch.zeros(32), torch.ones(32)]
    trained, fixed = (price_of(lambda: norms.batch_norm(image, *statistics, training=which)) for which in (True, False))
    assert trained > 2 * fixed
    aten, given = torch.ops.aten, (image, None, None, *statistics)
    assert price_of(lambda: aten._batch_norm_with_update(*given, 0.1, 1e-5)) == trained
    assert price_of(lambda: aten._native_batch_norm_legit(*given, False, 0.1, 1e-5)) == fixed
    weight = torch.randn(8, 1, 3, 3)
    assert price_of(lambda: norms.conv2d(one.expand(-1, 2, -1, -1), weight, groups=2)) >= \
        price_of(lambda: norms.conv2d(one, weight))
    matrix = torch.randn(64, 64)
    assert price_of(lambda: matrix.copy_(x[:64].t())) >= price_of(lambda: x[:64].t().contiguous())
    assert price_of(lambda: torch._foreach_add([x], [x[0]])) >= price_of(lambda: x + x[0])
    assert price_of(lambda: torch.relu(x[:, None].transpose(0, 1))) == price_of(lambda: torch.relu(x))
