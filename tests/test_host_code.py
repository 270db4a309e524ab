"""Host code around honest kernels: it finds an H200, allocates and launches as it likes; and kernels as a whole.

A forward's or a file's text a row; expressions and bodies of kernels are in test_language.py.
"""

import pytest

from candidates import indent, passes, problem, product, replaced, solution, verdict
from test_language import FLOATS

# ---------------------------------------------------------------------------------------------------------------------
# Host code that doubles x by this kernel

DOUBLE = """
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
"""
TASK = problem("x * 2", FLOATS)
CALL = "double[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out"
NEW = "out = torch.empty_like(x)\n"
FORWARDS = {  # bodies of a forward: how it allocates, asks and launches
    "grid of a lambda": NEW + "grid = lambda META: (triton.cdiv(x.numel(), META['BLOCK']),)\n" +
                        CALL.replace("(16,)", "grid"),
    "grid of a function": NEW + "def grid(meta):\n    return (triton.cdiv(x.numel(), meta['BLOCK']), 1, 1)\n" +
                          CALL.replace("(16,)", "grid"),
    "keywords": NEW + "double[(16, 1, 1)](x=x, out=out, n=x.numel(), BLOCK=256, num_warps=8, num_stages=3)\nreturn out",
    "empty on cuda": "out = torch.empty(x.shape, device='cuda')\nx = x.cuda()\n" + CALL,
    "contiguous and view": "shape = x.shape\nx = x.contiguous().view(-1)\n" + NEW + CALL + ".view(shape)",
    "to the device": "scale = torch.tensor(2.0, device=x.device)\nx = x.to('cuda', non_blocking=True)\n" + NEW + CALL,
    "a fallback without a GPU": "if not torch.cuda.is_available() or not x.is_cuda:\n    return x * 2\n" + NEW + CALL,
    "backend flags": "torch.backends.cuda.matmul.allow_tf32 = True\n" + NEW + CALL,
    "an allocator": "triton.set_allocator(lambda size, align, stream: torch.empty(size, device='cuda'))\n" +
                    NEW + CALL,
    "wrap_triton": NEW + "torch.library.wrap_triton(double)[(16,)](x, out, x.numel(), BLOCK=256)\nreturn out",
    **{f"with {context}": f"with {context}:\n{indent(NEW + CALL)}" for context in (
        "torch.no_grad()", "torch.cuda.device(x.device)", "torch.cuda.device(x.device.index)",
        "torch.cuda.device_of(x)", "torch.cuda.stream(torch.cuda.current_stream())",
        "torch.autocast('cuda', enabled=False)",
        "torch.device('cuda')")},
    **{f"assert {question}": f"assert {question}\n{NEW}{CALL}" for question in (
        "x.device.type == 'cuda' and x.is_cuda", "x.get_device() == 0 and x.device == torch.device('cuda', 0)",
        "torch.cuda.get_device_properties(x.device).multi_processor_count == 132", "torch.cuda.is_bf16_supported()",
        "torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory > 1 << 36",
        "torch.cuda.get_device_capability() >= (9, 0) and 'H200' in torch.cuda.get_device_name(0)",
        "triton.runtime.driver.active.get_current_target().arch == 90", "torch.version.cuda and not torch.version.hip",
        "triton.runtime.driver.active.utils.get_device_properties(0)['multiprocessor_count'] == 132",
        "x.is_contiguous() and x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1",
        "x.element_size() == 4 and x.nbytes == 4 * x.numel() and x.data_ptr() % 16 == 0")},
}


def forwards(rows):
    """(task, code) of bodies of a forward, whose results are a list."""
    methods = "".join(f"def run{i}(x):\n{indent(body)}" for i, body in enumerate(rows))
    names = ", ".join(f"run{i}" for i in range(len(rows)))
    code = solution(f"{DOUBLE}\n{methods}", f"return [run(x) for run in [{names}]]")
    return problem(f"[{', '.join(['x * 2'] * len(rows))}]", FLOATS), code


def test_host_code_finds_an_h200(box):
    if not verdict(box, *forwards(FORWARDS.values())).correct:
        alone = {name: verdict(box, *forwards([body])) for name, body in FORWARDS.items()}
        assert not {name: v.rejected or v.error for name, v in alone.items() if not v.correct}


def model(body=NEW + CALL, more=""):
    return f"\nclass ModelNew(nn.Module):\n{indent(more)}    def forward(self, x):\n{indent(body, 8)}"


HEAD = "import torch\nimport torch.nn as nn\nimport triton\nimport triton.language as tl\n"
STATIC = DOUBLE.replace("@triton.jit", "@staticmethod\n@triton.jit")
LOADED = "tl.load(x + o, mask=o < n)"
OWN = f"fma({LOADED}, 2.0, 0.0)"
JIT = "@triton.jit"
TWICE = "@triton.jit\ndef twice(a):\n    return a + a\n\n"
TUNED = CALL.replace("(16,)", "lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)").replace(", BLOCK=256", "")


def doubling(*changes, head="", body=NEW + CALL, more="") -> str:
    """A whole file: what stands before the kernel, the kernel with these changes, and a model."""
    return HEAD + head + replaced(DOUBLE, *changes) + model(body, more)


SOURCES = {
    "libdevice by name": doubling((f"{LOADED} * 2", OWN), head="from triton.language.extra.libdevice import fma\n"),
    "libdevice in a try": doubling((f"{LOADED} * 2", f"libdevice.{OWN}"), head=(
        "try:\n    from triton.language.extra import libdevice\n"
        "except ImportError:\n    from triton.language.extra.cuda import libdevice\n")),
    "an alias": doubling((f"{LOADED} * 2", OWN), head="fma = tl.math.fma\n"),
    "triton.language": doubling(("tl.", "triton.language.")).replace(" as tl", ""),
    "a helper of helpers": doubling((f"{LOADED} * 2", f"twice({LOADED})"), head=(
        TWICE.replace("twice", "add") + TWICE.replace("a + a", "add(a)"))),
    "noinline": doubling((f"{LOADED} * 2", f"twice({LOADED})"), head=TWICE.replace("jit", "jit(noinline=True)")),
    "constexpr_function": doubling(("* 2", "* half(BLOCK // 64)"), head=(
        "@triton.constexpr_function\ndef half(n):\n    return n // 2\n")),
    "a static method": HEAD + "class Kernels:\n" + indent(STATIC) + model(NEW + "Kernels." + CALL),
    "jit with options": doubling((JIT, "@triton.jit(do_not_specialize=['n'], debug=True)")),
    "heuristics": doubling((JIT, "@triton.heuristics({'BLOCK': lambda args: args['n'] // 16})\n" + JIT),
                           body=NEW + CALL.replace(", BLOCK=256", "")),
    "autotune": doubling((JIT, (
        "@triton.autotune([triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 256) for w in (4, 8)], "
        "key=['n'], reset_to_zero=['out'])\n" + JIT)), body=NEW + TUNED),
    "autotune that prunes": doubling((JIT, (
        "@triton.autotune([triton.Config({'BLOCK': 64}), triton.Config({'BLOCK': 256})], key=['n'], "
        "prune_configs_by={'early_config_prune': some})\n@triton.heuristics({'E': lambda args: True})\n" + JIT)), (
        "BLOCK: tl", "BLOCK: tl.constexpr, E: tl"),
        head="def some(configs, named, **more):\n    return configs[1:]\n", body=NEW + TUNED),
    "autograd.Function": HEAD + DOUBLE + "class Double(torch.autograd.Function):\n    @staticmethod\n"
                         "    def forward(ctx, x):\n        ctx.save_for_backward(x)\n" + indent(NEW + CALL, 8) +
                         model("return Double.apply(x)"),
    "device at import": doubling(head=(
        "DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count\nassert SMS == 132\n"),
        body="out = torch.empty(x.shape, device=DEVICE)\n" + CALL),
    "capability in the constructor": doubling(more=(
        "def __init__(self):\n    super().__init__()\n    assert torch.cuda.get_device_capability()[0] == 9\n"
        "    self.register_buffer('two', torch.tensor(2.0, device='cuda'))\n")),
    "a tuple of tensors": doubling(("(x, out, n, BLOCK", "(tensors, n, BLOCK"), ("(out + o", "(tensors[1] + o"),
                                   ("(x + o", "(tensors[0] + o"), body=NEW + CALL.replace("x, out", "(x, out)")),
}


@pytest.mark.parametrize("name", SOURCES)
def test_files_that_double(box, name):
    passes(box, TASK, SOURCES[name])


def test_of_an_autotuned_kernels_configurations_the_cheapest_counts_and_is_named(box):
    task = problem("x * 2", "torch.randn(512, 512)")
    found, alone = verdict(box, task, SOURCES["autotune"]), {}
    for block in (16, 256):
        call = CALL.replace("(16,)", f"({512 * 512 // block},)").replace("256", str(block))
        alone[block] = verdict(box, task, HEAD + DOUBLE + model(NEW + call)).candidate_ms
    assert found.candidate_ms == alone[256] < alone[16]
    assert found.tuned == ["double: BLOCK=256, num_warps=4"]


INLINE = "from torch.utils.cpp_extension import load_inline\nmodule = load_inline('m', '', functions=['f'])\n"
REFUSED = {
    "CUDA C++": (HEAD + INLINE + model("return module.f(x)"), "CUDA C++ (load_inline) cannot be judged without a GPU"),
    "a global that is no constexpr": (doubling(("* 2", "* TWO"), head="TWO = 2\n"), "access global variable TWO"),
    "numpy": (doubling(body="x.numpy()\n" + NEW + CALL), "a tensor on the GPU has to be moved to the CPU first"),
    "tolist": (doubling(body=NEW + CALL.replace("return", "out.tolist()\nreturn")), "reads computed values back"),
    "hooks": (doubling((JIT, (
        "@triton.autotune([triton.Config({'BLOCK': 64}, pre_hook=print), triton.Config({'BLOCK': 256})], key=['n'])\n" +
        JIT)), body=NEW + TUNED), "configurations of an autotuned kernel with hooks"),
    "a missing argument": (doubling(body=NEW + CALL.replace(", BLOCK=256", "")), "BLOCK"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name(box, name):
    code, words = REFUSED[name]
    assert words in verdict(box, TASK, code).error


# ---------------------------------------------------------------------------------------------------------------------
# Whole kernels: {name: (task, code)}

SUMS = """
@triton.jit
def sums(x, out, C: tl.constexpr):
    c = tl.arange(0, C)
    tl.atomic_OP(out + c, tl.load(x + tl.program_id(0) * C + c))
"""


def atomic(name, theirs, inputs, first):
    body = f"out = torch.full((64,), {first}, dtype=x.dtype, device=x.device)\nsums[(64,)](x, out, C=64)\nreturn out"
    return problem(theirs, inputs), solution(SUMS.replace("OP", name), body)


SHORTS = "torch.randint(0, 1000, (64, 64), dtype=torch.int32)"
BITS = "torch.stack([((x >> i) & 1).{} << i for i in range(10)]).sum(0).int()"
KERNELS = {
    "dot": product("total += tl.dot(left, right, input_precision='ieee')"),
    "dot, tf32x3": product("total += tl.dot(left, right, input_precision='tf32x3')"),
    "dot, allow_tf32": product("total += tl.dot(left, right, allow_tf32=False)"),
    "dot, fp16": product("total += tl.dot(left, right)", "torch.randn(64, 64).half()"),
    "dot, fp64": product("total += tl.dot(left, right, out_dtype=tl.float64)", "torch.randn(64, 64).double()",
                         total="tl.float64"),
    "dot, int8": product("total += tl.dot(left, right, out_dtype=tl.int32)",
                         "torch.randint(-9, 9, (64, 64), dtype=torch.int8)", "(x.float() @ y.float()).int()",
                         "tl.int32", "torch.int32"),
    "dot, fp8": product("total += tl.dot(left.to(tl.float8e5), right.to(tl.float8e5))", theirs=(
        "x.to(torch.float8_e5m2).float() @ y.to(torch.float8_e5m2).float()")),
    "atomic_max": atomic("max", "x.amax(0) + 0", SHORTS, 0),
    "atomic_or": atomic("or", BITS.format("amax(0)"), SHORTS, 0),
    "atomic_max of floats": atomic("max", "x.amax(0) + 0", "torch.randn(64, 64)", -1e9),
    **{f"atomic_add, {kind}": atomic("add", "x.sum(0)", f"torch.randint(-4, 4, (64, 64)).{kind}()", 0)
       for kind in ("float", "half", "double", "long")},
    "every program counts": (problem("torch.full((1,), 48, dtype=torch.int32) + 0 * x[0, :1].int()"), solution('''
@triton.jit
def count(out):
    tl.atomic_add(out, 1)
''', "out = torch.zeros(1, dtype=torch.int32)\ncount[(4, 3, 4)](out)\nreturn out")),
    "strides of a view": (problem("x.t() * 2", FLOATS), solution("""
@triton.jit
def double(x, out, R, C, xr, xc, outr, outc, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    v = tl.load(x + r * xr + c * xc, mask=(r < R) & (c < C))
    tl.store(out + r * outr + c * outc, v * 2, mask=(r < R) & (c < C))
""", "y = x.t()\nout = torch.empty(y.shape, device=y.device)\n"
     "double[(4, 4)](y, out, *y.shape, *y.stride(), *out.stride(), B=16)\nreturn out")),
    "online softmax": (problem("x.softmax(1)", "torch.randn(64, 48)"), solution("""
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
    "the largest and its place": (problem("torch.max(x, 1)", "torch.randn(64, 48)"), solution("""
@triton.jit
def largest(x, values, places, N: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    v, i = tl.max(tl.load(x + row * N + c, mask=c < N, other=-float("inf")), axis=0, return_indices=True)
    tl.store(values + row, v)
    tl.store(places + row, i)
""", "v, i = torch.empty(64), torch.empty(64, dtype=torch.int64)\nlargest[(64,)](x, v, i, 48, BLOCK=64)\nreturn v, i")),
    "a clamp that never acts": (problem("x.clamp(-1e6, 1e6)", FLOATS), doubling(
        (f"{LOADED} * 2", f"tl.clamp({LOADED}, -1e6, 1e6)"))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_what_torch_gives(box, name):
    passes(box, *KERNELS[name])
