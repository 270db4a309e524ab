"""What may share a process with others: the expert's kernels may; whatever could leave something behind may not."""

import re

import pytest
import torch
import torch.nn as nn

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
            return launch(torch.cat(parts, dim=-1), self.factor)  # HERE
'''


def test_kernels_of_many_kinds_are_side_effect_free():
    assert free(SOURCE)
    for task in builtin_tasks():
        program = read(task)
        for techniques in (set(), applicable(program)) if program else ():
            solution = render(program, techniques)
            assert solution is None or free(solution.code), solution.code


def renamed(old, new, code=SOURCE):
    assert old in code
    return re.sub(rf"\b{old}\b", new, code)


def test_names_of_kernels_and_functions_may_begin_with_an_underscore():
    assert free(renamed("scale", "_scale")) and free(renamed("launch", "_launch"))


@pytest.mark.parametrize("old, new", [
    ("scale", "__scale"), ("launch", "__getattr__"), ("launch", "__launch"), ("SIZE", "_SIZE"), ("factor", "_factor"),
    ("x_ptr", "_x_ptr"), ("helper", "_helper"), ("Block", "_Block"), ("nn", "_nn"), ("linear", "_linear"),
    ("count", "_count"),
])
def test_no_other_name_may_begin_with_an_underscore(old, new):
    assert not free(renamed(old, new))


@pytest.mark.parametrize("other", ["SIZE", "idx", "helper", "Block", "linear", "factor"])
def test_nothing_else_has_the_name_of_such_a_function(other):
    assert not free(renamed(other, "_launch", renamed("launch", "_launch")))


def test_mistakes_are_side_effect_free():
    """They raise an error and no more; most of a small model's failures are of this kind."""
    for old, new in (("self.factor)", "self.faktor)"), ("x.numel(),", "y.numel(),"), ("launch(torch", "lunch(torch")):
        assert old in SOURCE and free(SOURCE.replace(old, new))


STATEMENTS = [  # each at the end of ModelNew.forward
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
    "from os import path", "from torch.nn import *", "try:\n                pass\n            except: pass",
    "self = nn.Linear", "self, y = nn.Linear, 1", "y = [self for self in (nn.Linear,)]", "(self := nn.Linear)",
    "for self in (nn.Linear,): self.forward = launch", "y = lambda self: self", "def change(self): self.forward = 1",
    "def open(): pass", "range = 1", "torch = nn", "y = lambda print: 1", "class Other:\n                pass\n"
    "                def f(self): self.x = 1", "yield x", "with open('x') as f: pass", "nn.DataParallel(self)",
    "y = ModelNew.forward", "self.helper.__func__", "y = super().__getattribute__", "breakpoint()", "input()",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_could_leave_something_behind_is_refused(statement):
    line = "            return launch(torch.cat(parts, dim=-1), self.factor)  # HERE\n"
    assert line in SOURCE
    code = SOURCE.replace(line, f"            {statement}\n" + line)
    compile(code, "a candidate", "exec", dont_inherit=True) if statement != "from torch.nn import *" else None
    assert not free(code)


HEAD = """import math
import torch
import torch.nn as nn
import triton
import triton.language as tl

def zero(layer, x):
    return x * 0

class Patch(nn.Module):
    def __init__(self, value):
        self.value = value

class Other(nn.Module):
    pass

class ModelNew(nn.Module):
    def forward(self, x):
        return x
"""
ATTACKS = {  # appended to HEAD; each of them once brought a method to run with another `self`, or worse
    "a positional-only argument before self": "class A(nn.Module):\n    def set(me, /, self, value):\n"
                                              "        self.value = value\n",
    "super with two arguments": "super(Other, Other).__init__(nn.Linear, zero)",
    "super in a nested function": "class A(nn.Module):\n    def __init__(self):\n        def inner(c):\n"
                                  "            return super().__init__\n        inner(Other)(nn.Linear, zero)\n",
    "super in a lambda": "class A(nn.Module):\n    def __init__(self):\n        take = lambda c: super().__init__\n",
    "super as a value": "class A(nn.Module):\n    def __init__(self):\n        take = super\n",
    "a nested class": "if True:\n    class N(nn.Module):\n        def of(self, c):\n            return c\n",
    "a class derived from super": "class S(super):\n    def of(self, a):\n        self.value = a\n",
    "a class derived from an object": "class V(Patch(1)):\n    def of(self, a):\n        self.value = a\n",
    "a class derived from one of the source": "class V(Patch):\n    pass\n",
    "a class derived from a tensor": "class V(torch.Tensor):\n    pass\n",
    "a class with a constant": "class V(nn.Module):\n    size = zero\n",
    "a class as a value": "kind = Patch",
    "a class as an argument": "zero(Patch, 1)",
    "a layer as a value": "zero(nn.Linear, 1)",
    "triton.heuristics": "triton.heuristics({})(Patch)[None](1)",
    "triton.autotune by hand": "triton.autotune([triton.Config({})], [])(Patch)[None](1)",
    "triton.jit by hand": "triton.jit(zero)",
    "a hook in a Config": "@triton.autotune(configs=[triton.Config({}, pre_hook=zero)], key=[])\n@triton.jit\n"
                          "def kernel(x):\n    pass\n",
    "a decorator below jit": "@triton.jit\n@zero\ndef kernel(x):\n    pass\n",
    "Triton's language outside of a kernel": "tl.program_id(1, zero)",
    "an argument of Triton's own": "@triton.jit\ndef kernel(x):\n    tl.program_id(0, _semantic=x)\n",
    "unpacked keywords": "zero(**{'layer': 1, 'x': 1})",
    "a module under a name of Python's": "import torch as list\nvalue = list\n",
    "a loader": "value = math.__loader__",
    "a relative import": "from .torch import nn as relative",
    "a context entered twice": "g = torch.no_grad()\nwith g:\n    with g:\n        pass\n",
    "a context that is kept": "with torch.no_grad() as g:\n    pass\n",
    "a store that never happens": "class A(nn.Module):\n    def of(self):\n        if False:\n"
                                  "            self.compile = 1\n        self.compile()\n",
    "a buffer that never is": "class A(nn.Module):\n    def of(self):\n        if False:\n"
                              "            self.register_buffer('compile', None)\n        self.compile()\n",
    "items that are attributes": "nn.ParameterDict()['__annotations__']",
    "print to an object": "print('x', file=zero)",
    "a text that Triton reads in another way": '@triton.jit\ndef \\\nkernel(x):\n    """\ndef kernel(x):\n    evil()\n'
                                               '"""\n',
    "a def within a string": '@triton.jit\ndef kernel(x):\n    """\n    def kernel(x): pass"""\n',
    "a form feed": "x = 1\f",
    "a module by the name of self": "import torch as self\nself.float32 = self.float16\n",
    "a class by the name of self": "class self(nn.Module):\n    pass\nself.add_module(Other(), 'x', 1)\n",
    "other built-ins": "import torch as __builtins__\ndef f():\n    set_default_dtype(torch.float64)\n",
    "a buffer by any name": "class A(nn.Module):\n    def of(self, name):\n        self.register_buffer(name, None)\n",
    "a module by a hidden name": "class A(nn.Module):\n    def of(self):\n        self.add_module('__wrapped__', 1)\n",
    "registration for later": "class A(nn.Module):\n    def of(self):\n        return self.register_buffer\n",
    "a node of a syntax tree": "class Call(nn.Module):\n    pass\n",
    "a kernel that calls its argument": "@triton.jit\ndef kernel(x, f: tl.constexpr):\n    f(x)\n",
    "a kernel that calls a function": "@triton.jit\ndef kernel(x):\n    zero(x, x)\n",
    "a kernel that calls a class": "@triton.jit\ndef kernel(x):\n    Patch(1)\n",
    "a kernel that reads any attribute": "@triton.jit\ndef kernel(x):\n    y = x.value\n",
    "a reduction by an object": "@triton.jit\ndef kernel(x):\n    tl.reduce(x, 0, x)\n",
    "a shifted reduction": "@triton.jit\ndef kernel(x):\n    tl.reduce(*x, kernel)\n",
    "a tensor made by hand": "@triton.jit\ndef kernel(x):\n    tl.tensor(x, x)\n",
    "autotune's other arguments": "@triton.autotune([], [], None, zero)\n@triton.jit\ndef kernel(x):\n    pass\n",
    "an option in a Config": "@triton.autotune([triton.Config({'ptx_options': 'x'})], [])\n@triton.jit\n"
                             "def kernel(x):\n    pass\n",
    "an option of a launch": "@triton.jit\ndef kernel(x):\n    pass\nkernel[(1,)](1, ir_override='x')\n",
    "a launch for later": "@triton.jit\ndef kernel(x):\n    pass\nlater = kernel[(1,)]\n",
    "a kernel as an argument": "@triton.jit\ndef kernel(x):\n    pass\nzero(kernel, 1)\n",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_known_attacks_are_refused(name):
    assert free(HEAD)
    code = HEAD + ATTACKS[name]
    compile(code, name, "exec", dont_inherit=True)
    assert not free(code)


@pytest.mark.parametrize("cookie", ["utf-7", "unicode_escape", "raw_unicode_escape"])
def test_a_source_that_would_be_decoded_in_another_way_is_refused(cookie):
    assert not free(f"# coding: {cookie}\n" + HEAD) and not free(f"\n# -*- coding: {cookie} -*-\n" + HEAD)


@pytest.mark.parametrize("tail", [" + 1" * 900, ".view(1)" * 900, " + (1" * 80 + ")" * 80])
def test_a_deep_source_raises_no_error(tail):
    assert free(HEAD) and free(HEAD.replace("return x\n", f"return x{tail}\n")) in (True, False)


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


CLASSES = {
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
    "a module under a name of Python's": ("import math", "import math as open"),
    "two modules under one name": ("import math", "import math\nimport torch as math"),
    "a decorator of something else": ("@triton.jit", "@triton.runtime.jit.JITFunction"),
    "autotuning": ("@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 256})], key=['n'])\n@triton.jit"),
    "no syntax": ("class Block", "class class Block"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_model_is_all_that_self_can_be(name):
    old, new = CLASSES[name]
    assert old in SOURCE and not free(SOURCE.replace(old, new))
