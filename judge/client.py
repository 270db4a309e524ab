"""The scorer's side of a worker process (worker.py): orders, shared memory, the GPU lock, failures.

Orders go over a socket. Inputs and outputs lie in GPU memory that both processes see (CUDA IPC); where that is not
available, tensors travel over the socket instead. After a side-effect-free candidate a worker serves the next one
(side_effects.py): to start a CUDA process takes the driver a quarter of a second.

The GPU lock: many may share the GPU to check their candidates; who times one has it alone (exclusive). A thread holds
it through the client of its candidate. A candidate that compiles a kernel, or does not answer within HANGS seconds, is
not waited for by others: its thread releases the lock until it answers.
"""

import functools
import math
import select
import threading
import time

import torch
from torch.utils._pytree import tree_leaves

from judge.correctness import Failed
from judge.messages import BLANK, TORCH_NAMES, Child, Gone, dense, export, plan, receive, send, views

BATCH = 0.004  # seconds of work between two readings of the clock, which are good to some 5 microseconds
HANGS = 1.0  # seconds after which others no longer wait for a candidate
MODELS = 50  # that one process serves at most, one after the other
SMALLEST = 32 << 20  # bytes; from this size on PyTorch gives a tensor a cudaMalloc of its own, which is what IPC shares

# ---------------------------------------------------------------------------------------------------------------------
# Memory that several processes see


def allocate_apart(device, size) -> tuple:
    """(pool, `size` bytes in it): a memory pool of their own, because what lies beside them would be shared, too."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        return pool, torch.empty(size, dtype=torch.uint8, device=device)


@functools.cache
def cache_buffer(device) -> tuple:
    """(pool, BLANK bytes) to clear the cache with, the same for a scorer and all its workers."""
    return allocate_apart(device, BLANK)


@functools.cache
def memory_speed(device):
    """(bytes per millisecond of a copy, seconds to fill `cache_buffer`, seconds that clearing it takes undisturbed)."""
    _, cold = cache_buffer(device)
    half = cold.numel() // 2
    fill, copy = mean_seconds(lambda: cold.zero_()), mean_seconds(lambda: cold[:half].copy_(cold[half:]))
    properties = torch.cuda.get_device_properties(device)
    clock, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)  # kHz, wires
    nominal = cold.numel() / (clock * 1e3 * 2 * bits / 8) if clock and bits else fill
    return 2 * half / copy / 1e3, fill, 2 * nominal + 1e-4  # a GPU that two processes use takes milliseconds


def mean_seconds(work) -> float:
    """Seconds of one call on the GPU, the mean of ten."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


# Arenas, (pool, bytes), that no worker uses. They are kept because PyTorch never frees memory that was shared with a
# process which was then killed.
unused_arenas, arena_lock = [], threading.Lock()


def take_arena(device, size):
    """An unused arena of at least `size` bytes, or a new one."""
    size = max(size, SMALLEST)
    with arena_lock:
        for position, (_, memory) in enumerate(unused_arenas):
            if memory.numel() >= size:
                return unused_arenas.pop(position)
    if size < 1 << 30:
        size = 1 << (size - 1).bit_length()  # the next task's may fit, too
    return allocate_apart(device, size)


def slots_and_outputs(memory, places, count, slots) -> tuple:
    """The tensors that lie in an arena, both sides: (for each of `slots` sets of inputs its `count` tensors, outputs).

    places: processes.plan of all of them.
    """
    tensors = views(memory, places)
    return [tensors[i * count:(i + 1) * count] for i in range(slots)], tensors[slots * count:]


def tensors_in(inputs) -> list:
    return [x for x in inputs if isinstance(x, torch.Tensor)]


# ---------------------------------------------------------------------------------------------------------------------
# One worker


class Client:
    """One worker as the scorer sees it. Every order may raise Failed (the model did), TimeoutError, or Gone (the
    process has ended, or sent nonsense).

    role: "candidate", or "reference" for a process with fewer limits; gpu: the GPU lock, with acquire(exclusive), which
    returns the seconds waited, and release(), both for the calling thread.
    """

    def __init__(self, fork_server, settings, role, gpu):
        self.child, self.role, self.gpu = Child(fork_server, role), role, gpu
        self.device, self.timeout = torch.device(settings["device"]), settings["timeout"]
        self.deadline = None  # of the candidate as a whole; None for the reference: each order has its own
        self.exclusive = None  # how the lock is held; None: not at all
        self.compiling = self.waiting = 0.0  # seconds
        self.models = 0  # that it has had
        self.arena = self.outputs = None  # memory shared with it
        self.output_layout = None  # [(dtype, shape)] of the task's outputs, once memory is shared for that task
        self.repeat = self.empty_batch = None  # see repetitions and overhead

    # The GPU lock

    def acquire(self, exclusive=False):
        """Hold the GPU lock in this way and no other. What is waited does not count as the candidate's time."""
        if self.exclusive is exclusive:
            return
        self.release()
        waited = self.gpu.acquire(exclusive)
        self.exclusive = exclusive
        self.waiting += waited
        if self.deadline is not None:
            self.deadline += waited

    def release(self):
        self.exclusive = None
        self.gpu.release()

    def yield_lock(self):
        """Let those who want the GPU alone have it, if there are any, and share it again."""
        self.release()
        self.acquire()

    # Orders

    def order_deadline(self):
        return self.deadline or time.monotonic() + self.timeout

    def answer(self):
        # Outputs come through shared memory, else as large as they are: with one that is too large the scorer ends.
        answer = receive(self.child.sock, self.order_deadline(), 1 << 20 if self.outputs is not None else 1 << 36)
        if not isinstance(answer, dict) or any(isinstance(x, torch.Tensor) for x in tree_leaves(
                [value for name, value in answer.items() if name != "leaves"])):
            raise Gone
        if "failed" in answer:
            raise Failed(answer)
        return answer

    def order(self, order, **fields):
        """Have the worker's method of this name called; its answer, a dict."""
        self.tell({"order": order, **fields})
        return self.answer()

    def tell(self, message):
        try:
            send(self.child.sock, message)
        except OSError:
            raise Gone from None

    def shared_order(self, order, **fields):
        """An order that needs the GPU, of which this thread has a share unless others would wait in vain."""
        self.tell({"order": order, **fields})
        while True:
            if not select.select([self.child.sock], [], [], HANGS)[0]:
                self.release()
            answer = self.answer()
            if "compiling" in answer:
                self.release()
                began = time.monotonic()
                self.answer()  # it has compiled the kernel
                self.compiling += time.monotonic() - began
            self.acquire()
            if "compiling" not in answer:
                return answer
            self.tell({})

    def wake(self):
        """Wait until the process is up. Nothing of a candidate has run yet, so it has a minute more than that."""
        self.deadline = time.monotonic() + self.timeout + 60
        self.order("wake")
        self.deadline = None

    def construct(self, code, name, reference, limit=None, compile_it=False) -> dict:
        """Execute the source, and construct the model from its class `name` as the reference was constructed.

        limit: bytes of GPU memory it may take. Returns {"state": {parameter's or buffer's name: shape}}.
        """
        self.models += 1
        self.repeat = self.empty_batch = None
        return self.order("construct", code=code, name=name, arguments=reference.arguments, names=reference.names,
                          seed=reference.parameter_seed, on_device=reference.on_device, limit=limit,
                          compile_it=compile_it)

    def forget(self) -> bool:
        """Have the process forget its model. Returns whether it is as good as new for the next one."""
        if self.models >= MODELS:
            return False
        self.deadline, self.compiling, self.waiting = time.monotonic() + HANGS, 0.0, 0.0
        try:
            left = self.order("forget")
            clean = left["unchanged"] is True and left["bytes"] < SMALLEST
            return clean and left["seconds"] < self.timeout  # its limit is twice that, see processes.py
        except (Failed, Gone, OSError, KeyError, TypeError):  # TimeoutError is an OSError
            return False
        finally:
            self.deadline = None

    def close(self):
        """End the process, and only then let others use the memory that it could write to."""
        self.child.close(wait=True)
        self.return_arena()

    # Inputs and outputs

    def share(self, inputs, expected, slots):
        """Share memory for `slots` sets of inputs and one of outputs, laid out like these."""
        tensors = tensors_in(inputs)
        values = [[isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x] for x in inputs]
        places, size = plan([*tensors * slots, *expected])
        handles = self.share_arena(size) if self.device.type == "cuda" else None
        fields = {"places": places, "count": len(tensors), "slots": slots, "values": values}
        try:
            self.order("share", handles=handles, **fields)
        except Failed:
            if handles is None:
                raise
            handles = None
            self.order("share", handles=None, **fields)
        self.slots = self.outputs = None
        if handles is not None:
            self.slots, self.outputs = slots_and_outputs(self.arena[1], places, len(tensors), slots)
        self.output_layout = [(leaf.dtype, list(leaf.shape)) for leaf in expected]

    def share_arena(self, size):
        """Handles to an arena and to `cache_buffer`, for another process; None where CUDA IPC does not work."""
        self.return_arena()
        self.arena = take_arena(self.device, size)
        handles = [export(memory) for _, memory in (self.arena, cache_buffer(self.device))]
        return None if None in handles else handles

    def return_arena(self):
        if self.arena is not None:
            with arena_lock:
                unused_arenas.append(self.arena)
            self.arena = None

    def put(self, slot, inputs):
        """Write a set of inputs."""
        if self.slots is None:
            self.order("put", slot=slot, tensors=tensors_in(inputs))
        else:
            for place, tensor in zip(self.slots[slot], tensors_in(inputs), strict=True):
                place.copy_(tensor)

    def changed(self, slot, inputs) -> list:
        """Indices of inputs that are no longer what was put (unknown without shared memory: none)."""
        if self.slots is None:
            return []
        tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        differs = [(dense(x) != dense(place)).any() for (_, x), place in zip(tensors, self.slots[slot])]
        return [i for (i, _), changed in zip(tensors, torch.stack(differs).tolist() if differs else ()) if changed]

    def results(self, answer) -> list:
        """The leaves of an output: private copies of tensors, or the name of a type where one is no tensor."""
        leaves = []
        for i, entry in enumerate(answer["leaves"]):
            if "type" in entry:
                leaves.append(str(entry["type"]))
            elif self.slots is None:
                leaves.append(entry["tensor"].to(self.device))
            else:
                dtype, shape = TORCH_NAMES[entry["dtype"]], [abs(int(n)) for n in entry["shape"]]
                if math.prod(shape) >> 63:
                    raise ValueError("no tensor is so large")
                agrees = self.output_layout[i:i + 1] == [(dtype, shape)] and entry["device"] == self.device.type
                wrong = torch.empty((), dtype=dtype, device="meta").expand(shape)  # takes no memory, whatever the shape
                leaves.append(self.outputs[i].clone() if agrees else wrong)
        return leaves

    def poison(self):
        """Fill the shared outputs with NaN (an absurd number for integers): nothing there can pass for a result."""
        for out in self.outputs or ():
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype != torch.bool:
                out.fill_(torch.iinfo(out.dtype).max // 3)
        self.finish()

    def finish(self):
        """Wait until what was put is there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # Running the model

    def forward(self, slot, seed, mute=()) -> tuple:
        """(leaves, `structure`) of the output of one call that is not timed, without the kernels named in `mute`."""
        self.poison()
        answer = self.shared_order("forward", slot=slot, seed=seed, mute=list(mute))
        return self.results(answer), answer["structure"]

    def capture(self, calls) -> bool:
        """Have the calls recorded as a CUDA graph. Returns whether that worked; if not, the process may be unusable."""
        self.repeat = self.empty_batch = None
        return self.shared_order("capture", calls=calls)["captured"] is True

    def go(self, calls, seed=0, repeat=1) -> tuple:
        """Time the calls on the slots `calls`, all of them `repeat` times.

        Returns (seconds from the starting signal until the worker's that the GPU has finished, seconds that it took to
        clear the cache before that).
        """
        ready = self.order("get_ready", calls=calls, seed=seed, repeat=repeat)
        seconds = self.child.start_and_stop(self.order_deadline())
        self.answer()
        return seconds, ready["clearing"]

    def collect(self, call) -> tuple:
        """(the leaves that a timed call gave, seconds that handing them over took)."""
        self.poison()
        began = time.perf_counter()
        answer = self.order("collect", call=call)
        seconds = time.perf_counter() - began
        return self.results(answer), seconds

    def quickest(self, calls, repeat=1, times=3) -> float:
        """Seconds of the quickest of several batches."""
        return min(self.go(calls, repeat=repeat)[0] for _ in range(times))

    def overhead(self) -> float:
        """Seconds that a batch without calls takes. Asked of the reference only: a candidate might stall."""
        if self.empty_batch is None:
            self.empty_batch = self.quickest([], repeat=0, times=9)
        return self.empty_batch

    def repetitions(self, calls, overhead) -> int:
        """How many times captured calls must be repeated to take BATCH seconds, apart from `overhead`."""
        if self.repeat is None:
            self.repeat = max(1, min(256, round(BATCH / max(self.quickest(calls) - overhead, 1e-7))))
        return self.repeat
