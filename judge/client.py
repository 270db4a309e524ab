"""The scorer's side of a host process (worker.py): orders, shared memory, turns at the GPU, failures.

Orders go over a socket. Inputs and outputs lie in GPU memory that both processes see (CUDA IPC); where that is not
available, tensors travel over the socket instead. After a plain candidate a lane is kept for the next one
(side_effects.py).
"""

import contextlib
import fcntl
import functools
import math
import os
import select
import threading
import time

import torch
from torch.utils._pytree import tree_leaves

from judge.processes import ALIGN, BLANK, TORCH_NAMES, Child, Gone, dense, export, plan, receive, send, views

BATCH = 0.004  # seconds of work between two readings of the clock, which are good to some 5 microseconds
HANGS = 1.0  # seconds after which a candidate that leaves the GPU idle is no longer waited for by others
MODELS = 50  # that one process hosts at most, one after the other
SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
SMALLEST = 32 << 20  # bytes; from this size on PyTorch gives a tensor a cudaMalloc of its own, which is what IPC shares


class Failed(Exception):
    """The hosted model failed: `stage` is compile, build or forward; `line` is the candidate's line, where known."""

    def __init__(self, answer):
        super().__init__(str(answer.get("error"))[:400])
        line = answer.get("line")
        self.stage, self.line = answer.get("failed"), line if isinstance(line, int) else None


class Turn:
    """A turn at the GPU, as a context or by `take` and `give`: many can share it to check, one times alone.

    Locks of the file system, which end with their holder. Who wants the GPU alone comes first, and those who do come
    one after the other: each keeps a gate shut, from when it asks until it gives its turn, through which the others
    must pass. The others' turn comes since nobody has two turns alone without a shared one in between. Who has waited
    for `patience` seconds goes on without: then a candidate has taken a lock. From then on the process waits for a
    second at most, until the locks can be had again; what that disturbs is seen in the scatter of the times.

    While this process has the GPU alone, no other thread of it looks whether it is free: that would disturb the timing.
    """

    quiet = threading.Lock()
    hopeless = False  # has a thread of this process waited in vain?

    def __init__(self, settings, alone, patience=120.0):
        self.alone, self.patience, self.had = alone, patience, False
        self.paths = [os.path.join(settings["scratch"], name) for name in ("gpu.gate", "gpu.lock", "gpu.pen")]

    def take(self) -> float:
        """Wait for the GPU, if it is not had; returns the seconds. Raises OSError when the scratch folder is gone."""
        began = time.monotonic()
        if not self.had:
            end = began + (min(self.patience, 1.0) if Turn.hopeless else self.patience)
            with contextlib.ExitStack() as files:
                Turn.hopeless = not self.enter(*[files.enter_context(open(path, "w")) for path in self.paths], end)
                if self.alone:
                    Turn.quiet.acquire()
                self.had, self.files = True, files.pop_all()
        return time.monotonic() - began

    def enter(self, gate, lock, pen, end) -> bool:
        """Wait for the locks until `end`; returns whether they are had."""
        alone, shared = ((gate, SHARED), (lock, EXCLUSIVE), (pen, EXCLUSIVE)), ((gate, EXCLUSIVE), (lock, SHARED))
        had = all([until(end, locked, *which) for which in (alone if self.alone else shared)])
        if not self.alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        return had

    def give(self):
        """Let others have it; nothing happens if it has been given already."""
        if self.had:
            self.had = False
            self.files.close()
            if self.alone:
                Turn.quiet.release()

    def __enter__(self):
        self.take()
        return self

    def __exit__(self, *_):
        self.give()


class WritingTurn(Turn):
    """The model's turn, which the engine ends within a few tokens when it is `wanted`.

    So it need not end, and may even begin, while somebody who wants the GPU alone still waits for those who check: what
    they are at can take much longer, with the GPU idle. It holds the pen, a lock of its own, and passes no gate.
    """

    def __init__(self, settings):
        super().__init__(settings, alone=False)

    def enter(self, gate, lock, pen, end) -> bool:
        def may_begin():
            try:
                # Nobody wants the GPU alone, or somebody does who has not got it, because others check.
                return (locked(gate, EXCLUSIVE) or not locked(lock, EXCLUSIVE) and locked(lock, SHARED)) and (
                    locked(pen, SHARED))
            finally:
                for file in (gate, lock):
                    fcntl.flock(file, fcntl.LOCK_UN)

        return until(end, may_begin)

    def wanted(self) -> bool:
        """Does only this turn keep somebody from having the GPU alone? If it was begun in vain: would that do now?"""
        with open(self.paths[1], "w") as lock:
            return locked(lock, SHARED) == Turn.hopeless


def locked(file, mode) -> bool:
    """Take a lock, if it can be had now."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, mode | fcntl.LOCK_NB)
        return True
    return False


def until(end, attempt, *arguments) -> bool:
    """Try until it works or time.monotonic() passes `end`; returns whether it has."""
    while True:
        with Turn.quiet:
            if attempt(*arguments):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.0003)


def memory_apart(device, sizes) -> tuple:
    """(pool, a byte tensor of each size): with a pool of its own, because what lies beside it in memory is shared, too.
    """
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        return pool, *(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)


@functools.cache
def blank_apart(device):
    return memory_apart(device, [BLANK])


def blank(device) -> torch.Tensor:
    """BLANK bytes, the same for a scorer and all its hosts."""
    return blank_apart(device)[1]


class Lane:
    """One hosted model as the scorer sees it. Raises Failed, TimeoutError, or Gone when the process has died."""

    choosing = threading.Lock()  # among unused arenas

    def __init__(self, warm, settings, role):
        self.start, self.timeout = lambda: Child(warm, role), settings["timeout"]
        self.device, self.arena = torch.device(settings["device"]), None
        self.deadline = None  # of the candidate as a whole; None for the reference: each order has its own
        self.shared, self.alone = (Turn(settings, alone) for alone in (False, True))  # a candidate's
        self.gpu_busy = None  # with a shared turn: a function that says whether anybody computes
        self.compiling = self.waiting = 0.0  # seconds
        self.begin()

    def begin(self):
        """Start a process, of which nothing is known yet."""
        self.child, self.wanted = self.start(), None
        self.captured = False  # has the model been recorded as a CUDA graph?
        self.repeat = self.empty = None  # see repetitions and overhead
        self.told = False  # does it wait for the signal to begin what is timed?
        self.loaded, self.sound = 0, True  # how many models it has had; False: nobody knows what state it is in

    def order(self, order, **fields):
        self.call_off()
        return self.checked(self.child.ask({"order": order, **fields}, self.until()))

    def take_turn(self, alone=False):
        """Have a turn at the GPU, not one of the other kind; raises TimeoutError. Waiting is no fault of its own."""
        turn, other = (self.alone, self.shared) if alone else (self.shared, self.alone)
        other.give()
        seconds = turn.take()
        self.waiting += seconds
        self.deadline += seconds
        if time.monotonic() > self.deadline:
            raise TimeoutError

    def let_others(self):
        """Let those who want the GPU alone have it, if there are any."""
        self.shared.give()
        self.take_turn()

    def give_turn(self):
        self.shared.give()
        self.alone.give()

    def shared_order(self, order, **fields):
        """An order that needs the GPU. With a shared turn at it: if no answer comes, but the GPU is idle, the candidate
        hangs or dawdles, and the turn is given to others until it answers."""
        if not self.shared.had:
            return self.order(order, **fields)
        self.call_off()
        send(self.child.sock, {"order": order, **fields})
        while not select.select([self.child.sock], [], [], HANGS)[0]:
            if time.monotonic() > self.until() or not self.gpu_busy():
                self.shared.give()
                break
        answer = self.checked(receive(self.child.sock, self.until()))
        if "compiling" not in answer:
            self.take_turn()
        return answer

    def until(self):
        return self.deadline or time.monotonic() + self.timeout

    def checked(self, answer):
        if not isinstance(answer, dict) or any(isinstance(x, torch.Tensor) for x in tree_leaves(
                [value for name, value in answer.items() if name != "leaves"])):
            raise Gone
        if "failed" in answer:
            raise Failed(answer)
        return answer

    def wake(self):
        """Wait until the process is up. Nothing of a candidate has run yet, so it has a minute more than that."""
        self.checked(self.child.ask({"order": "wake"}, time.monotonic() + self.timeout + 60))

    def load(self, code, name, limit=None):
        """Execute the source. Needs no GPU."""
        self.loaded += 1
        self.order("load", code=code, name=name, limit=limit)

    def build(self, arguments, seed, on_device, compile_it=False):
        return self.order("build", arguments=arguments, seed=seed, on_device=on_device, compile_it=compile_it)

    def share(self, inputs, expected, slots, arenas):
        """Share memory for `slots` sets of inputs and one of outputs. Returns whether CUDA IPC is in use.

        arenas: a list of unused (pool, inputs' bytes, outputs' bytes) to take from and to give back to. They are kept
        because PyTorch never frees memory that it shared with a process which was then killed.
        """
        values = [[isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x] for x in inputs]
        places, size = plan([x for x in inputs if isinstance(x, torch.Tensor)])
        out_places, out_size = plan(expected)
        self.slots, handles = None, None
        if self.device.type == "cuda":
            sizes = [max(total, SMALLEST) for total in (max(size, ALIGN) * slots, out_size)]
            sizes = [1 << (n - 1).bit_length() if n < 1 << 30 else n for n in sizes]  # so that the next task's may fit
            self.arenas = arenas
            self.give_arena()
            with Lane.choosing:
                fit = [arena for arena in arenas if all(r.numel() >= n for r, n in zip(arena[1:], sizes))]
                if fit:
                    self.arena = fit[0]
                    arenas[:] = [arena for arena in arenas if arena is not fit[0]]
            self.arena = self.arena or memory_apart(self.device, sizes)
            raws = self.arena[1:]
            handles = [export(raw) for raw in (*raws, blank(self.device))]
            if None in handles:
                handles = None
        if handles is not None:
            step = raws[0].numel() // slots // ALIGN * ALIGN
            self.slots = [views(raws[0][i * step:(i + 1) * step], places) for i in range(slots)]
            self.outputs = views(raws[1], out_places)
        try:
            self.order("share", handles=handles, inputs=places, outputs=out_places, slots=slots, values=values)
        except Failed:
            if handles is None:
                raise
            self.slots = None
            self.order("share", handles=None, inputs=places, outputs=out_places, slots=slots, values=values)
        self.wanted = [(leaf.dtype, list(leaf.shape)) for leaf in expected]
        return self.slots is not None

    def put(self, slot, inputs):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if self.slots is None:
            self.order("put", slot=slot, tensors=tensors)
        else:
            for place, tensor in zip(self.slots[slot], tensors, strict=True):
                place.copy_(tensor)

    def changed(self, slot, inputs):
        """Indices of inputs that are no longer what was put (unknown without shared memory: none)."""
        if self.slots is None:
            return []
        tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        differ = [(dense(x) != dense(place)).any() for (_, x), place in zip(tensors, self.slots[slot])]
        return [i for (i, _), yes in zip(tensors, torch.stack(differ).tolist() if differ else ()) if yes]

    def results(self, answer):
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
                agrees = self.wanted[i:i + 1] == [(dtype, shape)] and entry["device"] == self.device.type
                wrong = torch.empty((), dtype=dtype, device="meta").expand(shape)  # takes no memory, whatever the shape
                leaves.append(self.outputs[i].clone() if agrees else wrong)
        return leaves

    def poison(self):
        """Fill the output arena with NaN (an absurd number for integers): nothing in it can pass for a result."""
        for out in self.outputs if self.slots is not None else []:
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype != torch.bool:
                out.fill_(torch.iinfo(out.dtype).max // 3)

    def finish(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forward(self, slot, seed, perturb=False, mute=()):
        """One checked call. While it compiles a kernel, a shared turn at the GPU is given to others."""
        self.poison()
        self.finish()
        polite = self.shared.had
        answer = self.shared_order("forward", slot=slot, seed=seed, perturb=perturb, mute=list(mute), polite=polite)
        while polite and "compiling" in answer:
            self.shared.give()
            began = time.monotonic()
            self.checked(receive(self.child.sock, self.until()))  # it has compiled the kernel
            self.compiling += time.monotonic() - began
            self.take_turn()
            answer = self.shared_order("go on")
        return self.results(answer)

    def tell(self, calls, seed=0, repeat=1, call=None):
        """Say what `go` will time: the calls, `repeat` times. call: whose output is handed over, see `results`."""
        self.order("tell", calls=calls, seed=seed, repeat=repeat, call=call)
        self.told = True

    def call_off(self):
        """If it waits to be timed: it need not, as what it was to be timed against has failed."""
        if self.told:
            self.told = False
            self.child.sock.send(b"-")

    def go(self):
        """(seconds from the starting signal to the host's that the GPU has finished, what it answered after that).

        Before, at a first signal, it takes the GPU over and clears the cache.
        """
        self.told = False
        self.child.start_and_stop(self.until())
        seconds = self.child.start_and_stop(self.until())
        return seconds, self.checked(receive(self.child.sock, self.until()))

    def drop(self):
        """Drop the results of timed calls; those of a graph stay in their place."""
        if not self.captured:
            self.order("drop")

    def quickest(self, calls):
        """Seconds of the quickest of three batches; their results are dropped."""
        seconds = []
        for _ in range(3):
            self.tell(calls)
            seconds.append(self.go()[0])
            self.drop()
        return min(seconds)

    def overhead(self):
        """Seconds that a batch without calls takes. Asked of the reference only: a candidate might dawdle."""
        if self.empty is None:
            seconds = []
            for _ in range(9):
                self.tell([], repeat=0)
                seconds.append(self.go()[0])
            self.empty = min(seconds)
        return self.empty

    def repetitions(self, calls, overhead):
        """How many times the captured calls must be repeated to take BATCH seconds, apart from `overhead`."""
        if self.repeat is None:
            self.repeat = max(1, min(256, round(BATCH / max(self.quickest(calls) - overhead, 1e-7))))
        return self.repeat

    def capture(self, calls):
        """Have the calls recorded as a CUDA graph. Returns whether that worked; if not, the process may be unusable."""
        self.captured = self.shared_order("capture", calls=calls)["captured"] is True
        self.repeat = self.empty = None
        return self.captured

    def collect(self, call):
        """(seconds that handing over the call's output takes, the answer); the outputs must have been poisoned."""
        began = time.perf_counter()
        answer = self.order("collect", call=call)
        return time.perf_counter() - began, answer

    def forget(self) -> bool:
        """Have the process forget its model. Returns whether it is as good as new for the next one."""
        if not self.sound or self.loaded >= MODELS:
            return False
        self.deadline, self.compiling, self.waiting, self.captured = time.monotonic() + HANGS, 0.0, 0.0, False
        try:
            left = self.order("forget")
            well = left["unchanged"] is True and left["bytes"] < SMALLEST
            return well and left["seconds"] < self.timeout  # of twice as many, see processes.py
        except (Failed, Gone, OSError, KeyError, TypeError):  # TimeoutError is an OSError
            return False
        finally:
            self.deadline = None

    def close(self):
        """End the process, and only then let others use the memory that it could write to."""
        self.child.close(wait=True)
        self.give_arena()

    def give_arena(self):
        if self.arena is not None:
            with Lane.choosing:
                self.arenas.append(self.arena)
            self.arena = None

    def restart(self):
        """Go on with a new process."""
        self.close()
        self.begin()
        self.wake()
