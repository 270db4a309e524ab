"""Is this candidate correct, how fast is it, and did its own kernels do the work?  (The reward: paper, section 3.)

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json]

Who holds what. The caller (the RL trainer) runs no code of a task or a candidate. It talks to a *scorer*, one process for
each task at a time, which owns the reference model, the inputs, the expected outputs, the comparison and the clock. The
candidate's source is executed in a process of its own, from which nothing is believed: not a time, not a boolean, not an
exit code, not its output stream. jail.py says how these processes are started, confined and ended.

    Sandbox (trainer) --- scorer (one task: reference, inputs, comparison, clock)
                             |
              without a GPU: |--- candidate   records which operators and kernels one forward calls, runs no kernel
                             '--- replayer    executes that record on inputs unseen by the candidate, and prices it
              with a GPU:    |--- candidate   runs ModelNew on memory shared with the scorer
                             '--- reference   runs Model in the same way, to be timed against it

Two clocks. Without a GPU the time is *modelled* (roofline.py), with one it is *measured* (stopwatch.py). A Verdict says
which; the two are never compared.

What it stops, on both: wrong answers of every kind, hidden by whatever input it takes (fresh inputs for every trial, of
several distributions, with perturbed parameters; tolerance in proportion to the output); torch passed off as a kernel;
decoy kernels; hangs, crashes, floods, hoarding; anything that reads, patches or forges what is in its own process.
Without a GPU nothing the candidate's Python does can reach the verdict, because only the recorded program is judged.
With a GPU its Python is in the timed path, so three things rest on rules that a deliberate attack could break: the list
in `static_check`, the GPU's completion as its own CUDA runtime reports it (cross-checked by reading the results), and
the shares in its profile and coverage (measured in its process). tests/test_cheats.py holds one test for every cheat.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import jail
from jail import Child, Gone, receive, send
from tasks import Task, TaskError, load_task


@dataclass
class KernelTime:
    name: str  # an ATen operator's or a Triton kernel's name
    share: float  # of the forward's time, 0 to 1, all calls of that name together
    own: bool  # is it one of the candidate's kernels?


@dataclass
class Verdict:
    compiled: bool = False  # the source runs, defines ModelNew, and every launched kernel compiles
    correct: bool = False  # every trial's output agrees to 1e-4
    speedup: float | None = None  # reference_ms / candidate_ms, eager PyTorch being the reference; None unless correct
    coverage: float | None = None  # share of the forward's time in own kernels whose results reach the output
    clock: str = "modelled"  # or "measured"; the two are never compared
    reference_ms: float | None = None
    candidate_ms: float | None = None
    rejected: str | None = None  # the reason, when the candidate was caught cheating; then it is not correct
    error: str | None = None  # one line: what went wrong, otherwise
    correct_loose: bool = False  # every output agrees to 1e-2, the tolerance of papers before 2026
    speedup_low: float | None = None  # lower end of the speedup's 95 % interval; the speedup itself when modelled
    profile: list = field(default_factory=list)  # [KernelTime], hottest first
    excerpt: str = ""  # the candidate's lines around an error, numbered
    disturbed: bool = False  # measured while something else used the GPU: the times scatter by more than 10 %


BORDER = ("compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms", "rejected", "error")


# ---------------------------------------------------------------------------------------------------------------------
# What can be judged without running anything


def numbered(code, line, around=2):
    """The candidate's lines around `line`, numbered, or an empty string."""
    lines = code.split("\n")
    if not isinstance(line, int) or not 0 < line <= len(lines):
        return ""
    first, last = max(line - 1 - around, 0), min(line + around, len(lines))
    return "\n".join(f"{i + 1:4d}{'>' if i + 1 == line else ' '} {lines[i]}" for i in range(first, last))[:600]


def describe(error, path, code=""):
    """(one line of text, line number in the file `path` or None) for an exception."""
    line, frame, node = getattr(error, "lineno", None), error.__traceback__, getattr(error, "node", None)
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    text = " ".join(str(getattr(error, "error_message", None) or error).split())
    if node is not None and getattr(error, "src", None):  # triton counts lines from the kernel's `def`
        head = error.src.split("\n")[0]
        line = code[:code.find(head)].count("\n") + node.lineno if head in code else line
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__, line


def static_check(code):
    """Judge what needs no execution: returns a Verdict, or None to go on."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        text, line = describe(error, "")
        return Verdict(error=f"does not parse: {text}", excerpt=numbered(code, line))
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in tree.body):
        return Verdict(error="the code defines no class ModelNew")
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The reference: inputs, expected outputs, comparison


def derive(seed, *parts) -> int:
    """A seed for one purpose, from the run's secret seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *parts)).encode()).digest()[:4], "little") // 2


def seed_everything(seed):
    """Seed every generator that a problem's get_inputs may use."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
        numpy.random.seed(seed)
    except ImportError:
        pass


def identical(a, b):
    """Bitwise equality of two tensors (so that NaN equals NaN)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def vary(inputs, kind):
    """Inputs of another distribution that stay in the domain of the first: zeros stay zero, ranges are not left.

    Scaling and sign flips leave triangular, diagonal, symmetric and masked inputs what they are, so that a kernel that
    exploits such structure honestly passes, and one that relies on mean 0.5 or on small values does not.
    """
    def one(x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
            return x
        signed = bool(x.min() < 0) and bool(x.max() > 0)
        return x * {1: -1.0 if signed else 0.5, 2: 3.0 if signed else 0.8, 3: 0.1 if signed else 0.3}[kind]
    return [one(x) for x in inputs]


@dataclass
class Trial:
    inputs: list
    seed: int  # for random operators in the forward
    state: dict  # parameters and buffers other than the constructed ones: {name: tensor}; empty where those are used
    expected: list = None  # the leaves of the reference's output
    allowed: list = None  # for each, see Reference.tolerance
    changed: list = None  # indices of inputs that the reference itself changes in place


class Reference:
    """A task's reference model in the scorer: trials, their expected outputs, the comparison.

    Raises TaskError when the reference cannot be built or run, or gives nothing that could be compared.
    """

    def __init__(self, job, settings):
        self.job, self.strict = job, settings["protocol"] == "strict"
        self.device, self.lock, self.kept = torch.device(settings["device"]), threading.RLock(), {}
        try:
            path = Path(tempfile.mkdtemp(dir=".")) / "reference.py"
            self.module = load_module("reference", job["source"], path)
            seed_everything(derive(job["seed"], "arguments"))
            self.arguments = list(self.module.get_init_inputs())
            self.parameter_seed = derive(job["seed"], "parameters")
            try:
                self.on_device = self.device.type != "cpu"
                self.model = self.construct()
            except (RuntimeError, TypeError):
                if not self.on_device:
                    raise
                self.on_device = False  # a constructor that needs its tensors on the CPU
                self.model = self.construct()
            self.state = {name: t.detach().clone() for name, t in self.tensors()}
            self.trial(0)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"{job['name']}: the reference fails: {describe(error, '')[0]}") from None

    def construct(self):
        torch.manual_seed(self.parameter_seed)
        arguments = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in self.arguments]
        with self.device if self.on_device else contextlib.nullcontext():
            return self.module.Model(*arguments).to(self.device)

    def tensors(self):
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def draw(self, *purpose):
        """Fresh inputs from the task's get_inputs, made on the device."""
        with self.lock, self.device if self.on_device else contextlib.nullcontext():
            seed_everything(derive(self.job["seed"], self.job["source"], *purpose))
            inputs = list(self.module.get_inputs())
        return [x.detach().to(self.device) if isinstance(x, torch.Tensor) else x for x in inputs]

    def trial(self, index, perturb=True):
        """Trial number `index`. The first is as the task draws it. The others of the strict protocol are fresh draws, of
        varied distributions and (with `perturb`) with perturbed parameters, as long as the reference stays finite there.
        """
        with self.lock:
            if (index, perturb) in self.kept:
                return self.kept[index, perturb]
            kinds = [1 + (index - 1) % 3, 0] if index and self.strict else [0]
            for kind in kinds:
                seed = derive(self.job["seed"], self.job["source"], "trial", index)
                inputs = self.draw("trial", index)
                trial = Trial(vary(inputs, kind) if kind else inputs, seed,
                              self.perturbed(seed) if index and self.strict and perturb else {})
                try:
                    trial.expected, trial.changed = self.run(trial)
                except RuntimeError:
                    if kind == kinds[-1]:
                        raise
                    continue
                if not trial.expected or not all(isinstance(t, torch.Tensor) for t in trial.expected):
                    raise TaskError(f"{self.job['name']}: the reference returns something other than tensors")
                if all(not t.is_floating_point() or bool(t.isfinite().all()) for t in trial.expected):
                    break
            trial.allowed = self.tolerance(trial)
            size = sum(t.numel() * t.element_size() for t in tree_leaves([trial.inputs, trial.expected])
                       if isinstance(t, torch.Tensor))
            if size < 1 << 29:
                self.kept[index, perturb] = trial
            return trial

    def perturbed(self, seed):
        """Parameters and float buffers moved a little, so that no weight is exactly 1 and no bias 0."""
        generator = torch.Generator(self.device).manual_seed(seed)
        moved = {}
        for name, value in self.state.items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator, device=self.device) * 2 - 1
                shift = 0 if name.endswith("running_var") else 0.05 * torch.randn(
                    value.shape, generator=generator, device=self.device)
                moved[name] = (value * (1 + 0.2 * noise) + shift).to(value.dtype)
        return moved

    def run(self, trial, around=None, dtype=None):
        """(leaves of the output, indices of inputs that the forward changed), on private copies of a trial's inputs."""
        with self.lock, torch.no_grad():
            inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in trial.inputs]
            for name, tensor in self.tensors():
                tensor.copy_(trial.state.get(name, self.state[name]))
            if dtype is not None:
                self.model.to(dtype)
                inputs = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
            torch.manual_seed(trial.seed)
            with around or contextlib.nullcontext():
                out = self.model(*inputs)
            changed = [] if dtype is not None else [i for i, (old, new) in enumerate(zip(trial.inputs, inputs))
                                                    if isinstance(old, torch.Tensor) and not identical(old, new)]
            return tree_leaves(out), changed

    def tolerance(self, trial):
        """For each output (a, b): |difference| may be up to tolerance * (a + |expected|) + b.

        Strict: a is the output's own size where that is below 1 (zeros must not pass because all values are small), and
        b is the rounding error of the reference itself, measured against float64 (nobody is asked for more than that).
        """
        if not self.strict:
            return [(1.0, 0.0)] * len(trial.expected)
        exact = [None] * len(trial.expected)
        tensors = tree_leaves([trial.inputs, trial.expected, self.state])
        if sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)) < 1 << 27:
            try:
                exact = self.run(trial, dtype=torch.float64)[0]
            except (RuntimeError, TypeError):
                pass  # it mixes in tensors of a fixed type
            for name, tensor in self.tensors():
                tensor.data = tensor.data.to(self.state[name].dtype)
        most = 5e-3 if self.device.type == "cuda" else 1e-3  # cuDNN convolves in TF32 by default
        allowed = []
        for mine, other in zip(trial.expected, exact):
            if not mine.is_floating_point() or mine.numel() == 0:
                allowed.append((1.0, 0.0))
                continue
            values = mine.float().nan_to_num(0, 0, 0)
            size = float(values.square().mean().sqrt())
            rounding = 1e-5 * size if other is None else 4 * float((mine.double() - other).nan_to_num(0, 0, 0).abs().max())
            allowed.append((min(1.0, size), min(rounding, most * size + 1e-7)))
        return allowed


def compare(trial, got, tolerance):
    """None when every output agrees, else one line saying what is wrong, where and by how much. got: leaves."""
    if len(trial.expected) != len(got):
        return f"wrong output: {len(got)} tensors instead of {len(trial.expected)}"
    for index, (a, b, (size, rounding)) in enumerate(zip(trial.expected, got, trial.allowed)):
        name = "output" if len(got) == 1 else f"output {index}"
        if not isinstance(b, torch.Tensor):
            return f"wrong {name}: a {b if isinstance(b, str) else type(b).__name__} instead of a tensor"
        if a.shape != b.shape:
            return f"wrong {name}: shape {list(b.shape)} instead of {list(a.shape)}"
        if a.dtype != b.dtype:
            return f"wrong {name}: dtype {b.dtype} instead of {a.dtype}"
        if b.device.type != a.device.type:
            return f"wrong {name}: on another device"
        a, b, shape = a.reshape(-1), b.reshape(-1), a.shape
        count, worst, where = 0, -1.0, 0
        for start in range(0, a.numel(), 1 << 25):  # in pieces: outputs may fill a good part of the GPU's memory
            x, y = a[start:start + (1 << 25)], b[start:start + (1 << 25)]
            if a.is_floating_point():
                x, y = (x, y) if x.dtype == torch.float64 else (x.float(), y.float())
                difference = (x - y).abs()
                wrong = ~(difference <= x.abs().mul_(tolerance).add_(tolerance * size + rounding))
                wrong &= ~((x == y) | (x.isnan() & y.isnan()))  # infinities, and NaN where the reference has it
            else:
                difference, wrong = (x.double() - y.double()).abs(), x != y
            found = int(wrong.sum())
            if found:
                count += found
                difference = torch.where(wrong, difference.nan_to_num(float("inf")), torch.zeros_like(difference))
                if float(difference.max()) > worst:
                    worst, where = float(difference.max()), start + int(difference.argmax())
        if count:
            x, y, position = float(a[where]), float(b[where]), []
            for n in reversed(shape):
                position.insert(0, where % n)
                where //= n
            return (f"wrong values: {max(count / a.numel(), 0.01):.0%} of {name} {list(shape)}, worst at {position}: "
                    f"expected {x:.4g}, got {y:.4g}")
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The candidate's process


def load_module(name, code, path):
    """Execute a source text as a module that inspect can find."""
    path = Path(path).absolute()
    path.write_text(code)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def candidate(sock, warm, settings):
    """Role of the process that holds a candidate's code. Everything sent from here is checked, or replayed by others."""
    path = Path("candidate.py").absolute()
    if settings["clock"] == "measured":
        import stopwatch
        stopwatch.Host(settings, path, load_module, describe).serve(sock)
        return
    import roofline
    job = receive(sock)
    stage = "compile"
    try:
        module = load_module("candidate", job["code"], path)
        stage = "build"
        torch.manual_seed(job["seed"])
        model = module.ModelNew(*job["arguments"])
        stage = "forward"
        program, constants = roofline.record(model, job["inputs"])
        send(sock, {"program": program, "constants": constants})
    except BaseException as error:  # SystemExit included: the verdict says what happened
        text, line = describe(error, path, job["code"])
        send(sock, {"failed": stage, "error": text, "line": line})


def replayer(sock, warm, settings):
    """Role of the process that runs a recorded program: no host code of the candidate gets here (roofline.Replay)."""
    import lockstep
    import roofline

    job = receive(sock)
    stage = "compile"
    try:
        replay = roofline.Replay(job["code"], job["program"], job["constants"])
        send(sock, {"compiled": True})
        stage = "forward"
        while True:
            run = receive(sock)
            before = [tensor.clone() for tensor in run["inputs"]]
            output, events, live = replay.run(run["inputs"], run["seed"], run["state"], run["price"], set(run["mute"]))
            changed = [i for i, (old, new) in enumerate(zip(before, run["inputs"])) if not identical(old, new)]
            send(sock, {"output": output, "events": events, "live": live, "changed": changed})
    except lockstep.KernelError as error:
        send(sock, {"failed": error.stage, "error": str(error)[:300], "line": error.line})
    except Exception as error:
        send(sock, {"failed": stage, "error": describe(error, "")[0], "line": None})


# ---------------------------------------------------------------------------------------------------------------------
# Judging: the scorer's side


def set_failure(verdict, code, stage, error, line):
    verdict.compiled, verdict.correct, verdict.correct_loose = stage != "compile", False, False
    verdict.error, verdict.excerpt = str(error)[:400], numbered(code, line)
    return verdict


def note_comparison(verdict, trial, leaves, note=""):
    """Enter one trial's comparison. Returns whether there is any point in another trial."""
    problem = compare(trial, leaves, 1e-4)
    if problem:
        verdict.correct, verdict.error = False, verdict.error or problem + note
        verdict.correct_loose = verdict.correct_loose and compare(trial, leaves, 1e-2) is None
    return verdict.correct_loose


def set_profile(verdict, events, own):
    """Enter profile and coverage. events: [[milliseconds, label, is it an own kernel]]; own: labels that count."""
    total = max(sum(ms for ms, _, _ in events), 1e-9)
    shares = {}
    for ms, label, mine in events:
        shares[str(label), bool(mine)] = shares.get((str(label), bool(mine)), 0.0) + ms / total
    verdict.profile = [KernelTime(label, share, mine) for (label, mine), share in
                       sorted(shares.items(), key=lambda entry: (-entry[1], entry[0]))]
    verdict.coverage = sum(entry.share for entry in verdict.profile if entry.own and entry.name in own)


def reaching(names, still_right):
    """The kernels of `names` without which the output is no longer right. still_right(muted names) -> bool."""
    if not names or still_right(sorted(names)):
        return set()
    return names if len(names) == 1 else {name for name in names if not still_right([name])}


def judge_modelled(reference, code, warm, settings):
    """Record the candidate in one process, replay it in another, compare and price."""
    from roofline import Clock

    verdict, children, deadline = Verdict(clock="modelled"), [], time.monotonic() + settings["timeout"]
    try:
        children.append(Child(warm, "candidate"))
        answer = children[0].ask({"code": code, "seed": reference.parameter_seed, "arguments": reference.arguments,
                                  "inputs": reference.draw("example")}, deadline)
        children[0].close()
        if "failed" in answer:
            return set_failure(verdict, code, answer["failed"], answer["error"], answer["line"])
        program, constants = answer["program"], answer["constants"]
        verdict.compiled = True
        if settings["require_kernel"] and not any(step[0] == "launch" for step in program["steps"]):
            verdict.rejected = "launches no kernel of its own"
            return verdict
        children.append(Child(warm, "replayer"))
        answer = children[1].ask({"code": code, "program": program, "constants": constants}, deadline)
        if "failed" in answer:
            return set_failure(verdict, code, answer["failed"], answer["error"], answer["line"])

        # Which recorded constants are the model's parameters. Perturbed ones can be put in their place only if the
        # forward reads nothing else that may have been derived from them.
        matched = {name: ref[0] for name, ref in program["state"].items() if name in reference.state and identical(
            reference.state[name].contiguous().view(-1).view(torch.uint8), constants.get(ref[0], torch.empty(0)))}
        derived = any(number not in matched.values() and data.numel() > 256 for number, data in constants.items())
        note = "" if len(matched) == len(reference.state) else \
            "; its parameters differ from the reference's (create them in the same order, with the same shapes)"

        def run(trial, price=False, mute=()):
            state = {matched[name]: value.contiguous().view(-1).view(torch.uint8)
                     for name, value in trial.state.items() if name in matched}
            return children[1].ask({"inputs": [x for x in trial.inputs if isinstance(x, torch.Tensor)],
                                    "seed": trial.seed, "state": state, "price": price, "mute": list(mute)}, deadline)

        verdict.correct = verdict.correct_loose = True
        for index in range(settings["trials"]):
            trial = reference.trial(index, perturb=not derived)
            answer = run(trial, price=index == 0)
            if "failed" in answer:
                return set_failure(verdict, code, answer["failed"], answer["error"], answer["line"])
            if index == 0:
                events, live = answer["events"], answer["live"]
            if set(answer["changed"]) - set(trial.changed):
                verdict.correct, verdict.rejected = False, "changes its input tensors in place"
                return verdict
            if not note_comparison(verdict, trial, tree_leaves(answer["output"]), note):
                break
        first = reference.trial(0)

        def still_right(muted):
            answer = run(first, mute=muted)
            return "failed" not in answer and compare(first, tree_leaves(answer["output"]), 1e-4) is None

        own = {label for (_, label, mine), alive in zip(events, live) if mine and alive}
        if verdict.correct and settings["require_kernel"]:
            own = reaching(own, still_right)
            if not own:
                verdict.correct, verdict.rejected = False, "the results of its kernels do not reach the output"
        set_profile(verdict, events, own)
        clock = Clock()
        reference.run(first, around=clock)
        verdict.reference_ms, verdict.candidate_ms = (sum(event[0] for event in e) for e in (clock.events, events))
        if verdict.correct:
            verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        return verdict
    except TimeoutError:
        return set_failure(verdict, code, "forward", f"no result within {settings['timeout']:g} s", None)
    except (Gone, OSError):
        return set_failure(verdict, code, "forward", "the process ended without a result (crash, exit or memory limit)", None)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return set_failure(verdict, code, "forward", "the recorded program is malformed", None)
    finally:
        for child in children:
            child.close()


class Measured:
    """The scorer's part of the measured clock for one task: a reference lane, and judging many candidates at a time.

    All candidates of a wave are started, compiled and checked at once; then they are timed one after the other, so that
    nothing else runs on the GPU meanwhile.
    """

    def __init__(self, reference, warm, settings):
        import stopwatch

        self.reference, self.warm, self.settings, self.stopwatch = reference, warm, settings, stopwatch
        self.cuda = reference.device.type == "cuda"
        self.first = reference.trial(0)
        self.input_bytes = sum(t.numel() * t.element_size() for t in self.first.inputs if isinstance(t, torch.Tensor))
        self.output_bytes = sum(t.numel() * t.element_size() for t in self.first.expected)
        self.slots = max(1, min(32, (2 << 30) // max(self.input_bytes + self.output_bytes, 1)))
        self.floor_ms, self.cold = 0.0, None
        self.width = settings["workers"]
        if self.cuda:
            each = (self.slots + 1) * (self.input_bytes + 2 * self.output_bytes) + (1 << 30)
            self.width = max(1, min(self.width, int(torch.cuda.mem_get_info()[0] * 0.5 / each)))
            self.cold = torch.empty(256 << 20, dtype=torch.uint8, device=reference.device)  # more than any L2 cache
            self.clear_cache()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(10):
                self.clear_cache()
            torch.cuda.synchronize()
            if self.output_bytes > 256 << 20:  # what the cache cannot absorb is written at memory speed
                self.floor_ms = (time.perf_counter() - began) * 1e2 * self.output_bytes / self.cold.numel() * 0.6
        self.lane = stopwatch.Lane(warm, settings)
        self.lane.build(reference.job["source"], "Model", reference.arguments, reference.parameter_seed,
                        reference.on_device, compile_it=settings["baseline"] == "compile")
        self.ipc = self.lane.share(self.first.inputs, self.first.expected, self.slots)

    def clear_cache(self):
        if self.cold is not None:
            self.cold.zero_()
            torch.cuda.synchronize()

    def judge(self, codes):
        """Yields (index, Verdict) for every code, in waves."""
        for start in range(0, len(codes), self.width):
            wave = list(range(start, min(start + self.width, len(codes))))
            with ThreadPoolExecutor(len(wave)) as pool:
                prepared = list(pool.map(lambda index: self.guarded(codes[index], self.prepare), wave))
            for index, (verdict, lane) in zip(wave, prepared):
                if verdict.correct:
                    verdict, _ = self.guarded(codes[index], self.time, verdict, lane)
                if lane is not None:
                    lane.close()
                yield index, verdict

    def guarded(self, code, work, *arguments):
        """Run one stage of judging; whatever the candidate does to it becomes part of the verdict."""
        verdict, lane = arguments if arguments else (Verdict(clock="measured"), None)
        try:
            if lane is None:
                lane = self.stopwatch.Lane(self.warm, self.settings)
            patience = self.settings["timeout"] + (180 if "load_inline" in code else 0)  # nvcc takes its time
            lane.deadline = time.monotonic() + patience
            work(code, verdict, lane)
        except self.stopwatch.Failed as error:
            set_failure(verdict, code, error.stage, error, error.line)
        except TimeoutError:
            set_failure(verdict, code, "forward", f"no result within {patience:g} s", None)
        except (Gone, OSError):
            set_failure(verdict, code, "forward", "the process ended without a result (crash, exit or GPU error)", None)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            set_failure(verdict, code, "forward", "the process answered with nonsense", None)
        if not verdict.correct:
            verdict.speedup = verdict.speedup_low = None
        return verdict, lane

    def prepare(self, code, verdict, lane):
        """Build the candidate in a process of its own and check it on every trial."""
        reference = self.reference
        built = lane.build(code, "ModelNew", reference.arguments, reference.parameter_seed, reference.on_device)
        same = built["state"] == {name: list(t.shape) for name, t in reference.state.items()}
        lane.share(self.first.inputs, self.first.expected, self.slots)
        verdict.compiled = verdict.correct = verdict.correct_loose = True
        note = "" if same else "; its parameters are not the reference's (create them in the same order and shapes)"
        for index in range(self.settings["trials"]):
            trial = reference.trial(index, perturb=same and not built["loose"])
            lane.put(0, trial.inputs)
            leaves = lane.forward(0, trial.seed, trial.state)
            if set(lane.changed(0, trial.inputs)) - set(trial.changed):
                verdict.correct, verdict.rejected = False, "changes its input tensors in place"
            if not note_comparison(verdict, trial, leaves, note) or verdict.rejected:
                return

    def own_kernels(self, code, verdict, lane):
        """Enter profile and coverage; reject a candidate without a kernel that matters."""
        lane.put(0, self.first.inputs)
        lane.finish()
        runs = [lane.order("profile") for _ in range(3)]
        answer = sorted(runs, key=lambda run: run["total"])[1]
        events = [[float(ms), str(label), bool(own)] for ms, label, own in answer["events"]]
        rest = answer["total"] - sum(ms for ms, _, _ in events)
        if "load_inline" in code and rest > 0.002:  # an extension's kernels run outside of every operator
            events.append([rest, "extension", True])
        # A kernel may carry the name of a library's; it is not believed to be that library's work, nor the reverse.
        own = {label for _, label, mine in events if mine}

        def still_right(muted):
            leaves = lane.forward(0, self.first.seed, mute=muted)
            return compare(self.first, leaves, 1e-4) is None

        if self.settings["require_kernel"]:
            if not own:
                verdict.correct, verdict.rejected = False, "launches no kernel of its own"
            else:
                own = ({"extension"} & own) | reaching(own - {"extension"}, still_right)
                if not own:
                    verdict.correct, verdict.rejected = False, "the results of its kernels do not reach the output"
        set_profile(verdict, events, own)

    def time(self, code, verdict, lane):
        """Time a correct candidate against the reference, checking the outputs of timed calls on the way."""
        if self.cuda:
            self.own_kernels(code, verdict, lane)
            if not verdict.correct:
                return
        reference, chance = self.reference, random.Random(os.urandom(8))
        timing = self.stopwatch.Timing(self.lane, lane, self.slots, self.clear_cache)
        for slot in range(self.slots):
            inputs = reference.draw("warm", slot)
            self.lane.put(slot, inputs)
            lane.put(slot, inputs)
        lane.finish()
        timing.calibrate()
        began, index = time.monotonic(), 0
        while index < 10 or index < 300 and time.monotonic() - began < self.settings["measure"]:
            seed = chance.getrandbits(31)
            for slot in timing.calls:
                inputs = reference.draw("timed", seed, slot)
                self.lane.put(slot, inputs)
                lane.put(slot, inputs)
            lane.finish()
            timing.batch(index, seed)
            call = chance.randrange(len(timing.calls))
            expected, mine = self.lane.collect(call)
            got, theirs = lane.collect(call)
            timing.handing[0].append(mine)
            timing.handing[1].append(theirs)
            for one in (self.lane, lane):
                one.order("drop")
            if compare(Trial([], 0, {}, expected, self.first.allowed), got, 1e-4):
                verdict.correct, verdict.rejected = False, "its timed calls give other results than its checked ones"
                return
            index += 1
        verdict.reference_ms, verdict.candidate_ms, low, verdict.disturbed = timing.summary()
        if timing.late():
            verdict.correct, verdict.rejected = False, "its results are computed after the clock has stopped"
        elif verdict.candidate_ms < self.floor_ms:
            verdict.correct, verdict.rejected = False, "faster than the GPU can write the output"
        else:
            verdict.speedup, verdict.speedup_low = verdict.reference_ms / verdict.candidate_ms, low


def scorer(sock, warm, settings):
    """Role of the process that holds one task's reference and judges its candidates."""
    job = receive(sock)
    try:
        reference = Reference(job, settings)
        measured = Measured(reference, warm, settings) if settings["clock"] == "measured" else None
    except TaskError as error:
        send(sock, {"unusable": str(error)})
        return
    send(sock, {"unusable": None})
    while True:
        codes = receive(sock)["codes"]
        left = []
        for index, code in enumerate(codes):
            verdict = static_check(code)
            if verdict is None and measured is None:
                verdict = judge_modelled(reference, code, warm, settings)
            if verdict is None:
                left.append(index)
            else:
                send(sock, {"index": index, "verdict": asdict(verdict)})
        for position, verdict in measured.judge([codes[index] for index in left]) if left else ():
            send(sock, {"index": left[position], "verdict": asdict(verdict)})


# ---------------------------------------------------------------------------------------------------------------------
# The caller's side


class Sandbox:
    """Scores candidates. Use as a context manager, or call close().

    device     "cpu" (modelled clock) or "cuda", "cuda:1", ... (measured)
    trials     correctness trials for each candidate, every one with fresh inputs
    seed       None draws a secret one; a number makes every input, and with the modelled clock every verdict, reproducible
    timeout    seconds for one candidate, from its first process to its verdict (default: 60)
    memory     bytes of host memory that a candidate may use (without a GPU: address space)
    workers    candidates in work at the same time; by default the number of CPU cores, on a GPU at most 16
    protocol   "strict", or "kernelbench": only the task's own distribution, plain absolute and relative tolerance
    baseline   "eager", or "compile" to measure against torch.compile of the reference
    measure    seconds of timing for each candidate with the measured clock; at least 10 batches of calls
    require_kernel  reject a candidate without a kernel of its own
    remember   keep verdicts, so that an identical candidate of a task is scored once in the life of the sandbox
    clock      "modelled" or "measured", where it should not follow from the device
    """

    def __init__(self, device="cpu", trials=5, seed=None, timeout=60.0, memory=8 << 30, workers=None, protocol="strict",
                 baseline="eager", measure=0.25, require_kernel=True, remember=True, clock=None):
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
        self.remember, self.verdicts, self.lock = remember, OrderedDict(), threading.Lock()
        self.settings = {"device": str(device), "clock": clock, "trials": trials, "timeout": timeout, "memory": memory,
                         "protocol": protocol, "baseline": baseline, "measure": measure, "workers": self.workers,
                         "require_kernel": require_kernel, "scratch": tempfile.mkdtemp(prefix="sandbox-")}
        self.control, self.process = jail.start(str(Path(__file__).absolute()), self.settings)

    def score(self, task, codes):
        """Verdicts for candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        return self.score_pairs([(task, code) for code in codes])

    def score_pairs(self, pairs):
        """Verdicts for (task, code) pairs of any number of tasks, in their order; exactly one each.

        Raises TaskError when one of the tasks cannot be used.
        """
        keys = [(task.source, code) for task, code in pairs]
        tasks = {task.source: task for task, _ in pairs}
        waiting = OrderedDict()  # source -> codes still to be judged
        for source, code in keys:
            if (source, code) not in self.verdicts and code not in waiting.setdefault(source, []):
                waiting[source].append(code)
        fresh, problems, busy = {}, [], {source: 0 for source in waiting}
        modelled = self.settings["clock"] == "modelled"

        def work():
            child, current = None, None
            try:
                while not problems:
                    with self.lock:  # stay with the task whose reference stands; else help where fewest are at work
                        left = [source for source in waiting if waiting[source]]
                        if not left:
                            return
                        if current not in left:
                            busy[current] = busy.get(current, 0) - 1
                            current = min(left, key=lambda source: busy[source])
                            busy[current] += 1
                            if child is not None:
                                child.close()
                                child = None
                        count = 1 if modelled else len(waiting[current])
                        codes = [waiting[current].pop(0) for _ in range(count)]
                    child, verdicts = self._judge(child, tasks[current], codes)
                    fresh.update({(current, code): verdict for code, verdict in verdicts.items()})
            except Exception as error:
                problems.append(error)
            finally:
                if child is not None:
                    child.close()

        total = sum(map(len, waiting.values()))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.workers, total) if modelled else 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        verdicts = [fresh[key] if key in fresh else self.verdicts[key] for key in keys]
        if self.remember:
            self.verdicts.update(fresh)
            while len(self.verdicts) > 10000:
                self.verdicts.popitem(last=False)
        return verdicts

    def _judge(self, child, task, codes):
        """Verdicts through a scorer, which is started where there is none. Returns (scorer or None, {code: verdict})."""
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
            except (Gone, OSError):
                child.close()
                child = None
                for code in batch:
                    if code not in verdicts and attempts[code] >= 2:
                        verdicts[code] = Verdict(clock=self.settings["clock"], error="the scorer failed on this candidate")
        return child, verdicts

    def _start_scorer(self, task):
        child = Child(self.control, "scorer")
        job = {"name": task.name, "source": task.source, "seed": self.seed}
        try:
            answer = child.ask(job, time.monotonic() + 3 * self.settings["timeout"] + 60)
        except (Gone, OSError) as error:
            child.close()
            log = Path(self.settings["scratch"], "scorer.log")
            why = log.read_text().strip().split("\n")[-1] if log.exists() else "the process ended"
            why = "it takes too long" if isinstance(error, TimeoutError) else why
            raise TaskError(f"{task.name}: the reference cannot be judged against ({why})") from None
        if answer["unusable"]:
            child.close()
            raise TaskError(answer["unusable"])
        return child

    def close(self):
        """End every process of the sandbox and remove its scratch folder."""
        if self.control is not None:
            self.control.close()
            self.control = None
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.settings["scratch"], ignore_errors=True)

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
    return (f"Correct: yes. Speedup {verdict.speedup:.2f}x ({verdict.clock}: {verdict.candidate_ms:.4g} ms against "
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage or 0:.0%} of the work. Time: {hot}.")


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
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object and nothing else")
    options = parser.parse_args()
    try:
        task = load_task(options.task)
        try:
            code = Path(options.candidate).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{options.candidate}: cannot read the candidate ({type(error).__name__})") from None
        if options.trials < 1 or options.timeout <= 0:
            raise ValueError("--trials and --timeout must be positive")
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        with Sandbox(device, trials=options.trials, timeout=options.timeout, seed=options.seed,
                     protocol=options.protocol, baseline=options.baseline) as sandbox:
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
    if sys.argv[1:2] == ["--warm-parent"]:
        import torch._dynamo  # noqa: F401  torch imports it at the first dispatch mode: a second that no fork should pay
        import lockstep
        import roofline  # noqa: F401
        import stopwatch  # noqa: F401

        lockstep.warm_up()
        jail.warm_parent(socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]),
                         {"scorer": scorer, "candidate": candidate, "replayer": replayer})
        os._exit(0)
    sys.exit(main())
