"""The measured clock's parts: how batches are timed, and who is accused of what."""

import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton

from judge import worker
from judge import processes
from judge.client import Lane
from judge.correctness import Verdict, describe, load_module
from judge.measured import Measured, Timing
from judge.side_effects import is_plain
from sandbox import Sandbox
from test_sandbox import TASK


def test_no_candidate_finds_its_inputs_as_another_has_left_them(tmp_path, monkeypatch):
    """In a process that they share, over memory that lives as long as that: on a GPU by CUDA IPC, here as it is."""
    for name in ("run", "_do_compile"):  # a host watches kernels for good; afterwards the test's process does not
        monkeypatch.setattr(triton.runtime.jit.JITFunction, name, getattr(triton.runtime.jit.JITFunction, name))
    monkeypatch.setattr(worker, "attach", lambda raw: raw)
    one = worker.Host({"device": "cpu"}, None, tmp_path, load_module, describe)
    x, sizes = torch.arange(6.0).view(2, 3), [2.0]
    places, size = processes.plan([x])
    arena = torch.zeros(max(size, processes.ALIGN), dtype=torch.uint8)
    out = torch.zeros(processes.ALIGN, dtype=torch.uint8)
    code = ("import torch\nimport torch.nn as nn\nTABLE = torch.ones(3)\nclass ModelNew(nn.Module):\n"
            "    def forward(self, x, sizes):\n        y = x * sizes[0] * TABLE\n        CHANGE\n        return y\n")
    seen = []
    for change in ("pass", "x.t_()", "x.unsqueeze_(0)", "x.resize_(1)", "x.requires_grad_()", "sizes[0] = 0.0",
                   "sizes.append(1)", "pass"):
        assert is_plain(code.replace("CHANGE", change))
        one.load(code.replace("CHANGE", change), "ModelNew", None)
        seen.append(weakref.ref(sys.modules["candidate"].TABLE))
        one.build([], 0, False, False)
        if change == "pass" and len(seen) == 1:
            one.share((arena, out, out), places, places, 1, [[True, None], [False, sizes]])
        processes.views(arena, places)[0].copy_(x)
        one.forward(0, 0, False, (), False)
        assert torch.equal(processes.views(out, places)[0], 2 * x), change
        assert one.forget()["unchanged"] and seen[-1]() is None, change


class Clocked(Lane):
    """A lane whose model takes `call` seconds a call, and `nothing` for a batch without calls.

    The first repetition of a batch takes it `first` seconds more, to be timed once `pause`, to clear the cache
    `clearing`.
    """

    def __init__(self, call, nothing, pause=0.0, clearing=0.0, first=0.0):
        self.captured, self.repeat, self.empty = True, None, None
        self.call, self.nothing, self.pause, self.clearing, self.first = call, nothing, pause, clearing, first

    def tell(self, calls, seed=0, repeat=1, call=None):
        self.seconds, self.answer = self.nothing + self.call * len(calls) * repeat, {"call": call}
        if calls:
            self.seconds += self.first

    def go(self):
        time.sleep(self.pause)
        return self.seconds, self.answer | {"clearing": self.clearing}


def test_a_candidate_that_dawdles_when_there_is_nothing_to_do_gains_nothing():
    """Only the reference is asked what a batch without calls takes: that is subtracted from both sides' times."""
    timing = Timing(Clocked(1e-4, 3e-5), Clocked(5e-5, 2e-3, clearing=1.0), [0, 1], True, patience=0.01)
    for _ in range(10):
        timing.tell(seed=0, call=1)
        assert [answer["call"] for answer in timing.batch(call=1)] == [1, 1]
    reference, candidate, low, disturbed = timing.summary()
    assert reference == pytest.approx(0.1, rel=1e-3) and len(timing.seconds[1]) == 10
    assert candidate > 0.05 and low < 2 and not disturbed


def test_what_is_disturbed_for_a_while_is_timed_for_longer():
    def timed(slow):
        """slow(batch): is the candidate slowed down in this batch? Returns the number of batches and the summary."""
        reference, candidate, batch = Clocked(1e-4, 0.0, pause=0.002), Clocked(5e-5, 0.0, pause=0.002), 0
        timing = Timing(reference, candidate, [0, 1], True, patience=0.01)
        while not timing.enough(0.03):
            candidate.call = 1e-4 if slow(batch) else 5e-5
            timing.tell(seed=0, call=0)
            timing.batch(call=0)
            batch += 1
        return batch, timing.summary()

    few, (_, candidate, _, disturbed) = timed(lambda batch: False)
    assert 6 <= few < 10 and candidate == pytest.approx(0.05) and not disturbed
    some, (_, candidate, _, disturbed) = timed(lambda batch: batch in (1, 2, 4, 5))
    assert few < some < 30 and candidate == pytest.approx(0.05) and not disturbed
    many, (*_, disturbed) = timed(lambda batch: batch % 2)
    assert some < many < 40 and disturbed


def take_batches(timing):
    """Time batches until they are enough, as Measured.run_batches does; yields each one's number before it."""
    for batch in range(100):
        if timing.enough(0.0):
            return
        yield batch
        for once in (True, False) if timing.first_apart() else (False,):
            timing.tell(seed=0, call=1, once=once)
            timing.batch(call=1)


@pytest.mark.parametrize("reference, candidate, suspect, remembers", [
    (0.0, 0.0, False, False),
    (1e-3, 1e-5, False, False),
    (1e-4, 1e-4, True, False),  # the cache is cold, on both sides
    (0.0, 3e-4, True, True),
    (1e-3, 3e-4, True, False),  # another process has the GPU whenever it has been idle
    (1e-3, 2e-3, True, True),
])
def test_who_does_less_when_a_batch_is_repeated_is_accused(reference, candidate, suspect, remembers):
    """As a kernel does that knows its inputs again: it has to work the first time."""
    timing = Timing(Clocked(1e-4, 3e-5, first=reference), Clocked(5e-5, 3e-5, first=candidate), [0, 1], True, 0.01)
    assert min(timing.repeat) > 1
    batches = list(take_batches(timing))
    assert (timing.suspect(), timing.remembers()) == (suspect, remembers)
    assert len(timing.seconds[0]) == len(timing.seconds[1]) == len(batches) == (10 if suspect else 6)
    assert len(timing.once[0]) == len(timing.once[1]) == (8 if suspect else 2)


def test_a_disturbance_is_no_accusation():
    candidate = Clocked(5e-5, 0.0, first=1e-3)
    timing = Timing(Clocked(1e-4, 0.0), candidate, [0, 1], True, patience=0.01)
    for batch in take_batches(timing):
        assert timing.remembers() == (3 <= batch < 6), batch
        candidate.first = 1e-3 if batch < 5 else 0.0  # three first repetitions are slow, the fourth is not
    assert batch == 5 and not timing.suspect()


def test_nobody_is_accused_while_something_else_has_the_gpu():
    """Nor does anybody gain by leaving work out then: only the first repetitions count."""
    timing = Timing(Clocked(1e-4, 0.0, clearing=0.02), Clocked(5e-5, 0.0, first=3e-4), [0, 1], True, patience=0.01)
    batches = list(take_batches(timing))
    assert timing.suspect() and not timing.remembers() and len(timing.once[1]) == 8
    reference, candidate, low, disturbed = timing.summary()
    assert (reference, candidate) == pytest.approx((0.1, 0.2)) and low == pytest.approx(0.5) and disturbed
    assert len(batches) == 10


def test_a_reference_that_was_disturbed_for_a_while_is_no_excuse():
    reference = Clocked(1e-4, 0.0, first=1e-3)
    timing = Timing(reference, Clocked(5e-5, 0.0, first=3e-4), [0, 1], True, patience=0.01)
    for batch in take_batches(timing):
        assert timing.remembers() == (batch > 4), batch
        reference.first = 1e-3 if batch < 4 else 0.0
    assert batch == 9 and timing.remembers()


class Answering(Clocked):
    """A Clocked lane whose call on slot i gives twice what was put there; of a first repetition only the calls `does`.
    """

    def __init__(self, *times, does=range(4)):
        super().__init__(*times)
        self.does, self.slots, self.out, self.puts = does, dict.fromkeys(range(4), torch.zeros(3)), {}, []

    def put(self, slot, inputs):
        self.slots[slot] = inputs[0]
        self.puts.append(slot)

    def tell(self, calls, seed=0, repeat=1, call=None):
        super().tell(calls, seed, repeat, call)
        self.out |= {i: (2 if repeat > 1 or i in self.does else 0) * self.slots[i] for i in calls}

    def collect(self, call):
        return 0.0, {"call": call}

    def results(self, answer):
        return [self.out[answer["call"]]]

    def take_turn(self, alone=False): ...

    poison = finish = drop = take_turn


def run_batches(reference, candidate):
    measured, verdict = Measured.__new__(Measured), Verdict(correct=True)
    measured.calls, measured.graphs, measured.patience, measured.lane = list(range(4)), True, 0.01, reference
    measured.settings, measured.floor_ms, measured.flops, measured.bandwidth, measured.peak = {"measure": 0}, 0, 0, 1, 1
    one = SimpleNamespace(inputs=[torch.ones(3)], expected=[torch.ones(3)], allowed=[(1.0, 0.0)])
    measured.first, measured.reference = one, SimpleNamespace(state={}, trial=lambda index: one, draw=lambda *key: [
        1.0 + torch.rand(3, generator=torch.Generator().manual_seed(hash(key) % 1000))])
    measured.run_batches(verdict, candidate, reference)
    return verdict


def test_a_first_repetition_that_leaves_calls_to_the_next_one_is_noticed():
    """One call's result is checked in every batch, but several of a first repetition: up to four calls, all of them."""
    for _ in range(100):
        for does in range(4), {0, 1, 2}, {3}:
            verdict = run_batches(Answering(1e-4, 0.0), Answering(5e-5, 0.0, does=does))
            assert verdict.correct == (len(does) == 4), does


@pytest.mark.parametrize("call, puts", [(1e-4, 4 * 1 + 2 * 4), (1.3e-3, 6 * 4)])
def test_inputs_are_new_where_calls_are_not_repeated(call, puts):
    """Else a kernel that knows its inputs again would have to work on one of them only."""
    reference, candidate = Answering(call, 0.0), Answering(call, 0.0)
    assert run_batches(reference, candidate).correct
    assert len(reference.puts) == puts and reference.puts == candidate.puts


def test_who_needs_long_to_clear_the_cache_is_not_alone():
    timing = Timing(Clocked(1e-4, 0.0, clearing=0.02), Clocked(5e-5, 0.0), [0, 1], True, patience=0.01)
    for _ in range(7):
        timing.tell(seed=0, call=1)
        timing.batch(call=1)
    assert timing.summary()[3]


def test_a_host_that_was_told_of_a_batch_can_be_given_another_order():
    """As when the candidate fails that it was to be timed against."""
    with Sandbox(clock="measured") as sandbox:
        lane = Lane(sandbox.control, sandbox.settings, "reference")
        try:
            lane.wake()
            lane.load(TASK.source, "Model")
            lane.share([torch.ones(2)], [torch.ones(2)], 1, [])
            lane.tell([0])
            lane.load(TASK.source, "Model")
            lane.tell([], repeat=0)
            seconds, answer = lane.go()
            assert 0 < seconds < 5 and answer["clearing"] >= 0 and not lane.told
            lane.load(TASK.source, "Model")
        finally:
            lane.close()
