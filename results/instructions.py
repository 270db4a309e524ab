"""How long Triton's instructions and tl.dot take on a GPU: the source of the costs in judge/prices.py. Needs a GPU.

    python results/instructions.py [--out instructions.json]

instructions  A kernel repeats the instruction 4 times, another one 16 times, on 16.8 million elements. The cost is a
              twelfth of the difference; it is about 0 for an instruction that hides behind loads and stores.
products      Tiles of 128 x 64 x 32. The cost is the measured time minus that of its bytes at 4.2 TB/s.

The unit of both is the time of one fp32 FLOP at 60 TFLOP/s: for one element, and for one FLOP of the tiles.
"""

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import triton  # noqa: E402

from judge.correctness import load_module  # noqa: E402

ELEMENTS, FLOPS, BYTES = 1 << 24, 60e9, 4.2e9  # the last two per millisecond
HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
REPEATED = HEAD + '''
@triton.jit
def kernel(x_ptr, out_ptr, n, a, b, m, k, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, i = tl.load(x_ptr + idx, mask=idx < n), idx
    for _ in tl.static_range(TIMES):
        INSTRUCTION
    tl.store(out_ptr + idx, x + i.to(tl.float32), mask=idx < n)
'''
INSTRUCTIONS = {
    "add": "x = x + a", "multiply and add": "x = x * a + b", "maximum": "x = tl.maximum(x, a)",
    "where": "x = tl.where(x > a, x, b)", "exp": "x = tl.exp(x)", "exp2": "x = tl.exp2(x)", "log": "x = tl.log(x)",
    "log2": "x = tl.log2(x)", "sqrt": "x = tl.sqrt(x)", "rsqrt": "x = tl.rsqrt(x)", "floor": "x = tl.floor(x) + a",
    "divide by a scalar": "x = x / a", "divide": "x = a / x", "sigmoid": "x = tl.sigmoid(x)", "erf": "x = tl.erf(x)",
    "sin": "x = tl.sin(x)", "cos": "x = tl.cos(x)", "libdevice.tanh": "x = libdevice.tanh(x)",
    "libdevice.log1p": "x = libdevice.log1p(x)", "libdevice.expm1": "x = libdevice.expm1(x)",
    "libdevice.pow": "x = libdevice.pow(x, a)", "integer add": "i = i + m", "integer divide": "i = i // m + idx",
    "integer remainder": "i = i % m + idx"}
PRODUCT = HEAD + '''
@triton.jit
def kernel(x_ptr, w_ptr, out_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        a = tl.load(x_ptr + rows[:, None] * k + i[None, :], mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(w_ptr + WEIGHT, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="PRECISION")
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(out_ptr + rows[:, None] * n + cols[None, :], acc, mask=mask)
'''
WEIGHT = {"K": "cols[None, :] * k + i[:, None]", "N": "i[:, None] * n + cols[None, :]"}  # where the neighbours lie
SHAPES = {"N = 1024, K = 256": (16384, 1024, 256), "N = 1000, K = 256": (16384, 1000, 256),
          "N = 1024, K = 250": (16384, 1024, 250)}  # rows of N or K elements: 1000 and 250 are no multiples of 16
PRODUCTS = [(precision, order, shape) for precision in ("ieee", "tf32x3", "tf32", "half") for order in "KN"
            for shape in SHAPES]
FOLDER = Path(tempfile.gettempdir()) / "instructions"


def load(text):
    """The module of a source text, saved in a file, because Triton reads the text of kernels from the file."""
    FOLDER.mkdir(exist_ok=True)
    name = f"m{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return load_module(name, text, FOLDER / f"{name}.py")


def instruction(name, times):
    """A call of the kernel that does one instruction `times` times."""
    kernel = load(REPEATED.replace("TIMES", str(times)).replace("INSTRUCTION", INSTRUCTIONS[name])).kernel
    x = torch.rand(ELEMENTS, device="cuda") + 0.5
    out = torch.empty_like(x)
    return lambda: kernel[(ELEMENTS // 1024,)](x, out, ELEMENTS, 1.25, 0.5, 223, 17, BLOCK=1024)


def product(precision, order, shape):
    """A call of the tiled matrix product."""
    text = PRODUCT.replace("WEIGHT", WEIGHT[order]).replace("PRECISION", "tf32" if precision == "half" else precision)
    kernel, (m, n, k) = load(text).kernel, SHAPES[shape]
    dtype = torch.float16 if precision == "half" else torch.float32
    x, w = (torch.randn(size, device="cuda", dtype=dtype) for size in ((m, k), (n, k) if order == "K" else (k, n)))
    out = torch.empty(m, n, device="cuda")
    return lambda: kernel[(triton.cdiv(n, 64), triton.cdiv(m, 128))](x, w, out, m, n, k, BM=128, BN=64, BK=32)


def milliseconds(call, times=20):
    """The shortest mean of three: `times` calls in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    found = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / times)
    return min(found[1:])


def once(function, *arguments):
    """Call function(*arguments)(), which leaves compiled kernels in Triton's cache. Returns None or an error's text."""
    try:
        function(*arguments)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{function.__name__}{arguments}: {type(error).__name__}: {error}"[:200]


def compile_all(jobs):
    """Run `once` for every (function, *arguments) in several processes, because compiling one by one takes minutes."""
    with concurrent.futures.ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        for failure in filter(None, pool.map(once, *zip(*jobs), chunksize=4)):
            print(failure, file=sys.stderr)


def cost_of_product(precision, order, shape):
    """The cost of one FLOP of a product, padded to whole tiles, in fp32 FLOPs."""
    m, n, k = SHAPES[shape]
    size = 2 if precision == "half" else 4
    moved = size * (m * k + k * n) + 4 * m * n
    flops = 2 * m * (-(-n // 64) * 64) * (-(-k // 32) * 32)
    return (milliseconds(product(precision, order, shape)) - moved / BYTES) * FLOPS / flops


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="instructions.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    compile_all([(instruction, name, times) for name in INSTRUCTIONS for times in (4, 16)])
    compile_all([(product, *which) for which in PRODUCTS])
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found["instructions"] = {name: (milliseconds(instruction(name, 16)) - milliseconds(instruction(name, 4))) / 12
                             * FLOPS / ELEMENTS for name in INSTRUCTIONS}
    found["products"] = {", ".join(which): cost_of_product(*which) for which in PRODUCTS}
    Path(args.out).write_text(json.dumps(found, indent=1))
    for part in ("instructions", "products"):
        print(part, *(f"    {name:60} {cost:6.2f}" for name, cost in found[part].items()), sep="\n")


if __name__ == "__main__":
    main()
