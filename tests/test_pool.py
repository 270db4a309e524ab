"""The pool with threads but without processes: whatever comes in whatever order, all of it ends."""

import random
import threading
import time
from unittest.mock import Mock

import pytest

from judge import pool
from judge.processes import Gone
from judge.verdict import Verdict
from tasks import Task, TaskError


class QuickPool(pool.Pool):
    """A Pool whose recordings and verdicts take milliseconds. fails: the chance with which they fail."""

    start, fails, loads = Mock(), 0, 0

    def record(self, entry, code):
        if code == "long":
            self.compiled.wait(60)
        time.sleep(0.002 * random.random())
        if random.random() < self.fails:
            raise Gone("x")
        return b""

    def ask(self, judge, order, source, *_):
        held = source in [entry.source for entry in judge.loaded]
        assert not held if order == "drop" else held and judge.busy
        judge.connection = Mock()
        time.sleep(0.003 * random.random())
        if random.random() < self.fails / 2:
            judge.end()
            raise Gone("x")
        if order == "judge":
            if random.random() < self.fails / 2:
                judge.end()  # the candidate has broken its GPU
            return Verdict(error="x")
        if order == "drop":
            return None
        self.loads += 1
        if self.fails and source[-1] == "3":
            return {"unusable": random.choice(["it cannot be used", "OutOfMemoryError"])}
        return {"room": 9, "blueprint": b"x", "facts": b"", "takes": random.randrange(90) if self.fails else 40}


@pytest.fixture
def quick(monkeypatch):
    """A function that makes a QuickPool on a device with 200 bytes of memory."""
    monkeypatch.setattr(pool, "gpu_of", lambda device: (None, 200))
    monkeypatch.setattr(pool, "elements", lambda source, most: 1)
    return lambda device, **settings: QuickPool({"timeout": 60, "memory": 1 << 20, "clock": "measured",
                                                 "device": device, "secret": "00", **settings})


@pytest.mark.parametrize("seed", range(6))
def test_all_candidates_get_a_result_and_tasks_fit(seed, quick):
    random.seed(seed)
    tasks = [Task(f"task{i}", 0, f"source {i}") for i in range(random.choice([1, 3, 5, 16]))]
    own = quick(random.choice(["cpu", "cuda:0"]), workers=random.choice([1, 2, 4]), tasks=random.choice([1, 2, 3, 8]))
    own.fails = 0.1
    futures = []
    for _ in range(8):
        own.prepare(random.sample(tasks, len(tasks)))
        pairs = [(random.choice(tasks), f"code {random.randrange(300)}") for _ in range(random.choice([1, 5, 30]))]
        futures += own.submit(pairs)
        time.sleep(0.01 * random.random())
    failed = [future.exception(timeout=20) for future in futures]
    assert {type(error) for error in failed} <= {type(None), TaskError} and None in failed
    own.close()
    with pytest.raises(TaskError, match="closed"):
        own.submit(pairs)


def test_where_memory_is_short_beside_other_tasks_a_candidate_is_judged_alone(quick):
    """Each verdict is that memory is short, unless no other task is loaded. The first judge that loads a task ends."""
    own, begun = quick("cuda:0", workers=4, tasks=3), set()
    ask = own.ask

    def short(judge, order, source, *more):
        if order == "load" and source not in begun:
            begun.add(source)
            judge.end()
            raise Gone("x")
        if order == "judge" and sum(len(other.loaded) for other in own.judges) > 1:
            return Verdict(error="OutOfMemoryError: x")
        return ask(judge, order, source, *more)

    own.ask = short
    pairs = [(Task(f"task{i % 8}", 0, f"source {i % 8}"), f"code {i}") for i in range(80)]
    assert {future.result(timeout=20).error for future in own.submit(pairs)} == {"x"}
    own.close()


def test_a_gpu_keeps_a_task_until_its_candidates_are_judged(quick):
    """Two tasks fill the memory."""
    own = quick("cuda:0", workers=2, tasks=3)
    pairs = [(Task(f"task{i % 8}", 0, f"source {i % 8}"), f"code {i}") for i in range(160)]
    for future in own.submit(pairs):
        future.result(timeout=20)
    own.close()
    assert 8 <= own.loads < 16  # without waiting for room: more than a hundred


def test_a_gpu_does_not_keep_a_task_for_a_candidate_that_is_compiled_for_long(quick, monkeypatch):
    """Each task fills the memory."""
    monkeypatch.setattr(pool, "elements", lambda source, most: 5)
    monkeypatch.setattr(pool, "PATIENCE", 0.1)
    own = quick("cuda:0", workers=2, tasks=2)
    own.compiled = threading.Event()  # the candidate "long"
    long, = own.submit([(Task("one", 0, "1"), "long")])
    while not own.loads:
        time.sleep(0.01)
    other, = own.submit([(Task("two", 0, "2"), "short")])
    assert other.result(timeout=20).error == "x" and not long.done()
    own.compiled.set()
    assert long.result(timeout=20).error == "x" and own.loads == 3
    own.close()
