"""Is this candidate correct, how fast is it, and did its own kernels do the work?  (The reward: paper, section 3.)

    python sandbox.py TASK.py CANDIDATE.py [--device cpu|cuda] [--json]

Who holds what. The caller (the RL trainer) runs no code of a task or a candidate. It talks to a *scorer*, one process for
each task at a time, which owns the reference model, the inputs, the expected outputs, the comparison and the clock. The
candidate's source is executed in a process of its own, which is given the source, the constructor's arguments, a seed and
example inputs, and from which nothing is believed: not a time, not a boolean, not an exit code, not its output stream.
All of these are forked from one *warm parent* (torch and triton imported, CUDA untouched), because a fresh interpreter
takes seconds and a fork milliseconds, and all die with the socket that leads to them.

    Sandbox (trainer) --- scorer (one task: reference, inputs, comparison, clock)
          |                  |--- candidate (its source, its host code)          records a program
          '- warm parent     '--- replayer (no candidate host code)              runs that program on unseen inputs

Without a GPU the clock is modelled: the candidate's process only records which operators and kernels one forward calls,
and a replayer executes that record on inputs which the candidate never sees (roofline.py has the why and the how).
"""

import argparse
import ast
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

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


BORDER = ("compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms", "rejected", "error")


# ---------------------------------------------------------------------------------------------------------------------
# Messages: JSON and raw tensor bytes over a socket pair


class Gone(Exception):
    """The other process has ended, or sent what is no message."""


def send(sock, tree):
    """Send nested lists, dicts, numbers, strings and tensors; strides are kept, sharing of memory is not."""
    from roofline import encode

    chunks, total = [], 0

    def add(tensor):
        nonlocal total
        tensor = tensor.detach().cpu()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size()
        chunks.append(raw[start:start + span * tensor.element_size()].numpy().data)
        total += chunks[-1].nbytes
        return [total - chunks[-1].nbytes, total, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]

    header = json.dumps(encode(tree, add)).encode()
    sock.sendall(struct.pack("<QQ", len(header), total) + header)
    for chunk in chunks:
        sock.sendall(chunk)


def receive(sock, deadline=None, limit=1 << 36):
    """The next message. Raises Gone, or TimeoutError once time.monotonic() passes `deadline`."""
    from roofline import TORCH_NAMES, decode

    def read(count):
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view.nbytes:
            sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            got = sock.recv_into(view)
            if got == 0:
                raise Gone
            view = view[got:]
        return buffer

    try:
        header, total = struct.unpack("<QQ", read(16))
        if header + total > limit:
            raise Gone
        tree = json.loads(read(header).decode())
        payload = torch.frombuffer(read(total), dtype=torch.uint8) if total else torch.empty(0, dtype=torch.uint8)

        def tensor(meta):
            start, end, dtype, shape, stride = meta
            storage = payload[start:end].clone().untyped_storage()
            dtype = TORCH_NAMES[dtype]
            span = sum((n - 1) * s for n, s in zip(shape, stride)) + 1 if all(shape) else 0
            if min([0, *shape, *stride]) < 0 or span * dtype.itemsize > storage.nbytes():
                raise Gone
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)

        return decode(tree, tensor)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, MemoryError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise Gone from None


class Child:
    """A process forked by the warm parent to play `role`. Closing the connection kills it and all that it started."""

    def __init__(self, warm, role):
        self.sock, there = socket.socketpair()
        socket.send_fds(warm, [role.encode()], [there.fileno()])
        there.close()

    def ask(self, tree, deadline=None):
        send(self.sock, tree)
        return receive(self.sock, deadline)

    def close(self):
        self.sock.close()


# ---------------------------------------------------------------------------------------------------------------------
# The warm parent, and the keeper that stands between it and each process

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option, value):
    """Linux process control; does nothing on other systems."""
    try:
        import ctypes
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def warm_parent(control, settings):
    """Import everything, then fork one keeper for each request until the trainer closes its end."""
    import torch._dynamo  # noqa: F401  torch imports it at the first dispatch mode: a second that no fork should pay
    import roofline  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business; it closes the socket
    requests, for_scorers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.send(b"ready")
    while True:
        for sock in select.select([control, requests], [], [])[0]:
            data, descriptors, _, _ = socket.recv_fds(sock, 256, 1)
            if not data:
                shutil.rmtree(settings["scratch"], ignore_errors=True)
                return
            if os.fork() == 0:
                role = data.decode()
                if sock is control or role != "scorer":
                    keeper(socket.socket(fileno=descriptors[0]), role, for_scorers if role == "scorer" else None, settings)
                os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)


def keeper(sock, role, warm, settings):
    """Fork the process that plays the role; kill it when it ends or the peer hangs up, with all its descendants."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the candidate become children of this process
    scratch = tempfile.mkdtemp(dir=settings["scratch"]) if role == "candidate" else settings["scratch"]
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            enter(role, sock, warm, scratch, settings)
            {"scorer": scorer, "candidate": candidate, "replayer": replayer}[role](sock, warm, settings)
        except (Gone, OSError, TimeoutError, KeyboardInterrupt):
            pass
        finally:
            os._exit(0)
    if warm is not None:
        warm.close()
    waiter = select.poll()
    waiter.register(sock, 0)  # POLLHUP is always reported: the peer has closed its end
    ended = os.pidfd_open(child)
    waiter.register(ended, select.POLLIN)
    waiter.poll()
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:  # whatever left the process group is an orphan by now, and so a child of this process
        for orphan in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(orphan), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    sock.close()
    if role == "candidate":
        shutil.rmtree(scratch, ignore_errors=True)


def enter(role, sock, warm, scratch, settings):
    """Limits and surroundings of a process before it plays its role."""
    keep = {sock.fileno()} | ({warm.fileno()} if warm is not None else set())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    last = 3
    for descriptor in sorted(keep):
        os.closerange(last, descriptor)
        last = descriptor + 1
    os.closerange(last, 65536)
    os.chdir(scratch)
    for name, value in {"HOME": scratch, "TMPDIR": scratch, "TRITON_CACHE_DIR": os.path.join(scratch, "triton")}.items():
        os.environ[name] = value
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if role != "scorer":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        seconds = int(settings["timeout"] * 2) + 5
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if settings["device"] == "cpu":  # CUDA reserves more address space than there is memory
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + settings["memory"] * (4 if role == "scorer" else 1)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# ---------------------------------------------------------------------------------------------------------------------
# The candidate's process


def load_module(name, code, path):
    """Execute a source text as a module that inspect and pickle can find."""
    Path(path).write_text(code)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def describe(error, path):
    """(one line of text, line number in `path` or None) for an exception."""
    line, frame = getattr(error, "lineno", None), error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__, line


def candidate(sock, warm, settings):
    """Build ModelNew and record one forward. Everything sent from here is checked or replayed by others."""
    import roofline

    job = receive(sock)
    stage, path = "compile", Path("candidate.py").absolute()
    try:
        module = load_module("candidate", job["code"], path)
        if not isinstance(getattr(module, "ModelNew", None), type):
            raise NameError("the code defines no class ModelNew")
        stage = "build"
        torch.manual_seed(job["seed"])
        model = module.ModelNew(*job["arguments"])
        stage = "forward"
        program, constants = roofline.record(model, job["inputs"])
        send(sock, {"program": program, "constants": {str(k): v for k, v in constants.items()}})
    except BaseException as error:  # SystemExit included: the verdict says what happened
        text, line = describe(error, path)
        send(sock, {"failed": stage, "error": text, "line": line})


def replayer(sock, warm, settings):
    """Run a recorded program for the scorer: no host code of the candidate gets here (see roofline.Replay)."""
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
            output, events, live = replay.run(run["inputs"], run["seed"], run["constants"], run["price"], set(run["mute"]))
            changed = [i for i, (old, new) in enumerate(zip(before, run["inputs"])) if not identical(old, new)]
            send(sock, {"output": output, "events": events, "live": live, "changed": changed})
    except roofline.KernelError as error:
        send(sock, {"failed": error.stage, "error": str(error)[:300], "line": error.line})
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError, MemoryError) as error:
        send(sock, {"failed": stage, "error": describe(error, "")[0], "line": None})


# ---------------------------------------------------------------------------------------------------------------------
# The scorer's process


def derive(seed, *parts) -> int:
    """A seed for one purpose, from the run's secret seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *parts)).encode()).digest()[:7], "little")


def identical(a, b):
    """Bitwise equality of two tensors of one shape and dtype (so that NaN equals NaN)."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)) \
        if a.shape == b.shape and a.dtype == b.dtype else False


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
        numpy.random.seed(seed % 2 ** 32)
    except ImportError:
        pass


def vary(inputs, kind):
    """Inputs of another distribution that stay in the domain of the first: zeros stay zero, ranges are not left.

    Scaling and sign flips leave triangular, diagonal, symmetric and masked inputs what they are, so that a kernel that
    exploits such structure honestly passes, and one that relies on mean 0.5 or on small values does not.
    """
    def one(x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
            return x
        low, high = x.min(), x.max()
        signed = bool((low < 0) & (high > 0))
        factor = {1: -1.0 if signed else 0.5, 2: 3.0 if signed else 0.8, 3: 0.1 if signed else 0.3}[kind]
        return x * factor
    return [one(x) for x in inputs]


class Reference:
    """A task's reference model in the scorer: its trials, their expected outputs and its modelled time.

    Raises TaskError when the reference cannot be built or run, or gives something other than finite tensors to compare.
    """

    def __init__(self, job):
        from roofline import Clock

        self.job, self.strict = job, job["protocol"] == "strict"
        try:
            self.module = load_module("reference", job["source"], Path(tempfile.mkdtemp(dir=".")) / "reference.py")
            seed_everything(derive(job["seed"], "arguments"))
            self.arguments = list(self.module.get_init_inputs())
            torch.manual_seed(self.parameter_seed)
            self.model = self.module.Model(*self.arguments)
            self.state = {name: t.detach().clone() for name, t in
                          [*self.model.named_parameters(), *self.model.named_buffers()]}
            self.trials = [self.trial(i) for i in range(job["trials"])]
            clock = Clock()
            self.run(self.trials[0], around=clock)
            self.milliseconds = sum(event[0] for event in clock.events)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"{job['name']}: the reference fails: {describe(error, '')[0]}") from None

    @property
    def parameter_seed(self):
        return derive(self.job["seed"], "parameters") % 2 ** 31

    def example(self):
        """Inputs like the trials', but never used in one: what the candidate's process gets to see."""
        seed_everything(derive(self.job["seed"], self.job["source"], "example"))
        return list(self.module.get_inputs())

    def trial(self, index):
        """One trial: {"inputs", "seed", "state", "expected", "allowed", "changed"}.

        The first trial is as the task draws it. The others of the strict protocol are fresh draws from varied
        distributions with perturbed parameters, as long as the reference stays finite on them.
        """
        kinds = [(0, False)] if index == 0 or not self.strict else [(1 + (index - 1) % 3, True), (0, True), (0, False)]
        for kind, perturb in kinds:
            seed = derive(self.job["seed"], self.job["source"], index)
            seed_everything(seed)
            inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.module.get_inputs()]
            trial = {"inputs": vary(inputs, kind) if kind else inputs, "seed": seed % 2 ** 31,
                     "state": self.perturbed(seed) if perturb else {}}
            try:
                trial["expected"], trial["changed"] = self.run(trial)
            except RuntimeError:
                if kind == 0 and not perturb:
                    raise
                continue
            tensors = outputs(trial["expected"])
            if all(isinstance(t, torch.Tensor) for t in tensors) and tensors and (
                    index == 0 or all(t.isfinite().all() or not t.is_floating_point() for t in tensors)):
                break
        if not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise TaskError(f"{self.job['name']}: the reference returns something other than tensors")
        trial["allowed"] = self.tolerance(trial)
        return trial

    def perturbed(self, seed):
        """Parameters and float buffers moved a little: no weight stays at 1, no bias at 0."""
        generator = torch.Generator().manual_seed(seed)
        moved = {}
        for name, value in self.state.items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator) * 2 - 1
                shift = 0.05 * torch.randn(value.shape, generator=generator) if not name.endswith("running_var") else 0
                moved[name] = (value * (1 + 0.2 * noise) + shift).to(value.dtype)
        return moved

    def run(self, trial, around=None, dtype=None):
        """(output, indices of inputs that the forward changed) of the reference on private copies of a trial's inputs."""
        import contextlib

        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in trial["inputs"]]
        model = self.model
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(trial["state"].get(name, self.state[name]))
            if dtype is not None:
                model = model.to(dtype)
                inputs = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
            torch.manual_seed(trial["seed"])
            with around or contextlib.nullcontext():
                out = model(*inputs)
        changed = [] if dtype is not None else [
            i for i, (old, new) in enumerate(zip(trial["inputs"], inputs))
            if isinstance(old, torch.Tensor) and not identical(old, new)]
        return out, changed

    def tolerance(self, trial):
        """For each output, the absolute error allowed beside the relative one, in units of the tolerance.

        Strict: the output's own size where that is below 1 (an answer of zeros must not pass because all values are
        small), but never less than the rounding error of the reference itself, measured against float64.
        """
        tensors = outputs(trial["expected"])
        if not self.strict:
            return [(1.0, 0.0)] * len(tensors)
        try:
            exact = outputs(self.run(trial, dtype=torch.float64)[0])
        except (RuntimeError, TypeError):
            exact = [None] * len(tensors)  # it mixes in tensors of a fixed type
        finally:
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                tensor.data = tensor.data.to(self.state[name].dtype)
        allowed = []
        for mine, other in zip(tensors, exact):
            if other is None or not mine.is_floating_point():
                allowed.append((1.0, 0.0))
                continue
            values = mine.double().nan_to_num(0, 0, 0)
            size = float(values.square().mean().sqrt()) if mine.numel() else 0.0
            rounding = float((values - other.double().nan_to_num(0, 0, 0)).abs().max()) if mine.numel() else 0.0
            allowed.append((min(1.0, size), min(4 * rounding, 1e-3 * size + 1e-6)))
        return allowed


def outputs(tree):
    """The leaves of a forward's result: one tensor, or a tuple, list or dict of them."""
    from torch.utils._pytree import tree_leaves
    return tree_leaves(tree)


def compare(expected, allowed, got, tolerance):
    """None when every output agrees, else one line saying what is wrong, where and by how much."""
    wanted, given = outputs(expected), outputs(got)
    if len(wanted) != len(given):
        return f"wrong output: {len(given)} tensors instead of {len(wanted)}"
    for index, (a, b, (size, rounding)) in enumerate(zip(wanted, given, allowed)):
        name = "output" if len(wanted) == 1 else f"output {index}"
        if not isinstance(b, torch.Tensor):
            return f"wrong {name}: a {type(b).__name__} instead of a tensor"
        if a.shape != b.shape:
            return f"wrong {name}: shape {list(b.shape)} instead of {list(a.shape)}"
        if a.dtype != b.dtype:
            return f"wrong {name}: dtype {b.dtype} instead of {a.dtype}"
        if not a.is_floating_point():
            wrong, difference = a != b, (a.double() - b.double()).abs()
        else:
            x, y = a.double(), b.double()
            difference = (x - y).abs()
            agree = difference <= tolerance * (size + x.abs()) + rounding
            agree |= (x == y) | (x.isnan() & y.isnan())  # infinities, and NaN where the reference has it
            wrong = ~agree
        if wrong.any():
            share = f"{max(float(wrong.double().mean()), 0.01):.0%}"
            difference = torch.where(wrong, difference.nan_to_num(float("inf")), torch.zeros_like(difference))
            worst = int(difference.argmax())
            where = []
            for n in reversed(a.shape):
                where.insert(0, worst % n)
                worst //= n
            x, y = float(a[tuple(where)]), float(b[tuple(where)])
            return (f"wrong values: {share} of {name} {list(a.shape)}, worst at {where}: "
                    f"expected {x:.4g}, got {y:.4g}")
    return None


def numbered(code, line, around=2):
    """The candidate's lines around `line`, numbered, or an empty string."""
    if not line:
        return ""
    lines = code.split("\n")
    first, last = max(line - 1 - around, 0), min(line + around, len(lines))
    return "\n".join(f"{i + 1:4d}{'>' if i + 1 == line else ' '} {lines[i]}" for i in range(first, last))[:600]


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


def scorer(sock, warm, settings):
    """Build one task's reference, then judge candidates one after the other."""
    job = receive(sock)
    try:
        reference = Reference(job)
    except TaskError as error:
        send(sock, {"unusable": str(error)})
        return
    send(sock, {"unusable": None})
    while True:
        code = receive(sock)["code"]
        verdict = static_check(code)
        if verdict is None:
            verdict = judge_modelled(reference, code, warm, settings)
        send(sock, asdict(verdict))


def judge_modelled(reference, code, warm, settings):
    """Record the candidate in one process, replay it in another, compare and price."""
    deadline = time.monotonic() + settings["timeout"]
    verdict, children = Verdict(), []

    def failed(answer):
        verdict.compiled = answer["failed"] != "compile"
        verdict.error, verdict.excerpt = str(answer["error"])[:400], numbered(code, answer["line"])
        return verdict

    try:
        children.append(Child(warm, "candidate"))
        answer = children[0].ask({"code": code, "seed": reference.parameter_seed, "arguments": reference.arguments,
                                  "inputs": reference.example()}, deadline)
        children[0].close()
        if "failed" in answer:
            return failed(answer)
        program, constants = answer["program"], answer["constants"]
        if settings["require_kernel"] and not any(step[0] == "launch" for step in program["steps"]):
            verdict.compiled, verdict.rejected = True, "launches no kernel of its own"
            return verdict
        children.append(Child(warm, "replayer"))
        answer = children[1].ask({"code": code, "program": program, "constants": constants}, deadline)
        if "failed" in answer:
            return failed(answer)
        verdict.compiled = True
        return check_and_price(reference, program, constants, children[1], deadline, verdict, failed, settings)
    except TimeoutError:
        verdict.error = f"no result within {settings['timeout']:g} s"
    except (Gone, BrokenPipeError, ConnectionError):
        verdict.error = "the process ended before it gave a result (crash, exit or memory limit)"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        verdict.error = "the recorded program is malformed"
    finally:
        for child in children:
            child.close()
    verdict.correct, verdict.speedup = False, None
    return verdict


def check_and_price(reference, program, constants, child, deadline, verdict, failed, settings):
    """Replay every trial and fill the verdict in."""
    matched = {name: str(ref[0]) for name, ref in program["state"].items() if name in reference.state and identical(
        reference.state[name].contiguous().view(-1).view(torch.uint8), constants.get(str(ref[0]), torch.empty(0)))}
    # Perturbed parameters can be put in place of the recorded ones only if the forward reads nothing derived from them.
    derived = any(number not in matched.values() and data.numel() > 256 for number, data in constants.items())

    def run(trial, price=False, mute=()):
        return child.ask({"inputs": [x for x in trial["inputs"] if isinstance(x, torch.Tensor)], "seed": trial["seed"],
                          "constants": {matched[name]: value.view(-1).view(torch.uint8) for name, value in
                                        trial["state"].items() if name in matched},
                          "price": price, "mute": list(mute)}, deadline)

    verdict.correct = verdict.correct_loose = True
    for index, trial in enumerate(reference.trials):
        if trial["state"] and derived:
            trial = reference.trials[0]
        answer = run(trial, price=index == 0)
        if "failed" in answer:
            verdict.correct = verdict.correct_loose = False
            return failed(answer)
        if index == 0:
            events, live = answer["events"], answer["live"]
        if set(answer["changed"]) - set(trial["changed"]):
            verdict.rejected = "changes its input tensors in place"
            verdict.correct = verdict.correct_loose = False
            return verdict
        problem = compare(trial["expected"], trial["allowed"], answer["output"], 1e-4)
        if problem:
            verdict.correct, verdict.error = False, verdict.error or problem
            if len(matched) < len(reference.state) and "parameters" not in verdict.error:
                verdict.error += "; its parameters differ from the reference's (create them in the same order and shapes)"
            if compare(trial["expected"], trial["allowed"], answer["output"], 1e-2):
                verdict.correct_loose = False
                break
    verdict.reference_ms = reference.milliseconds
    verdict.candidate_ms = sum(ms for ms, _, _ in events)
    own = {label for (_, label, mine), alive in zip(events, live) if mine and alive}
    if verdict.correct and settings["require_kernel"]:
        for names in ([own] if len(own) < 2 else [[name] for name in own]):
            answer = run(reference.trials[0], mute=names)
            if "failed" not in answer and compare(reference.trials[0]["expected"], reference.trials[0]["allowed"],
                                                  answer["output"], 1e-4) is None:
                own -= set(names)
        if not own:
            verdict.rejected, verdict.correct = "the results of its kernels do not reach the output", False
    total = max(verdict.candidate_ms, 1e-12)
    verdict.coverage = sum(ms for (ms, label, mine), alive in zip(events, live) if mine and alive and label in own) / total
    shares = {}
    for ms, label, mine in events:
        shares[label, mine] = shares.get((label, mine), 0) + ms / total
    verdict.profile = [KernelTime(label, share, mine) for (label, mine), share in sorted(shares.items(), key=lambda x: -x[1])]
    if verdict.correct:
        verdict.speedup = verdict.speedup_low = verdict.reference_ms / total
    return verdict


# ---------------------------------------------------------------------------------------------------------------------
# The trainer's side


class Sandbox:
    """Scores candidates. Use as a context manager, or call close().

    device     "cpu" (modelled clock) or "cuda" (measured)
    trials     correctness trials for each candidate, every one with fresh inputs
    seed       None draws a secret one; a number makes every input and verdict of the modelled clock reproducible
    timeout    seconds for one candidate, from its first process to its verdict
    memory     bytes of host memory that a candidate may use (without a GPU: address space)
    workers    candidates judged at the same time; by default the number of CPU cores this process may use
    protocol   "strict", or "kernelbench": only the task's own distribution, absolute and relative tolerance
    require_kernel  reject a candidate without a kernel of its own
    remember   keep verdicts, so that an identical candidate of a task is scored once in the life of the sandbox
    """

    def __init__(self, device="cpu", trials=5, seed=None, timeout=60.0, memory=8 << 30, workers=None, protocol="strict",
                 require_kernel=True, remember=True):
        if device != "cpu":
            if not torch.cuda.is_available():
                raise ValueError(f"device {device}: no GPU is available here")
            raise NotImplementedError("the measured clock")
        if protocol not in ("strict", "kernelbench"):
            raise ValueError(f"protocol {protocol}: choose strict or kernelbench")
        self.device, self.trials, self.protocol, self.remember = device, trials, protocol, remember
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.workers = workers or len(os.sched_getaffinity(0))
        self.settings = {"device": device, "timeout": timeout, "memory": memory, "require_kernel": require_kernel,
                         "scratch": tempfile.mkdtemp(prefix="sandbox-")}
        self.verdicts, self.lock = OrderedDict(), threading.Lock()
        self.control = None
        self._start()

    def _start(self):
        """Start the warm parent with an environment that holds no secrets."""
        self.control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PYTHONPATH",
                "VIRTUAL_ENV", "SYSTEMROOT")
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        environment.update(HOME=self.settings["scratch"], OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
                           TRITON_DEFAULT_FP_FUSION="1")
        self.log = open(os.path.join(self.settings["scratch"], "warm.log"), "wb+")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).absolute()), "--warm-parent", str(there.fileno()), json.dumps(self.settings)],
            pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=self.log, start_new_session=True)
        there.close()
        if self.control.recv(16) != b"ready":
            self.log.seek(0)
            raise RuntimeError("the sandbox does not start: " + self.log.read().decode(errors="replace")[-500:])

    def score(self, task, codes):
        """Verdicts for candidates of one task, in their order. Raises TaskError when the task itself cannot be used."""
        return self.score_pairs([(task, code) for code in codes])

    def score_pairs(self, pairs):
        """Verdicts for (task, code) pairs of any number of tasks, in their order; exactly one each.

        Raises TaskError when one of the tasks cannot be used.
        """
        keys = [(task.source, code) for task, code in pairs]
        queues, tasks = OrderedDict(), {}
        for (task, _), key in zip(pairs, keys):
            tasks[task.source] = task
            if key not in self.verdicts and key[1] not in queues.setdefault(task.source, []):
                queues[task.source].append(key[1])
        fresh, problems, busy = {}, [], {source: 0 for source in queues}

        def work():
            child, current = None, None
            try:
                while not problems:
                    with self.lock:  # stay with the task whose reference stands; else help where fewest are at work
                        waiting = [source for source in queues if queues[source]]
                        if not waiting:
                            return
                        if current not in waiting:
                            if current is not None:
                                busy[current] -= 1
                            current = min(waiting, key=lambda source: busy[source])
                            busy[current] += 1
                            if child is not None:
                                child.close()
                                child = None
                        code = queues[current].pop(0)
                    child, verdict = self._judge(child, tasks[current], code)
                    fresh[current, code] = verdict
            except Exception as error:
                problems.append(error)
            finally:
                if child is not None:
                    child.close()

        count = min(self.workers, sum(map(len, queues.values())))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        verdicts = [fresh.get(key) or self.verdicts[key] for key in keys]
        if self.remember:
            self.verdicts.update(fresh)
            while len(self.verdicts) > 10000:
                self.verdicts.popitem(last=False)
        return verdicts

    def _judge(self, child, task, code):
        """One verdict through a scorer, which is started where there is none. Returns (scorer or None, verdict)."""
        patience = 3 * self.settings["timeout"] + 60
        for _ in range(2):  # a scorer that dies, for whatever reason, is replaced once
            if child is None:
                try:
                    child = Child(self.control, "scorer")
                    answer = child.ask({"name": task.name, "source": task.source, "seed": self.seed, "trials": self.trials,
                                        "protocol": self.protocol}, time.monotonic() + patience)
                except (Gone, OSError) as error:
                    raise TaskError(f"{task.name}: the reference {'takes too long' if isinstance(error, TimeoutError) else 'crashes'}") from None
                if answer["unusable"]:
                    raise TaskError(answer["unusable"])
            try:
                answer = child.ask({"code": code}, time.monotonic() + patience)
                answer["profile"] = [KernelTime(**entry) for entry in answer["profile"]]
                return child, Verdict(**answer)
            except (Gone, OSError):
                child.close()
                child = None
        return None, Verdict(error="the scorer failed on this candidate")

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
            self.log.close()
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
            f"{verdict.reference_ms:.4g} ms). Your kernels do {verdict.coverage:.0%} of the work. Time: {hot}.")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main():
    parser = argparse.ArgumentParser(description="Score one kernel by hand: correctness, speedup, coverage.")
    parser.add_argument("task", metavar="TASK.py", help="a problem in KernelBench's format")
    parser.add_argument("candidate", metavar="CANDIDATE.py", help="a file that defines ModelNew")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None,
                        help="cuda measures, cpu models the time (default: cuda where there is a GPU)")
    parser.add_argument("--trials", type=int, default=5, help="correctness trials (default: 5)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the candidate (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="makes the inputs reproducible (default: unpredictable)")
    parser.add_argument("--protocol", choices=["strict", "kernelbench"], default="strict",
                        help="kernelbench: only the task's own inputs, plain tolerances (default: strict)")
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
                     protocol=options.protocol, workers=1) as sandbox:
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
        warm_parent(socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
        os._exit(0)
    sys.exit(main())
