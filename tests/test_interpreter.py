"""What the interpreter refuses as a GPU does: the card's limits; and programs that atomics put in order.

(Races between the programs of a launch are not looked for.)
"""

import pytest

from candidates import by_elements, indent, passes, problem, replaced, solution, verdict

TOTAL = problem("torch.sigmoid(x).sum()", "torch.randn(64, 64)")
TWICE = problem("x * 2.0", "torch.randn(64, 64)")


def add_up(body):
    """`body` has s, a program's part of the total, and adds it up in `out` with the help of part, lock and count."""
    return solution(f'''
@triton.jit
def total(x, part, lock, count, out):
    p = tl.program_id(0)
    s = tl.sum(tl.sigmoid(tl.load(x + p * 128 + tl.arange(0, 128))), axis=0)
{indent(body)}''', '''
lock, count = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
part, out = torch.empty(32), torch.zeros(())
total[(32,)](x, part, lock, count, out)
return out''')


def says(sandbox, task, code):
    found = verdict(sandbox, task, code)
    assert not found.correct
    return found.error


@pytest.mark.parametrize("body", [
    "tl.atomic_add(out, s)",
    "tl.store(part + p, s)\nif tl.atomic_add(count, 1) == 31:\n"
    "    tl.store(out, tl.sum(tl.load(part + tl.arange(0, 32)), axis=0))"], ids=["atomics", "the last block"])
def test_atomics_that_order_programs_are_accepted(box, body):
    passes(box, TOTAL, add_up(body))


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
