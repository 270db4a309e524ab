"""The order in which a candidate is judged. Both clocks follow it, so both apply the same rules.

    source text      what judge/rules.py refuses is not run
    start            a process constructs the candidate's model
    check            its output is compared with the reference's in every trial; inputs may not be changed in place
    own kernels      it launches kernels of its own, and without them the output is wrong
    time             of the reference and of the candidate

The first step that fails decides the verdict. What a step does is the business of a *back end*: `Replaying` (below)
for the modelled clock, `measured.Candidate` for the measured one; both judge what `Recorded` has recorded. Whatever
goes wrong in a back end is an exception (Failed, TimeoutError, Gone, ValueError and others), and `judge` alone turns
exceptions into verdicts. A back end is one candidate's processes, and has the methods

    start(code, timeout)    construct the model; `timeout` seconds are all that it has from now on. Returns whether its
                            parameters are the reference's, in name and shape
    run(trial, mute=())     one forward, without the kernels named in `mute`: (leaves of the output, indices of inputs
                            that it changed)
    profile(trial)          [[milliseconds, label, is it a kernel of its own?]]
    time(verdict)           enter reference_ms, candidate_ms, speedup, speedup_low and what comes with them; or reject
    close()                 end the processes, or keep them for others
"""

import ast
import contextlib
import math
import time

import torch
from torch.utils._pytree import tree_leaves

from judge.correctness import as_bytes, check_structure, compare, identical, sharing, structure
from judge.messages import ROOM, Child, Gone, layouts_in
from judge.perturbation import state_of
from judge.prices import BANDWIDTH, PEAK, Clock, bytes_in, refusal, size_of, tensors_in
from judge.recorder import CALLS, launches_of
from judge.rules import LAUNCH_OPTIONS, dotted, offence, parse
from judge.verdict import (EXTENSION, Failed, Verdict, describe, numbered, reaching, reject, set_failure, set_profile,
                           set_roofline)
from tasks import GPU_BATCH_FACTOR

ROOM_FOR_MISTAKES = 1 << 20  # bytes beside an output's: of a wrong shape or type, it is compared all the same
NVCC_SECONDS = 180  # that compiling a CUDA extension may take, on top of a candidate's time limit


def static_check(code):
    """What can be judged without running anything: returns a Verdict, or None to go on."""
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
            same = back_end.start(code, timeout)
            verdict.compiled = True
            check(back_end, reference, settings["trials"], verdict, same)
            if verdict.correct:
                check_kernels(back_end, reference, verdict, settings["require_kernel"])
            if verdict.correct and not verdict.rejected:
                back_end.time(verdict)
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
            back_end.close()
    verdict.clock = settings["clock"]
    if not verdict.correct:
        verdict.speedup = verdict.speedup_low = None
    return verdict


def check(back_end, reference, trials, verdict, same):
    """Compare the outputs in every trial. same: what start returned."""
    note = "" if same else "; its parameters are not the reference's (create them in the same order and shapes)"
    for index in range(trials):
        trial = reference.trial(index)
        leaves, changed = back_end.run(trial)
        if set(changed) - set(trial.changed):
            return reject(verdict, "changes its input tensors in place")
        if problem := compare(trial, leaves, reference.tolerance):
            verdict.error = problem + note
            return
    verdict.correct = True


def check_kernels(back_end, reference, verdict, required):
    """Enter profile and coverage. Where kernels of its own are required, reject a candidate without one that matters.

    A kernel matters if the output is wrong without it. That is not asked of a CUDA extension: it cannot be left out.
    """
    trial = reference.trial(0)

    def still_right(muted):
        leaves, _ = back_end.run(trial, muted)
        return compare(trial, leaves, reference.tolerance) is None

    events = back_end.profile(trial)
    own = {label for _, label, mine in events if mine}
    if required and not own:
        reject(verdict, "launches no kernel of its own")
    elif required:
        own = (own & {EXTENSION}) | reaching(own - {EXTENSION}, still_right)
        if not own:
            reject(verdict, "the results of its kernels do not reach the output")
    set_profile(verdict, events, own)


def has_extension(code) -> bool:
    """Does it have nvcc compile CUDA sources? That takes most of a minute, and its kernels are no operator's."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # static_check says so
        return "load_inline" in code and any((dotted(node.func) or [""])[-1] == "load_inline"
                                             for node in ast.walk(parse(code)) if isinstance(node, ast.Call))
    return False


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

    def match_parameters(self, program, constants):
        """{parameter's name: number} of the program's constants that are the reference's parameters."""
        state = self.reference.state
        return {name: number for name, (number, *_) in program["state"].items()
                if name in state and isinstance(constants.get(number), torch.Tensor)
                and identical(as_bytes(state[name]).cpu(), constants[number])}


class Replaying(Recorded):
    """The modelled clock's back end: another process replays the recorded program, and prices it.

    The replayer holds none of the candidate's Python, so its answers are believed.
    """

    replayer = events = None

    def start(self, code, timeout):
        self.deadline = time.monotonic() + timeout
        calls = [self.reference.draw("example", call) for call in range(CALLS)]
        program, constants = self.record(code, calls)
        self.steps = program["steps"]
        self.replayer = Child(self.fork_server, "replayer")
        answer = self.ask(self.replayer, {"code": code, "program": program, "constants": constants,
                                          "known": list(self.reference.known), "restored": self.reference.rewritten})
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
        question = dict(inputs=tensors_in(trial.inputs), seed=trial.seed, price=first, mute=list(mute),
                        parameters=self.parameters)
        answer = self.ask(self.replayer, question, ROOM_FOR_MISTAKES + 2 * bytes_in(trial.expected))
        check_structure(structure(answer["output"]), self.reference.structure)
        self.chosen, self.events = answer["chosen"], answer["events"] if first else self.events
        return tree_leaves(answer["output"]), answer["changed"]

    def profile(self, trial):
        return self.events  # the prices of the first trial's forward

    def time(self, verdict):
        reference, clock = self.reference, priced(self.reference)
        verdict.reference_ms = sum(milliseconds for milliseconds, _, _ in clock.events)
        verdict.candidate_ms = sum(milliseconds for milliseconds, _, _ in self.events)
        verdict.tuned = [configuration(self.steps[number][1], position) for number, position in self.chosen]
        verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        set_roofline(verdict, reference, clock.flops, BANDWIDTH, PEAK, GPU_BATCH_FACTOR)

    def close(self):
        if self.replayer is not None:
            self.replayer.close()


class Modelled:
    """One task under the modelled clock, as `measured.Measured` is under the other."""

    def __init__(self, reference, fork_server, settings, *_):
        self.reference, self.fork_server, self.settings = reference, fork_server, settings

    def judge(self, codes):
        """Yields (index, Verdict) for every code."""
        for index, code in enumerate(codes):
            yield index, judge(Replaying(self), self.reference, code, self.settings)


def configuration(launches, position) -> str:
    """In what an autotuned kernel's chosen launch differs from others: "scale: BLOCK=256, num_warps=8"."""
    choices = [launch[3] | launch[4] for launch in launches]
    common = set.intersection(*({*map(repr, choice.items())} for choice in choices))
    differing = [f"{key}={value}" for key, value in choices[position].items()
                 if type(value) is int and repr((key, value)) not in common]
    return f"{launches[0][1]}: " + ", ".join(differing)


def priced(reference):
    """The modelled clock that has seen a reference's forward, once."""
    if not hasattr(reference, "clock"):
        reference.clock = Clock({tensor.untyped_storage().data_ptr() for _, tensor in state_of(reference.model)})
        reference.run(reference.trial(0), around=reference.clock)
    return reference.clock
