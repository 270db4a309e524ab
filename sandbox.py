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
import json
import os
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import torch

from judge.pool import Pool
from judge.verdict import Verdict, verdict_from_json  # noqa: F401 (the latter for who reads verdicts from files)
from tasks import UserError, check_numbers, load_task, run_command, told

PRECISE = 0.2  # seconds of timing a candidate outside of training, where the interval around its speedup counts
JSON_FIELDS = "compiled correct speedup coverage clock reference_ms candidate_ms rejected error".split()


class Sandbox(Pool):
    """Scores candidates. Use as a context manager, or call close().

        with Sandbox() as sandbox:
            verdicts = sandbox.score(task, [code, other_code])
            futures = sandbox.submit([(task, code), ...])      the same in the background

    How candidates wait, and for which scorer, is judge/pool.py, which has submit, prepare, end_idle and close.

    device     "cpu" (modelled clock) or "cuda", "cuda:1", ... (measured)
    trials     correctness trials for each candidate, every one with fresh inputs
    seed       None draws a secret one; a number makes inputs reproducible, and with the modelled clock every verdict
    timeout    seconds for one candidate (default: 60), without those that it waits for others on a GPU; with the
               measured clock at most 10 for one forward and 30 in its turn on the GPU, but an extension's
    memory     bytes of host memory for a candidate (default: 8 GiB of address space, with a GPU 32 GiB)
    workers    candidates in work at the same time; by default the number of CPU cores, at most 16
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
        self.waited = 0.0
        super().__init__({"device": str(device), "clock": clock, "trials": trials, "timeout": timeout,
                          "memory": memory or (8 << 30 if device == "cpu" else 32 << 30), "protocol": protocol,
                          "baseline": baseline, "measure": measure, "tasks": tasks, "require_kernel": require_kernel,
                          "workers": workers or min(16, len(os.sched_getaffinity(0))),
                          "scratch": tempfile.mkdtemp(prefix="sandbox-"), "gpus": torch.cuda.device_count()},
                         int.from_bytes(os.urandom(8), "little") if seed is None else seed, remember)

    def score(self, task, codes):
        """Verdicts for candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        return self.score_pairs([(task, code) for code in codes])

    def score_pairs(self, pairs):
        """Verdicts for (task, code) pairs of any number of tasks, in their order; exactly one each.

        Raises TaskError when one of the tasks cannot be used.
        """
        return [future.result() for future in self.submit(pairs)]

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
    if not verdict.correct:
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
    check_numbers(vars(options), above_0=("trials", "timeout"), at_most={"timeout": 86_400})
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
