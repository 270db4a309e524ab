"""A worker: the process that runs a model under the measured clock, a candidate's or the reference's.

It serves the orders of its client in the scorer (client.py) over a socket. Inputs and outputs lie in GPU memory that
both can see. Nothing that it answers about a candidate is believed but the descriptions of tensors, which are checked,
and its profile; it never holds an expected output. The orders:

    construct, forget      a model comes and goes
    share, put             memory for sets of inputs ("slots") and for one of outputs; inputs without such memory
    forward                one call that is not timed
    capture                record calls as a CUDA graph
    get_ready              then, at a signal, run the calls while the client's clock runs
    collect                hand over what a timed call gave
    profile                how long each operator and kernel of a call takes
"""

import contextlib
import copy
import gc
import re
import sys
import time

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime import jit

from judge.client import slots_and_outputs
from judge.correctness import describe, load_module, structure
from judge.prices import FREE_OPERATORS, Mode
from judge.messages import BLANK, attach, overwrite, receive, send, spare_memory, watch
from judge.perturbation import construct
from judge.side_effects import state, unchanged

PER_THREAD = 2  # CUDA's name of a thread's own default stream, which can be captured (see processes.start)
PAUSE = 100_000  # clock cycles, 50 microseconds, that the GPU waits for the first graph; part of Client.overhead


class EventClock(Mode):
    """While active, brackets every ATen call and every launch of an own kernel with CUDA events."""

    def __init__(self):
        super().__init__()
        self.marks, self.depth = [], 0

    def around(self, label, own, call):
        """What call() returns, and a mark; calls within it belong to it. own: is it one of the candidate's kernels?"""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.depth += 1
        out = call()
        self.depth -= 1
        end.record()
        self.marks.append((start, end, label, own))
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if self.depth or func.is_view or name in FREE_OPERATORS:
            return func(*args, **(kwargs or {}))
        return self.around(name, False, lambda: func(*args, **(kwargs or {})))


class Noise(Mode):
    """While active, uninitialised memory holds finite noise, so that an earlier result found there is no result."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name:
            out.exponential_() if out.is_floating_point() else out.zero_()  # normal noise might be the input itself
        return out


class Worker:
    """Serves orders. Every method named like an order takes its fields and returns the answer, a dict.

    sock: the connection to the client; folder: for the sources.
    """

    def __init__(self, settings, sock, folder):
        self.sock, self.folder = sock, folder
        self.device = torch.device(settings["device"])
        self.cuda = self.device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.cuda else (lambda: None)
        self.path, self.code, self.models = "", "", 0
        self.stage, self.muted, self.event_clock, self.checking = "compile", (), None, False
        self.kept, self.graph, self.layout = [], None, None
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.init()
        self.watch_kernels()
        self.before, self.began = state(), time.process_time()

    def serve(self):
        """Answer orders until the client hangs up."""
        while True:
            order = receive(self.sock)
            name = order.pop("order")
            answer = self.obey(name, order)
            send(self.sock, answer)
            if name == "get_ready" and "failed" not in answer:
                self.run_timed()

    def obey(self, name, order):
        """The answer to an order; what the model raises becomes {"failed": stage, "error": text, "line": number}."""
        try:
            return getattr(self, name)(**order)
        except BaseException as error:  # SystemExit included: the verdict says what happened
            text, line = describe(error, self.path, self.code)
            if "nvmlInit" in text:  # PyTorch stumbles over its own report of what happened
                text = "OutOfMemoryError: more GPU memory than a candidate may take"
            refused = re.search("Compilation|OutOfResources|PTXAS|Unsupported", type(error).__name__)
            return {"failed": "compile" if refused else self.stage, "error": text, "line": line}

    # A model comes and goes

    def wake(self):
        """Answer: the process is up."""
        return {}

    def construct(self, code, name, arguments, names, seed, on_device, limit, compile_it):
        """Execute the source, and construct the model from its class `name` as the reference was: same seed, same
        device, same perturbation. limit: bytes of GPU memory that the candidate may take, or None. The answer: see
        Client.construct.
        """
        if limit is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self.device)
        self.stage, self.code, self.models, self.queueing = "compile", code, self.models + 1, 0.0
        self.path = str(self.folder / f"candidate{self.models}.py")  # Python caches the lines of files by their names
        self.model_class = getattr(load_module("candidate", code, self.path), name, None)
        if not isinstance(self.model_class, type):
            raise NameError(f"the code defines no class {name}")
        self.stage = "build"
        arguments = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in arguments]
        self.allocate()
        with self.device if on_device else contextlib.nullcontext():
            self.model = construct(self.model_class, arguments, seed, names).to(self.device)
        self.stage = "forward"
        state = {key: list(t.shape) for key, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        if compile_it:
            self.model = torch.compile(self.model)
        return {"state": state}

    def forget(self):
        """Leave nothing of a model. The answer says whether another one can have this process."""
        self.model = self.model_class = self.graph = None
        self.kept = []
        sys.modules.pop("candidate", None)
        for name in [name for name in self.registry if name.startswith("candidate:")]:
            del self.registry[name]  # Triton's list of all kernels, which would keep their modules
        gc.collect()
        self.synchronize()
        if self.cuda:
            torch._C._cuda_clearCublasWorkspaces()  # they count as allocated
            torch.cuda.empty_cache()
        return {"seconds": time.process_time() - self.began, "bytes": torch.cuda.memory_allocated() if self.cuda else 0,
                "unchanged": unchanged(self.before)}

    def watch_kernels(self):
        """Let launches of the candidate's own Triton kernels be timed and left out, and their compilation apart."""
        self.registry = getattr(jit, "_triton_jit_function_registry", {})
        launch, compile_kernel = jit.JITFunction.run, jit.JITFunction._do_compile

        def run(kernel, *args, **kwargs):
            if kernel.fn.__code__.co_filename != self.path or kwargs.get("warmup"):
                return launch(kernel, *args, **kwargs)
            name = kernel.fn.__name__
            if name in self.muted:
                return None
            if self.event_clock is not None:
                return self.event_clock.around(name, True, lambda: launch(kernel, *args, **kwargs))
            return launch(kernel, *args, **kwargs)

        def compile_apart(*args, **kwargs):
            """In a check: compiling takes up to a second, in which the client leaves the GPU to others."""
            if not self.checking:
                return compile_kernel(*args, **kwargs)
            self.synchronize()
            send(self.sock, {"compiling": True})
            try:
                kernel = compile_kernel(*args, **kwargs)
                getattr(kernel, "run", None)  # loads it, and has a C compiler build what launches it
                return kernel
            finally:
                send(self.sock, {})
                receive(self.sock)  # the GPU may be used again

        jit.JITFunction.run, jit.JITFunction._do_compile = run, compile_apart

    # Inputs and outputs

    def share(self, handles, places, count, slots, values):
        """Open the memory that is shared, and what is written to clear the cache. See slots_and_outputs.

        handles: to these two, or None; values: [[is it a tensor, else its value]] of a set of inputs.
        """
        if handles is not None:
            self.memory, self.cold = map(attach, handles)
        else:
            self.memory = None
            self.cold = torch.empty(BLANK if self.cuda else 1, dtype=torch.uint8, device=self.device)
        self.layout = places, count, slots, values
        self.tensors, self.outputs = [None] * slots, None
        self.allocate()
        return {}

    def allocate(self):
        """New objects for the inputs: a model may have changed the shape of a tensor, or the items of a list."""
        if self.layout is not None:
            *layout, values = self.layout
            self.values = copy.deepcopy(values)
            if self.memory is not None:
                self.tensors, self.outputs = slots_and_outputs(self.memory, *layout)

    def put(self, slot, tensors):
        """Take a set of inputs over the socket: there is no shared memory."""
        self.tensors[slot] = [tensor.to(self.device) for tensor in tensors]
        return {}

    def inputs(self, slot):
        """The arguments of a call: tensors of a slot, and values."""
        waiting = iter(self.tensors[slot])
        return [next(waiting) if tensor else value for tensor, value in self.values]

    def hand_over(self, out):
        """Describe an output and put its tensors where the scorer finds them."""
        leaves, answer = tree_leaves(out), []
        for i, leaf in enumerate(leaves):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                answer.append({"type": type(leaf).__name__})
                continue
            entry = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type}
            if self.outputs is None:
                entry["tensor"] = leaf
            elif i < len(self.outputs) and self.outputs[i].shape == leaf.shape and self.outputs[i].dtype == leaf.dtype:
                self.outputs[i].copy_(leaf)
            answer.append(entry)
        self.synchronize()
        return {"leaves": answer, "structure": structure(out)}

    # Running the model

    def forward(self, slot, seed, mute):
        """One call that is not timed."""
        # The memory that the allocator hands out next must not hold a former result, nor zeros.
        blocks = [torch.full_like(out, float("nan")) for _ in range(2) for out in self.outputs or []
                  if out.is_floating_point()]
        del blocks
        self.muted, self.checking = set(mute), True
        torch.manual_seed(seed)
        try:
            with torch.no_grad(), Noise() if mute else torch.no_grad():
                return self.hand_over(self.model(*self.inputs(slot)))
        finally:
            self.muted, self.checking = (), False

    def capture(self, calls):
        """Record the calls as a CUDA graph, to be replayed when timed: their kernels, without the Python around."""
        try:
            spare_memory()  # a graph has a pool of its own
            stream = torch.cuda.ExternalStream(PER_THREAD)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(stream):
                self.model(*self.inputs(calls[0]))  # libraries set themselves up for the stream
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
                self.kept = [self.model(*self.inputs(slot)) for slot in calls]
            self.graph = graph
            spare_memory()
        except Exception:  # it waits for the GPU, or uses a stream of its own
            self.kept = []
        return {"captured": self.graph is not None}

    def get_ready(self, calls, seed, repeat):
        """For timing: drop former results, take the GPU over and clear its cache. Timed is `run_timed`."""
        if self.graph is None:
            self.kept = []
        self.next = calls, repeat
        torch.manual_seed(seed)
        return {"clearing": overwrite(self.cold)}

    def run_timed(self):
        """Wait for the starting signal, run, signal the end. The client's clock runs between the two."""
        watch(self.sock, 0.1)  # awake: waking up would take as long as a kernel
        self.sock.recv(1)
        answer = self.obey("go", {})
        self.sock.send(b"!")
        send(self.sock, answer)

    def go(self):
        """Run the calls, keep their results, end when the GPU is done."""
        calls, repeat = self.next
        if self.graph is not None:
            torch.cuda._sleep(PAUSE)
            for _ in range(repeat):
                self.graph.replay()
        else:
            with torch.no_grad():
                self.kept = [self.model(*self.inputs(slot)) for slot in calls]
        self.synchronize()
        return {}

    def collect(self, call):
        """Hand over what a timed call gave."""
        return self.hand_over(self.kept[call])

    def profile(self):
        """[[milliseconds, label, own]] of one forward on the GPU alone: launches are queued behind a pause.

        The first time there is none: that is for finding out how long queueing takes.
        """
        if not self.cuda:
            return {"events": []}
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        clock = self.event_clock = EventClock()
        try:
            with torch.no_grad():
                began = time.perf_counter()
                pause = min(2 * self.queueing, 0.05)  # seconds; queueing took half of that the last time
                torch.cuda._sleep(int(2e9 * pause) + 1)  # clock cycles
                begin.record()
                clock.around("nothing", False, lambda: None)  # what a pair of events costs
                with clock:
                    self.model(*self.inputs(0))
                end.record()
                self.queueing = time.perf_counter() - began
                self.synchronize()
        finally:
            self.event_clock = None
        (a, b, _, _), *marks = clock.marks
        pair = a.elapsed_time(b)
        events = [[max(a.elapsed_time(b) - pair, 1e-4), label, own] for a, b, label, own in marks]
        return {"events": events, "total": begin.elapsed_time(end) - 2 * pair * (len(marks) + 1)}
