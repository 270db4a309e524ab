"""What the sandbox's processes do: look at a candidate's source, run it, and judge what it has done.

    scorer       holds one task's reference and judges its candidates, by one clock or the other
    candidate    executes a candidate's code; nothing is believed of it
    replayer     runs the program that a candidate has recorded (modelled clock)

sandbox.py says who holds what and what that stops; processes.py starts this file as the warm parent of all of them.
"""

import gc
import json
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from judge import compiler, judgement, modelled, processes
from judge.client import Client
from judge.correctness import Reference, describe, identical, load_module, other_shapes
from judge.measured import Measured
from judge.processes import receive, send, spare_memory
from judge.worker import Worker
from tasks import TaskError

class LocalLock:
    """A GPU lock within this process. To be replaced by B: judge/gpu_lock.py."""

    def __init__(self):
        self.condition, self.holders, self.wanted = threading.Condition(), {}, 0

    def acquire(self, exclusive):
        began = time.monotonic()
        with self.condition:
            self.wanted += exclusive
            self.condition.wait_for(lambda: not self.holders if exclusive else
                                    not self.wanted and True not in self.holders.values())
            self.wanted -= exclusive
            self.holders[threading.get_ident()] = exclusive
        return time.monotonic() - began

    def release(self):
        with self.condition:
            self.holders.pop(threading.get_ident(), None)
            self.condition.notify_all()


GPU = LocalLock()
HOARD = 6 << 30  # bytes of GPU memory with which a scorer does not take on another task

# ---------------------------------------------------------------------------------------------------------------------
# The candidate's process


def candidate(sock, warm, settings):
    """Role of the process that holds a candidate's code. What it sends is checked, or replayed by others."""
    folder = Path(tempfile.mkdtemp(dir=".")).absolute()
    if settings["clock"] == "measured":
        Worker(settings, sock, folder).serve()
        return
    path = folder / "candidate.py"
    job = receive(sock)
    stage = "compile"
    try:
        module = load_module("candidate", job["code"], path)
        stage = "build"
        torch.manual_seed(job["seed"])
        model = module.ModelNew(*job["arguments"])
        stage = "forward"
        program, constants = modelled.record(model, job["inputs"])
        send(sock, {"program": program, "constants": constants})
    except BaseException as error:  # SystemExit included: the verdict says what happened
        text, line = describe(error, path, job["code"])
        send(sock, {"failed": stage, "error": text, "line": line})


def replayer(sock, warm, settings):
    """Role of the process that runs a recorded program: no host code of the candidate gets here (modelled.Replay)."""
    job = receive(sock)
    stage = "compile"
    try:
        replay = modelled.Replay(job["code"], job["program"], job["constants"], set(job["known"]))
        send(sock, {"compiled": list(replay.compiled)})
        stage = "forward"
        while True:
            run = receive(sock)
            before = [tensor.clone() for tensor in run["inputs"]]
            output, events, live = replay.run(run["inputs"], run["seed"], run["state"], run["price"], set(run["mute"]),
                                              run["parameters"])
            changed = [i for i, (old, new) in enumerate(zip(before, run["inputs"])) if not identical(old, new)]
            send(sock, {"output": output, "events": events, "live": live, "changed": changed})
    except compiler.KernelError as error:
        send(sock, {"failed": error.stage, "error": str(error)[:300], "line": error.line})
    except Exception as error:
        send(sock, {"failed": stage, "error": describe(error, "")[0], "line": None})


# ---------------------------------------------------------------------------------------------------------------------
# The scorer's process


def scorer(sock, warm, settings):
    """Role of the process that holds one task's reference and judges its candidates, then perhaps another task's."""
    job, lanes = receive(sock), []
    while True:
        try:
            measured = None
            if settings["clock"] == "measured":  # starting CUDA takes its time: meanwhile the reference is built
                lanes = lanes or [Client(warm, settings, role, GPU) for role in ("reference", "candidate")]
            reference = Reference(job, settings)
            if settings["clock"] == "measured":
                measured = Measured(reference, warm, settings, GPU, lanes)
                spare_memory()
        except TaskError as error:
            send(sock, {"unusable": str(error)})
            return
        send(sock, {"unusable": None, "large": measured is not None and measured.large,
                    "weight": (measured and measured.limit) or 0})
        shapes = []  # see generalise
        while "codes" in (order := receive(sock)):
            judge(order, sock, job, reference, measured, warm, settings, shapes)
            spare_memory()
        job, lanes = order, measured.hand_on()
        del reference, measured, shapes
        gc.collect()
        spare_memory()
        if torch.cuda.memory_reserved() > HOARD:  # memory that was shared is not given back
            return
        job = job or receive(sock)  # it was only asked for its memory (see Sandbox._rest)


def judge(order, sock, job, reference, measured, warm, settings, shapes):
    """Send a verdict for every candidate of an order. shapes: kept between calls, see generalise."""
    codes = order["codes"]
    if "spare" in order:
        measured.prepare(order["spare"])
    if measured is None:
        judged = ((index, judgement.judge(judgement.Replaying(reference, warm, settings), reference, code, settings))
                  for index, code in enumerate(codes))
    else:
        judged = measured.judge(codes) if codes else ()
    for index, verdict in list(judged) if settings["shapes"] else judged:  # other shapes once all is quiet again
        generalise(verdict, codes[index], job, warm, settings, shapes)
        send(sock, {"index": index, "verdict": asdict(verdict), "known": list(reference.known)})


def generalise(verdict, code, job, warm, settings, shapes):
    """Enter whether a correct candidate is correct on other shapes of the task as well. shapes: kept between calls."""
    if not verdict.correct or not settings["shapes"]:
        return
    if not shapes:
        for change, source in other_shapes(job["source"], settings["shapes"], job["seed"]):
            try:
                other = Reference({**job, "source": source}, settings)
                measured = Measured(other, warm, settings, GPU) if settings["clock"] == "measured" else None
                shapes.append((change, other, measured))
            except TaskError:  # sizes that do not fit together
                continue
            if len(shapes) == settings["shapes"]:
                break
    for change, other, measured in shapes:
        if measured is None:
            back_end, few = judgement.Replaying(other, warm, settings), {**settings, "trials": 1}
            answer = judgement.judge(back_end, other, code, few)
        else:
            answer = measured.judge_one(code, timed=False)
        if not answer.correct:
            verdict.generalises, verdict.shape_error = False, f"with {change}: {answer.rejected or answer.error}"
            return
    verdict.generalises = bool(shapes) or None


if __name__ == "__main__":
    settings = json.loads(sys.argv[3])  # see processes.start
    compiler.warm_up()
    if settings["device"] != "cpu":
        triton.runtime.driver.active.utils  # built by a C compiler, which no fork should wait for; starts no CUDA
    processes.warm_parent(socket.socket(fileno=int(sys.argv[2])), settings,
                     {"scorer": scorer, "candidate": candidate, "reference": candidate, "replayer": replayer})
    os._exit(0)
