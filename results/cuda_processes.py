"""What starting and ending CUDA processes costs, and what it does to the timing of another one. Needs a GPU; 1 minute.

    python results/cuda_processes.py

First one process after the other, with several numbers of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS; medians of
six). Then one process times batches of 1.6 ms without pause while others start and end, or only keep cores busy.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # this process must not start CUDA, or it could not be forked

import torch  # noqa: E402

PHASE = 5.0  # seconds
PHASES = [("nothing", 0), ("start and end", 1), ("start and end", 4), ("start and end", 8), ("start and end", 14),
          ("keep cores busy", 14), ("keep cores busy", 24)]


def forked(work, *arguments):
    child = os.fork()
    if child == 0:
        work(*arguments)
        os._exit(0)
    return child


def start_cuda():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def one_process(queues):
    """Seconds from the fork to the end of a process that starts CUDA and is then killed.

    queues: CUDA_DEVICE_MAX_CONNECTIONS as a string, or None for the default.
    """
    read, write = os.pipe()

    def work():
        if queues:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        start_cuda()
        os.write(write, b"!")
        time.sleep(60)

    began = time.monotonic()
    child = forked(work)
    os.read(read, 1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    return time.monotonic() - began


def time_batches(until, path):
    """Write [when, seconds] of every batch to a file."""
    x = torch.randn(50 << 18, device="cuda")
    y, graph, batches = torch.empty_like(x), torch.cuda.CUDAGraph(), []
    torch.add(x, 1.0, out=y)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(20):
            torch.add(x, 1.0, out=y)
    while time.monotonic() < until:
        began = time.monotonic()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        batches.append((began, time.monotonic() - began))
        time.sleep(0.002)
    Path(path).write_text(json.dumps(batches))


def disturb(kind, until):
    """Start and end one CUDA process after the other until time.monotonic() is `until`, or only keep a core busy."""
    while time.monotonic() < until:
        if kind == "start and end":
            os.waitpid(forked(start_cuda), 0)


def main():
    torch.set_num_threads(1)
    for queues in (None, "1", "2", "4", "8"):
        seconds = statistics.median(one_process(queues) for _ in range(6))
        print(f"{queues or 'default'} queues: {seconds:.3f} s", flush=True)
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    timer = forked(time_batches, time.monotonic() + 6 + len(PHASES) * (PHASE + 5), path)
    time.sleep(6)
    marks = []
    for kind, count in PHASES:
        until = time.monotonic() + PHASE
        marks.append((kind, count, until))
        others = [forked(disturb, kind, until) for _ in range(count)]
        time.sleep(PHASE)
        for other in others:
            os.waitpid(other, 0)
        time.sleep(1)
    os.waitpid(timer, 0)
    batches = json.loads(Path(path).read_text())
    os.unlink(path)
    for kind, count, until in marks:
        ms = sorted(seconds * 1e3 for began, seconds in batches if until - PHASE <= began < until)
        shown = {f"{q:.0%}": round(ms[int(q * (len(ms) - 1))], 3) for q in (0.05, 0.5, 0.75, 0.95, 1)}
        print(f"{count} processes that {kind}: {len(ms)} batches, milliseconds {shown}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    main()
