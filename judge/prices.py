"""The modelled clock's prices: what each step of a forward would take on a GPU that is not there.

An operator of PyTorch takes LAUNCH_MS + bytes / BANDWIDTH. It moves its operands and results once, times a factor from
h200.toml; a product or convolution also takes FLOPs / PEAK, by torch.utils.flop_counter, times its factor. What a
Triton kernel moves and computes is counted while it is interpreted (interpreter.py), with the costs of instructions
from h200.toml: LAUNCH_MS + max(bytes / BANDWIDTH, FLOPs / PEAK) + FLOPs of tl.dot / PEAK, see `launch_milliseconds`.

The device is one 256th of an H200: problems on the CPU are 256 times smaller than on the GPU (tasks.py), and a launch
keeps its full price. So launches, bytes and FLOPs keep the proportions that they have on the card. Parameters are not
smaller here, so their bytes count a 256th.

Not modelled: the cache (a launch pays for each sector once), bank conflicts, atomics on one address, layouts of tl.dot.
Of PyTorch's operators: that broadcasting is slow, and the time steps of an LSTM (it is priced as one pass over its
tensors).
"""

import math
import re
import tomllib
from pathlib import Path

import torch
from torch.utils.flop_counter import flop_registry

from judge.program import Mode, address, bytes_in, copy_of, tensors_in
from judge.reference import state_of
from judge.verdict import set_roofline
from tasks import GPU_BATCH_FACTOR

LAUNCH_MS = 0.002  # of a kernel in a CUDA graph
BANDWIDTH = 4.2e12 / GPU_BATCH_FACTOR / 1e3  # bytes of the GPU's memory per millisecond: a copy, measured
PEAK = 60e12 / GPU_BATCH_FACTOR / 1e3  # fp32 FLOPs per millisecond, measured
L1_BANDWIDTH = 7 * BANDWIDTH  # bytes that a kernel's loads and stores ask for, found in a cache or not
PROGRAMS = 1.6e9 / GPU_BATCH_FACTOR / 1e3  # programs of a launch that begin and end per millisecond, measured
SECTOR = 5  # log2 of the bytes in which the GPU's memory is fetched
FEWEST_PROGRAMS = 2  # one program gets at most half of the device

TABLES = tomllib.loads(Path(__file__).with_name("h200.toml").read_text())
INSTRUCTION_COST = TABLES["instructions"]  # of Triton
ACROSS_COST = INSTRUCTION_COST["across"]
DOT_COST = TABLES["products"]
FACTORS = TABLES["factors"]  # of PyTorch's operators, whose names are regular expressions
KINDS = {kind: "|".join(names) for kind, names in TABLES["kinds"].items()}
KNOWN = re.compile("|".join([*FACTORS, *KINDS.values()]))
PRODUCT, CONVOLUTION, BIAS = 1.3, 2.8, 3  # factors, too; a convolution's bias is a pass of its own over the output


def operator_name(func):
    """An ATen operator's name, without its namespace, its overload, and the underscore of its in-place form."""
    return func._schema.name.split("::")[1].rstrip("_")


def refusal(func, called):
    """Why a candidate may not call an operator, or None. called: the names of what the reference calls (Clock.called).

    What the reference calls, too, costs both the same. Anything else must be known to be worth its price.
    """
    name = operator_name(func)
    plain = getattr(getattr(torch.ops.aten, name, None), func._overloadname, func)  # PyTorch tags few in-place forms
    pointwise = torch.Tag.pointwise in {*func.tags, *plain.tags}
    known = pointwise or func.is_view or getattr(torch.ops.aten, name, None) in flop_registry
    if name in called or KNOWN.fullmatch(name) or known and not re.match("_|.*backward", name):
        return None
    return f"aten.{name} has no price without a GPU: it may be called only where the reference calls it"


def size_of(tensor, parameters=()):
    """Bytes of memory behind a tensor; dimensions that are expanded (stride 0) count once. parameters: see Clock."""
    lengths = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0]
    return math.prod(lengths) * tensor.element_size() / (GPU_BATCH_FACTOR if address(tensor) in parameters else 1)


def operator_kernels(func, args, kwargs, out, parameters=()):
    """[(bytes, FLOPs)] of the kernels that a GPU would run for one call of an ATen operator; none for a view."""
    name = operator_name(func)
    sources = tensors_in([args, kwargs])
    results = tensors_in(out)
    views = set(map(address, results)) <= set(map(address, sources)) and not func._schema.is_mutable
    if views or re.fullmatch(KINDS["free"], name):
        return []
    sizes = [size_of(source, parameters) for source in sources]
    written = sum(size_of(result, parameters) for result in results)
    if re.fullmatch(KINDS["writes"], name):
        sizes = sizes[1:]
    elif re.fullmatch(KINDS["gathers"], name):
        sizes[0] = min(sizes[0], written)
    moved = sum(sizes) + written
    counter = flop_registry.get(getattr(torch.ops.aten, name, None))  # by name: addmm_ costs what addmm costs
    if name.startswith("_scaled_dot_product"):
        counter, args, kwargs = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention], args[:3], {}
    if counter:
        flops = counter(*args, **kwargs, out_val=out) * (1 + 3 * results[0].is_complex())
        factor = CONVOLUTION if "conv" in name else PRODUCT
        bias = [(BIAS * written, 0)] * ("conv" in name and len(sources) > 2)
        return [(factor * (moved + flops / PEAK * BANDWIDTH), flops), *bias]
    for names, factors in FACTORS.items():
        if re.fullmatch(names, name):
            return [(factor * moved, 0) for factor in factors]
    return [(moved, 0)]


def milliseconds(moved, flops=0):
    return LAUNCH_MS + max(moved / BANDWIDTH, flops / PEAK)


def launch_milliseconds(counter, parameters=()):
    """The price of the last launch that the interpreter counted (interpreter.Counts)."""
    moved = 0
    programs = max(1, counter.programs)
    for place, sectors in [*counter.touched["load"].items(), *counter.touched["store"].items()]:
        moved += (int(sectors.sum()) << SECTOR) / (GPU_BATCH_FACTOR if place in parameters else 1)
    busy = max(moved / BANDWIDTH, counter.requested / L1_BANDWIDTH, counter.flops / PEAK) + counter.products / PEAK
    return LAUNCH_MS + max(busy * max(1, FEWEST_PROGRAMS / programs), programs / PROGRAMS)


class Operators(Mode):
    """While active, prices every ATen call. `events` collects [milliseconds, label, own kernel?], `flops` the FLOPs,
    `called` the names of what was called. Under no_grad: it has to see what composite operators are made of.

    parameters: tensors in storages that are as large here as on a GPU. The result of an operator whose inputs are all
    parameters counts as a parameter; a storage that anything else is written to no longer does.
    launcher: of a candidate's kernels, where this is the observer of a program.Program.run.
    """

    def __init__(self, parameters, launcher=None):
        super().__init__()
        self.launcher = launcher
        self.events = []
        self.flops = 0
        self.called = set()
        self.parameters = set(map(address, parameters))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.called.add(operator_name(func))
        sources, results = (set(map(address, tensors_in(each))) for each in ([args, kwargs], out))
        if sources and sources <= self.parameters:
            self.parameters |= results
        else:
            self.parameters -= results
        for moved, flops in operator_kernels(func, args, kwargs or {}, out, self.parameters):
            self.events.append([milliseconds(moved, flops), operator_name(func), False])
            self.flops += flops
        return out

    def launch(self, kernel, call):
        call()
        self.parameters -= set(self.launcher.counts.touched["store"])
        self.events.append([launch_milliseconds(self.launcher.counts, self.parameters), kernel, True])


class Clock:
    """A loaded task, whose reference's forward has been priced. `called`: the operators that it calls."""

    @torch.no_grad()
    def __init__(self, reference, settings):
        inputs = copy_of(reference.example)
        reference.load(False)
        state = list(state_of(reference.model).values())
        with reference.place, Operators(state) as watch:
            outputs = reference.model(*inputs)
        self.events, self.called, self.flops = watch.events, watch.called, watch.flops
        self.needed = bytes_in([inputs, outputs]) + bytes_in(state) / GPU_BATCH_FACTOR

    @torch.no_grad()
    def profile(self, program, inputs) -> list:
        """[[milliseconds, label, own]] of the steps of a forward."""
        watch = Operators(program.kept.values(), program.launcher)
        program.run(tensors_in(copy_of(inputs)), poison="nan", observer=watch)
        self.candidate = watch.events
        return watch.events

    def time(self, program, perturbed, verdict):
        """Enter times and speedup of the program that was profiled last."""
        verdict.reference_ms = sum(ms for ms, _, _ in self.events)
        verdict.candidate_ms = sum(ms for ms, _, _ in self.candidate)
        verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        set_roofline(verdict, self.needed, self.flops, BANDWIDTH, PEAK)
