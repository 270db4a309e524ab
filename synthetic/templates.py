"""The Triton kernels that the expert writes, as texts to be filled in, each with the function that launches it.

Seven kinds of kernels. Six address memory by the flat offset `idx`, so one rule indexes broadcast operands:

    fused    one program for each 1,024 elements; a run of pointwise steps
    loss     the same, and a partial sum for each program, finished by a short torch sum
    row      one program for each row (last dimension, or all spatial ones); pointwise steps, reductions, softmax, scans
    sweep    one program for a tile of rows that are read in pieces (long rows, or rows along any dimensions): a loop
             for each reduction, and one more if elements are stored
    norm     one program for each normalisation group, in two sweeps (GroupNorm, InstanceNorm)
    matmul   one program for each output tile of a product, or of a stack of products; pointwise steps on the tile
             before it is stored; a second factor whose summed dimension is not contiguous is copied first
    pool     one program for 256 elements of one sample's channel (which has at most 16.7 million) of a pooling's or a
             depthwise convolution's output, which walk their windows, of a size that the compiler knows

The last one (codegen.Window) stands alone, in 1 to 3 dimensions: what a tensor has fewer gets size 1, stride 1.
"""

from collections import namedtuple

# In the templates: {names} are the tensors and numbers that the launching function gets, {main} the first of those
# tensors that the kernel walks, {extra} and {sizes} further integers outside and inside the kernel, {steps} the loads
# and the translated operators, {groups} what norm's function gets besides, {block} how many elements are read at once,
# {step} the operator that a pool kernel replaces, {pool} a row of POOLS.
_ELEMENTS = """def {name}({names}):
    {contiguous}
    n = {main}.numel()
    dst = {out}
    {name}_kernel[(triton.cdiv(n, 1024),)]({names}, dst, n{extra}, BLOCK=1024)
    return {result}

@triton.jit
def {name}_kernel({parameters}, dst_ptr, n{sizes}, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < n
    {steps}
    {store}"""
# The beginning that row and norm share: {cols} elements for each program, which are neighbours in memory.
_NEIGHBOURS = """def {name}({names}{groups}):
    {contiguous}
    cols = {cols}
    dst = {out}
    {name}_kernel[({main}.numel() // cols,)]({names}, dst, cols{extra}, BLOCK={block})
    return dst

@triton.jit
def {name}_kernel({parameters}, dst_ptr, cols{sizes}, BLOCK: tl.constexpr):
    start = tl.program_id(0) * cols
"""
_ROW = _NEIGHBOURS + """    offs = tl.arange(0, BLOCK)
    mask = offs < cols
    idx = start + offs
    {steps}
    {store}"""
# The beginning of norm's two loops.
_BLOCKS = """    for i in range(0, cols, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < cols
        idx = start + offs
"""
_NORM = _NEIGHBOURS + """    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
""" + _BLOCKS + """        {main} = tl.load({main}_ptr + idx, mask=mask, other=0.0){biased}
        total += {main}
        square += {main} * {main}
    mean = tl.sum(total, 0) / cols
    rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)
""" + _BLOCKS + """        {steps}
        {store}"""
_SWEEP = """def {name}({names}):
    {contiguous}
    inner = {inner}
    cols = {cols}
    dst = {out}
    width = min(64, triton.next_power_of_2(inner))
    grid = ({main}.numel() // (cols * inner), triton.cdiv(inner, width))
    {name}_kernel[grid]({names}, dst, cols, inner{extra}, BR=2048 // width, BI=width)
    return dst

@triton.jit
def {name}_kernel({parameters}, dst_ptr, cols, inner{sizes}, BR: tl.constexpr, BI: tl.constexpr):
    lane = tl.program_id(1) * BI + tl.arange(0, BI)[None, :]
    start = tl.program_id(0) * cols * inner + lane
    {steps}"""
PIECES = """for i in range(0, cols, BR):
        offs = i + tl.arange(0, BR)[:, None]
        mask = (offs < cols) & (lane < inner)
        idx = start + offs * inner"""
_MATMUL = """def {name}({names}):
    {contiguous}
    k, n = {b}.shape[-2:]
    dst = {a}.new_empty(*{a}.shape[:-1], n)
    {b} = {b}.mT.contiguous().mT.reshape(-1, k, n)
    {a} = {a}.contiguous().reshape(len({b}), -1, k)
    m = {a}.shape[1]
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 128), len({b}))
    {name}_kernel[grid]({names}, dst, m, n, k, *{a}.stride(), *{b}.stride(){extra}, BM=128, BN=64, BK=32)
    return dst

@triton.jit
def {name}_kernel({parameters}, dst_ptr, m, n, k, as_, am, ak, bs, bk, bn{sizes}, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a_index = tl.program_id(2) * as_ + rows[:, None] * am + i[None, :] * ak
        b_index = tl.program_id(2) * bs + i[:, None] * bk + cols[None, :] * bn
        a = tl.load({a}_ptr + a_index, mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load({b}_ptr + b_index, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    idx = (tl.program_id(2) * m + rows[:, None]) * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    {steps}
    {store}"""
_POOL = """def {name}(x, {pool.given}*options):
    rank = x.dim() - 2
    kernel_size, stride, padding, dilation = [o if isinstance(o, tuple) else (o,) * rank for o in options]
    out = [(n + 2 * p - r * (k - 1) - 1) // s + 1
           for n, k, s, p, r in zip(x.shape[2:], kernel_size, stride, padding, dilation)]
    dst = x.new_empty(*x.shape[:2], *out)
    ones, zeros = (1,) * (3 - rank), (0,) * (3 - rank)
    {name}_kernel[(len(x) * x.shape[1], triton.cdiv(dst[0, 0].numel(), 256))](
        x.contiguous(), {pool.passed}dst, *ones, *x.shape[2:], *ones, *kernel_size, *ones, *out,
        *ones, *stride, *zeros, *padding, *ones, *dilation, BLOCK=256)
    return dst

@triton.jit
def {name}_kernel(x_ptr, {pool.pointers}dst_ptr, depth, height, width, kd: tl.constexpr, kh: tl.constexpr,
                kw: tl.constexpr, od, oh, ow, sd, sh, sw, pd, ph, pw, rd, rh, rw, BLOCK: tl.constexpr):
    plane, size = tl.program_id(0).to(tl.int64), od * oh * ow
    point = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z, y, x = point // (oh * ow) * sd - pd, point // ow % oh * sh - ph, point % ow * sw - pw
    x_ptr += plane * depth * height * width
    acc = tl.full((BLOCK,), {pool.start}, tl.float32)
    # {step}
    for i in tl.static_range(kd):
        for j in tl.static_range(kh):
            for k in tl.static_range(kw):
                u, v, w = z + i * rd, y + j * rh, x + k * rw
                inside = (point < size) & (u >= 0) & (u < depth) & (v >= 0) & (v < height) & (w >= 0) & (w < width)
                value = tl.load(x_ptr + (u * height + v) * width + w, mask=inside, other={pool.start})
                acc = {pool.update}{pool.finish}
    tl.store(dst_ptr + plane * size + point, acc, mask=point < size)"""
# What the pool kernel is filled with: the first value, one step and what is done at the end; and for a depthwise
# convolution what its function gets, hands on and its kernel gets.
Pool = namedtuple("Pool", "start update finish given passed pointers", defaults=[""] * 4)
POOLS = {"maxpool": Pool('float("-inf")', "tl.maximum(acc, value)"),
         "avgpool": Pool("0.0", "acc + value", "\n    acc = acc / (kd * kh * kw)"),
         "lppool": Pool("0.0", "acc + value * value", "\n    acc = tl.sqrt(acc)"),
         "depthwise": Pool("0.0", "acc + value * tl.load(weight_ptr + ((plane % channels * kd + i) * kh + j) * kw + k)",
                           "\n    if bias_ptr is not None:\n        acc += tl.load(bias_ptr + plane % channels)",
                           "weight, bias, ", "weight, bias, len(weight), ", "weight_ptr, bias_ptr, channels, ")}
TEMPLATES = {"fused": _ELEMENTS, "loss": _ELEMENTS, "row": _ROW, "sweep": _SWEEP, "norm": _NORM, "matmul": _MATMUL,
             "pool": _POOL}
