"""Is this candidate correct, how fast is it, and did its own kernels do the work? (The paper's reward.)

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json]

Who holds what. The caller (the RL trainer) runs no code of a task or a candidate. It talks to *scorers*. A scorer is a
process that is loaded with one task at a time: it owns the reference model, the inputs, the expected outputs and the
comparison. The candidate's Python is executed in a process that has no GPU, and that does nothing but record: which
operators and kernels one forward calls, as data. Only this program is judged, by a process that holds none of the
candidate's Python. judge/processes.py says how these processes are started, confined and ended.

    Sandbox (trainer) --- scorers (one task each: reference, inputs, expected outputs, comparison)
                             |
                             |--- candidate   records its forward
                             '--- replayer    runs the program on inputs unseen by the candidate
                                              without a GPU: interprets its kernels and prices every step
                                              with one: times it, and the reference in turn with it

Two clocks. Without a GPU the time is *modelled* (judge/modelled.py, judge/interpreter.py), with one it is *measured*
(judge/measured.py). A Verdict says which; the two are never compared. What counts as correct is in
judge/correctness.py. A CUDA extension (load_inline) cannot be recorded: with a GPU its candidate runs there in a
process of its own, which takes a minute and stops less (the last column).

What holds on each path (judge/rules.py has the rules; a test for every line is in tests/, mostly test_cheats.py):

    against                     without a GPU               with a GPU                  a CUDA extension
    wrong answers, hidden       fresh inputs of several distributions, parameters perturbed in both constructors,
    in any way                  a tolerance in proportion to the output, the same structure and device
    patching and forging        only the recorded program is judged                     timed from outside
    code in kernels' texts      only the checked syntax tree is interpreted, compiled   it is native code
    state across calls          several forwards are recorded, which must be equal      outputs of timed calls are
                                                            no inputs come twice        checked
    races within a launch       an error                    as the GPU does
    what only Python does       as Triton's compiler does   the GPU runs it
    in a kernel; untrue hints
    outputs without memory of   expanded ones, inputs, one tensor twice: refused        not looked at
    their own
    torch in place of kernels   an operator of known work   measured                    measured
                                only
    decoy kernels               found by leaving them out                               a share of time only
    the machine                 no capability, a read-only file system, a system call   a system call filter, no
                                filter, Landlock                                        capability but one, no network
    hangs, crashes, floods      limits on time, memory and messages, everywhere

    Refused on both clocks: forwards that read computed values, or whose operators' shapes depend on them.
    Not stopped without a GPU: a forward that reads the clock, files or chance; kernels that are slow for reasons that
    have no price (cache misses of scalar loads, all work in one program); a kernel that only copies earns coverage
    where the reference, too, leaves most values as they are.
    Not stopped with a GPU (results/adversaries/measured.md): kernels that reach other memory of their process, where no
    expected output is; that wait while they are profiled, for coverage; results kept between calls whose inputs are not
    drawn at random; what an extension does in its process.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judge import processes
from judge.connection import ScorerConnection
from judge.correctness import KernelTime, Verdict, out_of_memory
from judge.gpu_lock import GpuLock
from judge.messages import Gone, Orphaned
from tasks import Task, TaskError, UserError, load_task, run_command, told

PRECISE = 0.2  # seconds of timing a candidate outside of training, where the interval around its speedup counts
MAX_SCORERS = 16  # scorers with the measured clock: each has references and CUDA contexts in the GPU's memory
MAX_VERDICTS = 10000  # verdicts
JSON_FIELDS = ("compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms", "rejected",
               "error")


@dataclass
class Job:
    """What waits to be done for a task, or is being done by a thread of the pool."""

    task: Task
    codes: list = field(default_factory=list)  # candidates without a verdict
    scorer: ScorerConnection = None  # that judges it; None until one has been started, and after it has ended
    alone: bool = False  # does it have the GPU's memory to itself?


class Crowded(Exception):
    """There was too little of the GPU's memory beside what other jobs hold."""


class Sandbox:
    """Scores candidates. Use as a context manager, or call close().

    All that is handed in waits in one queue, by task. A pool of threads takes from it, each with one scorer at a time.
    Scorers are kept for their tasks' next candidates; where there are enough, the one used least recently goes on with
    another task. With the modelled clock several threads may judge candidates of one task, each with a scorer of its
    own. With the measured clock a task has one scorer, which judges all of its waiting candidates as one batch.

    device     "cpu" (modelled clock) or "cuda", "cuda:1", ... (measured)
    trials     correctness trials for each candidate, every one with fresh inputs
    seed       None draws a secret one; a number makes inputs reproducible, and with the modelled clock every verdict
    timeout    seconds for one candidate (default: 60); those that it waits for others on a GPU do not count
    memory     bytes of host memory for a candidate (default: 8 GiB of address space, with a GPU 32 GiB)
    workers    candidates in work at the same time; by default the number of CPU cores, on a GPU at most 16
    protocol   "strict", or "kernelbench": only the task's own distribution, plain absolute and relative tolerance
    baseline   "eager", or "compile" to measure against torch.compile of the reference
    measure    seconds of timing for each candidate with the measured clock, up to four times as long where something
               disturbs it; at least 8 batches of calls on each side, or 5 long ones
    require_kernel  reject a candidate without a kernel of its own
    remember   keep verdicts, so that an identical candidate of a task is scored once in the life of the sandbox
    clock      "modelled" or "measured", where it should not follow from the device
    tasks      measured clock: tasks in work at the same time; one candidate is timed at a time
    waited     seconds spent in `wait` so far

    Raises UserError for a device that is not there, and for values that do not go together.
    """

    def __init__(self, device="cpu", trials=5, seed=None, timeout=60.0, memory=None, workers=None, protocol="strict",
                 baseline="eager", measure=0.03, require_kernel=True, remember=True, clock=None, tasks=1):
        if str(device).split(":")[0] not in ("cpu", "cuda"):
            raise UserError(f"device {device}: choose cpu or cuda")
        if device != "cpu" and not torch.cuda.is_available():
            raise UserError(f"device {device}: no GPU is available here")
        if protocol not in ("strict", "kernelbench") or baseline not in ("eager", "compile"):
            raise UserError("protocol is strict or kernelbench, baseline is eager or compile")
        clock = clock or ("modelled" if device == "cpu" else "measured")
        if clock == "modelled" and (device != "cpu" or baseline == "compile"):
            raise UserError("the modelled clock knows no GPU and no torch.compile: choose the other clock")
        if device == "cuda":  # which one: the caller's
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
        self.device, self.remember, self.modelled = str(device), remember, clock == "modelled"
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.workers = workers or min(16, len(os.sched_getaffinity(0)))
        self.settings = {"device": self.device, "clock": clock, "trials": trials, "timeout": timeout,
                         "memory": memory or (8 << 30 if device == "cpu" else 32 << 30), "protocol": protocol,
                         "baseline": baseline, "measure": measure, "workers": self.workers, "tasks": tasks,
                         "require_kernel": require_kernel, "scratch": tempfile.mkdtemp(prefix="sandbox-"),
                         "gpus": torch.cuda.device_count()}
        self.patience = 4 * timeout + 300  # seconds without a message after which a scorer is given up
        self.gpu, self.waited = GpuLock(), 0.0
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
        self.control, self.process = processes.start(self.settings)
        count = self.workers if self.modelled else tasks
        self.capacity = count if self.modelled else max(count, MAX_SCORERS)  # scorers, at work and idle
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    # What users call

    def score(self, task, codes):
        """Verdicts for candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        return self.score_pairs([(task, code) for code in codes])

    def score_pairs(self, pairs):
        """Verdicts for (task, code) pairs of any number of tasks, in their order; exactly one each.

        Raises TaskError when one of the tasks cannot be used.
        """
        return [future.result() for future in self.submit(pairs)]

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

    def wait(self, futures):
        """Wait until one of `futures` is done; the seconds are added to self.waited."""
        began = time.monotonic()
        wait(futures, return_when=FIRST_COMPLETED)
        self.waited += time.monotonic() - began

    def sampling(self):
        """A context within which the model may use the GPU: no kernel is being timed then.

        Entering it waits for whoever times a kernel or wants to. Leave it after a few tokens: the others wait for that.
        """
        return self.gpu.shared()

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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # The pool's threads

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


def verdict_from_json(record) -> Verdict:
    """A Verdict out of the objects that it became as JSON, in a scorer's answer or in a file."""
    return Verdict(**record | {"profile": [KernelTime(**entry) for entry in record["profile"]]})


# ---------------------------------------------------------------------------------------------------------------------
# What the policy is told


def feedback(verdict):
    """The next user message's text: what is wrong and where, or how fast and what is hot. At most about 80 words."""
    if verdict.rejected:
        return f"Rejected: {verdict.rejected}."
    if not verdict.compiled or not verdict.correct:
        head = "Correct: no." if verdict.compiled else "Compiled: no."
        text = f"{head} {' '.join((verdict.error or '').split()[:45])}"
        return text + (f"\n{verdict.excerpt}" if verdict.excerpt else "")
    hot = ", ".join(f"{entry.name[:40]}{' (yours)' if entry.own else ''} {entry.share:.0%}"
                    for entry in verdict.profile[:4])
    text = (f"Correct: yes. Speedup {verdict.speedup:.2f}x ({verdict.clock}: {verdict.candidate_ms:.4g} ms against "
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage or 0:.0%} of the work. Time: {hot}.")
    if verdict.tuned:
        text += f" Autotuned: {'; '.join(verdict.tuned[:3])}."
    if verdict.bandwidth is not None:
        flops = f" and {verdict.arithmetic:.0%} of the FLOPs" if verdict.arithmetic else ""
        text += f" Used: {verdict.bandwidth:.0%} of the memory bandwidth{flops}."
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main(argv=None) -> int:
    """0 when a verdict was reached. Raises UserError for a bad command line and for an unusable task."""
    parser = argparse.ArgumentParser(description="Score one kernel by hand: correctness, speedup, coverage.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("task", metavar="TASK.py", help="a problem in KernelBench's format")
    add("candidate", metavar="CANDIDATE.py", help="a file that defines ModelNew")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda measures, cpu models the time")
    add("--trials", type=int, default=5, help="correctness trials")
    add("--timeout", type=float, default=60.0, help="seconds for the candidate")
    add("--seed", type=int, help="makes the inputs reproducible; unpredictable without it")
    add("--protocol", choices=["strict", "kernelbench"], default="strict",
        help="kernelbench: only the task's own inputs, plain tolerances")
    add("--baseline", choices=["eager", "compile"], default="eager",
        help="what to be faster than: the reference as it is, or under torch.compile")
    add("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    options = parser.parse_args(argv)
    if options.trials < 1 or options.timeout <= 0:
        raise UserError("--trials and --timeout must be positive")
    task = load_task(options.task)
    with told(f"{options.candidate}: cannot read the candidate"):
        text = Path(options.candidate).read_bytes()
    with Sandbox(options.device, trials=options.trials, timeout=options.timeout, seed=options.seed,
                 protocol=options.protocol, baseline=options.baseline) as sandbox:
        try:
            verdict = sandbox.score(task, [text.decode()])[0]
        except UnicodeDecodeError:
            verdict = Verdict(clock=sandbox.settings["clock"], error="the candidate's file is not UTF-8")
    print(json.dumps({name: getattr(verdict, name) for name in JSON_FIELDS}) if options.json else feedback(verdict))
    return 0


if __name__ == "__main__":
    run_command(main)
