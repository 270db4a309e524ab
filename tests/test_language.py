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
        "tl.where((v > 1) | (v < -1), v * 2, v)": "torch.where(x.abs() > 1, x * 2, x)",
        "tl.where((v > 1) ^ (v > 0), v * 2, v)": "torch.where((x > 0) & (x <= 1), x * 2, x)",
        "tl.where(~(v > 0), v * 2, v)": "torch.where(x > 0, x, x * 2)",
        "tl.where(not (v > 0), v * 2, v)": "torch.where(x > 0, x, x * 2)",
        "tl.where(v > 0 and v < 1, v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where(v > 1 or v < -1, v * 2, v)": "torch.where(x.abs() > 1, x * 2, x)",
        "tl.where((v >= 0) == (v <= 1), v * 2, v)": "torch.where((x >= 0) == (x <= 1), x * 2, x)",
        "tl.where((v > 0).logical_and(v < 1), v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where(0 < v < 1, v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)"}),
    "tl.math": (FLOATS, {
        **same("tl", "exp exp2 sin cos erf sigmoid"), "tl.floor(v * 4)": "(x * 4).floor()",
        "tl.ceil(v * 4)": "(x * 4).ceil()", "tl.math.exp(v) + tl.math.abs(v)": "x.exp() + x.abs()",
        "v.exp() + v.sigmoid()": "x.exp() + x.sigmoid()", "v.abs() + v.cos().floor()": "x.abs() + x.cos().floor()"}),
    "logarithms and roots": (POSITIVE, {
        **same("tl", "log log2 sqrt rsqrt"), **same("libdevice", "log log1p log10 log2 sqrt rsqrt lgamma"),
        "tl.sqrt_rn(v)": "x.sqrt()", "libdevice.rcbrt(v)": "x ** (-1 / 3)", "libdevice.acosh(v + 1)": "(x + 1).acosh()",
        "libdevice.asin(v * 0.8)": "(x * 0.8).asin()", "libdevice.acos(v * 0.8)": "(x * 0.8).acos()",
        "libdevice.atanh(v * 0.8)": "(x * 0.8).atanh()", "libdevice.ilogb(v)": "x.log2().floor()"}),
    "libdevice, quick and rounded": (POSITIVE, {
        "libdevice.fast_logf(v) + libdevice.fast_log2f(v)": "x.log() + x.log2()", "libdevice.fast_tanf(v)": "x.tan()",
        "libdevice.fast_powf(v, 1.5)": "x ** 1.5", "libdevice.rcp_rn(v)": "1 / x", "libdevice.pow(v, 3)": "x ** 3",
        "libdevice.sqrt_rn(v)": "x.sqrt()", "libdevice.fast_log10f(v)": "x.log10()",
        "libdevice.div_rn(v, 3.0)": "x / 3", "libdevice.sub_rn(v, 1.0)": "x - 1",
        "libdevice.fast_exp10f(v)": "10 ** x", "libdevice.rsqrt_rn(v)": "x.rsqrt()",
        "libdevice.fast_expf(v)": "x.exp()", "libdevice.fast_sinf(v) + libdevice.fast_cosf(v)": "x.sin() + x.cos()",
        "libdevice.fast_dividef(v, 3.0)": "x / 3", "libdevice.add_rn(v, 1.0) * libdevice.mul_rn(v, 2.0)":
            "(x + 1) * x * 2"}),
    "libdevice": (FLOATS, {
        **same("libdevice", "tan atan asinh sinh cosh tanh sin cos expm1 exp exp2 erf erfc"),
        "libdevice.atan2(v, 2.0)": "torch.atan2(x, torch.full_like(x, 2))", "libdevice.exp10(v)": "10 ** x",
        "libdevice.fma(v, v, 1.0)": "x * x + 1",
        "libdevice.pow(tl.abs(v), 2.5)": "x.abs() ** 2.5", "libdevice.cbrt(v)": "x.sign() * x.abs() ** (1 / 3)",
        "libdevice.erfcx(v)": "torch.special.erfcx(x)",
        "libdevice.erfinv(libdevice.tanh(v))": "x.tanh().erfinv()", "libdevice.normcdf(v)": "torch.special.ndtr(x)",
        "libdevice.normcdfinv(tl.sigmoid(v))": "torch.special.ndtri(x.sigmoid())",
        "libdevice.erfcinv(tl.sigmoid(v))": "(1 - x.sigmoid()).erfinv()"}),
    "libdevice, of several numbers": (FLOATS, {
        "libdevice.hypot(v, 2.0)": "torch.hypot(x, torch.full_like(x, 2))", "libdevice.rhypot(v, 2.0)":
            "(x * x + 4).rsqrt()", "libdevice.fmod(v, 0.3)": "torch.fmod(x, 0.3)",
        "libdevice.fdim(v, 0.3)": "(x - 0.3).relu()",
        "libdevice.copysign(v, -v)": "-x", "libdevice.ldexp(v, 3)": "x * 8", "libdevice.scalbn(v, -2)": "x / 4",
        "libdevice.remainder(v, 0.75)": "x - 0.75 * (x / 0.75).round()"}),
    "libdevice, rounding and bits": (FLOATS, {
        "libdevice.round(tl.floor(v * 4) / 2)":
            "((x * 4).floor() / 2).sign() * (((x * 4).floor() / 2).abs() + 0.5).floor()",
        "libdevice.rint(v * 4)": "(x * 4).round()", "libdevice.nearbyint(v * 4)": "(x * 4).round()",
        "libdevice.trunc(v * 4)": "(x * 4).trunc()", "libdevice.floor(v) + libdevice.ceil(v)": "x.floor() + x.ceil()",
        "libdevice.llrint(v * 4)": "(x * 4).round()", "libdevice.saturatef(v)": "x.clamp(0, 1)",
        "libdevice.float2int_rz(v * 8)": "(x * 8).trunc()", "libdevice.float2int_rn(v * 8)": "(x * 8).round()",
        "libdevice.float2int_rd(v * 8)": "(x * 8).floor()", "libdevice.abs(v)": "x.abs()",
        "libdevice.int_as_float(libdevice.float_as_int(v)) * 2": "x * 2", "libdevice.logb(v)": "x.abs().log2().floor()",
        "tl.where(libdevice.isnan(v) | libdevice.isinf(v), 0.0, v * 2)": "x * 2",
        "tl.where(libdevice.finitef(v), v * 2, 0.0)": "x * 2",
        "tl.where(libdevice.signbit(v) != 0, -v, v)": "x.abs()"}),
    "libdevice, periodic": (FLOATS, {
        "libdevice.sinpi(v)": "(x * torch.pi).sin()", "libdevice.cospi(v)": "(x * torch.pi).cos()"}),
    "casts": (FLOATS, {
        "v.to(tl.float16)": "x.half().float()", "v.to(tl.bfloat16)": "x.bfloat16().float()",
        "(v * 8).to(tl.int32)": "(x * 8).int().float()", "v.to(tl.float64) * 3": "x * 3",
        "(v * 8).to(tl.int8).to(tl.float32)": "(x * 8).to(torch.int8).float()", "v.to(tl.int1)": "(x != 0).float()",
        "(v * 8).to(tl.int64) * 2": "(x * 8).long() * 2.0", "tl.cast(v, tl.float16).to(tl.float32)": "x.half().float()",
        "tl.abs(v * 8).to(tl.uint8)": "(x * 8).abs().to(torch.uint8).float()",
        "(v > 0).to(tl.int32)": "(x > 0).float()",
        # As PTX's cvt.rzi: clipped to at least 16 bits, of which 8-bit types keep the lower half.
        "(v * 900).to(tl.uint8).to(tl.float32)": "(x * 900).clamp(0, 65535).trunc() % 256",
        "(v * 9e4).to(tl.int16).to(tl.float32)": "(x * 9e4).clamp(-32768, 32767).trunc()",
        "libdevice.float2uint_rz(v * 8).to(tl.float32)": "(x * 8).relu().trunc()",
        "tl.where(v > 0, float('nan'), v).to(tl.int32)": "torch.where(x > 0, 0, x.trunc())",
        "tl.clamp(v * 300, -9e4, 9e4).to(tl.float8e5).to(tl.float32)":
            "(x * 300).clamp(-57344, 57344).to(torch.float8_e5m2).float()",
        "tl.clamp(v * 300, -400.0, 400.0).to(tl.float8e4nv).to(tl.float32)":
            "(x * 300).clamp(-400, 400).to(torch.float8_e4m3fn).float()",
        "v.to(tl.bfloat16).to(tl.float16)": "x.bfloat16().half().float()", "v + (v > 0).to(tl.float32)": "x + (x > 0)",
        "v.to(tl.float16, fp_downcast_rounding='rtz').to(tl.float32) * 0 + v * 2": "x * 2",
        "(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)": "x.abs()",
        "tl.cast(v.to(tl.uint32, bitcast=True) ^ 0x80000000, tl.float32, bitcast=True)": "-x",
        "(v.to(tl.float16).to(tl.int16, bitcast=True) & 0x7FFF).to(tl.float16, bitcast=True)":
            "x.half().abs().float()"}),
    "shapes": (FLOATS, {expression: "x * 2" for expression in (
        "tl.reshape(v, (16, 16)).reshape(BLOCK) * 2", "tl.view(v, (4, 64)).view(BLOCK) * 2",
        "tl.ravel(tl.reshape(v, (2, 8, 16))) * 2", "v.reshape(16, 16).T.T.reshape(256) * 2",
        "tl.trans(tl.trans(v.reshape(16, 16))).reshape(BLOCK) * 2", "tl.expand_dims(v, (0, 2)).reshape(BLOCK) * 2",
        "tl.permute(tl.permute(v.reshape(2, 8, 16), (2, 0, 1)), (1, 2, 0)).reshape(BLOCK) * 2",
        "tl.interleave(*tl.split(v.reshape(BLOCK // 2, 2))) * 2",
        "tl.join(*tl.split(v.reshape(BLOCK // 2, 2))).reshape(BLOCK) * 2",
        "(v[:, None] + tl.zeros((1, 2), tl.float32)).sum(1)", "tl.sum(v[None, :].broadcast_to((2, BLOCK)), axis=0)",
        "tl.sum(tl.broadcast_to(tl.expand_dims(v, 1), (BLOCK, 2)), 1)",
        "tl.full((BLOCK,), 2, tl.float32) * v + tl.zeros_like(v)", "tl.flip(tl.flip(v)) * 2",
        "tl.gather(v, tl.arange(0, BLOCK) ^ 1, 0) * 0 + v * 2")}),
    "numbers": (FLOATS, {expression: "x * 2" for expression in (
        "v * tl.where(tl.rand(7, o) < 1.0, 2.0, 1.0)", "v * 2 + 0 * tl.randn(7, o)", "v * 2 + 0 * tl.randint(7, o)",
        "v * 2 + 0 * (tl.rand4x(7, o)[0] + tl.randn4x(7, o)[3])", "v * (2 if BLOCK > 8 else 3)", "v * float(2)",
        "v * len((1, 2))", "v * min(BLOCK, 2)", "v * max(2, 1)", "v * [2, 3][0]", "v * (4, 2)[1]", "v * int(2.7)",
        "v * triton.cdiv(BLOCK, 128)", "v * tl.cdiv(BLOCK, 200)", "v * triton.next_power_of_2(2)",
        "v * tl.constexpr(2)",
        "v * (2 if isinstance(BLOCK, tl.constexpr) else 2)")}),
    "integers": (INTEGERS, {
        "v + 7 * v - 3": "x * 8 - 3", "v // 7": "torch.div(x, 7, rounding_mode='trunc')", "v % 7": "torch.fmod(x, 7)",
        "v & 12 | v ^ 5": "(x & 12) | (x ^ 5)", "(v << 3) + (v >> 2)": "(x << 3) + (x >> 2)", "~v": "~x",
        "tl.abs(v)": "x.abs()", "-v": "-x", "tl.maximum(v, -5)": "x.clamp(min=-5)", "v * (v != 3)": "x * (x != 3)",
        "v.to(tl.int16) * 3": "x * 3", "(v.to(tl.float32) * 0.5).to(tl.int32)": "(x * 0.5).int()",
        "(v.to(tl.uint32) >> 28).to(tl.int32)": "(x >> 28) & 15",
        "tl.cdiv(v, 7)": "torch.div(x + 6, 7, rounding_mode='trunc')",
        "tl.umulhi(v.to(tl.uint32), 1 << 30).to(tl.int32)": "((x.long() & 0xFFFFFFFF) >> 2).int()",
        "(v.to(tl.int64) * v * v * v % 1000).to(tl.int32)": "torch.fmod(x.long() ** 4, 1000).int()",
        "libdevice.int2float_rn(v).to(tl.int32) * 2": "x * 2", "tl.where(v % 2 == 0, v, -v)": "x * (1 - 2 * (x % 2))",
        "tl.xor_sum(v.reshape(BLOCK, 1), 1) * 2": "x * 2"}),
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
DESCRIPTORS = ("a = tl.make_tensor_descriptor(x, shape=[n // 64, 64], strides=[64, 1], block_shape=[4, 64])\n"
               "b = tl.make_tensor_descriptor(out, [n // 64, 64], [64, 1], [4, 64])\n")
BODIES = {
    "memory": {name: ("x * 2", body) for name, body in {
        "mask and other": "w = tl.load(x + o, mask=o < n, other=0.0)\ntl.store(out + o, w * 2, mask=o < n)",
        "other of another type": "w = tl.load(x + o, o < n, 0)\ntl.store(out + o, w * 2, o < n)",
        "cache hints": "w = tl.load(x + o, cache_modifier='.cg', eviction_policy='evict_first')\n"
                       "tl.store(out + o, w * 2, cache_modifier='.cs', eviction_policy='evict_last')",
        "volatile": "tl.store(out + o, tl.load(x + o, volatile=True) * 2)",
        "pointers that move": "x += tl.program_id(0) * BLOCK\nout += tl.program_id(0) * BLOCK\n"
                              "for i in range(0, BLOCK, 32):\n    w = tl.load(x + tl.arange(0, 32))\n"
                              "    tl.store(out + tl.arange(0, 32), w * 2)\n    x += 32\n    out += 32",
        "hints on alignment": "o = tl.max_contiguous(tl.multiple_of(o, BLOCK), BLOCK)\n"
                              "tl.store(out + o, tl.load(tl.multiple_of(x, 16) + o) * 2)",
        "more hints": "tl.assume(n > 0)\nm = tl.max_constancy(o < n, 16)\ntl.store(out + o, v * 2, m)",
        "a pointer cast": "p = out.to(tl.pointer_type(tl.int32), bitcast=True)\n"
                          "tl.store(p + o, (v * 2).to(tl.int32, bitcast=True))",
        "scalars": "for i in range(BLOCK):\n    j = tl.program_id(0) * BLOCK + i\n"
                   "    tl.store(out + j, tl.load(x + j) * 2)",
        "a barrier": "tl.debug_barrier()\ntl.store(out + o, v * 2)",
        "int64 offsets": "o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\ntl.store(out + o, v * 2)",
        "descriptors": DESCRIPTORS + "b.store([tl.program_id(0) * 4, 0], a.load([tl.program_id(0) * 4, 0]) * 2)",
        "descriptors by function": DESCRIPTORS + "w = tl.load_tensor_descriptor(a, [tl.program_id(0) * 4, 0])\n"
                                                 "tl.store_tensor_descriptor(b, [tl.program_id(0) * 4, 0], w * 2)",
        "persistent programs": "for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):\n"
                               "    p = block * BLOCK + tl.arange(0, BLOCK)\n    tl.store(out + p, tl.load(x + p) * 2)",
        "static_assert": "tl.static_assert(BLOCK == 256, f'block {BLOCK}')\ntl.store(out + o, v * 2)",
        "asserts that hold": "tl.device_assert(n > 0, 'n')\nassert n > 0, 'n'\ntl.store(out + o, v * 2)",
        "asserts that fail, without debug": "tl.device_assert(v < -100, 'v')\nassert n < 0, 'n'" + STORE_TWICE,
        "prints": "tl.static_print('block', BLOCK)\ntl.device_print('x', v)\nprint('n', n)\ntl.store(out + o, v * 2)",
    }.items()},
    "reductions": {name: (OF_ROWS.format(theirs), f"tl.store(out + o, {ours} + 0 * v)") for name, ours, theirs in (
        ("sum", "tl.sum(v, axis=0)", "sum(1, keepdim=True)"), ("max", "tl.max(v, 0)", "amax(1, keepdim=True)"),
        ("min", "tl.min(v, 0)", "amin(1, keepdim=True)"), ("argmax", "tl.argmax(v, 0)", "argmax(1, True).float()"),
        ("argmin", "tl.argmin(v, 0)", "argmin(1, True).float()"), ("v.sum", "v.sum()", "sum(1, keepdim=True)"),
        ("v.max", "v.max(0)", "amax(1, keepdim=True)"), ("axis -1", "tl.sum(v, axis=-1)", "sum(1, keepdim=True)"),
        ("keep_dims", "tl.sum(v, axis=0, keep_dims=True)", "sum(1, keepdim=True)"),
        ("two dimensions", "tl.sum(tl.sum(v.reshape(16, 16), 1), 0)", "sum(1, keepdim=True)"),
        ("all axes", "tl.sum(v.reshape(16, 16))", "sum(1, keepdim=True)"), ("cumsum", "tl.cumsum(v, 0)", "cumsum(1)"),
        ("dtype", "tl.sum(v.to(tl.float16), 0, dtype=tl.float32)", "half().float().sum(1, keepdim=True)"),
        ("cumprod", "tl.cumprod(v * 0 + 0.99, 0)", "mul(0).add(0.99).cumprod(1)"),
        ("sort", "tl.sort(v)", "sort(1).values"),
        ("cumsum reversed", "tl.cumsum(v, 0, reverse=True)", "flip(1).cumsum(1).flip(1)"),
        ("sort descending", "tl.sort(v, descending=True)", "sort(1, descending=True).values"),
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
                            "a, b = tl.associative_scan((v * 0 + 1, v), 0, linear)\ntl.store(out + o, b)"),
        "histogram": ("(x.view(16, 1, 256).gt(0) == torch.arange(2).view(2, 1)).sum(2).float()"
                      ".view(16, 2, 1).expand(16, 2, 128).reshape(64, 64)",
                      "h = tl.histogram((v > 0).to(tl.int32), 2)\n"
                      "tl.store(out + o, tl.broadcast_to(h[:, None], (2, 128)).reshape(BLOCK).to(tl.float32))")},
    "control flow": {
        "for": ("x * 8", "for i in range(3):\n    v += v" + STORE),
        "for with a step": ("x * 8", "for i in range(0, 6, 2):\n    v += v" + STORE),
        "tl.range": ("x * 8", "for i in tl.range(0, 3, num_stages=2):\n    v += v" + STORE),
        "tl.range with options": ("x * 8", "for i in tl.range(3, loop_unroll_factor=3):\n    v += v" + STORE),
        "static_range": ("x * 8", "for i in tl.static_range(3):\n    v = v * 2" + STORE),
        "static_range with a step": ("x * 8", "for i in tl.static_range(0, 6, step=2):\n    v = v * 2" + STORE),
        "nested loops": ("x * 16", "for i in range(2):\n    for j in range(2):\n        v += v" + STORE),
        "bounds that differ": (LOWER_TWICE, "for i in range(0, tl.program_id(0) // 8):\n    v += v" + STORE),
        "while": ("x * 8", "i = 0\nwhile i < 3:\n    v += v\n    i += 1" + STORE),
        "while with and": ("x * 8", "i = 0\nwhile i < 3 and i < n:\n    v += v\n    i += 1" + STORE),
        "while that differs": (f"torch.where({UPPER}, x * 2, x * 4)",
                               "i = tl.program_id(0) // 8\nwhile i >= 0:\n    v += v\n    i -= 1" + STORE),
        "if": (LOWER_TWICE, "if tl.program_id(0) >= 8:\n    v = v * 2" + STORE),
        "if and": (LOWER_TWICE, "p = tl.program_id(0)\nif p >= 8 and p < 100:\n    v = v * 2" + STORE),
        "if not": (LOWER_TWICE, "if not tl.program_id(0) < 8:\n    v = v * 2" + STORE),
        "elif": ("x * (torch.arange(64)[:, None] // 16).clamp(max=2)",
                 "p = tl.program_id(0)\nif p < 4:\n    v = v * 0\n"
                 "elif p < 8:\n    v = v\nelse:\n    v = v * 2" + STORE),
        "early return": ("torch.cat([x[:32] * 2, x[32:] * 3])",
                         "if tl.program_id(0) < 8:\n    tl.store(out + o, v * 2)\n    return\n"
                         "tl.store(out + o, v * 3)"),
        "if of a constant": ("x * 2", "if BLOCK > 64:\n    v = v * 2\nelse:\n    v = tl.dot(v, v)" + STORE),
        "if expression": (LOWER_TWICE, "f = 1.0 if tl.program_id(0) < 8 else 2.0\ntl.store(out + o, v * f)"),
        "chained comparison": (f"torch.where({UPPER}, x * 2, x)",
                               "if -1 < tl.program_id(0) < 8:\n    v = v * 2" + STORE),
        "a branch after a store": (f"torch.where({UPPER}, x + 1, x + 2)", "tl.store(out + o, v + 1)\n"
                                   "if tl.program_id(0) >= 8:\n    tl.store(out + o, tl.load(out + o) + 1)"),
        "a tuple": ("x * 5", "a, b = v * 2, v * 3\na, b = b, a\ntl.store(out + o, a + b)"),
        "a list comprehension": ("x * 6", "a = [v * i for i in (1, 2, 3)]\ntl.store(out + o, a[0] + a[1] + a[2])"),
        "annotated assignment": ("x * 2", "two: tl.constexpr = 2\ntl.store(out + o, v * two)")},
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
        "inline assembly (tl.inline_asm_elementwise) is not supported here",
    "tl.store(out + o, v ** 2)": "unsupported operand type(s) for **", "tl.store(out + o, libdevice.jn(2, v))":
        "libdevice.jn is not supported here",
    "tl.store(out + o, libdevice.popc(o))": "libdevice.popc is not supported here",
    "tl.atomic_add(out.to(tl.pointer_type(tl.bfloat16), bitcast=True) + o, v.to(tl.bfloat16))": "an atomic on bf16",
    "tl.store(out + o, tl.nonsense(v))": "tl.nonsense is not in triton",
    "tl.store(out + o, torch.relu(v))": "torch.relu",
    "for i in range(3):\n    if i == 1:\n        break\ntl.store(out + o, v)": "`break` is not available",
    "for i in range(3):\n    if i == 1:\n        continue\ntl.store(out + o, v)": "`continue` is not available",
    "try:\n    v = v * 2\nfinally:\n    tl.store(out + o, v)": "`try:` is not available",
    "f = lambda a: a * 2\ntl.store(out + o, f(v))": "`lambda a: a * 2` is not available",
    "tl.store(out + o, (w := v * 2))": "`(w := (v * 2))` is not available",
    "global y\ntl.store(out + o, v)": "`global y` is not available",
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


@pytest.mark.parametrize("change", [("BLOCK=256)", "BLOCK=256, debug=True)"), ("@triton.jit\ndef kernel0", (
    "@triton.jit(debug=True)\ndef kernel0"))])
@pytest.mark.parametrize("body", ["tl.device_assert(v < -100, 'my words')", "assert n < 0, 'my words'"])
def test_with_debug_an_assertion_that_fails_is_an_error(box, body, change):
    rows = [("x * 2", body + "\ntl.store(out + o, v * 2)")]
    assert verdict(box, *candidate(FLOATS, rows)).correct
    assert "my words" in verdict(box, *candidate(FLOATS, rows, lambda code: code.replace(*change))).error
