"""The measured clock: running a model in a process that is not trusted, and timing it from outside.

A *host* process (worker.py) holds one model at a time, a candidate's or the reference's: both are driven through this
same path. After a plain candidate it serves the next one, after any other it ends (side_effects.py). The scorer
speaks to it through a *lane* (client.py): a socket for orders, and GPU memory that both can see for inputs and outputs.

What is timed is a batch of calls on distinct inputs, recorded as a CUDA graph: the same kernels as eager PyTorch's,
back to back, without the gaps that a slow host leaves between launches. Before the clock starts the host has taken the
GPU over from the other processes, which takes no constant time, has cleared its cache and is awake. (The customary
protocol, and a model that cannot be captured, is timed as it runs, host and all; then so is the reference.) What makes
the time hard to forge:

    a captured graph is a fixed program: what it works on is written afterwards, and no Python of the candidate runs;
    the scorer reads its own clock: from the starting signal until the host's that the GPU has finished;
    an output of every batch is checked, on inputs that are new. Without a graph all inputs are new, the host is told
    afterwards whose output it is, and handing it over is timed, so that work left for later shows up;
    a graph repeats its calls until they can be timed well, but in one batch of three it first does them once, on inputs
    that are all new: a kernel that knows its inputs again, and skips its work, has to do it there, which shows. Several
    outputs are checked then, so that it cannot do half of it;
    the shared memory holds inputs and outputs of this host only: no expected value is ever in its reach.

A candidate that dawdles in a check is not waited for, and may compute while another one is timed: both sides of that
one are slowed, and its verdict says `disturbed`.

What it rests on: the host's own Python and CUDA runtime. A candidate that rewrites these from within (ctypes, native
threads of a C++ extension) is not stopped by this file; scorer.static_check refuses the ways there that it can see.
"""

import contextlib
import functools
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from judge.client import BATCH, Failed, Lane, Turn, blank
from judge.correctness import (Stages, Trial, Verdict, bytes_in, compare, note_comparison, reaching, set_failure,
                               set_profile, set_roofline)
from judge.modelled import Clock
from judge.processes import Gone, overwrite
from judge.side_effects import has_extension, is_plain

BATCHES = 6  # at least, on each side: the least number for a 95 % interval of a median
ONCE = 8  # first repetitions of a suspect that are timed by themselves, at most (see Timing.suspect)
CHECKED = 4  # outputs of a first repetition that are checked, at most
LANES = 6  # plain candidates in work at a time, of all tasks: enough that one is always ready to be timed


def lanes_of_a_task(settings) -> int:
    """Processes for a task's plain candidates."""
    return max(2, LANES // settings["tasks"])


# ---------------------------------------------------------------------------------------------------------------------
# Timing two lanes against each other


class Timing:
    """Batches of calls, reference and candidate in turn, each from the same state of the cache.

    seconds: for (reference, candidate), a list over batches of seconds per call; once: of seconds of first repetitions,
    timed by themselves; handing, without graphs: of seconds that handing over a result took;
    waited: for everything timed, whether clearing the cache took so long that something else must have had the GPU.
    """

    def __init__(self, reference, candidate, calls, graphs, patience):
        """graphs: have the calls been captured? Then a batch repeats them until it is long enough to be timed well.
        patience: seconds in which the cache is cleared when undisturbed.
        """
        self.lanes, self.calls, self.graphs, self.patience = (reference, candidate), calls, graphs, patience
        self.seconds, self.once, self.handing, self.waited = ([], []), ([], []), ([], []), []
        self.spent = 0.0  # seconds
        self.overhead = reference.overhead()
        self.repeat = [lane.repetitions(calls, self.overhead) if graphs else 1 for lane in self.lanes]

    def repeats(self) -> bool:
        """Are calls done more than once in a batch? If not, all its inputs must be new."""
        return max(self.repeat) > 1

    def first_apart(self) -> bool:
        """Is the next batch's first repetition to be timed by itself before it? Then, too, all inputs must be new."""
        return self.repeats() and (len(self.seconds[1]) % 3 == 2 or self.suspect())

    def tell(self, seed, call, once=False):
        """Say what the next batch is; to be done before it, without the GPU. once: its first repetition only."""
        self.single = once
        for lane, repeat in zip(self.lanes, self.repeat):
            lane.tell(self.calls, seed, 1 if once else repeat, call if self.graphs else None)

    def batch(self, call):
        """Time one batch on both; the inputs must have been put. Returns both hosts' answers with the call's output.

        Without graphs the first is for warming up, and does not count; a graph has been replayed to find `repeat`.
        """
        began, answers, earlier = time.monotonic(), [None, None], len(self.waited)
        for which in (1, 0) if earlier % 2 else (0, 1):
            seconds, answers[which] = self.lanes[which].go()
            seconds = max(seconds - self.overhead, 1e-7)
            if self.single:
                self.once[which].append(seconds)
            elif earlier or self.graphs:
                self.seconds[which].append(seconds / len(self.calls) / self.repeat[which])
        self.waited.append(answers[0]["clearing"] > self.patience)  # the candidate's is not believed
        self.spent += time.monotonic() - began
        if not self.graphs:
            for which, lane in enumerate(self.lanes):
                seconds, answers[which] = lane.collect(call)
                self.handing[which].append(seconds)
        return answers

    def enough(self, measure) -> bool:
        """Have there been BATCHES of them, for `measure` seconds, or four times as long if something disturbs them?"""
        count = len(self.seconds[1])
        if count < BATCHES or count >= 300:
            return count >= 300
        if self.suspect() and len(self.once[1]) < ONCE:
            return False
        return self.spent >= measure * (4 if self.summary()[3] else 1)

    def repetition(self, which) -> float:
        """Seconds of all calls, on inputs that have been seen."""
        return typical(self.seconds[which]) * len(self.calls)

    def slower_at_first(self, which) -> float:
        """Seconds by which the first repetition, which finds new inputs, is slower than those that follow.

        The quickest one counts: a disturbance makes none quicker.
        """
        return min(self.once[which]) - self.repetition(which)

    def suspect(self) -> bool:
        """Is the candidate slower on new inputs by more than a tenth, 5 microseconds and what the reference is slower?

        Both find the cache cold and the GPU idle, which takes some 20 microseconds; no more than 30 are excused.
        """
        if not self.once[1]:
            return False
        excused = min(max(self.slower_at_first(0), 0.0), 3e-5)
        return self.slower_at_first(1) > excused + 0.1 * self.repetition(1) + 5e-6

    def remembers(self) -> bool:
        """Does it leave work out when calls are repeated? Then it is slower at first by far.

        While something else has the GPU nobody can tell. Who is suspect but not accused gains nothing (see summary).
        """
        if not self.suspect() or self.contended():
            return False
        return self.slower_at_first(1) > max(self.slower_at_first(0), 0.0) + 0.25 * self.repetition(1) + 2e-5

    def contended(self) -> bool:
        """Did something else have the GPU most of the time?"""
        return statistics.mean(self.waited) > 0.25

    def late(self):
        """Did handing a result over take so much longer than the reference's that it must have been computed then?"""
        mine, theirs = map(statistics.median, self.handing)
        return theirs > 2 * mine + 0.5 * statistics.median(self.seconds[1]) + 5e-4

    def summary(self):
        """(reference ms, candidate ms, lower end of the speedup's 95 % interval, was the measurement disturbed).

        Of a suspect only the first repetitions count.
        """
        times = self.seconds
        if self.suspect():
            times = [[seconds / len(self.calls) for seconds in once] for once in self.once]
        reference, candidate = map(typical, times)
        ratios = sorted(a / b for a, b in zip(*times))
        n = len(ratios)
        low = ratios[max(0, int(n / 2 - 0.98 * n ** 0.5))]  # order statistic: distribution-free, of their median
        spread = max((third - first) / middle for first, middle, third in map(statistics.quantiles, times))
        # An evenly busy GPU scatters little, but waits; so do a few batches while other processes start.
        disturbed = spread > 0.1 or self.contended()
        return reference * 1e3, candidate * 1e3, low, disturbed


def typical(seconds) -> float:
    """The lower quartile: a process that starts slows down many of a few batches, of either side, by a tenth."""
    return statistics.quantiles(seconds)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Judging, in the scorer's process


@functools.cache
def memory_speed(device):
    """(bytes per millisecond of a copy, seconds to fill `blank`, seconds in which clear_cache is done undisturbed)."""
    cold = blank(device)
    half = cold.numel() // 2
    fill, copy = seconds(lambda: cold.zero_()), seconds(lambda: cold[:half].copy_(cold[half:]))
    facts = torch.cuda.get_device_properties(device)
    clock, bits = getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0)  # kHz, wires
    nominal = cold.numel() / (clock * 1e3 * 2 * bits / 8) if clock and bits else fill
    return 2 * half / copy / 1e3, fill, 2 * nominal + 1e-4  # where two processes share a GPU a turn takes ms


def seconds(work):
    """Seconds of one call on the GPU, the mean of ten."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


class Measured:
    """The scorer's part of the measured clock for one task: a reference lane, and judging many candidates at a time.

    Up to `width` candidates are in work at a time, each in a thread of its own, plain ones in a few processes.
    Processes start and kernels are compiled while others use the GPU; to be checked and recorded, and to compare what
    timed calls gave, candidates share it. Batches are timed alone on it, one candidate's of a task after the other's,
    those of several tasks in turn. What starts beside that delays some of them (see typical). Where each candidate
    needs a process of its own, the driver bounds the rate: it starts and ends CUDA processes one after the other, a
    quarter of a second each.
    """

    def __init__(self, reference, warm, settings, lanes=(), arenas=None):
        """lanes: a reference's, then candidates', started while the reference was being built, or another task's."""
        self.reference, self.warm, self.settings = reference, warm, settings
        self.lane, *self.spare = lanes or (Lane(warm, settings, "reference"),)
        self.cuda = reference.device.type == "cuda"
        self.first = reference.trial(0)
        clock = Clock()
        reference.run(self.first, around=clock)
        self.flops = clock.flops
        self.output_bytes = bytes_in(self.first.expected)
        size = bytes_in(self.first.inputs) + self.output_bytes
        self.large = size > 1 << 30  # then little else fits beside it
        self.slots = max(1 if self.large else 2, min(32, (1 << 28) // max(size, 1)))
        self.width, self.limit, self.floor_ms = settings["workers"], None, 0.0
        self.plain, self.timing = threading.Semaphore(lanes_of_a_task(settings)), threading.Lock()
        self.bandwidth, self.peak = 4e7, None  # bytes and FLOPs per millisecond; for a GPU see below
        self.patience = 0.01  # seconds for clear_cache; see memory_speed
        if self.cuda:
            if not self.large:
                reference.trial(1, perturb=False)  # kept for check_once_more
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            reference.run(self.first)
            peak = torch.cuda.max_memory_allocated() - before
            # What a candidate may allocate, so that one that hoards does not starve those beside it. For a trial with
            # perturbed parameters these exist in up to six copies (two models, the new values and what makes them).
            self.limit = 3 * peak + 6 * bytes_in(reference.state) + (self.slots + 2) * size + (1 << 30)
            self.width = max(1, min(self.width,
                                    int(torch.cuda.mem_get_info()[0] * 0.7 / settings["tasks"] / self.limit)))
            if torch.cuda.get_device_capability() == (9, 0):  # Hopper
                self.peak = 60e12 / 1e3
        self.arenas, self.calls, self.plain_lane = [] if arenas is None else arenas, None, None
        self.start_reference(self.lane)

    def hand_on(self) -> list:
        """The lanes for the next task: a reference's, then candidates', which have forgotten theirs."""
        if self.plain_lane not in (None, self.lane):
            self.plain_lane.close()
        if not self.lane.forget():
            self.lane.restart()
        for lane in self.spare:
            lane.wanted = lane.gpu_busy = None
        return [self.lane, *self.spare]

    def calibrate(self):
        """Decide how many calls make a batch, and capture the reference's. Once for each task, or again: no change."""
        if self.calls is not None:
            return
        strict = self.settings["protocol"] == "strict"
        several = list(range(min(self.slots, 5)))
        with Turn(self.settings, alone=False):
            self.lane.quickest(several)  # the first time takes long
        with Turn(self.settings, alone=True):
            if self.cuda:
                self.bandwidth, fill, self.patience = memory_speed(self.reference.device)
                large = self.output_bytes / blank(self.reference.device).numel()
                if large > 1:  # what no cache absorbs is written at memory speed
                    self.floor_ms = fill * 1e3 * large * 0.6
            one = max(self.lane.quickest(several) - self.lane.overhead(), 1e-6) / len(several)
        self.calls = list(range(max(1, min(self.slots, int(BATCH / one)))))
        # As a CUDA graph the same kernels run back to back, however slow the host is at launching them, and no Python
        # of the candidate runs between them. The customary protocol times calls as they are, with the host's share.
        with Turn(self.settings, alone=False):
            self.graphs = self.cuda and strict and self.lane.capture(self.calls)
        self.plain_lane = self.lane
        if self.graphs:
            self.plain_lane = None  # made when a candidate comes along that cannot be captured
        elif self.cuda and strict:
            self.lane.restart()
            self.start_reference(self.lane)

    def start_reference(self, lane):
        """Build the reference in a lane, and give it inputs to warm up on."""
        reference = self.reference
        lane.timeout += 300 if self.settings["baseline"] == "compile" else 0
        lane.wake()
        lane.load(reference.job["source"], "Model")
        lane.build(reference.arguments, reference.parameter_seed, reference.on_device,
                   compile_it=self.settings["baseline"] == "compile")
        lane.share(self.first.inputs, self.first.expected, self.slots, self.arenas)
        self.warm_up(lane, range(self.slots))
        return lane

    def clear_cache(self) -> bool:
        """Overwrite the L2 cache. Returns whether that took far longer than writing so much memory takes."""
        return self.cuda and overwrite(blank(self.reference.device)) > self.patience

    def judge(self, codes):
        """Yields (index, Verdict) for every code, in the order in which they are done."""
        self.calibrate()

        def one(index):
            code = codes[index]
            with contextlib.ExitStack() as stack:
                if is_plain(code):
                    stack.enter_context(self.plain)
                verdict, lane = self.guarded(code, self.prepare, stack)
                if verdict.correct:
                    began = time.monotonic()
                    with self.timing:  # the reference has one lane
                        lane.waiting += time.monotonic() - began
                        self.guarded(code, self.time, None, verdict, lane)
            return index, verdict

        pool = ThreadPoolExecutor(min(self.width, len(codes)))
        try:
            for done in as_completed([pool.submit(one, index) for index in range(len(codes))]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def start_spare(self, count):
        """Let processes of up to `count` candidates come up: with a GPU that takes longer than a measurement."""
        while len(self.spare) < min(count, self.width):
            self.spare.append(Lane(self.warm, self.settings, "candidate"))

    def guarded(self, code, work, stack, verdict=None, lane=None):
        """Run one stage of judging; whatever the candidate does to it becomes part of the verdict.

        Without a verdict and a lane both are made, and `stack`, an ExitStack, will end the candidate's process.
        """
        verdict = verdict or Verdict(clock="measured")
        patience = self.patience_for(code)
        try:
            if lane is None:
                stages = Stages(verdict)
                lane = self.take_spare() or Lane(self.warm, self.settings, "candidate")
                stack.callback(self.dismiss, lane, code)
                lane.wake()
                lane.gpu_busy = self.clear_cache  # its time shows it; that it writes costs those who check nothing
                stages.end("start")
            lane.deadline = time.monotonic() + patience
            work(code, verdict, lane)
        except Failed as error:
            set_failure(verdict, code, error.stage, error, error.line)
        except (Gone, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            why = "the process answered with nonsense"
            if isinstance(error, TimeoutError):
                why = f"no result within {patience:g} s"
            elif isinstance(error, (Gone, OSError)):
                why = "the process ended without a result (crash, exit or GPU error)"
            set_failure(verdict, code, "forward", why, None)
            if lane is not None:
                lane.sound = False
        finally:
            if lane is not None:
                lane.give_turn()
                verdict.seconds.update(compile=lane.compiling, wait=lane.waiting)
        if not verdict.correct:
            verdict.speedup = verdict.speedup_low = None
        return verdict, lane

    def take_spare(self):
        """A lane that is up, or None. If one has ended while nobody looked, that is not the next candidate's fault."""
        while True:
            try:
                lane = self.spare.pop()
            except IndexError:
                return None
            try:
                lane.wake()
                return lane
            except (Gone, OSError):
                lane.close()

    def dismiss(self, lane, code):
        """End a candidate's process, or keep it for the next one if this one cannot have left anything in it."""
        if is_plain(code) and lane.forget():
            self.spare.append(lane)
        else:
            lane.close()

    def patience_for(self, code):
        return self.settings["timeout"] + (180 if has_extension(code) else 0)  # nvcc takes its time

    def start_candidate(self, code, lane):
        reference = self.reference
        lane.load(code, "ModelNew", self.limit)
        built = lane.build(reference.arguments, reference.parameter_seed, reference.on_device)
        if lane.wanted is None:  # else it has had another candidate
            lane.share(self.first.inputs, self.first.expected, self.slots, self.arenas)
        return built

    def prepare(self, code, verdict, lane):
        """Build the candidate in its process, check and record it during a turn at the GPU that it shares."""
        stages = Stages(verdict, lane)
        built = self.start_candidate(code, lane)
        stages.end("start")
        try:
            self.check(built, verdict, lane)
            if verdict.correct and self.calls:  # else it will not be timed
                self.record(code, lane)
        finally:
            stages.end("check")

    def check(self, built, verdict, lane):
        """Try the candidate on every trial; the first call compiles its kernels. built: what Lane.build said of it."""
        reference = self.reference
        same = built["state"] == {name: list(t.shape) for name, t in reference.state.items()}
        verdict.compiled = verdict.correct = verdict.correct_loose = True
        note = "" if same else "; its parameters are not the reference's (create them in the same order and shapes)"
        for index in range(self.settings["trials"]):
            lane.let_others()
            trial = reference.trial(index, perturb=same and not built["loose"])
            lane.put(0, trial.inputs)
            leaves = lane.forward(0, trial.seed, perturb=bool(trial.state))
            if set(lane.changed(0, trial.inputs)) - set(trial.changed):
                verdict.correct, verdict.rejected = False, "changes its input tensors in place"
            if not note_comparison(verdict, trial, leaves, note) or verdict.rejected:
                return

    def record(self, code, lane):
        """Have a candidate recorded as a CUDA graph, if it can be."""
        lane.let_others()
        self.warm_up(lane, self.calls)
        # What waits for the GPU cannot be recorded, and to try takes a new process, where nvcc begins again.
        eager = has_extension(code) and "ynchronize" in code
        if self.graphs and not eager and not lane.capture(self.calls):
            self.start_again(code, lane)

    def warm_up(self, lane, slots):
        for slot in slots:
            lane.put(slot, self.reference.draw("warm", slot))
        lane.finish()

    def start_again(self, code, lane):
        """In a new process, to be timed as it is."""
        lane.give_turn()
        lane.restart()
        lane.deadline = time.monotonic() + self.patience_for(code)
        self.start_candidate(code, lane)
        lane.take_turn()
        self.warm_up(lane, self.calls)

    def check_once_more(self, verdict, lane):
        """A graph knows nothing of what the code would do later: call the code again, on other inputs than at first."""
        trial = self.reference.trial(1, perturb=False)
        lane.put(0, trial.inputs)
        leaves = lane.forward(0, trial.seed)
        if verdict.correct and compare(trial, leaves, 1e-4):
            verdict.correct, verdict.rejected = False, "its later calls give other results than its first ones"

    def own_kernels(self, code, verdict, lane):
        """Enter profile and coverage; reject a candidate without a kernel that matters."""
        lane.take_turn()
        lane.put(0, self.first.inputs)
        lane.finish()
        lane.take_turn(alone=True)
        _, *runs = [lane.order("profile") for _ in range(4)]
        lane.take_turn()
        answer = sorted(runs, key=lambda run: run["total"])[1]
        events = [[float(ms), str(label), bool(own)] for ms, label, own in answer["events"]]
        rest = answer["total"] - sum(ms for ms, _, _ in events)
        if has_extension(code) and rest > 0.002:  # its kernels run outside of every operator
            events.append([rest, "extension", True])
        # A kernel may carry the name of a library's; it is not believed to be that library's work, nor the reverse.
        own = {label for _, label, mine in events if mine}

        def still_right(muted):
            leaves = lane.forward(0, self.first.seed, mute=muted)
            return compare(self.first, leaves, 1e-4) is None

        if self.settings["require_kernel"]:
            if not own:
                verdict.correct, verdict.rejected = False, "launches no kernel of its own"
            else:
                own = ({"extension"} & own) | reaching(own - {"extension"}, still_right)
                if not own:
                    verdict.correct, verdict.rejected = False, "the results of its kernels do not reach the output"
        set_profile(verdict, events, own)

    def time(self, code, verdict, lane):
        """Time a correct candidate against the reference, checking the outputs of timed calls on the way."""
        stages = Stages(verdict, lane)
        try:
            if self.cuda:
                self.own_kernels(code, verdict, lane)
                stages.end("profile")
                if not verdict.correct:
                    return
            lane.take_turn()
            lane.put(0, self.reference.draw("warm", 0))
            if lane.captured:
                if self.run_batches(verdict, lane, self.lane):
                    self.check_once_more(verdict, lane)
                    return
                verdict.correct, verdict.rejected = True, None  # not all of it is in the graph
                self.start_again(code, lane)
            if self.plain_lane is None:
                lane.give_turn()
                self.plain_lane = self.start_reference(Lane(self.warm, self.settings, "reference"))
            lane.deadline = time.monotonic() + self.patience_for(code)
            self.run_batches(verdict, lane, self.plain_lane)
        finally:
            stages.end("time")

    def run_batches(self, verdict, lane, reference_lane):
        """Enter the times. False, and a rejection, if the results of timed calls are wrong."""
        chance, graphs = random.Random(os.urandom(8)), reference_lane is self.lane and self.graphs
        reference_lane.drop()  # the last candidate may have failed before its results were fetched
        lane.take_turn(alone=True)
        timing = Timing(reference_lane, lane, self.calls, graphs, self.patience)
        while not timing.enough(self.settings["measure"]):
            lane.take_turn()
            seed, apart = chance.getrandbits(31), timing.first_apart()
            checked = chance.sample(self.calls, min(len(self.calls), CHECKED))
            for slot in checked[:1] if timing.repeats() and not apart else self.calls:
                inputs = self.reference.draw("timed", seed, slot)
                reference_lane.put(slot, inputs)
                lane.put(slot, inputs)
            right = not apart or self.batch_is_right(timing, seed, checked, once=True)
            if not (right and self.batch_is_right(timing, seed, checked[:1])):
                verdict.correct, verdict.rejected = False, "its timed calls give other results than its checked ones"
                return False
        verdict.reference_ms, verdict.candidate_ms, low, verdict.disturbed = timing.summary()
        if timing.remembers():
            verdict.correct, verdict.rejected = False, "faster on inputs that it has seen before"
        elif not graphs and timing.late():
            verdict.correct, verdict.rejected = False, "its results are computed after the clock has stopped"
        elif verdict.candidate_ms < self.floor_ms:
            verdict.correct, verdict.rejected = False, "faster than the GPU can write the output"
        else:
            verdict.speedup = verdict.reference_ms / verdict.candidate_ms
            verdict.speedup_low = min(low, verdict.speedup)
            set_roofline(verdict, self.reference, self.flops, self.bandwidth, self.peak)
        return True

    def batch_is_right(self, timing, seed, checked, once=False) -> bool:
        """Time a batch, or its first repetition, of inputs that have been put. Is what the calls `checked` give right?
        """
        def poison():
            for lane in timing.lanes:
                lane.poison()
            lane.finish()

        def same(answers):
            expected, got = (lane.results(answer) for lane, answer in zip(timing.lanes, answers))
            return not compare(Trial([], 0, {}, expected, self.first.allowed), got, 1e-4)

        poison()
        timing.tell(seed, checked[0], once)
        lane = timing.lanes[1]
        lane.take_turn(alone=True)
        answers = timing.batch(checked[0])
        lane.take_turn()
        right = same(answers)
        for call in checked[1:]:
            poison()
            right = right and same([lane.collect(call)[1] for lane in timing.lanes])
        for lane in timing.lanes:
            lane.drop()
        return right
