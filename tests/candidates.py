"""Tasks and candidates that several test files use."""

import textwrap

from tasks import Task

LAYERS = '''
    def __init__(self, features, factor):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.bias = nn.Parameter(torch.randn(features))
        self.factor = factor
'''
TASK = Task("scaled_silu", 0, f'''
import torch
import torch.nn as nn

class Model(nn.Module):{LAYERS}
    def forward(self, x):
        x = self.linear(x)
        return torch.nn.functional.silu(x + self.bias) * self.factor

rows = 64

def get_inputs():
    return [torch.randn(rows, 32)]

def get_init_inputs():
    return [32, 2.5]
''')

HONEST = f'''
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def bias_silu_scale(x_ptr, bias_ptr, out_ptr, factor, n, columns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % columns, mask=mask)
    tl.store(out_ptr + offsets, x * tl.sigmoid(x) * factor, mask=mask)

class ModelNew(nn.Module):{LAYERS}
    def forward(self, x):
        x = self.linear(x)
        out = torch.empty_like(x)
        n = x.numel()
        bias_silu_scale[(triton.cdiv(n, 1024),)](x, self.bias, out, self.factor, n, x.shape[1], BLOCK=1024)
        return out
'''


# For `replaced`, in TASK and in HONEST
WITHOUT_LAYER = ("        self.linear = nn.Linear(features, features)\n", ""), ("        x = self.linear(x)\n", "")


def replaced(text, *pairs):
    """The text with each (old, new) replaced; the old one must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def indent(text, by=4) -> str:
    return textwrap.indent(text.strip("\n"), " " * by) + "\n"


def problem(expression, inputs="torch.randn(64, 64)", state="") -> Task:
    """A task that returns `expression` of x. state: as of a small_task."""
    return small_task("problem", f"return {expression}", inputs=inputs, state=state)


def constructor(state) -> str:
    """The constructor of a module with these lines; none without lines."""
    return f"    def __init__(self):\n        super().__init__()\n{indent(state, 8)}\n" if state else ""


def solution(kernels, body, state="") -> str:
    """A candidate with these kernels, whose forward has the lines of body, and its constructor those of state."""
    return ("import torch\nimport triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
            f"{kernels}\nclass ModelNew(torch.nn.Module):\n{constructor(state)}"
            f"    def forward(self, x):\n{indent(body, 8)}")


APPLY = '''
@triton.jit
def apply(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n)
    tl.store(out + o, RESULT, mask=o < n)
'''


def by_elements(result, more="", state="") -> str:
    """A candidate whose kernel `apply` stores `result` of v, an element of x. more: kernels; state: see solution."""
    return solution(APPLY.replace("RESULT", result) + more, """
out = torch.empty_like(x)
apply[(triton.cdiv(x.numel(), 512),)](x, out, x.numel(), BLOCK=512)
return out""", state)


def by_rows(result, more="", dtype="x.dtype") -> str:
    """A candidate with a program for each row of x, which stores `result` of v, the row. more: kernels."""
    return solution(f"""
@triton.jit
def row(x, out, C: tl.constexpr):
    v = tl.load(x + tl.program_id(0) * C + tl.arange(0, C))
    tl.store(out + tl.program_id(0), {result})
{more}""", f"""
out = x.new_empty(len(x), dtype={dtype})
row[(len(x),)](x, out, C=x.shape[1])
return out""")


def verdict(box, task, code):
    return box.score(task, [code])[0]


def all_pass(box, pairs):
    """The verdicts on (task, code) pairs, all of which must be correct."""
    verdicts = [future.result() for future in box.submit(pairs)]
    assert not [(task.name, v) for (task, _), v in zip(pairs, verdicts) if not v.correct]
    return verdicts


def passes(box, task, code):
    """The verdict on a candidate, which must be right."""
    return all_pass(box, [(task, code)])[0]


def agrees(box, task, code):
    """The verdict on a candidate without kernels, which computes the right thing: then that is all that is refused."""
    found = verdict(box, task, code)
    assert found.rejected == "launches no kernel of its own", found
    return found


def fails(box, task, code, says=""):
    """The verdict on a candidate that must not be correct, for a reason that has these words."""
    found = verdict(box, task, code)
    assert not found.correct and found.speedup is None and says in (found.rejected or found.error), found
    return found


def small_task(name, body, arguments="x", inputs="torch.randn(64, 64)", state="") -> Task:
    """A task whose forward has these lines. state: lines of its constructor, for a task with parameters."""
    return Task(name, 0, f'''import torch
import torch.nn as nn

class Model(nn.Module):
{constructor(state)}    def forward(self, {arguments}):
{indent(body, 8)}
def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
''')


def copied(task) -> str:
    """A task's reference as a candidate."""
    return replaced(task.source, ("Model(", "ModelNew("))
