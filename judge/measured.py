"""The clock with a GPU: loads a candidate's binaries, and times its recorded program against the reference.

Both run in the judge's process on the same new inputs, the candidate first, so no answer exists while it runs. A batch
is a random choice of calls in random order, from a cold cache. Each call is a CUDA graph where both sides can be
captured, so the host's gaps do not count. Before a candidate's batch all memory that PyTorch holds and no tensor uses,
and that of its graphs, is filled with a random byte, so a kernel finds nothing of an earlier one there.
"""

import ctypes
import functools
import os
import random
import statistics
import struct
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from judge.program import Mode, bytes_in, copy_of, tensors_in
from judge.reference import state_of
from judge.trials import compare, loose
from judge.verdict import Failed, describe, set_roofline

BATCHES, MOST_BATCHES = 8, 300  # of a measurement
# Limits of the calls of which a batch makes three quarters: number, bytes of inputs and outputs, the reference's time
MOST_CALLS, INPUT_ROOM, BATCH = 16, 1 << 30, 0.0005
LARGE = 1 << 30  # bytes of a task's tensors: of timed outputs then only some values are looked at, chosen afterwards
COLD = 256 << 20  # bytes; writing and reading so many leaves nothing else in any L2 cache
PAUSE, LONG_PAUSE = 300_000, 15_000_000  # clock cycles, 0.15 and 7.5 ms: to queue graphs, and operator by operator
TRIALS = 5  # launches of each configuration of an autotuned kernel
OTHERWISE = "its timed calls give other results than its checked ones"

# ---------------------------------------------------------------------------------------------------------------------
# Binaries

INTEGERS = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}  # bytes
FLOATS = {"fp16": "<e", "bf16": "<f", "fp32": "<f", "f32": "<f", "fp64": "<d"}  # in the notation of struct
SHARED_MEMORY, PREFER_SHARED = 8, 1  # numbers in cuda.h
CLUSTER = struct.Struct("i4xIII52xi4xi60x")  # two CUlaunchAttributes: 4, a cluster's dimensions; 5, how it is spread
CONFIG = struct.Struct("7IPPI4x")  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, how many


MOST_GLOBALS = 256  # bytes of global variables in a binary; libdevice keeps names of its switches there


def bytes_of_globals(code) -> int:
    """Bytes of a binary's global variables: of its ELF sections .nv.global and .nv.global.init."""
    start, = struct.unpack_from("<Q", code, 40)
    size, count, of_names = struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, start + size * i) for i in range(count)]
    names = code[sections[of_names][4]:]
    return sum(section[5] for section in sections if names[section[0]:].startswith(b".nv.global"))


@functools.cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


def argument(kind, value) -> bytes:
    """An argument of a kernel as Triton's own launcher passes it. kind: its type in the signature."""
    if kind.startswith("*") and (value is None or isinstance(value, torch.Tensor) and value.is_cuda):
        return struct.pack("<Q", 0 if value is None else value.data_ptr())
    if kind in INTEGERS and isinstance(value, int):
        size = INTEGERS[kind]
        return (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if kind in FLOATS and isinstance(value, (int, float)):
        return struct.pack(FLOATS[kind], value)[2 if kind == "bf16" else 0:]
    raise TypeError(f"a {type(value).__name__} cannot be passed as {kind}")


class Binaries:
    """The launcher of a program's compiled kernels: the recorder sends machine code, what launches it is here."""

    def __init__(self, compiled):
        self.cuda = driver()
        self.binaries = compiled
        self.functions = {}  # {(index, number of its parameters): (module, function)}

    def __del__(self):
        for module, _ in self.functions.values():
            self.cuda.cuModuleUnload(module)

    def call(self, kernel, name, *arguments):
        """Call a function of CUDA's driver. Raises Failed with the name of its error."""
        status, text = getattr(self.cuda, name)(*arguments), ctypes.c_char_p()
        if status:
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            raise Failed(f"{kernel}: {(text.value or b'CUDA error').decode()}")

    def function(self, index, count):
        """The kernel of a binary, loaded when it is first used. count: of its parameters."""
        if (index, count) not in self.functions:
            binary = self.binaries[index]
            module = ctypes.c_void_p()
            function = ctypes.c_void_p()
            name = binary["name"]
            if bytes_of_globals(binary["code"]) > MOST_GLOBALS:  # we never reset them, so results could be kept there
                raise Failed(f"{name}: a kernel with global variables of its own is not supported")
            torch.cuda.synchronize()  # from here on this thread has a CUDA context
            self.call(name, "cuModuleLoadData", ctypes.byref(module), binary["code"])
            self.call(name, "cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.check_parameters(name, function, count)
            if binary["shared"] > 48 << 10:
                self.call(name, "cuFuncSetCacheConfig", function, PREFER_SHARED)
                self.call(name, "cuFuncSetAttribute", function, SHARED_MEMORY, binary["shared"])
            self.functions[index, count] = module, function
        return self.functions[index, count][1]

    def check_parameters(self, name, function, count):
        """Raise Failed for a kernel with more parameters than it is given, or larger ones, which it would read."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        ask = getattr(self.cuda, "cuFuncGetParamInfo", None)  # of CUDA 12.4
        for position in range(count + 1) if ask else ():
            absent = ask(function, ctypes.c_size_t(position), ctypes.byref(offset), ctypes.byref(size))
            if not absent and (size.value > 8 or position == count):
                raise Failed(f"{name}: it takes other parameters than it says")

    def launch(self, launch, arguments):
        """Queue a launch on the current stream. arguments: (type, value) of each parameter. Raises Failed."""
        binary, (x, y, z) = self.binaries[launch["compiled"]], launch["grid"]
        name, ctas = binary["name"], binary["num_ctas"]
        try:
            values = [argument(kind, value) for kind, value in arguments]
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise Failed(f"{name}: {describe(error)[0]}") from None
        if x * y * z == 0:
            return
        scratch = torch.empty(x * y * z * ctas * binary["scratch"], dtype=torch.uint8, device="cuda")
        values += [argument("*i8", scratch), argument("*i8", None)]  # Triton's own; the second is for its profiler
        memory = ctypes.create_string_buffer(b"".join(value.ljust(8, b"\0") for value in values))
        start = ctypes.addressof(memory)
        places = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        cluster = ctypes.create_string_buffer(CLUSTER.pack(4, ctas, 1, 1, 5, 1))
        config = CONFIG.pack(x * ctas, y, z, 32 * binary["num_warps"], 1, 1, binary["shared"],
                             torch.cuda.current_stream().cuda_stream, ctypes.addressof(cluster), 2 * (ctas > 1))
        self.call(name, "cuLaunchKernelEx", config, self.function(launch["compiled"], len(values)), places, None)

    def trial(self, call) -> float:
        """Milliseconds of some calls: what choosing among an autotuned kernel's configurations goes by."""
        call()
        return paused(lambda: [call() for _ in range(TRIALS)])


# ---------------------------------------------------------------------------------------------------------------------
# Times


def paused(call, pause=PAUSE) -> float:
    """Milliseconds of what call() queues. The GPU starts on it after a pause, so it does not wait for the host."""
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(pause)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Steps(Mode):
    """An observer for program.Program.run: CUDA events around each operator and each launch."""

    def __init__(self):
        super().__init__()
        self.marks = []

    def mark(self, label, own, call):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()
        out = call()
        end.record()
        self.marks.append((start, end, label, own))
        return out

    def launch(self, kernel, call):
        self.mark(kernel, True, call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if func.is_view or name.startswith(("empty", "new_empty")):  # they take no time
            return func(*args, **(kwargs or {}))
        return self.mark(name, False, lambda: func(*args, **(kwargs or {})))


def profile(run) -> list:
    """[[milliseconds, label, own]] of the steps of run(observer), without gaps of the host."""
    taken = 0.0
    for _ in range(3):  # each pauses as long as the one before it took in all
        observer, began = Steps(), time.perf_counter()
        # The first step shows what a pair of events takes by itself.
        paused(lambda: (observer.mark("nothing", False, int), run(observer)), int(2e9 * min(taken, 0.1)) + PAUSE)
        taken = time.perf_counter() - began
    events = [[start.elapsed_time(end), label, own] for start, end, label, own in observer.marks]
    return [[max(ms - events[0][0], 1e-4), label, own] for ms, label, own in events[1:]]


class Timing:
    """Seconds of one call in each batch, of the reference and of the candidate, and what they mean."""

    def __init__(self):
        self.reference = []
        self.candidate = []
        self.spent = 0.0

    def enough(self, measure) -> bool:
        """Have there been BATCHES, and `measure` seconds, or four times as long where the times scatter?"""
        count = len(self.reference)
        if count < BATCHES:
            return False
        return count >= MOST_BATCHES or self.spent >= measure * (4 if self.disturbed() else 1)

    def disturbed(self) -> bool:
        """Does the middle half of either side's times spread over more than a tenth?"""
        quartiles = map(statistics.quantiles, (self.reference, self.candidate))
        return any(third - first > 0.1 * middle for first, middle, third in quartiles)

    def enter(self, verdict):
        """Times are lower quartiles, as a disturbance only ever adds time.

        speedup_low is the lower end of the 95 % interval for the median of the batches' ratios: an order statistic.
        """
        verdict.reference_ms = statistics.quantiles(self.reference)[0] * 1e3
        verdict.candidate_ms = statistics.quantiles(self.candidate)[0] * 1e3
        verdict.speedup = verdict.reference_ms / verdict.candidate_ms
        ratios = sorted(a / b for a, b in zip(self.reference, self.candidate))
        low = ratios[max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))]
        verdict.speedup_low, verdict.disturbed = min(low, verdict.speedup), self.disturbed()


# ---------------------------------------------------------------------------------------------------------------------
# One task


@functools.cache
def capture_stream():
    """All graphs of a process are captured on it, as cuBLAS keeps memory for each stream that it has seen."""
    return torch.cuda.Stream()


def unused(graphs) -> list:
    """[(address, bytes)] of the GPU's memory that may be overwritten before a batch.

    That is what PyTorch holds and no tensor uses: it is free, or behind the end of a tensor. And it is all memory of
    these graphs, {slot: (graph, its output)}, as each replay writes what it reads.
    """
    pools = {tuple(graph.pool()) for graph, _ in graphs.values()}
    places = []
    for segment in torch.cuda.memory_snapshot():
        own = tuple(segment["segment_pool_id"]) in pools
        for block in segment["blocks"]:
            used = block["requested_size"] if block["state"].startswith("active") and not own else 0
            places.append((block["address"] + used, block["size"] - used))
    return places


def spoil(memory):
    """Fill [(address, bytes)] of a GPU's memory with a byte that no kernel can know, on the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    byte = random.SystemRandom().randrange(1, 255)
    for address, size in memory:
        if size and (status := driver().cuMemsetD8Async(ctypes.c_uint64(address), byte, ctypes.c_size_t(size), stream)):
            raise RuntimeError(f"CUDA error {status}: memory of the GPU cannot be filled")


def thinned(tensors, step) -> dict:
    """Every so many values of each of {name: tensor}."""
    return {name: tensor.flatten()[::step] for name, tensor in tensors.items()}


def differing(tensors, others) -> list:
    """Indices at which two lists of tensors differ."""
    return [i for i, (x, y) in enumerate(zip(tensors, others)) if not torch.equal(x, y)]


class Side:
    """The calls of the reference or of a candidate, one for each slot of inputs, as CUDA graphs where that works."""

    def __init__(self, call, slots, restore, compared):
        """call: from inputs to an output. slots: {number: inputs}. restore: sets the state back.

        compared: from an output, and the inputs after the call, to {name: tensor} of outputs, changed inputs and state.
        """
        self.call = call
        self.slots = slots
        self.restore = restore
        self.compared = compared
        self.graphs = {}
        self.outputs = {}

    def capture(self) -> bool:
        """Capture a graph for each slot, each in memory of its own: some are replayed, in a random order."""
        graphs = {}
        stream = capture_stream()
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                self.call(self.slots[0])  # libraries set themselves up for the stream
                for slot, inputs in self.slots.items():
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin()  # the context torch.cuda.graph collects garbage first, which takes longer
                    try:
                        graphs[slot] = graph, self.call(inputs)
                    finally:
                        graph.capture_end()
            torch.cuda.synchronize()
            self.graphs = graphs
        except Exception:  # it cannot be captured. PyTorch may leave its generator as for capturing
            fresh = torch.Generator("cuda").graphsafe_get_state()
            torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)
        return bool(self.graphs)

    def fill(self, drawn):
        """Write inputs, {slot: inputs}, and set the state back."""
        self.drawn = drawn
        self.restore()
        for slot, inputs in drawn.items():
            if slot not in self.slots:
                self.slots[slot] = copy_of(inputs)
            for place, x in zip(tensors_in(self.slots[slot]), tensors_in(inputs)):
                place.copy_(x)

    def seconds(self, calls, graphs) -> float:
        """Of these calls, one after the other, as graphs or operator by operator."""
        def queue():
            for slot in calls:
                if graphs:
                    graph, self.outputs[slot] = self.graphs[slot]
                    graph.replay()
                else:
                    self.outputs[slot] = self.call(self.slots[slot])
        return paused(queue, PAUSE if graphs else LONG_PAUSE) / 1e3

    def result(self, slot) -> list:
        """[{name: copy of a tensor} of what the last call on a slot left; indices of inputs that it changed]."""
        after = self.slots[slot]
        changed = differing(tensors_in(after), tensors_in(self.drawn[slot]))
        return [copy_of(self.compared(self.outputs[slot], after)), changed]


@functools.cache
def cold_memory():
    """What is written and read to empty the cache: one for all tasks of a process."""
    return torch.zeros(COLD // 4, dtype=torch.int32, device="cuda")


class Clock:
    """A loaded task: the reference's calls, and what a batch is."""

    @torch.no_grad()
    def __init__(self, reference, settings):
        self.reference = reference
        self.enough_seconds = settings["measure"]
        self.slots, self.perturbed = {}, True  # perturbed: are parameters, while time is taken?
        inputs = reference.inputs("timed", 0)
        model = reference.model
        with FlopCounterMode(display=False) as counter:
            size = bytes_in([inputs, reference.run(inputs, 0).leaves])
        self.flops = counter.get_total_flops()
        self.needed = size + bytes_in(reference.state(False))
        call = torch.compile(model) if settings["baseline"] == "compile" else model
        self.side = Side(lambda inputs: call(*inputs), self.slots, lambda: reference.load(self.perturbed),
                         lambda output, inputs: reference.answer(output, inputs, state_of(model), ()).leaves)
        self.side.fill({0: inputs})
        one = min(self.side.seconds([0], False) for _ in range(4))  # the first takes long
        count = min(MOST_CALLS, INPUT_ROOM // max(size, 1), round(BATCH / max(one, 1e-6)))
        self.side.fill(dict.fromkeys(range(max(count, 1)), inputs))
        self.side.capture()
        self.cold = cold_memory()
        device = torch.cuda.get_device_properties("cuda")
        clock = getattr(device, "memory_clock_rate", 0)
        bits = getattr(device, "memory_bus_width", 0)
        self.bandwidth = 0.87 * clock * 2 * bits / 8 or 3e9  # bytes a millisecond: a copy reaches seven eighths
        self.peak = 60e9 if (device.major, device.minor) == (9, 0) else None  # a Hopper's fp32 FLOPs a millisecond

    @torch.no_grad()
    def profile(self, program, inputs) -> list:
        """[[milliseconds, label, own]] of a forward. The caller has the GPU alone, here and below."""
        given = tensors_in(copy_of(inputs))
        return profile(lambda observer: program.run(given, poison="nan", observer=observer))

    @torch.no_grad()
    def time(self, program, perturbed, verdict):
        """Time batches of a recorded program and of the reference, with perturbed parameters if it can take them.

        Enters the result. Raises Failed if a timed call gives another result.
        """
        self.perturbed = perturbed
        state = self.reference.state(perturbed)
        side = Side(lambda inputs: program.run(tensors_in(inputs)), self.slots, lambda: program.load(state),
                    lambda output, inputs: self.reference.answer(output, inputs, program.current_state(), ()).leaves)
        timing = Timing()
        chance = random.Random(os.urandom(16))
        graphs = side.capture() and bool(self.side.graphs)
        limits = loose(self.reference.bounds(0, self.perturbed))
        while not timing.enough(self.enough_seconds):
            began = time.monotonic()
            key = chance.random()
            # A quarter is left out, so doing the work of other calls may be wasted.
            calls = chance.sample(list(self.slots), max(1, len(self.slots) * 3 // 4))
            drawn = {slot: self.reference.inputs((key, slot), 0) for slot in calls}
            checked = chance.choice(calls)
            spoil(unused(side.graphs))  # so that the candidate finds nothing there; the reference does not look
            candidate, (got, written) = self.batch(side, drawn, checked, graphs)
            reference, (expected, allowed) = self.batch(self.side, drawn, checked, graphs)
            step = chance.choice((1, 5, 7, 11)) if self.needed > LARGE else 1
            if set(written) - set(allowed) or compare(thinned(expected, step), thinned(got, step), limits):
                raise Failed(OTHERWISE, "rejected")
            timing.candidate.append(candidate)
            timing.reference.append(reference)
            timing.spent += time.monotonic() - began
        timing.enter(verdict)
        set_roofline(verdict, self.needed, self.flops, self.bandwidth, self.peak)

    def batch(self, side, drawn, checked, graphs):
        """(seconds of one call, result of the call that is to be checked) of one side."""
        side.fill(drawn)
        half = len(self.cold) // 2
        self.cold[:half].fill_(1)
        self.cold[half:].amax()  # what was written leaves the cache, too
        return side.seconds(list(drawn), graphs) / len(drawn), side.result(checked)
