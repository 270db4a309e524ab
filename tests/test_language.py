"""Honest Triton passes: small kernels over its language and the code around them, each compared with plain PyTorch.

What is refused is refused with the words that stand here. All rows are handed to one sandbox at once.
"""

import pytest

from sandbox import Sandbox
from test_modelled import problem, solution


def kernel(body, launch="", names="x", before="", grid="(16,)"):
    """A candidate whose kernel has `o` and `v`, a block of x, and stores what `body` computes from them."""
    body = "\n".join("    " + line for line in body.strip("\n").split("\n"))
    return solution(f"{before}\n@triton.jit\ndef kernel(x, out, n, BLOCK: tl.constexpr):\n"
                    "    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    f"    v = tl.load(x + o, mask=o < n)\n{body}\n",
                    launch or f"out = torch.empty_like(x)\nkernel[{grid}](x, out, x.numel(), BLOCK=256)\nreturn out", names)


def element(expression, before=""):
    return kernel(f"tl.store(out + o, {expression}, mask=o < n)", before=before)


SMALL = "torch.randn(64, 64)"
INTEGERS = "torch.randint(-1000, 1000, (64, 64), dtype=torch.int32)"
POSITIVE = "torch.rand(64, 64) + 0.1"
HALF = "torch.randn(64, 64).half()"
# One expression of v, a block of x, a row: {inputs: {Triton's: torch's}}
ELEMENTS = {
    SMALL: {
        # arithmetic and comparisons
        "v + 1": "x + 1", "1 - v": "1 - x", "-v * 2.5": "-x * 2.5", "v / 3": "x / 3", "tl.fdiv(v, 3.0)": "x / 3",
        "tl.div_rn(v, 3.0)": "x / 3", "abs(v)": "x.abs()", "tl.fma(v, v, v)": "x * x + x", "v * v * v": "x ** 3",
        "tl.add(v, 1.0) + tl.mul(v, 2.0) - tl.sub(v, 3.0)": "2 * x + 4",
        "tl.maximum(v, 0.0)": "x.relu()", "tl.minimum(v, 0.5)": "x.clamp(max=0.5)",
        "tl.clamp(v, -0.5, 0.5)": "x.clamp(-0.5, 0.5)", "v.to(tl.float64) * 3": "x * 3",
        "tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)": "x.relu()",
        "tl.where(v > 0, v, 0.1 * v)": "torch.nn.functional.leaky_relu(x, 0.1)",
        "tl.where((v > 0) & (v < 1), v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where((v > 1) | (v < -1), v * 2, v)": "torch.where(x.abs() > 1, x * 2, x)",
        "tl.where((v > 1) ^ (v > 0), v * 2, v)": "torch.where((x > 0) & (x <= 1), x * 2, x)",
        "tl.where(~(v > 0), v * 2, v)": "torch.where(x > 0, x, x * 2)",
        "tl.where(not (v > 0), v * 2, v)": "torch.where(x > 0, x, x * 2)",
        "tl.where(v > 0 and v < 1, v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "tl.where(v > 1 or v < -1, v * 2, v)": "torch.where(x.abs() > 1, x * 2, x)",
        "tl.where((v >= 0) == (v <= 1), v * 2, v)": "torch.where((x >= 0) == (x <= 1), x * 2, x)",
        "tl.where((v > 0).to(tl.int1).logical_and(v < 1), v * 2, v)": "torch.where((x > 0) & (x < 1), x * 2, x)",
        "v * (v > 0)": "x.relu()", "v + (v > 0).to(tl.float32)": "x + (x > 0)",
        # tl.math
        "tl.exp(v)": "x.exp()", "tl.exp2(v)": "x.exp2()", "tl.sin(v)": "x.sin()", "tl.cos(v)": "x.cos()",
        "tl.erf(v)": "x.erf()", "tl.floor(v * 4)": "(x * 4).floor()", "tl.ceil(v * 4)": "(x * 4).ceil()",
        "tl.sigmoid(v)": "x.sigmoid()", "tl.math.exp(v) + tl.math.abs(v)": "x.exp() + x.abs()",
        "v.exp() + v.sigmoid()": "x.exp() + x.sigmoid()", "v.abs() + v.cos().floor()": "x.abs() + x.cos().floor()",
        "tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [v], dtype=tl.float32, is_pure=True, pack=1)":
            "REFUSED inline assembly (tl.inline_asm_elementwise) is not supported here",
        "v ** 2": "REFUSED ** is not",
        # libdevice
        "libdevice.tan(v)": "x.tan()", "libdevice.atan(v)": "x.atan()", "libdevice.asinh(v)": "x.asinh()",
        "libdevice.sinh(v)": "x.sinh()", "libdevice.cosh(v)": "x.cosh()", "libdevice.tanh(v)": "x.tanh()",
        "libdevice.sin(v) + libdevice.cos(v)": "x.sin() + x.cos()", "libdevice.atan2(v, 2.0)": "torch.atan2(x, x * 0 + 2)",
        "libdevice.expm1(v)": "x.expm1()", "libdevice.exp10(v)": "10 ** x", "libdevice.exp(v)": "x.exp()",
        "libdevice.exp2(v)": "x.exp2()", "libdevice.pow(tl.abs(v), 2.5)": "x.abs() ** 2.5",
        "libdevice.cbrt(v)": "x.sign() * x.abs() ** (1 / 3)", "libdevice.erf(v)": "x.erf()",
        "libdevice.erfc(v)": "x.erfc()", "libdevice.erfinv(libdevice.tanh(v))": "x.tanh().erfinv()",
        "libdevice.erfcx(v)": "torch.special.erfcx(x)", "libdevice.normcdf(v)": "torch.special.ndtr(x)",
        "libdevice.normcdfinv(tl.sigmoid(v))": "torch.special.ndtri(x.sigmoid())",
        "libdevice.erfcinv(tl.sigmoid(v))": "(1 - x.sigmoid()).erfinv()",
        "libdevice.hypot(v, 2.0)": "torch.hypot(x, x * 0 + 2)", "libdevice.rhypot(v, 2.0)": "1 / (x * x + 4).sqrt()",
        "libdevice.norm3d(v, v, 2.0)": "(2 * x * x + 4).sqrt()", "libdevice.norm4d(v, v, v, 2.0)": "(3 * x * x + 4).sqrt()",
        "libdevice.rnorm3d(v, v, 2.0)": "1 / (2 * x * x + 4).sqrt()", "libdevice.fmod(v, 0.3)": "torch.fmod(x, 0.3)",
        "libdevice.fdim(v, 0.3)": "(x - 0.3).relu()", "libdevice.copysign(v, -v)": "-x",
        "libdevice.ldexp(v, 3)": "x * 8", "libdevice.scalbn(v, -2)": "x / 4", "libdevice.round(v * 4)":
            "(x * 4).sign() * ((x * 4).abs() + 0.5).floor()", "libdevice.rint(v * 4)": "(x * 4).round()",
        "libdevice.nearbyint(v * 4)": "(x * 4).round()", "libdevice.trunc(v * 4)": "(x * 4).trunc()",
        "libdevice.floor(v) + libdevice.ceil(v)": "x.floor() + x.ceil()", "libdevice.llrint(v * 4)": "(x * 4).round()",
        "libdevice.saturatef(v)": "x.clamp(0, 1)", "libdevice.sinpi(v)": "(x * torch.pi).sin()",
        "libdevice.cospi(v)": "(x * torch.pi).cos()", "libdevice.j0(v)": "torch.special.bessel_j0(x)",
        "libdevice.j1(v)": "torch.special.bessel_j1(x)", "libdevice.cyl_bessel_i0(v)": "torch.special.i0(x)",
        "libdevice.cyl_bessel_i1(v)": "torch.special.i1(x)", "libdevice.fma(v, v, 1.0)": "x * x + 1",
        "tl.where(libdevice.isnan(v) | libdevice.isinf(v), 0.0, v * 2)": "x * 2",
        "tl.where(libdevice.finitef(v), v * 2, 0.0)": "x * 2", "tl.where(libdevice.signbit(v) != 0, -v, v)": "x.abs()",
        "libdevice.fast_expf(v)": "x.exp()", "libdevice.fast_sinf(v) + libdevice.fast_cosf(v)": "x.sin() + x.cos()",
        "libdevice.fast_tanhf(v)": "x.tanh()", "libdevice.fast_dividef(v, 3.0)": "x / 3",
        "libdevice.add_rn(v, 1.0) * libdevice.mul_rn(v, 2.0)": "(x + 1) * x * 2", "libdevice.sub_rn(v, 1.0)": "x - 1",
        "libdevice.div_rn(v, 3.0)": "x / 3", "libdevice.float2int_rz(v * 8)": "(x * 8).trunc()",
        "libdevice.float2int_rn(v * 8)": "(x * 8).round()", "libdevice.float2int_rd(v * 8)": "(x * 8).floor()",
        "libdevice.int_as_float(libdevice.float_as_int(v)) * 2": "x * 2", "libdevice.abs(v)": "x.abs()",
        "libdevice.remainder(v, 0.75)": "x - 0.75 * (x / 0.75).round()", "libdevice.logb(v)": "x.abs().log2().floor()",
        "libdevice.y0(tl.abs(v) + 1)": "torch.special.bessel_y0(x.abs() + 1)",
        "libdevice.jn(2, v)": "REFUSED libdevice.jn is not supported here",
        # casts
        "v.to(tl.float16)": "x.half().float()", "v.to(tl.bfloat16)": "x.bfloat16().float()",
        "(v * 8).to(tl.int32)": "(x * 8).int().float()", "(v * 8).to(tl.int8).to(tl.float32)": "(x * 8).to(torch.int8).float()",
        "(v * 8).to(tl.int64) * 2": "(x * 8).long() * 2.0", "tl.cast(v, tl.float16).to(tl.float32)": "x.half().float()",
        "tl.abs(v * 8).to(tl.uint8)": "(x * 8).abs().to(torch.uint8).float()",
        "v.to(tl.float8e5).to(tl.float32)": "x.to(torch.float8_e5m2).float()",
        "v.to(tl.float8e4nv).to(tl.float32)": "x.to(torch.float8_e4m3fn).float()",
        "v.to(tl.bfloat16).to(tl.float16)": "x.bfloat16().half().float()",
        "v.to(tl.float8e5).to(tl.float16)": "x.to(torch.float8_e5m2).float()",
        "(v > 0).to(tl.int32)": "(x > 0).float()", "v.to(tl.int1)": "(x != 0).float()",
        "(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)": "x.abs()",
        "tl.cast(v.to(tl.uint32, bitcast=True) ^ 0x80000000, tl.float32, bitcast=True)": "-x",
        "(v.to(tl.float16).to(tl.int16, bitcast=True) & 0x7FFF).to(tl.float16, bitcast=True)": "x.half().abs().float()",
        "v.to(tl.float16, fp_downcast_rounding='rtz').to(tl.float32) * 0 + v": "x + 0",
        # shapes: the block is flat, and comes back as it was
        "tl.reshape(v, (16, 16)).reshape(BLOCK) * 2": "x * 2", "tl.view(v, (4, 64)).view(BLOCK) * 2": "x * 2",
        "tl.ravel(tl.reshape(v, (2, 8, 16))) * 2": "x * 2", "v.reshape(16, 16).T.T.reshape(256) * 2": "x * 2",
        "tl.trans(tl.trans(v.reshape(16, 16))).reshape(BLOCK) * 2": "x * 2",
        "tl.permute(tl.permute(v.reshape(2, 8, 16), (2, 0, 1)), (1, 2, 0)).reshape(BLOCK) * 2": "x * 2",
        "tl.interleave(*tl.split(v.reshape(BLOCK // 2, 2))) * 2": "x * 2",
        "tl.join(*tl.split(v.reshape(BLOCK // 2, 2))).reshape(BLOCK) * 2": "x * 2",
        "(v[:, None] + tl.zeros((1, 2), tl.float32)).sum(1)": "x * 2",
        "tl.sum(v[None, :].broadcast_to((4, BLOCK)), axis=0)": "x * 4",
        "tl.sum(tl.broadcast_to(tl.expand_dims(v, 1), (BLOCK, 2)), 1)": "x * 2",
        "tl.broadcast(v, tl.zeros((BLOCK,), tl.float32))[0] * 2 if False else v * 2": "x * 2",
        "tl.full((BLOCK,), 2, tl.float32) * v + tl.zeros_like(v)": "x * 2",
        "tl.expand_dims(v, (0, 2)).reshape(BLOCK) * 2": "x * 2",
        "tl.cat(v, v, can_reorder=True).reshape(2, BLOCK).sum(0)": "x * 2",
        "tl.flip(v.reshape(4, 64), 1).reshape(BLOCK) * 2": "x.flip(1) * 2",
        "tl.gather(v, BLOCK - 1 - tl.arange(0, BLOCK), 0) * 2": "x.view(16, 256).flip(1).view(64, 64) * 2",
        # random numbers
        "v + (tl.rand(7, o) >= 1.0)": "x + 0 * x", "v + 0 * tl.randn(7, o)": "x + 0", "v + 0 * tl.randint(7, o)": "x + 0",
        "v + 0 * (tl.rand4x(7, o)[0] + tl.randn4x(7, o)[3])": "x + 0",
        "tl.where(tl.randint4x(3, o)[1] == 7, v * 2, v)": "x + 0",
        # Python's own
        "v * (2 if BLOCK > 8 else 3)": "x * 2", "v * float(2)": "x * 2", "v * len((1, 2))": "x * 2",
        "v * min(BLOCK, 2) + max(BLOCK, 2)": "x * 2 + 256", "v * [2, 3][0] + (4, 5)[1]": "x * 2 + 5",
        "v * float('inf') * 0 if False else v * 2": "x * 2", "v * int(2.7)": "x * 2", "tl.max(v, 0) * 0 + v * 2": "x * 2",
        "v * triton.cdiv(BLOCK, 128)": "x * 2", "v * tl.cdiv(BLOCK, 100)": "x * 3", "v * triton.next_power_of_2(3)": "x * 4",
        "v * tl.constexpr(2)": "x * 2", "v * (2 if isinstance(BLOCK, tl.constexpr) else 2)": "x * 2",
        "v * sum([2 * i for i in range(2)])": "x * 2", "v * (1 + tl.static_range(3).end)": "REFUSED",
    },
    INTEGERS: {
        "v + 7 * v - 3": "x * 8 - 3", "v // 7": "torch.div(x, 7, rounding_mode='trunc')", "v % 7": "torch.fmod(x, 7)",
        "v & 12 | v ^ 5": "(x & 12) | (x ^ 5)", "(v << 3) + (v >> 2)": "(x << 3) + (x >> 2)", "~v": "~x",
        "tl.abs(v)": "x.abs()", "-v": "-x", "tl.maximum(v, -5)": "x.clamp(min=-5)", "tl.clamp(v.to(tl.float32), -5.0, 5.0)":
            "x.clamp(-5, 5)", "v * (v != 3)": "x * (x != 3)", "v.to(tl.int16) * 3": "x * 3",
        "(v.to(tl.float32) * 0.5).to(tl.int32)": "(x * 0.5).int()", "tl.umulhi(v.to(tl.uint32), 1 << 30).to(tl.int32)":
            "((x.long() & 0xFFFFFFFF) >> 2).int()", "(v.to(tl.uint32) >> 28).to(tl.int32)": "(x >> 28) & 15",
        "tl.cdiv(v, 7)": "torch.div(x + 6, 7, rounding_mode='trunc')", "libdevice.popc(v)":
            "sum([(x >> i) & 1 for i in range(32)])", "libdevice.clz(tl.abs(v) + 1)":
            "31 - (x.abs() + 1).float().log2().floor().int()", "libdevice.brev(libdevice.brev(v)) + 1": "x + 1",
        "libdevice.mulhi(v, 1 << 20)": "(x.long() * (1 << 20) >> 32).int()", "libdevice.ffs(v)":
            "sum([((x & ((1 << i) - 1)) == 0) & (x != 0) for i in range(32)]).int()",
        "libdevice.abs(v)": "x.abs()", "libdevice.int2float_rn(v).to(tl.int32) * 2": "x * 2", "tl.where(v % 2 == 0, v, -v)":
            "torch.where(x % 2 == 0, x, -x)", "(v.to(tl.int64) * v * v * v % 1000).to(tl.int32)": "torch.fmod(x.long() ** 4, 1000).int()",
        "libdevice.hadd(v, 7)": "(x + 7) >> 1", "libdevice.mul24(v, 3)": "x * 3", "libdevice.sad(v, 5, tl.zeros_like(v).to(tl.uint32)).to(tl.int32)":
            "(x - 5).abs()", "tl.xor_sum(v.reshape(BLOCK, 1), 1) * 2": "x * 2", "libdevice.byte_perm(v, v, 0x3210) + 1": "x + 1",
    },
    POSITIVE: {
        "tl.log(v)": "x.log()", "tl.log2(v)": "x.log2()", "tl.sqrt(v)": "x.sqrt()", "tl.rsqrt(v)": "x.rsqrt()",
        "tl.sqrt_rn(v)": "x.sqrt()", "libdevice.log(v)": "x.log()", "libdevice.log1p(v)": "x.log1p()",
        "libdevice.log10(v)": "x.log10()", "libdevice.log2(v)": "x.log2()", "libdevice.sqrt(v)": "x.sqrt()",
        "libdevice.rsqrt(v)": "x.rsqrt()", "libdevice.rcbrt(v)": "x ** (-1 / 3)", "libdevice.lgamma(v)": "x.lgamma()",
        "libdevice.tgamma(v)": "x.lgamma().exp()", "libdevice.acosh(v + 1)": "(x + 1).acosh()",
        "libdevice.asin(v * 0.8)": "(x * 0.8).asin()", "libdevice.acos(v * 0.8)": "(x * 0.8).acos()",
        "libdevice.atanh(v * 0.8)": "(x * 0.8).atanh()", "libdevice.fast_logf(v) + libdevice.fast_log2f(v)": "x.log() + x.log2()",
        "libdevice.fast_powf(v, 1.5)": "x ** 1.5", "libdevice.rcp_rn(v)": "1 / x", "libdevice.pow(v, 3)": "x ** 3",
        "libdevice.sqrt_rn(v)": "x.sqrt()", "libdevice.fast_log10f(v)": "x.log10()", "libdevice.fast_tanf(v)": "x.tan()",
        "libdevice.fast_exp10f(v)": "10 ** x", "libdevice.rsqrt_rn(v)": "x.rsqrt()", "libdevice.ilogb(v)": "x.log2().floor()",
    },
    HALF: {
        "v * 2 + 1": "x * 2 + 1", "tl.exp(v.to(tl.float32))": "x.float().exp().half()", "tl.maximum(v, 0.0)": "x.relu()",
        "libdevice.tanh(v.to(tl.float32)).to(tl.float16)": "x.tanh()", "tl.abs(v)": "x.abs()", "v / 3": "(x.float() / 3).half()",
    },
}


FLAT, ROWS = "x * 2", "torch.randn(64, 48)"
BLOCKS = {  # what is put in place of the store of a kernel over blocks: {subject: {name: (torch's, body)}}
    "memory": {
        "mask and other": ("x * 2", "w = tl.load(x + o, mask=o < n, other=0.0)\ntl.store(out + o, w * 2, mask=o < n)"),
        "other of the wrong type": ("x * 2", "w = tl.load(x + o, o < n, 0)\ntl.store(out + o, w * 2, o < n)"),
        "cache hints": ("x * 2", "w = tl.load(x + o, cache_modifier='.cg', eviction_policy='evict_first')\n"
                                 "tl.store(out + o, w * 2, cache_modifier='.cs', eviction_policy='evict_last')"),
        "volatile": ("x * 2", "tl.store(out + o, tl.load(x + o, volatile=True) * 2)"),
        "block pointers": ("x * 2", """
a = tl.make_block_ptr(x, (n,), (1,), (tl.program_id(0) * BLOCK,), (BLOCK,), (0,))
b = tl.make_block_ptr(base=out, shape=(n,), strides=(1,), offsets=(tl.program_id(0) * BLOCK,), block_shape=(BLOCK,), order=(0,))
tl.store(b, tl.load(a, boundary_check=(0,), padding_option="zero") * 2, boundary_check=(0,))"""),
        "advance": ("x * 2", """
a = tl.make_block_ptr(x, (n,), (1,), (tl.program_id(0) * BLOCK,), (BLOCK // 2,), (0,))
b = tl.make_block_ptr(out, (n,), (1,), (tl.program_id(0) * BLOCK,), (BLOCK // 2,), (0,))
for _ in range(2):
    tl.store(b, tl.load(a) * 2)
    a = tl.advance(a, (BLOCK // 2,))
    b = b.advance((BLOCK // 2,))"""),
        "pointers that move": ("x * 2", """
x += tl.program_id(0) * BLOCK
out += tl.program_id(0) * BLOCK
for i in range(0, BLOCK, 32):
    tl.store(out + tl.arange(0, 32), tl.load(x + tl.arange(0, 32)) * 2)
    x += 32
    out += 32"""),
        "hints on alignment": ("x * 2", "o = tl.max_contiguous(tl.multiple_of(o, BLOCK), BLOCK)\n"
                               "tl.store(out + o, tl.load(tl.multiple_of(x, 16) + o) * 2)"),
        "max_constancy and assume": ("x * 2", "tl.assume(n > 0)\nm = tl.max_constancy(o < n, 16)\ntl.store(out + o, v * 2, m)"),
        "a pointer cast": ("x * 2", "p = out.to(tl.pointer_type(tl.int32), bitcast=True)\n"
                           "tl.store(p + o, (v * 2).to(tl.int32, bitcast=True))"),
        "scalars": ("x * 2", "for i in range(BLOCK):\n    j = tl.program_id(0) * BLOCK + i\n"
                    "    tl.store(out + j, tl.load(x + j) * 2)"),
        "a debug barrier": ("x * 2", "tl.debug_barrier()\ntl.store(out + o, v * 2)"),
        "int64 offsets": ("x * 2", "o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\ntl.store(out + o, v * 2)"),
        "descriptors": ("x * 2", """
a = tl.make_tensor_descriptor(x, shape=[n // 64, 64], strides=[64, 1], block_shape=[4, 64])
b = tl.make_tensor_descriptor(out, [n // 64, 64], [64, 1], [4, 64])
b.store([tl.program_id(0) * 4, 0], a.load([tl.program_id(0) * 4, 0]) * 2)"""),
        "descriptors by function": ("x * 2", """
a = tl.make_tensor_descriptor(x, shape=[n // 64, 64], strides=[64, 1], block_shape=[4, 64])
b = tl.make_tensor_descriptor(out, [n // 64, 64], [64, 1], [4, 64])
tl.store_tensor_descriptor(b, [tl.program_id(0) * 4, 0], tl.load_tensor_descriptor(a, [tl.program_id(0) * 4, 0]) * 2)"""),
    },
    "reductions": {  # in place: every block of 256 becomes a result of the block
        **{f"tl.{name}": (f"x.view(16, 256).{theirs}.expand(16, 256).reshape(64, 64)", f"tl.store(out + o, {ours} + 0 * v)")
           for name, ours, theirs in (
               ("sum", "tl.sum(v, axis=0)", "sum(1, keepdim=True)"), ("max", "tl.max(v, 0)", "amax(1, keepdim=True)"),
               ("min", "tl.min(v, 0)", "amin(1, keepdim=True)"), ("argmax", "tl.argmax(v, 0)", "argmax(1, keepdim=True)"),
               ("argmin", "tl.argmin(v, 0)", "argmin(1, keepdim=True)"), ("v.sum", "v.sum()", "sum(1, keepdim=True)"),
               ("v.max", "v.max(0)", "amax(1, keepdim=True)"), ("keep_dims", "tl.sum(v, axis=0, keep_dims=True)", "sum(1, keepdim=True)"),
               ("axis -1", "tl.sum(v, axis=-1)", "sum(1, keepdim=True)"),
               ("sum in two dimensions", "tl.sum(tl.sum(v.reshape(16, 16), 1), 0)", "sum(1, keepdim=True)"),
               ("sum over all axes", "tl.sum(v.reshape(16, 16))", "sum(1, keepdim=True)"),
               ("sum with dtype", "tl.sum(v.to(tl.float16), 0, dtype=tl.float32)", "half().float().sum(1, keepdim=True)"),
               ("cumsum", "tl.cumsum(v, 0)", "cumsum(1)"), ("cumprod", "tl.cumprod(v * 0 + 0.99, 0)", "mul(0).add(0.99).cumprod(1)"),
               ("cumsum reversed", "tl.cumsum(v, 0, reverse=True)", "flip(1).cumsum(1).flip(1)"),
               ("sort", "tl.sort(v)", "sort(1).values"), ("sort descending", "tl.sort(v, descending=True)", "sort(1, descending=True).values"),
               ("softmax", "tl.softmax(v)", "softmax(1)"), ("topk", "tl.max(tl.topk(v, 4), 0)", "amax(1, keepdim=True)"))},
        "max with indices": ("x.view(16, 256).argmax(1, keepdim=True).expand(16, 256).reshape(64, 64).float()",
                             "m, i = tl.max(v, 0, return_indices=True)\ntl.store(out + o, i + 0 * v)"),
        "own combine": ("x.view(16, 256).abs().amax(1, keepdim=True).expand(16, 256).reshape(64, 64)",
                        "tl.store(out + o, tl.reduce(v, 0, larger) + 0 * v)"),
        "own combine of two": ("x.view(16, 256).var(1, correction=0, keepdim=True).expand(16, 256).reshape(64, 64)", """
m, s, c = tl.reduce((v, 0 * v, 0 * v + 1), 0, welford)
tl.store(out + o, s / c + 0 * v)"""),
        "own scan": ("x.view(16, 256).cummax(1).values.view(64, 64)", "tl.store(out + o, tl.associative_scan(v, 0, most))"),
        "own scan of two": ("x.view(16, 256).cumsum(1).view(64, 64)", """
a, b = tl.associative_scan((v * 0 + 1, v), 0, linear)
tl.store(out + o, b)"""),
        "histogram": ("torch.stack([torch.histc(r, 16, 0, 16) for r in (x.view(16, 256) * 4 + 8).floor().clamp(0, 15)]).view(16, 16, 1).expand(16, 16, 16).reshape(64, 64)", """
h = tl.histogram((tl.clamp(tl.floor(v * 4 + 8), 0.0, 15.0)).to(tl.int32), 16)
tl.store(out + o, tl.broadcast_to(h[:, None], (16, 16)).reshape(BLOCK).to(tl.float32))"""),
        "xor_sum": ("x.view(16, 256).int().sum(1, keepdim=True).expand(16, 256).reshape(64, 64).float()",
                    "i = v.to(tl.int32)\ntl.store(out + o, tl.xor_sum(i, 0) * 0.0 + tl.sum(i, 0) + 0 * v)"),
        "reduce_or": ("(x * 2)", "any = tl.reduce_or((v > 100).to(tl.int32), 0)\ntl.store(out + o, v * (2 + any))"),
    },
    "control flow": {
        "for": ("x * 8", "for i in range(3):\n    v += v\ntl.store(out + o, v)"),
        "for with a step": ("x * 8", "for i in range(0, 6, 2):\n    v += v\ntl.store(out + o, v)"),
        "tl.range": ("x * 8", "for i in tl.range(0, 3, num_stages=2):\n    v += v\ntl.store(out + o, v)"),
        "tl.range with options": ("x * 8", "for i in tl.range(3, loop_unroll_factor=3, disallow_acc_multi_buffer=True):\n    v += v\ntl.store(out + o, v)"),
        "static_range": ("x * 8", "for i in tl.static_range(3):\n    v = v * 2\ntl.store(out + o, v)"),
        "static_range by keyword": ("x * 8", "for i in tl.static_range(0, 6, step=2):\n    v = v * 2\ntl.store(out + o, v)"),
        "nested loops": ("x * 16", "for i in range(2):\n    for j in range(2):\n        v += v\ntl.store(out + o, v)"),
        "a loop over n": ("x * 64", "for i in range(0, n, BLOCK):\n    v += v * 0\ntl.store(out + o, v * 64)"),
        "while": ("x * 8", "i = 0\nwhile i < 3:\n    v += v\n    i += 1\ntl.store(out + o, v)"),
        "while with and": ("x * 8", "i = 0\nwhile i < 3 and i < n:\n    v += v\n    i += 1\ntl.store(out + o, v)"),
        "while that differs": ("torch.where(torch.arange(64)[:, None] < 32, x * 2, x * 4)",
                               "i = tl.program_id(0) // 8\nwhile i >= 0:\n    v += v\n    i -= 1\ntl.store(out + o, v)"),
        "if": ("torch.where(torch.arange(64)[:, None] < 32, x, x * 2)", "if tl.program_id(0) >= 8:\n    v = v * 2\ntl.store(out + o, v)"),
        "if and": ("torch.where(torch.arange(64)[:, None] < 32, x, x * 2)",
                   "p = tl.program_id(0)\nif p >= 8 and p < 100:\n    v = v * 2\ntl.store(out + o, v)"),
        "if not": ("torch.where(torch.arange(64)[:, None] < 32, x, x * 2)",
                   "if not tl.program_id(0) < 8:\n    v = v * 2\ntl.store(out + o, v)"),
        "elif": ("x * (torch.arange(64)[:, None] // 16).clamp(max=2)", """
p = tl.program_id(0)
if p < 4:
    v = v * 0
elif p < 8:
    v = v * 1
else:
    v = v * 2
tl.store(out + o, v)"""),
        "early return": ("torch.cat([x[:32] * 2, x[32:] * 3])", """
if tl.program_id(0) < 8:
    tl.store(out + o, v * 2)
    return
tl.store(out + o, v * 3)"""),
        "if of a constant": ("x * 2", "if BLOCK > 64:\n    v = v * 2\nelse:\n    v = tl.nonsense(v)\ntl.store(out + o, v)"),
        "conditional expression": ("torch.where(torch.arange(64)[:, None] < 32, x, x * 2)",
                                   "f = 1.0 if tl.program_id(0) < 8 else 2.0\ntl.store(out + o, v * f)"),
        "chained comparison": ("torch.where((torch.arange(64)[:, None] >= 16) & (torch.arange(64)[:, None] < 32), x * 2, x)",
                               "if 4 <= tl.program_id(0) < 8:\n    v = v * 2\ntl.store(out + o, v)"),
        "chained comparison of blocks": ("torch.where((x > 0) & (x < 1), x * 2, x)", "tl.store(out + o, tl.where(0 < v < 1, v * 2, v))"),
        "break": ("x * 8", "for i in range(10):\n    if i == 3:\n        break\n    v += v\ntl.store(out + o, v)"),
        "continue": ("x * 4", "for i in range(3):\n    if i == 1:\n        continue\n    v += v\ntl.store(out + o, v)"),
        "a tuple": ("x * 5", "a, b = v * 2, v * 3\na, b = b, a\ntl.store(out + o, a + b)"),
        "a list comprehension": ("x * 10", "a = [v * i for i in (1, 2, 3, 4)]\ntl.store(out + o, a[0] + a[1] + a[2] + a[3])"),
        "a comprehension with a condition": ("x * 6", "a = [v * i for i in (1, 2, 3, 4) if i % 2 == 0]\ntl.store(out + o, a[0] + a[1])"),
        "annotated assignment": ("x * 2", "two: tl.constexpr = 2\ntl.store(out + o, v * two)"),
        "device_assert": ("x * 2", "tl.device_assert(n > 0, 'n')\ntl.store(out + o, v * 2)"),
        "static_assert": ("x * 2", "tl.static_assert(BLOCK == 256, 'block')\ntl.store(out + o, v * 2)"),
        "a static_assert that fails": ("x * 2", "tl.static_assert(BLOCK == 1, 'my block')\ntl.store(out + o, v * 2)", "my block"),
        "assert": ("x * 2", "assert n > 0, 'n'\ntl.store(out + o, v * 2)"),
        "device_print": ("x * 2", "if n == 0:\n    tl.device_print('x', v)\ntl.store(out + o, v * 2)"),
        "device_print that prints": ("x * 2", "tl.device_print('x', v)\ntl.store(out + o, v * 2)"),
        "print": ("x * 2", "print('x', n)\ntl.store(out + o, v * 2)"),
        "static_print": ("x * 2", "tl.static_print('block', BLOCK)\ntl.store(out + o, v * 2)"),
        "an f-string": ("x * 2", "tl.static_assert(BLOCK > 0, f'block {BLOCK}')\ntl.store(out + o, v * 2)"),
        "try": ("x * 2", "try:\n    v = v * 2\nfinally:\n    tl.store(out + o, v)", "try"),
        "lambda": ("x * 2", "f = lambda a: a * 2\ntl.store(out + o, f(v))", "lambda"),
        "walrus": ("x * 2", "tl.store(out + o, (w := v * 2))", ""),
        "global": ("x * 2", "global y\ntl.store(out + o, v * 2)", "global"),
        "import": ("x * 2", "import math\ntl.store(out + o, v * 2)", "import"),
        "torch in a kernel": ("x * 2", "tl.store(out + o, torch.relu(v))", "torch"),
    },
    "atomics": {
        "add": ("x.view(16, 256).sum(0).repeat(16).view(64, 64) * 0 + x * 2", "tl.atomic_add(out + o, v * 0)\ntl.store(out + o, v * 2)"),
    },
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
    d = m2 - m1
    c = c1 + c2
    return m1 + d * c2 / c, s1 + s2 + d * d * c1 * c2 / c, c

@triton.jit
def linear(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2
"""


PRODUCT = """
@triton.jit
def product(a, b, out, M, N, K, ACC: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    m, n, k = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, B)
    total = tl.zeros((B, B), dtype=ACC)
    for i in range(0, tl.cdiv(K, B)):
        left = tl.load(a + m[:, None] * K + (k + i * B)[None, :])
        right = tl.load(b + (k + i * B)[:, None] * N + n[None, :])
        DOT
    tl.store(out + m[:, None] * N + n[None, :], total.to(KIND))
"""
PRODUCTS = {  # {name: (inputs, torch's, the line with tl.dot, type of the sum, type of the result)}
    "ieee": ("", "x @ y", "total += tl.dot(left, right, input_precision='ieee')"),
    "tf32": ("", "((x @ y).half() * 0).float() + x @ y", "total += tl.dot(left, right, input_precision='tf32')", "wrong values"),
    "tf32x3": ("", "x @ y", "total += tl.dot(left, right, input_precision='tf32x3')"),
    "allow_tf32=False": ("", "x @ y", "total += tl.dot(left, right, allow_tf32=False)"),
    "the accumulator as an argument": ("", "x @ y", "total = tl.dot(left, right, total, input_precision='ieee')"),
    "fp16": (".half()", "x @ y", "total += tl.dot(left, right)"),
    "bf16": (".bfloat16()", "x @ y", "total += tl.dot(left, right)"),
    "fp16 into fp16": (".half()", "x @ y", "total += tl.dot(left, right, out_dtype=tl.float16)"),
    "int8": ("i8", "(x.int() @ y.int())", "total += tl.dot(left, right, out_dtype=tl.int32)"),
    "fp64": (".double()", "x @ y", "total += tl.dot(left, right, out_dtype=tl.float64)"),
    "fp8": ("fp8", "(x.to(torch.float8_e5m2).float() @ y.to(torch.float8_e5m2).float())",
            "total += tl.dot(left.to(tl.float8e5), right.to(tl.float8e5))"),
    "a transposed operand": ("", "x @ y.t()", "total += tl.dot(left, tl.trans(right), input_precision='ieee')"),
    "by hand": ("", "x @ y", "total += tl.sum(left[:, :, None] * right[None, :, :], axis=1)"),
    "dot_scaled": ("", "x @ y", "total = tl.dot_scaled(left.to(tl.bfloat16), None, 'bf16', right.to(tl.bfloat16), None, 'bf16', total)", "tl.dot_scaled is not supported here"),
}


def product(name):
    kind, theirs, line, *words = PRODUCTS[name]
    inputs = {"i8": ", ".join(["torch.randint(-9, 9, (32, 32), dtype=torch.int8)"] * 2)}.get(
        kind, ", ".join([f"torch.randn(32, 32){'' if kind == 'fp8' else kind}"] * 2))
    acc, out = {"i8": ("tl.int32", "torch.int32"), ".double()": ("tl.float64", "torch.float64"),
                ".half()": ("tl.float16" if "fp16 into" in name else "tl.float32", "torch.float16"), ".bfloat16()": ("tl.float32", "torch.bfloat16")}.get(
        kind, ("tl.float32", "torch.float32"))
    code = solution(PRODUCT.replace("DOT", line).replace("KIND: tl.constexpr", "KIND: tl.constexpr"),
                    f"out = torch.empty(32, 32, dtype={out})\n"
                    f"product[(2, 2)](x, y, out, 32, 32, 32, {acc}, B=16, KIND={out.replace('torch', 'tl')})\nreturn out", "x, y")
    return problem(theirs, inputs), code, "".join(words)


DOUBLE = """
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
"""
CALL = "out = torch.empty_like(x)\ndouble[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out"
HOST = {  # bodies of a forward that doubles x with DOUBLE
    "grid of a number": "out = torch.empty_like(x)\ndouble[16,](x, out, x.numel(), 256)\nreturn out",
    "grid of a list": "out = torch.empty_like(x)\ndouble[[16]](x, out, x.numel(), 256)\nreturn out",
    "grid of a lambda": "out = torch.empty_like(x)\ngrid = lambda META: (triton.cdiv(x.numel(), META['BLOCK']),)\n"
                        "double[grid](x, out, x.numel(), BLOCK=256)\nreturn out",
    "grid of a function": "out = torch.empty_like(x)\ndef grid(meta):\n    return (triton.cdiv(x.numel(), meta['BLOCK']), 1, 1)\n"
                          "double[grid](x, out, x.numel(), BLOCK=256)\nreturn out",
    "keywords": "out = torch.empty_like(x)\ndouble[(16, 1, 1)](x=x, out=out, n=x.numel(), BLOCK=256, num_warps=8, num_stages=3)\nreturn out",
    "run": "out = torch.empty_like(x)\ndouble.run(x, out, x.numel(), 256, grid=(16,), warmup=False)\nreturn out",
    "next_power_of_2": "out = torch.empty_like(x)\nb = triton.next_power_of_2(x.shape[1])\n"
                       "double[(triton.cdiv(x.numel(), b),)](x, out, x.numel(), b)\nreturn out",
    "new_empty": "out = x.new_empty(x.shape)\ndouble[(16,)](x, out, x.numel(), 256)\nreturn out",
    "zeros on the device": "out = torch.zeros(x.shape, device=x.device, dtype=x.dtype)\ndouble[(16,)](x, out, x.numel(), 256)\nreturn out",
    "empty on cuda": "out = torch.empty(x.shape, device='cuda')\ndouble[(16,)](x.cuda(), out, x.numel(), 256)\nreturn out",
    "empty_strided": "out = torch.empty_strided(x.shape, x.stride(), device=x.device)\ndouble[(16,)](x, out, x.numel(), 256)\nreturn out",
    "contiguous and view": "y = x.contiguous().view(-1)\nout = torch.empty_like(y)\ndouble[(16,)](y, out, y.numel(), 256)\nreturn out.view(64, 64)",
    "in place on a copy": "out = x.clone()\ndouble[(16,)](out, out, x.numel(), 256)\nreturn out",
    "device.type": "assert x.device.type == 'cuda' and x.is_cuda\n" + CALL,
    "a fallback without a GPU": "if not torch.cuda.is_available() or not x.is_cuda:\n    return x * 2\n" + CALL,
    "device properties": "sms = torch.cuda.get_device_properties(x.device).multi_processor_count\nassert sms == 132\n" + CALL,
    "device properties of an index": "assert torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory > 0\n" + CALL,
    "capability": "assert torch.cuda.get_device_capability() >= (8, 0) and 'H200' in torch.cuda.get_device_name(0)\n" + CALL,
    "capability of a device": "major, minor = torch.cuda.get_device_capability(x.device)\nassert major == 9\n" + CALL,
    "cuda.device": "with torch.cuda.device(x.device):\n    out = torch.empty_like(x)\n    double[(16,)](x, out, x.numel(), 256)\nreturn out",
    "cuda.device of an index": "with torch.cuda.device(x.device.index):\n    out = torch.empty_like(x)\n    double[(16,)](x, out, x.numel(), 256)\nreturn out",
    "cuda.device_of": "with torch.cuda.device_of(x):\n    out = torch.empty_like(x)\n    double[(16,)](x, out, x.numel(), 256)\nreturn out",
    "streams": "s = torch.cuda.current_stream()\nwith torch.cuda.stream(s):\n    out = torch.empty_like(x)\n"
               "    double[(16,)](x, out, x.numel(), 256)\ns.synchronize()\ntorch.cuda.synchronize()\nreturn out",
    "a stream of one's own": "s = torch.cuda.Stream()\ns.wait_stream(torch.cuda.current_stream())\n" + CALL,
    "bf16 supported": "assert torch.cuda.is_bf16_supported()\n" + CALL,
    "events": "e = torch.cuda.Event(enable_timing=True)\ne.record()\n" + CALL,
    "memory": "free, total = torch.cuda.mem_get_info()\nassert total > 1 << 36\n" + CALL,
    "backend flags": "torch.backends.cuda.matmul.allow_tf32 = True\n" + CALL,
    "driver": "p = triton.runtime.driver.active.utils.get_device_properties(triton.runtime.driver.active.get_current_device())\n"
              "assert p['multiprocessor_count'] == 132 and p['max_shared_mem'] > 0 and p['warpSize'] == 32 and p['max_num_regs']\n" + CALL,
    "target": "t = triton.runtime.driver.active.get_current_target()\nassert t.backend == 'cuda' and t.arch == 90\n" + CALL,
    "active device": "out = torch.empty(x.shape, device=triton.runtime.driver.active.get_active_torch_device())\ndouble[(16,)](x, out, x.numel(), 256)\nreturn out",
    "version": "assert torch.version.cuda is not None and torch.version.hip is None\n" + CALL,
    "no_grad": "with torch.no_grad():\n    out = torch.empty_like(x)\n    double[(16,)](x, out, x.numel(), 256)\nreturn out",
    "asserts": "assert x.is_contiguous() and x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1\n" + CALL,
    "get_device": "assert x.get_device() == 0 and x.device.index == 0 and x.device == torch.device('cuda', 0)\n" + CALL,
    "to the device": "scale = torch.tensor(2.0, device=x.device)\ny = x.to('cuda', non_blocking=True)\n" + CALL,
    "allocator": "triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device='cuda'))\n" + CALL,
    "autocast": "with torch.autocast('cuda', enabled=False):\n    out = torch.empty_like(x)\n    double[(16,)](x, out, x.numel(), 256)\nreturn out",
    "warmup": "double.warmup(x, x, x.numel(), BLOCK=256, grid=(1,))\n" + CALL,
    "device guard of torch": "with torch.device('cuda'):\n    out = torch.empty(x.shape)\ndouble[(16,)](x, out, x.numel(), 256)\nreturn out",
    "element_size": "assert x.element_size() == 4 and x.nbytes == 4 * x.numel() and x.data_ptr() % 16 == 0\n" + CALL,
}
HEAD = "import torch\nimport torch.nn as nn\nimport triton\nimport triton.language as tl\n"
FORWARD = "\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        out = torch.empty_like(x)\n        LAUNCH(x, out, x.numel(), BLOCK=256)\n        return out\n"


def launching(source, launch="double[(16,)]", head=HEAD):
    return head + source + FORWARD.replace("LAUNCH", launch)


def indent(text):
    return "".join("    " + line for line in text.strip("\n").splitlines(True)) + "\n"


def with_body(expression, head=HEAD, before="", decorators="@triton.jit"):
    return launching(DOUBLE.replace("tl.load(x + o, mask=o < n) * 2", expression).replace("@triton.jit", before + decorators), head=head)


SOURCES = {  # whole files that double x
    "from triton import jit": with_body("tl.load(x + o, mask=o < n) * 2", HEAD + "from triton import jit\n", decorators="@jit"),
    "imports of the language by name": with_body("load(x + o, mask=o < n) * 2", HEAD + "from triton.language import load\n"),
    "libdevice by name": with_body("fma(tl.load(x + o, mask=o < n), 2.0, 0.0)", HEAD + "from triton.language.extra.libdevice import fma\n"),
    "cuda libdevice by name": with_body("tl.load(x + o, mask=o < n) * exp2(1.0)", HEAD + "from triton.language.extra.cuda.libdevice import exp2\n"),
    "math by name": with_body("tl.load(x + o, mask=o < n) * exp2(tl.full((BLOCK,), 1.0, tl.float32))", HEAD + "from triton.language.math import exp2\n"),
    "libdevice in a try": with_body("libdevice.fma(tl.load(x + o, mask=o < n), 2.0, 0.0)", HEAD + "try:\n    from triton.language.extra import libdevice\nexcept ImportError:\n    from triton.language.extra.cuda import libdevice\n"),
    "an alias": with_body("two(tl.load(x + o, mask=o < n), 1.0)", HEAD + "two = tl.math.fma\n").replace("two(tl.load(x + o, mask=o < n), 1.0)", "two(tl.load(x + o, mask=o < n), 2.0, 0.0)"),
    "an alias of a module": with_body("m.fma(tl.load(x + o, mask=o < n), 2.0, 0.0)", HEAD + "m = tl.extra.cuda.libdevice\n"),
    "language under its own name": launching(DOUBLE.replace("tl.", "language."), head="import torch\nimport torch.nn as nn\nimport triton\nfrom triton import language\n"),
    "triton.language in full": launching(DOUBLE.replace("tl.", "triton.language."), head="import torch\nimport torch.nn as nn\nimport triton\nimport triton.language\n"),
    "a constant": with_body("tl.load(x + o, mask=o < n) * TWO", HEAD + "TWO = tl.constexpr(2)\n"),
    "an annotated constant": with_body("tl.load(x + o, mask=o < n) * TWO", HEAD + "TWO: tl.constexpr = 2\n"),
    "a global that is no constexpr": launching(DOUBLE.replace("* 2", "* TWO"), head=HEAD + "TWO = 2\n"),
    "a helper": with_body("twice(tl.load(x + o, mask=o < n))", before="@triton.jit\ndef twice(a):\n    return a + a\n\n"),
    "a helper of helpers": with_body("twice(tl.load(x + o, mask=o < n))", before="@triton.jit\ndef add(a, b):\n    return a + b\n\n@triton.jit\ndef twice(a):\n    return add(a, a)\n\n"),
    "a helper that returns two": with_body("parts(tl.load(x + o, mask=o < n))[1]", before="@triton.jit\ndef parts(a):\n    return a, a + a\n\n"),
    "a helper that stores": launching("""
@triton.jit
def put(p, o, value, mask, FACTOR: tl.constexpr = 2):
    tl.store(p + o, value * FACTOR, mask=mask)

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    put(out, o, tl.load(x + o, mask=o < n), o < n)
"""),
    "a helper with a branch": with_body("twice(tl.load(x + o, mask=o < n), True)", before="@triton.jit\ndef twice(a, yes: tl.constexpr):\n    if yes:\n        return a + a\n    else:\n        return a\n\n"),
    "noinline": with_body("twice(tl.load(x + o, mask=o < n), 1.0)", before="@triton.jit(noinline=True)\ndef twice(a, b):\n    return a + a\n\n"),
    "constexpr_function": with_body("tl.load(x + o, mask=o < n) * half(BLOCK // 64)", before="@triton.constexpr_function\ndef half(n):\n    return n // 2\n\n"),
    "under if True": launching("if True:\n" + indent(DOUBLE)),
    "in a try": launching("try:\n    import cupy\nexcept ImportError:\n    cupy = None\n" + DOUBLE),
    "a static method": launching("class Kernels:\n" + indent(DOUBLE.replace("@triton.jit", "@staticmethod\n@triton.jit")), "Kernels.double[(16,)]"),
    "a method of the model": HEAD + FORWARD.replace("    def forward", indent(DOUBLE.replace("@triton.jit", "@staticmethod\n@triton.jit")) + "\n    def forward").replace("LAUNCH", "self.double[(16,)]"),
    "jit with options": with_body("tl.load(x + o, mask=o < n) * 2", decorators="@triton.jit(do_not_specialize=['n'])"),
    "debug": with_body("tl.load(x + o, mask=o < n) * 2", decorators="@triton.jit(debug=True)"),
    "heuristics": launching(DOUBLE.replace("@triton.jit", "@triton.heuristics({'BLOCK': lambda args: triton.next_power_of_2(args['n'] // 16)})\n@triton.jit")).replace(", BLOCK=256", ""),
    "heuristics of an argument": launching(DOUBLE.replace("@triton.jit", "@triton.heuristics(values={'EVEN': lambda args: args['n'] % args['BLOCK'] == 0})\n@triton.jit").replace("BLOCK: tl", "BLOCK: tl.constexpr, EVEN: tl")),
    "autotune": launching(DOUBLE.replace("@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 128}), triton.Config({'BLOCK': 256}, num_warps=8)], key=['n'])\n@triton.jit"), "double[lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)]").replace(", BLOCK=256", ""),
    "autotune and heuristics": launching(DOUBLE.replace("@triton.jit", "@triton.autotune(configs=[triton.Config({'BLOCK': b}, num_warps=w, num_stages=2) for b in (128, 256) for w in (2, 4)], key=['n'], reset_to_zero=['out'])\n@triton.heuristics({'EVEN': lambda args: args['n'] % args['BLOCK'] == 0})\n@triton.jit").replace("BLOCK: tl", "BLOCK: tl.constexpr, EVEN: tl"), "double[lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)]").replace(", BLOCK=256", ""),
    "autograd.Function": HEAD + DOUBLE + """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        double[(16,)](x, out, x.numel(), BLOCK=256)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class ModelNew(nn.Module):
    def forward(self, x):
        return Double.apply(x)
""",
    "a class of its own": HEAD + DOUBLE + """
class Doubler:
    def __init__(self, block):
        self.block = block

    def __call__(self, x):
        out = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), self.block),)](x, out, x.numel(), BLOCK=self.block)
        return out

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.doubler = Doubler(256)

    def forward(self, x):
        return self.doubler(x)
""",
    "a typed function and a dataclass": HEAD + "from dataclasses import dataclass\nfrom typing import Optional, Tuple\nimport math, functools, os\n" + DOUBLE + """
@dataclass(frozen=True)
class Options:
    block: int = 256
    warps: Optional[int] = 4

@functools.lru_cache
def blocks(n: int, block: int) -> Tuple[int]:
    return (math.ceil(n / block),)

def run(x: torch.Tensor, options: Options = Options()) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    double[blocks(x.numel(), options.block)](x, out, x.numel(), BLOCK=options.block, num_warps=options.warps)
    return out

class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(x)
""",
    "wrap_triton": launching(DOUBLE, "torch.library.wrap_triton(double)[(16,)]"),
    "custom_op": HEAD + DOUBLE + """
@torch.library.custom_op("mine::double", mutates_args=())
def run(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double[(16,)](x, out, x.numel(), BLOCK=256)
    return out

class ModelNew(nn.Module):
    def forward(self, x):
        return run(x)
""",
    "device at import": launching("DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nSMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE.type == 'cuda' else 1\nassert SMS == 132\n" + DOUBLE),
    "driver at import": launching("DEVICE = triton.runtime.driver.active.get_active_torch_device()\nassert DEVICE.type == 'cuda'\n" + DOUBLE),
    "backend at import": launching("def is_cuda():\n    return triton.runtime.driver.active.get_current_target().backend == 'cuda'\nassert is_cuda() and torch.cuda.device_count() == 1\n" + DOUBLE),
    "capability in the constructor": HEAD + DOUBLE + """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = 256 if torch.cuda.get_device_capability()[0] >= 8 else 64
        self.sms = torch.cuda.get_device_properties('cuda').multi_processor_count
        self.register_buffer('two', torch.tensor(2.0, device='cuda'))

    def forward(self, x):
        out = torch.empty_like(x, device=self.two.device)
        double[(x.numel() // self.block,)](x, out, x.numel(), BLOCK=self.block)
        return out
""",
    "TensorDescriptor": HEAD + "from triton.tools.tensor_descriptor import TensorDescriptor\n" + """
@triton.jit
def double(x, out, R: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0) * R
    out.store([row, 0], x.load([row, 0]) * 2)

class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        a = TensorDescriptor(x, x.shape, x.stride(), [16, 64])
        double[(4,)](a, TensorDescriptor.from_tensor(out, [16, 64]), R=16, C=64)
        return out
""",
    "CUDA C++": HEAD + "from torch.utils.cpp_extension import load_inline\nmodule = load_inline('m', cpp_sources='torch::Tensor f(torch::Tensor x);', cuda_sources='torch::Tensor f(torch::Tensor x) { return x; }', functions=['f'])\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        return module.f(x)\n",
    "kernel in a function": HEAD + "def make():\n" + indent(DOUBLE) + "    return double\nmade = make()\n" + FORWARD.replace("LAUNCH", "made[(16,)]"),
}
OTHERS = {  # (task, code)
    "several kernels and outputs": (problem("(x * 2, x.exp(), x.sum(1))", SMALL), solution(DOUBLE + """
@triton.jit
def exponential(x, out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.exp(tl.load(x + o)))

@triton.jit
def sums(x, out, C: tl.constexpr):
    r = tl.program_id(0)
    tl.store(out + r, tl.sum(tl.load(x + r * C + tl.arange(0, C)), axis=0))
""", "a, b, c = torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[0])\ndouble[(16,)](x, a, x.numel(), 256)\n"
     "exponential[(16,)](x, b, BLOCK=256)\nsums[(64,)](x, c, C=64)\nreturn a, b, c")),
    "strides of a view": (problem("x.t() * 2", SMALL), solution("""
@triton.jit
def double(x, out, R, C, xr, xc, outr, outc, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (r < R) & (c < C)
    v = tl.load(x + r * xr + c * xc, mask=inside)
    tl.store(out + r * outr + c * outc, v * 2, mask=inside)
""", "y = x.t()\nout = torch.empty(y.shape, device=y.device)\n"
     "double[(4, 4)](y, out, *y.shape, *y.stride(), *out.stride(), B=16)\nreturn out")),
    "slices": (problem("x[::2, 8:] * 2", SMALL), solution("""
@triton.jit
def double(x, out, stride, C, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * stride + c, mask=c < C)
    tl.store(out + tl.program_id(0) * C + c, v * 2, mask=c < C)
""", "y = x[::2, 8:]\nout = torch.empty(y.shape, device=x.device)\ndouble[(y.shape[0],)](y, out, y.stride(0), y.shape[1], BLOCK=64)\nreturn out")),
    "scalars of all kinds": (problem("x * 2 + 1.5", SMALL), solution("""
@triton.jit
def double(x, out, factor, offset, yes, none, kind: tl.constexpr, name: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o).to(kind) * factor
    if none is not None:
        v = v + tl.load(none + o)
    if name == "plus" and yes:
        v += offset
    tl.store(out + o, v)
""", "out = torch.empty_like(x)\ndouble[(16,)](x, out, 2, 1.5, True, None, tl.float32, 'plus', BLOCK=256)\nreturn out")),
    "a dtype from a dictionary": (problem("(x * 2).half()", SMALL), solution("""
@triton.jit
def double(x, out, KIND: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, (tl.load(x + o) * 2).to(KIND))
""", "out = torch.empty_like(x, dtype=torch.float16)\ndouble[(16,)](x, out, {torch.float16: tl.float16}[out.dtype], BLOCK=256)\nreturn out")),
    "the element type of a pointer": (problem("(x * 2).half()", SMALL), kernel("tl.store(out + o, (v * 2).to(out.dtype.element_ty), mask=o < n)",
        "out = torch.empty_like(x, dtype=torch.float16)\nkernel[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out")),
    "a tuple of tensors": (problem("x * 2 + x", SMALL), solution("""
@triton.jit
def add(tensors, out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(tensors[0] + o) * 2 + tl.load(tensors[1] + o))
""", "out = torch.empty_like(x)\nadd[(16,)]((x, x), out, BLOCK=256)\nreturn out")),
    "function as an argument": (problem("x.abs()", SMALL), solution("""
@triton.jit
def absolute(a):
    return tl.abs(a)

@triton.jit
def apply(x, out, F: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, F(tl.load(x + o)))
""", "out = torch.empty_like(x)\napply[(16,)](x, out, absolute, BLOCK=256)\nreturn out")),
    "three dimensions of the grid": (problem("x * 2", "torch.randn(4, 8, 64)"), solution("""
@triton.jit
def double(x, out, C: tl.constexpr):
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(axis=1)) * tl.num_programs(0) + tl.program_id(0)
    o = row * C + tl.arange(0, C)
    tl.store(out + o, tl.load(x + o) * 2)
""", "out = torch.empty_like(x)\ndouble[(2, 4, 4)](x, out, C=64)\nreturn out")),
    "swizzle2d": (problem("x * 2", SMALL), solution("""
@triton.jit
def double(x, out, C, B: tl.constexpr):
    i, j = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), 2)
    o = (i * B + tl.arange(0, B))[:, None] * C + (j * B + tl.arange(0, B))[None, :]
    tl.store(out + o, tl.load(x + o) * 2)
""", "out = torch.empty_like(x)\ndouble[(4, 4)](x, out, 64, B=16)\nreturn out")),
    "softmax of rows": (problem("x.softmax(1)", ROWS), solution("""
@triton.jit
def softmax(x, out, stride, C, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * stride + c, mask=c < C, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + tl.program_id(0) * stride + c, e / tl.sum(e, axis=0), mask=c < C)
""", "out = torch.empty_like(x)\nsoftmax[(64,)](x, out, x.stride(0), x.shape[1], BLOCK=64)\nreturn out")),
    "online softmax": (problem("x.softmax(1)", ROWS), solution("""
@triton.jit
def softmax(x, out, C, BLOCK: tl.constexpr):
    row = tl.program_id(0) * C
    m, s = -float("inf"), 0.0
    for start in range(0, C, BLOCK):
        v = tl.load(x + row + start + tl.arange(0, BLOCK))
        new = tl.maximum(m, tl.max(v, axis=0))
        s = s * tl.exp(m - new) + tl.sum(tl.exp(v - new), axis=0)
        m = new
    for start in range(0, C, BLOCK):
        o = row + start + tl.arange(0, BLOCK)
        tl.store(out + o, tl.exp(tl.load(x + o) - m) / s)
""", "out = torch.empty_like(x)\nsoftmax[(64,)](x, out, x.shape[1], BLOCK=16)\nreturn out")),
    "attention": (problem("torch.nn.functional.scaled_dot_product_attention(x, y, z)", ", ".join(["torch.randn(2, 64, 32)"] * 3)), solution("""
@triton.jit
def attention(q, k, v, out, scale, N, D: tl.constexpr, B: tl.constexpr):
    head, d = tl.program_id(1) * N * D, tl.arange(0, D)
    rows = tl.program_id(0) * B + tl.arange(0, B)
    queries = tl.load(q + head + rows[:, None] * D + d[None, :]) * scale
    m = tl.full((B,), -float("inf"), tl.float32)
    s = tl.zeros((B,), tl.float32)
    total = tl.zeros((B, D), tl.float32)
    for start in tl.range(0, N, B):
        c = start + tl.arange(0, B)
        keys = tl.load(k + head + c[None, :] * D + d[:, None])
        scores = tl.dot(queries, keys, input_precision="ieee")
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new[:, None])
        factor = tl.exp(m - new)
        s = s * factor + tl.sum(p, 1)
        total = tl.dot(p, tl.load(v + head + c[:, None] * D + d[None, :]), total * factor[:, None], input_precision="ieee")
        m = new
    tl.store(out + head + rows[:, None] * D + d[None, :], total / s[:, None])
""", "out = torch.empty_like(x)\nattention[(4, 2)](x, y, z, out, 32 ** -0.5, 64, D=32, B=16)\nreturn out", "x, y, z")),
    "atomic add of blocks": (problem("x.sum(0)", SMALL), solution("""
@triton.jit
def sums(x, out, C: tl.constexpr):
    c = tl.arange(0, C)
    tl.atomic_add(out + c, tl.load(x + tl.program_id(0) * C + c))
""", "out = torch.zeros(64, device=x.device)\nsums[(64,)](x, out, C=64)\nreturn out")),
    **{f"atomic {name}": (problem(theirs, "torch.randint(0, 1000, (64, 64), dtype=torch.int32)"), solution(f"""
@triton.jit
def kernel(x, out, C: tl.constexpr):
    c = tl.arange(0, C)
    tl.atomic_{name}(out + c, tl.load(x + tl.program_id(0) * C + c){extra})
""", f"out = torch.full((64,), {first}, dtype=torch.int32, device=x.device)\nkernel[(64,)](x, out, C=64)\nreturn out"))
       for name, theirs, first, extra in (
           ("max", "x.amax(0) + 0", 0, ""), ("min", "x.amin(0) + 0", 1 << 20, ""), ("add", "x.sum(0).int()", 0, ", sem='relaxed', scope='gpu'"),
           ("or", "(torch.stack([((x >> i) & 1).amax(0) << i for i in range(10)]).sum(0)).int()", 0, ""),
           ("and", "(torch.stack([((x >> i) & 1).amin(0) << i for i in range(10)]).sum(0)).int()", 1023, ""),
           ("xor", "(torch.stack([((x >> i) & 1).sum(0) % 2 << i for i in range(10)]).sum(0)).int()", 0, ""))},
    **{f"atomic {name} of floats": (problem(theirs, SMALL), solution(f"""
@triton.jit
def kernel(x, out, C: tl.constexpr):
    c = tl.arange(0, C)
    tl.atomic_{name}(out + c, tl.load(x + tl.program_id(0) * C + c) * 2)
""", f"out = torch.full((64,), {first}, device=x.device)\nkernel[(64,)](x, out, C=64)\nreturn out"))
       for name, theirs, first in (("max", "(2 * x).amax(0)", "-1e9"), ("min", "(2 * x).amin(0)", "1e9"))},
    **{f"atomic add in {kind}": (problem("x.sum(0)", f"(torch.randint(-4, 4, (64, 64)).{kind}())"), solution("""
@triton.jit
def sums(x, out, C: tl.constexpr):
    c = tl.arange(0, C)
    tl.atomic_add(out + c, tl.load(x + tl.program_id(0) * C + c))
""", f"out = torch.zeros(64, dtype=x.dtype, device=x.device)\nsums[(64,)](x, out, C=64)\nreturn out"))
       for kind in ("half", "bfloat16", "double", "long")},
    "atomic_cas as a lock": (problem("x.sum(0)", SMALL), solution("""
@triton.jit
def sums(x, out, lock, C: tl.constexpr):
    c = tl.arange(0, C)
    v = tl.load(x + tl.program_id(0) * C + c)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(out + c, tl.load(out + c) + v)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
""", "out = torch.zeros(64, device=x.device)\nlock = torch.zeros(1, dtype=torch.int32, device=x.device)\nsums[(64,)](x, out, lock, C=64)\nreturn out")),
    "an embedding": (problem("x[y]", "torch.randn(64, 64), torch.randint(0, 64, (100,))"), solution("""
@triton.jit
def gather(x, index, out, C: tl.constexpr):
    row = tl.load(index + tl.program_id(0))
    column = tl.arange(0, C)
    tl.store(out + tl.program_id(0) * C + column, tl.load(x + row * C + column))
""", "out = torch.empty(100, 64)\ngather[(100,)](x, y, out, C=64)\nreturn out", "x, y")),
    "a boolean output": (problem("x > 0", SMALL), kernel("tl.store(out + o, v > 0, mask=o < n)",
        "out = torch.empty(x.shape, dtype=torch.bool, device=x.device)\nkernel[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out")),
    "a boolean input": (problem("torch.where(y > 0, x * 2, x)", "torch.randn(64, 64), torch.randn(64, 64)"), solution("""
@triton.jit
def choose(x, mask, out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o)
    tl.store(out + o, tl.where(tl.load(mask + o), v * 2, v))
""", "out = torch.empty_like(x)\nchoose[(16,)](x, y > 0, out, BLOCK=256)\nreturn out", "x, y")),
    "a clamp that never acts": (problem("x.clamp(-1e6, 1e6)", SMALL), element("tl.clamp(v, -1e6, 1e6)")),
    "a clamp that never acts, after a product": (problem("(x @ x).clamp(-1e6, 1e6)", SMALL), element("tl.clamp(v, -1e6, 1e6)").replace("out = torch", "x = x @ x; out = torch")),
    "channels_last": (problem("x * 2", "torch.randn(2, 4, 8, 8)"), solution(DOUBLE, "x = x.to(memory_format=torch.channels_last)\nout = torch.empty_like(x)\ndouble[(2,)](x, out, x.numel(), BLOCK=256)\nreturn out")),
    "a failing device_assert with debug": (problem("x * 2", SMALL), kernel("tl.device_assert(v < -100, 'my assertion')\ntl.store(out + o, v * 2)").replace("BLOCK=256", "BLOCK=256, debug=True"), "my assertion"),
    "a failing device_assert without debug": (problem("x * 2", SMALL), kernel("tl.device_assert(v < -100, 'my assertion')\ntl.store(out + o, v * 2)")),
    "a failing assert without debug": (problem("x * 2", SMALL), kernel("assert n < 0, 'my assertion'\ntl.store(out + o, v * 2)")),
    "a failing device_assert with jit(debug=True)": (problem("x * 2", SMALL), kernel("tl.device_assert(v < -100, 'my assertion')\ntl.store(out + o, v * 2)").replace("@triton.jit", "@triton.jit(debug=True)"), "my assertion"),
}


def rows():
    """{name: (task, code, the words of its refusal, or "" where it passes)}"""
    found = {}
    for inputs, expressions in ELEMENTS.items():
        for ours, theirs in expressions.items():
            refused, words, _ = theirs.rpartition("REFUSED")[1], theirs.removeprefix("REFUSED").strip(), 0
            task = problem("x * 2" if refused else theirs, inputs)
            found[f"{inputs[6:11]} {ours}"] = task, element(ours), words if refused else ""
    for subject, bodies in BLOCKS.items():
        for name, (theirs, body, *words) in bodies.items():
            found[f"{subject}: {name}"] = problem(theirs, SMALL), kernel(body, before=HELPERS), "".join(words)
    found.update({f"tl.dot: {name}": product(name) for name in PRODUCTS})
    double = problem("x * 2", SMALL)
    found.update({f"host: {name}": (double, solution(DOUBLE, body), "") for name, body in HOST.items()})
    found.update({f"source: {name}": (double, code, "") for name, code in SOURCES.items()})
    found.update({f"others: {name}": (task, code, "".join(words)) for name, (task, code, *words) in OTHERS.items()})
    return found
