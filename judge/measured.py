"""The measured clock: candidates run in processes that are not trusted, and are timed from outside.

A *worker* process (worker.py) runs one model at a time, a candidate's or the reference's: both are driven in the same
way. The scorer speaks to it through a *client* (client.py): a socket for orders, and GPU memory that both can see for
inputs and outputs. `Measured` holds what a task needs; `Candidate` is the measured clock's part in the order of
judgement (judgement.py); `Timing` times a candidate against the reference and says what the times mean.

What is timed is a batch of calls on distinct inputs, recorded as a CUDA graph: the same kernels as eager PyTorch's,
back to back, without the gaps that slow launches leave between them. Before the clock starts the worker has taken the
GPU over from the other processes, which takes no constant time, has cleared its cache and is awake. (Under the standard
(KernelBench) protocol, and where a model cannot be captured, calls are timed as they run, Python included; then so are
the reference's.) What makes the time hard to forge:

    a captured graph is a fixed program: what it works on is written afterwards, and no Python of the candidate runs;
    the scorer reads its own clock: from the starting signal until the worker's that the GPU has finished;
    an output of every batch is checked, on inputs that are new. The worker is told afterwards which one. Without a
    graph all inputs are new, and handing the output over is timed, so that work left for later shows up;
    a graph repeats its calls until they can be timed well. In one batch of three a *cold iteration* comes before: the
    calls are done once, on inputs that are all new, and timed by themselves. A kernel that recognises repeated inputs,
    and skips its work, has to do it there, which shows. Several of its outputs are checked, so that it cannot do half;
    the shared memory holds inputs and outputs of this worker only: no expected value is ever in its reach.

A candidate that stalls in a check is not waited for, and may compute while another one is timed: both sides of that
one are slowed, and its verdict says `disturbed`.

Trust assumptions: the worker's own Python and CUDA runtime. A candidate that rewrites these from within (ctypes, native
threads of a C++ extension) is not stopped by this file; judge/rules.py refuses the ways there that it can see.
"""

import contextlib
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from judge.client import BATCH, Client, memory_speed
from judge.correctness import (EXTENSION, Trial, bytes_in, check_structure, compare, reject, set_roofline,
                               tolerance_of)
from judge.judgement import judge
from judge.prices import Clock
from judge.messages import BLANK
from judge.side_effects import has_extension, is_side_effect_free

BATCHES = 6  # at least, on each side: the least number for a 95 % interval of a median
COLD = 8  # cold iterations of a candidate that may recognise inputs, at least (see Timing.slow_when_cold)
CHECKED = 4  # outputs of a cold iteration that are checked, at most
SHARED_WORKERS = 6  # for side-effect-free candidates, of all tasks: enough that one is always ready to be timed

# ---------------------------------------------------------------------------------------------------------------------
# Timing two workers against each other


class Timing:
    """Batches of calls, reference and candidate in turn, each from the same state of the cache.

    clients: (reference's, candidate's); in what follows, which of them is 0 or 1
    calls: slots of the inputs; graphs: have the calls been captured? Then a batch repeats them until it takes BATCH
    patience: seconds in which the cache is cleared when nothing else uses the GPU

    seconds: for each side, of every batch the seconds of all calls once; cold: of every cold iteration; handing: that
    handing over an output took. contended: of everything timed, did clearing the cache take too long?
    """

    def __init__(self, reference, candidate, calls, graphs, patience):
        self.clients, self.calls, self.graphs, self.patience = (reference, candidate), calls, graphs, patience
        self.seconds, self.cold, self.handing, self.contended = ([], []), ([], []), ([], []), []
        self.spent = 0.0  # seconds
        self.overhead = reference.overhead()
        self.repeat = [client.repetitions(calls, self.overhead) if graphs else 1 for client in self.clients]

    def repeats(self) -> bool:
        """Are calls done more than once in a batch? If not, all its inputs must be new."""
        return max(self.repeat) > 1

    def cold_is_due(self) -> bool:
        """Does a cold iteration come before the next batch? Then, too, all its inputs must be new."""
        return self.repeats() and (len(self.seconds[1]) % 3 == 2 or self.slow_when_cold())

    def batch(self, seed, cold=False):
        """Time a batch, or a cold iteration, on both sides.

        Without graphs the first is for warming up, and does not count; a graph has been replayed to find `repeat`.
        """
        began, clearing, earlier = time.monotonic(), [0.0, 0.0], len(self.contended)
        for which in (1, 0) if earlier % 2 else (0, 1):
            repeat = 1 if cold else self.repeat[which]
            taken, clearing[which] = self.clients[which].go(self.calls, seed, repeat)
            if cold or earlier or self.graphs:
                times = self.cold if cold else self.seconds
                times[which].append(max(taken - self.overhead, 1e-7) / repeat)
        self.contended.append(clearing[0] > self.patience)  # the candidate's is not believed
        self.spent += time.monotonic() - began

    def outputs(self, call) -> list:
        """The leaves that a call gave, [the reference's, the candidate's], whose are asked for at once."""
        leaves = [None, None]
        for which in (1, 0):
            leaves[which], seconds = self.clients[which].collect(call)
            self.handing[which].append(seconds)
        return leaves

    def enough(self, measure) -> bool:
        """Have there been BATCHES of them, for `measure` seconds, or four times as long if something disturbs them?"""
        count = len(self.seconds[1])
        if count < BATCHES or count >= 300:
            return count >= 300
        if self.slow_when_cold() and len(self.cold[1]) < COLD:
            return False
        return self.spent >= measure * (4 if self.disturbed() else 1)

    def cold_excess(self, which) -> float:
        """Seconds by which a cold iteration, which finds new inputs, takes longer than one of a batch.

        The quickest counts: a disturbance makes none quicker.
        """
        return min(self.cold[which]) - typical(self.seconds[which])

    def slow_when_cold(self) -> bool:
        """Is the candidate slower on new inputs by more than a tenth, 5 microseconds and what the reference is slower?

        Both find the cache cold and the GPU idle, which takes some 20 microseconds; no more than 30 are excused. If so,
        only cold iterations count (see times): whoever recognises repeated inputs gains nothing.
        """
        if not self.cold[1]:
            return False
        excused = min(max(self.cold_excess(0), 0.0), 3e-5)
        return self.cold_excess(1) > excused + 0.1 * typical(self.seconds[1]) + 5e-6

    def memoises(self) -> bool:
        """Does the candidate recognise repeated inputs? Then it is slower on new ones by far.

        While something else uses the GPU nobody can tell.
        """
        if not self.slow_when_cold() or statistics.mean(self.contended) > 0.25:
            return False
        return self.cold_excess(1) > max(self.cold_excess(0), 0.0) + 0.25 * typical(self.seconds[1]) + 2e-5

    def computes_late(self) -> bool:
        """Did handing an output over take so much longer than the reference's that it must have been computed then?"""
        reference, candidate = map(statistics.median, self.handing)
        return candidate > 2 * reference + 0.5 * statistics.median(self.seconds[1]) / len(self.calls) + 5e-4

    def times(self) -> tuple:
        """What counts of (reference, candidate): a list of seconds of all calls once, for each."""
        return self.cold if self.slow_when_cold() else self.seconds

    def disturbed(self) -> bool:
        """Do the times scatter, or did something else use the GPU most of the time?

        An evenly busy GPU scatters them little, but clearing the cache takes long.
        """
        spreads = [(third - first) / middle for first, middle, third in map(statistics.quantiles, self.times())]
        return max(spreads) > 0.1 or statistics.mean(self.contended) > 0.25

    def summary(self):
        """(reference ms, candidate ms, of one call, lower end of the speedup's 95 % interval)."""
        reference, candidate = (typical(seconds) / len(self.calls) * 1e3 for seconds in self.times())
        ratios = sorted(a / b for a, b in zip(*self.times()))
        n = len(ratios)
        low = ratios[max(0, int(n / 2 - 0.98 * n ** 0.5))]  # order statistic: distribution-free, of their median
        return reference, candidate, min(low, reference / candidate)


def typical(seconds) -> float:
    """The lower quartile: a process that starts slows down many of a few batches, of either side, by a tenth."""
    return statistics.quantiles(seconds)[0]


# ---------------------------------------------------------------------------------------------------------------------
# One task


class Measured:
    """One task under the measured clock: its reference in a worker, and many candidates judged at a time.

    Each candidate has a thread of its own, and the side-effect-free ones share a few workers. Processes start and
    kernels are compiled while others use the GPU; candidates share it to be checked and captured; they are timed alone
    on it, one after the other. Where each candidate needs a process of its own, the driver bounds the rate: it starts
    and ends CUDA processes one after the other, a quarter of a second each.

    gpu: the GPU lock, see Client; clients: of workers without a model, as another task's `hand_on` gives them. Raises
    what a Client does if the reference fails.
    """

    def __init__(self, reference, fork_server, settings, gpu, clients=()):
        self.reference, self.settings = reference, settings
        self.new_client = lambda role: Client(fork_server, settings, role, gpu)
        self.idle = {role: [client for client in clients if client.role == role] for role in ("reference", "candidate")}
        self.cuda, self.strict = reference.device.type == "cuda", settings["protocol"] == "strict"
        self.first = reference.trial(0)
        clock = Clock()
        reference.run(self.first, around=clock)
        self.flops = clock.flops
        self.output_bytes = bytes_in(self.first.expected)
        size = bytes_in(self.first.inputs) + self.output_bytes
        self.large = size > 1 << 30  # then little else fits beside it
        self.slots = max(1 if self.large else 2, min(32, (1 << 28) // max(size, 1)))
        self.at_a_time, self.memory_limit = settings["workers"], None  # candidates; bytes of GPU memory each
        self.bandwidth, self.peak = 4e7, None  # bytes and FLOPs per millisecond; for a GPU see below
        self.floor_ms, self.patience = 0.0, 0.01
        if self.cuda:
            self.limit_memory(size)
        self.sharing = threading.Semaphore(self.shared_workers())
        self.timing = threading.Lock()  # the reference is timed against one candidate at a time
        self.calls, self.graphs = None, False  # slots of a batch's inputs, and are they captured? See calibrate
        self.references = {False: self.start_reference()}  # {as a graph?: client}

    def shared_workers(self) -> int:
        """Workers for this task's side-effect-free candidates."""
        return max(2, SHARED_WORKERS // self.settings["tasks"])

    def limit_memory(self, size):
        """Set what a candidate may allocate, so that one that hoards takes nothing from others, and how many may run.

        While parameters are perturbed there are up to six copies of them. size: bytes of inputs and outputs.
        """
        reference = self.reference
        if not self.large:
            reference.trial(1)  # kept for Candidate.time
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        reference.run(self.first)
        peak = torch.cuda.max_memory_allocated() - before
        self.memory_limit = 3 * peak + 6 * bytes_in(reference.state) + (self.slots + 2) * size + (1 << 30)
        room = torch.cuda.mem_get_info()[0] * 0.7 / self.settings["tasks"]
        self.at_a_time = max(1, min(self.at_a_time, int(room / self.memory_limit)))

    def take_client(self, role):
        """A client whose worker has no model."""
        try:
            client = self.idle[role].pop()
        except IndexError:
            client = self.new_client(role)
        client.wake()
        return client

    def start_reference(self):
        """A client whose worker has built the reference, and has inputs to warm up on."""
        reference, client = self.reference, self.take_client("reference")
        compiled = self.settings["baseline"] == "compile"
        client.timeout = self.settings["timeout"] + (300 if compiled else 0)
        client.construct(reference.job["source"], "Model", reference, compile_it=compiled)
        client.share(self.first.inputs, self.first.expected, self.slots)
        self.fill(client, range(self.slots))
        return client

    def fill(self, client, slots):
        for slot in slots:
            client.put(slot, self.reference.draw("warm", slot))
        client.finish()

    def calibrate(self):
        """Decide how many calls make a batch, and capture the reference's. Once for each task, or again: no change."""
        with self.timing:
            if self.calls is not None:
                return
            client, several = self.reference_client(False), list(range(min(self.slots, 5)))
            try:
                client.acquire()
                client.quickest(several)  # the first time takes long
                client.acquire(exclusive=True)
                if self.cuda:
                    self.measure_device()
                one = max(client.quickest(several) - client.overhead(), 1e-6) / len(several)
                calls = list(range(max(1, min(self.slots, int(BATCH / one)))))
                client.acquire()
                if self.cuda and self.strict:
                    del self.references[False]  # after an attempt that fails the process may be unusable
                    self.graphs = client.capture(calls)
                    if self.graphs:
                        self.references[True] = client
            finally:
                client.release()
            if client not in self.references.values():
                client.close()
            self.calls = calls

    def measure_device(self):
        self.bandwidth, fill, self.patience = memory_speed(self.reference.device)
        large = self.output_bytes / BLANK
        if large > 1:  # what no cache absorbs is written at memory speed
            self.floor_ms = fill * 1e3 * large * 0.6
        if torch.cuda.get_device_capability() == (9, 0):  # Hopper
            self.peak = 60e12 / 1e3

    def reference_client(self, graphs):
        """The client of the reference as it is to be timed; self.timing is held."""
        if graphs not in self.references:
            self.references[graphs] = self.start_reference()
        return self.references[graphs]

    def prepare(self, count):
        """Let processes of up to `count` candidates start: with a GPU that takes longer than a measurement."""
        while len(self.idle["candidate"]) < min(count, self.at_a_time, self.shared_workers()):
            self.idle["candidate"].append(self.new_client("candidate"))
        self.calibrate()

    def judge(self, codes):
        """Yields (index, Verdict) for every code, in the order in which they are done."""
        self.calibrate()

        def one(index):
            with self.sharing if is_side_effect_free(codes[index]) else contextlib.nullcontext():
                return index, self.judge_one(codes[index])

        pool = ThreadPoolExecutor(max(1, min(self.at_a_time, len(codes))))
        try:
            for done in as_completed([pool.submit(one, index) for index in range(len(codes))]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def judge_one(self, code, timed=True):
        """The verdict on one candidate; without `timed` only whether it is correct."""
        return judge(Candidate(self, code), self.reference, code, self.settings, timed)

    def hand_on(self) -> list:
        """End this task. Returns the clients for the next one's, whose workers have forgotten their models."""
        clients = [*self.idle["reference"], *self.idle["candidate"]]
        for client in self.references.values():
            if client.forget():
                clients.append(client)
            else:
                client.close()
        for client in clients:
            client.output_layout = None
        return clients

    def close(self):
        """End all processes."""
        for client in self.hand_on():
            client.close()


# ---------------------------------------------------------------------------------------------------------------------
# One candidate


class Candidate:
    """A candidate in a worker: the back end of the measured clock (judgement.BackEnd)."""

    def __init__(self, task, code):
        """task: its Measured."""
        self.task, self.code, self.client = task, code, None

    def start(self, code, timeout):
        self.timeout = timeout
        built = self.construct()
        self.client.acquire()
        state = self.task.reference.state
        return built["state"] == {name: list(tensor.shape) for name, tensor in state.items()}

    def construct(self):
        """Construct the model in a worker. Returns what Client.construct does."""
        task = self.task
        client = self.client = task.take_client("candidate")
        client.deadline = time.monotonic() + self.timeout
        built = client.construct(self.code, "ModelNew", task.reference, task.memory_limit)
        if client.output_layout is None:  # else it has had another candidate of this task
            client.share(task.first.inputs, task.first.expected, task.slots)
        return built

    def run(self, trial, mute=()):
        """One forward in slot 0; the first one compiles the kernels. The GPU is shared."""
        client = self.client
        client.yield_lock()
        client.put(0, trial.inputs)
        leaves, found = client.forward(0, trial.seed, mute=mute)
        check_structure(found, self.task.reference.structure)
        return leaves, client.changed(0, trial.inputs)

    def profile(self):
        """The second of three forwards by their time; [] without a GPU.

        A kernel may carry the name of a library's; it is not believed to be that library's work, nor the reverse.
        """
        if not self.task.cuda:
            return []
        client = self.client
        client.put(0, self.task.first.inputs)
        client.finish()
        client.acquire(exclusive=True)
        _, *runs = [client.order("profile") for _ in range(4)]
        client.acquire()
        answer = sorted(runs, key=lambda run: run["total"])[1]
        events = [[float(ms), str(label), bool(own)] for ms, label, own in answer["events"]]
        rest = answer["total"] - sum(ms for ms, _, _ in events)
        if has_extension(self.code) and rest > 0.002:  # its kernels run outside of every operator
            events.append([rest, EXTENSION, True])
        return events

    def time(self, verdict):
        """As a CUDA graph, if it can be captured; else, in a new process, as it runs."""
        task, client = self.task, self.client
        task.fill(client, task.calls)
        # What waits for the GPU cannot be captured, and to try takes a new process, where nvcc begins again.
        if task.graphs and not (has_extension(self.code) and "ynchronize" in self.code):
            if client.capture(task.calls) and self.run_batches(verdict, graphs=True):
                # A graph knows nothing of what the code would do later: call it again, on other inputs than at first.
                trial = task.reference.trial(1)
                if compare(trial, self.run(trial)[0], tolerance_of(verdict)):
                    reject(verdict, "its later calls give other results than its first ones")
                return
            client.release()
            client.close()  # not all of it is in the graph
            self.construct()
            self.client.acquire()
            task.fill(self.client, task.calls)
        if not self.run_batches(verdict, graphs=False):
            reject(verdict, "its timed calls give other results than its checked ones")

    def run_batches(self, verdict, graphs) -> bool:
        """Enter the times, or reject. Returns False, and enters nothing, if the results of timed calls are wrong."""
        task, client, chance = self.task, self.client, random.Random(os.urandom(8))
        client.release()
        with task.timing:
            reference = task.reference_client(graphs)
            client.deadline = time.monotonic() + self.timeout  # it may have waited for its turn
            client.acquire(exclusive=True)
            timing = Timing(reference, client, task.calls, graphs, task.patience)
            while not timing.enough(task.settings["measure"]):
                client.acquire()
                cold = timing.cold_is_due()
                checked = chance.sample(task.calls, min(len(task.calls), CHECKED))
                seed = chance.getrandbits(31)
                for slot in checked[:1] if timing.repeats() and not cold else task.calls:
                    inputs = task.reference.draw("timed", seed, slot)
                    reference.put(slot, inputs)
                    client.put(slot, inputs)
                client.finish()
                if cold and not self.batch_is_right(timing, seed, checked, verdict, cold):
                    return False
                if not self.batch_is_right(timing, seed, checked[:1], verdict):
                    return False
        self.enter_times(timing, verdict)
        return True

    def batch_is_right(self, timing, seed, checked, verdict, cold=False) -> bool:
        """Time a batch, or a cold iteration, of inputs that have been put. Is what the calls `checked` give right?"""
        self.client.acquire(exclusive=True)
        timing.batch(seed, cold)
        outputs = [timing.outputs(call) for call in checked]
        self.client.acquire()
        for expected, found in outputs:
            if compare(Trial([], 0, expected, self.task.first.allowed), found, tolerance_of(verdict)):
                return False
        return True

    def enter_times(self, timing, verdict):
        """Enter the times, unless they show that they are not to be believed."""
        task = self.task
        verdict.reference_ms, verdict.candidate_ms, low = timing.summary()
        verdict.disturbed = timing.disturbed()
        if timing.memoises():
            reject(verdict, "faster on inputs that it has seen before")
        elif not timing.graphs and timing.computes_late():
            reject(verdict, "its results are computed after the clock has stopped")
        elif verdict.candidate_ms < task.floor_ms:
            reject(verdict, "faster than the GPU can write the output")
        else:
            verdict.speedup, verdict.speedup_low = verdict.reference_ms / verdict.candidate_ms, low
            set_roofline(verdict, task.reference, task.flops, task.bandwidth, task.peak)

    def close(self, verdict):
        """End the worker, or keep it for the next candidate if this one can have left nothing in it."""
        client = self.client
        if client is None:
            return
        client.release()
        verdict.seconds.update(wait=client.waiting, compile=client.compiling)
        if is_side_effect_free(self.code) and client.forget():
            self.task.idle["candidate"].append(client)
        else:
            client.close()
