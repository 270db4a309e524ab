"""The pool with threads but without processes: whatever comes in whatever order, all of it ends."""

import random
import time
from unittest.mock import Mock

import pytest

from judge import pool
from judge.processes import Gone
from judge.verdict import Verdict
from tasks import Task, TaskError


class QuickPool(pool.Pool):
    """A Pool whose recordings and verdicts take milliseconds, and fail now and then."""

    start = Mock()

    def record(self, entry, code):
        time.sleep(0.002 * random.random())
        if random.random() < 0.1:
            raise Gone("x")
        return b""

    def ask(self, judge, order, source, *_):
        assert judge.busy and source in [entry.source for entry in judge.loaded]
        judge.connection = Mock()
        time.sleep(0.003 * random.random())
        if random.random() < 0.05:
            judge.end()
            raise Gone("x")
        if order == "load":
            return {"room": 9, "blueprint": b"x", "takes": random.randrange(90)} if source[-1] != "3" else {
                "unusable": "it cannot be used"}
        return Verdict(error="x"), random.random() < 0.05


@pytest.mark.parametrize("seed", range(6))
def test_all_candidates_get_a_result_and_tasks_fit(seed, monkeypatch):
    random.seed(seed)
    monkeypatch.setattr(pool, "gpu_of", lambda device: (None, 200))
    monkeypatch.setattr(pool, "elements", lambda source, most: 1)
    tasks = [Task(f"task{i}", 0, f"source {i}") for i in range(random.choice([1, 3, 5, 16]))]
    clock, device = random.choice([("modelled", "cpu"), ("measured", "cuda:0")])
    settings = {"workers": random.choice([1, 2, 4]), "tasks": random.choice([1, 2, 3, 8]), "timeout": 60,
                "memory": 1 << 20, "clock": clock, "device": device, "secret": "00"}
    quick, futures = QuickPool(settings), []
    for _ in range(8):
        quick.prepare(random.sample(tasks, len(tasks)))
        pairs = [(random.choice(tasks), f"code {random.randrange(300)}") for _ in range(random.choice([1, 5, 30]))]
        futures += quick.submit(pairs)
        time.sleep(0.01 * random.random())
    failed = [future.exception(timeout=20) for future in futures]
    assert {type(error) for error in failed} <= {type(None), TaskError} and None in failed
    quick.close()
    with pytest.raises(TaskError, match="closed"):
        quick.submit(pairs)


class CountingPool(QuickPool):
    """A QuickPool without failures, of which two tasks fill the memory."""

    loads = 0

    def record(self, entry, code):
        time.sleep(0.002)
        return b""

    def ask(self, judge, order, *_):
        judge.connection = Mock()
        time.sleep(0.002)
        self.loads += order == "load"
        return {"room": 9, "blueprint": b"x", "takes": 40} if order == "load" else (Verdict(error="x"), False)


def test_a_gpu_keeps_a_task_until_its_candidates_are_judged(monkeypatch):
    monkeypatch.setattr(pool, "gpu_of", lambda device: (None, 200))
    monkeypatch.setattr(pool, "elements", lambda source, most: 1)
    counting = CountingPool({"workers": 2, "tasks": 3, "timeout": 60, "memory": 1, "clock": "measured",
                             "device": "cuda:0", "secret": "00"})
    pairs = [(Task(f"task{i % 8}", 0, f"source {i % 8}"), f"code {i}") for i in range(160)]
    for future in counting.submit(pairs):
        future.result(timeout=20)
    counting.close()
    assert 8 <= counting.loads < 16  # without waiting for room: more than a hundred
