"""Triton kernels where there is no GPU: an interpreter of Triton's IR, which counts what a kernel does.

    kernel = parse(text)                             see ir.py
    counts = launch(kernel, grid, arguments)         prices.launch_milliseconds(counts) is its time

All programs of a launch run at once. A value is a tensor whose first dimension is the program; where a value is the
same in all programs, that dimension has one element. Where programs take different branches, or leave a loop at
different times, both ways run one after the other, each for its own programs (`Run.only`). Kernels with locks, and
with atomics whose result is used, run program by program, in the order of their numbers.

A pointer is an integer: the number of a tensor's storage << BYTES, plus bytes. Every address is checked against its
storage. Each operation has a price or is refused by its name. There is no time limit but a limit on work, so an
endless loop ends, and ends the same way on every machine.

Not looked for: races. Not modelled: rounding of a GPU's approximate functions.
"""

import contextlib
import copy
import math
import re
from dataclasses import dataclass, field

import torch

from judge.ir import (CASTS, DTYPES, ELEMENTWISE, TERMINATORS, Block, Function, Parser, atomic, compare, convert,
                      libdevice, product, select, type_of)
from judge.prices import ACROSS_COST, DOT_COST, ERF_COST, INSTRUCTION_COST, SECTOR, launch_milliseconds
from judge.verdict import Failed

BYTES = 40  # bits of a pointer that count bytes
WIDTH = 1 << 18  # elements of the largest block of all programs that run at once: they stay in a processor's cache
MOST_WORK = 2e10  # elements that a launch may compute: about 20 s
OVERHEAD = 4000  # an operation takes as long as this many elements
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # memory is read and written as plain bits


@dataclass
class Counts:
    """What a launch did."""

    programs: int
    touched: dict = field(default_factory=lambda: {"load": {}, "store": {}})  # {storage's address: mask of its sectors}
    requested: int = 0  # bytes of the sectors of each load and store by itself
    flops: float = 0  # fp32 FLOPs of all but products
    products: float = 0  # FLOPs of products, times the cost of their precision
    work: float = 0  # of this interpreter: elements


@dataclass
class Kernel:
    functions: dict  # {name: ir.Function}
    main: Function
    largest: int  # elements of its largest block
    in_order: bool  # do its programs have to run one after the other?
    only_in_products: set  # values that only tt.dot uses

    @property
    def parameters(self):
        """The types of its parameters, as text."""
        return [kind for _, kind in self.main.parameters]


def parse(text) -> Kernel:
    """Read a kernel's TTIR. Raises Failed if it uses what has no price here, or makes no sense."""
    functions = {function.name: function for function in Parser(text).functions()}
    public = [function for function in functions.values() if function.public]
    if len(public) != 1:
        raise Failed("the kernel's IR makes no sense: not one public function", "compile")
    largest, in_order, only_in_products = 1, False, set()
    for function in functions.values():
        operations = list(all_operations(function.blocks))
        used = {name for operation in operations for name in operation.operands}
        only_in_products |= {name for operation in operations for name in operation.operands if operation.name == "tt.dot"}
        only_in_products -= {name for operation in operations for name in operation.operands if operation.name != "tt.dot"}
        for operation in operations:
            if operation.name not in KNOWN:
                raise refusal(operation)
            in_order |= operation.name == "tt.atomic_cas"
            in_order |= operation.name == "tt.atomic_rmw" and not used.isdisjoint(operation.results)
            for text in operation.types:
                if text.startswith("tensor<"):
                    largest = max(largest, math.prod(type_of(text).shape))
    return Kernel(functions, public[0], largest, in_order, only_in_products)


def all_operations(blocks):
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from all_operations(region)


def refusal(operation) -> Failed:
    what = SPELLINGS.get(operation.name, operation.name)
    return Failed(f"{what} is not available inside a Triton kernel without a GPU: it has no price there", "compile",
                  operation.line)


def launch(kernel, grid, arguments) -> Counts:
    """Run all programs of a launch, in place. arguments: a CPU tensor, number or None for each of kernel.parameters.

    Raises Failed with the candidate's line.
    """
    counts, memory = Counts(math.prod(grid)), Memory()
    values = [memory.argument(kind, value) for kind, value in zip(kernel.parameters, arguments, strict=True)]
    together = 1 if kernel.in_order else max(1, WIDTH // kernel.largest)
    for first in range(0, counts.programs, together):
        numbers = torch.arange(first, min(first + together, counts.programs))
        Run(kernel, memory, counts, grid, numbers).function(kernel.main, values)
    return counts


# ---------------------------------------------------------------------------------------------------------------------


class Memory:
    """The storages of a launch's tensors. Nothing else can be reached."""

    def __init__(self):
        self.storages, self.numbers = {}, {}  # {number: its bytes as a tensor}, {address: number}

    def argument(self, kind, value):
        """An argument as a value, the same in all programs."""
        if kind.startswith("!tt.tensordesc"):
            base, shape, strides = value
            return Descriptor(self.argument("!tt.ptr<i8>", base), [torch.tensor([n]) for n in shape],
                              [torch.tensor([n]) for n in strides], kind)
        if not kind.startswith("!tt.ptr"):
            dtype = type_of(kind).dtype
            if isinstance(value, int) and not dtype.is_floating_point:
                value = (value + 2 ** 63) % 2 ** 64 - 2 ** 63
            return torch.tensor([value]).to(dtype)
        if value is None:
            return torch.zeros(1, dtype=torch.int64)
        storage = value.untyped_storage()
        number = self.numbers.setdefault(storage.data_ptr(), len(self.numbers) + 1)
        self.storages[number] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return torch.tensor([(number << BYTES) + value.storage_offset() * value.element_size()])

    def find(self, addresses, size, kind, line):
        """[(a storage as integers of `size` bytes, which of the addresses lie there, their indices)]. Raises Failed."""
        if (addresses & (size - 1)).any():
            raise Failed(f"misaligned {kind}", "launch", line)
        numbers = addresses >> BYTES
        places = []
        low, high = int(numbers.min()), int(numbers.max())
        for number in [low] if low == high else numbers.unique().tolist():
            here = slice(None) if low == high else numbers == number
            index = (addresses[here] & ((1 << BYTES) - 1)) // size
            storage = self.storages.get(number)
            if storage is None:
                raise Failed(f"out-of-bounds {kind} (no tensor there)", "launch", line)
            cells = storage[:storage.numel() // size * size].view(BITS[size])
            past = int(index.max()) - cells.numel() + 1
            if past > 0:
                where = f"{past} elements past the end" if past < 1 << 38 else "before the tensor's beginning"
                raise Failed(f"out-of-bounds {kind} ({where})", "launch", line)
            places.append((cells, here, index))
        return places


@dataclass
class Descriptor:
    """A tensor descriptor: where a tensor begins, its shape and strides as values, and the type of its blocks."""

    base: torch.Tensor
    shape: list
    strides: list
    kind: str

    @property
    def type(self):
        return type_of("tensor<" + self.kind.split("<")[-1].rstrip(">") + ">")


# ---------------------------------------------------------------------------------------------------------------------


def pointee(kind):
    """The dtype of what a pointer points to: an address, if that is a pointer itself."""
    return type_of(kind.pointee).dtype


def shaped(condition, value):
    """What is one number for each program, with as many dimensions as a value."""
    return condition.view(-1, *[1] * (value.dim() - 1))


def merge(condition, yes, no):
    """For each program, the values of the way that it took."""
    return [a if a is b or not isinstance(a, torch.Tensor) else select(condition, a, b) for a, b in zip(yes, no)]


class Run:
    """Some programs of a launch, all at once."""

    def __init__(self, kernel, memory, counts, grid, numbers):
        self.kernel, self.memory, self.counts, self.grid = kernel, memory, counts, grid
        self.programs = self.running = len(numbers)  # running: how many of them are active
        self.active = torch.ones(self.programs, dtype=torch.bool)
        x, y, _ = grid
        self.ids = {"x": numbers % x, "y": numbers // x % y, "z": numbers // (x * y)}
        self.values = {}
        self.priced = True

    # --- control

    @contextlib.contextmanager
    def only(self, condition):
        """Let only those of the active programs run for which the condition holds."""
        before = self.active, self.running
        self.active = self.active & condition
        self.running = int(self.active.sum())
        yield
        self.active, self.running = before

    def agreed(self, condition):
        """What all active programs say, or None where they differ."""
        if len(condition) == 1:
            return bool(condition)
        said = condition[self.active]
        first = bool(said[0])
        return first if bool((said == first).all()) else None

    def function(self, function, arguments):
        """Call a function. Returns its results."""
        outer, self.values = self.values, dict(zip([name for name, _ in function.parameters], arguments))
        results = self.blocks(function.blocks, arguments)
        self.values = outer
        return results

    def blocks(self, blocks, arguments):
        """Run the blocks of a function in their order, each for the programs that have jumped to it."""
        waiting = {blocks[0].label: (self.active, arguments)}  # {label: (which programs, the block's arguments)}
        results = None
        for block in blocks:
            condition, arguments = waiting.pop(block.label, (None, ()))
            if condition is None or not condition.any():
                continue
            with self.only(condition):
                given = self.block(block, arguments)
                for jump, label, values in self.jumps(block.operations[-1], given):
                    if label is None:
                        results = values if results is None else merge(jump, values, results)
                    elif label in waiting:
                        earlier, others = waiting[label]
                        waiting[label] = (earlier | jump, merge(jump, values, others))
                    else:
                        waiting[label] = (jump, values)
        if waiting:
            raise Failed("a jump backwards is not available inside a Triton kernel without a GPU", "compile")
        return results

    def jumps(self, last, given):
        """[(which programs, a block's label or None for a return, the block's arguments)] of a block's end."""
        if not last.name.startswith("cf."):
            return [(self.active, None, given)]
        targets = [text.partition("(") for text in re.findall(r"\^\w+(?:\([^)]*\))?", last.text)]
        ways = [self.active]
        if last.name == "cf.cond_br":
            condition, *given = given
            ways = [self.active & condition, self.active & ~condition]
        jumps = []
        for which, (label, _, arguments) in zip(ways, targets):
            count = arguments.count("%")
            jumps.append((which, label, given[:count]))
            given = given[count:]
        return jumps

    def block(self, block, arguments=()):
        """Run a block's operations. Returns the values that its last one hands on."""
        values = self.values
        values.update(zip(block.arguments, arguments))
        for operation in block.operations:
            self.counts.work += OVERHEAD
            if self.counts.work > MOST_WORK:
                raise Failed("the kernel does not end, or does more than can be interpreted", "launch", operation.line)
            operands = [values[name] for name in operation.operands if name in values]
            if operation.name in TERMINATORS:
                return operands
            for name, result in zip(operation.results, self.step(operation, operands)):
                values[name] = result
            for name in operation.last_uses:
                values.pop(name, None)
        return []

    def step(self, operation, operands) -> list:
        """One operation. Returns its results."""
        name = operation.name
        if name in METHODS:
            return METHODS[name](self, operation, *operands)
        if name in CASTS:
            result = convert(name, operands[0], operation.type.dtype)
        else:
            result = ELEMENTWISE[name](*operands)
            result = result if result.dtype == operands[-1].dtype else result.to(operands[-1].dtype)
        self.count(operation, result)
        return [result]

    def count(self, operation, value, cost=None):
        """Price an operation on every element of a value, in each active program."""
        self.counts.work += value.numel()
        if self.priced:
            cost = INSTRUCTION_COST.get(operation.name, 1) if cost is None else cost
            double = 2 if value.dtype == torch.float64 else 1
            self.counts.flops += math.prod(value.shape[1:]) * self.running * cost * double

    def branch(self, operation, condition):
        """scf.if"""
        regions = operation.regions
        said = self.agreed(condition)
        if said is not None:
            return self.block(regions[0 if said else 1][0]) if said or len(regions) > 1 else []
        with self.only(condition):
            yes = self.block(regions[0][0])
        if len(regions) == 1:
            return []
        with self.only(~condition):
            no = self.block(regions[1][0])
        return merge(condition, yes, no)

    def loop(self, operation, *_):
        """scf.for: its operands are the variable, the bounds, the step, then each carried value's name and beginning."""
        variable, *bounds = operation.operands[:4]
        low, high, step = [self.values[name] for name in bounds]
        carried = [self.values[name] for name in operation.operands[5::2]]
        body = operation.regions[0][0]
        index, going = low, self.active
        while True:
            going = going & (index < high)
            if not going.any():
                return carried
            with self.only(going):
                everyone = self.running == self.programs
                self.values[variable] = index
                results = self.block(Block("", operation.operands[4::2], body.operations), carried)
            carried = results if everyone else merge(going, results, carried)
            index = index + step

    def repeat(self, operation, *_):
        """scf.while: the first region says whether to go on, and with what; the second gives the first's next values."""
        [before], [after] = operation.regions
        carried = [self.values[name] for name in operation.operands[1::2]]
        before = Block("", operation.operands[0::2], before.operations)
        going, results = self.active, None
        while True:
            with self.only(going):
                condition, *passed = self.block(before, carried)
                results = passed if results is None else merge(going, passed, results)
                going = going & condition
                if not going.any():
                    return results
            with self.only(going):
                carried = self.block(after, passed)

    def call(self, operation, *operands):
        name = re.search(r'@"?([\w$.<>, ]+)"?\(', operation.text)[1]
        return self.function(self.kernel.functions[name], operands)

    # --- a kernel's own function on elements: reductions, scans

    def elementwise(self, region, values):
        """Run a region on the elements of equally shaped values: for it, each element is a program of its own."""
        inner = copy.copy(self)
        inner.programs = inner.running = values[0].numel()
        inner.active = torch.ones(inner.programs, dtype=torch.bool)
        inner.priced = False
        results = inner.blocks(region, [value.reshape(-1) for value in values])
        return [result.expand(inner.programs).view(values[0].shape) for result in results]

    def price_region(self, operation, values, axis):
        """Each element takes part once. Across programs' rows it goes through shared memory."""
        across = ACROSS_COST if axis < values[0].dim() - 1 else 1
        inner = [each for each in all_operations(operation.regions[0]) if each.name not in TERMINATORS]
        self.count(operation, values[0], max(1, len(inner)) * across)

    def reduce(self, operation, *values):
        axis = operation.integer("axis") + 1
        self.price_region(operation, values, axis)
        values = [value.movedim(axis, 0).contiguous() for value in values]
        while len(values[0]) > 1:
            half = len(values[0]) // 2
            left, right = [value[:half] for value in values], [value[half:] for value in values]
            values = self.elementwise(operation.regions[0], left + right)
        return [value[0] for value in values]

    def scan(self, operation, *values):
        """In each round an element takes in the result of the one `step` before it."""
        axis, reverse = operation.integer("axis") + 1, operation.attributes.get("reverse") == "true"
        self.price_region(operation, values, axis)
        values = [value.movedim(axis, 0) for value in values]
        values = [value.flip(0) if reverse else value.contiguous() for value in values]
        step = 1
        while step < len(values[0]):
            earlier, later = [value[:-step] for value in values], [value[step:] for value in values]
            results = self.elementwise(operation.regions[0], earlier + later)
            values = [torch.cat([value[:step], result]) for value, result in zip(values, results)]
            step *= 2
        return [(value.flip(0) if reverse else value).movedim(0, axis) for value in values]

    def map_elements(self, operation, *values):
        self.count(operation, values[0], len(list(all_operations(operation.regions[0]))))
        return self.elementwise(operation.regions[0], torch.broadcast_tensors(*values))

    # --- memory

    def lanes(self, each, pointers, mask, *values):
        """Addresses, mask and values in one shape: of one program, if all do the same and not `each` has to."""
        given = [tensor for tensor in (pointers, mask, *values) if tensor is not None]
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in given])
        if each or shape[0] > 1:
            shape = (self.programs, *shape[1:])
            if self.running < self.programs:
                active = self.active.view(-1, *[1] * (len(shape) - 1))
                mask = active if mask is None else mask & active
        if mask is not None:
            mask = None if mask.all() else mask.expand(shape)
        return pointers.expand(shape), mask, *[value.expand(shape) for value in values]

    def touch(self, kind, addresses, mask, places):
        """Note which sectors of memory an access uses."""
        if not self.priced:
            return
        times = self.running if len(addresses) == 1 else 1
        sectors = addresses >> SECTOR
        owners = torch.arange(len(addresses)).view(-1, *[1] * (addresses.dim() - 1)).expand(addresses.shape)
        sectors, owners = [each.reshape(-1) if mask is None else each[mask] for each in (sectors, owners)]
        new = torch.ones(len(sectors), dtype=torch.bool)
        new[1:] = (sectors[1:] != sectors[:-1]) | (owners[1:] != owners[:-1])
        self.counts.requested += (int(new.sum()) * times) << SECTOR
        for cells, here, index in places:
            place = cells.untyped_storage()
            marks = self.counts.touched[kind].setdefault(
                place.data_ptr(), torch.zeros((place.nbytes() >> SECTOR) + 1, dtype=torch.bool))
            marks[(index * cells.element_size()) >> SECTOR] = True

    def access(self, kind, operation, dtype, addresses, mask):
        """Where the addresses lie, as Memory.find gives it; they are counted as a "load" or a "store"."""
        active = addresses.reshape(-1) if mask is None else addresses[mask]
        if not len(active):
            return []
        self.counts.work += 10 * addresses.numel()
        places = self.memory.find(active, dtype.itemsize, kind, operation.line)
        self.touch(kind, addresses, mask, places)
        return places

    def load(self, operation, pointers, mask=None, other=None, dtype=None):
        dtype = dtype or pointee(operation.type)
        addresses, mask, *others = self.lanes(False, pointers, mask, *[other] * (other is not None))
        places = self.access("load", operation, dtype, addresses, mask)
        bits = BITS[dtype.itemsize]
        count = addresses.numel() if mask is None else int(mask.sum())
        loaded = torch.empty(count, dtype=bits)
        for cells, here, index in places:
            loaded[here] = cells[index]
        if mask is None:
            return [loaded.view(dtype).view(addresses.shape)]
        if others:
            result = others[0].contiguous().view(bits).clone()
        else:
            result = torch.zeros(addresses.shape, dtype=bits)
        result[mask] = loaded
        return [result.view(dtype)]

    def store(self, operation, pointers, value, mask=None):
        addresses, mask, value = self.lanes(False, pointers, mask, value)
        places = self.access("store", operation, value.dtype, addresses, mask)
        value = value.reshape(-1) if mask is None else value[mask]
        for cells, here, index in places:
            cells[index] = value.contiguous().view(cells.dtype)[here]
        return []

    def atomic(self, operation, pointers, value, mask=None):
        """tt.atomic_rmw"""
        kind = re.match(r"\w+", operation.text)[0]
        return self.change(operation, kind, pointers, mask, value)

    def swap(self, operation, pointers, compared, value):
        """tt.atomic_cas"""
        return self.change(operation, "exch", pointers, None, value, compared)

    def change(self, operation, kind, pointers, mask, *values):
        addresses, mask, *values = self.lanes(True, pointers, mask, *values)
        dtype = values[0].dtype
        places = self.access("store", operation, dtype, addresses, mask)
        self.count(operation, addresses)
        values = [value.reshape(-1) if mask is None else value[mask] for value in values]
        found = torch.empty_like(values[0])
        for cells, here, index in places:
            those = [value[here] for value in values]
            found[here] = atomic(kind, cells.view(dtype), index, *those, ordered=self.kernel.in_order)
        if mask is None:
            return [found.view(addresses.shape)]
        return [torch.zeros(addresses.shape, dtype=dtype).masked_scatter(mask, found)]

    # --- tensor descriptors

    def make_descriptor(self, operation, base, *sizes):
        half = len(sizes) // 2
        return [Descriptor(base, sizes[:half], sizes[half:], operation.types[-1])]

    def block_of(self, descriptor, indices):
        """(pointers, mask) of the block that begins at the indices. An index may be a block of rows itself."""
        kind = descriptor.type
        rank = len(kind.shape)
        pointers, mask = descriptor.base.view(-1, *[1] * rank), None
        for axis, (index, size, stride) in enumerate(zip(indices, descriptor.shape, descriptor.strides)):
            along = index.long() if index.dim() > 1 else index.long().view(-1, 1) + torch.arange(kind.shape[axis])
            along = along.view(len(along), *[1] * axis, -1, *[1] * (rank - axis - 1))
            inside = (along >= 0) & (along < shaped(size, along))
            mask = inside if mask is None else mask & inside
            pointers = pointers + along * shaped(stride, along) * kind.dtype.itemsize
        return pointers, mask

    def load_block(self, operation, descriptor, *indices):
        pointers, mask = self.block_of(descriptor, indices)
        [block] = self.load(operation, pointers, mask, dtype=descriptor.type.dtype)
        return [block.reshape(len(block), *operation.type.shape)]

    def store_block(self, operation, descriptor, *indices):
        *indices, value = indices
        pointers, mask = self.block_of(descriptor, indices)
        shape = torch.broadcast_shapes(pointers.shape, mask.shape)
        value = value.reshape(len(value), *shape[1:])
        if operation.name == "tt.descriptor_reduce":
            return self.change(operation, re.match(r"\w+", operation.text)[0], pointers, mask, value)
        return self.store(operation, pointers, value, mask)

    # --- shapes and the rest

    def constant(self, operation):
        return [operation.constant]

    def program_id(self, operation):
        return [self.ids[operation.text].int()]

    def num_programs(self, operation):
        return [torch.tensor([self.grid["xyz".index(operation.text)]], dtype=torch.int32)]

    def make_range(self, operation):
        return [torch.arange(operation.integer("start"), operation.integer("end"), dtype=torch.int32)[None]]

    def splat(self, operation, value):
        shape = operation.type.shape
        return [value.reshape(-1, *[1] * len(shape)).expand(-1, *shape)]

    def broadcast(self, operation, value):
        return [value.expand(-1, *operation.type.shape)]

    def reshape(self, operation, value):
        return [value.reshape(-1, *operation.type.shape)]

    def expand_dims(self, operation, value):
        return [value.unsqueeze(operation.integer("axis") + 1)]

    def transpose(self, operation, value):
        if operation.results[0] not in self.kernel.only_in_products:
            self.count(operation, value, ACROSS_COST)
        order = re.findall(r"\d+", operation.attributes["order"].partition(":")[2])
        return [value.permute(0, *[int(axis) + 1 for axis in order])]

    def join(self, operation, *values):
        return [torch.stack(torch.broadcast_tensors(*values), -1)]

    def split(self, operation, value):
        return [value[..., 0], value[..., 1]]

    def concatenate(self, operation, *values):
        programs = max(map(len, values))
        return [torch.cat([value.expand(programs, *value.shape[1:]) for value in values], 1)]

    def gather(self, operation, source, index):
        self.count(operation, index, ACROSS_COST)
        programs, axis = max(len(source), len(index)), operation.integer("axis") + 1
        source, index = [each.expand(programs, *each.shape[1:]) for each in (source, index)]
        return [source.gather(axis, index.long())]

    def histogram(self, operation, values, mask=None):
        self.count(operation, values, ACROSS_COST)
        [bins] = operation.type.shape
        inside = (values >= 0) & (values < bins)
        inside = inside if mask is None else inside & mask
        counted = torch.zeros(len(inside), bins, dtype=torch.int64)
        values = values.long().clamp(0, bins - 1).expand(inside.shape)
        return [counted.scatter_add(1, values, inside.long()).to(operation.type.dtype)]

    def add_pointer(self, operation, pointers, offset):
        size = pointee(type_of(operation.types[0])).itemsize
        self.count(operation, pointers if pointers.numel() > offset.numel() else offset)
        return [pointers + offset.long() * size]

    def compare(self, operation, a, b):
        self.count(operation, a)
        return [compare(re.match(r"\w+", operation.text)[0], a, b)]

    def select(self, operation, condition, yes, no):
        self.count(operation, yes)
        return [select(condition, yes, no)]

    def bitcast(self, operation, value):
        return [value if operation.type.pointee else value.contiguous().view(operation.type.dtype)]

    def same(self, operation, value):
        return [value]

    def nothing(self, operation, *values):
        return []

    def poison(self, operation):
        return [torch.zeros(1, *operation.type.shape, dtype=operation.type.dtype)]

    def dot(self, operation, a, b, total):
        """Rows of zeros are free: they lie past a tensor's end, and at a GPU's sizes blocks are full."""
        precision = operation.attributes.get("inputPrecision", "ieee")
        filled = float(a.any(-1).float().mean()) if a.dtype.itemsize > 1 else 1.0
        self.counts.work += total.numel() * a.shape[-1] / 16
        self.counts.products += (2 * math.prod(total.shape[1:]) * a.shape[-1] * filled * self.running
                                 * DOT_COST.get(precision if a.dtype == torch.float32 else str(a.dtype), DOT_COST["half"]))
        return [product(a, b, total, precision)]

    def extern(self, operation, *values):
        symbol = operation.attributes.get("symbol", "").strip('"')
        function = libdevice(symbol)
        if function is None:
            raise Failed(f"libdevice's {symbol[:40]} is not available inside a Triton kernel without a GPU", "compile",
                         operation.line)
        self.count(operation, values[0], ERF_COST)
        return [function(*values).to(operation.type.dtype)]


METHODS = {
    "scf.if": Run.branch, "scf.for": Run.loop, "scf.while": Run.repeat, "tt.call": Run.call,
    "tt.reduce": Run.reduce, "tt.scan": Run.scan, "tt.map_elementwise": Run.map_elements,
    "tt.load": Run.load, "tt.store": Run.store, "tt.atomic_rmw": Run.atomic, "tt.atomic_cas": Run.swap,
    "tt.make_tensor_descriptor": Run.make_descriptor, "tt.descriptor_load": Run.load_block,
    "tt.descriptor_store": Run.store_block, "tt.descriptor_reduce": Run.store_block,
    "tt.descriptor_gather": Run.load_block, "tt.descriptor_scatter": Run.store_block,
    "arith.constant": Run.constant, "tt.get_program_id": Run.program_id, "tt.get_num_programs": Run.num_programs,
    "tt.make_range": Run.make_range, "tt.splat": Run.splat, "tt.broadcast": Run.broadcast, "tt.reshape": Run.reshape,
    "tt.unsplat": Run.reshape, "tt.expand_dims": Run.expand_dims, "tt.trans": Run.transpose, "tt.join": Run.join,
    "tt.split": Run.split, "tt.cat": Run.concatenate, "tt.gather": Run.gather, "tt.histogram": Run.histogram,
    "tt.addptr": Run.add_pointer, "arith.cmpi": Run.compare, "arith.cmpf": Run.compare, "arith.select": Run.select,
    "tt.bitcast": Run.bitcast, "arith.bitcast": Run.bitcast, "tt.ptr_to_int": Run.same, "tt.int_to_ptr": Run.same,
    "tt.dot": Run.dot, "tt.extern_elementwise": Run.extern, "ub.poison": Run.poison,
    **dict.fromkeys(("tt.print", "tt.assert", "llvm.intr.assume", "gpu.barrier", "ttg.barrier", "ttg.debug_barrier"), Run.nothing)}
KNOWN = {*METHODS, *ELEMENTWISE, *CASTS, *TERMINATORS}
SPELLINGS = {"tt.dot_scaled": "tl.dot_scaled", "tt.elementwise_inline_asm": "tl.inline_asm_elementwise"}


class Kernels:
    """The launcher of a program's kernels (program.Program). texts: what the recorder compiled."""

    def __init__(self, binaries):
        self.binaries = binaries
        self.kernels = [parse(binary["ttir"]) for binary in binaries]
        self.counter = None  # Counts of the last launch

    def launch(self, launch, arguments):
        index = launch["binary"]
        values = [arguments[name] for name in self.binaries[index]["parameters"]]
        try:
            self.counter = globals()["launch"](self.kernels[index], launch["grid"], values)
        except Failed as failed:
            raise Failed(f"{launch['kernel']}: {failed}", failed.stage, failed.line) from None

    def trial(self, launch, arguments):
        self.launch(launch, arguments)
        return launch_milliseconds(self.counter)
