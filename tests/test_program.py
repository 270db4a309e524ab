"""Forged programs: a recorder that a candidate has taken over sends what it likes, and is judged like any other.

Each candidate changes its own recording after it has been made. None is accepted that does less than the honest one,
and none ends the judge.
"""

import pytest

from candidates import fails, indent, passes, replaced, verdict
from test_cheats import HONEST, POINTWISE, victim

TASK = victim(replaced(POINTWISE, ("256, 64", "64, 64")))
FORGE = """
import sys
packed = sys.modules["judge.processes"].packed

def packed_forgery(answer):
    program, constants = answer.get("program"), answer.get("constants")
    if program:
        steps, x, bias = program["steps"], program["inputs"][0], program["state"]["bias"]
        launch, out = steps[1][1], program["output"]["tensor"]
CHANGE
    return packed(answer)

sys.modules["judge.processes"].packed = packed_forgery
"""


def forge(change) -> str:
    """A candidate whose recording is changed by these statements, just before it is sent."""
    return replaced(HONEST, ("\n@triton.jit", FORGE.replace("CHANGE", indent(change, 8)) + "\n@triton.jit"))


NONSENSE = "makes no sense"
FORGED = {  # name: (statements, words of the verdict)
    "a parameter in an input's memory": ("program['state']['bias'] = [0, 'torch.float32', [64], [1], 0]", NONSENSE),
    "a shape beyond its memory": ("out[2] = [65, 64]", "does not fit"),
    "an operator that reads a file": (
        "steps.insert(0, ['operator', 'from_file.default', {'tuple': ['/etc/passwd']}, {'dict': []}, []])",
        "aten.from_file is not supported"),
    "an operator that takes other memory": (
        "steps.insert(0, ['operator', 'set_.source_Tensor', {'tuple': [{'tensor': x}, {'tensor': bias}]}, "
        "{'dict': []}, [x]])", "aten.set_ is not supported"),
    "too many steps": ("steps *= 10_001", ""),
    "a launch option": ("launch['options']['launch_pdl'] = True", "no argument or launch option launch_pdl"),
    "a size beyond all memory": ("constants[9] = 1 << 47", ""),
    "a tree without an end": ("tree = []\nfor _ in range(5000):\n    tree = [tree]\nprogram['output'] = tree", ""),
    "other inputs": ("program['inputs'][0][2:4] = [[4096], [1]]", "shapes of the inputs change"),
    "an output that overlaps": ("out[3] = [0, 1]", "no memory of its own"),
    "a wrong answer as a constant": ("constants[9] = torch.ones(64 * 64).view(torch.uint8)\n"
                                     "program['output'] = {'tensor': [9, *out[1:]]}", "wrong values"),
    "an attribute that is no operator": (
        "steps.insert(0, ['operator', '__dict__.clear', {'tuple': []}, {'dict': []}, []])", NONSENSE),
    "no launch": ("del steps[1]", "wrong values"),
    "a view that is new memory": (
        "view = ['operator', 't.default', {'tuple': [{'tensor': x}]}, {'dict': []}, [[9, *x[1:]]]]\n"
        "steps.insert(0, view)", NONSENSE),
    "a failure without an error": ("answer['failed'] = 'forward'", NONSENSE),
    "a huge output": ("constants[9] = 1 << 27\n"
                      "program['output'] = {'tensor': [9, 'torch.float32', [1 << 25], [1], 0]}", "far larger"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_program_is_no_better_than_an_honest_one(box, name):
    change, words = FORGED[name]
    fails(box, TASK, forge(change), words)


def test_a_recording_can_be_forged(box):
    """What the tests above rest on: the candidate's changes reach the judge."""
    same = passes(box, TASK, forge("pass"))
    twice = passes(box, TASK, forge("steps.append(steps[1])"))
    assert passes(box, TASK, HONEST).speedup == same.speedup > twice.speedup


def test_a_forged_claim_about_parameters_is_noted(box):
    """It costs the perturbation, no more."""
    found = passes(box, TASK, forge("program['fixed'] = True"))
    assert "not perturbed" in found.note and not verdict(box, TASK, HONEST).note
