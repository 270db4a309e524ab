"""The order in which a candidate is judged. Both clocks follow it, so both apply the same rules.

    source text      what judge/rules.py refuses is not run
    start            a process constructs the candidate's model
    check            its output is compared with the reference's in every trial; inputs may not be changed in place
    own kernels      it launches kernels of its own, and without them the output is wrong
    time             of the reference and of the candidate

The first step that fails decides the verdict. What a step does is the business of a *back end*: `Replaying` (below)
for the modelled clock, `measured.Candidate` for the measured one; both judge what `Recorded` has recorded. Whatever
goes wrong in a back end is an exception (Failed, TimeoutError, Gone, ValueError and the like), and `judge` alone turns
exceptions into verdicts. A back end is one candidate's processes, and has the methods

    start(code, timeout)    construct the model; `timeout` seconds are all that it has from now on. Returns whether its
                            parameters are the reference's, in name and shape
    run(trial, mute=())     one forward, without the kernels named in `mute`: (leaves of the output, indices of inputs
                            that it changed)
    profile(trial)          [[milliseconds, label, is it a kernel of its own; None if it is, and only moves data]]
    time(verdict)           enter reference_ms, candidate_ms, speedup, speedup_low and what comes with them; or reject
    close(verdict)          end the processes, or keep them for others; enter seconds spent compiling and waiting
"""

import ast
import contextlib
import itertools
import math
import re
import time

import torch
from torch.utils._pytree import tree_leaves

from judge.correctness import as_bytes, check_structure, compare, derive, identical, sharing, structure
from judge.messages import ROOM, Child, Gone, layouts_in
from judge.perturbation import state_of
from judge.prices import BANDWIDTH, PEAK, Clock, bytes_in, check_events, only_moves, refusal, size_of, tensors_in
from judge.recorder import launches_of
from judge.rules import LAUNCH_OPTIONS, dotted, offence, parse
from judge.verdict import (EXTENSION, LOOSE, STRICT, Failed, Verdict, describe, numbered, reaching, reject,
                           set_failure, set_profile, set_roofline, tolerance_of)
from tasks import GPU_BATCH_FACTOR

ROOM_FOR_MISTAKES = 1 << 20  # bytes beside an output's: of a wrong shape or type, it is compared all the same
NVCC_SECONDS = 180  # that compiling a CUDA extension may take, on top of a candidate's time limit


def static_check(code):
    """What can be judged without running anything: returns a Verdict, or None to go on."""
    if re.search(r"\r(?!\n)|[\f\v]", code):  # a new line to some readers of the text and not to others
        return Verdict(error="does not parse: a carriage return or form feed that ends no line")
    try:
        tree = parse(code)
        reason = offence(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        text, line = describe(error)
        return Verdict(error=f"does not parse: {text}", excerpt=numbered(code, line))
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in tree.body):
        return Verdict(error="the code defines no class ModelNew")
    return Verdict(compiled=True, rejected=reason) if reason else None


def judge(back_end, reference, code, settings) -> Verdict:
    """The verdict on one candidate."""
    timeout = settings["timeout"] + (NVCC_SECONDS if has_extension(code) else 0)
    verdict = static_check(code)
    if verdict is None and settings["clock"] == "modelled" and has_extension(code):
        verdict = Verdict(error="CUDA C++ (load_inline) cannot be judged without a GPU: write it in Triton, or use one")
    if verdict is None:
        verdict = Verdict()
        try:
            steps(back_end, reference, code, settings, verdict, timeout)
        except Failed as error:
            set_failure(verdict, code, error.stage, error, error.line)
        except TimeoutError:
            set_failure(verdict, code, "forward", f"no result within {min(timeout, back_end.longest):g} s")
        except (Gone, OSError):
            why = "the process ended without a result (crash, exit, memory limit or GPU error)"
            set_failure(verdict, code, "forward", why)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            set_failure(verdict, code, "forward", "the process sent an answer that makes no sense")
        finally:
            back_end.close(verdict)
    verdict.clock = settings["clock"]
    if not verdict.correct:
        verdict.speedup = verdict.speedup_low = None
    return verdict


def steps(back_end, reference, code, settings, verdict, timeout):
    """All steps that run the candidate."""
    with stage(verdict, "start"):
        same = back_end.start(code, timeout)
    verdict.compiled = True
    with stage(verdict, "check"):
        check(back_end, reference, settings["trials"], verdict, same)
    # Who is right to 1e-2 only gets no speedup, but is timed: papers before 2026 count it.
    if verdict.rejected or not verdict.correct_loose:
        return
    with stage(verdict, "profile"):
        check_kernels(back_end, reference.trial(0), verdict, settings["require_kernel"])
    if not verdict.rejected:
        with stage(verdict, "time"):
            back_end.time(verdict)


@contextlib.contextmanager
def stage(verdict, name):
    """Enter the seconds that a step took, waiting for the GPU included."""
    began = time.monotonic()
    try:
        yield
    finally:
        verdict.seconds[name] = time.monotonic() - began


def check(back_end, reference, trials, verdict, same):
    """Compare the outputs in every trial. same: what start returned."""
    note = "" if same else "; its parameters are not the reference's (create them in the same order and shapes)"
    verdict.correct = verdict.correct_loose = True
    for index in range(trials):
        trial = reference.trial(index)
        leaves, changed = back_end.run(trial)
        if set(changed) - set(trial.changed):
            return reject(verdict, "changes its input tensors in place")
        if problem := compare(trial, leaves, STRICT):
            verdict.correct, verdict.error = False, verdict.error or problem + note
            verdict.correct_loose = compare(trial, leaves, LOOSE) is None
        if not verdict.correct_loose:
            return


def check_kernels(back_end, trial, verdict, required):
    """Enter profile and coverage. Where kernels of its own are required, reject a candidate without one that matters.

    A kernel matters if the output is wrong without it. That is not asked of a CUDA extension: it cannot be left out.
    """
    def still_right(muted):
        leaves, _ = back_end.run(trial, muted)
        return compare(trial, leaves, tolerance_of(verdict)) is None

    events = back_end.profile(trial)
    own = {label for _, label, mine in events if mine}
    if required and not own:
        moving = any(mine is None for _, _, mine in events)
        reject(verdict, "its kernels only move data" if moving else "launches no kernel of its own")
    elif required:
        own = (own & {EXTENSION}) | reaching(own - {EXTENSION}, still_right)
        if not own:
            reject(verdict, "the results of its kernels do not reach the output")
    set_profile(verdict, events, own)


def has_extension(code) -> bool:
    """Does it have nvcc compile CUDA sources? That takes most of a minute, and its kernels are no operator's."""
    if "load_inline" not in code:
        return False
    try:
        calls = [node.func for node in ast.walk(parse(code)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # static_check says so
    return any((dotted(call) or [""])[-1] == "load_inline" for call in calls)


# ---------------------------------------------------------------------------------------------------------------------
# Recording, for both clocks


class Recorded:
    """A back end that judges a recorded program. self.deadline: time.monotonic() at which the candidate has failed.

    What the recording process answers is not believed: a forged program is replayed and timed like any other.
    """

    longest = math.inf  # seconds of a GPU's time

    def __init__(self, task):
        """task: its Modelled, or its Measured."""
        self.task, self.reference = task, task.reference
        self.fork_server, self.settings = task.fork_server, task.settings

    def ask(self, process, question, room=ROOM):
        """A process's answer, with at most `room` bytes of tensors. Raises Failed if that is what it says, and what
        Child.ask does.
        """
        answer = process.ask({**question, "room": room}, self.deadline, room)
        if "failed" in answer:
            raise Failed(answer)
        return answer

    def record(self, code, calls, **job):
        """(program, constants) of a candidate. calls: the inputs of the forwards that are recorded, see recorder."""
        reference = self.reference
        room = ROOM + bytes_in([calls, 2 * [reference.state]])  # it may hold its parameters in another form as well
        with contextlib.closing(Child(self.fork_server, "candidate")) as recorder:
            answer = self.ask(recorder, {"code": code, "calls": calls, **reference.construction(), **job}, room)
        for step in answer["program"]["steps"]:
            reason = step[0] == "operator" and refusal(step, priced(reference).called, self.settings["clock"])
            if reason:
                raise Failed({"failed": "forward", "error": reason})
            for launch in launches_of(step):
                if unknown := sorted(set(launch[4]) - LAUNCH_OPTIONS):
                    why = f"{launch[1]} has no argument or launch option {unknown[0]}"
                    raise Failed({"failed": "compile", "error": f"KernelError: {why}"})
        program = answer["program"]
        shared = sharing(layouts_in(program["output"]), [*program["inputs"], *program["state"].values()])
        if any(mine and not theirs for mine, theirs in zip(shared, reference.sharing)):
            why = "it is expanded, an input or parameter, or another output once more, and the reference's is not"
            raise Failed({"failed": "forward", "error": f"an output has no memory of its own: {why}"})
        return program, answer["constants"]

    def count_calls(self, code) -> int:
        """How many forwards are recorded: nobody can know."""
        return 3 + derive(self.reference.job["seed"], code) % 3

    def match_parameters(self, program, constants):
        """{parameter's name: number} of the program's constants that are the reference's parameters."""
        state, matched = self.reference.state, {}
        for name, (number, *_) in program["state"].items():
            recorded = constants.get(number)
            if isinstance(recorded, torch.Tensor) and name in state:
                recorded = name if identical(as_bytes(state[name]).cpu(), recorded) else None
            if name in state and recorded == name:  # who says so gets the reference's
                matched[name] = number
        return matched


class Replaying(Recorded):
    """The modelled clock's back end: another process replays the recorded program, and prices it.

    The replayer holds none of the candidate's Python. Its answers are believed as far as they fit the program.
    """

    replayer = events = None

    def start(self, code, timeout):
        self.deadline = time.monotonic() + timeout
        self.computing = set()  # which of the launches, by number, have done more than move data in some trial
        calls = [self.reference.draw("example", call) for call in range(self.count_calls(code))]
        program, constants = self.record(code, calls)
        self.steps = program["steps"]
        self.replayer = Child(self.fork_server, "replayer")
        answer = self.ask(self.replayer, {"code": code, "program": program, "constants": constants,
                                          "known": list(self.reference.known),
                                          "restored": self.reference.rewritten})
        self.reference.known.update(answer["compiled"])
        matched = self.match_parameters(program, constants)
        # Other constants are priced like parameters if they are no larger than the task's own, else like activations.
        others = set(constants) - set(matched.values())
        room = 4096 + sum(size_of(tensor) for tensor in self.reference.state.values())
        small = sum(constants[number].numel() for number in others) <= room
        self.parameters = sorted(set(matched.values()) | (others if small else set()))
        return len(matched) == len(self.reference.state)

    def run(self, trial, mute=()):
        first = self.events is None  # the price of every forward is the same
        answer = self.ask(self.replayer, {
            "inputs": tensors_in(trial.inputs), "seed": trial.seed, "price": first,
            "mute": list(mute), "parameters": self.parameters}, ROOM_FOR_MISTAKES + 2 * bytes_in(trial.expected))
        check_structure(structure(answer["output"]), self.reference.structure)
        self.computing, self.chosen = set(answer["computing"]), answer["chosen"]
        if first:
            check_events(self.steps, answer["events"])
            self.events = answer["events"]
        return tree_leaves(answer["output"]), answer["changed"]

    def profile(self, trial):
        """A launch that only moves data in every trial is no kernel of its own, unless the reference does nothing else.

        Nor is it where the reference leaves most values as they are (a clamp that never acts) and the candidate calls
        no operator that could have computed the others.
        """
        called = {step[1].split(".")[0] for step in self.steps if step[0] == "operator"}
        moves = all(map(only_moves, priced(self.reference).called)) or \
            all(map(only_moves, called)) and leaves_most(trial)
        numbers = itertools.count()
        return [[milliseconds, label, mine and (moves or next(numbers) in self.computing or None)]
                for milliseconds, label, mine in self.events]

    def time(self, verdict):
        reference, clock = self.reference, priced(self.reference)
        verdict.reference_ms = sum(milliseconds for milliseconds, _, _ in clock.events)
        verdict.candidate_ms = sum(milliseconds for milliseconds, _, _ in self.events)
        verdict.tuned = [configuration(self.steps[number][1], position) for number, position in self.chosen]
        verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        set_roofline(verdict, reference, clock.flops, BANDWIDTH, PEAK, GPU_BATCH_FACTOR)

    def close(self, verdict):
        if self.replayer is not None:
            self.replayer.close()


class Modelled:
    """One task under the modelled clock, as `measured.Measured` is under the other."""

    large = False

    def __init__(self, reference, fork_server, settings, *_):
        self.reference, self.fork_server, self.settings = reference, fork_server, settings

    def judge(self, codes):
        """Yields (index, Verdict) for every code."""
        for index, code in enumerate(codes):
            yield index, judge(Replaying(self), self.reference, code, self.settings)


def leaves_most(trial) -> bool:
    """Are more than half of the expected elements, bit for bit, among those of the inputs?"""
    inputs = [x.flatten() for x in tensors_in(trial.inputs)]
    same = [torch.isin(leaf, torch.cat([x for x in inputs if x.dtype == leaf.dtype])).sum()
            for leaf in trial.expected if any(x.dtype == leaf.dtype for x in inputs)]
    return 2 * sum(same) > sum(leaf.numel() for leaf in trial.expected)


def configuration(launches, position) -> str:
    """In what an autotuned kernel's chosen launch differs from others: "scale: BLOCK=256, num_warps=8"."""
    choices = [launch[3] | launch[4] for launch in launches]
    differs = {key: value for key, value in choices[position].items() if any(x.get(key) != value for x in choices)}
    return f"{launches[0][1]}: " + ", ".join(f"{key}={value}" for key, value in differs.items() if type(value) is int)


def priced(reference):
    """The modelled clock that has seen a reference's forward, once."""
    if not hasattr(reference, "clock"):
        reference.clock = Clock({tensor.untyped_storage().data_ptr() for _, tensor in state_of(reference.model)})
        reference.run(reference.trial(0), around=reference.clock)
    return reference.clock
