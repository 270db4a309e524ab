"""Tasks and candidates that several test files use."""

from tasks import Task

TASK = Task("scaled_silu", 0, '''
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, factor):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.factor = factor

    def forward(self, x):
        return torch.nn.functional.silu(self.linear(x)) * self.factor

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
def silu_scale(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x * tl.sigmoid(x) * factor, mask=mask)

class ModelNew(nn.Module):
    def __init__(self, features, factor):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.factor = factor

    def forward(self, x):
        x = self.linear(x)
        out = torch.empty_like(x)
        silu_scale[(triton.cdiv(x.numel(), 1024),)](x, out, self.factor, x.numel(), BLOCK=1024)
        return out
'''


def replaced(text, *pairs):
    """The text with each (old, new) replaced; the old one must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def times(factor) -> Task:
    """A task whose reference has no side effects."""
    return Task(f"times {factor}", 0, f'''import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * {factor}.0

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
''')


def copied(task) -> str:
    """A task's reference as a candidate."""
    return replaced(task.source, ("Model(", "ModelNew("))
