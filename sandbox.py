"""Is this candidate correct, how fast is it, and did its own kernels do the work?

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json] [--check]

The paper's reward is made of three numbers of a Verdict (policy.davinci_reward):

    correct     in every trial the forward returns and changes what the reference does, to a tolerance. Decided in
                judge/judgement.py (`check`); judge/reference.py draws inputs and sets the tolerance
    speedup     time of the reference / time of the candidate, for one forward
    coverage    time in the candidate's own kernels that matter / time of its whole forward. A kernel matters if the
                output is wrong without it (judgement.py, `leave_out`)

There are two clocks. Without a GPU the time is *modelled* (judge/prices.py). Each PyTorch operator has a price. A
kernel costs what its Triton instances load, store and compute while its IR is interpreted (judge/interpreter.py). With
a GPU the time is *measured*: CUDA graphs of both sides run on new inputs from a cold cache (judge/measured.py). A
Verdict says which clock it is from. We never compare times of the two.

Two kinds of process do the work, a few judges and one recorder for each candidate:

    recorder    runs the candidate's Python, in a jail and without a GPU. It calls forward on tensors that have shapes
                but no values, and hands back a *program*: operator calls and compiled kernel launches, as data
    judge       has the references, inputs, comparison and clock. It runs programs, never a candidate's Python

A candidate goes through four steps, on both clocks:

    record      run the text, record the forward twice; both programs must be equal
    check       in each trial run the program on new inputs, then the reference, and compare
    leave out   each kernel in turn: does it matter?
    time        both sides

What we promise, how we keep it, and what we do not promise:

    1. The candidate's Python never meets the reference, the answers or the clock.
         how   It runs in the recorder, which has none of the three.
    2. Only the recorded program counts.
         how   A program is data: operators and launches, no Python.
         not   On a GPU kernels are native code, which could read the memory of the judge's process.
    3. "Correct" means correct on inputs that the candidate has not seen, side effects included.
         how   Inputs follow from a keyed hash of the run's secret, the task, the text and the trial. The secret is new
               in each run; no recorder has it, and --seed does not set it. Inputs have many structures, and
               parameters are perturbed. Inputs, parameters and buffers that the reference changes are compared, too.
         not   Errors in small values of an output that also has far larger ones. Inputs of a kind that get_inputs does
               not draw: negative ones after torch.rand, where a ReLU may be left out; other integers, NaN, infinity.
    4. "Fast" means fast by the candidate's own work.
         how   A kernel does not count if the output is the same without it. Parameters are perturbed while we time. On
               a GPU timed inputs are new, and timed outputs are checked, to 1e-2.
         not   Results that native code keeps in memory between the calls of one batch.
    5. The modelled clock ranks honest kernels as a GPU does.
         how   We publish its rank correlation with measured speedups on new problems (results/README.md). It refuses,
               by name, an operation without a price.
         not   Candidates written to please the prices, and races between the instances of a launch. It is a teaching
               clock: for results use a GPU.
    6. A candidate costs only itself.
         how   Time, memory, processes, threads, files, text and messages have limits. A judge or recorder that dies is
               started again, and other candidates are judged.
    7. A candidate cannot reach the user's files or the network.
         how   Every process with a candidate's Python runs in a jail (judge/processes.py): installed software is
               read-only, /tmp is empty, and there is no network, no capability and no file of the user's. If the jail
               cannot start, a line on stderr says so, and only the limits apply.
         not   A deliberate attack on the kernel or the GPU's driver. Files in /usr, /etc and /opt that this user may
               read can be read.

We do not check three things: kernels that only move what PyTorch computed, wrong hints to the compiler, and costs
without a price, such as cache misses. A candidate fails, with a message, if it uses torch.compile, CUDA C++ or custom
operators, or if it reads values back to the host. What a candidate prints is thrown away.
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
from judge.processes import SAMPLE, gpu_lock
from judge.verdict import Verdict, printable, verdict_from_json  # noqa: F401 (bench.py reads verdicts with the latter)
from command.files import user_error
from command.process import UserError, run_command
from tasks import load_task

PRECISE_SECONDS = 0.2  # seconds of timing (Settings.measure) in bench.py, which reports the interval around a speedup
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
    trials: int = 5  # for each candidate, with fresh inputs; with 3 or more, one finds buffers that another changed
    tolerance: float = 1e-4  # how closely outputs must agree; papers before 2026 used 1e-2
    secret: str | None = None  # hex digits, from which all inputs follow. None: drawn at random
    timeout: float = 60.0  # seconds for recording one candidate, and without a GPU for judging it. With a GPU checking
    #                        it and timing it have 20 s each; waiting for the GPU does not count
    memory: int | None = None  # bytes of memory for a candidate; None: 8 GiB, with a GPU 32 GiB
    workers: int | None = None  # candidates judged at the same time; None: the number of CPU cores, at most 16
    baseline: str = "eager"  # or "compile": speedups are over torch.compile of the reference
    measure: float = 0.03  # seconds of timing a candidate on a GPU, four times as many if times scatter. Candidate and
    #                        reference each run at least 8 batches of calls, at most 300
    require_kernel: bool = True  # reject a candidate without a kernel of its own
    tasks: int = 1  # measured clock: tasks whose candidates are checked in parallel (one candidate is timed at a time)

    @property
    def clock(self) -> str:
        return "modelled" if self.device == "cpu" else "measured"

    def completed(self):
        """These settings without any None. Raises UserError for a device that is not there, or for wrong values."""
        device = str(self.device)
        on_cpu = str(self.device) == "cpu"
        if not on_cpu and not (device.startswith("cuda") and has_gpu()):
            raise UserError(f"device {device}: no GPU is available here by this name")
        for name in ("trials", "tolerance", "timeout", "measure", "tasks"):
            if not 0 < getattr(self, name) <= 86_400:  # nan is refused, too
                raise UserError(f"{name} {getattr(self, name):g}: choose a number above 0, at most 86400")
        if device == "cuda":  # the one that the caller uses
            import torch
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
        if on_cpu and self.baseline == "compile":
            raise UserError("the modelled clock knows no torch.compile: choose another device")
        secret = self.secret or os.urandom(16).hex()
        memory = self.memory or (8 << 30 if on_cpu else 32 << 30)
        workers = self.workers or min(16, len(os.sched_getaffinity(0)))
        return replace(self, device=device, secret=secret, memory=memory, workers=workers)


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
        self.device = self.settings.device
        self.waited = 0.0
        self.pool = Pool(asdict(self.settings) | {"clock": self.settings.clock})

    def submit(self, pairs) -> list:
        """Judge (task, code) pairs in the background. Returns a Future of a Verdict for each, in their order.

        Equal pairs are judged once. A Future raises TaskError if its task cannot be used, or if the sandbox is closed
        before there is a verdict.
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
        """A context in which the model may use the GPU: no kernel is timed meanwhile.

        Entering it waits for the kernel that is being timed. Kernels that are submitted meanwhile are recorded,
        compiled and checked; they are timed afterwards.
        """
        return gpu_lock(self.pool.settings["gpu"], SAMPLE)

    def prepare(self, tasks):
        """Load these tasks in the background, as many as fit, while the model writes candidates for them.

        Without a GPU it loads nothing. A task that could not be used is tried again.
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

    At most about 80 words. Control characters in the candidate's text are removed.
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
    add("candidate", metavar="CANDIDATE.py", help="a file that defines ModelNew; what it prints is not shown")
    add("--device", default="cuda" if has_gpu() else "cpu", help="cuda measures, cpu models the time")
    add("--trials", type=int, default=Settings.trials, help="correctness trials, each with fresh inputs")
    add("--tolerance", type=float, default=Settings.tolerance, help="papers before 2026 used 1e-2")
    add("--baseline", choices=["eager", "compile"], default="eager", help="the reference as it is, or compiled")
    add("--timeout", type=float, default=Settings.timeout, metavar="SECONDS", help="for recording, and for judging")
    add("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    add("--check", action="store_true", help="end with status 1 unless the candidate is correct")
    options = vars(parser.parse_args(argv))
    must_be_correct = options.pop("check")
    as_json = options.pop("json")
    task = load_task(options.pop("task"))
    path = Path(options.pop("candidate"))
    with user_error(f"{path}: cannot read the candidate"):
        text = path.read_bytes()
    try:
        code = text.decode()
        with Sandbox(workers=1, **options) as sandbox:
            [verdict] = sandbox.score(task, [code])
    except UnicodeDecodeError:
        verdict = Verdict(clock=Settings(**options).completed().clock, error="the candidate's file is not UTF-8")
    verdict = replace(verdict, rejected=verdict.rejected and printable(verdict.rejected),
                      error=verdict.error and printable(verdict.error))
    print(json.dumps({name: getattr(verdict, name) for name in JSON_FIELDS}) if as_json else feedback(verdict))
    return int(must_be_correct and not verdict.correct)


if __name__ == "__main__":
    run_command(main)
