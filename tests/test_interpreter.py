"""What a GPU would get wrong is wrong in the interpreter: races between a launch's programs, and the card's limits.

The naive check is that of naive.py: Triton's own interpreter, which runs one program after the other, in order.
"""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from candidates import by_elements, indent, passes, problem, replaced, solution, verdict

TOTAL = problem("torch.sigmoid(x).sum()", "torch.randn(64, 64)")
SHARE = problem("torch.exp(x) / torch.exp(x).sum()", "torch.randn(64, 64)")
PADDED = problem("torch.nn.functional.pad(x * 2, (1, 1))", "torch.randn(64, 62)")
COSINE = problem("x.cos() * 2", "torch.randn(64, 64)")
TWICE = problem("x * 2.0", "torch.randn(64, 64)")


def add_up(body, arguments=""):
    """`body` has s, a program's part of the total, and adds it up in `out` with the help of part, lock and count."""
    return solution(f'''
@triton.jit
def total(x, part, lock, count, out{arguments}):
    p = tl.program_id(0)
    s = tl.sum(tl.sigmoid(tl.load(x + p * 128 + tl.arange(0, 128))), axis=0)
{indent(body)}''', f'''
lock, count = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
part, out = torch.empty(32), torch.zeros(())
total[(32,)](x, part, lock, count, out{", HUGE=1 << 40" if arguments else ""})
return out''')


def share(body):
    """`body` has e, a program's exponentials, and finds out their total over all programs."""
    return solution(f'''
@triton.jit
def share(x, part, total, count, out):
    p = tl.program_id(0)
    e = tl.exp(tl.load(x + p * 128 + tl.arange(0, 128)))
{indent(body)}    tl.store(out + p * 128 + tl.arange(0, 128), e / t)
''', '''
part, total, count, out = torch.empty(32), torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.empty_like(x)
share[(32,)](x, part, total, count, out)
return out''')


def mirrored(between, place):
    """A program stores its row, and loads it from `place`; `between` comes in between."""
    return solution(f"""
@triton.jit
def mirror(x, rows, out):
    c = tl.arange(0, 64)
    o = tl.program_id(0) * 64 + c
    tl.store(rows + o, tl.cos(tl.load(x + o)))
    {between}
    tl.store(out + tl.program_id(0) * 64 + {place}, tl.load(rows + tl.program_id(0) * 64 + {place}) * 2)
""", "out = torch.empty_like(x)\nmirror[(64,)](x, torch.empty_like(x), out)\nreturn out")


def pad(between):
    """A program stores a row of zeros, and its values into the middle; `between` comes in between."""
    return solution(f"""
@triton.jit
def pad(x, out):
    c = tl.arange(0, 64)
    o = out + tl.program_id(0) * 64 + c
    tl.store(o, tl.zeros((64,), tl.float32))
    {between}
    tl.store(o + 1, tl.load(x + tl.program_id(0) * 62 + c, mask=c < 62) * 2, mask=c < 62)
""", "out = torch.empty(64, 64)\npad[(64,)](x, out)\nreturn out")


ALL = "tl.sum(tl.load(part + tl.arange(0, 32)), axis=0)"
LOCK = "while tl.atomic_cas(lock, 0, 1) == 1:\n    pass\n"
STORED, CHANGED, SAME = "what another program of the same launch stored", "changed", "stores in the same place"
IN_ORDER = {  # races that programs in order, one by one, win: {name: (task, code, what the verdict says)}
    "+= without an atomic": (TOTAL, add_up("tl.store(out, tl.load(out) + s)"), SAME),
    "+= by programs that should run one by one": (
        TOTAL, add_up("tl.store(out, tl.load(out) + s)", ", HUGE: tl.constexpr"), SAME),
    "+= by programs that branch": (
        TOTAL, add_up("if p % 2 == 0:\n    s += 0\ntl.store(out, tl.load(out) + s)"), STORED),
    "+= under a lock of each program's own": (
        TOTAL, add_up(LOCK.replace("lock", "lock + p") + "tl.store(out, tl.load(out) + s)"), SAME),
    "+= under a lock given back too early": (
        TOTAL, add_up(LOCK + "t = tl.load(out)\ntl.atomic_xchg(lock, 0)\ntl.store(out, t + s)"), STORED),
    "the last block is that of the last program": (
        TOTAL, add_up(f"tl.store(part + p, s)\nif p == 31:\n    tl.store(out, {ALL})"), STORED),
    "the last block counts before it stores": (TOTAL, add_up(
        f"n = tl.atomic_add(count, 1)\ntl.store(part + p, s)\nif n == 31:\n    tl.store(out, {ALL})"), STORED),
    "a row of zeros that other threads overwrite": (PADDED, pad("pass"), "overwrites what other threads"),
    "a row that other threads have stored": (COSINE, mirrored("pass", "63 - c"), "other threads of the program"),
    "a scan in the order of atomics": (problem("x.flatten().cumsum(0)", "torch.randn(64, 64)"), solution("""
@triton.jit
def scan(x, carry, out):
    o = tl.program_id(0) * 128 + tl.arange(0, 128)
    v = tl.load(x + o)
    before = tl.atomic_add(carry, tl.sum(v, axis=0))
    tl.store(out + o, tl.cumsum(v, axis=0) + before)
""", "out = torch.empty(x.numel())\nscan[(32,)](x, torch.zeros(1), out)\nreturn out"), "wrong values"),
}
IN_LOCKSTEP = {  # races that programs win which run in lockstep
    "partial sums read by all": (SHARE, share(f"tl.store(part + p, tl.sum(e, axis=0))\nt = {ALL}"), STORED),
    "atomic_add, then a plain load": (
        SHARE, share("tl.atomic_add(total, tl.sum(e, axis=0))\nt = tl.load(total)"), CHANGED),
    "the total read by atomics, too early": (
        SHARE, share("tl.atomic_add(total, tl.sum(e, axis=0))\nt = tl.atomic_add(total, 0.0)"), "wrong values"),
    "atomics that wait for nobody": (SHARE, share(
        f"tl.store(part + p, tl.sum(e, axis=0))\ntl.atomic_add(count, 1)\ntl.atomic_add(count, 1)\nt = {ALL}"),
        "wrong values"),
    "a barrier for the whole grid": (problem("torch.exp(x) / torch.exp(x).sum()", "torch.randn(8, 64)"), re.sub(
        r"\b32\b", "4", share(  # of four programs: each of them waits for long
            "tl.store(part + p, tl.sum(e, axis=0))\ntl.atomic_add(count, 1)\n"
            f"while tl.atomic_add(count, 0) < 32:\n    pass\nt = {ALL}")), "waits for programs"),
    "all load what one is about to overwrite": (problem("x + x[-1]", "torch.randn(64, 64)"), solution("""
@triton.jit
def last(y):
    c = tl.arange(0, 64)
    tl.store(y + tl.program_id(0) * 64 + c, tl.load(y + tl.program_id(0) * 64 + c) + tl.load(y + 63 * 64 + c))
""", "y = x.clone()\nlast[(64,)](y)\nreturn y"), STORED),
    "tiles overlap, and the right one comes last": (TWICE, solution("""
@triton.jit
def overlap(x, out, n):
    o = tl.program_id(0) * 64 + tl.arange(0, 128)
    v = tl.load(x + o, mask=o < n, other=0.0)
    tl.store(out + o, tl.where(tl.arange(0, 128) < 64, v * 2, 0.0), mask=o < n)
""", "out = torch.empty_like(x)\noverlap[(64,)](x, out, x.numel())\nreturn out"), SAME),
}


def ahead():
    return [row[:2] for row in (*IN_ORDER.values(), *IN_LOCKSTEP.values())]


def says(sandbox, task, code):
    found = verdict(sandbox, task, code)
    assert not found.correct
    return found.error


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_race_that_programs_in_order_win_is_an_error(box, naively, name):
    task, code, reason = IN_ORDER[name]
    assert naively(task.source, code)["correct"]
    assert reason in says(box, task, code)


@pytest.mark.parametrize("name", IN_LOCKSTEP)
def test_a_race_that_lockstep_wins_is_an_error(box, name):
    task, code, reason = IN_LOCKSTEP[name]
    assert reason in says(box, task, code)


@pytest.mark.parametrize("body", [
    "tl.atomic_add(out, s)",
    LOCK + "tl.store(out, tl.load(out) + s)\ntl.atomic_xchg(lock, 0)",
    f"tl.store(part + p, s)\nif tl.atomic_add(count, 1) == 31:\n    tl.store(out, {ALL})",
    "while tl.atomic_cas(lock, p, p) != p:\n    pass\nif p > 0:\n    s += tl.load(out)\ntl.store(out, s)\n"
    "tl.atomic_xchg(lock, p + 1)"], ids=["atomics", "a mutex", "the last block", "in the order of programs"])
def test_atomics_that_order_programs_are_accepted(box, body):
    passes(box, TOTAL, add_up(body))


@pytest.mark.parametrize("between, place", [("pass", "c"), ("tl.debug_barrier()", "63 - c")])
def test_a_row_kept_in_memory_is_accepted(box, between, place):
    passes(box, COSINE, mirrored(between, place))


@pytest.mark.parametrize("grid, option, reason", [
    ("(8,)", ", num_warps=64", "num_warps: 64"), ("(8,)", ", num_ctas=32", "num_ctas: 32"),
    ("(8, 70000)", "", "grid in y: 70000"), ("(8, 1, 65536)", "", "grid in z: 65536"),
    ("(8, 1, 1, 1)", "", "dimensions of the grid: 4")])
def test_what_a_gpu_cannot_launch(box, grid, option, reason):
    code = replaced(by_elements("v * 2"), ("(triton.cdiv(x.numel(), 512),)", grid), ("BLOCK=512", f"BLOCK=512{option}"))
    assert reason in says(box, TWICE, code)


def test_a_block_that_would_keep_the_compiler_busy_for_minutes(box):
    code = replaced(by_elements("v * 2"), ("(triton.cdiv(x.numel(), 512),)", "(1,)"), ("BLOCK=512", "BLOCK=131072"))
    assert "a block of 131072 elements for 128 threads" in says(box, TWICE, code)


@triton.jit
def padded(x, out, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(out + column, tl.load(x + column, mask=column < 50))


def test_the_compiler_zeroes_what_a_mask_leaves_out():
    """So the interpreter does, too. (Where loads are copied to shared memory, cp.async fills up with zeros.)"""
    source = ASTSource(padded, {"x": "*fp32", "out": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 64})
    lines = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"].split("\n")
    at = next(i for i, line in enumerate(lines) if "ld.global" in line)
    register = lines[at].split("{")[1].split("}")[0].strip()
    assert any(line.split()[1:] == [f"{register},", "0x0;"] for line in lines[at - 4:at])
