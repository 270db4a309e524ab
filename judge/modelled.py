"""The modelled clock: what a forward would cost on a GPU, worked out on a machine that has none.

A candidate is never timed. Its own process only *records* one forward (recorder.py): a straight-line list of ATen
operators and Triton launches. A second process, which holds no line of the candidate's host code, *replays* that
recording on inputs that the candidate has never seen (`Replay`), interprets the Triton kernels in numpy
(interpreter.py) and prices every step (prices.py). So whatever the candidate's Python did (cache, patch, thread, read
a clock, look for the reference), only the recorded steps can produce the output that is compared, and exactly their
work is charged. Nothing of a recording is believed: a forged one is replayed and priced like any other, once the scorer
has found that it calls no operators except those whose work is known, and those of the reference (prices.refusal).

Modelled
    ATen operators     the kernels that CUDA really launches for them: views are free; a convolution's bias is a second
                       pass; batch and group norm read once for the statistics and once more to normalise; everything
                       else is one kernel that reads its inputs and writes its outputs. Many of PyTorch's kernels take
                       longer than that, by factors that were measured (prices.py).
    Triton kernels     the 32-byte sectors that are really loaded and stored, element by element (masked ones are free),
                       as a cache of the card's (scaled) L2 size would fetch them: a broadcast parameter costs once, a
                       second sweep over a tensor only if the tensor has left the cache. FLOPs: what the card takes for
                       each element of an operation, 15 for an exp, 30 for an integer division; 2MNK for tl.dot, at a
                       rate that depends on its input precision, on which dimension of its right operand has its
                       neighbours in memory, and on whether rows are whole multiples of 16 elements. Requests: what
                       loads and stores take of the L1 caches' rate, found there or not. Programs: to start and end one
                       takes the card 0.6 ns, so that one for every short row is slow; and one alone has a fourth of the
                       machine at most. Atomics on one address follow one another.
Not modelled: occupancy, latency, bank conflicts, the tail of a grid that is too small for the card, small tiles of
tl.dot, the L2 cache's rate, the host, several streams.
Kernels that are slow for these reasons look better here than they are; those that divide by a constant, which the
compiler turns into a multiplication, look worse. results/README.md compares modelled with measured times.

Replaying is about as strict as a GPU: every kernel must first compile for one, an access outside every tensor is an
error, and memory from `torch.empty` is poisoned. Not looked for: races between the programs of a launch, and hints to
the compiler that are not true.
"""

import hashlib
import math
import os

import torch
from torch.utils._pytree import tree_map_only

from judge import compiler, interpreter
from judge.compiler import KernelError
from judge.lockstep import unwrap
from judge.memory import Memory
from judge.prices import UNWRITTEN, Clock, launch_milliseconds, milliseconds, tensors_in
from judge.messages import TORCH_NAMES, layouts_in, strided
from judge.perturbation import address, written_by
from judge.recorder import launches_of, read_value


def stand_in(layout):
    """A tensor without memory of a recorded one's type and alignment."""
    dtype = TORCH_NAMES[layout[1]]
    return torch.empty(16, dtype=dtype, device="meta")[layout[4] * dtype.itemsize % 16 // dtype.itemsize:]


def those_that_work(launches, work) -> dict:
    """{position of a launch: what work(launch) returns} of all that raise nothing. Raises what the last one does."""
    found, last = {}, None
    for position, launch in enumerate(launches):
        try:
            found[position] = work(launch)
        except (KernelError, RuntimeError, ValueError) as error:
            last = error
    if not found:
        raise last
    return found


class Recording:
    """A recorded forward with its kernels. Raises KernelError, or another exception for a step that fails.

    code: the candidate's source, of which only the kernels are used. `compiled` holds the keys of those that were
    compiled here.
    """

    compile_launch = staticmethod(compiler.compile_kernel)
    device, poisons = torch.device("cpu"), True  # where it runs; does memory that was never written hold poison?

    def __init__(self, code, recording):
        self.recording, self.compiled = recording, set()
        names = {name: read_value(value, None) for name, value in recording["names"].items()}
        self.kernels, self.text = compiler.build(code, names)
        self.functions = self.kernels  # as arguments of other kernels

    def compile_all(self, known):
        """{number of a step: positions of its launches that compile}: of several, a GPU may refuse all but one."""
        working = {}
        for number, step in enumerate(self.recording["steps"]):
            if launches := launches_of(step):
                working[number] = list(those_that_work(launches, lambda launch: self.compile(launch, known)))
        return working

    def compile(self, step, known):
        """Compile a launch's kernel for a GPU, unless that was done before with arguments of the same kind."""
        _, name, _, arguments, options = step
        given = self.arguments(step, stand_in)
        kinds = [(key, value["tensor"][1] if isinstance(value, dict) and "tensor" in value else value)
                 for key, value in arguments.items()]
        key = hashlib.sha256(repr((name, self.text, kinds, options)).encode()).hexdigest()
        if key not in known and key not in self.compiled:
            options = {option: read_value(value, None) for option, value in options.items()}
            self.compile_launch(self.kernels[name], given, options)
            self.compiled.add(key)

    def arguments(self, step, tensor):
        """{parameter: value} of a recorded launch; `tensor` makes a tensor of a layout."""
        if step[1] not in self.kernels:
            raise KernelError(f"{step[1]} is not a @triton.jit function at the top level of the file")
        arguments = {key: read_value(value, tensor, self.functions) for key, value in step[3].items()}
        if missing := sorted(set(self.kernels[step[1]].arg_names) - set(arguments)):
            raise KernelError(f"{step[1]} is launched without its argument {missing[0]}", stage="launch")
        return arguments

    def tensor(self, layout):
        """The tensor that has this layout. Raises ValueError if it does not fit its storage."""
        number, dtype, shape, strides, offset = layout
        raw = self.storages[number]
        if not isinstance(raw, torch.Tensor):  # else an input, in memory that holds others, too
            raw = torch.empty(0, dtype=torch.uint8, device=self.device).set_(raw)
        return strided(raw[offset * TORCH_NAMES[dtype].itemsize:], TORCH_NAMES[dtype], shape, strides)

    def operator(self, step, clock):
        """Call an ATen operator within `clock`. Returns the addresses of the storages that it writes."""
        _, name, args, kwargs, layouts = step
        base, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, base), overload)
        args, kwargs = read_value(args, self.tensor), read_value(kwargs, self.tensor)
        args, kwargs = tree_map_only(torch.device, lambda device: self.device, (args, kwargs))
        if func._schema.is_mutable and not func._schema.returns:  # what it writes would not be among its results
            raise RuntimeError(f"aten.{base} in place is not supported here")
        with clock:
            out = func(*args, **kwargs)
        results = tensors_in(out)
        for layout, tensor in zip(layouts, results, strict=True):
            if layout[0] not in self.storages:
                if list(tensor.shape) != layout[2] or list(tensor.stride()) != layout[3]:
                    raise RuntimeError(f"aten.{base} gives another shape than it did while recording")
                self.storages[layout[0]] = tensor.untyped_storage()
        if base in UNWRITTEN and self.poisons:
            self.poison(results)
        return set(map(address, tensors_in([results, written_by(func, args, kwargs)])))

    def poison(self, tensors):
        """What uninitialised memory holds: NaN, or -1. Finite noise while kernels are muted. None of it can pass for a
        result.
        """
        for tensor in tensors:
            if not self.mute:
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage()).fill_(255)
            else:  # not normal_(): drawn from the same seed as an input, it could be the input
                tensor.exponential_() if tensor.is_floating_point() else tensor.zero_()


class Replay(Recording):
    """Executes a recording on given inputs.

    known: keys of kernels that need not be compiled again; restored: names of what each forward of the reference
    changes in its own state.
    """

    def __init__(self, code, recording, constants, known=(), restored=()):
        os.environ["DISABLE_LLVM_OPT"] = "1"  # in this process kernels only need to compile, nothing runs them
        super().__init__(code, recording)
        self.constants = {int(number): data for number, data in constants.items()}
        self.restored, self.left = restored, {}  # the latter: constants as the last forward has left them
        # chosen: number of a tuned step -> position of the launch that is cheapest
        self.working, self.chosen = self.compile_all(known), {}
        self.interpreter = interpreter.Interpreter(self.kernels)
        self.functions = self.interpreter.functions  # the interpreted ones, as arguments of other kernels

    def run(self, inputs, seed, price=False, mute=(), parameters=()):
        """One forward. Returns (output tree, events).

        inputs: tensors in the order of the recording. With `price`, events are [milliseconds, label, own kernel?].
        Kernels named in `mute` are skipped, and memory starts as finite noise: an output that is still right never
        needed them. parameters: the numbers of the constants that are priced as such.

        What a forward leaves in constants is there in the next one, as it is on a GPU: an accumulator that is not set
        back, a flag that says `done`, a parameter changed in place. (Not when kernels are muted, nor for `restored`.)
        """
        self.mute, events = mute, []
        self.allocate(inputs)
        self.parameters = {self.storages[int(number)].data_ptr() for number in parameters}
        torch.manual_seed(seed)
        with torch.no_grad():
            for number, step in enumerate(self.recording["steps"]):
                if mute and launches_of(step) and launches_of(step)[0][1] in mute:
                    continue
                step = step[1][self.tune(number, step[1])] if step[0] == "tuned" else step
                clock, writes = Clock(self.parameters), set()
                if step[0] == "operator":
                    writes = self.operator(step, clock if price else torch.no_grad())
                elif step[0] == "launch":
                    writes = self.launch(step, clock, price)
                else:
                    clock.events.append([milliseconds(0), "upload", False])
                self.parameters -= writes  # what is written may be as large as the batch
                events += clock.events
            output = read_value(self.recording["output"], self.tensor)
        return output, events

    def allocate(self, inputs):
        """The storages that exist before the first step."""
        state, left = self.recording["state"], {} if self.mute else self.left
        restored = {state[name][0] for name in self.restored if name in state}
        for number, data in self.constants.items():
            if number in restored or number not in left:
                left[number] = data.clone().untyped_storage()
        self.storages = dict(left)
        for layout, tensor in zip(self.recording["inputs"], inputs, strict=True):
            if [str(tensor.dtype), list(tensor.shape), list(tensor.stride())] != layout[1:4]:
                raise RuntimeError("the shapes of the inputs change from one call to the next")
            self.storages[layout[0]] = tensor.untyped_storage()

    def tune(self, number, launches):
        """The position of an autotuned kernel's cheapest configuration. Trying them leaves memory as it was."""
        if number not in self.chosen:
            prices = {}
            for position in self.working[number]:
                storages = [self.storages[layout[0]] for layout in layouts_in(list(launches[position][3].values()))]
                kept = [(storage, storage.clone()) for storage in storages]
                memory = self.interpret(launches[position], True)
                prices[position] = launch_milliseconds(memory, math.prod(launches[position][2]))
                for storage, before in kept:
                    storage.copy_(before)
            self.chosen[number] = min(prices, key=prices.get)
        return self.chosen[number]

    def interpret(self, step, price):
        """Interpret a Triton launch. Returns its Memory, which says what it cost."""
        _, name, grid, _, options = step
        arguments = self.arguments(step, self.tensor)
        options = {key: unwrap(read_value(value, None)) for key, value in options.items()}
        memory = Memory(self.storages.values(), price, self.parameters, options.get("num_warps", 4))
        self.interpreter.launch(name, grid, arguments, memory, options)
        return memory

    def launch(self, step, clock, price):
        """A Triton launch. Returns the addresses of the storages that it writes."""
        memory = self.interpret(step, price)
        if price:
            clock.events.append([launch_milliseconds(memory, math.prod(step[2])), step[1], True])
        return memory.written
