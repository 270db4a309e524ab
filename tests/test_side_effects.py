"""What may share a process with others: the expert's kernels may; whatever could leave something behind may not."""

import re

import pytest
import torch
import torch.nn as nn

from candidates import replaced
from judge.side_effects import is_side_effect_free as free
from judge.side_effects import state, unchanged
from synthetic.expert import applicable, read, render
from tasks import builtin_tasks

SOURCE = '''
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

SIZE = 1024

@triton.jit
def scale(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + idx, mask=idx < n).to(tl.float32)
    tl.store(out_ptr + idx, tl.math.exp(x) * factor, mask=idx < n)

def launch(x: torch.Tensor, factor):
    out = torch.empty_like(x)
    scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, factor, x.numel(), BLOCK=1024, num_warps=4)
    return out

class Block(nn.Module):
    def __init__(self, features):
        super(Block, self).__init__()
        self.linear = nn.Linear(features, features)
        self.register_buffer("count", torch.zeros(1))

    def helper(self, x):
        return F.linear(x, self.linear.weight, self.linear.bias)

    def forward(self, x):
        if x.dtype not in (torch.float32, torch.float16):
            raise ValueError(f"a {x.dtype}")
        return self.helper(x.contiguous()) * math.pi + self.count

class ModelNew(nn.Module):
    def __init__(self, features, factor=1.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block(features) for _ in range(2)])
        self.weight = nn.Parameter(torch.randn(features))
        nn.init.uniform_(self.weight)
        self.factor = factor

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        parts = x.chunk(2, dim=-1)
        parts[0][..., 0] = 1.0
        with torch.no_grad():
            return launch(torch.cat(parts, dim=-1), self.factor)
'''


def renamed(old, new, code=SOURCE):
    assert old in code
    return re.sub(rf"\b{old}\b", new, code)


def test_kernels_of_many_kinds_are_side_effect_free():
    assert free(SOURCE)
    assert free(renamed("scale", "_scale")) and free(renamed("launch", "_launch"))  # kernels and functions: _allowed
    for task in builtin_tasks():
        program = read(task)
        for techniques in (set(), applicable(program)) if program else ():
            solution = render(program, techniques)
            assert solution is None or free(solution.code), solution.code


def test_mistakes_are_side_effect_free():
    """They raise an error and no more; most of a small model's failures are of this kind."""
    for mistake in (("self.factor)", "self.faktor)"), ("x.numel(),", "y.numel(),"), ("launch(torch", "lunch(torch")):
        assert free(replaced(SOURCE, mistake))


# ---------------------------------------------------------------------------------------------------------------------
# What could leave something behind

RENAMED = [  # no other name may begin with an underscore, or with two
    ("scale", "__scale"), ("launch", "__getattr__"), ("launch", "__launch"), ("SIZE", "_SIZE"), ("factor", "_factor"),
    ("x_ptr", "_x_ptr"), ("helper", "_helper"), ("Block", "_Block"), ("nn", "_nn"), ("linear", "_linear"),
    ("count", "_count")]
STATEMENTS = [  # at the end of ModelNew.forward
    "torch.backends.cudnn.benchmark = True", "torch.set_float32_matmul_precision('high')", "torch.manual_seed(1)",
    "nn.Linear.forward = launch", "Block.forward = launch", "x.grad = x", "F.relu = launch", "tl.load = 1",
    "setattr(nn.Linear, 'forward', launch)", "getattr(torch, 'manual' + '_seed')(1)", "vars(torch)", "globals()",
    "open('/tmp/x', 'w')", "eval('1')", "exec('1')", "__import__('os')", "type(self)", "object()", "torch.ops.aten.add",
    "torch.cuda.empty_cache()", "torch.compile(self)", "torch.library.define('a::b', '()')", "torch.load('x')",
    "self.__class__.forward = launch", "self.blocks.__dict__", "nn.Module.__init__(self)", "self._modules.clear()",
    "self.register_forward_hook(launch)", "self.compile()", "self.share_memory()", "x.register_hook(launch)",
    "x.untyped_storage()", "x.apply_(launch)", "x.numpy()", "'{0.__class__}'.format(x)", "f'{x.__class__}'",
    "tl.core", "tl.math", "math", "torch", "module = torch", "tl.core.builtins", "tl.math.core", "F.torch",
    "nn.modules", "F.boolean_dispatch(1)", "tl.inline_asm_elementwise('', '', [], tl.int32, True, 1)",
    "scale.fn", "scale.cache",
    "global SIZE", "del nn.Linear", "import os", "import torch.utils", "from torch import hub", "import sys as math",
    "from os import path", "try:\n                pass\n            except: pass",
    "self = nn.Linear", "self, y = nn.Linear, 1", "y = [self for self in (nn.Linear,)]", "(self := nn.Linear)",
    "for self in (nn.Linear,): self.forward = launch", "y = lambda self: self", "def change(self): self.forward = 1",
    "def open(): pass", "range = 1", "torch = nn", "y = lambda print: 1", "class Other:\n                pass\n"
    "                def f(self): self.x = 1", "yield x", "with open('x') as f: pass", "nn.DataParallel(self)",
    "y = ModelNew.forward", "self.helper.__func__", "y = super().__getattribute__", "breakpoint()", "input()"]
CLASSES = {  # name: (some text of SOURCE, what stands there instead)
    "a method by a name that tensors have": ("def helper(self, x):", "def view(self, x):"),
    "a method by another name": ("    def forward(self, x):\n        if",
                                 "    other = helper\n\n    def forward(self, x):\n        if"),
    "the bare name of a method": ("def launch(", "def helper(self):\n    pass\n\ndef launch("),
    "a method whose first argument is another": ("def helper(self, x):", "def helper(x, self):"),
    "an implicit class method": ("def helper(self, x):", "def __init_subclass__(self):"),
    "an object that outlives itself": ("def helper(self, x):", "def __del__(self):"),
    "a class method": ("    def helper(self, x):", "    @classmethod\n    def helper(self, x):"),
    "a static method": ("    def helper(self, x):", "    @staticmethod\n    def helper(self, x):"),
    "a metaclass": ("class Block(nn.Module)", "class Block(nn.Module, metaclass=launch)"),
    "a decorated class": ("class Block(nn.Module)", "@launch\nclass Block(nn.Module)"),
    "a built-in name in one scope, used in another": ("def launch(x:", "def other(open):\n    pass\n\ndef launch(x:"),
    "a module under the name of a built-in": ("import math", "import math as open"),
    "two modules under one name": ("import math", "import math\nimport torch as math"),
    "a decorator of something else": ("@triton.jit", "@triton.runtime.jit.JITFunction"),
    "autotuning": ("@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 256})], key=['n'])\n@triton.jit"),
}


def method(body, arguments="self"):
    return f"class A(nn.Module):\n    def of({arguments}):\n        {body}\n"


def kernel(body, arguments="x", decorator="@triton.jit\n"):
    return f"{decorator}def kernel({arguments}):\n    {body}\n"


ATTACKS = {  # at the end of SOURCE; each of them once brought a method to run with another `self`, or worse
    "a positional-only argument before self": method("self.value = value", "me, /, self, value"),
    "super with two arguments": "super(Block, Block).__init__(nn.Linear, launch)",
    "super in a nested function": method("def inner(c):\n            return super().__init__\n"
                                         "        inner(Block)(nn.Linear, launch)"),
    "super in a lambda": method("take = lambda c: super().__init__"),
    "super as a value": method("take = super"),
    "a nested class": "if True:\n    class N(nn.Module):\n        def of(self, c):\n            return c\n",
    **{f"a class derived from {base}": f"class V({base}):\n    pass\n"
       for base in ("super", "Block", "Block(1)", "torch.Tensor")},
    "a class with a constant": "class V(nn.Module):\n    size = launch\n",
    "a class as a value": "kind = Block",
    "a class as an argument": "launch(Block, 1)",
    "a layer as a value": "launch(nn.Linear, 1)",
    "triton.autotune by hand": "triton.autotune([triton.Config({})], [])(Block)[None](1)",
    "triton.jit by hand": "triton.jit(launch)",
    "a decorator below jit": kernel("pass", decorator="@triton.jit\n@launch\n"),
    "Triton's language outside of a kernel": "tl.program_id(1, launch)",
    "an argument of Triton's own": kernel("tl.program_id(0, _semantic=x)"),
    "unpacked keywords": "launch(**{'factor': 1, 'x': 1})",
    "a module under a name of Python's": "import torch as list\nvalue = list\n",
    "a loader": "value = math.__loader__",
    "a relative import": "from .torch import nn as relative",
    "everything in a module": "from torch.nn import *",
    "a context entered twice": "g = torch.no_grad()\nwith g:\n    with g:\n        pass\n",
    "a context that is kept": "with torch.no_grad() as g:\n    pass\n",
    "a store that never happens": method("if False:\n            self.compile = 1\n        self.compile()"),
    "a buffer that never is": method("if False:\n            self.register_buffer('compile', None)\n"
                                     "        self.compile()"),
    "items that are attributes": "nn.ParameterDict()['__annotations__']",
    "print to an object": "print('x', file=launch)",
    "a text that Triton reads in another way": '@triton.jit\ndef \\\nkernel(x):\n    """\ndef kernel(x):\n    evil()\n'
                                               '"""\n',
    "a def within a string": kernel('"""\n    def kernel(x): pass"""'),
    "a form feed": "x = 1\f",
    "a module by the name of self": "import torch as self\nself.float32 = self.float16\n",
    "a class by the name of self": "class self(nn.Module):\n    pass\nself.add_module(launch, 'x', 1)\n",
    "other built-ins": "import torch as __builtins__\ndef f():\n    set_default_dtype(torch.float64)\n",
    "a buffer by any name": method("self.register_buffer(name, None)", "self, name"),
    "a module by a hidden name": method("self.add_module('__wrapped__', 1)"),
    "registration for later": method("return self.register_buffer"),
    "a node of a syntax tree": "class Call(nn.Module):\n    pass\n",
    "a kernel that calls its argument": kernel("f(x)", "x, f: tl.constexpr"),
    "a kernel that calls a function": kernel("launch(x, x)"),
    "a kernel that reads any attribute": kernel("y = x.value"),
    "a reduction by an object": kernel("tl.reduce(x, 0, x)"),
    "a shifted reduction": kernel("tl.reduce(*x, kernel)"),
    "a tensor made by hand": kernel("tl.tensor(x, x)"),
    "an option of a launch": kernel("pass") + "kernel[(1,)](1, ir_override='x')\n",
    "a launch for later": kernel("pass") + "later = kernel[(1,)]\n",
    "a kernel as an argument": kernel("pass") + "launch(kernel, 1)\n",
}
LAST = "            return launch(torch.cat(parts, dim=-1), self.factor)\n"
REFUSED = {
    **{f"{old} as {new}": renamed(old, new) for old, new in RENAMED},
    **{f"{other} by the name of a function": renamed(other, "_launch", renamed("launch", "_launch"))
       for other in ("SIZE", "idx", "helper", "Block", "linear", "factor")},
    **{statement: replaced(SOURCE, (LAST, f"            {statement}\n{LAST}")) for statement in STATEMENTS},
    **{name: replaced(SOURCE, pair) for name, pair in CLASSES.items()},
    **{name: SOURCE + code for name, code in ATTACKS.items()},
    "no syntax": "class class Block",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_leave_something_behind_is_refused(name):
    if name != "no syntax":
        compile(REFUSED[name], name, "exec", dont_inherit=True)
    assert not free(REFUSED[name])


@pytest.mark.parametrize("cookie", ["utf-7", "unicode_escape", "raw_unicode_escape"])
def test_a_source_that_would_be_decoded_in_another_way_is_refused(cookie):
    assert not free(f"# coding: {cookie}\n" + SOURCE) and not free(f"\n# -*- coding: {cookie} -*-\n" + SOURCE)


@pytest.mark.parametrize("tail", [" + 1" * 900, ".view(1)" * 900, " + (1" * 80 + ")" * 80])
def test_a_deep_source_raises_no_error(tail):
    assert free(replaced(SOURCE, ("return out\n", f"return out{tail}\n"))) in (True, False)


def test_unchanged_sees_what_has_changed(monkeypatch):
    before = state()
    assert unchanged(before)
    changes = [(nn.Linear, "forward", len), (nn.ReLU, "novelty", 1), (torch, "relu", len), (torch.Tensor, "view", len),
               (nn.functional, "gelu", len), (torch, "float32", torch.float16),
               (torch.backends.cudnn, "benchmark", True)]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value, raising=False)
            assert not unchanged(before), (where, name)
        assert unchanged(before)
    with torch.no_grad():
        assert not unchanged(before)
