"""The process that runs a model under the measured clock: a candidate's, which is not trusted, or the reference's.

It serves the orders of client.py over a socket. Inputs and outputs lie in GPU memory that both can see.
"""

import copy
import gc
import re
import sys
import time

import torch
from torch.utils._pytree import tree_leaves

from judge.correctness import perturb_state
from judge.modelled import FREE, Mode
from judge.processes import ALIGN, BLANK, attach, overwrite, receive, send, spare_memory, views, watch
from judge.side_effects import state, unchanged

PER_THREAD = 2  # CUDA's name of a thread's own default stream, which can be captured (see processes.start)
PAUSE = 100_000  # clock cycles, 50 microseconds, of which the GPU is given the first graph; part of Lane.overhead


class EventClock(Mode):
    """While active, brackets every ATen call and every launch of an own kernel with CUDA events."""

    def __init__(self):
        super().__init__()
        self.marks, self.depth = [], 0

    def around(self, label, own, call):
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
        if self.depth or func.is_view or name in FREE:
            return func(*args, **(kwargs or {}))
        return self.around(name, False, lambda: func(*args, **(kwargs or {})))


class Noise(Mode):
    """While active, uninitialised memory holds finite noise, so that an earlier result found there is no result."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name:
            out.exponential_() if out.is_floating_point() else out.zero_()  # normal noise might be the input itself
        return out


class Host:
    """Serves the scorer's orders. Every method named like an order takes its fields and returns the answer."""

    def __init__(self, settings, sock, folder, load_module, describe):
        self.sock, self.polite = sock, False
        self.device = torch.device(settings["device"])
        self.cuda = self.device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.cuda else (lambda: None)
        self.load_module, self.describe = load_module, describe
        self.folder, self.path, self.code, self.loaded = folder, "", "", 0
        self.stage, self.muted, self.clock = "compile", (), None
        self.kept, self.graph, self.shared = [], None, None
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.init()
        self.watch_kernels()
        self.before = state()

    def wake(self):
        return {}

    def load(self, code, name, limit):
        """Execute the source."""
        if limit is not None:  # bytes of GPU memory
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self.device)
        self.stage, self.code, self.loaded, self.queueing = "compile", code, self.loaded + 1, 0.0
        self.path = str(self.folder / f"candidate{self.loaded}.py")  # Python caches the lines of files by their names
        self.model_class = getattr(self.load_module("candidate", code, self.path), name, None)
        if not isinstance(self.model_class, type):
            raise NameError(f"the code defines no class {name}")
        return {}

    def forget(self):
        """Leave nothing of a model; the answer says whether another one can have this process."""
        self.model = self.model_class = self.arguments = self.graph = None
        self.kept = []
        sys.modules.pop("candidate", None)
        for name in [name for name in self.registry if name.startswith("candidate:")]:
            del self.registry[name]  # Triton's list of all kernels, which would keep their modules
        gc.collect()
        self.synchronize()
        if self.cuda:
            torch._C._cuda_clearCublasWorkspaces()  # they count as allocated
            torch.cuda.empty_cache()
        return {"seconds": time.process_time(), "bytes": torch.cuda.memory_allocated() if self.cuda else 0,
                "unchanged": unchanged(self.before)}

    def build(self, arguments, seed, on_device, compile_it):
        """Construct the model as the reference was: same seed, same device, same order."""
        self.on_device, self.seed = on_device, seed
        self.arguments = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in arguments]
        self.stage = "build"
        self.lay_out()
        self.model = self.construct()
        self.stage = "forward"
        state = {key: list(t.shape) for key, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        loose = sum(isinstance(value, torch.Tensor) for part in self.model.modules() for value in vars(part).values())
        if compile_it:
            self.model = torch.compile(self.model)
        return {"state": state, "loose": loose}

    def construct(self):
        torch.manual_seed(self.seed)
        if self.on_device:
            with self.device:
                return self.model_class(*self.arguments).to(self.device)
        return self.model_class(*self.arguments).to(self.device)

    def watch_kernels(self):
        """Let launches of the candidate's own Triton kernels be timed and left out, and their compilation apart."""
        try:
            from triton.runtime import jit
        except ImportError:
            self.registry = {}
            return
        self.registry = getattr(jit, "_triton_jit_function_registry", {})
        launch, compile_kernel = jit.JITFunction.run, jit.JITFunction._do_compile

        def run(kernel, *args, **kwargs):
            if kernel.fn.__code__.co_filename != self.path or kwargs.get("warmup"):
                return launch(kernel, *args, **kwargs)
            name = kernel.fn.__name__
            if name in self.muted:
                return None
            if self.clock is not None:
                return self.clock.around(name, True, lambda: launch(kernel, *args, **kwargs))
            return launch(kernel, *args, **kwargs)

        def compile_apart(*args, **kwargs):
            """Compiling takes up to a second, in which the scorer may give the GPU to others."""
            if not self.polite:
                return compile_kernel(*args, **kwargs)
            self.synchronize()
            send(self.sock, {"compiling": True})
            try:
                kernel = compile_kernel(*args, **kwargs)
                getattr(kernel, "run", None)  # loads it, and has a C compiler build what launches it
                return kernel
            finally:
                send(self.sock, {})
                receive(self.sock)

        jit.JITFunction.run, jit.JITFunction._do_compile = run, compile_apart

    def share(self, handles, inputs, outputs, slots, values):
        """Open the arenas: `slots` copies of the inputs, one of the outputs, and what is written to clear the cache.

        values: the inputs that are no tensors.
        """
        self.tensors, self.outputs, self.shared = [None] * slots, None, (None, values)
        if handles is None:
            self.cold = torch.empty(BLANK if self.cuda else 1, dtype=torch.uint8, device=self.device)
        else:
            raw_in, raw_out, self.cold = map(attach, handles)
            size = raw_in.numel() // slots // ALIGN * ALIGN
            self.shared = [(raw_in[i * size:(i + 1) * size], inputs) for i in range(slots)], values
            self.outputs = views(raw_out, outputs)
        self.lay_out()
        return {}

    def lay_out(self):
        """New objects for the inputs: a model may have changed the shape of a tensor, or the items of a list."""
        if self.shared is not None:
            places, values = self.shared
            self.values = copy.deepcopy(values)
            if places is not None:
                self.tensors = [views(*place) for place in places]

    def put(self, slot, tensors):
        self.tensors[slot] = [tensor.to(self.device) for tensor in tensors]
        return {}

    def inputs(self, slot):
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
        return {"leaves": answer}

    def forward(self, slot, seed, perturb, mute, polite):
        """One checked call; with `perturb` of a new model, whose parameters are moved as the reference's were."""
        model = self.model
        if perturb:
            model = self.construct()
            state = dict([*model.named_parameters(), *model.named_buffers()])
            with torch.no_grad():
                for name, value in perturb_state(state, seed).items():
                    state[name].copy_(value)
        blocks = [torch.full_like(out, float("nan")) for _ in range(2) for out in self.outputs or []
                  if out.is_floating_point()]
        del blocks  # so that the memory which the allocator hands out next is not a former result, nor zero
        self.muted, self.polite = set(mute), polite
        torch.manual_seed(seed)
        try:
            with torch.no_grad(), Noise() if mute else torch.no_grad():
                return self.hand_over(model(*self.inputs(slot)))
        finally:
            self.muted, self.polite = (), False

    def capture(self, calls):
        """Turn the calls into one CUDA graph, which `go` replays from now on: the same kernels, without the host."""
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
        except Exception:  # it waits for the GPU, or uses a stream of its own: the host is restarted and times it as is
            self.kept = []
        return {"captured": self.graph is not None}

    def go(self, calls, repeat):
        """What is timed: run the calls, keep their results, end when the GPU is done."""
        if self.graph is not None:
            torch.cuda._sleep(PAUSE)
            for _ in range(repeat):
                self.graph.replay()
        else:
            with torch.no_grad():
                self.kept += [self.model(*self.inputs(slot)) for slot in calls]
        self.synchronize()
        return {}

    def collect(self, call):
        return self.hand_over(self.kept[call])

    def drop(self):
        if self.graph is None:
            self.kept.clear()
        return {}

    def profile(self):
        """[[milliseconds, label, own]] of one forward on the GPU alone: launches are queued behind a pause.

        The first time there is none: that is for finding out how long queueing takes.
        """
        if not self.cuda:
            return {"events": []}
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.clock = EventClock()
        try:
            with torch.no_grad():
                began = time.perf_counter()
                pause = min(2 * self.queueing, 0.05)  # seconds; queueing took half of that the last time
                torch.cuda._sleep(int(2e9 * pause) + 1)  # clock cycles
                begin.record()
                self.clock.around("nothing", False, lambda: None)  # what a pair of events costs
                with self.clock:
                    self.model(*self.inputs(0))
                end.record()
                self.queueing = time.perf_counter() - began
                self.synchronize()
        finally:
            clock, self.clock = self.clock, None
        (a, b, _, _), *marks = clock.marks
        pair = a.elapsed_time(b)
        events = [[max(a.elapsed_time(b) - pair, 1e-4), label, own] for a, b, label, own in marks]
        return {"events": events, "total": begin.elapsed_time(end) - 2 * pair * (len(marks) + 1)}

    def serve(self):
        sock = self.sock
        while True:
            order = receive(sock)
            name = order.pop("order")
            if name == "tell":
                send(sock, {})
                self.be_timed(**order)
            else:
                send(sock, self.obey(name, order))

    def be_timed(self, calls, seed, repeat, call):
        """Wait for the signal to get ready, and for the one to begin: the clock runs from it to the signal at the end.
        """
        torch.manual_seed(seed)
        if self.sock.recv(1) != b"!":  # it is called off
            return
        clearing = overwrite(self.cold)
        self.sock.send(b"!")
        watch(self.sock, 0.1)  # awake: waking up would take as long as a kernel
        self.sock.recv(1)
        answer = self.obey("go", {"calls": calls, "repeat": repeat})
        self.sock.send(b"!")
        if call is not None and not answer:
            answer = self.obey("collect", {"call": call})
        send(self.sock, {**answer, "clearing": clearing})

    def obey(self, name, order):
        try:
            return getattr(self, name)(**order)
        except BaseException as error:  # SystemExit included: the verdict says what happened
            text, line = self.describe(error, self.path, self.code)
            if "nvmlInit" in text:  # PyTorch stumbles over its own report of what happened
                text = "OutOfMemoryError: more GPU memory than a candidate may take"
            refused = re.search("Compilation|OutOfResources|PTXAS|Unsupported", type(error).__name__)
            return {"failed": "compile" if refused else self.stage, "error": text, "line": line}
