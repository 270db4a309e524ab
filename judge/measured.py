"""The measured clock: recorded programs are timed against the reference on a GPU.

A candidate's Python never sees the GPU. Its own process, which has none, records its forward as without a GPU
(recorder.py, with inputs that have no values); a second one compiles the kernels; then a process of the scorer's
replays the program (replayer.py): to be checked, on inputs of each trial, and to be timed. `Measured` holds what a task
needs, `Candidate` is the measured clock's part in the order of judgement (judgement.py), `Timing` says what times mean.

What is timed is a batch: one forward for each of several sets of inputs, each recorded as a CUDA graph, so that kernels
run back to back. What makes the time honest:

    the program is straight-line data: no Python of the candidate decides what a timed call does, and each call does
    all steps; a batch is three quarters of the graphs, drawn anew, in a random order;
    all inputs of a batch are new, and each is used once: there is nothing to be recognised, remembered, or left for
    later, in whatever memory a kernel may find;
    before each side the cache is cleared; candidate and reference take turns on the same inputs, in one process;
    after each batch one call's outputs are checked, by the scorer, which alone works out what they should be, and
    that all inputs are as they were. The candidate runs first: what the reference then leaves in memory is of inputs
    that do not come again.

While a candidate is recorded or its kernels are compiled, others use the GPU. The replayer serves one at a time.

A CUDA extension cannot be recorded. Its candidate runs in a process of its own with the GPU (`Extension`), is checked
in the same way, and timed from outside by the scorer's clock. What it does within its process is not controlled.
"""

import contextlib
import math
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import torch
from torch.utils._pytree import tree_map_only

from judge.correctness import Trial, check_structure, compare, identical
from judge.judgement import ROOM_FOR_MISTAKES, Recorded, has_extension, judge, priced
from judge.messages import BLANK, ROOM, TORCH_NAMES, Child, attach, plan, slots_and_outputs, spare_memory
from judge.prices import bytes_in, tensors_in
from judge.recorder import CALLS, H200
from judge.verdict import EXTENSION, Failed, reject, set_roofline

BATCHES, LONG = 8, 0.25  # at least, but 5 of such that take so many seconds together
BATCH = 0.0005  # seconds of the reference's work in a batch, where there is room for so many inputs
INPUT_ROOM = 1 << 30  # bytes for the sets of inputs and outputs of a batch
MOST_CALLS = 16  # in a batch
RARE = 1e-2  # tolerance for the few values that are `spared`
OTHERWISE = "its timed calls give other results than its checked ones"


class Timing:
    """Times of batches, and what they mean. patience: seconds that clearing the cache takes when the GPU is idle.

    seconds: for reference and candidate, of one call of each batch.
    """

    def __init__(self, patience):
        self.patience, self.seconds, self.contended, self.spent = patience, ([], []), [], 0.0

    def add(self, reference, candidate, clearing, spent):
        """A batch: seconds of one call of each side, of clearing the cache, and in all."""
        self.seconds[0].append(reference)
        self.seconds[1].append(candidate)
        self.contended.append(clearing > self.patience)
        self.spent += spent

    def enough(self, measure) -> bool:
        """Have there been BATCHES, for `measure` seconds, or four times as long if something disturbs them?"""
        count = len(self.contended)
        if count < (5 if self.spent > LONG else BATCHES) or count >= 300:
            return count >= 300
        return self.spent >= measure * (4 if self.disturbed() else 1)

    def disturbed(self) -> bool:
        """Do the times scatter, or did something else use the GPU most of the time?

        An evenly busy GPU scatters them little, but clearing the cache takes long.
        """
        spreads = [(third - first) / middle for first, middle, third in map(statistics.quantiles, self.seconds)]
        return max(spreads) > 0.1 or statistics.mean(self.contended) > 0.25

    def summary(self):
        """(reference ms, candidate ms, of one call, lower end of the speedup's 95 % interval).

        The lower quartiles: a process that starts slows down many of a few batches, of either side.
        """
        reference, candidate = (statistics.quantiles(seconds)[0] * 1e3 for seconds in self.seconds)
        ratios = sorted(a / b for a, b in zip(*self.seconds))
        n = len(ratios)
        low = ratios[max(0, int(n / 2 - 0.98 * n ** 0.5))]  # order statistic: distribution-free, of their median
        return reference, candidate, min(low, reference / candidate)


# ---------------------------------------------------------------------------------------------------------------------
# A process on the GPU, as the scorer sees it


class Connection:
    """A process of the role "replayer" or "extension" (replayer.Replayer), with memory that the scorer shares with it.

    Orders may raise Failed (what it runs did), TimeoutError, or Gone. Then `usable` tells whether it can go on.
    """

    def __init__(self, fork_server, role, settings):
        self.child = Child(fork_server, role)
        self.device = torch.device(settings["device"])
        self.usable, self.slots, self.outputs, self.room = True, None, (), ROOM

    def order(self, order, deadline, **fields):
        """Have the method of this name called. Its answer, a dict."""
        self.usable = False
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what was put is there
        answer = self.child.ask({"order": order, **fields}, deadline, self.room)
        self.usable = not answer.get("broken")
        if "failed" in answer:
            raise Failed(answer)
        return answer

    def share(self, inputs, expected, slots, deadline):
        """Share memory for `slots` sets of inputs and one of outputs, laid out like these."""
        tensors = tensors_in(inputs)
        values = [[isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x] for x in inputs]
        places, size = plan([*tensors * slots, *expected])
        spare_memory()  # what the scorer has computed so far took several times as much as it keeps
        self.slots, self.outputs, self.expected = None, (), [(leaf.dtype, list(leaf.shape)) for leaf in expected]
        self.room = ROOM_FOR_MISTAKES + 2 * bytes_in(expected)
        handle = self.order("share", deadline, places=places, size=size, count=len(tensors), slots=slots,
                            values=values)["handle"]
        if handle is not None:
            self.slots, self.outputs = slots_and_outputs(attach(handle), places, len(tensors), slots)

    def put(self, slot, inputs, deadline):
        """Write a set of inputs."""
        if self.slots is None:
            self.order("put", deadline, slot=slot, tensors=tensors_in(inputs))
            return
        for place, tensor in zip(self.slots[slot], tensors_in(inputs), strict=True):
            place.copy_(tensor)

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
                agrees = self.expected[i:i + 1] == [(dtype, shape)] and entry["device"] == self.device.type
                wrong = torch.empty((), dtype=dtype, device="meta").expand(shape)  # takes no memory, whatever the shape
                leaves.append(self.outputs[i].clone() if agrees else wrong)
        for out in self.outputs:
            out.zero_()  # so that no kernel can read a correct result there
        return leaves

    def close(self):
        self.slots, self.outputs = None, ()
        self.child.close(wait=True)


# ---------------------------------------------------------------------------------------------------------------------
# One task


class Measured:
    """One task under the measured clock: the replayer with its reference, and what a batch is.

    connection: to a replayer that another task has left. Raises what a Connection does if the reference fails.
    """

    def __init__(self, reference, fork_server, settings, gpu, connection=None):
        self.reference, self.fork_server, self.settings, self.gpu = reference, fork_server, settings, gpu
        self.connection, self.turn = connection, threading.Lock()  # turn: to use the replayer
        self.cuda = reference.device.type == "cuda"
        with gpu.shared():
            self.first = reference.trial(0)
            self.flops = priced(reference).flops
            again, _ = reference.run(replace(self.first, seed=self.first.seed + 1))
            self.stochastic = compare(self.first, again, reference.tolerance) is not None
            self.constant = [isinstance(x, torch.Tensor) and identical(x, y) for x, y in
                             zip(self.first.inputs, reference.draw("timed"))]
        size = bytes_in([self.first.inputs, self.first.expected])
        self.large = 0 not in reference.kept
        if self.large:  # how the first trial's tensors are laid out is kept, not their values
            self.first = Trial(**tree_map_only(torch.Tensor, layout_of, vars(self.first)))
        self.slots = max(1 if size > 1 << 30 else 2, min(MOST_CALLS, INPUT_ROOM // max(size, 1)))
        self.bandwidth, self.peak, self.patience, self.gpu_properties = 4e7, None, 0.01, H200
        if self.cuda:
            self.describe_device()
        self.calls, self.is_ready = None, False  # the former: slots of a batch
        with self.turn:
            self.ready()

    def describe_device(self):
        """Its bandwidth and peak, in bytes and FLOPs per millisecond, and what candidates may ask of it."""
        there = torch.cuda.get_device_properties(self.reference.device)
        self.gpu_properties = {name: getattr(there, name, value) for name, value in H200.items()}
        clock, bits = getattr(there, "memory_clock_rate", 0), getattr(there, "memory_bus_width", 0)
        self.bandwidth = 0.87 * clock * 2 * bits / 8 or self.bandwidth  # kHz, wires; a copy reaches seven eighths
        self.patience = 2 * BLANK / self.bandwidth / 1e3 + 1e-4  # twice as long as it takes, and launching
        self.peak = 60e12 / 1e3 if (there.major, there.minor) == (9, 0) else None  # Hopper's

    def ready(self):
        """Have a replayer that holds the reference. self.turn is held."""
        if self.usable_connection() is None:
            self.connection, self.is_ready = Connection(self.fork_server, "replayer", self.settings), False
        if self.is_ready:
            return
        reference, compiled = self.reference, self.settings["baseline"] == "compile"
        limit = self.settings["timeout"] + 60 + 300 * compiled
        deadline = time.monotonic() + limit
        self.connection.order("construct", deadline, side="reference", code=reference.job["source"], name="Model",
                              **reference.construction(), compile_it=compiled)
        with self.gpu.shared():
            deadline = time.monotonic() + limit  # the wait for the GPU does not count
            self.share(deadline)
            fields = {"sides": ["reference"], "calls": [0], "seed": 0, "graphs": False}
            if self.calls is None:
                taken = [self.connection.order("batch", deadline, **fields)["seconds"]["reference"] for _ in range(4)]
                one = min(taken[1:])  # the first time takes long
                # Of several calls of a batch only the first has the seed.
                count = 1 if self.stochastic else round(BATCH / max(one, 1e-6))
                self.calls = list(range(max(1, min(self.slots, count))))
                if len(self.calls) < self.slots:
                    self.slots = len(self.calls)
                    self.share(deadline)
            # Not of large tasks: each graph has memory of its own. A longer pause then covers the launching.
            self.graphs = self.cuda and not self.large and self.connection.order(
                "capture", deadline, side="reference", calls=self.calls)["captured"]
        self.is_ready = True

    def share(self, deadline):
        """Share memory for `slots` sets of inputs with the replayer, and fill it."""
        first = self.first
        self.connection.share(first.inputs, first.expected, self.slots, deadline)
        for slot in range(self.slots):
            self.connection.put(slot, self.reference.draw("warm", slot), deadline)

    def new_inputs(self, seed, slot) -> list:
        """Inputs that no call has seen: the task's. Tensors that it does not draw at random are scaled."""
        inputs = self.reference.draw("timed", seed, slot)
        factor = random.Random(f"{seed} {slot}").uniform(0.8, 1.0)
        return [x * factor if constant and x.is_floating_point() else x for x, constant in zip(inputs, self.constant)]

    def judge(self, codes):
        """Yields (index, Verdict) for every code, in the order in which they are done."""
        pool = ThreadPoolExecutor(max(1, min(self.settings["workers"], len(codes))))
        try:
            jobs = {pool.submit(self.judge_one, code): index for index, code in enumerate(codes)}
            for done in as_completed(jobs):
                yield jobs[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # if one raises, this process ends

    def judge_one(self, code):
        kind = Extension if has_extension(code) else Candidate
        return judge(kind(self), self.reference, code, self.settings)

    def usable_connection(self):
        """The connection to the replayer, also for another task; None if it cannot be used: then it is closed."""
        if self.connection is not None and not self.connection.usable:
            self.connection.close()
            self.connection = None
        return self.connection


def layout_of(tensor):
    """A tensor without values, laid out like this one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# ---------------------------------------------------------------------------------------------------------------------
# One candidate


class Candidate(Recorded):
    """A candidate in the replayer: the back end of the measured clock (see judgement.py)."""

    spared = 0.01  # share of a timed call's outputs that may be wrong by RARE: more inputs have rarer values
    longest = 30.0  # seconds for all of its turn, in which others wait

    def __init__(self, task):
        super().__init__(task)
        self.connection, self.has_turn = None, False

    def start(self, code, timeout):
        self.deadline = time.monotonic() + timeout
        task = self.task
        inputs = [[str(x.dtype), list(x.shape), list(x.stride())] if isinstance(x, torch.Tensor) else x
                  for x in task.first.inputs]
        program, constants = self.record(code, CALLS * [inputs], gpu=task.gpu_properties)
        self.compile(code, program)
        self.take_turn()
        matched = self.match_parameters(program, constants)
        constants.update((number, name) for name, number in matched.items())  # the replayer has these
        self.order("load", code=code, program=program, constants=constants)
        return len(matched) == len(self.reference.state)

    def compile(self, code, program):
        """Have the kernels compiled, in a process without the GPU, into a folder where the replayer finds them."""
        with contextlib.closing(Child(self.fork_server, "compiler")) as process:
            question = {"code": code, "program": program, "known": list(self.reference.known),
                        "gpu": self.task.gpu_properties}
            self.reference.known.update(self.ask(process, question)["compiled"])

    def take_turn(self):
        """Wait for the replayer, and for a share of the GPU. That does not count as the candidate's time."""
        began, task = time.monotonic(), self.task
        task.turn.acquire()
        self.has_turn = True
        task.ready()
        self.connection = task.connection
        self.acquire(False, began)
        self.deadline = min(self.deadline, time.monotonic() + self.longest)

    def acquire(self, exclusive, began=None):
        """Hold the GPU lock in this way. began: when the wait for it began, if not now."""
        began = began or time.monotonic()
        self.task.gpu.acquire(exclusive)
        self.deadline += time.monotonic() - began

    def order(self, order, **fields):
        return self.connection.order(order, self.deadline, **fields)

    def run(self, trial, mute=()):
        self.connection.put(0, trial.inputs, self.deadline)
        answer = self.order("forward", seed=trial.seed, mute=list(mute))
        leaves = self.connection.results(answer)
        check_structure(answer["structure"], self.reference.structure)
        return leaves, answer["changed"]

    def profile(self, trial):
        self.connection.put(0, trial.inputs, self.deadline)
        self.acquire(exclusive=True)
        answer = self.order("profile")
        self.acquire(exclusive=False)  # leaving kernels out and capturing do not disturb others
        return self.events(answer)

    def events(self, answer):
        """What `profile` returns, by what the process answers."""
        return [[float(ms), str(label), bool(own)] for ms, label, own in answer["events"]]

    def time(self, verdict):
        task, chance, timing = self.task, random.Random(os.urandom(8)), Timing(self.task.patience)
        graphs = task.graphs and self.order("capture", side="candidate", calls=task.calls)["captured"]
        self.acquire(exclusive=True)
        kept = []  # what is to be compared when the GPU is no longer needed alone
        while not timing.enough(task.settings["measure"]):
            began, seed = time.monotonic(), chance.getrandbits(31)
            # In a random order, and a quarter is left out: so that no call can do another one's work.
            calls = chance.sample(task.calls, max(1, int(0.75 * len(task.calls))))
            checked, batch = chance.choice(calls), []
            for slot in task.calls:
                batch.append(task.new_inputs(seed, slot))
                self.put(slot, batch[-1])
            answer = self.batch(seed, calls, graphs)
            kept.append((Trial(batch[checked], seed), self.connection.results(self.order("collect", call=checked))))
            full = bytes_in([[trial.inputs, leaves] for trial, leaves in kept]) > INPUT_ROOM
            if any(map(self.has_changed, task.calls, batch)) or full and self.are_wrong(kept):
                return reject(verdict, OTHERWISE)
            seconds = [answer["seconds"][side] / len(calls) for side in ("reference", "candidate")]
            timing.add(*seconds, answer["clearing"], time.monotonic() - began)
        self.acquire(exclusive=False)
        if self.are_wrong(kept):
            return reject(verdict, OTHERWISE)
        verdict.reference_ms, verdict.candidate_ms, low = timing.summary()
        verdict.disturbed = timing.disturbed()
        verdict.speedup, verdict.speedup_low = verdict.reference_ms / verdict.candidate_ms, low
        set_roofline(verdict, self.reference, task.flops, task.bandwidth, task.peak)

    def are_wrong(self, kept) -> bool:
        """Is one of these outputs of timed calls wrong? They are not kept any longer."""
        tolerance = self.reference.tolerance
        while kept:
            trial, leaves = kept.pop()
            trial.expected, _ = self.reference.run(trial)
            trial.allowed = self.task.first.allowed
            if compare(trial, leaves, tolerance) and (
                    compare(trial, leaves, tolerance, self.spared) or compare(trial, leaves, max(tolerance, RARE))):
                return True
        return False

    def put(self, slot, inputs):
        self.connection.put(slot, inputs, self.deadline)

    def has_changed(self, slot, inputs) -> bool:
        """Are inputs in shared memory no longer what was put there? The reference ran on them last."""
        seen = self.connection.slots[slot] if self.connection.slots is not None else tensors_in(inputs)
        return not self.task.first.changed and not all(map(identical, seen, tensors_in(inputs)))

    def batch(self, seed, calls, graphs):
        """Time a batch of both sides; see Replayer.batch."""
        return self.order("batch", sides=["candidate", "reference"], calls=calls, seed=seed, graphs=graphs)

    def close(self):
        if self.has_turn:
            self.task.usable_connection()  # a replayer that hangs ends now
            self.task.gpu.release()
            self.task.turn.release()


class Extension(Candidate):
    """A candidate with CUDA sources: it runs in a process of its own, self.connection; the reference in self.replayer.
    """

    spared = 0.0  # its own code decides what it does now
    longest = math.inf  # it may compile in its first call

    def start(self, code, timeout):
        self.deadline, task = time.monotonic() + timeout, self.task
        self.least = {}  # seconds of the quickest order without calls, of each side
        own = Connection(self.fork_server, "extension", self.settings)
        try:
            built = own.order("construct", self.deadline, side="candidate", code=code, name="ModelNew",
                              **self.reference.construction(), compile_it=False)
            self.take_turn()
        finally:
            self.replayer, self.connection = self.connection, own
        own.share(task.first.inputs, task.first.expected, task.slots, self.deadline)
        return built["state"] == {name: list(tensor.shape) for name, tensor in self.reference.state.items()}

    def events(self, answer):
        events = [[float(ms), str(label), False] for ms, label, _ in answer["events"]]
        rest = answer["total"] - sum(ms for ms, _, _ in events)  # its kernels run outside of every operator
        return [*events, [rest, EXTENSION, True]] if rest > 0.002 else events

    def put(self, slot, inputs):
        for connection in (self.connection, self.replayer):
            connection.put(slot, inputs, self.deadline)

    def batch(self, seed, calls, graphs):
        sides = {"candidate": self.connection, "reference": self.replayer}
        return {"seconds": {side: self.from_outside(process, side, calls, graphs) for side, process in sides.items()},
                "clearing": 0.0}

    def from_outside(self, connection, side, calls, graphs) -> float:
        """Seconds of a batch's calls, each once, by the scorer's clock, less what an order without calls took at least.

        What disturbs an order makes calls look slower than they are, never faster.
        """
        def seconds(calls, **more):
            began = time.perf_counter()
            connection.order("run_now", self.deadline, side=side, calls=calls, graphs=graphs, **more)
            return time.perf_counter() - began

        seconds([], cold=True)
        self.least[side] = min(self.least.get(side, 1.0), *(seconds([]) for _ in range(5)))
        return max(seconds(calls) - self.least[side], 1e-6 * len(calls))

    def close(self):
        if self.connection is not None:
            self.connection.close()  # its process has ended when the next candidate gets the GPU
        super().close()
