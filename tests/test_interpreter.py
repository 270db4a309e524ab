"""Kernels without a GPU: what Triton compiles is interpreted, counted, and kept to its own memory."""

import contextlib
import re
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
import yaml

from candidates import fails
from command.files import ROOT
from judge import interpreter, prices
from judge.measured import MOST_GLOBALS, bytes_of_globals
from judge.reference import load_module
from judge.verdict import Failed

sys.path.insert(0, str(ROOT / "results/language"))
import score_features

TARGET = GPUTarget("cuda", 90, 32)
FEATURES = """helper, not inlined, early return | program_id | tuple in a loop | if on a loaded value |
bfloat16 arithmetic | float8e4nv saturates | uint64 division | integer wraps around | bitcast of half | trans | join |
dot of a transposed block | dot of batches | dot of int8 | dot of fp8 | pointer as an integer |
tensor descriptor past the end | tensor descriptor's atomic_add | gather of a matrix | k % m | v == v | ~k | k >> 3 |
tl.umulhi(k.to(tl.uint32), 1 << 30).to(tl.int32) | tl.maximum(v, w, propagate_nan=tl.PropagateNan.ALL) | philox |
libdevice.round(v * 4) | libdevice.cbrt(v) | libdevice.float2int_rd(v * 4) | libdevice.popc(k) | libdevice.clz(m) |
tl.max(a, 1, return_indices=True)[1] | tl.reduce((v, w), 0, pairs)[1] | tl.cumsum(a, 1, reverse=True) |
tl.sort(a, descending=True) | tl.histogram(m, 16) | map_elementwise | atomic_max to one place | atomic_or
""".replace("\n", " ").strip().split(" | ")


def compiled(kernel, arguments, code="ttir", **constants):
    """A kernel's TTIR, as the recorder's Triton makes it, or other code of it."""
    signature = {name: mangle_type(value) for name, value in zip(kernel.arg_names, arguments)}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, values), target=TARGET).asm[code]


def run(kernel, programs, *arguments, **constants):
    """Launch a kernel. Returns the counts."""
    parsed = interpreter.parse(compiled(kernel, arguments, **constants))
    return interpreter.launch(parsed, (programs, 1, 1), arguments)


@pytest.fixture(scope="module")
def features():
    rows = {}
    for group in yaml.safe_load((score_features.FOLDER / "features.yaml").read_text()).values():
        rows |= group
    return rows


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_the_language(features, name, tmp_path):
    """One of each kind of results/language, all of which takes minutes."""
    task, code = score_features.pair_of(name, features[name])
    theirs = load_module(task.source, tmp_path / "task.py")
    ours = load_module(code, tmp_path / "candidate.py")
    kernel, inputs = ours.kernel, theirs.get_inputs()
    ours.kernel = {(1,): lambda *given, BLOCK: run(kernel, 1, *given[:-1], NUMEL=given[-1], BLOCK=BLOCK)}
    torch.testing.assert_close(ours.ModelNew()(*inputs), theirs.Model()(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dot_scaled", "inline_asm_elementwise"])
def test_operations_without_a_price_are_refused_by_name(box, features, name):
    fails(box, *score_features.pair_of(name, features[name]), f"tl.{name} is not available inside a Triton kernel")


# ---------------------------------------------------------------------------------------------------------------------
# Programs that differ


@triton.jit
def branching_kernel(x, out, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    o = program * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n, other=0.0)
    if program == 3:
        return
    if program % 2 == 0:
        v = v * 10
        tl.store(out + o, v, mask=o < n)
    else:
        if program > 4:
            v = -v
        tl.store(out + o, v + 1, mask=o < n)


def test_programs_take_different_branches():
    x, out = torch.randn(100), torch.zeros(100)
    run(branching_kernel, 7, x, out, 100, BLOCK=16)
    expected = torch.cat([x[:16] * 10, x[16:32] + 1, x[32:48] * 10, torch.zeros(16), x[64:80] * 10, 1 - x[80:96],
                          x[96:] * 10])
    assert torch.equal(out, expected)


@triton.jit
def looping_kernel(counts, out):
    program = tl.program_id(0)
    count = tl.load(counts + program)
    total = 0
    for i in range(count):
        for j in range(i, count):
            total += j
    while count > 1:
        count = count // 2
        total += 1000
    tl.store(out + program, total)


def test_programs_leave_loops_at_different_times():
    counts, out = torch.tensor([0, 1, 7, 3], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(looping_kernel, 4, counts, out)
    assert out.tolist() == [0, 0, 2000 + sum(j * (j + 1) for j in range(7)), 1000 + 1 * 2 + 2 * 3]


def test_a_launch_in_parts_gives_the_same(monkeypatch):
    monkeypatch.setattr(interpreter, "WIDTH", 32)
    test_programs_take_different_branches()
    test_programs_leave_loops_at_different_times()


# ---------------------------------------------------------------------------------------------------------------------
# Atomics


@triton.jit
def tickets_kernel(counter, lock, tickets, total):
    o = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(tickets + o, tl.atomic_add(counter + 0 * o, 1))
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) * 2 + 1)
    tl.atomic_xchg(lock, 0)


def test_locks_and_tickets_run_program_by_program():
    counter, lock, total = [torch.zeros(1, dtype=torch.int32) for _ in range(3)]
    tickets = torch.zeros(20, dtype=torch.int32)
    run(tickets_kernel, 5, counter, lock, tickets, total)
    assert tickets.tolist() == list(range(20)) and total.item() == 31 and lock.item() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@triton.jit
def copy_kernel(x, out, start, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + start + o, mask=o < n)
    tl.store(out + o, v, mask=o < n)


def test_a_view_begins_where_it_begins():
    memory, out = torch.randn(100), torch.zeros(16)
    run(copy_kernel, 1, memory[30:50], out, 4, 16, BLOCK=16)
    assert torch.equal(out, memory[34:50])


@pytest.mark.parametrize("start, n, line, message", [
    (0, 101, 3, "out-of-bounds load (1 elements past the end)"),
    (-1, 16, 3, "out-of-bounds load (before a tensor's beginning)"),
    (0, 17, 4, "out-of-bounds store (1 elements past the end)"), (1 << 30, 1, 3, "out-of-bounds load")])
def test_addresses_outside_of_a_tensor(start, n, line, message):
    x, out = torch.randn(100), torch.zeros(16)
    with pytest.raises(Failed, match=re.escape(message)) as raised:
        run(copy_kernel, 8, x, out, start, n, BLOCK=16)
    assert raised.value.line == copy_kernel.fn.__code__.co_firstlineno + line
    assert "load" not in message or not out.any()


@pytest.mark.parametrize("x, message", [
    (None, "no tensor there"), (torch.zeros(64, dtype=torch.uint8)[1:], "misaligned load")])
def test_no_tensor_and_half_an_element(x, message):
    text = compiled(copy_kernel, [torch.randn(4), torch.randn(4), 0, 4], BLOCK=4)
    with pytest.raises(Failed, match=message):
        interpreter.launch(interpreter.parse(text), (1, 1, 1), [x, torch.randn(4), 0, 4])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@triton.jit
def endless_kernel(x):
    i = 0
    while i < 1:
        tl.store(x, i)
        i = i * 2


def test_an_endless_loop_ends(monkeypatch):
    monkeypatch.setattr(interpreter, "MOST_WORK", 1e7)
    with pytest.raises(Failed, match="does not end"):
        run(endless_kernel, 1, torch.zeros(1))


def test_a_text_that_makes_no_sense_fails():
    """Texts of a recorder that lies; or they do nothing. No other error may end the judge."""
    arguments = [torch.randn(100), torch.zeros(16), 0, 16]
    text = compiled(copy_kernel, arguments, BLOCK=16)
    for forged in ("", "module {\n}\n", "module {\n tt.func public @k() {\n" + "scf.if %a {\n" * 2000,
                   text[:len(text) // 2], text.replace("tt.load %", "tt.load %un"), text.replace("tt.load", "tt.burn"),
                   text.replace("tensor<16xi32>", "tensor<99999999999xi32>"), text.replace("arith.addi", "arith.cmpi"),
                   text.replace("tensor<16xf32>", "tensor<8xf32>").replace("tensor<16xi1>", "tensor<7xi1>")):
        with contextlib.suppress(Failed):
            interpreter.launch(interpreter.parse(forged), (1, 1, 1), arguments)


# ---------------------------------------------------------------------------------------------------------------------
# What is counted


def sectors(counts, kind, tensor):
    return int(counts.touched[kind][tensor.data_ptr()].sum())


def test_memory_is_counted_in_sectors():
    x, out = torch.randn(1024), torch.zeros(1024)
    counts = run(copy_kernel, 4, x, out, 0, 1024, BLOCK=256)
    assert sectors(counts, "load", x) == sectors(counts, "store", out) == 1024 * 4 // 32
    assert counts.requested == 2 * 1024 * 4 and counts.programs == 4
    counts = run(copy_kernel, 4, x, out, 0, 10, BLOCK=256)
    assert sectors(counts, "load", x) == 2


@triton.jit
def block_kernel(x, out, WHAT: tl.constexpr):
    o = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + o)
    if WHAT == "rows":
        v += tl.sum(v, 1)[:, None]
    elif WHAT == "columns":
        v += tl.sum(v, 0)[None, :]
    elif WHAT == "transposed":
        v = tl.trans(v)
    elif WHAT == "product":
        v = tl.dot(v, tl.trans(v), input_precision="ieee").to(v.dtype)
    elif WHAT == "roots in programs 0 and 1":
        if tl.program_id(0) < 2:
            v = tl.sqrt(v)
    tl.store(out + o, v)


def test_instructions_count_in_the_programs_that_execute_them():
    x, out = torch.randn(32, 32), torch.zeros(32, 32)
    plain, roots = (run(block_kernel, 4, x, out, WHAT=what).flops for what in ("", "roots in programs 0 and 1"))
    assert roots - plain == pytest.approx(2 * 1024 * prices.INSTRUCTION_COST["math.sqrt"], rel=0.1)


def test_shared_memory_costs_more_than_registers():
    x, out = torch.randn(32, 32), torch.zeros(32, 32)
    flops = {what: run(block_kernel, 1, x, out, WHAT=what).flops for what in ("", "rows", "columns", "transposed")}
    assert flops["columns"] - flops["rows"] == pytest.approx((prices.ACROSS_COST - 1) * 1024, rel=0.1)
    assert flops["transposed"] - flops[""] == prices.ACROSS_COST * 1024


def test_a_product_costs_by_its_precision():
    for dtype, cost in ((torch.float16, "half"), (torch.float32, "ieee"), (torch.float64, "torch.float64")):
        x, out = torch.randn(32, 32).to(dtype), torch.zeros(32, 32).to(dtype)
        counts = run(block_kernel, 1, x, out, WHAT="product")
        assert counts.products == pytest.approx(2 * 32 ** 3 * prices.DOT_COST[cost])
        torch.testing.assert_close(out, x @ x.T)


# ---------------------------------------------------------------------------------------------------------------------
# Machine code


def test_a_binary_says_how_much_memory_of_its_own_it_has(monkeypatch, tmp_path):
    """Libdevice asks for switches by their names, which are global variables. A kernel's text can smuggle in more."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def memory(what):
        return bytes_of_globals(compiled(block_kernel, [torch.zeros(1), torch.zeros(1)], "cubin", WHAT=what))

    assert 0 < memory("roots in programs 0 and 1") < MOST_GLOBALS
    make = CUDABackend.make_ptx
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *arguments: make(*arguments).replace(
        ".visible .entry", ".global .align 16 .b8 MEMO[65536];\n.visible .entry"))
    assert memory("") >= 65536
