"""What the sandbox's processes do: look at a candidate's source, run it, and judge what it has done.

    scorer       holds one task's reference and judges its candidates, by one clock or the other
    candidate    executes a candidate's code; nothing is believed of it
    compiler     compiles the kernels of a recorded program for the GPU (measured clock)
    replayer     runs the program that a candidate has recorded; extension: the same, for one with CUDA sources

sandbox.py says who holds what and what that stops; processes.py starts this file as the fork server of all of them.

A scorer takes orders from the sandbox, one after the other. The answer to each ends with a message {"done": ...}.

    {"task": {"name", "source", "seed", "known"}}   build a task's reference, in place of an earlier task's
    {"codes": [...]}                                judge candidates: a verdict each, as they are done
"""

import contextlib
import gc
import json
import os
import socket
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from torch.utils._pytree import tree_map_only
from triton.runtime.cache import triton_key

from judge import compiler, judgement, modelled, processes, recorder
from judge.correctness import Reference, identical, load_module
from judge.gpu_lock import RemoteLock
from judge.measured import Connection, Measured
from judge.messages import TORCH_NAMES, receive, send, spare_memory
from judge.perturbation import construct
from judge.prices import bytes_in
from judge.replayer import Replayer
from judge.verdict import failure
from tasks import TaskError

# ---------------------------------------------------------------------------------------------------------------------
# The candidate's process


@contextlib.contextmanager
def reporting(sock, stage, path=""):
    """Within it, an exception is sent as {"failed": stage, ...}. stage: a list, whose last entry says where it is."""
    try:
        yield
    except BaseException as error:  # SystemExit included: the verdict says what happened
        send(sock, failure(error, stage[-1], path))


def candidate(sock, _, settings):
    """Role of the process that executes a candidate's code, to record it. What it sends is replayed by others."""
    path, job, stage = Path(tempfile.mkdtemp(dir=".")).absolute() / "candidate.py", receive(sock), ["compile"]
    recorder.pretend_gpu(job.get("gpu", recorder.H200))
    with reporting(sock, stage, path):
        with recorder.PretendCuda(recorder.Recorder(), in_forward=False):
            module = load_module("candidate", job["code"], path)
            stage.append("build")
            model = construct(module.ModelNew, job["arguments"], job["seed"], job["names"])
        stage.append("forward")
        modelled_clock = settings["clock"] == "modelled"
        calls = job["calls"] if modelled_clock else without_values(job["calls"])
        program, constants = recorder.record(model, calls, "cpu" if modelled_clock else "meta")
        send(sock, {"program": program, "constants": constants}, job["room"])


def without_values(calls):
    """Inputs of forwards, all the same, from [dtype, shape, strides] in place of tensors."""
    inputs = [torch.empty_strided(x[1], x[2], dtype=TORCH_NAMES[x[0]], device="meta")
              if isinstance(x, list) and len(x) == 3 and x[0] in TORCH_NAMES else x for x in calls[0]]
    return [inputs] * len(calls)


def compiles(sock, _, settings):
    """Role of the process that compiles a program's kernels for the measured clock."""
    job = receive(sock)
    recorder.pretend_gpu(job["gpu"])
    with reporting(sock, ["compile"]):
        recording = modelled.Recording(job["code"], job["program"])
        if settings["device"] != "cpu":
            recording.compile_launch = compiler.compile_for_device  # into the folder of compiled kernels
        recording.compile_all(set(job["known"]))
        send(sock, {"compiled": list(recording.compiled)})


def replayer(sock, _, settings):
    """Role of the process that runs a recorded program: no host code of the candidate gets here (modelled.Replay)."""
    if settings["clock"] == "measured":
        return Replayer(settings, sock, Path(tempfile.mkdtemp(dir=".")).absolute()).serve()
    job, stage = receive(sock), ["compile"]
    with reporting(sock, stage):
        replay = modelled.Replay(job["code"], job["program"], job["constants"], set(job["known"]), job["restored"])
        send(sock, {"compiled": list(replay.compiled)})
        stage.append("forward")
        while True:
            run = receive(sock)
            before = [tensor.clone() for tensor in run["inputs"]]
            output, events = replay.run(run["inputs"], run["seed"], run["price"], set(run["mute"]), run["parameters"])
            changed = [i for i, (old, new) in enumerate(zip(before, run["inputs"])) if not identical(old, new)]
            if bytes_in(output) > run["room"]:
                raise ValueError(f"an output of {bytes_in(output):,} bytes ({run['room']:,} are allowed)")
            output = tree_map_only(torch.Tensor, torch.Tensor.contiguous, output)  # gaps are not passed on
            send(sock, {"output": output, "events": events, "changed": changed,
                        "chosen": list(replay.chosen.items())}, run["room"])


# ---------------------------------------------------------------------------------------------------------------------
# The scorer's process


def scorer(sock, fork_server, settings):
    """Role of the process that holds one task's reference and judges its candidates, then perhaps another task's."""
    sending, loaded = threading.Lock(), None
    sys.setswitchinterval(5e-4)  # who times waits no longer than this for those that record

    def tell(message):
        with sending:
            send(sock, message)

    gpu, measured = RemoteLock(sock, tell), settings["clock"] == "measured"
    connection = Connection(fork_server, "replayer", settings) if measured else None  # CUDA takes its time to start
    while True:
        order = receive(sock)
        if "task" in order:
            connection = loaded.usable_connection() if measured and loaded is not None else connection
            loaded = None
            gc.collect()
            spare_memory()
            try:
                told, clock = set(order["task"]["known"]), Measured if measured else judgement.Modelled
                reference = Reference(order["task"], settings, gpu.shared)
                loaded = clock(reference, fork_server, settings, gpu, connection)
            except TaskError as error:
                return tell({"done": str(error)})
        else:
            for index, verdict in loaded.judge(order["codes"]):
                new, told = loaded.reference.known - told, loaded.reference.known | told
                tell({"index": index, "verdict": asdict(verdict), "known": list(new)})
        tell({"done": None})
        spare_memory()


if __name__ == "__main__":
    settings = json.loads(sys.argv[3])  # see processes.start
    compiler.warm_up()
    if settings["clock"] == "measured":  # what the first operator on tensors without values imports
        torch.addmm(*[torch.empty(1, 1, device="meta")] * 3)
    if settings["device"] != "cpu":
        # PyTorch would ask NVML how many GPUs there are, and a fork of a process that uses NVML may be told: none.
        torch.cuda.device_count = lambda: settings["gpus"]
        triton.runtime.driver.active.utils  # built by a C compiler, which no fork should wait for; starts no CUDA
        triton_key()  # a hash of all of Triton, which takes half a second, and every compiled kernel's name has it
    roles = dict(scorer=scorer, candidate=candidate, compiler=compiles, replayer=replayer, extension=replayer)
    processes.fork_server(socket.socket(fileno=int(sys.argv[2])), settings, roles)
    os._exit(0)
