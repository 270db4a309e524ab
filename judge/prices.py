"""The modelled clock's prices: what the GPU that is not there would take for each step of a forward.

One kernel costs

    launch overhead + max(bytes / bandwidth, FLOPs / peak)

and one Triton launch

    launch overhead + max(bytes / bandwidth, FLOPs / peak,       (their sum with tl.dot, which hardly overlaps them)
                          bytes requested / rate of the L1 caches, programs / rate of programs,
                          atomics on one address / their rate, largest program at a program's share of the machine)

The device is one 256th of an H200: problems on the CPU are 256 times smaller than on the GPU (tasks.py), and a launch
keeps its full price (that of a kernel in a CUDA graph, as the measured clock times it). So launches, bytes and FLOPs
keep the proportions that they have on the card. Parameters are not smaller here, so their bytes cost a 256th.

ATen operators are priced by `operator_kernels`, one line of OPERATOR_PRICES for each kind of operator; lockstep.py
counts what Triton kernels do, with the costs of instructions at the end of this page. All factors were measured on an
H200, by results/operators.py and results/instructions.py. What matters beside the fit: the same work must not be
cheaper under another operator's name or written in another way.
"""

import functools
import math
import re

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from judge.messages import layouts_in
from judge.rules import ONE_PASS, REFERENCE_ONLY, REFUSED_OPERATORS
from tasks import GPU_BATCH_FACTOR

# The rates of an H200, divided by the factor by which problems are smaller here, per millisecond; and where from.
LAUNCH_MS = 0.002
BANDWIDTH = 4.2e12 / GPU_BATCH_FACTOR / 1e3  # bytes of the GPU's memory: a copy, measured
L1_BANDWIDTH = 30e12 / GPU_BATCH_FACTOR / 1e3  # bytes: 132 multiprocessors, 128 bytes a clock of 1.76 GHz
PEAK = 60e12 / GPU_BATCH_FACTOR / 1e3  # fp32 FLOPs, measured
PROGRAMS = 1.6e9 / GPU_BATCH_FACTOR / 1e3  # Triton programs, measured with kernels of tiny programs
ATOMICS = 1.7e9 / GPU_BATCH_FACTOR / 1e3  # on one address: one a clock of the L2 cache
SECTOR = 5  # log2 of the bytes in which memory is fetched
CACHE_SECTORS = int(4 * 50e6 / GPU_BATCH_FACTOR) >> SECTOR  # four times its share: neighbours load things together
WARP_BYTES = 128  # that the L1 cache could give in the time that it takes for any request of a warp
ONE_PROGRAM = {False: 4, True: 2}  # one program gets at most a fourth of the machine; with tl.dot, a half


def milliseconds(moved, flops=0):
    """The price of one of PyTorch's kernels that moves `moved` bytes."""
    return LAUNCH_MS + max(moved / BANDWIDTH, flops / PEAK)


def launch_milliseconds(memory, programs):
    """The price of one launch of a Triton kernel, by what its Memory has counted."""
    moving, working = memory.bytes / BANDWIDTH, memory.flops / PEAK
    busy = moving + working if memory.has_dot else max(moving, working)
    return LAUNCH_MS + max(busy, memory.requested / L1_BANDWIDTH, programs / PROGRAMS, memory.conflicts / ATOMICS,
                           memory.largest)


def program_milliseconds(moved, requested, flops, has_dot):
    """What single programs (arrays) take, each at one program's share of the machine: a launch takes no less.

    On a GPU a grid has thousands of programs; here, where problems are smaller, an honest one may have a few.
    """
    working = 0 if has_dot else flops / PEAK
    return ONE_PROGRAM[has_dot] * np.maximum(np.maximum(moved / BANDWIDTH, requested / L1_BANDWIDTH), working)


# ---------------------------------------------------------------------------------------------------------------------
# One call of an ATen operator

FREE_OPERATORS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor", "set_",
                  "resize_", "_local_scalar_dense", "sym_size", "lift_fresh"}
UNWRITTEN = FREE_OPERATORS - {"scalar_tensor"}  # of these, what they return holds nothing yet
WRITE_ONLY = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_", "random_", "fill", "zeros_like",
              "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}
GATHERS = {"embedding", "index_select", "gather", "index", "take"}  # read as much of the table as they write
REDUCTIONS = {"sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "var", "std",
              "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "nansum", "aminmax", "median",
              "nanmedian", "kthvalue", "mode", "count_nonzero"}


def operator_name(func):
    """An ATen operator's name, without its namespace and overload."""
    return func._schema.name.split("::")[1]


def base_name(name):
    """An operator's name without the underscore of its in-place form, which does the same work."""
    return name.rstrip("_")


@functools.cache
def is_pointwise(func):
    """Does PyTorch call an operator pointwise? (Of many in-place forms it only says so of the other form.)"""
    plain = getattr(getattr(torch.ops.aten, base_name(operator_name(func)), None), func._overloadname, func)
    return torch.Tag.pointwise in {*func.tags, *plain.tags}


def size_of(tensor, parameters=()):
    """Bytes of memory behind a tensor; dimensions that are expanded (stride 0) count once.

    parameters: addresses of storages that have the same size on a GPU, where all others are GPU_BATCH_FACTOR times
    larger; so their bytes count that much less.
    """
    if tensor.numel() == 0:
        return 0
    size = math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride) * tensor.element_size()
    return size / GPU_BATCH_FACTOR if tensor.untyped_storage().data_ptr() in parameters else size


def tensors_in(tree):
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def bytes_in(tree) -> int:
    """Bytes of the elements of all tensors in nested lists and dicts."""
    return sum(t.numel() * t.element_size() for t in tensors_in(tree))


def layout_of(tensor) -> list:
    """(size, stride) of each dimension of more than one element."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride()) if n > 1]


class Call:
    """An ATen call and what its price depends on. Sizes are in bytes; parameters: see `size_of`."""

    def __init__(self, func, args, kwargs, out, parameters=()):
        self.func, self.args, self.kwargs, self.name = func, args, kwargs, operator_name(func)
        self.sources = tensors_in([args, {key: value for key, value in kwargs.items() if key != "out"}])
        self.results = tensors_in([out, kwargs.get("out")])
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.sources}
        views = all(r.numel() == 0 or r.untyped_storage().data_ptr() in memory for r in self.results)
        self.free = self.name in FREE_OPERATORS or bool(self.results) and views and not func._schema.is_mutable
        if self.name in WRITE_ONLY:
            self.sources = self.sources[1:]
        self.sizes = [size_of(tensor, parameters) for tensor in self.sources]
        self.first, self.result = next(iter(self.sizes), 0), next(iter(self.results), None)  # the first ones
        self.written = sum({id(tensor): size_of(tensor) for tensor in self.results}.values())
        self.read = sum({id(tensor): size for tensor, size in zip(self.sources, self.sizes)}.values())
        if self.name in GATHERS:
            self.read = min(self.written, self.first) + sum(self.sizes[1:])
        self.elements = max([tensor.numel() for tensor in self.sources + self.results], default=0)

    def slowdown(self):
        """How many times longer than its bytes take a reduction or an element-wise kernel runs."""
        if not self.sources or not self.results:
            return 1.0
        x = self.sources[0]
        if self.name in REDUCTIONS and self.result.numel() < x.numel():
            return self.slowdown_of_reduction(x)
        if is_pointwise(self.func) or self.name in ("copy_", "addr") or self.name.endswith("_copy") or \
                "_foreach" in self.name:
            layout = layout_of(self.result)
            if any(layout_of(source) != layout for source in self.sources):
                return 1.5  # broadcasting and strides: every element's address is computed, and nothing vectorised
        return 1.0

    def slowdown_of_reduction(self, x):
        first = 1 + ("norm" in self.name)
        dims = next((arg for arg in self.args[first:] if isinstance(arg, (int, list))), None)
        finds_place = dims not in (None, []) and self.name in ("max", "min", "argmax", "argmin")
        index = 1.6 if finds_place else 1.0
        dims = range(x.dim()) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
        if self.result.numel() == 1:
            return 1.6 * index
        long_ones = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
        if min(long_ones, key=x.stride) in [dim % x.dim() for dim in dims]:  # rows of neighbours: short ones are slow
            return (1 + 13 / (x.numel() / self.result.numel()) ** 0.5) * index
        return 1.2 * index


# ---------------------------------------------------------------------------------------------------------------------
# Pricing it. Each function returns [(bytes, FLOPs)] of the CUDA kernels that PyTorch launches for a call. A price is
# bytes and FLOPs at full rate, so what takes longer counts as more bytes.


def one_kernel(call):
    return [(call.slowdown() * (call.read + call.written), call.elements)]


def product(call, flops):
    """A matrix product: at these sizes cuBLAS hardly overlaps loading and multiplying."""
    flops *= 1 + 3 * call.result.is_complex()
    return [(1.3 * (call.read + call.written + flops / PEAK * BANDWIDTH), flops)]


def matrix_product(call):
    return product(call, 2 * call.result.numel() * call.sources[-2].shape[-1])


def summed_products(call):
    return product(call, 2 * call.sources[-2].numel() * call.sources[-1].shape[-1])


def convolution(call):
    """cuDNN multiplies tiles of 8 input by 32 output channels, filled or not; the bias is a pass of its own.

    At least one group's tiles are charged in full: otherwise a convolution would be cheaper split into groups.
    """
    if len(call.sources) < 2:
        return one_kernel(call)
    weight = call.sources[1]
    transposed = len(call.args) > 6 and call.args[6] is True
    groups = call.args[8] if len(call.args) > 8 and isinstance(call.args[8], int) else 1
    outer, inner = weight.shape[0] // groups, weight.shape[1]
    channels_in, channels_out = (outer, inner) if transposed else (inner, outer)
    outputs = call.sources[0] if transposed else call.result  # multiplications per input, if transposed
    flops = 2 * outputs.numel() * weight[0].numel()
    tiles = (-(-channels_in // 8) * 8 / channels_in) * (-(-channels_out // 32) * 32 / channels_out)
    time = 2.5 * (call.read + call.written) + 1.25 * max(flops, flops / groups * tiles) / PEAK * BANDWIDTH
    return [(time * 1.5 if transposed else time, flops)] + [(1.5 * 2 * call.written, 0)] * (len(call.sources) > 2)


def by_rows(read, written, rows):
    """Bytes of a norm that gives each row of its input to a group of threads: every row costs something."""
    return 1.2 * (read + written) + 5000 * rows


def two_passes(read, written, rows, factor):
    """Statistics, then normalising; in sum no fewer bytes than those of a norm of the same rows."""
    factor = max(factor, by_rows(read, written, rows) / max(2 * read + written, 1))
    return [(factor * read, 0), (factor * (read + written), 0)]


def batch_norm(call):
    given = dict(zip((argument.name for argument in call.func._schema.arguments), call.args)) | call.kwargs
    computes_statistics = given.get("training", not call.func._schema.name.endswith(("no_training", "no_update")))
    if not computes_statistics:
        return [(call.first + size_of(call.result), 0)]
    batch, channels = call.sources[0].shape[:2]  # a batch of one is an instance norm's, whose channels are many
    return two_passes(call.first, size_of(call.result), channels if batch == 1 else 0, 3)


def group_norm(call):
    return [(0, 0)] + two_passes(call.first, size_of(call.result), call.args[3] * call.args[6], 2.2)


def layer_norm(call):
    rows = call.elements // max(math.prod(call.args[1]), 1)
    return [(by_rows(call.read, size_of(call.result), rows), call.elements)]


def logsumexp(call):
    """amax, subtract, exp, sum and four launches on small tensors."""
    reduction = (call.slowdown() * call.first, 0)
    return [reduction, (1.5 * 2 * call.first, 0), (2 * call.first, 0), reduction] + [(0, 0)] * 4


def loss(call):
    if call.result.numel() != 1 or call.elements == 1:  # not reduced
        return one_kernel(call)
    return [(call.read + call.first, 0), (call.first, 0)]


def loss_of_logits(call):
    return [(2 * call.first, 0)] * 2 + [(3 * call.first, 0)] * 2 + [(call.first, 0)] * (call.result.numel() == 1)


def topk(call):
    if 8 * call.result.numel() > call.elements:  # nearly all of them: a sort
        return [(2 * (call.first + 8 * call.elements), 0)] * 4
    return [(call.first, 0), (call.first, 0), (call.first + call.written, 0)]


def pooling(call):
    """Each element of a window passes through the L1 cache, which of large windows takes longer than their bytes."""
    size, dimensions = call.args[1], int(re.search(r"(\d)d", call.name)[1])
    window = 1 if "adaptive" in call.name else math.prod(size * (dimensions // len(size)))  # [3] may stand for [3, 3]
    flops = max(call.elements, call.result.numel() * window * 4 / L1_BANDWIDTH * PEAK)
    return [((10 if "pool3d" in call.name else 2.3) * (call.read + call.written), flops)]


def attention(call):
    query, key = call.sources[:2]
    flops = 4 * math.prod(query.shape) * key.shape[-2]
    return [(call.read + size_of(call.result), flops)]


def recurrent_layer(call):
    """cuDNN: one matrix product for all inputs, then two kernels for each time step."""
    weights, steps = sum(call.sizes[1:5]), max(call.sources[0].shape[0], 1)
    flops = 2 * call.sources[0].shape[1] * sum(tensor.numel() for tensor in call.sources[1:3])
    return [(call.first + weights, flops)] + [(weights, flops), (0, 0)] * steps


OPERATOR_PRICES = [  # (names as a regular expression, price); everything else is `one_kernel`
    ("mm|bmm|addmm|baddbmm|mv|addmv|dot|vdot|_addmm_activation", matrix_product),
    ("addbmm", summed_products),
    (".*conv(?!ert).*", convolution),
    (".*batch_norm.*", batch_norm),
    ("native_group_norm", group_norm),
    ("native_layer_norm", layer_norm),
    ("logsumexp", logsumexp),
    ("mse_loss|smooth_l1_loss|huber_loss|binary_cross_entropy|soft_margin_loss", loss),
    ("binary_cross_entropy_with_logits", loss_of_logits),
    ("log_sigmoid_forward", lambda call: [(call.read + size_of(call.result), call.elements)]),
    ("constant_pad_nd", lambda call: [(call.written, 0), (2 * call.first, 0)]),  # fills, then copies
    ("sort|argsort|msort", lambda call: [(2 * call.written, 0)] * 4),  # four passes of a radix sort
    ("topk", topk),
    ("cumsum|cumprod|logcumsumexp", lambda call: [(2.3 * (call.read + call.written), call.elements)]),
    (".*_pool.*", pooling),
    ("_scaled_dot_product.*", attention),
    ("mkldnn_rnn_layer", recurrent_layer),
]


@functools.cache
def price_of_operator(name):
    return next((price for names, price in OPERATOR_PRICES if re.fullmatch(names, name)), one_kernel)


def operator_kernels(func, args, kwargs, out, parameters=()):
    """The CUDA kernels of one ATen call, as [(bytes, FLOPs)]; empty for views and other free calls.

    parameters: see `size_of`.
    """
    call = Call(func, args, kwargs, out, parameters)
    return [] if call.free else price_of_operator(base_name(call.name))(call)


# ---------------------------------------------------------------------------------------------------------------------
# Which operators a candidate may call

NAMED = {base_name(name) for name in FREE_OPERATORS | WRITE_ONLY | GATHERS | REDUCTIONS}


def kind_of(func, on_complex):
    """What an operator has to be called by, for a reference to have called it as well."""
    return base_name(operator_name(func)) + (" of complex numbers" if on_complex else "")


def forms_of(name) -> list:
    """The overloads of PyTorch's operator of this name, if there is one."""
    found = getattr(torch.ops.aten, name, None)
    return [getattr(found, overload) for overload in (found.overloads() if found is not None else ())]


def is_known(func, on_complex):
    """Does an operator do no more work than its price says, on memory that is its own? See rules.ONE_PASS."""
    name = base_name(operator_name(func))
    if REFERENCE_ONLY.fullmatch(name):
        return False
    if any(is_pointwise(form) or form.is_view for form in forms_of(name) or [func]) or name.endswith("_copy"):
        return True
    factory = not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return not on_complex and bool(
        factory or name in NAMED or ONE_PASS.fullmatch(name) or price_of_operator(name) is not one_kernel)


def refusal(step, called, clock="modelled"):
    """Why a candidate may not call a recorded step's operator, or None. called: by the reference (`Clock.called`).

    The measured clock takes what PyTorch has for a GPU, except what reaches outside of a program's tensors.
    """
    base, overload = step[1].split(".")
    func = getattr(getattr(torch.ops.aten, base), overload)
    if clock == "measured":
        known = torch._C._dispatch_has_kernel(func.name()) and base_name(base) not in REFUSED_OPERATORS
        return None if known else f"aten.{base} is not available to a candidate"
    on_complex = any("complex" in layout[1] for layout in layouts_in(step[2:4]))
    kind = kind_of(func, on_complex)
    if kind in REFUSED_OPERATORS or kind not in called and not is_known(func, on_complex):
        return f"aten.{kind} has no modelled price: it may be called only where the reference calls it"


# ---------------------------------------------------------------------------------------------------------------------
# Pricing a whole forward


class Mode(TorchDispatchMode):
    """A dispatch mode that torch.compile is not told to leave alone: for that PyTorch imports it, which takes a second.
    """

    @classmethod
    def _should_skip_dynamo(cls):  # where PyTorch does not ask (this is to be temporary), the second comes back
        return False


class Clock(Mode):
    """While active, prices every ATen call: `events` collects [milliseconds, label, own kernel?], `flops` the rest, and
    `called` what was called (`kind_of`). parameters: see `size_of`.
    """

    def __init__(self, parameters=()):
        super().__init__()
        self.events, self.flops, self.called, self.parameters = [], 0, set(), parameters

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.called.add(kind_of(func, any(tensor.is_complex() for tensor in tensors_in([args, kwargs]))))
        for moved, flops in operator_kernels(func, args, kwargs or {}, out, self.parameters):
            self.events.append([milliseconds(moved, flops), operator_name(func), False])
            self.flops += flops
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Triton's instructions: what one element of an operation costs, in fp32 FLOPs at full rate that an H200 does in that
# time. What is not named costs 1. (results/instructions.py says 10 for exp and sqrt, as results/README.md explains.)

INSTRUCTION_COST = {np.exp: 15, np.exp2: 15, np.log: 50, np.log2: 50, np.sqrt: 15, np.sin: 70, np.cos: 70,
                    np.divide: 14, np.fmod: 30, np.floor: 10, np.ceil: 10}
INTEGER_DIVISION = 30
UNIFORM_DIVISION = 2  # by one value for all elements: a multiplication by its reciprocal
PRECISE_DIVISION = 30
FMA = 2
ERF = 60
LIBDEVICE_COST = {"sin": 70, "cos": 70, "erf": ERF, "log": 50, "exp": 15, "sqrt": 15, "rsqrt": 15, "tanh": 40,
                  "pow": 250, "fast_powf": 250}
OTHER_LIBDEVICE = 60
OUTER_PRODUCT = 5  # an element of column times row: with the addition that follows, no cheaper than tl.dot in fp32
# A FLOP of tl.dot, by where the right operand's neighbours lie in memory: (along K, along N). The tensor cores take
# those along N as they are only if they have 16 bits. fp64 is a guess.
DOT_COST = {"fp32": (2.8, 1.4), "tf32x3": (0.8, 1.1), "tf32": (0.22, 0.8), "half": (0.13, 0.13), "fp64": (2, 2)}
# No less than this where rows of the (left, right) operand are not whole multiples of 16 elements.
UNALIGNED_DOT = {"fp32": (1.7, 1.5), "tf32x3": (1.7, 3.7), "tf32": (0.65, 0.43), "half": (0.4, 0.24), "fp64": (2, 2)}
