"""Triton kernels where there is no GPU: an interpreter of Triton's IR (ir.py), which counts what a kernel does.

    kernel = parse(text)
    counts = launch(kernel, grid, arguments)         prices.launch_milliseconds(counts) is its time

All programs of a launch run at once. A value is a tensor whose first dimension is the program; where a value is the
same in all programs, that dimension has one element. Where programs take different branches, or leave a loop at
different times, both ways run one after the other, each for its own programs (`Run.only`). Kernels with locks, and
with atomics whose result is used, run program by program, in the order of their numbers.

A pointer is an integer: the number of a tensor's storage << BYTES, plus bytes. Every address is checked against its
storage. Each operation has a price, or is refused by its name. There is no time limit but a limit on work, so that an
endless loop ends, and ends the same way on every machine.

Not looked for: races. Not modelled: how a GPU's approximate functions round.
"""

import contextlib
import copy
import math
import re
from dataclasses import dataclass, field

import torch

from judge.ir import Kernel, all_operations, parse_kernel, refused, type_of
from judge.operations import BITS, SAME_SHAPES, SIMPLE, Descriptor, Memory, atomic, check_shapes, dot, select
from judge.prices import ACROSS_COST, DOT_COST, INSTRUCTION_COST, SECTOR
from judge.verdict import Failed, describe

WIDTH = 1 << 18  # elements of the largest block in all programs that run at once: they stay in a processor's cache
MOST_ELEMENTS = 1 << 24  # of a value
MOST_WORK = 1e10  # elements that a launch may compute: about 10 s of an idle core
OVERHEAD = 20_000  # elements: an operation takes as long by itself
TERMINATORS = {"scf.yield", "scf.condition", "tt.return", "tt.reduce.return", "tt.scan.return",
               "tt.map_elementwise.return", "cf.br", "cf.cond_br"}


@dataclass
class Counts:
    """What a launch did."""

    programs: int
    touched: dict = field(default_factory=lambda: {"load": {}, "store": {}})  # {storage's address: mask of its sectors}
    requested: int = 0  # bytes of the sectors of each load and store by itself
    flops: float = 0  # fp32 FLOPs of all but products
    products: float = 0  # FLOPs of products, times the cost of their precision
    work: float = 0  # of this interpreter: elements


def parse(text) -> Kernel:
    """Read a kernel's TTIR. Raises Failed if it uses what has no price here, or makes no sense."""
    return parse_kernel(text, KNOWN)


def launch(kernel, grid, arguments) -> Counts:
    """Run all programs of a launch, in place. arguments: a CPU tensor, number or None for each of its parameters.

    A tensor descriptor that the host has made is (tensor, shape, strides). Raises Failed with the candidate's line.
    """
    counts = Counts(math.prod(grid))
    memory = Memory()
    together = 1 if kernel.in_order else max(1, WIDTH // kernel.largest)
    try:
        parameters = zip(kernel.main.parameters, arguments, strict=True)
        values = [memory.argument(kind, value) for (_, kind), value in parameters]
        for first in range(0, counts.programs, together):
            numbers = torch.arange(first, min(first + together, counts.programs))
            Run(kernel, memory, counts, grid, numbers).function(kernel.main, values)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Failed(f"the kernel's IR makes no sense ({describe(error)[0]})") from None
    return counts


# ---------------------------------------------------------------------------------------------------------------------


def merge(condition, yes, no):
    """The values of the way that each program took."""
    pairs = zip(yes, no, strict=True)
    return [a if a is b or isinstance(a, Descriptor) else select(condition, a, b) for a, b in pairs]


class Run:
    """Some programs of a launch, all at once. Methods that are named after operations (tt_load: tt.load) run them."""

    def __init__(self, kernel, memory, counts, grid, numbers):
        self.kernel, self.memory, self.counts, self.grid = kernel, memory, counts, grid
        self.ids = [numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])]
        self.programs = self.running = len(numbers)  # running: how many of them are active
        self.active = torch.ones(self.programs, dtype=torch.bool)
        self.values = {}  # {name: value} of the function that runs

    # --- control

    @contextlib.contextmanager
    def only(self, condition):
        """Let only those of the active programs run for which the condition holds."""
        before = self.active, self.running
        self.active = self.active & condition
        self.running = int(self.active.count_nonzero())
        yield
        self.active, self.running = before

    def function(self, function, arguments):
        """Call a function. Returns its results."""
        outer, self.values = self.values, dict(zip([name for name, _ in function.parameters], arguments, strict=True))
        results = self.blocks(function.blocks)
        self.values = outer
        return results

    def blocks(self, blocks, arguments=()):
        """Run blocks in their order, each for the programs that jumped to it. Returns what the last ones return."""
        waiting = {blocks[0].label: (self.active, arguments)}  # {label: (which programs, the block's arguments)}
        for block in blocks:
            condition, arguments = waiting.pop(block.label, (None, ()))
            if condition is None or not condition.any():
                continue
            with self.only(condition):
                given = self.block(block, arguments)
                for jump, label, values in self.jumps(block.operations[-1], given):
                    if label in waiting:
                        earlier, others = waiting[label]
                        values = merge(jump, values, others)
                        jump = earlier | jump
                    waiting[label] = jump, values
        if waiting.keys() != {None}:
            raise refused("a jump backwards")
        return waiting[None][1]

    def jumps(self, last, given):
        """[(which programs, a block's label or None for a return, the block's arguments)] at a block's end."""
        targets = re.findall(r"(\^\w+)((?:\([^)]*\))?)", last.text)
        if not targets:
            return [(self.active, None, given)]
        ways = [self.active]
        if last.name == "cf.cond_br":
            condition, *given = given
            ways = [self.active & condition, self.active & ~condition]
        jumps = []
        for way, (label, arguments) in zip(ways, targets, strict=True):
            count = arguments.count("%")
            jumps.append((way, label, given[:count]))
            given = given[count:]
        return jumps

    def block(self, block, arguments=()):
        """Run a block's operations. Returns the values that its last one hands on."""
        values = self.values
        values.update(zip(block.arguments, arguments))
        for operation in block.operations:
            self.counts.work += OVERHEAD
            if self.counts.work > MOST_WORK:
                why = "the kernel does not end, or does more than can be interpreted"
                raise Failed(why, line=operation.line)
            operands = [values[name] for name in operation.operands]
            if operation.name in TERMINATORS:
                return operands
            values.update(zip(operation.results, self.step(operation, operands)))
            for name in operation.last_uses:
                values.pop(name, None)
        return []

    def step(self, operation, operands) -> list:
        """One operation. Returns its results."""
        name = operation.name
        if name in METHODS:
            return METHODS[name](self, operation, *operands)
        if name in SAME_SHAPES:
            check_shapes(operands)
        result = SIMPLE[name](operation, *operands)
        if name == "tt.extern_elementwise" and re.search(r"_(sin|cos|tan)(pi)?f?\b", operation.attributes["symbol"]):
            name = "math.sin"  # or libdevice's would be the cheaper one
        self.count(result, INSTRUCTION_COST.get(name, 1))
        return [result]

    def count(self, value, cost):
        """Count an instruction for each element of a value, in each active program."""
        self.counts.work += value.numel()
        if value.numel() > MOST_ELEMENTS:
            raise ValueError("a block larger than its type says")
        fp64 = 2 if value.dtype == torch.float64 else 1
        self.counts.flops += math.prod(value.shape[1:]) * self.running * cost * fp64

    def scf_if(self, operation, condition):
        sides = [region[0] for region in operation.regions]
        said = condition if len(condition) == 1 else condition[self.active]
        if said.all():
            return self.block(sides[0])
        if not said.any():
            return self.block(sides[1]) if len(sides) > 1 else []
        results = []
        for side, way in zip(sides, (condition, ~condition)):
            with self.only(way):
                results.append(self.block(side))
        return merge(condition, *results) if len(sides) > 1 else []

    def scf_for(self, operation, low, high, step, *carried):
        index = low
        going = self.active
        while True:
            going = going & (index < high)
            if not going.any():
                return carried
            with self.only(going):
                results = self.block(operation.regions[0][0], [index, *carried])
                carried = results if self.running == self.programs else merge(going, results, carried)
            index = index + step

    def scf_while(self, operation, *carried):
        """Its first region says whether to go on, and with what; its second gives the next values."""
        [before], [after] = operation.regions
        going = self.active
        results = None
        while True:
            with self.only(going):
                condition, *passed = self.block(before, carried)
                results = passed if results is None else merge(going, passed, results)
            going = going & condition
            if not going.any():
                return results
            with self.only(going):
                carried = self.block(after, passed)

    def tt_call(self, operation, *operands):
        """Call a function that is not inlined."""
        return self.function(self.kernel.functions[re.search(r'@"?([^"(]+)"?\(', operation.text)[1]], operands)

    # --- functions of elements: of reductions, of scans, of tl.map_elementwise

    def elementwise(self, region, values):
        """(results, FLOPs of an element) of a region on the elements of equally shaped values.

        There, each element is a program of its own. The FLOPs are not counted yet: see count_region.
        """
        inner = copy.copy(self)
        before = self.counts.flops
        inner.programs = inner.running = values[0].numel()
        inner.active = torch.ones(inner.programs, dtype=torch.bool)
        results = inner.blocks(region, [value.reshape(-1) for value in values])
        each = (self.counts.flops - before) / inner.programs
        self.counts.flops = before
        return [result.expand(inner.programs).view(values[0].shape) for result in results], each

    def count_region(self, operation, value, each):
        """Count a region that each element of a value meets once: `each` FLOPs, at least one for each instruction."""
        axis = int(operation.attributes.get("axis", value.dim())) + 1
        instructions = len(list(all_operations(operation.regions[0]))) - 1  # the last one hands on
        each = each / 2 if value.dtype == torch.float64 else each  # `count` doubles it
        self.count(value, max(1, instructions, each) * (ACROSS_COST if axis < value.dim() - 1 else 1))

    def axis_first(self, operation, values) -> list:
        values = torch.broadcast_tensors(*values)  # some may be the same in all programs
        return [value.movedim(operation.integer("axis") + 1, 0).contiguous() for value in values]

    def tt_reduce(self, operation, first, *others):
        """Halves are joined until one is left."""
        values = self.axis_first(operation, [first, *others])
        each = 0.0
        while len(values[0]) > 1:
            half = len(values[0]) // 2
            halves = [value[:half] for value in values] + [value[half:] for value in values]
            values, each = self.elementwise(operation.regions[0], halves)
        self.count_region(operation, first, each)
        return [value[0] for value in values]

    def tt_scan(self, operation, first, *others):
        """In each round an element takes in what the one `distance` before it has gathered."""
        values = self.axis_first(operation, [first, *others])
        each = 0.0
        dimensions = [0] if operation.attributes.get("reverse") == "true" else []
        values = [value.flip(dimensions) for value in values]
        distance = 1
        while distance < len(values[0]):
            both = [value[:-distance] for value in values] + [value[distance:] for value in values]
            joined, each = self.elementwise(operation.regions[0], both)
            values = [torch.cat([value[:distance], new]) for value, new in zip(values, joined)]
            distance *= 2
        self.count_region(operation, first, each)
        return [value.flip(dimensions).movedim(0, operation.integer("axis") + 1) for value in values]

    def tt_map_elementwise(self, operation, *values):
        results, each = self.elementwise(operation.regions[0], torch.broadcast_tensors(*values))
        self.count_region(operation, values[0], each)
        return results

    # --- memory

    def lanes(self, each, pointers, mask, *values):
        """Addresses, mask and values in one shape: of one program, if all do the same and not `each` has to."""
        given = [tensor for tensor in (pointers, mask, *values) if tensor is not None]
        check_shapes(given)
        shape = pointers.shape
        if each or any(len(tensor) > 1 for tensor in given):
            shape = (self.programs, *shape[1:])
            if self.running < self.programs:
                active = self.active.view(-1, *[1] * (len(shape) - 1))
                mask = active if mask is None else mask & active
        if mask is not None:
            mask = None if mask.all() else mask.expand(shape)
        return pointers.expand(shape), mask, *(value.expand(shape) for value in values)

    def access(self, kind, operation, size, addresses, mask):
        """Where addresses lie, as Memory.find says it, and which sectors a "load" or "store" of them touches."""
        active = chosen(addresses, mask)
        self.counts.work += 10 * addresses.numel()
        if not len(active):
            return []
        places = self.memory.find(active, size, kind, operation.line)
        programs = torch.arange(len(addresses)).view(-1, *[1] * (addresses.dim() - 1)).expand(addresses.shape)
        programs, sectors = chosen(programs, mask), active >> SECTOR
        new = torch.ones(len(sectors), dtype=torch.bool)
        new[1:] = (sectors[1:] != sectors[:-1]) | (programs[1:] != programs[:-1])
        times = self.running if len(addresses) == 1 else 1
        self.counts.requested += (int(new.sum()) * times) << SECTOR
        for cells, here, index in places:
            storage = cells.untyped_storage()
            marks = torch.zeros((storage.nbytes() >> SECTOR) + 1, dtype=torch.bool)
            marks = self.counts.touched[kind].setdefault(storage.data_ptr(), marks)
            marks[index[new[here]] * size >> SECTOR] = True
        return places

    def tt_load(self, operation, pointers, mask=None, other=None, dtype=None):
        dtype = dtype or type_of(operation.type.pointee).dtype
        bits = BITS[dtype.itemsize]
        if other is None:
            other = torch.zeros(1, dtype=dtype).expand(1, *pointers.shape[1:])
        addresses, mask, other = self.lanes(False, pointers, mask, other)
        loaded = torch.empty(addresses.numel() if mask is None else int(mask.count_nonzero()), dtype=bits)
        for cells, here, index in self.access("load", operation, dtype.itemsize, addresses, mask):
            loaded[here] = cells[index]
        return [placed(loaded, mask, other.view(bits)).view(dtype)]

    def tt_store(self, operation, pointers, value, mask=None):
        addresses, mask, value = self.lanes(False, pointers, mask, value)
        value = chosen(value, mask).view(BITS[value.element_size()])
        for cells, here, index in self.access("store", operation, value.element_size(), addresses, mask):
            cells[index] = value[here]
        return []

    def tt_atomic_rmw(self, operation, pointers, value, mask=None):
        return self.change(operation, operation.word, pointers, mask, value)

    def tt_atomic_cas(self, operation, pointers, compared, value):
        return self.change(operation, "exch", pointers, None, value, compared)

    def change(self, operation, kind, pointers, mask, *values):
        addresses, mask, *values = self.lanes(True, pointers, mask, *values)
        dtype = values[0].dtype
        self.count(addresses, 1)
        values = [chosen(value, mask) for value in values]
        found = torch.zeros_like(values[0])
        for cells, here, index in self.access("store", operation, dtype.itemsize, addresses, mask):
            those = [value[here] for value in values]
            found[here] = atomic(kind, cells.view(dtype), index, *those, ordered=self.kernel.in_order)
        return [placed(found, mask, torch.zeros(addresses.shape, dtype=dtype))]

    def tt_make_tensor_descriptor(self, operation, base, *sizes):
        half = len(sizes) // 2
        return [Descriptor(base, sizes[:half], sizes[half:], operation.types[-1])]

    def tt_descriptor_load(self, operation, descriptor, *indices):
        [block] = self.tt_load(operation, *descriptor.block(indices), dtype=descriptor.type.dtype)
        return [block.reshape(-1, *operation.type.shape)]

    tt_descriptor_gather = tt_descriptor_load

    def tt_descriptor_store(self, operation, descriptor, *indices):
        *indices, value = indices
        pointers, mask = descriptor.block(indices)
        value = value.reshape(-1, *mask.shape[1:])
        if operation.name == "tt.descriptor_reduce":
            return self.change(operation, operation.word, pointers, mask, value)
        return self.tt_store(operation, pointers, value, mask)

    tt_descriptor_scatter = tt_descriptor_reduce = tt_descriptor_store

    # --- the rest

    def tt_get_program_id(self, operation):
        return [self.ids["xyz".index(operation.word)].int()]

    def tt_get_num_programs(self, operation):
        return [torch.tensor([self.grid["xyz".index(operation.word)]], dtype=torch.int32)]

    def tt_trans(self, operation, value):
        """It goes through shared memory, unless the tensor cores read it in that order."""
        if operation.results[0] not in self.kernel.for_products:
            self.count(value, ACROSS_COST)
        order = re.findall(r"\d+", operation.attributes["order"].partition(":")[2])
        return [value.permute(0, *(int(axis) + 1 for axis in order))]

    def tt_dot(self, operation, a, b, total):
        """Rows of zeros at a block's end are free: they lie past a tensor's end, and at a GPU's sizes blocks are full.
        """
        precision = operation.attributes.get("inputPrecision", "ieee")
        filled = a.to(total.dtype).any(-1).flip(-1).cummax(-1).values.float().mean().item()
        cost = DOT_COST.get(precision if a.dtype == torch.float32 else str(a.dtype), DOT_COST["half"])
        multiplied = math.prod(total.shape[1:]) * a.shape[-1]
        self.counts.work += multiplied * max(len(a), len(b)) / 16
        self.counts.products += 2 * multiplied * filled * self.running * cost
        return [dot(a, b, total, precision)]

    def tt_split(self, operation, value):
        return [value[..., 0], value[..., 1]]


def chosen(value, mask):
    """The elements of a value, in one dimension."""
    return value.reshape(-1) if mask is None else value[mask]


def placed(elements, mask, others):
    """The inverse: the elements in the shape of others, which stand where the mask is false."""
    return elements.view(others.shape) if mask is None else others.masked_scatter(mask, elements)


# {name of an operation: the method that is named after it}
METHODS = {name.replace("_", ".", 1): method for name, method in vars(Run).items() if name.startswith(("tt_", "scf_"))}
METHODS |= dict.fromkeys(("tt.print", "tt.assert", "llvm.intr.assume", "gpu.barrier", "ttg.barrier"), lambda *_: [])
KNOWN = {*METHODS, *SIMPLE, *TERMINATORS}
