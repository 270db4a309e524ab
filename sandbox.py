"""Is this candidate correct, how fast is it, and did its own kernels do the work?

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json]

The paper's reward is made of three numbers of a Verdict (policy.davinci_reward):

    correct     in every trial each output agrees with the reference's, to a tolerance
    speedup     time of the reference / time of the candidate, for one forward
    coverage    time in the candidate's own kernels whose results reach the output / time of its whole forward

There are two clocks. Without a GPU the time is *modelled* (judge/modelled.py, judge/interpreter.py), with one it is
*measured* (judge/measured.py). A Verdict says which; the two are never compared.

The caller, such as the trainer, runs no code of a task or a candidate. It talks to *scorers*. A scorer is a process
that is loaded with one task at a time; it owns the reference model, the inputs, the expected outputs and the
comparison. The candidate's Python runs in a process that has no GPU and only *records*: which operators and kernels
one forward calls, as data. A third process, which holds none of the candidate's Python, runs that recorded program.

    Sandbox (trainer) --- scorers (one task each: reference, inputs, expected outputs, comparison)
                             |
                             |--- candidate   records its forward
                             '--- replayer    runs the program on inputs that the candidate has not seen
                                              without a GPU: interprets its kernels and prices every step
                                              with one: times it, and the reference in turn with it

A CUDA extension (load_inline) cannot be recorded. With a GPU such a candidate runs there in a process of its own. That
takes a minute, and less is promised for it; without a GPU it is refused.

What we promise. The rules are in judge/rules.py, how outputs are compared in judge/correctness.py, how processes are
confined in judge/processes.py; tests/ has a test for each line, most of them in test_cheats.py.

    Wrong outputs          Each trial has fresh inputs, of several distributions, and parameters that are perturbed
                           alike in both models. Outputs must have the reference's structure, shapes, dtypes and device,
                           and values within a tolerance in proportion to the output. This holds for extensions, too.
    Patching PyTorch,      Only the recorded program is judged: nothing else that the candidate's Python did can count.
    forging results        An extension is timed from outside of its process.
    State across calls     After one call that is not recorded, two forwards are recorded and must be equal. While a GPU
                           times them, no inputs come twice, and one call of each batch, drawn at random, is compared.
                           Of an extension we check the outputs of timed calls.
    Code in kernels' text  We interpret or compile the checked syntax tree, never the text. An extension is native code.
    Races in a launch      We do not look for them. Without a GPU programs run in lockstep, or one by one in order; on a
                           GPU the outputs are what the GPU makes of them.
    Kernels that rely on   Without a GPU the interpreter does what Triton's compiler would do; hints are ignored,
    Python                 asserts are not run, and rare operations are refused by name (judge/lockstep.py). On a GPU
                           the compiled kernel runs.
    Shared outputs         An output that is expanded, an input, or a tensor that is returned twice is refused; not so
                           for an extension.
    PyTorch's operators    Without a GPU we refuse operators whose work is not known. On a GPU they are measured.
    in place of kernels
    Decoy kernels          Each kernel is left out once: where the output stays the same, it has no coverage. A kernel
                           that only moves what PyTorch computed has coverage, but PyTorch's work still takes its time.
                           The coverage of an extension is its share of the time only.
    The machine            Without a GPU: no capabilities, at most 8 processes; where namespaces are permitted, a
                           read-only file system, no network and no sight of other processes. With one: no network
                           where namespaces are permitted, and no capability but to read any file. Where namespaces are
                           not permitted, only the limits hold.
    Hangs, crashes, floods All paths have limits on time, memory and messages. With a GPU a candidate's turn ends after
                           30 s. A candidate costs only itself.

We refuse, on both clocks, forwards that read computed values, or whose operators' shapes depend on them.

What we do not stop without a GPU: a forward that reads the clock, files or random numbers; kernels that are slow for
reasons that have no price (cache misses of scalar loads, all work in one program). Training for a result belongs on
the measured clock.

What we do not stop with a GPU (results/adversaries/measured.md): kernels that reach other memory of their process,
where no expected output is; kernels that wait while they are profiled, for coverage; results that one call of a batch
leaves for another; whatever an extension does in its process. Nor, on either clock, system calls that need no
capability, or an attack on the kernel or the driver.
"""

if __name__ == "__main__":
    from program.process import begin
    begin()  # before torch is loaded: it sets how OpenMP's threads wait

import argparse
import json
import os
import time
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from judge.pool import Pool
from judge.verdict import Verdict, verdict_from_json  # noqa: F401 (bench.py reads verdicts from files with the latter)
from program.files import told
from program.process import UserError, run_command
from tasks import load_task

PRECISE = 0.2  # seconds of timing a candidate outside of training, where the interval around its speedup counts
JSON_FIELDS = "compiled correct speedup coverage clock reference_ms candidate_ms rejected error".split()


@dataclass(frozen=True)
class Settings:
    """How candidates are judged. None: chosen by `completed`."""

    device: str = "cpu"  # or "cuda", "cuda:1", ...
    clock: str | None = None  # "modelled" or "measured"; None: modelled on the CPU, measured on a GPU
    trials: int = 5  # correctness trials of each candidate, each with fresh inputs
    tolerance: float = 1e-4  # how closely outputs must agree; papers before 2026 used 1e-2
    seed: int | None = None  # None: secret inputs. A number: the same inputs again; when modelled, the same verdicts
    timeout: float = 60.0  # seconds for one candidate, without waiting for the GPU. When measured, its use of the GPU
    #                        also has at most 30 s, unless it is an extension
    memory: int | None = None  # bytes of host memory for a candidate; None: 8 GiB of addresses, with a GPU 32 GiB
    workers: int | None = None  # candidates judged at the same time; None: the number of CPU cores, at most 16
    baseline: str = "eager"  # or "compile": speedups are over torch.compile of the reference
    measure: float = 0.03  # seconds of timing each candidate, up to four times as long where something disturbs it; at
    #                        least 8 batches of calls of candidate and reference each, or 5 long ones
    require_kernel: bool = True  # reject a candidate without a kernel of its own
    tasks: int = 1  # measured clock: tasks loaded and checked at the same time; only one candidate is timed at a time

    def completed(self):
        """These settings without any None. Raises UserError for a device that is not there, or for wrong values."""
        device, on_cpu = str(self.device), str(self.device) == "cpu"
        if not on_cpu and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise UserError(f"device {device}: no GPU is available here by this name")
        for name in ("trials", "tolerance", "timeout", "measure", "tasks"):
            if not 0 < getattr(self, name) <= 86_400:  # nan is refused, too
                raise UserError(f"{name} {getattr(self, name):g}: choose a number above 0, at most 86400")
        if device == "cuda":  # the one that the caller uses
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
        clock = self.clock or ("modelled" if on_cpu else "measured")
        if clock == "modelled" and (not on_cpu or self.baseline == "compile"):
            raise UserError("the modelled clock knows no GPU and no torch.compile: choose the other clock")
        seed = int.from_bytes(os.urandom(8), "little") if self.seed is None else self.seed
        memory = self.memory or (8 << 30 if on_cpu else 32 << 30)
        workers = self.workers or min(16, len(os.sched_getaffinity(0)))
        return replace(self, device=device, clock=clock, seed=seed, memory=memory, workers=workers)


class Sandbox:
    """Judges candidates. Use it as a context manager, or call close().

        with Sandbox() as sandbox:
            verdicts = sandbox.score(task, [code, other_code])
            futures = sandbox.submit([(task, code), ...])      the same in the background

    settings    of type Settings, without any None
    waited      seconds spent in `wait` so far
    pool        how candidates wait, and for which scorer (judge/pool.py)
    """

    def __init__(self, device="cpu", **settings):
        """settings: fields of Settings. Raises UserError, see Settings.completed."""
        self.settings = Settings(device, **settings).completed()
        self.device, self.waited = self.settings.device, 0.0
        self.pool = Pool(asdict(self.settings))

    def submit(self, pairs) -> list:
        """Have (task, code) pairs judged in the background. A Future of a Verdict for each, in their order.

        A Future raises TaskError when its task cannot be used, or when the sandbox is closed meanwhile. A pair that has
        been judged is not judged again, nor is one that waits or is being judged: equal pairs share a Future.
        """
        return self.pool.submit(pairs)

    def score(self, task, codes) -> list[Verdict]:
        """Verdicts of candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        futures = self.submit([(task, code) for code in codes])
        return [future.result() for future in futures]

    def wait(self, futures):
        """Wait until one of `futures` is done; the seconds are added to self.waited."""
        began = time.monotonic()
        wait(futures, return_when=FIRST_COMPLETED)
        self.waited += time.monotonic() - began

    def sampling(self):
        """A context within which the model may use the GPU: no kernel is being timed then.

        Entering it waits until no kernel is timed and none waits to be. Kernels that are submitted meanwhile are
        recorded and compiled; they are timed when it is left.
        """
        return self.pool.gpu.shared()

    def prepare(self, tasks):
        """Build the references of these tasks in the background, while candidates of them are being written.

        It takes a second each, and only has an effect with the measured clock and settings.tasks > 1. A task that could
        not be used is tried again.
        """
        self.pool.prepare(tasks)

    def close(self):
        """End every process of the sandbox and remove its scratch folder. Futures without a verdict raise TaskError."""
        self.pool.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# What the policy is told


def feedback(verdict):
    """The text of the next user message: what is wrong and where, or how fast and what takes the time.

    At most about 80 words.
    """
    if verdict.rejected:
        return f"Rejected: {verdict.rejected}."
    if not verdict.correct:
        head = "Correct: no." if verdict.compiled else "Compiled: no."
        text = f"{head} {' '.join((verdict.error or '').split()[:45])}"
        return text + (f"\n{verdict.excerpt}" if verdict.excerpt else "")
    hottest = [f"{e.name[:40]}{' (yours)' if e.own else ''} {e.share:.0%}" for e in verdict.profile[:4]]
    text = (f"Correct: yes. Speedup {verdict.speedup:.2f}x ({verdict.clock}: {verdict.candidate_ms:.4g} ms against "
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage or 0:.0%} of the work. "
            f"Time: {', '.join(hottest)}.")
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
    add("--trials", type=int, default=Settings.trials, help="correctness trials, each with fresh inputs")
    add("--tolerance", type=float, default=Settings.tolerance, help="papers before 2026 used 1e-2")
    add("--seed", type=int, help="makes the inputs reproducible; without it they are unpredictable")
    add("--baseline", choices=["eager", "compile"], default="eager", help="the reference as it is, or compiled")
    add("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    options = vars(parser.parse_args(argv))
    as_json, task, path = options.pop("json"), load_task(options.pop("task")), Path(options.pop("candidate"))
    with told(f"{path}: cannot read the candidate"):
        text = path.read_bytes()
    with Sandbox(**options) as sandbox:
        try:
            verdict = sandbox.score(task, [text.decode()])[0]
        except UnicodeDecodeError:
            verdict = Verdict(clock=sandbox.settings.clock, error="the candidate's file is not UTF-8")
    print(json.dumps({name: getattr(verdict, name) for name in JSON_FIELDS}) if as_json else feedback(verdict))
    return 0


if __name__ == "__main__":
    run_command(main)
