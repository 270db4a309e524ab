"""Cheats that fool a checker which runs the candidate beside the reference and compares once: they fail here.

Programs of later red-team passes, with their own proof that they work, are in results/adversaries; one of each kind is
judged here, too. Attempts to leave the jail are in test_jail.py.
"""

import json

import pytest
import torch

from candidates import APPLY, by_elements, fails, indent, passes, problem, replaced, small_task, solution
from command.files import ROOT, read_lines
from judge.program import packed, read, unpacked, write
from judge.verdict import Failed, failed_in, failure
from tasks import Task

HONEST = by_elements("tl.sigmoid(v) * 2.0")
POINTWISE = problem("torch.sigmoid(x) * 2.0")
TF32 = solution("""
@triton.jit
def product(x, out):
    o = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + o, tl.dot(tl.load(x + o), tl.load(x + o)))
""", "out = torch.empty_like(x)\nproduct[(1,)](x, out)\nreturn out")
WRONG = "wrong values"
CHEATS = {  # name: (candidate, what the verdict says, task)
    "a decoy times zero": (replaced(HONEST, ("return out", "return torch.sigmoid(x) * 2.0 + 0.0 * out")),
                           "do not reach the output", POINTWISE),
    "zeros where outputs are small": (by_elements("v * 0.0"), WRONG, problem("x.softmax(0)", "torch.randn(16384)")),
    "mutating the input": (solution("", "x.zero_()\nreturn torch.ones(64, 64)"), "input tensors in place", POINTWISE),
    "tensor cores in place of fp32": (TF32, WRONG, problem("x @ x")),
    "what is in memory": (by_elements("tl.load(out + o) + 0 * tl.sigmoid(v) * 2.0"), WRONG, POINTWISE),
    "an accumulator that is not set to zero": (solution(
        "", "out = torch.empty(x.shape, dtype=torch.int32)\nout += (x > 0)\nreturn out > 0"), WRONG, problem("x > 0")),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_fails(box, name):
    code, says, task = CHEATS[name]
    fails(box, task, code, says)


def test_a_second_kernel_that_does_nothing_adds_no_coverage(box):
    launch = "idle[(8,)](x, torch.empty_like(x), x.numel(), BLOCK=512)"
    code = by_elements("tl.sigmoid(v) * 2.0", replaced(APPLY, ("apply", "idle"), ("RESULT", "v")))
    code = replaced(code, ("return out", f"for _ in range(5):\n            {launch}\n        return out"))
    assert passes(box, POINTWISE, code).coverage < 0.25


LATER = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/cases.jsonl")
         if "open" not in case and "proof" not in case and case["kind"] != "memory"}


@pytest.mark.parametrize("name", LATER)
def test_one_of_each_kind_of_later_passes(box, name):
    fails(box, Task(name, 0, LATER[name]["task"]), LATER[name]["code"])


# ---------------------------------------------------------------------------------------------------------------------
# Forged programs: a recorder that a candidate has taken over sends what it likes, and is judged like any other. Each
# candidate changes its own recording after it has been made. None is accepted that does less than the honest one, and
# none ends the judge.

TASK = small_task("victim", "return torch.sigmoid(x) * 2.0", state="self.unused = torch.nn.Parameter(torch.zeros(64))")
FORGE = """
import sys
packed = sys.modules["judge.program"].packed

def packed_forgery(answer):
    program, constants = answer["program"], answer["constants"]
    rows, x, out = program["rows"], program["inputs"][0], program["output"]["value"]
    [launched] = [row for row in rows if row[0] == 'launch']
    launch = launched[1]
CHANGE
    return packed(answer)

sys.modules["__main__"].packed = packed_forgery
"""


def forge(change) -> str:
    """A candidate whose recording is changed by these statements, just before it is sent."""
    return FORGE.replace("CHANGE", indent(change, 4)) + HONEST


NO_ARGUMENTS = "{'tuple': []}, {'dict': []}, []"
FORGED = {  # name: (what is changed, what the verdict says)
    "an input out of place": ("program['output'] = {'value': x}", "no memory of its own"),
    "no rows": ("del program['rows']", ""),
    "a kernel that is not there": ("launch['compiled'] = 1", ""),
    "a grid of text": ("launch['grid'][0] = '16'", ""),
    "an operator that reads a file": (
        "rows.insert(0, ['operator', 'from_file.default', {'tuple': ['/etc/passwd']}, {'dict': []}, []])",
        "aten.from_file is not supported"),
    "an operator that takes other memory": (
        "rows.insert(0, ['operator', 'set_.source_Tensor', {'tuple': [{'value': x}, {'value': out}]}, "
        "{'dict': []}, []])", "aten.set_ is not supported"),
    "too many rows": ("rows *= 10_001", ""),
    "a size beyond all memory": (
        "program['constants'][99] = ['torch.uint8', [1 << 47], [1], 0, 1 << 47]", "constants take much more memory"),
    "a constant beyond its memory": (
        "program['constants'][99] = ['torch.float32', [64, 64], [64, 1], 0, 4]", ""),
    "a view beyond its memory": (
        "rows.append(['operator', 'as_strided.default', {'tuple': [{'value': out}, [64, 65], [64, 1], 64]}, "
        "{'dict': []}, [[99, 'torch.float32', [64, 65], [64, 1]]]])", "storage"),
    "a tree without an end": ("tree = []\nfor _ in range(5000):\n    tree = [tree]\nprogram['output'] = tree", ""),
    "an output that overlaps": (
        "rows.append(['operator', 'as_strided.default', {'tuple': [{'value': out}, [64, 64], [0, 1], 0]}, "
        "{'dict': []}, [[99, 'torch.float32', [64, 64], [0, 1]]]])\nprogram['output'] = {'value': 99}",
        "no memory of its own"),
    "a wrong answer as a constant": (
        "constants[99] = torch.ones(64 * 64).view(torch.uint8)\n"
        "program['constants'][99] = ['torch.float32', [64, 64], [64, 1], 0, 1 << 14]\n"
        "program['output'] = {'value': 99}", "no memory of its own"),
    "an attribute that is no operator": (f"rows.insert(0, ['operator', '__dict__.clear', {NO_ARGUMENTS}])", ""),
    "no launch": ("rows.remove(launched)", "wrong values"),
    "a kernel that is no text": ("answer['compiled'][0]['code'] = bytes(range(128, 256))", ""),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_program_is_no_better_than_an_honest_one(box, name):
    change, words = FORGED[name]
    fails(box, TASK, forge(change), words)


def test_a_recording_can_be_forged(box):
    """What the tests above rest on: the candidate's changes reach the judge."""
    same, twice, fixed = (passes(box, TASK, forge(change)) for change in (
        "pass", "rows.append(launched)", "program['fixed'] = True"))
    assert passes(box, TASK, HONEST).speedup == same.speedup > twice.speedup
    assert "not perturbed" in fixed.note and not same.note


def test_what_is_no_recording_is_a_failure():
    half = packed({"program": {}, "constants": {}, "compiled": []})[:-3]
    for data in b"", b"{}", bytes(64), b"\xff" * 64, half, b"failed by itself 1 why", b"failed forward 1e9 why":
        assert failed_in(data) is None
        with pytest.raises(Failed, match="makes no sense"):
            unpacked(data)


def test_a_recorder_says_why_there_is_no_recording():
    failed = failed_in(failure("compile", "two\nlines \ud800", 7))
    assert (failed.stage, failed.line, str(failed)) == ("compile", 7, "two\nlines ?")
    assert failed_in(failure("forward", "why")).line is None
    assert len(str(failed_in(b"failed forward  " + b"\xff" * 10**7))) < 2000


def test_values_arrive_whole():
    tensor = torch.arange(6.0)
    tree = {"a": [tensor, (1, "b", None), 2.5, True], 7: (torch.float16, torch.device("cuda"), 1 + 2j)}
    got = read(json.loads(json.dumps(write(tree, lambda _: 3))), {3: tensor}, torch.device("cpu"))
    assert str(got) == str(tree).replace("type='cuda'", "type='cpu'")
    recording = {"program": {"rows": []}, "constants": {3: tensor.view(torch.uint8)}, "compiled": [{"code": b"x"}]}
    again = unpacked(packed(recording))
    assert torch.equal(again["constants"].pop(3).view(torch.float32), tensor)
    assert again == {"program": {"rows": []}, "constants": {}, "compiled": [{"code": b"x"}]}
