"""A candidate in CUDA C++, with a GPU: it cannot be recorded, so it runs in a jailed process of its own.

    python -m judge.extension FD SETTINGS        that process: it answers orders until the judge hangs up

The judge sends inputs, gets outputs, and times each order by its own clock (`Extension`). The process has the GPU and
none of the right answers; its model is a `Guest`, its calls are a measured.Side.
"""

import json
import math
import os
import socket
import sys
import tempfile
import time

import torch
from torch.utils._pytree import tree_map_only

from judge.measured import LONG_PAUSE, Side, paused, profile
from judge.processes import NVCC_SECONDS, Server, begin_process, limit, receive, send
from judge.program import copy_of
from judge.reference import Answer, load_module, seed_everything, state_of
from judge.rules import static_check
from judge.verdict import EXTENSION, Failed, describe


class Extension:
    """A candidate with CUDA C++ sources, seen from the judge.

    Its kernels cannot be left out, and it controls its own process. The judge relies on the outputs, which it compares,
    and on its own clock.
    """

    can_leave_out, kernels = False, [EXTENSION]

    def __init__(self, task, code):
        self.task = task
        self.reference = task.reference
        self.least = 1.0
        static_check(code)
        self.seed = self.reference.derive(code, "forward")
        self.deadline = time.monotonic() + task.settings["timeout"] + NVCC_SECONDS
        self.server = Server("judge.extension", task.settings, gpu=True)
        try:
            blueprint = self.reference.blueprint()
            expected = {name: described[:2] for name, described in blueprint["state"].items()}  # without values
            self.may_be_perturbed = self.ask("build", code, blueprint) == expected
            task.gpu("share")  # not before: nvcc may have taken a minute
            self.deadline = time.monotonic() + task.settings["timeout"]
        except BaseException:
            self.close()
            raise

    def ask(self, order, *arguments):
        """What this method of its process's Guest or Side returns."""
        send(self.server.sock, [order, list(arguments)])
        answer = receive(self.server.sock, self.deadline, 4 * self.task.clock.needed + (64 << 20))
        if "failed" in answer:
            raise Failed(str(answer["error"]), str(answer["failed"]))
        return tree_map_only(torch.Tensor, lambda x: x.to(self.reference.device), answer["done"])

    def load(self, perturbed):
        self.ask("load", self.reference.state(True) if perturbed else {})

    def run(self, trial, inputs, mute=()) -> Answer:
        self.ask("fill", {0: inputs})
        self.ask("seconds", [0], False)
        return Answer(*self.result(0))

    def profile(self, inputs) -> list:
        self.task.gpu("alone")
        events = self.ask("profile", inputs)
        if not all(0 <= ms < math.inf for ms, _, _ in events):  # they are the candidate's words; NaN is refused, too
            raise Failed("its process reports times that there are not", "rejected")
        return [[float(ms), str(label), bool(own)] for ms, label, own in events]

    def time(self, verdict):
        self.task.gpu("alone")
        self.fill(self.task.clock.slots)
        self.task.clock.measure(self, verdict)

    def capture(self) -> bool:
        return self.ask("capture")

    def fill(self, drawn):
        self.load(False)
        self.ask("fill", drawn)

    def result(self, slot) -> list:
        return self.ask("result", slot)

    def seconds(self, calls, graphs) -> float:
        """By the judge's clock, less what an order without calls takes at least: a disturbance only adds time."""
        times = []
        for some in ([], [], [], calls):
            began = time.perf_counter()
            self.ask("seconds", some, graphs)
            times.append(time.perf_counter() - began)
        self.least = min(self.least, *times[:3])
        return max(times[3] - self.least, 1e-6 * len(calls))

    def close(self):
        self.server.close()


class Guest:
    """In the process of a CUDA C++ candidate: its model."""

    stage = "compile"

    def build(self, code, blueprint):
        module = load_module(code, os.path.join(tempfile.mkdtemp(), "candidate.py"))
        self.stage = "build"
        seed_everything(blueprint["seed"])
        self.model = module.ModelNew(*blueprint["arguments"], **blueprint["keywords"]).cuda()
        self.stage, self.state = "forward", state_of(self.model)
        self.original = copy_of(self.state)
        self.side = Side(lambda inputs: self.model(*inputs), {}, lambda: None)
        return {name: [str(x.dtype), list(x.shape)] for name, x in self.state.items()}

    def load(self, state):
        for name, tensor in self.state.items():
            tensor.copy_(state.get(name, self.original[name]))

    def profile(self, inputs):
        def run(observer):
            with observer:
                self.model(*inputs)
        events = profile(run)
        rest = paused(lambda: self.model(*inputs), LONG_PAUSE) - sum(ms for ms, _, _ in events)
        return events + [[rest, EXTENSION, True]] * (rest > 0.002)  # its own kernels run outside of every operator


@torch.no_grad()
def main():
    """The process of a CUDA C++ candidate: answer orders until the judge hangs up."""
    sock, guest, settings = socket.socket(fileno=int(sys.argv[1])), Guest(), json.loads(sys.argv[2])
    begin_process()
    limit(settings, gpu=True)
    torch.cuda.set_device(settings["device"])
    while True:
        order, arguments = receive(sock)
        arguments = tree_map_only(torch.Tensor, torch.Tensor.cuda, arguments)
        try:
            answer = {"done": getattr(guest if hasattr(guest, order) else guest.side, order)(*arguments)}
        except BaseException as error:  # SystemExit included: its Python runs here
            answer = {"failed": guest.stage, "error": describe(error)[0]}
        send(sock, answer)


if __name__ == "__main__":
    main()
