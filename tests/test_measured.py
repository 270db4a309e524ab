"""The order of judgement, and the measured clock's parts: workers, the GPU lock, and how times are taken and read."""

import contextlib
import gc
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from candidates import copied, replaced, times
from judge import measured as measured_clock
from judge import client, messages, worker
from judge.correctness import Failed, Reference, Trial, Verdict
from judge.gpu_lock import GpuLock
from judge.judgement import judge
from judge.measured import Candidate, Measured, Timing
from judge.messages import Gone
from judge.side_effects import is_side_effect_free
from test_gpu_lock import Scorer

# ---------------------------------------------------------------------------------------------------------------------
# The order of judgement


class Scripted:
    """A back end whose candidate gives `factor` times the expected output, and launches the kernels `own`.

    fails: {name of a method: exception}; needs: the kernels without which the output is another one.
    """

    def __init__(self, factor=1.0, own=("k",), needs=("k",), changes=(), fails=None):
        self.factor, self.own, self.needs, self.changes, self.fails = factor, own, needs, changes, fails or {}
        self.calls = []

    def note(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def start(self, code, timeout):
        self.note("start")
        return True

    def run(self, trial, mute=()):
        self.note("run")
        return [trial.expected[0] * (2.0 if set(mute) & set(self.needs) else self.factor)], list(self.changes)

    def profile(self):
        self.note("profile")
        return [[1.0, "mm", False], *([1.0, name, True] for name in self.own)]

    def time(self, verdict):
        self.note("time")
        verdict.reference_ms, verdict.candidate_ms, verdict.speedup, verdict.speedup_low = 2.0, 1.0, 2.0, 1.9

    def close(self, verdict):
        self.calls.append("close")


CHECKED = ["start", "run", "run"]
PROFILED = [*CHECKED, "profile"]


@pytest.mark.parametrize("back_end, calls, expected", [
    (Scripted(), [*PROFILED, "run", "time"], {"correct": True, "speedup": 2.0, "coverage": 0.5}),
    (Scripted(fails={"start": Failed({"failed": "compile", "error": "no", "line": 1})}), ["start"],
     {"compiled": False, "error": "no"}),
    (Scripted(fails={"start": Failed({"failed": "build", "error": "no"})}), ["start"],
     {"compiled": True, "error": "no"}),
    (Scripted(fails={"run": TimeoutError()}), ["start", "run"], {"compiled": True, "error": "no result within 7 s"}),
    (Scripted(fails={"run": Gone()}), ["start", "run"], {"error": "ended without a result"}),
    (Scripted(fails={"time": OSError()}), [*PROFILED, "run", "time"], {"error": "ended without a result"}),
    (Scripted(fails={"run": KeyError()}), ["start", "run"], {"error": "makes no sense"}),
    (Scripted(changes=[0]), ["start", "run"], {"compiled": True, "rejected": "changes its input tensors in place"}),
    (Scripted(2.0), ["start", "run"], {"correct_loose": False, "error": "wrong values"}),
    (Scripted(1.001), [*PROFILED, "run", "time"],
     {"correct_loose": True, "error": "wrong values", "reference_ms": 2.0, "candidate_ms": 1.0}),
    (Scripted(own=()), PROFILED, {"rejected": "launches no kernel of its own"}),
    (Scripted(needs=()), [*PROFILED, "run"], {"rejected": "do not reach the output", "coverage": 0.0}),
    (Scripted(own=("k", "decoy")), [*PROFILED, "run", "run", "run", "time"],
     {"correct": True, "speedup": 2.0, "coverage": 1 / 3}),
    (Scripted(own=("extension",), needs=()), [*PROFILED, "time"], {"correct": True, "coverage": 0.5, "speedup": 2.0}),
])
def test_the_first_step_that_fails_decides(back_end, calls, expected):
    trial = Trial([], 0, [torch.ones(3)], [(1.0, 0.0)], [])
    reference = SimpleNamespace(trial=lambda index: trial)
    settings = {"timeout": 7, "trials": 2, "require_kernel": True, "clock": "measured"}
    verdict = judge(back_end, reference, "class ModelNew: pass", settings)
    assert back_end.calls == [*calls, "close"] and verdict.clock == "measured"
    expected = {"correct": False, "speedup": None, "speedup_low": 1.9 if "speedup" in expected else None} | expected
    for name, value in expected.items():
        found = getattr(verdict, name)
        assert value in found if isinstance(value, str) else found == pytest.approx(value), (name, verdict)


def test_what_is_refused_is_not_started():
    back_end = Scripted()
    verdict = judge(back_end, None, "import ctypes\nclass ModelNew: pass", {"timeout": 7, "clock": "modelled"})
    assert verdict.rejected == "imports ctypes" and verdict.clock == "modelled" and not back_end.calls


# ---------------------------------------------------------------------------------------------------------------------
# Workers, here as threads: what they do is the same, and nothing has to be started


def serve(sock, token):
    with contextlib.suppress(Gone, OSError):
        worker.Worker({"device": "cpu"}, sock, Path(tempfile.mkdtemp(dir=".")).absolute()).serve()
    sock.close()
    os.close(token)


class Child(messages.Child):
    """A worker in a thread. The roles of all of them are in `started`, a list in place of the fork server."""

    def __init__(self, started, role):
        started.append(role)
        self.sock, there = socket.socketpair()
        self.life, token = os.pipe()
        threading.Thread(target=serve, args=(there, token), daemon=True).start()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The roles of the workers."""
    for name in ("run", "_do_compile"):  # a worker watches kernels for good; afterwards the test's process does not
        monkeypatch.setattr(triton.runtime.jit.JITFunction, name, getattr(triton.runtime.jit.JITFunction, name))
    monkeypatch.chdir(tmp_path)  # the reference is written there
    monkeypatch.setattr(worker, "describe", lambda error, *_: (str(error), None))
    monkeypatch.setattr(client, "Child", Child)
    return []


HONEST = copied(times(2))
SETTINGS = {"device": "cpu", "clock": "measured", "trials": 2, "timeout": 20.0, "protocol": "strict", "shapes": 0,
            "baseline": "eager", "measure": 0.001, "workers": 3, "tasks": 1, "require_kernel": False}


def changed(statement):
    """HONEST with a statement before the last one of its forward."""
    return replaced(HONEST, ("        return", f"        {statement}\n        return"))


@pytest.fixture
def measured(started, monkeypatch):
    """measured(name=value, ...) with the settings' names: the clock of a task."""
    made = []
    monkeypatch.setattr(worker, "unchanged", lambda before: True)  # workers in one process see each other's changes

    def make(gpu=None, **settings):
        settings = SETTINGS | settings
        reference = Reference({"name": "task", "source": times(2).source, "seed": 1, "known": []}, settings)
        made.append(Measured(reference, started, settings, gpu or Scorer(GpuLock()).remote))
        return made[-1]

    make.tasks = made
    yield make
    for task in made:
        task.close()


LATER = "self.n = getattr(self, 'n', 0) + 1\n        if self.n > 4: "


def test_candidates_are_judged_each_by_what_it_does(measured):
    codes = {HONEST: None, HONEST.replace("2.0", "2.001"): "wrong values",
             changed("x.zero_()"): "wrong values", changed("raise ValueError('enough')"): "enough",
             "def x(": "does not parse", HONEST.replace("def forward", "def backward"): "forward",
             changed(LATER + "raise ValueError('late')"): "late", changed(LATER + "return x"): "timed calls"}
    task = measured()
    verdicts = dict(task.judge(list(codes)))
    for index, (code, says) in enumerate(codes.items()):
        verdict = verdicts[index]
        assert verdict.clock == "measured" and verdict.correct == (says is None), verdict
        assert says is None or says in (verdict.rejected or verdict.error), verdict
    honest = verdicts[0]
    assert honest.speedup == honest.reference_ms / honest.candidate_ms and honest.speedup_low <= honest.speedup
    assert {"start", "check", "time", "wait", "compile"} <= set(honest.seconds)
    assert verdicts[1].correct_loose and verdicts[1].reference_ms and verdicts[1].speedup is None


def test_workers_that_are_handed_on_keep_nothing_of_their_task(measured):
    task = measured()
    assert dict(task.judge([HONEST]))[0].error is None
    clients = task.hand_on()
    assert sorted(one.role for one in clients) == ["candidate", "reference"] and "candidate" not in sys.modules
    parts = weakref.ref(task), weakref.ref(task.reference)  # its trials can be gigabytes
    del task
    measured.tasks.clear()
    gc.collect()
    assert [part() for part in parts] == [None, None]
    for one in clients:
        one.close()


def test_waiting_for_the_gpu_does_not_count_against_the_time_limit(measured, started):
    gpu = Scorer(GpuLock()).remote
    task = measured(gpu=gpu, timeout=3.0, workers=1)
    task.prepare(9)
    assert started == ["reference", "candidate"]  # of which only one can be used at a time
    busy = threading.Thread(target=lambda: (gpu.acquire(True), time.sleep(4), gpu.release()))
    busy.start()
    verdict = dict(task.judge([HONEST]))[0]
    busy.join()
    assert verdict.error is None and verdict.seconds["wait"] > 3, verdict  # it may be rejected on a busy machine


def test_while_a_kernel_is_compiled_others_have_the_gpu(measured, monkeypatch):
    """The worker announces it in a check, and goes on when the GPU may be used again."""
    compiling, scorer = [], Scorer(GpuLock())

    def compile_kernel(*_):
        end = time.monotonic() + 5
        while False in scorer.lock.holders.values() and time.monotonic() < end:  # the client needs a moment
            time.sleep(0.001)
        compiling.append(dict(scorer.lock.holders))
        return SimpleNamespace(run=None)

    monkeypatch.setattr(worker.jit.JITFunction, "_do_compile", compile_kernel)
    kernel = changed("torch.compile_now()")
    monkeypatch.setattr(torch, "compile_now", lambda: worker.jit.JITFunction._do_compile(None), raising=False)
    verdict = dict(measured(gpu=scorer.remote).judge([kernel]))[0]
    assert verdict.error is None and verdict.seconds["compile"] > 0, verdict
    assert compiling[0] == {}  # in the check, with the lock released; not in timed calls
    assert True in compiling[-1].values()


def test_no_candidate_finds_its_inputs_as_another_has_left_them(tmp_path, started, monkeypatch):
    """In a worker that they share, over memory that lives as long as that: on a GPU by CUDA IPC, here as it is."""
    monkeypatch.setattr(worker, "attach", lambda memory: memory)
    one = worker.Worker({"device": "cpu"}, None, tmp_path)
    x, sizes = torch.arange(6.0).view(2, 3), [2.0]
    places, size = messages.plan([x, x])  # the input and the output
    arena = torch.zeros(size, dtype=torch.uint8)
    code = ("import torch\nimport torch.nn as nn\nTABLE = torch.ones(3)\nclass ModelNew(nn.Module):\n"
            "    def forward(self, x, sizes):\n        y = x * sizes[0] * TABLE\n        CHANGE\n        return y\n")
    one.share([arena, torch.zeros(1)], places, 1, 1, [[True, None], [False, sizes]])
    for change in ("pass", "x.t_()", "x.unsqueeze_(0)", "x.resize_(1)", "x.requires_grad_()", "sizes[0] = 0.0",
                   "sizes.append(1)", "pass"):
        assert is_side_effect_free(code.replace("CHANGE", change))
        one.construct(code.replace("CHANGE", change), "ModelNew", [], None, 0, False, None, False)
        table = weakref.ref(sys.modules["candidate"].TABLE)
        given, result = messages.views(arena, places)
        given.copy_(x)
        one.forward(0, 0, ())
        assert torch.equal(result, 2 * x), change
        assert one.forget()["unchanged"] and table() is None, change


# ---------------------------------------------------------------------------------------------------------------------
# Taking times, and reading them


class Clocked:
    """A client whose model takes `call` seconds a call, and whose worker takes `nothing` for a batch without calls.

    A cold iteration takes it `first` seconds more; `pause` to be timed, `clearing` to clear the cache. Its call on slot
    i gives twice what was put there; in a cold iteration only the calls `does`. `now` is the time without real clocks.
    """

    now = 0.0

    def __init__(self, call, nothing=0.0, pause=0.0, clearing=0.0, first=0.0, does=range(4)):
        self.call, self.nothing, self.pause, self.clearing, self.first = call, nothing, pause, clearing, first
        self.does, self.slots, self.out, self.puts = does, dict.fromkeys(range(4), torch.zeros(3)), {}, []

    def go(self, calls, seed=0, repeat=1):
        Clocked.now += self.pause
        self.out |= {i: (2 if repeat > 1 or i in self.does else 0) * self.slots[i] for i in calls}
        return self.nothing + self.call * len(calls) * repeat + (self.first if calls else 0.0), self.clearing

    def overhead(self):
        return self.nothing

    def repetitions(self, calls, overhead):
        return max(1, round(0.004 / (self.call * len(calls))))

    def put(self, slot, inputs):
        self.slots[slot] = inputs[0]
        self.puts.append(slot)

    def collect(self, call):
        return [self.out[call]], 0.0

    def acquire(self, exclusive=False): ...

    release = finish = acquire


def take_batches(timing, measure=0.0):
    """Time batches until they are enough, as Candidate.run_batches does; yields each one's number before it."""
    for batch in range(400):
        if timing.enough(measure):
            return
        yield batch
        for cold in (True, False) if timing.cold_is_due() else (False,):
            timing.batch(seed=0, cold=cold)


def timing_of(reference, candidate):
    return Timing(reference, candidate, [0, 1], True, patience=0.01)


def test_a_candidate_that_stalls_when_there_is_nothing_to_do_gains_nothing():
    """Only the reference is asked what a batch without calls takes: that is subtracted from both sides' times."""
    timing = timing_of(Clocked(1e-4, 3e-5), Clocked(5e-5, 2e-3, clearing=1.0))
    for _ in range(10):
        timing.batch(seed=0)
    reference, candidate, low = timing.summary()
    assert reference == pytest.approx(0.1, rel=1e-3) and len(timing.seconds[1]) == 10
    assert candidate > 0.05 and low < 2 and not timing.disturbed()


@pytest.mark.parametrize("slow, least, most, disturbed", [
    (lambda batch: False, 6, 10, False),
    (lambda batch: batch in (1, 2, 4, 5), 6, 40, False),
    (lambda batch: batch % 2, 9, 50, True),
])
def test_what_is_disturbed_is_timed_for_longer(slow, least, most, disturbed, monkeypatch):
    """slow(batch): is the candidate slowed down in this batch?"""
    monkeypatch.setattr(measured_clock, "time", SimpleNamespace(monotonic=lambda: Clocked.now))
    candidate = Clocked(5e-5, pause=0.002)
    timing = timing_of(Clocked(1e-4, pause=0.002), candidate)
    for batch in take_batches(timing, measure=0.03):
        candidate.call = 1e-4 if slow(batch) else 5e-5
    assert least <= batch + 1 <= most and timing.disturbed() == disturbed
    assert disturbed or timing.summary()[1] == pytest.approx(0.05)


@pytest.mark.parametrize("clearing, disturbed", [(0.005, False), (0.02, True)])
def test_who_needs_long_to_clear_the_cache_is_not_alone(clearing, disturbed):
    timing = timing_of(Clocked(1e-4, clearing=clearing), Clocked(5e-5, clearing=9.0))
    for _ in range(7):
        timing.batch(seed=0)
    assert timing.disturbed() == disturbed


@pytest.mark.parametrize("reference, candidate, clearing, slow, memoises", [
    (0.0, 0.0, 0.0, False, False),
    (1e-3, 1e-5, 0.0, False, False),
    (1e-4, 1e-4, 0.0, True, False),  # the cache is cold, on both sides
    (0.0, 3e-4, 0.0, True, True),
    (1e-3, 3e-4, 0.0, True, False),  # another process has the GPU whenever it has been idle
    (1e-3, 2e-3, 0.0, True, True),
    (0.0, 3e-4, 0.02, True, False),  # something else has the GPU: nobody can tell
])
def test_who_does_less_when_a_batch_is_repeated_is_found(reference, candidate, clearing, slow, memoises):
    """As a kernel does that recognises repeated inputs: it has to work the first time. It gains nothing at least."""
    timing = timing_of(Clocked(1e-4, 3e-5, first=reference, clearing=clearing), Clocked(5e-5, 3e-5, first=candidate))
    assert min(timing.repeat) > 1
    batches = list(take_batches(timing))
    assert (timing.slow_when_cold(), timing.memoises()) == (slow, memoises)
    assert len(timing.seconds[0]) == len(timing.seconds[1]) == len(batches) == (10 if slow else 6)
    assert len(timing.cold[0]) == len(timing.cold[1]) == (8 if slow else 2)
    counts = candidate if slow else candidate / timing.repeat[1]  # of two calls
    assert timing.summary()[1] == pytest.approx((5e-5 + counts / 2) * 1e3, rel=1e-3)


@pytest.mark.parametrize("disturbed, until, accused, batches", [
    (1, 5, range(3, 6), 6),  # the candidate: three cold iterations are slow, the fourth is not, and nothing is held
    (0, 4, range(5, 10), 10),  # the reference, which excuses nothing once it is quick again
])
def test_who_is_disturbed_for_a_while_is_neither_accused_nor_excused(disturbed, until, accused, batches):
    clients = Clocked(1e-4), Clocked(5e-5, first=3e-4)
    timing = timing_of(*clients)
    for batch in take_batches(timing):
        assert timing.memoises() == (batch in accused), batch
        clients[disturbed].first = 1e-3 if batch < until else 0.0
    assert batch + 1 == batches and timing.slow_when_cold() == timing.memoises() == (disturbed == 0)


def timed(reference, candidate):
    """The verdict after run_batches, and whether the timed calls were right."""
    one = Trial([torch.ones(3)], 0, [torch.ones(3)], [(1.0, 0.0)])
    task = SimpleNamespace(
        calls=list(range(4)), patience=0.01, settings={"measure": 0, "timeout": 9}, floor_ms=0, flops=0, bandwidth=1,
        peak=1, first=one, timing=threading.Lock(), reference_client=lambda graphs: reference,
        reference=SimpleNamespace(state={}, trial=lambda index: one, draw=lambda *key: [1.0 + torch.rand(
            3, generator=torch.Generator().manual_seed(hash(key) % 1000))]))
    back_end, verdict = Candidate(task, ""), Verdict(correct=True)
    back_end.client, back_end.timeout = candidate, 9
    return verdict, back_end.run_batches(verdict, graphs=True)


@pytest.mark.parametrize("does", [range(4), {0, 1, 2}, {3}])
def test_a_cold_iteration_that_leaves_calls_to_the_next_one_is_noticed(does):
    """One call's result is checked in every batch, but several of a cold iteration: up to four calls, all of them."""
    for _ in range(50):
        verdict, right = timed(Clocked(1e-4), Clocked(5e-5, does=does))
        assert right == (len(does) == 4) and (verdict.speedup is not None) == right


@pytest.mark.parametrize("call, puts", [(1e-4, 4 * 1 + 2 * 4), (1.3e-3, 6 * 4)])
def test_inputs_are_new_where_calls_are_not_repeated(call, puts):
    """Else a kernel that recognises repeated inputs would have to work on one of them only."""
    reference, candidate = Clocked(call), Clocked(call)
    assert timed(reference, candidate)[1]
    assert len(reference.puts) == puts and reference.puts == candidate.puts
