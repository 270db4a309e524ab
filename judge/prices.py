"""The modelled clock's prices: what each step of a forward would take on a GPU that is not there.

One kernel takes LAUNCH_MS + max(bytes / BANDWIDTH, FLOPs / PEAK). An operator of PyTorch moves its operands and results
once, times a factor from the tables below; its FLOPs are those of torch.utils.flop_counter. What a Triton kernel moves
and computes is counted while it is interpreted (interpreter.py), with the costs of instructions below.

The device is one 256th of an H200: problems on the CPU are 256 times smaller than on the GPU (tasks.py), and a launch
keeps its full price. So launches, bytes and FLOPs keep the proportions that they have on the card. Parameters are not
smaller here, so their bytes count a 256th.

Not modelled: the cache (a launch pays for each sector once), bank conflicts, atomics on one address, layouts of tl.dot.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tasks import GPU_BATCH_FACTOR

LAUNCH_MS = 0.002  # of a kernel in a CUDA graph
BANDWIDTH = 4.2e12 / GPU_BATCH_FACTOR / 1e3  # bytes of the GPU's memory per millisecond: a copy, measured
PEAK = 60e12 / GPU_BATCH_FACTOR / 1e3  # fp32 FLOPs per millisecond, measured
L1_BANDWIDTH = 7 * BANDWIDTH  # bytes that a kernel's loads and stores ask for, found in a cache or not
PROGRAMS = 1.6e9 / GPU_BATCH_FACTOR / 1e3  # programs of a launch that begin and end per millisecond, measured
SECTOR = 5  # log2 of the bytes in which the GPU's memory is fetched
FEWEST_PROGRAMS = 4  # one program gets at most a fourth of the device

# Triton: fp32 FLOPs for each element of an operation, all others 1. A FLOP of tl.dot, by its precision
INSTRUCTION_COST = {np.exp: 15, np.exp2: 15, np.log: 50, np.log2: 50, np.sqrt: 15, np.divide: 14}
ERF_COST = 60  # and of libdevice's functions
DOT_COST = {"ieee": 2, "tf32x3": 1, "tf32": 0.5, "half": 0.13}

# PyTorch: factors by which the bytes of an operator count, all others 1
BROADCAST = 1.5  # an element-wise operator whose operands differ in shape or layout
PRODUCT = 1.3  # a matrix product; its bytes and FLOPs hardly overlap
CONVOLUTION_BYTES, CONVOLUTION_FLOPS, BIAS = 2.5, 1.5, 3  # a bias is a pass of its own over the output
NORM = 2.5  # of the two passes of a normalisation: statistics, and the result
FACTORS = {  # names of operators as a regular expression: a factor for each of its kernels
    r"sum|nansum|mean|prod|amax|amin|max|min|argmax|argmin|aminmax|any|all|var|std|var_mean|std_mean|norm"
    r"|linalg_vector_norm|count_nonzero": [1.5],
    r"native_layer_norm|cumsum|cumprod|logcumsumexp|(adaptive_)?(max|avg)_pool[123]d(_with_indices)?": [2],
    r"logsumexp": [1.5, 3, 2, 1.5],
    r"mse_loss|smooth_l1_loss|huber_loss|binary_cross_entropy|soft_margin_loss": [1.5, 0.5],
    r"binary_cross_entropy_with_logits": [1, 1, 1.5, 1.5, 0.5],
    r"constant_pad_nd": [0.5, 1],
    r"sort|argsort|msort|topk": [2, 2, 2, 2]}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor", "lift_fresh"}
WRITES = "fill|zero|copy|uniform|normal|bernoulli|random|(zeros|ones|full|rand|randn)_like|new_(zeros|ones|full)"
GATHERS = "embedding|index_select|gather|index|take"  # read as much of the table as they write
NORMS = "(native_)?(batch|group|instance)_norm|_native_batch_norm_legit.*"
COMPOSITE = "(alpha_|feature_)?dropout|scaled_dot_product_attention|layer_norm|lstm|gru|rnn_tanh|rnn_relu|ctc_loss"
# Others that read their inputs once, write their outputs once, and check their indices
ONE_PASS = (r"_?(log_|safe_)?softmax|hardswish|glu|_prelu_kernel|floor_divide|addr|nll_loss(2d)?_forward|exponential|mv"
            r"|addmv|dot|vdot|cat|stack|repeat|flip|roll|rot90|tril|triu|diag_embed|block_diag|trace|clone|_to_copy"
            r"|pixel_(un)?shuffle|im2col|col2im|(reflection|replication)_pad[123]d|native_dropout|_unsafe_view|_conj"
            r"|upsample_(nearest[123]d|linear1d|bilinear2d|trilinear3d)|index_(put|fill|add)|scatter(_add|_reduce)?")
KNOWN = re.compile("|".join([*FACTORS, *FREE, WRITES, GATHERS, NORMS, COMPOSITE, ONE_PASS]))


def operator_name(func):
    """An ATen operator's name, without its namespace, its overload, and the underscore of its in-place form."""
    return func._schema.name.split("::")[1].rstrip("_")


def is_pointwise(func):
    """Does PyTorch call an operator pointwise? (Of many in-place forms it only says so of the other form.)"""
    plain = getattr(getattr(torch.ops.aten, operator_name(func), None), func._overloadname, func)
    return torch.Tag.pointwise in {*func.tags, *plain.tags}


def refusal(func, called):
    """Why a candidate may not call an operator, or None. called: the names of what the reference calls (Clock.called).

    What the reference calls, too, costs both the same. Anything else must be known to be worth its price.
    """
    name = operator_name(func)
    public = not name.startswith("_") and "backward" not in name
    factory = not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    known = is_pointwise(func) or func.is_view or factory or func._overloadpacket in flop_registry
    if name in called or KNOWN.fullmatch(name) or public and known:
        return None
    return f"aten.{name} has no price without a GPU: it may be called only where the reference calls it"


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size_of(tensor, parameters=()):
    """Bytes of memory behind a tensor; dimensions that are expanded (stride 0) count once. parameters: see Clock."""
    lengths = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0]
    size = math.prod(lengths) * tensor.element_size()
    return size / GPU_BATCH_FACTOR if address(tensor) in parameters else size


def layout_of(tensor):
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride()) if n > 1]


def operator_kernels(func, args, kwargs, out, parameters=()):
    """[(bytes, FLOPs)] of the kernels that a GPU would run for one call of an ATen operator; none for a view."""
    name, sources, results = operator_name(func), tensors_in([args, kwargs]), tensors_in(out)
    places = {address(tensor) for tensor in sources}
    views = all(address(result) in places for result in results) and not func._schema.is_mutable
    if name in FREE or views:
        return []
    sources = sources[1:] if re.fullmatch(WRITES, name) else sources
    sizes = [size_of(source, parameters) for source in sources]
    if re.fullmatch(GATHERS, name):
        sizes[0] = min(sizes[0], size_of(results[0]))
    written = sum(size_of(result) for result in results)
    moved, elements = sum(sizes) + written, max(tensor.numel() for tensor in sources + results)
    counter = flop_registry.get(func._overloadpacket)
    if name.startswith("_scaled_dot_product"):
        counter, args, kwargs = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention], args[:3], {}
    if counter:
        flops = counter(*args, **kwargs, out_val=out) * (1 + 3 * results[0].is_complex())
        if "conv" not in name:
            return [(PRODUCT * (moved + flops / PEAK * BANDWIDTH), flops)]
        time = CONVOLUTION_BYTES * moved + CONVOLUTION_FLOPS * flops / PEAK * BANDWIDTH
        return [(time, flops)] + [(BIAS * written, 0)] * (len(sources) > 2)
    if name == "mkldnn_rnn_layer":  # a product for all inputs, then two kernels for each time step
        flops = 2 * sources[0].shape[1] * sum(weight.numel() for weight in sources[1:3])
        return [(moved, flops)] + [(sum(sizes[1:5]), flops), (0, 0)] * sources[0].shape[0]
    if re.fullmatch(NORMS, name):
        return [(NORM * sizes[0], 0), (NORM * (sizes[0] + size_of(results[0])), elements)]
    for names, factors in FACTORS.items():
        if re.fullmatch(names, name):
            return [(factor * moved, elements) for factor in factors]
    layouts = [layout_of(tensor) for tensor in sources + results]
    slow = is_pointwise(func) and any(layout != layouts[0] for layout in layouts)
    return [(moved * (BROADCAST if slow else 1), elements)]


@dataclass
class Cost:
    """What a launch of a Triton kernel did."""

    loaded: dict  # {address of a storage: a map of its sectors: which does the launch load?}
    stored: dict  # the same
    requested: int  # bytes of the sectors of every load and store by itself
    flops: float
    programs: int


def milliseconds(moved, flops=0):
    return LAUNCH_MS + max(moved / BANDWIDTH, flops / PEAK)


def launch_milliseconds(cost, parameters=()):
    """The price of one launch of a Triton kernel."""
    moved = sum(np.count_nonzero(sectors) << SECTOR for sectors in cost.stored.values())
    for place, sectors in cost.loaded.items():
        factor = GPU_BATCH_FACTOR if place in parameters else 1
        moved += (np.count_nonzero(sectors) << SECTOR) / factor
    busy = max(moved / BANDWIDTH, cost.requested / L1_BANDWIDTH, cost.flops / PEAK)
    return LAUNCH_MS + max(busy * max(1, FEWEST_PROGRAMS / max(cost.programs, 1)), cost.programs / PROGRAMS)


class Clock(TorchDispatchMode):
    """While active, prices every ATen call: `events` collects [milliseconds, label, own kernel?], `flops` the rest, and
    `called` the names of what was called. Under no_grad: it has to see what composite operators are made of.

    parameters: addresses of the storages that are as large here as on a GPU, as long as nothing is written to them.
    """

    def __init__(self, parameters=()):
        super().__init__()
        self.events, self.flops, self.called, self.parameters = [], 0, set(), set(parameters)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.called.add(operator_name(func))
        for moved, flops in operator_kernels(func, args, kwargs or {}, out, self.parameters):
            self.events.append([milliseconds(moved, flops), operator_name(func), False])
            self.flops += flops
        if func._schema.is_mutable:
            self.parameters -= {address(tensor) for tensor in tensors_in(out)}
        return out


class Prices(Clock):
    """The price of each step of a candidate's forward: an observer for program.Program.run."""

    def __init__(self, launcher, parameters=()):
        super().__init__(parameters)
        self.launcher = launcher

    def step(self, label, own, call, func=None, args=(), kwargs=None, launch=None):
        if not own:
            with self:
                return call()
        out = call()
        cost = self.launcher.counter.cost
        self.events.append([launch_milliseconds(cost, self.parameters), label, True])
        self.flops += cost.flops
        self.parameters -= set(cost.stored)
        return out
