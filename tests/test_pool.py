"""The judge's queue with threads but without processes: whatever comes in whatever order, all of it ends."""

import random
import time
from unittest.mock import Mock

import pytest

from judge import pool
from judge.verdict import Verdict
from tasks import Task, TaskError


class QuickPool(pool.Pool):
    """A Pool whose recordings and verdicts take milliseconds, and fail now and then."""

    _start = _fork = Mock()

    def _recording(self, job):
        time.sleep(0.002 * random.random())
        return {"failed": "forward", "error": "x"} if random.random() < 0.1 else {"program": []}

    def _load(self, judge, task):
        if judge.source == task.source:
            return
        time.sleep(0.004 * random.random())
        if random.random() < 0.02:
            judge.end()
            raise TaskError("it cannot be used")
        judge.process, judge.source = Mock(), task.source
        self.blueprints.setdefault(task.source, {})

    def _verdict(self, judge, job):
        time.sleep(0.002 * random.random())
        if random.random() < 0.05:
            judge.end()
        return Verdict(error="OutOfMemoryError: x" if random.random() < 0.05 else None)


@pytest.mark.parametrize("seed", range(6))
def test_all_candidates_get_a_result(seed):
    random.seed(seed)
    tasks = [Task(f"task{i}", 0, f"source {i}") for i in range(random.choice([1, 3, 5, 16]))]
    clock, device = random.choice([("modelled", "cpu"), ("measured", "cuda:0")])
    settings = {"workers": random.choice([1, 2, 4]), "tasks": random.choice([1, 2, 3, 8]), "timeout": 60}
    quick, futures = QuickPool(settings | {"clock": clock, "device": device}), []
    for _ in range(8):
        quick.prepare(random.sample(tasks, len(tasks)))
        pairs = [(random.choice(tasks), f"code {random.randrange(300)}") for _ in range(random.choice([1, 5, 30]))]
        futures += quick.submit(pairs)
        time.sleep(0.01 * random.random())
    for future in futures:
        future.exception(timeout=20)
    quick.close()
