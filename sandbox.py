"""Is this candidate correct, how fast is it, and did its own kernels do the work?

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json] [--check]

The paper's reward is made of three numbers of a Verdict (policy.davinci_reward):

    correct     in every trial what the forward returns and changes agrees with the reference's, to a tolerance. Decided
                in judge/judgement.py, `check`; what is drawn and how closely it must agree in judge/reference.py
    speedup     time of the reference / time of the candidate, for one forward
    coverage    time in the candidate's own kernels that matter / time of its whole forward. A kernel matters if the
                output is wrong without it (judgement.py, `leave_out`)

There are two clocks. Without a GPU the time is *modelled*: prices of operators, and of what a kernel's programs load,
store and compute while Triton's IR of it is interpreted (judge/prices.py, judge/interpreter.py). With a GPU it is
*measured* (judge/measured.py): CUDA graphs of both sides, on new inputs, from a cold cache. A Verdict says which; the
two are never compared.

    trainer -- Sandbox -- judge      a few, each with some tasks: references, inputs, comparison, clock. A candidate's
                  |                  Python does not run here, only its *program*
                  '------ recorder   one a candidate, jailed, without a GPU: runs the candidate's file and calls forward
                                     on tensors without values. It hands back the program: operator calls and kernel
                                     launches, as data. Triton has compiled the kernels

Both clocks follow one order. *Read* the text. *Record* the forward twice: both programs must be equal. *Check*: in each
trial run the program on new inputs, then the reference, and compare. *Leave out* each kernel in turn. *Time* both.

What we promise, how it is kept, and what is not promised:

    The candidate's Python       It runs in the recorder, which has none of them.
    never meets the reference,
    the answers or the clock
    Only the recorded program    It is data: operators and launches, no Python.
    counts                       Not: on a GPU it is native code, which could walk through its process's memory.
    Correct on inputs that it    Inputs come from a keyed hash of the run's secret, the task, the text and the trial.
    has not seen, with the       The secret is drawn once for a run and is never in a recorder's memory; no --seed does
    reference's side effects     this job. Rows of inputs have many structures, parameters are perturbed, and changed
                                 inputs, parameters and buffers are compared, too.
                                 Not: errors in small values of an output that has far larger ones.
    Fast by its own work         A kernel without which the output is the same does not count. Times are taken with
                                 perturbed parameters. While a GPU times a candidate, inputs are new and outputs are
                                 checked, to 1e-2.
                                 Not: results that native code keeps in memory between the calls of one batch.
    The modelled clock ranks     Rank correlation with measured speedups: 0.83 on new problems (results/).
    honest kernels as a GPU      Not: programs written to please the price table, and races between programs of a
                                 launch. It is a teaching clock; train for a result with a GPU. What has no price is
                                 refused there, by name.
    A candidate costs only       Limits on time, memory, processes and threads, files, the size of text and messages. A
    itself                       judge or recorder that dies is started again, and other candidates are judged.
    The machine                  A jail around every process with a candidate's Python (judge/processes.py): programs
                                 are read-only, /tmp is empty, no network, no capabilities, none of the user's files.
                                 Where it cannot start, a line on stderr says so, and only limits apply.
                                 Not: a deliberate attack on the kernel or the GPU's driver. Files that this user may
                                 read in /usr, /etc and /opt can be read.

We do not look for: kernels that only move what PyTorch computed; wrong hints to the compiler; costs without a price,
such as cache misses. Not supported: CUDA C++, operators of one's own, values that the host reads back.
"""

if __name__ == "__main__":
    from command.process import begin
    begin()  # before torch is loaded: it sets how OpenMP's threads wait

import argparse
import json
import os
import time
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from judge.pool import Pool
from judge.processes import SHARED, gpu_lock
from judge.verdict import Verdict, printable, verdict_from_json  # noqa: F401 (bench.py reads verdicts with the latter)
from command.files import user_error
from command.process import UserError, run_command
from tasks import load_task

PRECISE = 0.2  # seconds of timing a candidate outside of training, where the interval around its speedup counts
JSON_FIELDS = ("compiled correct speedup coverage clock reference_ms candidate_ms rejected error bandwidth "
               "arithmetic").split()  # the last two: shares of the roofline, see Verdict


def has_gpu() -> bool:
    """Is there a GPU that PyTorch can use? Without one torch, whose import takes a second, is not needed here."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):  # the latter in WSL
        return False
    import torch
    return torch.cuda.is_available()


@dataclass(frozen=True)
class Settings:
    """How candidates are judged. None: chosen by `completed`."""

    device: str = "cpu"  # or "cuda", "cuda:1", ...
    clock: str | None = None  # "modelled" or "measured"; None: modelled on the CPU, measured on a GPU
    trials: int = 5  # of each candidate, each with fresh inputs; the third finds what earlier ones left in buffers
    tolerance: float = 1e-4  # how closely outputs must agree; papers before 2026 used 1e-2
    secret: str | None = None  # hex digits; the inputs follow from it, and when modelled the verdicts. None: drawn
    timeout: float = 60.0  # seconds for recording one candidate and, without a GPU, for judging it; with one, checking
    #                        it and timing it have 20 s each, without waiting for the GPU
    memory: int | None = None  # bytes of host memory for a candidate; None: 8 GiB of addresses, with a GPU 32 GiB
    workers: int | None = None  # candidates judged at the same time; None: the number of CPU cores, at most 16
    baseline: str = "eager"  # or "compile": speedups are over torch.compile of the reference
    measure: float = 0.03  # seconds of timing each candidate, up to four times as long where something disturbs it; at
    #                        least 8 batches of calls of candidate and reference each, or 5 long ones
    require_kernel: bool = True  # reject a candidate without a kernel of its own
    tasks: int = 1  # measured clock: tasks whose candidates are checked at the same time; one candidate alone is timed

    def completed(self):
        """These settings without any None. Raises UserError for a device that is not there, or for wrong values."""
        device, on_cpu = str(self.device), str(self.device) == "cpu"
        if not on_cpu and not (device.startswith("cuda") and has_gpu()):
            raise UserError(f"device {device}: no GPU is available here by this name")
        for name in ("trials", "tolerance", "timeout", "measure", "tasks"):
            if not 0 < getattr(self, name) <= 86_400:  # nan is refused, too
                raise UserError(f"{name} {getattr(self, name):g}: choose a number above 0, at most 86400")
        if device == "cuda":  # the one that the caller uses
            import torch
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
        clock = self.clock or ("modelled" if on_cpu else "measured")
        if clock == "modelled" and (not on_cpu or self.baseline == "compile"):
            raise UserError("the modelled clock knows no GPU and no torch.compile: choose the other clock")
        secret = self.secret or os.urandom(16).hex()
        memory = self.memory or (8 << 30 if on_cpu else 32 << 30)
        workers = self.workers or min(16, len(os.sched_getaffinity(0)))
        return replace(self, device=device, clock=clock, secret=secret, memory=memory, workers=workers)


class Sandbox:
    """Judges candidates. Use it as a context manager, or call close().

        with Sandbox() as sandbox:
            verdicts = sandbox.score(task, [code, other_code])
            futures = sandbox.submit([(task, code), ...])      the same in the background

    settings    of type Settings, without any None
    waited      seconds spent in `wait` so far
    pool        how candidates are passed on (judge/pool.py)
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

        Entering it waits until no kernel is timed. Kernels that are submitted meanwhile are recorded, compiled and
        checked; they are timed when it is left.
        """
        return gpu_lock(self.pool.settings["gpu"], SHARED)

    def prepare(self, tasks):
        """Load these tasks in the background, as many as fit, while candidates of them are being written.

        It only has an effect with the measured clock. A task that could not be used is tried again.
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

    At most about 80 words, without control characters of the candidate's.
    """
    if verdict.rejected:
        return f"Rejected: {printable(verdict.rejected)}."
    if not verdict.correct:
        head = "Correct: no." if verdict.compiled else "Compiled: no."
        text = f"{head} {' '.join(printable(verdict.error or '').split()[:45])}"
        excerpt = "\n".join(map(printable, verdict.excerpt.split("\n")))
        return f"{text}\n{excerpt}".rstrip()
    hottest = []
    for entry in verdict.profile[:4]:
        hottest.append(f"{printable(entry.name)[:40]}{' (yours)' if entry.own else ''} {entry.share:.0%}")
    text = (f"Correct: yes. Speedup {verdict.speedup:.2f}x ({verdict.clock}: {verdict.candidate_ms:.4g} ms against "
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage or 0:.0%} of the work. "
            f"Time: {', '.join(hottest)}.")
    if verdict.tuned:
        text += f" Autotuned: {printable('; '.join(verdict.tuned[:3]))}."
    if verdict.bandwidth is not None:
        flops = f" and {verdict.arithmetic:.0%} of the FLOPs" if verdict.arithmetic else ""
        text += f" Used: {verdict.bandwidth:.0%} of the memory bandwidth{flops}."
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main(argv=None) -> int:
    """0 when a verdict was reached; with --check 1 unless it says 'correct'.

    Raises UserError for a bad command line and for an unusable task.
    """
    parser = argparse.ArgumentParser(description="Score one kernel by hand: correctness, speedup, coverage.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("task", metavar="TASK.py", help="a problem in KernelBench's format")
    add("candidate", metavar="CANDIDATE.py", help="a file that defines ModelNew")
    add("--device", default="cuda" if has_gpu() else "cpu", help="cuda measures, cpu models the time")
    add("--trials", type=int, default=Settings.trials, help="correctness trials, each with fresh inputs")
    add("--tolerance", type=float, default=Settings.tolerance, help="papers before 2026 used 1e-2")
    add("--baseline", choices=["eager", "compile"], default="eager", help="the reference as it is, or compiled")
    add("--timeout", type=float, default=Settings.timeout, metavar="SECONDS", help="for recording, and for judging")
    add("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    add("--check", action="store_true", help="end with status 1 unless the candidate is correct")
    options = vars(parser.parse_args(argv))
    must_be_correct = options.pop("check")
    as_json, task, path = options.pop("json"), load_task(options.pop("task")), Path(options.pop("candidate"))
    with user_error(f"{path}: cannot read the candidate"):
        text = path.read_bytes()
    try:
        code = text.decode()
        with Sandbox(**options) as sandbox:
            [verdict] = sandbox.score(task, [code])
    except UnicodeDecodeError:
        verdict = Verdict(clock=Settings(**options).completed().clock, error="the candidate's file is not UTF-8")
    verdict = replace(verdict, rejected=verdict.rejected and printable(verdict.rejected),
                      error=verdict.error and printable(verdict.error))
    print(json.dumps({name: getattr(verdict, name) for name in JSON_FIELDS}) if as_json else feedback(verdict))
    return int(must_be_correct and not verdict.correct)


if __name__ == "__main__":
    run_command(main)
