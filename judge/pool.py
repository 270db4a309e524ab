"""Candidates wait in one queue, by task; a pool of threads takes from it, each with one scorer at a time.

Scorers (scorer.py) are kept for their tasks' next candidates; where there are enough, the one used least recently goes
on with another task. With the modelled clock several threads may judge candidates of one task, each with a scorer of
its own. With the measured clock a task has one scorer, which judges all of its waiting candidates as one batch. A job
that runs out of the GPU's memory is done once more: when no other job is at work, and after idle scorers have ended.
"""

import contextlib
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judge import processes
from judge.gpu_lock import GpuLock
from judge.messages import Child, Gone, receive, send
from judge.verdict import Verdict, out_of_memory, verdict_from_json
from tasks import Task, TaskError

MAX_SCORERS = 16  # scorers with the measured clock: each has references and CUDA contexts in the GPU's memory
MAX_VERDICTS = 10000  # that are remembered
SETS = re.compile(r"torch\.(set_|backends|use_|_)")  # what a task may change in its scorer, which then has no other one


@dataclass
class Job:
    """What waits to be done for a task, or is being done by a thread of the pool."""

    task: Task
    codes: list = field(default_factory=list)  # candidates without a verdict
    scorer: "ScorerConnection" = None  # that judges it; None until one has been started, and after it has ended
    alone: bool = False  # is it done once more, with the GPU's memory to itself?


class ScorerConnection:
    """A scorer's process as the pool sees it."""

    def __init__(self, fork_server, gpu):
        self.child, self.gpu, self.source = Child(fork_server, "scorer"), gpu, None  # of the task that it has loaded

    def order(self, order, patience):
        """Send an order (see judge/scorer.py) and yield the answers; the last one has a "done".

        The scorer's requests for the GPU arrive meanwhile, and are waited for. Raises Gone or OSError when the scorer
        has ended, TimeoutError (an OSError) when it is silent for `patience` seconds.
        """
        answer = {}
        send(self.child.sock, order)
        while "done" not in answer:
            answer = receive(self.child.sock, time.monotonic() + patience)
            if "lock" in answer:
                self.gpu.acquire(self, answer["lock"])
                send(self.child.sock, {"granted": True})
            elif "unlock" in answer:
                self.gpu.release(self)
            else:
                yield answer

    def load(self, task, seed, known, patience):
        """Have it build a task's reference, in place of another task's. Raises TaskError, and what `order` does."""
        job = {"name": task.name, "source": task.source, "seed": seed, "known": list(known)}
        (answer,) = self.order({"task": job}, patience)
        if answer["done"]:
            raise TaskError(answer["done"])
        self.source = task.source

    def close(self, wait=False):
        """End the process with all that it has started; with `wait`, return only when they are gone."""
        self.child.close(wait)
        self.gpu.release(self)


class Crowded(Exception):
    """A job ran out of the GPU's memory beside what others hold."""


class Pool:
    """The queue, its threads and their scorers.

    settings: sandbox.Settings as a dict, without any None. Every process gets them, apart from the seed.
    """

    def __init__(self, settings):
        self.seed = settings.pop("seed")  # a candidate that reads its fork server's command line must not find it
        self.settings = settings | {"scratch": tempfile.mkdtemp(prefix="sandbox-"), "gpus": torch.cuda.device_count()}
        # patience: seconds without a message after which a scorer is given up
        self.modelled, self.patience = settings["clock"] == "modelled", 4 * settings["timeout"] + 300
        self.gpu, self.closed = GpuLock(), False
        self.changed = threading.Condition()  # guards what follows, and is notified when a job may begin
        # source of a task -> its Job that no thread has begun; jobs of the threads; scorers, each loaded with a task,
        # of which the least recently used comes first
        self.waiting, self.at_work, self.idle = {}, [], []
        # (source, code) -> Future of what has no verdict yet, Verdict of others; source -> why its reference could not
        # be used, since the last prepare(); keys of kernels that have been compiled, so that no scorer does it again
        self.futures, self.verdicts, self.unusable, self.known = {}, {}, {}, set()
        self.control, self.process = processes.start(self.settings)
        count = settings["workers" if self.modelled else "tasks"]
        self.capacity = count if self.modelled else max(count, MAX_SCORERS)  # scorers, at work and idle
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def submit(self, pairs) -> list[Future]:
        """See Sandbox.submit. Raises TaskError when the sandbox is closed."""
        futures = []
        with self.changed:
            if self.closed:
                raise TaskError("the sandbox is closed")
            for task, code in pairs:
                key = task.source, code
                futures.append(self.futures.get(key) or Future())
                if key not in self.futures and key in self.verdicts:
                    futures[-1].set_result(self.verdicts[key])
                elif key not in self.futures:
                    self.futures[key] = futures[-1]
                    self.waiting.setdefault(task.source, Job(task)).codes.append(code)
            self.changed.notify_all()
        return futures

    def prepare(self, tasks):
        """See Sandbox.prepare."""
        with self.changed:
            self.unusable.clear()  # memory may have been short
            if not self.modelled and self.settings["tasks"] > 1:
                for task in list(dict.fromkeys(tasks))[:MAX_SCORERS]:
                    self.waiting.setdefault(task.source, Job(task))
            self.changed.notify_all()

    def end_idle(self):
        """End all scorers that are not at work, to free their memory."""
        with self.changed:
            ended, self.idle = self.idle, []
        for scorer in ended:
            scorer.child.hang_up()  # all end at once
        for scorer in ended:
            scorer.close(wait=not self.modelled)

    def close(self):
        """See Sandbox.close."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            for scorer in [job.scorer for job in self.at_work if job.scorer is not None]:
                scorer.child.hang_up()
            self.changed.notify_all()
        self.end_idle()
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        self.end_idle()  # of jobs that were at work
        for job in self.waiting.values():
            self._fail(job, TaskError("the sandbox is closed"))
        processes.remove(self.settings["scratch"])

    # ---- the threads

    def _work(self):
        """Take jobs from the queue until the sandbox is closed."""
        while True:
            with self.changed:
                while not self.closed and (job := self._next()) is None:
                    self.changed.wait()
                if self.closed:
                    return
                self.at_work.append(job)
            try:
                if job.alone:
                    self.end_idle()
                self._load(job)
                self._judge(job)
            except Crowded:
                self._end_scorer(job)
                with self.changed:
                    later = self.waiting.pop(job.task.source, Job(job.task)).codes
                    self.waiting[job.task.source] = Job(job.task, job.codes + later, alone=True)
            except TaskError as error:
                self._fail(job, error)
            except Exception as error:  # a mistake of ours: the Futures raise it
                self._end_scorer(job)
                self._fail(job, error)
            with self.changed:
                self.at_work.remove(job)
                self.idle += [job.scorer] if job.scorer is not None else []
                self.changed.notify_all()

    def _next(self) -> Job | None:
        """The job to be begun next, with an idle scorer where one is to do it; None if there is none to begin.

        Jobs that need the memory to themselves come last. Candidates come before preparations, tasks that an idle
        scorer is loaded with before others, then those that fewer threads are at work on; else what has waited for
        longest. self.changed is held.
        """
        threads = Counter(job.task.source for job in self.at_work)
        loaded = {scorer.source: scorer for scorer in self.idle}
        ready = [source for source, job in self.waiting.items()
                 if not (job.alone and self.at_work) and (self.modelled or not threads[source])]
        if not ready or any(job.alone for job in self.at_work):
            return None
        source = min(ready, key=lambda one: (self.waiting[one].alone, not self.waiting[one].codes, one not in loaded,
                                             threads[one]))
        job = self.waiting.pop(source)
        if self.modelled and len(job.codes) > 1:  # the others are for other threads
            self.waiting[source] = Job(job.task, job.codes[1:])
            job.codes = job.codes[:1]
        job.scorer = loaded.get(source) or (
            self.idle[0] if len(self.idle) + len(self.at_work) >= self.capacity else None)
        if job.scorer is not None:
            self.idle.remove(job.scorer)
        return job

    def _load(self, job):
        """Have job.scorer loaded with the job's task, or a new one if it cannot be. Raises TaskError."""
        source = job.task.source
        if job.scorer is not None and job.scorer.source == source:
            return
        if source in self.unusable:
            raise TaskError(self.unusable[source])
        if job.scorer is not None and (self.settings["baseline"] != "eager" or SETS.search(job.scorer.source + source)):
            self._end_scorer(job)
        reused = True
        while reused:  # another time if it was not new
            reused = job.scorer is not None
            try:
                job.scorer = job.scorer or ScorerConnection(self.control, self.gpu)
                return job.scorer.load(job.task, self.seed, self.known, 3 * self.settings["timeout"] + 60)
            except TaskError as error:
                why = str(error)
            except (Gone, OSError) as error:
                why = "it takes too long" if isinstance(error, TimeoutError) else self._last_log_line()
                why = f"{job.task.name}: the reference cannot be judged against ({why})"
            self._end_scorer(job)
            if self.closed:
                raise TaskError("the sandbox is closed")
        if not self.modelled and not job.alone:  # whatever the reason: CUDA does not always name it
            raise Crowded
        self.unusable[source] = why
        raise TaskError(why)

    def _judge(self, job):
        """Judge the job's candidates. If the scorer ends, they are tried once more, one by one. Raises Crowded."""
        failed = set()
        while job.codes:
            self._load(job)
            batch = job.codes[:1] if failed else list(job.codes)
            try:
                for answer in job.scorer.order({"codes": batch}, self.patience):
                    if "verdict" in answer:
                        self.known = self.known | set(answer["known"]) if len(self.known) < 5000 else set()
                        verdict = verdict_from_json(answer["verdict"])
                        if not self._is_crowded(job, verdict.error or ""):
                            self._settle(job, batch[answer["index"]], verdict).set_result(verdict)
                crowded = bool(set(batch) & set(job.codes))
            except (Gone, OSError):
                self._end_scorer(job)
                why = self._last_log_line()
                crowded = self._is_crowded(job, why)
                for code in [code for code in batch if code in job.codes and not crowded]:
                    if code in failed:
                        verdict = Verdict(clock=self.settings["clock"], error=f"the scorer failed on it, twice ({why})")
                        self._settle(job, code, verdict).set_result(verdict)
                    failed.add(code)
            if crowded:
                raise Crowded

    def _is_crowded(self, job, why) -> bool:
        """Is this error for want of the GPU's memory, which others use as well?"""
        return not self.modelled and not job.alone and out_of_memory(why)

    def _settle(self, job, code, verdict) -> Future:
        """A candidate is done: remember its verdict, unless that is None. Returns its Future, to be given a result."""
        job.codes.remove(code)
        key = job.task.source, code
        with self.changed:
            if verdict is not None:
                self.verdicts[key] = verdict
                if len(self.verdicts) > MAX_VERDICTS:
                    del self.verdicts[next(iter(self.verdicts))]
            return self.futures.pop(key)

    def _fail(self, job, error):
        for code in list(job.codes):
            self._settle(job, code, None).set_exception(error)

    def _last_log_line(self):
        """The last line that a scorer left before it ended."""
        log = Path(self.settings["scratch"], "scorer.log")
        lines = log.read_text().strip().split("\n") if log.exists() else [""]
        return lines[-1][:200] or "the process ended"

    def _end_scorer(self, job):
        if job.scorer is not None:
            job.scorer.close(wait=not self.modelled)
            job.scorer = None
