"""Is this candidate correct, how fast is it, and did its own kernels do the work?  (The reward: paper, section 3.)

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json]

Who holds what. The caller (the RL trainer) runs no code of a task or a candidate. It talks to a *scorer*, one process
for each task at a time, which owns the reference model, the inputs, the expected outputs, the comparison and the
clock. The candidate's source is executed in another process, from which nothing is believed: not a time, not a boolean,
not an exit code, not its output stream. judge/processes.py says how these processes are started, confined and ended.
Without a GPU each candidate has one of its own; with one those share it, one after the other, whose sources can leave
nothing behind (judge/side_effects.py).

    Sandbox (trainer) --- scorer (one task: reference, inputs, comparison, clock)
                             |
              without a GPU: |--- candidate   records which operators and kernels one forward calls, runs no kernel
                             '--- replayer    executes that record on inputs unseen by the candidate, and prices it
              with a GPU:    |--- candidate   runs ModelNew on memory shared with the scorer
                             '--- reference   runs Model in the same way, to be timed against it

Two clocks. Without a GPU the time is *modelled* (judge/modelled.py, judge/interpreter.py), with one it is *measured*
(judge/measured.py). A Verdict says which; the two are never compared. What counts as correct is in
judge/correctness.py.

What it stops, on both: wrong answers of every kind, whatever hides them (fresh inputs for every trial, of several
distributions, with perturbed parameters; a tolerance in proportion to the output); torch passed off as a kernel; decoy
kernels; hangs, crashes, floods, hoarding; reading, patching or forging what is in its own process.
Without a GPU nothing that the candidate's Python does can reach the verdict: only the recorded program is judged.
With a GPU that program is a CUDA graph, but it lives in the candidate's process, so three things rest on rules that a
deliberate attack could break: the list in scorer.offence; that the GPU is done when the candidate's CUDA runtime says
so (cross-checked by reading results); and the shares in profile and coverage, which are measured in its process. Native
code of a CUDA extension can do there what it likes. There is a test for every cheat, in tests/test_cheats.py or, where
it takes a GPU, test_sandbox_gpu.py.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import torch

from judge import processes
from judge.correctness import KernelTime, Verdict
from judge.processes import Child, Gone, receive, send
from judge.side_effects import is_plain
from tasks import Task, TaskError, load_task

SCORER = ["-m", "judge.scorer"]  # what the sandbox's processes do
KEPT = 16  # references that stand side by side on a GPU, memory permitting
BORDER = ("compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms", "rejected", "error")


class Sandbox:
    """Scores candidates. Use as a context manager, or call close().

    device     "cpu" (modelled clock) or "cuda", "cuda:1", ... (measured)
    trials     correctness trials for each candidate, every one with fresh inputs
    seed       None draws a secret one; a number makes inputs reproducible, and with the modelled clock every verdict
    timeout    seconds for one candidate (default: 60); those that it waits for others on a GPU do not count
    memory     bytes of host memory for a candidate (default: 8 GiB of address space, with a GPU 32 GiB resident)
    workers    candidates in work at the same time; by default the number of CPU cores, on a GPU at most 16
    protocol   "strict", or "kernelbench": only the task's own distribution, plain absolute and relative tolerance
    baseline   "eager", or "compile" to measure against torch.compile of the reference
    shapes     check a correct candidate on so many randomly rescaled shapes of the task, too (Verdict.generalises)
    measure    seconds of timing for each candidate with the measured clock, up to four times as long where something
               disturbs it; at least 6 batches of calls on each side
    require_kernel  reject a candidate without a kernel of its own
    remember   keep verdicts, so that an identical candidate of a task is scored once in the life of the sandbox
    clock      "modelled" or "measured", where it should not follow from the device
    tasks      measured clock: tasks in work at the same time, each with its reference on the GPU; they time in turn
    """

    def __init__(self, device="cpu", trials=5, seed=None, timeout=60.0, memory=None, workers=None, protocol="strict",
                 baseline="eager", shapes=0, measure=0.05, require_kernel=True, remember=True, clock=None, tasks=1):
        if str(device).split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device {device}: choose cpu or cuda")
        if device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device {device}: no GPU is available here")
        if protocol not in ("strict", "kernelbench") or baseline not in ("eager", "compile"):
            raise ValueError("protocol is strict or kernelbench, baseline is eager or compile")
        clock = clock or ("modelled" if device == "cpu" else "measured")
        if baseline == "compile" and clock == "modelled":
            raise ValueError("the modelled clock knows no torch.compile; measure on a GPU")
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.workers = workers or min(16, len(os.sched_getaffinity(0)))
        if device == "cuda":  # which one: the caller's
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
        memory = memory or (8 << 30 if device == "cpu" else 32 << 30)
        self.device, self.remember, self.verdicts, self.lock = str(device), remember, OrderedDict(), threading.Lock()
        self.settings = {"device": str(device), "clock": clock, "trials": trials, "timeout": timeout, "memory": memory,
                         "protocol": protocol, "baseline": baseline, "shapes": shapes, "measure": measure,
                         "workers": self.workers, "tasks": tasks,
                         "require_kernel": require_kernel, "scratch": tempfile.mkdtemp(prefix="sandbox-")}
        self.idle = OrderedDict()  # source -> scorer whose reference stands; see _rest
        self.blank = []  # scorers that have given their references up
        self.scorers = []  # some of them ended
        self.large = set()  # sources of tasks whose references are not kept
        self.unusable = {}  # source -> why its reference could not be used, in this round
        self.round = 0  # see prepare
        self.starting = {}  # source -> the last thread that has its reference built
        self.known = set()  # keys of kernels that have been compiled, so that no scorer does it again
        self.looked, self.crowded = 0.0, False  # see _look_at_memory
        self.modelled = clock == "modelled"
        self.futures = {}  # (source, code) -> Future of all that has no verdict yet
        self.waiting = {}  # source -> [(task, code)] that nobody has begun with
        self.at_work = Counter()  # source -> threads of _work that judge its candidates
        self.most_at_work = self.workers if self.modelled else tasks
        self.control, self.process = processes.start(SCORER, self.settings)

    def score(self, task, codes):
        """Verdicts for candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        return self.score_pairs([(task, code) for code in codes])

    def prepare(self, tasks):
        """While candidates of these tasks are being written, one for each entry, start what judging them will take.

        That is every task's reference, and the candidates' processes: to come up takes them longer than a measurement.
        Only for the measured clock, and where references of several tasks may stand side by side. Several tasks are
        taken to be a new round: the scorers of earlier ones' tasks can be had for them.
        """
        tasks = [task for task in tasks if task.source not in self.large]
        counts = Counter(task.source for task in tasks)

        def start(task, before, child):
            if before is not None:
                before.join()
            with self.lock:
                child = child or self.idle.pop(task.source, None)
            try:
                child = child or self._start_scorer(task)
                send(child.sock, {"codes": [], "spare": counts[task.source]})
            except TaskError:
                return  # said again when the first candidate comes
            except OSError:
                return child.close()
            self._settle(task.source, child)

        if not self.modelled and self.settings["tasks"] > 1 and len(counts) <= KEPT:
            with self.lock:
                if len(counts) > 1:
                    self.round += 1
                    self.unusable.clear()  # memory may have been short
                others = {source for source, child in self.idle.items() if child.round == self.round}
                others |= self._being_built()
                standing = {source: self.idle.pop(source, None) for source in counts}
                for source, task in {task.source: task for task in tasks}.items():
                    if standing[source] is None and (self.at_work[source] or len(others | {source}) > KEPT):
                        continue  # its turn comes when candidates of others have been judged
                    others.add(source)
                    work = task, self.starting.get(source), standing[source]
                    self.starting[source] = threading.Thread(target=start, args=work, daemon=True)
                    self.starting[source].start()

    def pass_on(self, task, following) -> Task | None:
        """No more candidates of `task` come in this round: its scorer goes on with one of the next round's tasks.

        Returns the first of `following` whose reference it can build, which it begins with; None if there is none, the
        scorer is not idle, or memory is short.
        """
        def go_on():
            try:
                self._employ(child, chosen)
                send(child.sock, {"codes": [], "spare": 1})
            except (TaskError, Gone, OSError):  # tried again in the next round, with all means
                return self._close([child])
            self._settle(chosen.source, child)

        with self.lock:
            begun = self.idle.keys() | self._being_built() | self.large
            can = [one for one in following if one.source not in begun
                   and self._leave_nothing(one.source, task.source)]
            if not can or task.source not in self.idle or self.crowded:
                return None
            child, chosen = self.idle.pop(task.source), can[0]
            self.starting[chosen.source] = threading.Thread(target=go_on, daemon=True)
            self.starting[chosen.source].start()
        return chosen

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
        with self.lock:
            for task, code in pairs:
                key = task.source, code
                future = self.futures.get(key) or Future()
                if key not in self.futures and key in self.verdicts:
                    future.set_result(self.verdicts[key])
                elif key not in self.futures:
                    self.futures[key] = future
                    self.waiting.setdefault(task.source, []).append((task, code))
                futures.append(future)
            more = sum(map(len, self.waiting.values())) if self.modelled else len(self.waiting)
            for _ in range(min(more, self.most_at_work - self.at_work.total())):
                self.at_work[None] += 1
                threading.Thread(target=self._work, daemon=True).start()
        return futures

    def _work(self):
        """Judge what waits, until nothing does."""
        child, current, judged = None, None, []  # judged: [(code, its verdict or an exception)] of the current task
        while True:
            ended = []
            self._look_at_memory()
            with self.lock:
                futures = [self.futures.pop((current, code)) for code, _ in judged]
                self._remember(current, judged)
                left = [source for source in self.waiting if self.modelled or source == current
                        or not self.at_work[source]]
                # Without a GPU stay with the task whose reference stands, else help where fewest are at work; with one
                # all references stand, and those come first that have waited for longest.
                if current not in (left if self.modelled else left[:1]):
                    ended = self._rest(current, child)
                    self.at_work[current] -= 1
                    child, current = None, min(left, key=lambda source: self.at_work[source], default=None)
                    self.at_work[current] += bool(left)
                waiting = self.waiting.pop(current, [])
                count = 1 if self.modelled else len(waiting)
                if waiting[count:]:
                    self.waiting[current] = waiting[count:]
            for future, (_, result) in zip(futures, judged):  # only now, as the scorer must be at rest to be prepared
                (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
            self._close(ended)
            if not left:
                return
            codes = [code for _, code in waiting[:count]]
            try:
                if child is None:
                    self._join(current)
                    with self.lock:
                        child = self.idle.pop(current, None)
                child, verdicts = self._judge(child, waiting[0][0], codes)
                judged = [(code, verdicts[code]) for code in codes]
            except Exception as error:
                if child is not None:
                    child.close()
                child, judged = None, [(code, error) for code in codes]

    def _remember(self, source, judged):
        """self.lock is held."""
        if self.remember:
            self.verdicts.update({(source, code): result for code, result in judged if isinstance(result, Verdict)})
            while len(self.verdicts) > 10000:
                self.verdicts.popitem(last=False)

    def wait(self, futures):
        """Wait until one of `futures` is done."""
        wait(futures, return_when=FIRST_COMPLETED)

    def turn(self):
        """A context within which the GPU may be used beside the sandbox: nothing is being timed then.

        Its value is None, or says whether anybody waits for the context's end: lane.WritingTurn.wanted().
        """
        return contextlib.nullcontext()

    def _join(self, source=None):
        """Wait for the thread that has a task's reference built, or for all of them."""
        with self.lock:
            threads = [thread for one, thread in self.starting.items() if source in (None, one)]
        for thread in threads:
            thread.join()
        with self.lock:
            self.starting = {one: self.starting[one] for one in self._being_built()}

    def _being_built(self) -> set:
        """Sources of tasks for which a thread of prepare or pass_on is at work. self.lock is held."""
        return {source for source, thread in self.starting.items() if thread.is_alive()}

    def _settle(self, source, child):
        """What a thread ends with that has had a reference built."""
        self._look_at_memory()
        with self.lock:
            ended = self._rest(source, child)
        self._close(ended)

    def _rest(self, source, child) -> list:
        """Keep a scorer on a GPU for its task's next turn; where memory is short the heaviest gives its reference up.

        Returns those that are to be ended, without the lock: that takes a while. self.lock is held.
        """
        if child is None:
            return []
        if child.large:
            self.large.add(source)
        if child.large or source in self.idle:  # two have been at work for it
            return [child]
        self.idle[source], child.round = child, self.round
        ended = []
        if self.crowded and (self.blank or len(self.idle) > 1):
            heaviest = max(self.idle, key=lambda source: self.idle[source].weight)
            if self.blank:  # what they have given up was not enough
                ended, self.blank = self.blank, []
            elif self._leave_nothing(heaviest):
                self.blank.append(self.idle.pop(heaviest))
                with contextlib.suppress(OSError):  # who hires it will see that it has died
                    send(self.blank[-1].sock, {})  # give your memory up; to start another process would take far longer
            else:
                ended.append(self.idle.pop(heaviest))
            self.looked, self.crowded = time.monotonic() + 0.3, False  # then that memory is free
        while len(self.idle) + len(self.blank) > (0 if self.modelled else KEPT):
            ended.append(self.blank.pop() if self.blank else self.idle.popitem(last=False)[1])
        return ended

    def _all_idle(self) -> list:
        """self.lock is held."""
        children, self.blank = [*self.idle.values(), *self.blank], []
        self.idle.clear()
        return children

    def _end_idle(self):
        with self.lock:
            children = self._all_idle()
        self._close(children)

    def _close(self, scorers):
        """End scorers; on a GPU their memory is free afterwards."""
        for child in scorers:
            child.sock.close()  # all end at once
        for child in scorers:
            child.close(wait=not self.modelled)

    def _look_at_memory(self):
        """Note whether less than an eighth of the GPU's memory is free.

        Not to be called with self.lock: while others allocate, the driver takes its time to say.
        """
        if self.device != "cpu" and time.monotonic() > self.looked + 0.1:
            began = self.looked = time.monotonic()
            try:
                free, total = torch.cuda.mem_get_info(self.device)
            except RuntimeError:  # it cannot say
                free, total = 0, 1
            if self.looked == began:  # else a scorer has been told meanwhile to give its memory up
                self.crowded = free < total / 8

    def _judge(self, child, task, codes):
        """Verdicts through a scorer, started where there is none. Returns (scorer or None, {code: verdict})."""
        verdicts, attempts = {}, {code: 0 for code in codes}
        while len(verdicts) < len(codes):
            left = [code for code in codes if code not in verdicts]
            if child is None:
                child = self._start_scorer(task)
            batch = left if not max(attempts[code] for code in left) else left[:1]  # after a failure, one by one
            for code in batch:
                attempts[code] += 1
            try:
                send(child.sock, {"codes": batch})
                for _ in batch:
                    patience = 4 * self.settings["timeout"] + 300
                    answer = receive(child.sock, time.monotonic() + patience)
                    answer["verdict"]["profile"] = [KernelTime(**entry) for entry in answer["verdict"]["profile"]]
                    verdicts[batch[answer["index"]]] = Verdict(**answer["verdict"])
                    self.known = self.known | set(answer["known"]) if len(self.known) < 5000 else set()
            except (Gone, OSError):
                child.close(wait=True)
                child = None
                self._end_idle()  # should memory have been short
                for code in batch:
                    if code not in verdicts and attempts[code] >= 2:
                        why = f"the scorer failed on it, twice ({self._last_words()})"
                        verdicts[code] = Verdict(clock=self.settings["clock"], error=why)
        return child, verdicts

    def _last_words(self):
        """The last line that a scorer left before it ended."""
        log = Path(self.settings["scratch"], "scorer.log")
        lines = log.read_text().strip().split("\n") if log.exists() else [""]
        return lines[-1][:200] or "the process ended"

    def _start_scorer(self, task):
        if task.source in self.unusable:
            raise TaskError(self.unusable[task.source])
        for attempt in ("hire", "first", "last"):
            child, control = None, self.control
            self._look_at_memory()
            if control is None:
                raise TaskError("the sandbox is closed")
            try:
                with self.lock:
                    child = self._free_scorer(task) if attempt == "hire" else Child(control, "scorer")
                    if child is None:
                        continue
                    child.round = self.round
                    self.scorers = [one for one in self.scorers if one.life is not None and one is not child] + [child]
                self._employ(child, task)
                self.unusable.pop(task.source, None)
                if child.large:
                    self._end_idle()
                return child
            except TaskError as error:
                why = self.unusable[task.source] = str(error)
            except (Gone, OSError, processes.Orphaned) as error:
                why = "it takes too long" if isinstance(error, TimeoutError) else self._last_words()
                why = f"{task.name}: the reference cannot be judged against ({why})"
            if child is not None:
                child.close()
            if attempt == "hire":
                continue
            with self.lock:
                if self.control is not control:  # another thread has been here
                    continue
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.2)
                alive = self.process.poll() is None  # the warm parent: then it is the task that cannot be used
                if attempt == "last" or alive and not (self.idle or self.blank):
                    break
                if not alive:  # somebody has killed it, and with it all its processes
                    for one in self._all_idle():
                        one.close()
                    self.control.close()
                    os.makedirs(self.settings["scratch"], exist_ok=True)
                    self.control, self.process = processes.start(SCORER, self.settings)
            if alive:
                self._end_idle()  # unless others hold the GPU's memory
        raise TaskError(why)

    def _employ(self, child, task):
        """Have a scorer build a task's reference. Raises TaskError if that cannot be used, and what Child.ask does."""
        job = {"name": task.name, "source": task.source, "seed": self.seed, "known": list(self.known)}
        answer = child.ask(job, time.monotonic() + 3 * self.settings["timeout"] + 60)
        if answer["unusable"]:
            raise TaskError(answer["unusable"])
        child.large, child.weight = answer["large"], answer["weight"]

    def _free_scorer(self, task):
        """A scorer that can go on with this task: a blank one, or else the one that has been idle for longest; or None.

        What it has stood for must be of an earlier round (see prepare), unless this one has all the scorers that there
        may be. self.lock is held.
        """
        if self.blank and self._leave_nothing(task.source):
            return self.blank.pop()
        full = sum(child.life is not None and child.round == self.round for child in self.scorers) >= KEPT
        free = [source for source, child in self.idle.items() if (full or child.round < self.round)
                and self._leave_nothing(task.source, source)]
        return self.idle.pop(free[0]) if free else None

    def _leave_nothing(self, *sources) -> bool:
        """Can one scorer build these tasks' references one after the other? It runs their code."""
        return all(map(is_plain, sources)) and self.settings["shapes"] == 0 and self.settings["baseline"] == "eager"

    def close(self):
        """End every process of the sandbox and remove its scratch folder."""
        if self.control is not None:
            with self.lock:
                control, self.control = self.control, None  # what waits fails from now on
            self._join()
            self._end_idle()
            control.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            processes.remove(self.settings["scratch"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


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
    hot = ", ".join(f"{entry.name}{' (yours)' if entry.own else ''} {entry.share:.0%}" for entry in verdict.profile[:4])
    text = (f"Correct: yes. Speedup {verdict.speedup:.2f}x ({verdict.clock}: {verdict.candidate_ms:.4g} ms against "
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage or 0:.0%} of the work. Time: {hot}.")
    if verdict.bandwidth is not None:
        flops = f" and {verdict.arithmetic:.0%} of the FLOPs" if verdict.arithmetic else ""
        text += f" Used: {verdict.bandwidth:.0%} of the memory bandwidth{flops}."
    return text + (f" Not on other shapes: {verdict.shape_error}." if verdict.shape_error else "")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main():
    parser = argparse.ArgumentParser(description="Score one kernel by hand: correctness, speedup, coverage.")
    parser.add_argument("task", metavar="TASK.py", help="a problem in KernelBench's format")
    parser.add_argument("candidate", metavar="CANDIDATE.py", help="a file that defines ModelNew")
    parser.add_argument("--device", default=None,
                        help="cuda measures, cpu models the time (default: cuda where there is a GPU)")
    parser.add_argument("--trials", type=int, default=5, help="correctness trials (default: 5)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the candidate (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="makes the inputs reproducible (default: unpredictable)")
    parser.add_argument("--protocol", choices=["strict", "kernelbench"], default="strict",
                        help="kernelbench: only the task's own inputs, plain tolerances (default: strict)")
    parser.add_argument("--baseline", choices=["eager", "compile"], default="eager",
                        help="what to be faster than: the reference as it is, or under torch.compile (default: eager)")
    parser.add_argument("--shapes", type=int, default=0, metavar="N",
                        help="check it on N randomly rescaled shapes of the task, too (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    options = parser.parse_args()
    try:
        task = load_task(options.task)
        try:
            code = Path(options.candidate).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{options.candidate}: cannot read the candidate ({type(error).__name__})") from None
        if options.trials < 1 or options.timeout <= 0 or options.shapes < 0:
            raise ValueError("--trials and --timeout must be positive, --shapes not negative")
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        with Sandbox(device, trials=options.trials, timeout=options.timeout, seed=options.seed,
                     protocol=options.protocol, baseline=options.baseline, shapes=options.shapes) as sandbox:
            verdict = sandbox.score(task, [code])[0]
    except ValueError as error:
        print(f"sandbox.py: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({name: getattr(verdict, name) for name in BORDER}))
    else:
        print(feedback(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
