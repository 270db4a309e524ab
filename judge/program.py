"""A program: what a candidate's forward does, as a list of operators and kernel launches. Both clocks run it.

The recorder writes it (recorder.py). `Program` looks at its operators once, and runs it row by row. Each tensor is a
number: inputs, parameters and constants have theirs before the first row, the results of a row get new ones. A view
is an operator like any other, so nothing else has to be known of a tensor's memory; PyTorch itself refuses a view that
does not fit.

    row          ["operator", "name.overload", args, kwargs, [[number, dtype, shape, strides] of each result]]
                 ["launch", launch]
                 ["tuned", [[rows] for each configuration of an autotuned kernel]]
    launch       {"kernel": its name, "grid": three numbers, "arguments": [[type, value]], "compiled": index}
    program      {"inputs": [numbers], "state": {name: number} of what equals the reference's, "named": {name: number}
                 of all parameters and buffers, "constants": {number: [dtype, shape, strides, offset, bytes]},
                 "returned": [numbers of constants in whose memory an output lies], "rows", "output", "fixed": were
                 values of parameters used while recording?}
    recording    {"program", "constants": {number: bytes, where they are known}, "compiled": kernels as Triton compiled
                 them, each {"code": bytes, ...}}
"""

import contextlib
import copy
import itertools
import json

import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.verdict import Failed

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # operators that write nothing
# Operators that reach memory or files outside of a program's tensors, or write to the judge's output
REFUSED = {"from_file", "set", "set_", "resize", "resize_", "resize_as", "resize_as_", "_resize_output",
           "_resize_output_", "set_data", "_print", "set_grad_enabled", "_cufft_set_plan_cache_max_size"}
MOST_JSON = 2 << 20  # bytes, about 20,000 rows; as Python's objects they are up to 50 times as large
TORCH_NAMES = {str(value): value for value in vars(torch).values()
               if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))}

MADE_OF_LISTS = {"tuple": tuple, "dict": dict, "complex": lambda parts: complex(*parts)}

# ---------------------------------------------------------------------------------------------------------------------
# Tensors in nested values


def tensors_in(tree) -> list:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copy_of(tree):
    return tree_map_only(torch.Tensor, torch.clone, tree)


def bytes_in(tree) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def address(tensor) -> int:
    """Where its storage begins."""
    return tensor.untyped_storage().data_ptr()


def kind_of(x):
    """What a program relies on: of a tensor its dtype, shape and strides, of anything else its value."""
    return [str(x.dtype), [*x.shape], [*x.stride()]] if isinstance(x, torch.Tensor) else x


def raw(tensor):
    """All bytes of a tensor's storage, as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())


# ---------------------------------------------------------------------------------------------------------------------
# As JSON and bytes


def write(value, number):
    """JSON for an argument or an output; `number` gives a tensor's number. Raises TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"value": number(value)}
    if isinstance(value, list):
        return [write(item, number) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [write(item, number) for item in value]}
    if isinstance(value, dict):
        return {"dict": [write([*item], number) for item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device) or str(value) in TORCH_NAMES:
        return {"torch": str(value)}
    raise TypeError(f"a {type(value).__name__} cannot be passed on")


def read(value, values, device=None):
    """The inverse. values: {number: tensor}; device: stands for any device that is named."""
    if isinstance(value, list):
        return [read(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "value":
        return values[content]
    if kind == "torch":
        return TORCH_NAMES.get(content, device)
    return MADE_OF_LISTS[kind](read(content, values, device))


def numbers_in(value) -> set:
    """The numbers of tensors in a value as `write` wrote it, or in rows."""
    if isinstance(value, dict):
        return {value["value"]} if "value" in value else numbers_in(list(value.values()))
    return set().union(*map(numbers_in, value)) if isinstance(value, list) else set()


def packed(recording) -> bytes:
    """A recording as one safetensors file, in which its JSON is a tensor, too. Nothing is ever unpickled."""
    def bytes_of(text):
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    codes = {f"code {i}": bytes_of(each["code"]) for i, each in enumerate(recording["compiled"])}
    tensors = codes | {str(number): value for number, value in recording["constants"].items() if len(value)}
    compiled = [each | {"code": None} for each in recording["compiled"]]
    text = json.dumps(recording | {"compiled": compiled, "constants": {}})
    return safetensors.torch.save(tensors | {"json": bytes_of(text.encode())})


def unpacked(data) -> dict:
    """The inverse. Raises Failed for what is no recording, or too long."""
    try:
        if int.from_bytes(data[:8], "little") > MOST_JSON:  # of safetensors' own JSON
            raise ValueError
        tensors = safetensors.torch.load(data)
        recording = json.loads(tensors.pop("json").numpy().tobytes()[:MOST_JSON])
        for index, each in enumerate(recording["compiled"]):
            each["code"] = tensors.pop(f"code {index}").numpy().tobytes()
        recording["constants"] = {int(number): tensor for number, tensor in tensors.items()}
        return recording
    except Exception:  # RecursionError and MemoryError are among those that a sender can cause
        raise Failed("the recording is too long, or makes no sense") from None


# ---------------------------------------------------------------------------------------------------------------------
# Before it is run


def operator_of(name):
    """PyTorch's operator of a recorded "name.overload". Raises Failed, and ValueError for any other attribute."""
    base, overload = name.split(".")
    if base in REFUSED:
        raise Failed(f"aten.{base} is not supported in a recorded forward")
    operator = getattr(getattr(torch.ops.aten, base), overload)
    if not isinstance(operator, torch._ops.OpOverload):
        raise ValueError
    return operator


def flat(rows):
    """Yields rows, and in place of an autotuned kernel's row those of its configurations."""
    for row in rows:
        yield from flat(itertools.chain(*row[1])) if row[0] == "tuned" else [row]


def launches_in(rows) -> list:
    return [row[1] for row in flat(rows) if row[0] == "launch"]


# ---------------------------------------------------------------------------------------------------------------------
# Running it


class Mode(TorchDispatchMode):
    """While active, sees each operator that PyTorch calls."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # or its first use loads all of torch.compile, for a second


class Program:
    """A recorded program on a device.

    kernels    the names of those that it launches, each once
    operators  {name: operator} of those that it calls
    kept       {number: tensor} of parameters and constants, which live from one forward to the next
    """

    def __init__(self, recording, device, launcher, room):
        """Raises Failed, before anything of it runs. room: bytes that its constants may take.

        Whatever passes may be wrong or slow: a number that no row has defined raises KeyError when it is used.
        launcher: launches compiled kernels, see judgement.Interpreted and measured.Binaries.
        """
        program = recording["program"]
        self.rows = program["rows"]
        self.operators = {row[1]: operator_of(row[1]) for row in flat(self.rows) if row[0] == "operator"}
        self.kernels = list(dict.fromkeys(launch["kernel"] for launch in launches_in(self.rows)))
        if sum(place[4] for place in program["constants"].values()) > room:
            raise Failed("its constants take much more memory than the task's tensors")
        self.inputs = program["inputs"]
        self.output = program["output"]
        self.state = program["state"]
        self.named = program["named"]
        self.returned = program["returned"]
        self.constants = {int(number): place for number, place in program["constants"].items()}
        self.contents = recording["constants"]
        self.device = torch.device(device)
        self.launcher = launcher
        self.kept, self.chosen = {}, {}  # chosen: {position of an autotuned row: its quickest configuration}
        self.last_uses = {}  # {position of a row: numbers that no later one uses}
        used = {*self.inputs, *self.state.values(), *self.constants} | numbers_in(self.output)
        for position in reversed(range(len(self.rows))):
            row = self.rows[position]
            numbers = numbers_in(row[1:]) | ({result[0] for result in row[4]} if row[0] == "operator" else set())
            self.last_uses[position] = numbers - used
            used |= numbers

    def load(self, state):
        """Set all memory that outlives a forward to what it is at first. state: the reference's {name: tensor}.

        From then on, what a forward leaves there is there in the next one: an accumulator that is not set back, a flag
        that says `done`. Memory without known values holds NaN.
        """
        values = {number: state[name] for name, number in self.state.items()}
        for number, (dtype, shape, strides, offset, size) in self.constants.items():
            content = self.contents.get(number)
            memory = torch.full((size,), 255, dtype=torch.uint8) if content is None else content
            values[number] = memory.view(TORCH_NAMES[dtype]).as_strided(shape, strides, offset)
        for number, value in values.items():
            if number in self.kept:
                raw(self.kept[number]).copy_(raw(value))  # in place: CUDA graphs know the address
            else:
                self.kept[number] = laid_out(raw(value).to(self.device, copy=True), value)

    def current_state(self) -> dict:
        """{name: tensor} of its parameters and buffers, as they are now."""
        return {name: self.kept[number] for name, number in self.named.items() if number in self.kept}

    def run(self, inputs, mute=(), poison=None, observer=None):
        """One forward's output. Raises Failed, and what PyTorch's operators raise.

        inputs: tensors in the order of the recording, with its strides. mute: names of kernels that are left out.
        poison: fills memory that no row has written. "nan": bytes of 255. "random": random bytes. "noise": finite
        values, where kernels are left out. None leaves it as it is.
        observer: a Mode, whose `launch` does each launch; see prices.Operators.
        """
        values = self.kept | dict(zip(self.inputs, inputs, strict=True))
        # Each forward gets its own tensor objects in the same memory. So a row that changes a shape or strides in place
        # does not affect later calls.
        values = {number: laid_out(raw(tensor), tensor) for number, tensor in values.items()}
        for number in self.returned:  # new memory in each forward: what an earlier one has left there does not count
            values[number] = laid_out(torch.empty_like(raw(values[number])), values[number])
            fill(values[number], poison)
        for position, row in enumerate(self.rows):
            if row[0] == "tuned" and position not in self.chosen:
                self.chosen[position] = self.quickest(row[1], values)
            for each in self.chosen.get(position, [row]):
                self.step(each, values, mute, poison, observer)
            for number in self.last_uses[position]:
                values.pop(number, None)
        return read(self.output, values)

    def step(self, row, values, mute=(), poison=None, observer=None):
        """Run one row: an operator, or a launch unless its kernel is left out."""
        if row[0] == "operator":
            self.operator(row, values, poison, observer)
            return
        launch = row[1]
        if launch["kernel"] in mute:
            return
        arguments = [(kind, read(value, values)) for kind, value in launch["arguments"]]
        if observer is None:
            self.launcher.launch(launch, arguments)
        else:
            observer.launch(launch["kernel"], lambda: self.launcher.launch(launch, arguments))

    def operator(self, row, values, poison, observer):
        _, name, args, kwargs, results = row
        func = self.operators[name]
        name = name.split(".")[0]
        args, kwargs = read(args, values, self.device), read(kwargs, values, self.device)
        with observer or contextlib.nullcontext():
            out = func(*args, **kwargs)
        given = set(map(address, tensors_in([args, kwargs])))
        for (number, *kind), tensor in zip(results, tensors_in(out), strict=True):
            is_new = address(tensor) not in given  # no view, nothing that was changed in place
            values[number] = as_recorded(tensor, kind, name) if is_new else tensor
            if name in UNWRITTEN:
                fill(values[number], poison)

    def quickest(self, configurations, values):
        """The rows of the quickest configuration of an autotuned kernel. Each runs once, on copies of its memory."""
        times = []
        for rows in configurations:
            # Tensors that share memory do so in the copies, too.
            copies = copy.deepcopy({number: values[number] for number in numbers_in(rows) if number in values})
            try:
                times.append((self.launcher.trial(lambda: [self.step(row, copies) for row in rows]), rows))
            except Failed:
                if rows is configurations[-1] and not times:
                    raise
        return min(times, key=lambda entry: entry[0])[1]


def as_recorded(tensor, kind, name):
    """A new tensor with the dtype and the strides that it had while recording, which may be a GPU's."""
    dtype, shape, strides = kind
    if 0 in shape:
        tensor = tensor.new_empty(shape)  # logsigmoid has a buffer on a CPU only
    if list(tensor.shape) != shape:
        raise Failed(f"aten.{name} gives another shape than while recording")
    tensor = tensor.to(TORCH_NAMES[dtype])
    if list(tensor.stride()) != strides and tensor.numel():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor


def laid_out(memory, tensor):
    """A tensor in this memory (bytes of a whole storage), where the given one lies in its own."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)  # no view: some operators refuse views
    return empty.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def fill(tensor, poison):
    """Fill a new tensor's memory; see Program.run. A bool holds 0 or 255 only, or PyTorch could not compute with it."""
    if poison == "random" and tensor.dtype != torch.bool:
        raw(tensor).random_()
    elif poison == "noise" and tensor.is_floating_point():
        # Not normal_(): drawn from the same seed as an input, it could be the input. float32, as fp8 draws nothing.
        tensor.copy_(torch.empty_like(tensor, dtype=torch.float32).exponential_())
    elif poison == "noise" and not tensor.is_complex():
        tensor.random_(0, 2)  # also where such an integer is an index
    elif poison:
        raw(tensor).fill_(255 if poison == "nan" else 0)
