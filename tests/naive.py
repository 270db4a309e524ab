"""What a first implementation of a sandbox looks like; the cheats of test_cheats.py fool it.

It executes the candidate beside the reference, compares the outputs with allclose at 1e-2, takes the time with
time.perf_counter, counts Triton launches, believes what the process prints. Run as a helper process, which has Triton's
interpreter switched on and forks for every candidate: conftest.naively.
"""

import json
import os
import sys
from pathlib import Path


def naive(task, code):
    """{"correct", "speedup", "launches"}, all in one process, as a first implementation would."""
    import time

    import torch
    import triton

    space = {"__name__": "task"}
    exec(compile(task, "task.py", "exec"), space)
    launches, launch = [0], triton.runtime.interpreter.InterpretedFunction.run

    def counted(*args, **kwargs):
        launches[0] += 1
        return launch(*args, **kwargs)

    triton.runtime.interpreter.InterpretedFunction.run = counted
    Path("task.py").write_text(task)
    Path("candidate.py").write_text(code)
    exec(compile(code, "candidate.py", "exec"), space)
    torch.manual_seed(42)
    reference = space["Model"](*space["get_init_inputs"]())
    torch.manual_seed(42)
    candidate = space["ModelNew"](*space["get_init_inputs"]())

    def clock(model, inputs):
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            model(*inputs)
            seconds.append(time.perf_counter() - began)
        return min(seconds)  # however busy the machine is, one of them is not disturbed

    with torch.no_grad():
        torch.manual_seed(43)
        inputs = space["get_inputs"]()
        candidate(*inputs)  # warm up, so that nothing is compiled later on
        expected = reference(*inputs).clone()
        got = candidate(*inputs)
        correct = bool(torch.allclose(got, expected, atol=1e-2, rtol=1e-2))
        speedup = clock(reference, inputs) / max(clock(candidate, inputs), 1e-9)
    return {"correct": correct, "speedup": speedup, "launches": launches[0]}


def naive_server():
    """Answer each line {"task", "code"} on stdin with a line of JSON, each from a fork of its own."""
    import torch  # noqa: F401  once, for all candidates
    import triton  # noqa: F401

    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.chdir(os.environ["SCRATCH"])
            os.dup2(write, 1)  # the candidate's prints and the result go the same way, and the last line counts
            try:
                print(json.dumps(naive(**json.loads(line))), flush=True)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            lines = [text for text in pipe.read().splitlines() if text.startswith("{")]
        os.waitpid(child, 0)
        print(lines[-1] if lines else "{}", flush=True)


if __name__ == "__main__":
    naive_server()
