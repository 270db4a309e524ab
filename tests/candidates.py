"""Tasks and candidates that several test files use."""

from tasks import Task

TASK = Task("scaled_silu", 0, '''
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, factor):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.bias = nn.Parameter(torch.randn(features))
        self.factor = factor

    def forward(self, x):
        x = self.linear(x)
        return torch.nn.functional.silu(x + self.bias) * self.factor

rows = 64

def get_inputs():
    return [torch.randn(rows, 32)]

def get_init_inputs():
    return [32, 2.5]
''')

HONEST = '''
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

class ModelNew(nn.Module):
    def __init__(self, features, factor):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.bias = nn.Parameter(torch.randn(features))
        self.factor = factor

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


def problem(expression, inputs="torch.randn(256, 64)") -> Task:
    """A task that returns `expression` of x (and y, z where there are more inputs)."""
    return small_task("problem", f"return {expression}", ", ".join("xyz"[:inputs.count("torch.r")]), inputs)


def solution(kernels, body, names="x") -> str:
    """A candidate with these kernels, whose forward has these lines."""
    lines = "\n".join("        " + line for line in body.strip().split("\n"))
    return ("import torch\nimport triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
            f"{kernels}\nclass ModelNew(torch.nn.Module):\n    def forward(self, {names}):\n{lines}\n")


def small_task(name, body, arguments="x", inputs="torch.randn(64, 64)", state="") -> Task:
    """A task whose forward has this body. state: a line of its constructor, for a task with parameters."""
    constructor = f"    def __init__(self):\n        super().__init__()\n        {state}\n\n" if state else ""
    return Task(name, 0, f'''import torch

class Model(torch.nn.Module):
{constructor}    def forward(self, {arguments}):
        {body}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
''')


def times(factor) -> Task:
    """A task without side effects."""
    return small_task(f"times {factor}", f"return x * {factor}.0")


def copied(task) -> str:
    """A task's reference as a candidate."""
    return replaced(task.source, ("Model(", "ModelNew("))
