"""Honest Triton passes: small kernels over its language, and the host code around them, compared with plain PyTorch.

Rows of a group are kernels of one candidate, whose forward returns all their results; when it fails each is scored by
itself. What is refused is refused with the words that stand here.
"""

import pytest

from candidates import indent, problem, solution, verdict

# ---------------------------------------------------------------------------------------------------------------------
# One expression of v, a block of x, a row: {group: (inputs, {Triton's: torch's})}

FLOATS, POSITIVE = "torch.randn(64, 64)", "torch.rand(64, 64) + 0.1"
INTEGERS = "torch.randint(-1000, 1000, (64, 64), dtype=torch.int32)"
HALF, BF16 = "torch.randn(64, 64).half()", "torch.randn(64, 64).bfloat16()"


def same(module, names):
    """Rows of functions that torch has by the same names."""
    return {f"{module}.{name}(v)": f"x.{name}()" for name in names.split()}


EXPRESSIONS = {
    "arithmetic": (FLOATS, {
        "v + 1": "x + 1", "1 - v": "1 - x", "-v * 2.5": "-x * 2.5", "v / 3": "x / 3", "tl.fdiv(v, 3.0)": "x / 3",
        "tl.div_rn(v, 3.0)": "x / 3", "v * v * v": "x ** 3", "tl.fma(v, v, v)": "x * x + x", "tl.abs(v)": "x.abs()",
        "tl.add(v, 1.0) + tl.mul(v, 2.0) - tl.sub(v, 3.0)": "2 * x + 4", "tl.maximum(v, 0.0)": "x.relu()",
        "tl.minimum(v, 0.5)": "x.clamp(max=0.5)", "tl.clamp(v, -0.5, 0.5)": "x.clamp(-0.5, 0.5)",
        "tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)": "x.relu()"}),
    "comparisons": (FLOATS, {
        "tl.where(v > 0, v, 0.1 * v)": "torch.nn.functional.leaky_relu(x, 0.1)", "v * (v > 0)": "x.relu()",
        "tl.where((v > 0) & (v < 1), v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where(~(v > 0), v * 2, v)": "torch.where(x > 0, x, x * 2)",
        "tl.where(v > 0 and v < 1, v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where(0 < v < 1, v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)"}),
    "tl.math": (FLOATS, {
        **same("tl", "exp exp2 sin cos erf sigmoid"), "tl.floor(v * 4)": "(x * 4).floor()",
        "tl.ceil(v * 4)": "(x * 4).ceil()", "tl.math.exp(v) + tl.math.abs(v)": "x.exp() + x.abs()",
        "v.exp() + v.sigmoid()": "x.exp() + x.sigmoid()", "v.abs() + v.cos().floor()": "x.abs() + x.cos().floor()"}),
    "logarithms and roots": (POSITIVE, {
        **same("tl", "log log2 sqrt rsqrt"), **same("libdevice", "log log1p log10 log2 sqrt rsqrt lgamma"),
        "tl.sqrt_rn(v)": "x.sqrt()", "libdevice.acosh(v + 1)": "(x + 1).acosh()",
        "libdevice.asin(v * 0.8)": "(x * 0.8).asin()", "libdevice.acos(v * 0.8)": "(x * 0.8).acos()",
        "libdevice.atanh(v * 0.8)": "(x * 0.8).atanh()"}),
    "libdevice": (FLOATS, {
        **same("libdevice", "tan atan asinh sinh cosh tanh sin cos expm1 exp exp2 erf erfc"),
        "libdevice.atan2(v, 2.0)": "torch.atan2(x, torch.full_like(x, 2))", "libdevice.exp10(v)": "10 ** x",
        "libdevice.fma(v, v, 1.0)": "x * x + 1",
        "libdevice.pow(tl.abs(v), 2.5)": "x.abs() ** 2.5",
        "libdevice.erfcx(v)": "torch.special.erfcx(x)",
        "libdevice.erfinv(libdevice.tanh(v))": "x.tanh().erfinv()"}),
    "libdevice, rounding": (FLOATS, {
        "libdevice.rint(v * 4)": "(x * 4).round()", "libdevice.nearbyint(v * 4)": "(x * 4).round()",
        "libdevice.trunc(v * 4)": "(x * 4).trunc()", "libdevice.floor(v) + libdevice.ceil(v)": "x.floor() + x.ceil()",
        "libdevice.abs(v)": "x.abs()",
        "tl.where(libdevice.isnan(v) | libdevice.isinf(v), 0.0, v * 2)": "x * 2",
        "tl.where(libdevice.signbit(v) != 0, -v, v)": "x.abs()"}),
    "casts": (FLOATS, {
        "v.to(tl.float16)": "x.half().float()", "v.to(tl.bfloat16)": "x.bfloat16().float()",
        "(v * 8).to(tl.int32)": "(x * 8).int().float()", "v.to(tl.float64) * 3": "x * 3",
        "(v * 8).to(tl.int8).to(tl.float32)": "(x * 8).to(torch.int8).float()", "v.to(tl.int1)": "(x != 0).float()",
        "(v * 8).to(tl.int64) * 2": "(x * 8).long() * 2.0", "tl.cast(v, tl.float16).to(tl.float32)": "x.half().float()",
        "(v > 0).to(tl.int32)": "(x > 0).float()",
        # As PTX's cvt.rzi: clipped to at least 16 bits, of which 8-bit types keep the lower half.
        "(v * 900).to(tl.uint8).to(tl.float32)": "(x * 900).clamp(0, 65535).trunc() % 256",
        "tl.where(v > 0, float('nan'), v).to(tl.int32)": "torch.where(x > 0, 0, x.trunc())",
        "tl.clamp(v * 300, -400.0, 400.0).to(tl.float8e4nv).to(tl.float32)":
            "(x * 300).clamp(-400, 400).to(torch.float8_e4m3fn).float()",
        "v.to(tl.bfloat16).to(tl.float16)": "x.bfloat16().half().float()", "v + (v > 0).to(tl.float32)": "x + (x > 0)",
        "(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)": "x.abs()",
        "(v.to(tl.float16).to(tl.int16, bitcast=True) & 0x7FFF).to(tl.float16, bitcast=True)":
            "x.half().abs().float()"}),
    "shapes": (FLOATS, {expression: "x * 2" for expression in (
        "tl.reshape(v, (16, 16)).reshape(BLOCK) * 2", "tl.view(v, (4, 64)).view(BLOCK) * 2",
        "tl.ravel(tl.reshape(v, (2, 8, 16))) * 2", "v.reshape(16, 16).T.T.reshape(256) * 2",
        "tl.permute(tl.permute(v.reshape(2, 8, 16), (2, 0, 1)), (1, 2, 0)).reshape(BLOCK) * 2",
        "tl.interleave(*tl.split(v.reshape(BLOCK // 2, 2))) * 2",
        "tl.join(*tl.split(v.reshape(BLOCK // 2, 2))).reshape(BLOCK) * 2",
        "tl.full((BLOCK,), 2, tl.float32) * v + tl.zeros_like(v)", "tl.flip(tl.flip(v)) * 2")}),
    "numbers": (FLOATS, {expression: "x * 2" for expression in (
        "v * tl.where(tl.rand(7, o) < 1.0, 2.0, 1.0)", "v * 2 + 0 * tl.randn(7, o)", "v * 2 + 0 * tl.randint(7, o)",
        "v * 2 + 0 * (tl.rand4x(7, o)[0] + tl.randn4x(7, o)[3])", "v * (2 if BLOCK > 8 else 3)", "v * float(2)",
        "v * len((1, 2))", "v * min(BLOCK, 2)", "v * max(2, 1)", "v * [2, 3][0]", "v * (4, 2)[1]", "v * int(2.7)",
        "v * tl.constexpr(2)",
        "v * (2 if isinstance(BLOCK, tl.constexpr) else 2)")}),
    "integers": (INTEGERS, {
        "v + 7 * v - 3": "x * 8 - 3", "v // 7": "torch.div(x, 7, rounding_mode='trunc')", "v % 7": "torch.fmod(x, 7)",
        "v & 12 | v ^ 5": "(x & 12) | (x ^ 5)", "(v << 3) + (v >> 2)": "(x << 3) + (x >> 2)", "~v": "~x",
        "tl.abs(v)": "x.abs()", "-v": "-x", "tl.maximum(v, -5)": "x.clamp(min=-5)", "v * (v != 3)": "x * (x != 3)",
        "tl.umulhi(v.to(tl.uint32), 1 << 30).to(tl.int32)": "((x.long() & 0xFFFFFFFF) >> 2).int()",
        "(v.to(tl.int64) * v * v * v % 1000).to(tl.int32)": "torch.fmod(x.long() ** 4, 1000).int()",
        "tl.where(v % 2 == 0, v, -v)": "x * (1 - 2 * (x % 2))"}),
    "half": (HALF, {
        "v * 2 + 1": "x * 2 + 1", "tl.exp(v.to(tl.float32))": "x.float().exp().half()",
        "tl.maximum(v, 0.0)": "x.relu()",
        "libdevice.tanh(v.to(tl.float32)).to(tl.float16)": "x.tanh()", "v / 3": "(x.float() / 3).half()"}),
    "bf16": (BF16, {
        "v + v": "x + x", "v * 1.5 - 3": "x * 1.5 - 3", "tl.where(v > 0.5, v, -v)": "torch.where(x > 0.5, x, -x)",
        "tl.minimum(tl.abs(v), 1.0)": "x.abs().clamp(max=1)", "(v * 8).to(tl.int32)": "(x * 8).int().bfloat16()",
        "tl.fma(v, 2.0, 1.0)": "(x.float() * 2 + 1).bfloat16()", "v.to(tl.float16) / 3": "x.half().bfloat16() / 3",
        "tl.sigmoid(v.to(tl.float32))": "x.float().sigmoid().bfloat16()"}),
}
# ---------------------------------------------------------------------------------------------------------------------
# Bodies of kernels on o, v and n: {group: {name: (torch's, body)}}

OF_ROWS = "x.view(16, 256).{}.expand(16, 256).reshape(64, 64)"  # a result of every program's 256 elements
UPPER = "torch.arange(64)[:, None] < 32"  # rows of the first 8 programs
LOWER_TWICE = f"torch.where({UPPER}, x, x * 2)"
STORE, STORE_TWICE = "\ntl.store(out + o, v)", "\ntl.store(out + o, v * 2)"
BODIES = {
    "memory": {name: ("x * 2", body) for name, body in {
        "mask and other": "w = tl.load(x + o, mask=o < n, other=0.0)\ntl.store(out + o, w * 2, mask=o < n)",
        "cache hints": "w = tl.load(x + o, cache_modifier='.cg', eviction_policy='evict_first')\n"
                       "tl.store(out + o, w * 2, cache_modifier='.cs', eviction_policy='evict_last')",
        "pointers that move": "x += tl.program_id(0) * BLOCK\nout += tl.program_id(0) * BLOCK\n"
                              "for i in range(0, BLOCK, 32):\n    w = tl.load(x + tl.arange(0, 32))\n"
                              "    tl.store(out + tl.arange(0, 32), w * 2)\n    x += 32\n    out += 32",
        "hints on alignment": "o = tl.max_contiguous(tl.multiple_of(o, BLOCK), BLOCK)\n"
                              "tl.store(out + o, tl.load(tl.multiple_of(x, 16) + o) * 2)",
        "a pointer cast": "p = out.to(tl.pointer_type(tl.int32), bitcast=True)\n"
                          "tl.store(p + o, (v * 2).to(tl.int32, bitcast=True))",
        "a barrier": "tl.debug_barrier()\ntl.store(out + o, v * 2)",
        "persistent programs": "for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):\n"
                               "    p = block * BLOCK + tl.arange(0, BLOCK)\n    tl.store(out + p, tl.load(x + p) * 2)",
        "static_assert": "tl.static_assert(BLOCK == 256, f'block {BLOCK}')\ntl.store(out + o, v * 2)",
        "asserts that fail": "tl.device_assert(v < -100, 'v')\nassert n < 0, 'n'" + STORE_TWICE,
        "prints": "tl.static_print('block', BLOCK)\ntl.device_print('x', v)\nprint('n', n)\ntl.store(out + o, v * 2)",
    }.items()},
    "reductions": {name: (OF_ROWS.format(theirs), f"tl.store(out + o, {ours} + 0 * v)") for name, ours, theirs in (
        ("sum", "tl.sum(v, axis=0)", "sum(1, keepdim=True)"), ("max", "tl.max(v, 0)", "amax(1, keepdim=True)"),
        ("min", "tl.min(v, 0)", "amin(1, keepdim=True)"), ("argmax", "tl.argmax(v, 0)", "argmax(1, True).float()"),
        ("argmin", "tl.argmin(v, 0)", "argmin(1, True).float()"), ("v.sum", "v.sum()", "sum(1, keepdim=True)"),
        ("keep_dims", "tl.sum(v, axis=0, keep_dims=True)", "sum(1, keepdim=True)"),
        ("all axes", "tl.sum(v.reshape(16, 16))", "sum(1, keepdim=True)"), ("cumsum", "tl.cumsum(v, 0)", "cumsum(1)"),
        ("dtype", "tl.sum(v.to(tl.float16), 0, dtype=tl.float32)", "half().float().sum(1, keepdim=True)"),
        ("sort", "tl.sort(v)", "sort(1).values"),
        ("softmax", "tl.softmax(v)", "softmax(1)"), ("topk", "tl.max(tl.topk(v, 4), 0)", "amax(1, keepdim=True)"),
        ("own combine", "tl.reduce(v, 0, larger)", "abs().amax(1, keepdim=True)"),
        ("own scan", "tl.associative_scan(v, 0, most)", "cummax(1).values"),
        ("own scan, reversed", "tl.associative_scan(v, 0, most, reverse=True)", "flip(1).cummax(1).values.flip(1)"),
        ("reduce_or", "tl.reduce_or((v > 0).to(tl.int32), 0)", "gt(0).any(1, keepdim=True).float()"),
        ("xor_sum", "tl.xor_sum((v > 0).to(tl.int32), 0)", "gt(0).sum(1, keepdim=True).fmod(2).float()"))},
    "reductions of several": {
        "max with indices": (OF_ROWS.format("argmax(1, True).float()"),
                             "m, i = tl.max(v, 0, return_indices=True)\ntl.store(out + o, i + 0 * v)"),
        "own combine of two": (OF_ROWS.format("var(1, correction=0, keepdim=True)"),
                               "m, s, c = tl.reduce((v, 0 * v, 0 * v + 1), 0, welford)\n"
                               "tl.store(out + o, s / c + 0 * v)"),
        "own scan of two": (OF_ROWS.format("cumsum(1)"),
                            "a, b = tl.associative_scan((v * 0 + 1, v), 0, linear)\ntl.store(out + o, b)")},
    "control flow": {
        "for": ("x * 8", "for i in range(3):\n    v += v" + STORE),
        "tl.range": ("x * 8", "for i in tl.range(0, 3, num_stages=2):\n    v += v" + STORE),
        "static_range": ("x * 8", "for i in tl.static_range(3):\n    v = v * 2" + STORE),
        "nested loops": ("x * 16", "for i in range(2):\n    for j in range(2):\n        v += v" + STORE),
        "bounds that differ": (LOWER_TWICE, "for i in range(0, tl.program_id(0) // 8):\n    v += v" + STORE),
        "while": ("x * 8", "i = 0\nwhile i < 3:\n    v += v\n    i += 1" + STORE),
        "while that differs": (f"torch.where({UPPER}, x * 2, x * 4)",
                               "i = tl.program_id(0) // 8\nwhile i >= 0:\n    v += v\n    i -= 1" + STORE),
        "if": (LOWER_TWICE, "if tl.program_id(0) >= 8:\n    v = v * 2" + STORE),
        "elif": ("x * (torch.arange(64)[:, None] // 16).clamp(max=2)",
                 "p = tl.program_id(0)\nif p < 4:\n    v = v * 0\n"
                 "elif p < 8:\n    v = v\nelse:\n    v = v * 2" + STORE),
        "early return": ("torch.cat([x[:32] * 2, x[32:] * 3])",
                         "if tl.program_id(0) < 8:\n    tl.store(out + o, v * 2)\n    return\n"
                         "tl.store(out + o, v * 3)"),
        "if of a constant": ("x * 2", "if BLOCK > 64:\n    v = v * 2\nelse:\n    v = tl.dot(v, v)" + STORE),
        "if expression": (LOWER_TWICE, "f = 1.0 if tl.program_id(0) < 8 else 2.0\ntl.store(out + o, v * f)"),
        "a branch after a store": (f"torch.where({UPPER}, x + 1, x + 2)", "tl.store(out + o, v + 1)\n"
                                   "if tl.program_id(0) >= 8:\n    tl.store(out + o, tl.load(out + o) + 1)"),
        "a tuple": ("x * 5", "a, b = v * 2, v * 3\na, b = b, a\ntl.store(out + o, a + b)")},
}
HELPERS = """
@triton.jit
def larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b))

@triton.jit
def most(a, b):
    return tl.maximum(a, b)

@triton.jit
def welford(m1, s1, c1, m2, s2, c2):
    d, c = m2 - m1, c1 + c2
    return m1 + d * c2 / c, s1 + s2 + d * d * c1 * c2 / c, c

@triton.jit
def linear(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2
"""
GROUPS = {**{group: (inputs, [(theirs, f"tl.store(out + o, {ours}, mask=o < n)") for ours, theirs in rows.items()])
             for group, (inputs, rows) in EXPRESSIONS.items()},
          **{group: (FLOATS, list(rows.values())) for group, rows in BODIES.items()}}


def candidate(inputs, rows, change=lambda code: code):
    """(task, code) of all rows at once: a kernel and a result each."""
    kernels = "".join(f"\n@triton.jit\ndef kernel{i}(x, out, n, BLOCK: tl.constexpr):\n"
                      "    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                      f"    v = tl.load(x + o, mask=o < n)\n{indent(body)}" for i, (_, body) in enumerate(rows))
    launches = "".join(f"kernel{i}[(16,)](x, outs[{i}], x.numel(), BLOCK=256)\n" for i in range(len(rows)))
    outs = f"outs = [torch.empty_like(x) for _ in range({len(rows)})]\n"
    code = solution(HELPERS + kernels, outs + launches + "return outs")
    return problem(f"[{', '.join(theirs for theirs, _ in rows)}]", inputs), change(code)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_give_what_torch_gives(box, group):
    inputs, rows = GROUPS[group]
    if not verdict(box, *candidate(inputs, rows)).correct:
        alone = {row: verdict(box, *candidate(inputs, [row])) for row in rows}
        assert not {row: v.rejected or v.error for row, v in alone.items() if not v.correct}


REFUSED = {  # body: the words
    "tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [v], tl.float32, True, 1)\ntl.store(out + o, v)":
        "tl.inline_asm is not supported here",
    "tl.store(out + o, v ** 2)": "unsupported operand type(s) for **", "tl.store(out + o, libdevice.jn(2, v))":
        "libdevice.jn is not supported here",
    "tl.store(out + o, tl.gather(v, tl.arange(0, BLOCK) ^ 1, 0))": "tl.gather is not supported here",
    "a = tl.make_tensor_descriptor(x, [n // 64, 64], [64, 1], [4, 64])\n"
    "tl.store(out + o, v + a.load([0, 0]).reshape(BLOCK))":
        "tl.make_tensor_descriptor is not supported here",
    "tl.atomic_cas(x.to(tl.pointer_type(tl.int32)), 0, 1)\ntl.store(out + o, v)": "tl.atomic_cas is not supported here",
    "tl.atomic_add(out.to(tl.pointer_type(tl.bfloat16), bitcast=True) + o, v.to(tl.bfloat16))": "an atomic on bf16",
    "tl.store(out + o, tl.nonsense(v))": "tl.nonsense is not in triton",
    "tl.store(out + o, torch.relu(v))": "torch.relu",
    "for i in range(3):\n    if i == 1:\n        break\ntl.store(out + o, v)": "`break` is not available",
    "try:\n    v = v * 2\nfinally:\n    tl.store(out + o, v)": "`try:` is not available",
    "tl.store(out + o, (w := v * 2))": "`(w := (v * 2))` is not available",
    "import math\ntl.store(out + o, v)": "`import math`",
    "v = v.handle.data.tofile('f')": "v.handle", "open('f', 'w')": "open is not defined",
    "v = v.__class__": "__class__", "tl.core.os.system('true')": "tl.core.os",
    "tl.static_assert(BLOCK == 1, 'my block')\ntl.store(out + o, v * 2)": "my block",
    "m = v.reshape(16, 16).to(tl.bfloat16)\nd = tl.dot_scaled(m, None, 'bf16', m, None, 'bf16')\n"
    "tl.store(out + o, d.reshape(BLOCK))": "tl.dot_scaled is not supported here",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_refused_is_refused_by_name(box, body):
    assert REFUSED[body] in verdict(box, *candidate(FLOATS, [("x * 2", body)])).error
