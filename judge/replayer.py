"""The process on the GPU: it runs recorded programs and the reference, for checks and against the clock.

A scorer has one of them, through measured.py, and keeps it from candidate to candidate and from task to task. It holds
the reference's model and inputs, but no expected output of any check, and no line of a candidate's Python: of a
candidate it gets the recorded program (recorder.py) and the text of the kernels, which compiler.py has checked. So
within one process nothing has to be hidden from a candidate but memory, and both sides are timed by the same clock.

    Program      a recorded forward on the device: steps in order, compiled kernels, poisoned memory
    Model        a model that is called as it is: the reference; in a process of its own a CUDA extension
    Replayer     serves orders: every method named like one takes its fields and returns the answer, a dict

A CUDA extension (load_inline) cannot be recorded: it is native code that launches kernels as it likes. Its candidate
runs in such a process of its own, with nothing of the reference's, and is timed by the scorer's clock from outside.
"""

import contextlib
import functools
import time

import torch
import triton
from torch.utils._pytree import tree_leaves, tree_map_only

from judge import compiler
from judge.correctness import LARGE, identical, load_module, structure
from judge.messages import BLANK, dense, export, layouts_in, receive, send, slots_and_outputs, spare_memory
from judge.modelled import Recording, those_that_work
from judge.perturbation import construct, state_of
from judge.prices import FREE_OPERATORS, Mode, tensors_in
from judge.recorder import identity, launches_of, read_value
from judge.verdict import failure

PAUSE = 300_000  # clock cycles, 150 microseconds, that the GPU waits while graphs are being launched
LONG_PAUSE = 50 * PAUSE  # while operators are being called one by one
PER_THREAD = 2  # CUDA's name of a thread's own default stream, which can be captured (see processes.start)
SMALLEST = 32 << 20  # bytes; from this size on PyTorch gives a tensor a cudaMalloc of its own, which is what IPC shares
TUNING = 5  # launches of each configuration of an autotuned kernel


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


def storages_in(step) -> set:
    """Numbers of the storages that a step of a program uses."""
    arguments = [list(launch[3].values()) for launch in launches_of(step)]
    layouts = [*layouts_in(step[2:4]), *step[4]] if step[0] == "operator" else layouts_in(arguments)
    return {layout[0] for layout in layouts}


class Program(Recording):
    """A recorded forward, on the device that the inputs are on.

    constants: {storage number: bytes, or the size of memory that was never written, or the name of a parameter of the
    reference}; state: the reference's {name: tensor}.
    """

    def __init__(self, code, recording, constants, state, device):
        super().__init__(code, recording)
        self.device, self.mute, self.clock = device, (), None
        self.names = [layout[0] for layout in recording["state"].values()]
        self.original = {number: self.constant(value, state) for number, value in constants.items()}
        self.constants = {number: data.clone() for number, data in self.original.items()}
        self.untried = any(step[0] == "tuned" for step in recording["steps"])
        # number of a tuned step -> the launch that was quickest; number of a step -> storages that no later one uses
        self.chosen, self.last_uses = {}, {}
        kept = {*constants, *(layout[0] for layout in [*recording["inputs"], *layouts_in(recording["output"])])}
        for number, step in reversed([*enumerate(recording["steps"])]):
            self.last_uses[number] = storages_in(step) - kept
            kept |= self.last_uses[number]

    def constant(self, value, state):
        if isinstance(value, int):
            return torch.full((value,), 255, dtype=torch.uint8, device=self.device)  # NaN, or -1
        return (dense(state[value].contiguous()) if isinstance(value, str) else value).to(self.device)

    def restore(self, everything=False):
        """Set the model's parameters and buffers back. Other memory keeps what a forward left in it, as on any GPU."""
        for number, data in self.constants.items():
            if everything or number in self.names:
                data.copy_(self.original[number])

    def forward(self, inputs):
        """The output tree of one forward, without the kernels in self.mute."""
        self.storages = {number: data.untyped_storage() for number, data in self.constants.items()}
        for layout, tensor in zip(self.recording["inputs"], inputs, strict=True):
            self.storages[layout[0]] = tensor.untyped_storage() if self.device.type == "cpu" else dense(tensor)
        for number, step in enumerate(self.recording["steps"]):
            if step[0] == "operator":
                self.operator(step, contextlib.nullcontext())
            elif step[0] == "tuned" and step[1][0][1] not in self.mute:
                self.launch(self.chosen.get(number) or self.tune(number, step[1]))
            elif step[0] == "launch" and step[1] not in self.mute:
                self.launch(step)
            for storage in self.last_uses[number]:
                self.storages.pop(storage, None)
        return read_value(self.recording["output"], self.tensor)

    def launch(self, step):
        _, name, grid, _, options = step
        arguments = self.arguments(step, self.tensor)
        options = {key: read_value(value, None) for key, value in options.items()}
        launch = functools.partial(self.run_kernel, name, grid, arguments, options)
        return launch() if self.clock is None else self.clock.around(name, True, launch)

    def run_kernel(self, name, grid, arguments, options):
        self.kernels[name][tuple(grid)](**arguments, **options)

    def tune(self, number, launches):
        """The quickest of an autotuned kernel's recorded configurations. What it computes meanwhile is not used."""
        clock = Stopwatch(self.device.type == "cuda")

        def seconds(step):
            self.launch(step)
            clock.start()
            for _ in range(TUNING):
                self.launch(step)
            return clock.stop()

        times = those_that_work(launches, seconds)
        self.chosen[number] = launches[min(times, key=times.get)]
        return self.chosen[number]


class Stopwatch:
    """Seconds between start() and stop(), which waits for the GPU: on its own clock, or without one on the host's."""

    def __init__(self, cuda):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else None

    def start(self, pause=PAUSE):
        self.began = time.perf_counter()
        if self.events:
            torch.cuda._sleep(pause)  # until what is timed has been launched
            self.events[0].record()

    def stop(self) -> float:
        if not self.events:
            return time.perf_counter() - self.began
        self.events[1].record()
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3


class Model:
    """A model that is called as it is."""

    mute, clock, untried = (), None, False

    def __init__(self, model, compile_it=False):
        self.model, self.call = model, torch.compile(model) if compile_it else model
        self.state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state_of(self.model)}

    def forward(self, inputs):
        return self.call(*inputs)

    def restore(self, everything=False):
        for name, tensor in state_of(self.model):
            tensor.detach().copy_(self.state[name])


# ---------------------------------------------------------------------------------------------------------------------
# The process


class Replayer:
    """Serves orders over a socket. Sides are "reference" and "candidate"; `slots` are sets of inputs in memory that the
    scorer sees as well, and writes; what a call gives it finds there, too.
    """

    def __init__(self, settings, sock, folder):
        self.sock, self.folder, self.device = sock, folder, torch.device(settings["device"])
        self.cuda = self.device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.cuda else (lambda: None)
        self.stage, self.path, self.sides = "build", "", {}
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.init()
            self.cold = torch.zeros(BLANK, dtype=torch.uint8, device=self.device)
            triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.uint8, device=self.device))

    def serve(self):
        """Answer orders until the scorer hangs up, or the GPU refuses this process all work."""
        answer = {}
        while not answer.get("broken"):
            order = receive(self.sock)
            try:
                with torch.no_grad():
                    answer = getattr(self, order.pop("order"))(**order)
            except BaseException as error:  # SystemExit included: an extension's Python runs here
                answer = {**failure(error, self.stage, self.path), "broken": self.is_broken()}
            send(self.sock, answer)

    def is_broken(self) -> bool:
        """After an illegal access CUDA refuses all further work of a process."""
        try:
            self.synchronize()
            return False
        except RuntimeError:
            return True

    # Models, programs and memory

    def construct(self, side, code, name, arguments, names, seed, compile_it):
        """Execute a source, and construct a model as judge.correctness.Reference does."""
        self.sides, self.graphs, self.kept = {}, {}, {}
        self.stage, self.path = "compile", str(self.folder / f"{side}.py")
        model_class = getattr(load_module(side, code, self.path), name)
        self.stage = "build"
        model = construct(model_class, arguments, seed, names).to(self.device)
        self.take(side, Model(model, compile_it))
        return {"state": {key: list(tensor.shape) for key, tensor in state_of(model)}}

    def load(self, code, program, constants):
        """Take a candidate's recorded program."""
        self.path = compiler.FILE
        self.sides["reference"].restore()  # if an earlier candidate's kernels have written there
        self.take("candidate", Program(code, program, constants, self.sides["reference"].state, self.device))
        return {}

    def take(self, side, subject):
        for held in (self.graphs, self.kept, self.sides):
            held.pop(side, None)
        if self.cuda:
            spare_memory()
        self.sides[side], self.stage = subject, "forward"

    def share(self, places, size, count, slots, values):
        """Make memory for sets of inputs and one of outputs, see slots_and_outputs. The answer holds a handle to it.

        values: [[is it a tensor, else its value]] of a set of inputs.
        """
        self.graphs, self.kept, self.values = {}, {}, values
        self.slots, self.outputs, self.memory, handle = [None] * slots, None, None, None
        if self.cuda:
            spare_memory()  # what was shared before
            free, total = torch.cuda.mem_get_info()
            most = 0.9 * (torch.cuda.memory_reserved() + free)  # some is left to others
            torch.cuda.set_per_process_memory_fraction(most / total, self.device)
            self.memory = torch.empty(max(size, SMALLEST), dtype=torch.uint8, device=self.device)
            handle = export(self.memory)
        if handle is not None:
            self.slots, self.outputs = slots_and_outputs(self.memory, places, count, slots)
        return {"handle": handle}

    def put(self, slot, tensors):
        """Take a set of inputs over the socket: there is no shared memory."""
        self.slots[slot] = [tensor.to(self.device) for tensor in tensors]
        return {}

    def inputs(self, side, slot):
        """The arguments of a call of one side: a program takes tensors only."""
        waiting = iter(self.slots[slot])
        if isinstance(self.sides[side], Program):
            return list(waiting)
        return [next(waiting) if tensor else value for tensor, value in self.values]

    def hand_over(self, out):
        """Describe an output and put its tensors where the scorer finds them, who then overwrites them."""
        answer = []
        for i, leaf in enumerate(tree_leaves(out)):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                answer.append({"type": type(leaf).__name__})
                continue
            entry = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type}
            if self.outputs is None:
                entry["tensor"] = leaf.detach().clone(memory_format=torch.contiguous_format)
            elif i < len(self.outputs) and self.outputs[i].shape == leaf.shape and self.outputs[i].dtype == leaf.dtype:
                self.outputs[i].copy_(leaf)
            answer.append(entry)
        self.synchronize()
        return {"leaves": answer, "structure": structure(out)}

    # Running

    def forward(self, seed, mute):
        """One call of the candidate that is not timed, on slot 0."""
        program, inputs = self.sides["candidate"], self.inputs("candidate", 0)
        tensors = [*enumerate(tensors_in(inputs))]
        before = [x.clone() for _, x in tensors]
        program.mute, program.poisons = set(mute), True
        if program.untried:  # configurations of autotuned kernels: what is computed while they are tried is void
            program.untried = False
            program.forward(inputs)
            program.restore(everything=True)
            for (_, x), old in zip(tensors, before):
                x.copy_(old)
        program.restore(everything=bool(mute))
        torch.manual_seed(seed)
        out = program.forward(inputs)
        answer = self.hand_over(out)
        answer["changed"] = [i for (i, x), old in zip(tensors, before) if not identical(x, old)]
        for leaf in tensors_in(out):
            leaf.detach().zero_()  # so that a later kernel cannot read a correct result from freed memory
        program.restore(everything=bool(mute))
        program.mute = ()
        if self.cuda:  # the scorer computes the next trial beside this process
            before = out = leaf = None
            spare_memory(LARGE)
        return answer

    def profile(self):
        """[[milliseconds, label, own]] of one forward on the GPU alone: launches are queued behind a pause.

        The first of three runs is for finding out how long queueing takes.
        """
        if not self.cuda:
            return {"events": [], "total": 0.0}
        program, queueing, runs = self.sides["candidate"], 0.0, []
        program.poisons = False
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            clock = program.clock = EventClock()
            began = time.perf_counter()
            torch.cuda._sleep(int(2e9 * min(queueing, 0.05)) + 1)  # clock cycles, twice as long as queueing took
            begin.record()
            clock.around("nothing", False, lambda: None)  # what a pair of events costs
            with clock:
                program.forward(self.inputs("candidate", 0))
            end.record()
            queueing, program.clock = time.perf_counter() - began, None
            self.synchronize()
            (a, b, _, _), *marks = clock.marks
            pair = a.elapsed_time(b)
            events = [[max(a.elapsed_time(b) - pair, 1e-4), label, own] for a, b, label, own in marks]
            runs.append({"events": events, "total": begin.elapsed_time(end) - 2 * pair * (len(marks) + 1)})
        return min(runs[1:], key=lambda run: run["total"])

    def capture(self, side, calls):
        """Record one forward for each of the slots `calls` as a CUDA graph: kernels, without the gaps between them."""
        subject = self.sides[side]
        subject.poisons = False
        subject.restore(everything=True)
        try:
            stream = torch.cuda.ExternalStream(PER_THREAD)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                subject.forward(self.inputs(side, calls[0]))  # libraries set themselves up for the stream
            self.synchronize()
            spare_memory()  # that first call's, which no graph can use
            graphs = {}  # {slot: (graph, what it gives)}
            for slot in calls:  # each in memory of its own: some are replayed, in a random order
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = subject.forward(self.inputs(side, slot))
                graphs[slot] = graph, out
            self.graphs[side] = graphs
        except Exception:  # it waits for the GPU, or uses a stream of its own
            if self.is_broken():
                raise
        return {"captured": side in self.graphs}

    def clear_cache(self) -> float:
        """Take the GPU over from other processes; then leave nothing in its caches, neither of use nor to be written
        back. Returns the seconds of the latter: if another process computes, they are many more.
        """
        half = BLANK // 2
        self.cold[:1].zero_()
        self.synchronize()
        began = time.perf_counter()
        self.cold[:half].fill_(1)
        self.cold[half:].view(torch.int32).amax()
        self.synchronize()
        return time.perf_counter() - began

    def batch(self, sides, calls, seed, graphs):
        """Time one call on each of the slots `calls`, of one side after the other, from a cold cache.

        As graphs, or as they run. The candidate should come first: when it runs, the reference has computed nothing of
        these inputs. The answer: {"seconds": {side: of all calls}, "clearing": seconds that clearing a cache took}.
        """
        seconds, clearing = {}, 0.0
        given = set(map(identity, tensors_in([self.slots[slot] for slot in calls])))
        for side in sides:
            subject, clock = self.sides[side], Stopwatch(self.cuda)
            torch.manual_seed(seed)
            subject.poisons = False
            self.kept.pop(side, None)
            if self.cuda:
                clearing = max(clearing, self.clear_cache())
            clock.start(PAUSE if graphs else LONG_PAUSE)
            self.run_calls(side, calls, graphs)
            seconds[side] = clock.stop()
            if any(identity(x) in given for x in tensors_in([*self.kept[side].values()])):
                self.kept[side] = tree_map_only(torch.Tensor, torch.clone, self.kept[side])  # before the other side
        self.kept.pop("reference", None)  # only the candidate's outputs are collected
        return {"seconds": seconds, "clearing": clearing}

    def run_now(self, side, calls, graphs, cold=False):
        """Do the calls of a side, for a client with a clock of its own. cold: clear the cache then, for the next."""
        self.run_calls(side, calls, graphs)
        self.synchronize()
        if cold:
            self.clear_cache()
        return {}

    def run_calls(self, side, calls, graphs):
        if graphs:
            for slot in calls:
                self.graphs[side][slot][0].replay()
            self.kept[side] = {slot: out for slot, (_, out) in self.graphs[side].items()}
        else:
            self.kept[side] = {slot: self.sides[side].forward(self.inputs(side, slot)) for slot in calls}

    def collect(self, call):
        """Hand over what a timed call of the candidate gave."""
        return self.hand_over(self.kept["candidate"][call])
