"""Candidates wait in one queue, by task; a pool of threads takes from it, each with one scorer at a time.

Scorers (scorer.py) are kept for their tasks' next candidates; where there are enough, the one used least recently goes
on with another task. With the modelled clock several threads may judge candidates of one task, each with a scorer of
its own. With the measured clock a task has one scorer, which judges all of its waiting candidates as one batch. Where
the GPU's memory is short, idle scorers end, then a job is done again when no other is at work.
"""

import contextlib
import re
import subprocess
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judge import processes
from judge.connection import ScorerConnection
from judge.gpu_lock import GpuLock
from judge.messages import Gone, Orphaned
from judge.verdict import Verdict, out_of_memory, verdict_from_json
from tasks import Task, TaskError

MAX_SCORERS = 16  # scorers with the measured clock: each has references and CUDA contexts in the GPU's memory
MAX_VERDICTS = 10000  # verdicts


@dataclass
class Job:
    """What waits to be done for a task, or is being done by a thread of the pool."""

    task: Task
    codes: list = field(default_factory=list)  # candidates without a verdict
    scorer: ScorerConnection = None  # that judges it; None until one has been started, and after it has ended
    alone: bool = False  # does it have the GPU's memory to itself?


class Crowded(Exception):
    """There was too little of the GPU's memory beside what other jobs hold."""


class Pool:
    """The queue, its threads and their scorers.

    settings: those of Sandbox as a dict, which every process gets; seed, remember: as there.
    """

    def __init__(self, settings, seed, remember):
        self.settings, self.seed, self.remember = settings, seed, remember
        self.device, self.modelled = settings["device"], settings["clock"] == "modelled"
        self.patience = 4 * settings["timeout"] + 300  # seconds without a message after which a scorer is given up
        self.gpu = GpuLock()
        self.changed = threading.Condition()  # guards what follows, and is notified when a job may begin
        self.closed = False
        self.waiting = {}  # source of a task -> its Job that no thread has begun
        self.at_work = []  # jobs of the threads
        self.crowded = set()  # sources of tasks that found too little of the GPU's memory beside others
        self.idle = []  # scorers, each loaded with a task; the least recently used comes first
        self.futures = {}  # (source, code) -> Future of all that has no verdict yet
        self.verdicts = {}  # (source, code) -> Verdict, oldest first
        self.unusable = {}  # source -> why its reference could not be used, since the last prepare()
        self.known = set()  # keys of kernels that have been compiled, so that no scorer does it again
        self.control, self.process = processes.start(settings)
        count = settings["workers" if self.modelled else "tasks"]
        self.capacity = count if self.modelled else max(count, MAX_SCORERS)  # scorers, at work and idle
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def submit(self, pairs) -> list[Future]:
        """Have pairs judged in the background. Their verdicts, in their order; TaskError when a task cannot be used.

        What is already known is not judged again, nor what is being judged or waits for it: those share a Future.
        """
        futures = []
        with self.changed:
            if self.closed:
                raise TaskError("the sandbox is closed")
            for task, code in pairs:
                key = task.source, code
                future = self.futures.get(key) or Future()
                if key not in self.futures and key in self.verdicts:
                    future.set_result(self.verdicts[key])
                elif key not in self.futures:
                    self.futures[key] = future
                    job = self.waiting.setdefault(task.source, Job(task, alone=task.source in self.crowded))
                    job.codes.append(code)
                futures.append(future)
            self.changed.notify_all()
        return futures

    def prepare(self, tasks):
        """While candidates of these tasks are being written, build the tasks' references: that takes a second each.

        Only for the measured clock, and where several tasks may be in work at the same time.
        """
        with self.changed:
            self.unusable.clear()  # memory may have been short
            if not self.modelled and self.settings["tasks"] > 1:
                for task in list(dict.fromkeys(tasks))[:MAX_SCORERS]:
                    if task.source not in self.crowded:
                        self.waiting.setdefault(task.source, Job(task))
            self.changed.notify_all()

    def end_idle(self) -> bool:
        """End all scorers that are not at work: then their memory is free. Returns whether there were any."""
        with self.changed:
            ended, self.idle = self.idle, []
        for scorer in ended:
            scorer.child.hang_up()  # all end at once
        for scorer in ended:
            scorer.close(wait=not self.modelled)
        return bool(ended)

    def close(self):
        """End every process of the sandbox and remove its scratch folder. What waits for a verdict gets a TaskError."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            for job in self.at_work:
                if job.scorer is not None:
                    job.scorer.child.hang_up()
            self.changed.notify_all()
        self.end_idle()
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self.threads:
            thread.join()
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
            except Crowded:  # once more, when no other job is at work
                self._end_scorer(job)
                with self.changed:
                    self.crowded.add(job.task.source)
                    later = self.waiting.pop(job.task.source, Job(job.task)).codes
                    self.waiting[job.task.source] = Job(job.task, job.codes + later, alone=True)
            except TaskError as error:
                self._fail(job, error)
            except Exception as error:  # a mistake of ours: whoever waits is told
                self._end_scorer(job)
                self._fail(job, error)
            self._release(job)

    def _next(self) -> Job | None:
        """The job to be begun next, with an idle scorer where one is to do it; None if there is none to begin.

        Jobs that need the memory to themselves come last: the others then end together. Candidates come before
        preparations, tasks that an idle scorer is loaded with before others, then those that fewer threads are at work
        on; else what has waited for longest. self.changed is held.
        """
        if any(job.alone for job in self.at_work):
            return None
        threads = Counter(job.task.source for job in self.at_work)
        loaded = {scorer.source: scorer for scorer in self.idle}
        ready = [source for source in self.waiting if self.modelled or not threads[source]]
        if not ready:
            return None
        source = min(ready, key=lambda one: (self.waiting[one].alone, not self.waiting[one].codes, one not in loaded,
                                             threads[one]))
        if self.waiting[source].alone and self.at_work:
            return None
        job = self.waiting.pop(source)
        if self.modelled and len(job.codes) > 1:  # the others are for other threads
            self.waiting[source] = Job(job.task, job.codes[1:])
            job.codes = job.codes[:1]
        job.scorer = loaded.get(source)
        if job.scorer is None and len(self.idle) + len(self.at_work) >= self.capacity:
            job.scorer = self.idle[0]
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
        if job.scorer is not None and not self._may_share_a_scorer(job.scorer.source + source):
            self._end_scorer(job)
        for _ in range(3):  # by a scorer that had another task, by a new one, by a new one with all memory to itself
            control, reused = self.control, job.scorer is not None
            try:
                job.scorer = job.scorer or ScorerConnection(control, self.gpu)
                part = 1.0 if job.alone or self.settings["tasks"] == 1 else 0.5  # half at most beside others
                return job.scorer.load(job.task, self.seed, self.known, part, 3 * self.settings["timeout"] + 60)
            except TaskError as error:
                why = str(error)
            except (Gone, Orphaned, OSError) as error:
                why = "it takes too long" if isinstance(error, TimeoutError) else self._last_log_line()
                why = f"{job.task.name}: the reference cannot be judged against ({why})"
            self._end_scorer(job)
            if self.closed:
                raise TaskError("the sandbox is closed")
            if not (reused or self._replace_fork_server(control) or self.end_idle()):
                break
        if self._shares_memory(job) and (len(self.at_work) > 1 or out_of_memory(why)):
            raise Crowded
        self.unusable[source] = why
        raise TaskError(why)

    def _may_share_a_scorer(self, sources) -> bool:
        """May one scorer, which runs their code, load these tasks one after the other, or do they change settings?"""
        return self.settings["baseline"] == "eager" and not re.search(r"torch\.(set_|backends|use_|_)", sources)

    def _replace_fork_server(self, control) -> bool:
        """If the fork server behind `control` has been killed, and with it all its processes, start another one.

        Returns whether there is another one now.
        """
        with self.changed:
            if self.control is control and not self.closed:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.2)
                    self.control.close()
                    self.control, self.process = processes.start(self.settings)
            return self.control is not control

    def _judge(self, job):
        """Judge the job's candidates. If the scorer ends, they are tried once more, one by one. Raises Crowded."""
        failed, shortages = set(), 0
        while job.codes:
            self._load(job)
            batch = job.codes[:1] if failed else list(job.codes)
            try:
                for answer in job.scorer.order({"codes": batch}, self.patience):
                    if "verdict" in answer:
                        self.known = self.known | set(answer["known"]) if len(self.known) < 5000 else set()
                        verdict = verdict_from_json(answer["verdict"])
                        if not (out_of_memory(verdict.error or "") and self._shares_memory(job)):
                            self._settle(job, batch[answer["index"]], verdict).set_result(verdict)
                short = bool(set(batch) & set(job.codes))
            except (Gone, OSError):
                self._end_scorer(job)
                short = out_of_memory(self._last_log_line()) and self._shares_memory(job)
                if not short:
                    self.end_idle()
                    for code in [code for code in batch if code in job.codes]:
                        if code in failed:
                            why = f"the scorer failed on it, twice ({self._last_log_line()})"
                            verdict = Verdict(clock=self.settings["clock"], error=why)
                            self._settle(job, code, verdict).set_result(verdict)
                        failed.add(code)
            if short:  # of memory: once more without the scorers that only wait, then without those at work
                self._end_scorer(job)
                shortages += 1
                if shortages > 1 or not self.end_idle():
                    raise Crowded

    def _shares_memory(self, job) -> bool:
        """Does a job have to make do with a part of the GPU's memory?"""
        return not (self.modelled or job.alone)

    def _settle(self, job, code, verdict) -> Future:
        """A candidate is done: remember its verdict, unless that is None. Returns its Future, to be given a result."""
        job.codes.remove(code)
        key = job.task.source, code
        with self.changed:
            if verdict is not None and self.remember:
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

    def _release(self, job):
        """A thread has done its job: keep the scorer, and where memory is short end the one used least recently."""
        if job.scorer is not None and job.scorer.large:  # before anybody begins, who may need the room
            self._end_scorer(job)
        short = self._memory_is_short()
        with self.changed:
            self.at_work.remove(job)
            if job.scorer is not None:
                self.idle.append(job.scorer)
            ended = self.idle.pop(0) if self.idle and (short or self.closed) else None
            self.changed.notify_all()
        if ended is not None:
            ended.close(wait=True)

    def _memory_is_short(self) -> bool:
        """Is less than an eighth of the GPU's memory free?"""
        with contextlib.suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info(self.device) if self.device != "cpu" else (1, 1)
            return free < total / 8
        return True  # the driver cannot say
