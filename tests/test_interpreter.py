"""Kernels without a GPU: what Triton compiles is interpreted, counted, and kept to its own memory."""

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.language.extra import libdevice

from judge import interpreter, prices
from judge.verdict import Failed

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
         torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.float8_e5m2: "fp8e5"}


def compiled(kernel, arguments, **constants):
    """A kernel's TTIR, as the recorder's Triton makes it."""
    signature, constexprs = {}, {}
    values = dict(zip(kernel.arg_names, arguments)) | constants
    for position, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in constants:
            signature[name], constexprs[position,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    backend = CUDABackend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    module = source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(),
                            context)
    return str(backend.make_ttir(module, {}, options, 90))


def run(kernel, programs, *arguments, **constants):
    """Launch a kernel. Returns the counts."""
    parsed = interpreter.parse(compiled(kernel, arguments, **constants))
    return interpreter.launch(parsed, (programs, 1, 1), arguments)


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
    rest = count
    while rest > 1:
        rest = rest // 2
        total += 1000
    tl.store(out + program, total)


def test_programs_leave_loops_at_different_times():
    counts, out = torch.tensor([0, 1, 7, 3], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(looping_kernel, 4, counts, out)
    expected = []
    for count in counts.tolist():
        total = sum(j for i in range(count) for j in range(i, count))
        expected.append(total + 1000 * max(0, count.bit_length() - 1))
    assert out.tolist() == expected


def test_a_launch_in_parts_gives_the_same(monkeypatch):
    monkeypatch.setattr(interpreter, "WIDTH", 32)
    test_programs_take_different_branches()
    test_programs_leave_loops_at_different_times()


@triton.jit(noinline=True)
def called(n):
    if n > 2:
        return n * 10
    return n


@triton.jit
def calling_kernel(out):
    tl.store(out + tl.program_id(0), called(tl.program_id(0)))


def test_a_function_that_is_not_inlined_returns_early():
    out = torch.zeros(5, dtype=torch.int32)
    run(calling_kernel, 5, out)
    assert out.tolist() == [0, 1, 2, 30, 40]


# ---------------------------------------------------------------------------------------------------------------------
# A kernel's own functions


@triton.jit
def farthest(a, i, b, j):
    if tl.abs(a) > tl.abs(b):
        c = a
        k = i
    else:
        c = b
        k = j
    return c, k


@triton.jit
def recurrence(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def own_functions_kernel(x, g, out, places, carried):
    rows, columns = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    v = tl.load(x + rows * 16 + columns)
    value, place = tl.reduce((v, rows + 0 * columns), 0, farthest)
    tl.store(out + tl.arange(0, 16), value)
    tl.store(places + tl.arange(0, 16), place)
    gate = tl.load(g + rows * 16 + columns)
    _, state = tl.associative_scan((gate, v), 1, recurrence)
    tl.store(carried + rows * 16 + columns, state)


def test_reductions_and_scans_use_the_kernels_functions():
    x, g = torch.randn(8, 16), torch.rand(8, 16)
    out, places, carried = torch.zeros(16), torch.zeros(16, dtype=torch.int32), torch.zeros(8, 16)
    run(own_functions_kernel, 1, x, g, out, places, carried)
    assert torch.equal(places.long(), x.abs().argmax(0))
    assert torch.equal(out, x.gather(0, places.long()[None])[0])
    state = torch.zeros(8)
    for column in range(16):
        state = g[:, column] * state + x[:, column]
        torch.testing.assert_close(carried[:, column], state)


@triton.jit
def sort_kernel(x, out):
    o = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + o, tl.sort(tl.load(x + o)) + tl.cumsum(tl.load(x + o), 1, reverse=True))


def test_sorts_and_scans_backwards():
    x, out = torch.randn(4, 32), torch.zeros(4, 32)
    run(sort_kernel, 1, x, out)
    torch.testing.assert_close(out, x.sort(1)[0] + x.flip(1).cumsum(1).flip(1))


# ---------------------------------------------------------------------------------------------------------------------
# Atomics


@triton.jit
def atomics_kernel(x, total, largest, bits):
    o = tl.program_id(0) * 16 + tl.arange(0, 16)
    v = tl.load(x + o)
    tl.atomic_add(total + o % 2, v)
    tl.atomic_max(largest, tl.max(v))
    tl.atomic_or(bits + 0 * o, 1 << (o % 31))


def test_atomics_of_many_programs_meet():
    x, total, largest = torch.randn(64), torch.zeros(2), torch.full((1,), -9.0)
    bits = torch.zeros(1, dtype=torch.int32)
    run(atomics_kernel, 4, x, total, largest, bits)
    torch.testing.assert_close(total, x.view(-1, 2).sum(0))
    assert largest.item() == x.max() and bits.item() == 2 ** 31 - 1


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
# Types


@triton.jit
def types_kernel(x, half, eight, integers, out):
    o = tl.arange(0, 64)
    v = tl.load(x + o)
    tl.store(half + o, v * v)
    tl.store(eight + o, (v * 32768).to(tl.float8e5))
    large = tl.load(integers + o).to(tl.uint32)
    tl.store(out + o, (large // 3).to(tl.int32) ^ (large > 5).to(tl.int32))


def test_bf16_fp8_and_integers_without_sign():
    x, integers = torch.randn(64).bfloat16(), torch.randint(-9, 9, (64,), dtype=torch.int32)
    half, eight = torch.zeros(64).bfloat16(), torch.zeros(64).to(torch.float8_e5m2)
    out = torch.zeros(64, dtype=torch.int32)
    run(types_kernel, 1, x, half, eight, integers, out)
    assert torch.equal(half, x * x)
    expected = (x.float() * 32768).bfloat16().float().clamp(-57344, 57344).to(torch.float8_e5m2)
    torch.testing.assert_close(eight.float(), expected.float())
    numbers = integers.long() & 0xFFFFFFFF
    assert torch.equal(out.long(), numbers // 3 ^ (numbers > 5))


@triton.jit
def libdevice_kernel(x, out):
    o = tl.arange(0, 64)
    v = tl.load(x + o)
    tl.store(out + o, libdevice.rint(v * 4) + libdevice.round(v * 4) + libdevice.cbrt(v) + libdevice.fast_expf(v)
             + libdevice.pow(tl.abs(v), 1.5) + libdevice.isnan(v).to(tl.float32))


def test_functions_of_libdevice():
    x, out = torch.randn(64), torch.zeros(64)
    run(libdevice_kernel, 1, x, out)
    rounded = torch.copysign((x.abs() * 4 + 0.5).floor(), x)
    cube_root = x.sign() * x.abs() ** (1 / 3)
    torch.testing.assert_close(out, (x * 4).round() + rounded + cube_root + x.exp() + x.abs() ** 1.5)


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


@pytest.mark.parametrize("start, n, message", [
    (0, 101, "out-of-bounds load (1 elements past the end)"),
    (-1, 16, "out-of-bounds load (before a tensor's beginning)"),
    (0, 17, "out-of-bounds store (1 elements past the end)"),
    (1 << 30, 1, "out-of-bounds load")])
def test_addresses_outside_of_a_tensor(start, n, message):
    x, out = torch.randn(100), torch.zeros(16)
    before = out.clone()
    with pytest.raises(Failed, match=message.replace("(", r"\(").replace(")", r"\)")) as raised:
        run(copy_kernel, 8, x, out, start, n, BLOCK=16)
    offset = 2 if "load" in message else 3
    assert raised.value.line == copy_kernel.fn.__code__.co_firstlineno + 1 + offset
    assert "load" not in message or torch.equal(out, before)


def test_no_tensor_and_half_an_element():
    with pytest.raises(Failed, match="no tensor there"):
        interpreter.launch(interpreter.parse(compiled(copy_kernel, [torch.randn(4), torch.randn(4), 0, 4], BLOCK=4)),
                           (1, 1, 1), [None, torch.randn(4), 0, 4])
    raw = torch.zeros(64, dtype=torch.uint8)
    text = compiled(copy_kernel, [torch.randn(4), torch.randn(4), 0, 4], BLOCK=4)
    with pytest.raises(Failed, match="misaligned load"):
        interpreter.launch(interpreter.parse(text), (1, 1, 1), [raw[1:], torch.randn(4), 0, 4])


@triton.jit
def descriptor_kernel(x, out):
    source = tl.make_tensor_descriptor(x, shape=[10, 12], strides=[12, 1], block_shape=[8, 8])
    target = tl.make_tensor_descriptor(out, shape=[10, 12], strides=[12, 1], block_shape=[8, 8])
    i, j = tl.program_id(0) // 2 * 8, tl.program_id(0) % 2 * 8
    target.store([i, j], source.load([i, j]) * 2)


def test_tensor_descriptors_end_where_the_tensor_ends():
    x, out = torch.randn(10, 12), torch.zeros(10, 12)
    run(descriptor_kernel, 4, x, out)
    assert torch.equal(out, 2 * x)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@triton.jit
def assembly_kernel(x):
    o = tl.arange(0, 16)
    v = tl.inline_asm_elementwise("shl.b32 $0, $1, 3;", "=r,r", [tl.load(x + o)], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + o, v)


@triton.jit
def scaled_kernel(x, scale, out):
    o = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    v, s = tl.load(x + o), tl.load(scale + tl.arange(0, 16)[:, None]).to(tl.uint8, bitcast=True)
    tl.store(out + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :],
             tl.dot_scaled(v, s, "e5m2", tl.trans(v), s, "e5m2"))


def test_operations_without_a_price_are_refused_by_name():
    with pytest.raises(Failed, match="tl.inline_asm_elementwise is not available .* without a GPU") as raised:
        interpreter.parse(compiled(assembly_kernel, [torch.zeros(16, dtype=torch.int32)]))
    assert raised.value.stage == "compile"
    arguments = [torch.zeros(16, 32).to(torch.float8_e5m2), torch.zeros(16, dtype=torch.int8), torch.zeros(16, 16)]
    with pytest.raises(Failed, match="tl.dot_scaled is not available"):
        interpreter.parse(compiled(scaled_kernel, arguments))


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


def forged(text):
    """Texts of a recorder that lies."""
    yield ""
    yield "module {\n}\n"
    yield text[:len(text) // 2]
    yield text.replace("tt.load %", "tt.load %un")
    yield text.replace("tt.load", "tt.burn")
    yield text.replace("tensor<16xi32>", "tensor<99999999999xi32>")
    yield text.replace("tensor<16xf32>", "tensor<8xf32>").replace("tensor<16xi1>", "tensor<7xi1>")
    yield text.replace("arith.addi", "arith.cmpi")
    yield "module {\n tt.func public @k() {\n" + "scf.if %a {\n" * 2000


def test_a_text_that_makes_no_sense_fails():
    arguments = [torch.randn(100), torch.zeros(16), 0, 16]
    for text in forged(compiled(copy_kernel, arguments, BLOCK=16)):
        try:
            interpreter.launch(interpreter.parse(text), (1, 1, 1), arguments)
        except Failed:
            pass


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
def shared_kernel(x, out):
    o = tl.arange(0, 64)
    tl.store(out + tl.program_id(0) * 64 + o, tl.load(x + o))


def test_what_all_programs_read_is_fetched_once_and_requested_by_each():
    x, out = torch.randn(64), torch.zeros(8 * 64)
    counts = run(shared_kernel, 8, x, out)
    assert sectors(counts, "load", x) == 8 and counts.requested == 2 * 8 * 64 * 4


@triton.jit
def exponent_kernel(x, out, TIMES: tl.constexpr):
    o = tl.program_id(0) * 64 + tl.arange(0, 64)
    v = tl.load(x + o)
    if tl.program_id(0) < 2:
        for _ in tl.static_range(TIMES):
            v = tl.exp(v)
    tl.store(out + o, v)


def test_instructions_count_in_the_programs_that_execute_them():
    x, out = torch.randn(256), torch.zeros(256)
    once = run(exponent_kernel, 4, x, out, TIMES=1).flops
    assert run(exponent_kernel, 4, x, out, TIMES=3).flops - once == pytest.approx(
        2 * 2 * 64 * (prices.INSTRUCTION_COST["math.exp"] + 1), rel=0.1)


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
    tl.store(out + o, v)


def test_shared_memory_costs_more_than_registers():
    x, out = torch.randn(32, 32), torch.zeros(32, 32)
    flops = {what: run(block_kernel, 1, x, out, WHAT=what).flops for what in ("", "rows", "columns", "transposed")}
    assert flops["columns"] - flops["rows"] == pytest.approx((prices.ACROSS_COST - 1) * 1024, rel=0.1)
    assert flops["transposed"] - flops[""] == prices.ACROSS_COST * 1024


def test_a_product_costs_by_its_precision():
    for dtype, cost in ((torch.float16, "half"), (torch.float32, "ieee"), (torch.float64, "torch.float64")):
        x = torch.randn(32, 32).to(dtype)
        out = torch.zeros_like(x)
        counts = run(block_kernel, 1, x, out, WHAT="product")
        assert counts.products == pytest.approx(2 * 32 ** 3 * prices.DOT_COST[cost])
        tolerance = 1e-2 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(out, x @ x.T, rtol=tolerance, atol=tolerance)
