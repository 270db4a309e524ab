"""The order of judgement for the modelled clock, in the scorer's process."""

import time

import torch
from torch.utils._pytree import tree_leaves

from judge.correctness import (Stages, Verdict, compare, identical, note_comparison, reaching, set_failure, set_profile,
                               set_roofline)
from judge.modelled import BANDWIDTH, PEAK, UNPRICED, Clock, size_of
from judge.processes import Child, Gone
from tasks import GPU_BATCH_FACTOR


def judge(reference, code, warm, settings):
    """Record the candidate in one process, replay it in another, compare and price."""
    verdict, children, deadline = Verdict(clock="modelled"), [], time.monotonic() + settings["timeout"]
    stages = Stages(verdict)
    try:
        children.append(Child(warm, "candidate"))
        answer = children[0].ask({"code": code, "seed": reference.parameter_seed, "arguments": reference.arguments,
                                  "inputs": reference.draw("example")}, deadline)
        children[0].close()
        stages.end("start")
        if "failed" in answer:
            return set_failure(verdict, code, answer["failed"], answer["error"], answer["line"])
        program, constants = answer["program"], answer["constants"]
        verdict.compiled = True
        if settings["require_kernel"] and not any(step[0] == "launch" for step in program["steps"]):
            verdict.rejected = "launches no kernel of its own"
            return verdict
        children.append(Child(warm, "replayer"))
        answer = children[1].ask({"code": code, "program": program, "constants": constants,
                                  "known": list(reference.known)}, deadline)
        if "failed" in answer:
            return set_failure(verdict, code, answer["failed"], answer["error"], answer["line"])
        reference.known.update(answer["compiled"])

        stages.end("compile")

        # Which recorded constants are the model's parameters. Perturbed ones can be put in their place only if the
        # forward reads nothing else that may have been derived from them.
        matched = {name: ref[0] for name, ref in program["state"].items() if name in reference.state and identical(
            reference.state[name].contiguous().view(-1).view(torch.uint8), constants.get(ref[0], torch.empty(0)))}
        derived = any(number not in matched.values() and data.numel() > 256 for number, data in constants.items())
        note = "" if len(matched) == len(reference.state) else \
            "; its parameters differ from the reference's (create them in the same order, with the same shapes)"

        # Other constants are priced like parameters if they are no larger than the task's own, else like activations.
        others = {number for number in constants if number not in matched.values()}
        room = 4096 + sum(size_of(tensor) for tensor in reference.state.values())
        kept = set(matched.values()) | (others if sum(constants[n].numel() for n in others) <= room else set())

        def run(trial, price=False, mute=()):
            state = {matched[name]: value.contiguous().view(-1).view(torch.uint8)
                     for name, value in trial.state.items() if name in matched}
            return children[1].ask({"inputs": [x for x in trial.inputs if isinstance(x, torch.Tensor)],
                                    "seed": trial.seed, "state": state, "price": price, "mute": list(mute),
                                    "parameters": sorted(kept)}, deadline)

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
        clock = Clock({tensor.untyped_storage().data_ptr() for _, tensor in reference.tensors()})
        reference.run(first, around=clock)
        unpriced = {label for _, label, mine in events if not mine and UNPRICED.match(label)}
        if unpriced := sorted(unpriced - {label for _, label, _ in clock.events}):
            verdict.correct, verdict.rejected = False, f"calls aten.{unpriced[0]}, for which there is no modelled price"
            return verdict
        verdict.reference_ms, verdict.candidate_ms = (sum(event[0] for event in e) for e in (clock.events, events))
        set_roofline(verdict, reference, clock.flops, BANDWIDTH, PEAK, GPU_BATCH_FACTOR)
        if verdict.correct:
            verdict.speedup = verdict.speedup_low = verdict.reference_ms / max(verdict.candidate_ms, 1e-9)
        stages.end("check")
        return verdict
    except TimeoutError:
        return set_failure(verdict, code, "forward", f"no result within {settings['timeout']:g} s", None)
    except (Gone, OSError):
        why = "the process ended without a result (crash, exit or memory limit)"
        return set_failure(verdict, code, "forward", why, None)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return set_failure(verdict, code, "forward", "the recorded program is malformed", None)
    finally:
        for child in children:
            child.close()
