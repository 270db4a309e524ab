"""Kernels without a GPU: the language gives what torch gives, addresses are checked, and no Python gets through.

Rows of a group are one candidate, whose forward returns all their results; when it fails each is scored by itself. What
is refused is refused with the words that stand here.
"""

from pathlib import Path

import pytest
import yaml

from candidates import by_elements, fails, indent, passes, problem, product, replaced, solution, verdict

# ---------------------------------------------------------------------------------------------------------------------
# Expressions

FLOATS, FEW = "torch.randn(64, 64)", "torch.randn(16, 64)"
INTEGERS = "torch.randint(-1000, 1000, (16, 64), dtype=torch.int32)"
EXPRESSIONS = yaml.safe_load(Path(__file__).with_name("expressions.yaml").read_text())
REDUCTIONS = EXPRESSIONS.pop("reductions")

# ---------------------------------------------------------------------------------------------------------------------
# Bodies of kernels on o, v and n: {group: {name: (torch's, body)}}

UPPER = "torch.arange(16)[:, None] < 8"  # rows of the first 2 programs
LOWER_TWICE = f"torch.where({UPPER}, x, x * 2)"
STORE, STORE_TWICE = "\ntl.store(out + o, v)", "\ntl.store(out + o, v * 2)"
BODIES = {
    "memory": {name: ("x * 2", body) for name, body in {
        "mask and other": "w = tl.load(x + o, mask=o < n, other=0.0)\ntl.store(out + o, w * 2, mask=o < n)",
        "cache hints": "w = tl.load(x + o, cache_modifier='.cg')\n"
                       "tl.store(out + o, w * 2, eviction_policy='evict_last')",
        "static_assert": "tl.static_assert(BLOCK == 256, f'block {BLOCK}')\ntl.store(out + o, v * 2)",
        "asserts that fail": "tl.device_assert(v < -100, 'v')" + STORE_TWICE,
    }.items()},
    "control flow": {
        "for": ("x * 8", "for i in range(3):\n    v += v" + STORE),
        "tl.range": ("x * 8", "for i in tl.range(0, 3, num_stages=2):\n    v += v" + STORE),
        "while": ("x * 8", "i = 0\nwhile i < 3:\n    v += v\n    i += 1" + STORE),
        "if": (LOWER_TWICE, "if tl.program_id(0) >= 2:\n    v = v * 2" + STORE),
        "if expression": (LOWER_TWICE, "f = 1.0 if tl.program_id(0) < 2 else 2.0\ntl.store(out + o, v * f)"),
        "a tuple": ("x * 5", "a, b = v * 2, v * 3\na, b = b, a\ntl.store(out + o, a + b)")},
}
HELPERS = """
@triton.jit
def larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b))

@triton.jit
def most(a, b):
    return tl.maximum(a, b)
"""
GROUPS = {**{group: (INTEGERS if group == "integers" else FEW,
                     [(theirs, f"tl.store(out + o, {ours}, mask=o < n)") for ours, theirs in rows.items()])
             for group, rows in EXPRESSIONS.items()},
          "reductions": ("torch.randn(8, 64)", [
              (f"x.view(2, 256).{theirs}.expand(2, 256).reshape(8, 64)", f"tl.store(out + o, {ours} + 0 * v)")
              for ours, theirs in REDUCTIONS.items()]),
          **{group: (FEW, list(rows.values())) for group, rows in BODIES.items()}}


def candidate(inputs, rows):
    """(task, code) of all rows at once: one kernel, which has the rows' bodies one after the other, a result each."""
    outs = ", ".join(f"out{i}" for i in range(len(rows)))
    kernel = (f"\n@triton.jit\ndef kernel(x, {outs}, n, BLOCK: tl.constexpr):\n"
              "    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n")
    for i, (_, body) in enumerate(rows):
        kernel += f"    v = tl.load(x + o, mask=o < n)\n    out = out{i}\n{indent(body)}"
    launch = (f"outs = [torch.empty_like(x) for _ in range({len(rows)})]\n"
              "kernel[(x.numel() // 256,)](x, *outs, x.numel(), BLOCK=256)\nreturn outs")
    return problem(f"[{', '.join(theirs for theirs, _ in rows)}]", inputs), solution(HELPERS + kernel, launch)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_give_what_torch_gives(box, group):
    inputs, rows = GROUPS[group]
    if not verdict(box, *candidate(inputs, rows)).correct:
        alone = {row: verdict(box, *candidate(inputs, [row])) for row in rows}
        assert not {row: v.rejected or v.error for row, v in alone.items() if not v.correct}

# ---------------------------------------------------------------------------------------------------------------------
# Whole kernels: {name: (task, code)}


MEANS = """
@triton.jit
def means(x_ptr, out, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out + tl.program_id(0), tl.sum(x, axis=0) / (SIZE))
"""


def means(size):
    """A member of a tensor or of a type, in a kernel: it must be 64."""
    return problem("x.mean(1)", FLOATS), solution(MEANS.replace("SIZE", size), (
        "out = torch.empty(x.shape[0], device=x.device)\nmeans[(64,)](x, out, N=64)\nreturn out"))


PART = ("tl.store(part + p, s)\nif tl.atomic_add(count, 1) == 31:\n"
        "    tl.store(out, tl.sum(tl.load(part + tl.arange(0, 32)), axis=0))")


def add_up(body):
    """(task, code) where `body` has s, a program's part of the total, and adds it up in `out`."""
    return problem("torch.sigmoid(x).sum()", FLOATS), solution(f"""
@triton.jit
def total(x, part, count, out):
    p = tl.program_id(0)
    s = tl.sum(tl.sigmoid(tl.load(x + p * 128 + tl.arange(0, 128))), axis=0)
{indent(body)}""", "count, part, out = torch.zeros(32, dtype=torch.int32), torch.empty(32), torch.zeros(())\n"
                   "total[(32,)](x, part, count, out)\nreturn out")


KERNELS = {
    **{f"dot, {how}": product(f"total += tl.dot(left, right, {how})") for how in (
        "input_precision='ieee'", "input_precision='tf32x3'", "allow_tf32=False")},
    "dot, fp16": product("total += tl.dot(left, right)", "torch.randn(64, 64).half()"),
    "a sum by atomics": add_up("tl.atomic_add(out, s)"), "a sum by the last program": add_up(PART),
    **{size: means(size) for size in ("x.numel", "x.dtype.primitive_bitwidth * 2", "x.dtype.itemsize * 16",
                                      "x.type.numel", "N + 0 * x.dtype.fp_mantissa_width", "x.shape[0]")},
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_as_a_whole_give_what_torch_gives(box, name):
    passes(box, *KERNELS[name])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and the bounds of memory

NOT_HERE = "is not available inside a Triton kernel without a GPU"
OPEN = "tl.store(out + o, v)"
REFUSED = {  # body: the words
    "tl.store(out + o, tl.where(0 < v < 1, v * 2, v))": "use &, |, ~",
    f"tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [v], tl.float32, True, 1)\n{OPEN}": "",
    "tl.store(out + o, v ** 2)": "unsupported operand type(s) for **",
    "tl.store(out + o, libdevice.jn(2, v))": "jn",
    "v = v.handle.data.tofile('f')": "data", "open('f', 'w')": "open", "v = v.__class__": "CompilationError",
    "tl.core.os.system('true')": "os", "v.type = tl.float64\n" + OPEN: "assignment",
    "tl.static_assert(BLOCK == 1, 'my block')\ntl.store(out + o, v * 2)": "my block",
    f"tl.atomic_add(out.to(tl.pointer_type(tl.bfloat16), bitcast=True) + o, v.to(tl.bfloat16))\n{OPEN}": "bf16",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_refused_is_refused_by_name(box, body):
    fails(box, *candidate(FLOATS, [("x * 2", body)]), REFUSED[body])


HIDDEN = {  # Python that a compiler never sees, in a kernel's text (the candidate stops before it would be compiled)
    "a default": ("", "a=len('os')", "return a", "len('os')"),
    "builtins": ("from triton.language.core import __builtins__ as b", "a=b['open']", "return a", "b['open']"),
    "a module of Python's": ("from triton.language.core import inspect as i", "a", "return i.sys.modules", "i"),
    "an attribute of a function": ("", "a", "return tl.sum.__globals__", "tl.sum.__globals__"),
    "an attribute of a text": ("", "a", "return 'x{0.__class__}'.format(a)", "format"),
    "a formatted text": ("", "a", "return f'{a.__class__}'", "a.__class__"),
    "a lambda": ("", "a", "return (lambda: a)()", "lambda"), "yield": ("", "a", "yield a", "yield"),
    "a class": ("", "a", "class b: pass", "class b"), "a global": ("", "a", "global tl", "global tl"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_only_tritons_language_is_run_where_kernels_are_interpreted(box, name):
    """Code that the recorder would compile is replaced by other code in the text, which is what is interpreted."""
    imported, parameter, body, words = HIDDEN[name]
    kernel = f"@triton.jit\ndef helper({parameter}):\n    {body}\n\n"
    code = by_elements("helper(v) * 2")
    code = replaced(code, ("\n@triton.jit", f"\n{imported}\n{kernel}def same(f):\n"
                    "    def helper(a):\n        return a\n"
                           "    return f\n\n@triton.jit"))
    code += "\nimport sys\nsys.modules['__main__'].compile_all = lambda *_: []\n"
    found = fails(box, DOUBLED, code, words)
    assert NOT_HERE in found.error or "not defined" in found.error, found


DOUBLED = problem("x * 2", FLOATS)
CALLED = "(triton.cdiv(x.numel(), 512),)"
OUTSIDE = [  # (changes of a kernel that doubles, words)
    ([("x + o, mask=o < n", "x + o + 1, mask=o < n")], "out-of-bounds load (1 elements past the end)"),
    ([("out + o,", "out + o + 1,")], "out-of-bounds store"), ([("x + o,", "x - 1 - o,")], "out-of-bounds load"),
    ([("out + o,", "out + o.to(tl.int64) * 100003,")], "out-of-bounds store"),
    ([("x + o,", "(x.to(tl.int64) + 2 + o * 4).to(tl.pointer_type(tl.float32)),")], "misaligned"),
    ([("x + o,", "(0 * x.to(tl.int64) + o * 4).to(tl.pointer_type(tl.float32)),")], "no tensor there"),
    ([("tl.store(out + o, v * 2", "tl.atomic_add(out + o + n, v")], "out-of-bounds store"),
    ([(CALLED, "(8, 70000)")], "in y or z, Required: 7"), ([(CALLED, "(8, 1, 65536)")], "in y or z, Required: 6"),
    ([("BLOCK=512", "BLOCK=512, num_warps=64")], "warps"), ([("BLOCK=512", "BLOCK=512, num_warps=3")], "warps"),
    ([("BLOCK=512", "BLOCK=512, num_ctas=16")], "CTAs"),
    ([(CALLED, "(float(8),)")], "float"), ([(CALLED, "(-1,)")], "makes no sense")]


@pytest.mark.parametrize("changes, words", OUTSIDE)
def test_memory_and_launches_have_the_bounds_of_a_gpu(box, changes, words):
    fails(box, DOUBLED, replaced(by_elements("v * 2"), *changes), words)


def test_what_no_step_has_written_is_no_result(box):
    """Memory without values is poisoned; lanes that are masked away load zeros, as on a GPU."""
    fails(box, DOUBLED, replaced(by_elements("v * 2"), ("v * 2, mask=o < n", "v * 2, mask=o < n - 1")), "wrong values")
    seen = by_elements("v * tl.where(tl.load(flag) == -1, 2.0, 1.0)").replace("(x, out, n, B", "(x, flag, out, n, B")
    seen = replaced(seen, ("](x, out", "](x, torch.empty(1, dtype=torch.int32, device=x.device), out"))
    fails(box, DOUBLED, seen, "wrong values")  # the poison must not tell a kernel that it is being checked
    fails(box, problem("x * 0", FLOATS), "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
          "        return torch.empty_like(x)\n", "wrong values")
