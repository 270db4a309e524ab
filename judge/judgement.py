"""The judge: a process that holds one task and judges its candidates. Of their text it runs only checked kernels.

Both clocks follow one order, and the first step that fails decides the verdict:

    program      what the recorder sent is checked against its schema, and outputs must have memory of their own
    check        in each trial: new inputs, the program's output, *then* the reference's, and both are compared
    leave out    each of its kernels in turn: one whose absence changes nothing did not matter
    time         of the reference and of the candidate

A program runs here (`Running`); without a GPU in a fork (`Forked`) made before any answer exists, and an endless
kernel costs only that fork. A CUDA C++ candidate runs in a process of its own (extension.Extension).
"""

import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
from dataclasses import asdict

import torch
from torch.utils._pytree import tree_leaves

from judge.comparison import difference
from judge.processes import Gone, begin_process, limit, receive, send, serve_forks
from judge.program import Program, bytes_in, checked, copy_of, dense, operator_of, read_value, tensors_in
from judge.reference import Answer, Reference, state_of
from judge.verdict import Failed, Verdict, describe, set_failure, set_profile, set_roofline
from tasks import GPU_BATCH_FACTOR, TaskError


class Task:
    """A loaded task: its reference, and what a clock needs of it. Raises TaskError."""

    def __init__(self, name, source, settings, secret, gpu):
        self.settings, self.gpu = settings, gpu
        self.modelled = settings["clock"] == "modelled"
        self.reference = reference = Reference(name, source, settings, secret)
        inputs = copy_of(reference.example)
        try:
            with torch.no_grad(), reference.place:
                outputs = tree_leaves(reference.model(*inputs))
            if self.modelled:
                self.price(inputs, outputs)
            else:
                from judge import measured
                self.clock = measured.Clock(reference, settings)
        except RuntimeError as error:
            raise TaskError(f"{name}: the reference fails: {describe(error)[0]}") from None

    def price(self, inputs, outputs):
        """Price the reference's forward, once."""
        from judge import prices
        self.clock = prices.Clock(map(prices.address, state_of(self.reference.model).values()))
        with torch.no_grad(), self.reference.place, self.clock:
            self.reference.model(*inputs)
        self.room = 4 * bytes_in([inputs, outputs, self.reference.constructed]) + (1 << 20)  # bytes of an answer
        self.needed = bytes_in([inputs, outputs]) + bytes_in(self.reference.constructed) / GPU_BATCH_FACTOR


# ---------------------------------------------------------------------------------------------------------------------
# The order


def judge(task, code, recording) -> Verdict:
    """The verdict on one candidate. recording: what the recorder sent, or None for CUDA C++."""
    verdict, candidate = Verdict(clock=task.settings["clock"]), None
    try:
        if recording is None:
            from judge.extension import Extension
            candidate = Extension(task, code)
        else:
            candidate = (Forked if task.modelled else Running)(task, code, recording)
        verdict.compiled = True
        first = check(task, code, candidate, verdict)
        leave_out(task, candidate, verdict, *first)
        candidate.time(verdict)
    except Failed as failed:
        set_failure(verdict, code, failed)
    except TimeoutError:
        set_failure(verdict, code, Failed(f"no result within {task.settings['timeout']:g} s"))
    except (Gone, OSError):
        set_failure(verdict, code, Failed("the process ended without a result (crash, exit or memory limit)"))
    except Exception as error:  # a forged recording may cause any
        set_failure(verdict, code, Failed(describe(error)[0]))
    finally:
        if candidate is not None:
            candidate.close()
    return verdict


def check(task, code, candidate, verdict) -> tuple:
    """Compare the answers in every trial. Returns the first one's inputs and the reference's answer. Raises Failed.

    Parameters are perturbed but for the last trial: work that does not matter yet, as a gate is zero, must be done.
    """
    reference, first, last = task.reference, (), task.settings["trials"] - 1
    notes = list(reference.notes)
    if reference.constructed and not candidate.may_be_perturbed:
        notes.append("its parameters were not perturbed: they are not the reference's by name and value")
    for trial in range(last + 1):
        perturbed = candidate.may_be_perturbed and (trial < last or last == 0)
        if trial in (0, last):  # the others find what the one before them has left in buffers
            candidate.load(perturbed)
            reference.load(perturbed)
        inputs = reference.inputs(code, trial)
        got = candidate.run(trial, inputs)
        answer = reference.run(inputs, candidate.seed)
        if set(got.changed) - set(answer.changed):
            raise Failed("changes its input tensors in place", "rejected")
        if set(got.shared) - set(reference.shared):
            raise Failed("an output has no memory of its own: its elements overlap, or it is an input, a parameter or "
                         "another output once more, and the reference's is not")
        if problem := difference(answer, got, reference.bounds(trial, perturbed)):
            raise Failed(problem)
        first = first or (inputs, answer)
    verdict.correct, verdict.note = True, "; ".join(notes)
    return first


def leave_out(task, candidate, verdict, inputs, answer):
    """Enter profile and coverage. Where kernels of its own are required, reject a candidate without one that matters.

    A kernel matters if the output is wrong without it. That is not asked of CUDA C++, whose kernels cannot be left out.
    """
    def right_without(names):
        perturbed = candidate.may_be_perturbed
        candidate.load(perturbed)
        return difference(answer, candidate.run(0, inputs, names), task.reference.bounds(0, perturbed)) is None

    own, counting = candidate.kernels, set(candidate.kernels)
    if task.settings["require_kernel"]:
        if not own:
            raise Failed("launches no kernel of its own", "rejected")
        if candidate.can_leave_out:
            if len(own) > 1:
                counting = {name for name in own if not right_without([name])}
            if right_without(own):
                counting = set()
        if not counting:
            raise Failed("the results of its kernels do not reach the output", "rejected")
    set_profile(verdict, candidate.profile(inputs), counting)


# ---------------------------------------------------------------------------------------------------------------------
# Where a candidate's program runs


class Running:
    """A candidate's program in this process: with a GPU the judge's, without one the fork's (see Forked)."""

    can_leave_out = True

    def __init__(self, task, code, recording):
        self.task = task
        self.code = code
        self.reference = task.reference
        self.events = None  # prices of its steps, where there is no GPU
        program, constants, binaries = checked(recording)
        self.seed = self.reference.derive(code, "forward")
        self.may_be_perturbed = not program["fixed"]
        if task.modelled:
            from judge import interpreter, prices
            for step in program["steps"]:
                if step[0] == "operator" and (reason := prices.refusal(operator_of(step[1]), task.clock.called)):
                    raise Failed(reason)
            names = {name: read_value(value, None) for name, value in program["names"].items()}
            launcher = interpreter.Kernels(code, names)
        else:
            from judge import measured
            launcher = measured.Binaries(binaries)
            task.gpu("share")
        self.program = Program(program, constants, self.reference.device, launcher, self.reference.shared)
        self.kernels = self.program.kernels

    def load(self, perturbed):
        self.program.load(self.reference.state(perturbed))

    def run(self, trial, inputs, mute=()) -> Answer:
        """One forward on copies of a trial's inputs. Memory that it has not written is poisoned."""
        copies = [x.clone() for x in tensors_in(inputs)]
        observer = None
        if self.task.modelled and self.events is None:
            from judge import prices
            observer = prices.Prices(self.program.launcher, map(prices.address, self.program.memory.values()))
        torch.manual_seed(self.seed)
        with torch.no_grad():
            # Of two kinds: else a kernel could see by it whether it is being checked.
            output = self.program.run(copies, mute, "noise" if mute else ("nan", "random")[trial % 2], observer)
        self.events = observer.events if observer else self.events
        places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        changed = [i for i, copy in zip(places, copies) if not torch.equal(dense(inputs[i]), dense(copy))]
        after = iter(copies)
        inputs = [next(after) if isinstance(x, torch.Tensor) else x for x in inputs]
        return self.reference.answer(output, inputs, self.program.state(), changed)

    def profile(self, inputs) -> list:
        """[[milliseconds, label, is it a kernel of its own?]] of the steps of a forward."""
        self.task.gpu("alone")
        return self.task.clock.profile(self.program, inputs)

    def time(self, verdict):
        """Enter times and speedup."""
        verdict.tuned = self.program.tuned()
        self.task.gpu("alone")
        self.task.clock.time(self.program, verdict, self.may_be_perturbed)

    def close(self):
        self.program = None


class Forked:
    """A candidate in a fork of the judge, whose kernels' text runs in Triton's interpreter there.

    The fork draws its inputs itself, and has no answers: the reference has not run on them when it is made.
    """

    can_leave_out = True

    def __init__(self, task, code, recording):
        self.task, self.deadline = task, time.monotonic() + task.settings["timeout"]
        self.sock, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.sock.close()
            self.serve(there, task, code, recording)
        there.close()
        try:
            self.seed, self.may_be_perturbed, self.kernels = self.ask("begin")
        except BaseException:
            self.close()
            raise

    def serve(self, sock, task, code, recording):
        """The fork: answer orders until the judge hangs up."""
        running = None
        begin_process()
        limit(task.settings)
        try:
            while True:
                order, *arguments = receive(sock)
                try:
                    if order == "begin":
                        running = Running(task, code, recording)
                        answer = [running.seed, running.may_be_perturbed, running.kernels]
                    elif order == "prices":
                        answer = [running.events, running.program.tuned()]
                    elif order == "load":
                        answer = running.load(*arguments)
                    else:
                        trial, mute = arguments
                        got = running.run(trial, task.reference.inputs(code, trial), mute)
                        if bytes_in(got.leaves) > task.room:
                            raise Failed("wrong output: far larger than the reference's")
                        answer = list(got)
                except Failed as error:
                    answer = {"failed": error.stage, "error": str(error), "line": error.line}
                except Exception as error:
                    answer = {"failed": "forward", "error": describe(error)[0], "line": None}
                send(sock, answer)
        finally:
            os._exit(0)

    def ask(self, *order):
        send(self.sock, list(order))
        answer = receive(self.sock, self.deadline)
        if isinstance(answer, dict):
            raise Failed(answer["error"], answer["failed"], answer["line"])
        return answer

    def load(self, perturbed):
        self.ask("load", perturbed)

    def run(self, trial, inputs, mute=()) -> Answer:
        return Answer(*self.ask("run", trial, list(mute)))

    def profile(self, inputs) -> list:
        self.events, self.tuned = self.ask("prices")
        return self.events

    def time(self, verdict):
        from judge import prices
        clock = self.task.clock
        verdict.tuned = self.tuned
        verdict.reference_ms = sum(ms for ms, _, _ in clock.events)
        verdict.candidate_ms = sum(ms for ms, _, _ in self.events)
        verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        set_roofline(verdict, self.task.needed, clock.flops, prices.BANDWIDTH, prices.PEAK)

    def close(self):
        self.sock.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The process


def serve(sock, settings, secret):
    """Take orders, one after the other: to load a task, to judge a candidate of it."""
    task, on_gpu = None, settings["device"] != "cpu"

    def gpu(how):
        """Have the GPU: share it with others, or alone."""
        if on_gpu:
            send(sock, {"gpu": how})
            receive(sock)

    if on_gpu:
        torch.cuda.set_device(settings["device"])
    while True:
        order = receive(sock)
        if "load" in order:
            task = None
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            try:
                gpu("share")
                task = Task(order["load"]["name"], order["load"]["source"], settings, secret, gpu)
                answer = {"blueprint": task.reference.blueprint()}
            except TaskError as error:
                answer = {"unusable": str(error)}
        else:
            verdict = judge(task, order["judge"], order["recording"])
            answer = {"verdict": asdict(verdict), "broken": on_gpu and is_broken()}
        send(sock, answer)


def is_broken() -> bool:
    """After an illegal access CUDA refuses all further work of a process."""
    try:
        torch.cuda.synchronize()
        return False
    except RuntimeError:
        return True


def main():
    control, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    secret = bytes.fromhex(control.recv(256).decode())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a kernel's text may cause thousands
    if settings["clock"] == "modelled":
        from judge import interpreter, prices  # noqa: F401 (forks find it loaded)
    else:
        from judge import measured  # noqa: F401
        with torch.utils.flop_counter.FlopCounterMode(display=False):  # PyTorch imports what it needs for a mode
            torch.zeros(1) + 1
    serve_forks(control, lambda sock: serve(sock, settings, secret))


if __name__ == "__main__":
    main()
