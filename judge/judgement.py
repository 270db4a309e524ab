"""The judge: a process that holds tasks, and judges their candidates. It runs their programs, and none of their Python.

Both clocks follow one order, and the first step that fails decides the verdict:

    program      what the recorder sent is looked at
    check        in each trial: new inputs, the program's answer, *then* the reference's, and both are compared
    leave out    each of its kernels in turn: one whose absence changes nothing did not matter
    time         of the reference and of the candidate

With a GPU, judges check at the same time, and one alone may take times (processes.gpu_lock).
"""

import functools
import gc
import pickle
import signal
import sys
import warnings

import torch

from judge import interpreter, measured, prices
from judge.processes import CHECK, TIME, begin_server, gpu_lock, limit, serve_forks
from judge.program import Program, copy_of, kind_of, raw, tensors_in, unpacked
from judge.reference import Answer, Reference, seed_torch
from judge.trials import difference
from judge.verdict import Failed, Verdict, describe, set_failure, set_profile
from tasks import TaskError

SPARE = 1 << 30  # bytes of a GPU's memory that an idle judge may keep for its next candidate


class LoadedTask:
    """A task's reference, and a clock that has priced or timed it. Raises what the reference raises, and TaskError."""

    def __init__(self, source, settings, secret, facts=None):
        self.settings = settings
        self.modelled = settings["device"] == "cpu"
        # The GPU shared with others, or not, for a limited time (see `main`)
        self.gpu = functools.partial(gpu_lock, settings.get("gpu"), seconds=settings["seconds"])
        torch.set_default_dtype(torch.float32)  # another task's module may have changed it
        self.reference = Reference(source, settings, secret, facts)
        if not self.modelled:
            torch.cuda.reset_peak_memory_stats()  # from here on it does what judging a candidate does
        with self.reference.lock():
            self.clock = (prices if self.modelled else measured).Clock(self.reference, settings)


# ---------------------------------------------------------------------------------------------------------------------
# The order


def judge(task, code, recording) -> Verdict:
    """The verdict on one candidate. recording: the bytes that a recorder sent."""
    verdict = Verdict(clock=task.settings["clock"])
    try:
        recording = unpacked(recording)
        with task.gpu(CHECK):
            candidate = Candidate(task, code, recording)
            verdict.compiled = True
            inputs, answer = check(task, code, candidate, verdict)
            counting = leave_out(task, candidate, inputs, answer)
        with task.gpu(TIME):
            candidate.load(candidate.may_be_perturbed)
            set_profile(verdict, task.clock.profile(candidate.program, inputs), counting)
            task.clock.time(candidate.program, candidate.may_be_perturbed, verdict)
    except Failed as failed:
        set_failure(verdict, code, failed)
    except Exception as error:  # a forged recording may cause any
        set_failure(verdict, code, Failed(describe(error)[0]))
    return verdict


def check(task, code, candidate, verdict) -> tuple:
    """Compare the answers in every trial. Returns the first one's inputs and the reference's answer. Raises Failed.

    Parameters are perturbed but for the last trial: work that does not matter yet, as a gate is zero, must be done.
    """
    reference = task.reference
    first = ()
    last = task.settings["trials"] - 1
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
        before = reference.changing()
        answer = reference.run(inputs, candidate.seed)
        if set(got.changed) - set(answer.changed):
            raise Failed("changes its input tensors in place", "rejected")
        if set(got.shared) - set(reference.shared):
            raise Failed("an output has no memory of its own: its elements overlap, or it is an input, a parameter or "
                         "another output once more, and the reference's is not")
        if problem := reference.mistake(trial, perturbed, inputs, before, answer, got):
            raise Failed(problem)
        first = first or (inputs, answer)
    verdict.correct = True
    verdict.note = "; ".join(notes)
    return first


def leave_out(task, candidate, inputs, answer) -> set:
    """The kernels that matter: without one of them the output is wrong. Rejects a candidate without any.

    Where no kernel is required, all count.
    """
    own, perturbed = candidate.program.kernels, candidate.may_be_perturbed
    bounds = task.reference.bounds(0, perturbed)

    def right_without(names):
        candidate.load(perturbed)
        return difference(answer, candidate.run(0, inputs, names), bounds) is None

    if not task.settings["require_kernel"]:
        return set(own)
    if not own:
        raise Failed("launches no kernel of its own", "rejected")
    counting = {name for name in own if len(own) == 1 or not right_without([name])}
    if not counting or right_without(own):
        raise Failed("the results of its kernels do not reach the output", "rejected")
    return counting


# ---------------------------------------------------------------------------------------------------------------------
# The candidate


class Candidate:
    """A candidate's program, and its answers in trials. Raises Failed for a recording that cannot be run."""

    def __init__(self, task, code, recording):
        self.reference = task.reference
        self.seed = self.reference.derive(code, "forward")
        self.may_be_perturbed = not recording["program"]["fixed"]
        launcher = (Interpreted if task.modelled else measured.Binaries)(recording["compiled"])
        self.program = Program(recording, self.reference.device, launcher, self.reference.room)
        if self.reference.shared:  # then what an output keeps from one forward to the next is the task's own state
            self.program.returned = []
        for operator in self.program.operators.values() if task.modelled else ():
            if reason := prices.refusal(operator, task.clock.called):
                raise Failed(reason)

    def load(self, perturbed):
        self.program.load(self.reference.state(perturbed))

    @torch.no_grad()
    def run(self, trial, inputs, mute=()) -> Answer:
        """One forward on copies of a trial's inputs. Memory that it has not written is poisoned."""
        if list(map(kind_of, inputs)) != list(map(kind_of, self.reference.example)):
            raise Failed("the shapes of the inputs change from one call to the next")
        after = copy_of(inputs)
        seed_torch(self.seed)
        # Of two kinds: else a kernel could see by it whether it is being checked.
        output = self.program.run(tensors_in(after), mute, "noise" if mute else ("nan", "random")[trial % 2])
        changed = [i for i, x in enumerate(inputs)
                   if isinstance(x, torch.Tensor) and not torch.equal(raw(x), raw(after[i]))]
        return self.reference.answer(output, after, self.program.current_state(), changed, self.program.kept.values())


class Interpreted:
    """The launcher of a program's kernels without a GPU: interprets their IR. counts: what the last launch did."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.kernels = {}
        self.counts = None
        self.spent = 0.0

    def launch(self, launch, arguments):
        index = launch["compiled"]
        if index not in self.kernels:
            self.kernels[index] = interpreter.parse(self.compiled[index]["code"].decode())
        try:
            self.counts = interpreter.launch(self.kernels[index], launch["grid"], [value for _, value in arguments])
        except Failed as failed:
            raise Failed(f"{launch['kernel']}: {failed}", failed.stage, failed.line) from None
        self.spent += prices.launch_milliseconds(self.counts)

    def trial(self, call) -> float:
        """The milliseconds of a call, by which one of an autotuned kernel's configurations is chosen."""
        self.spent = 0.0
        call()
        return self.spent


# ---------------------------------------------------------------------------------------------------------------------
# The process


def serve(connection, settings, secret):
    """Take orders, one after the other: to load a task, to drop one, to judge a candidate of one."""
    on_gpu = settings["device"] != "cpu"
    loaded, held = {}, 0  # held: bytes of the GPU's memory that the tasks take
    if on_gpu:
        torch.cuda.set_device(settings["device"])
        torch.cuda.init()
    else:
        limit(settings["memory"])
    while True:
        order, source, *more = connection.recv()
        answer = None
        if order == "load":
            answer = load(loaded, source, *more, settings, secret)
        elif order == "drop":
            loaded.pop(source, None)
        else:
            answer = judge(loaded[source], *more)
        broken = on_gpu and is_broken()
        if on_gpu and not broken:  # before the answer, after which another judge may load a large task
            if order != "judge" or torch.cuda.memory_reserved() > held + SPARE:
                gc.collect()  # a task, or what a candidate left, may be parts that refer to one another
                torch.cuda.empty_cache()
            if order != "judge":
                held = torch.cuda.memory_reserved()
        connection.send((answer, broken))


def load(loaded, source, name, facts, settings, secret) -> dict:
    """Load a task. facts: b"", or what an earlier load has found.

    Returns what the trainer needs to know: blueprint, facts, and bytes: `room` of a recording, `takes` of memory.
    """
    try:
        before = 0 if settings["device"] == "cpu" else torch.cuda.memory_allocated()
        with gpu_lock(None, CHECK, 3 * settings["timeout"]):  # only the limit on time: see Reference.lock
            loaded[source] = task = LoadedTask(source, settings, secret, pickle.loads(facts) if facts else None)
        room = task.reference.room
        takes = room if task.modelled else 2 * (torch.cuda.max_memory_allocated() - before)
        return {"blueprint": pickle.dumps(task.reference.blueprint()), "facts": pickle.dumps(task.reference.facts()),
                "room": room, "takes": takes}
    except Exception as error:
        why = error if isinstance(error, TaskError) else f"the reference fails: {describe(error)[0]}"
        return {"unusable": f"{name}: {why}"}


def is_broken() -> bool:
    """After an illegal access CUDA refuses all further work of a process."""
    try:
        torch.cuda.synchronize()
        return False
    except RuntimeError:
        return True


def main():
    connection, settings = begin_server(sys.argv)
    secret = bytes.fromhex(connection.recv())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a judge that takes too long ends: the trainer forks another
    warnings.simplefilter("ignore")
    if settings["clock"] == "measured":
        with torch.utils.flop_counter.FlopCounterMode(display=False):  # PyTorch imports what it needs for a mode
            torch.zeros(1) + 1
    serve_forks(connection, lambda there: serve(there, settings, secret))


if __name__ == "__main__":
    main()
