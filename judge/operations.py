"""What the operations of Triton's IR do to values, if they need no more than their operands; and memory.

A value is a tensor whose first dimension is the program (interpreter.py). That dimension has one element where all
programs have the same value.
"""

import math
import operator
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from judge.ir import refused, type_of
from judge.verdict import Failed

BYTES = 40  # bits of a pointer that count bytes; above them stands the number of a storage
TABLES = tomllib.loads(Path(__file__).with_name("operations.toml").read_text())
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # memory is read and written as plain bits

# ---------------------------------------------------------------------------------------------------------------------
# Integers without a sign: NumPy computes with them, PyTorch does not


def without_sign(x):
    """A tensor's integers, with the same bits, as an array of integers without a sign."""
    return x.numpy().view(f"u{x.element_size()}")


def unsigned(function):
    """A function of tensors, from one of arrays of integers without a sign."""
    def apply(*values):
        with numpy.errstate(divide="ignore"):  # see quotient
            result = function(*map(without_sign, values))
        return torch.from_numpy(result).to(values[0].dtype)
    return apply


def quotient(a, b):
    """Rounded to zero. A division by zero is undefined on a GPU; here it gives zero."""
    return torch.where(b == 0, 0, torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc"))


@unsigned
def high_product(a, b):
    """The upper half of a product's bits."""
    wide = a.astype(object if a.itemsize == 8 else numpy.uint64)  # Python's integers have any length
    return (wide * b >> 8 * a.itemsize).astype(a.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Operations, element by element


def fused(a, b, c):
    return (a.double() * b.double() + c.double()).to(c.dtype)


def functions(table, package) -> dict:
    """{name in Triton's IR or in libdevice: function} of a table of operations.toml."""
    return {name: operator.attrgetter(path)(package) for name, path in TABLES[table].items()}


ELEMENTWISE = functions("elementwise", torch) | {
    "arith.addi": lambda a, b: a ^ b if a.dtype == torch.bool else a + b,
    "arith.divsi": quotient, "arith.remsi": lambda a, b: a - quotient(a, b) * b,
    "tt.clampf": lambda x, low, high: torch.fmin(torch.fmax(x, low), high), "math.fma": fused,
    "tt.mulhiui": high_product,
    **{name: unsigned(function) for name, function in functions("unsigned", numpy).items()}}

CASTS = {"arith.sitofp", "arith.uitofp", "arith.extsi", "arith.extui", "arith.trunci", "arith.extf", "arith.truncf",
         "arith.fptosi", "arith.fptoui", "tt.fp_to_fp"}


def convert(name, x, dtype):
    """A cast. name: the operation's, which says whether integers have a sign."""
    if dtype == torch.bool:
        return (x & 1).bool()
    if name in ("arith.uitofp", "arith.extui"):
        x = torch.from_numpy(without_sign(x))
    elif x.dtype == torch.bool:
        x = -x.to(torch.int8)
    if name == "arith.fptoui":  # on a GPU a negative number becomes zero
        x = x.clamp(min=0).to(torch.int64)
    if dtype in (torch.float8_e5m2, torch.float8_e4m3fn):  # a GPU gives the largest number where PyTorch overflows
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARISONS |= {"rd": lambda a, b: True, "no": lambda a, b: False}  # ord and uno: is none NaN, is one?


def compare(predicate, a, b):
    """slt, ult: of integers with and without a sign. olt, ult: of floats; false, or true, where one is NaN."""
    letter, function = predicate[0], COMPARISONS[predicate[-2:]]
    if not a.is_floating_point():
        return unsigned(function)(a, b).bool() if letter == "u" else function(a, b)
    undefined = a.isnan() | b.isnan()
    return function(a, b) | undefined if letter == "u" else function(a, b) & ~undefined


def check_shapes(values):
    """Raise ValueError unless blocks have one shape. PyTorch would broadcast, and a forged text fill the memory."""
    if any(value.shape[1:] != values[0].shape[1:] for value in values):
        raise ValueError("shapes of operands")


def select(condition, a, b):
    """torch.where with a condition that may have fewer dimensions."""
    check_shapes([a, b])
    return torch.where(condition.view(*condition.shape, *[1] * (a.dim() - condition.dim())), a, b)


def round_to_tf32(x):
    """fp32 with the 10 bits of mantissa that the tensor cores keep."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def dot(a, b, total, precision):
    """total + a @ b, summed in fp32, or in fp64 for integers and fp64."""
    if total.shape[1:] != (*a.shape[1:-1], b.shape[-1]):
        raise ValueError("shapes of a product")
    if precision == "tf32" and a.dtype == torch.float32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    sums = torch.float32
    if total.dtype == torch.float64 or not total.is_floating_point():
        sums = torch.float64
    return (total.to(sums) + torch.matmul(a.to(sums), b.to(sums))).to(total.dtype)


ATOMICS = {"fadd": torch.add, "add": torch.add, "max": torch.maximum, "min": torch.minimum,
           "umax": ELEMENTWISE["arith.maxui"], "umin": ELEMENTWISE["arith.minui"], "and": torch.bitwise_and,
           "or": torch.bitwise_or, "xor": torch.bitwise_xor, "exch": lambda before, value: value}
IN_ANY_ORDER = {"fadd": "sum", "add": "sum", "max": "amax", "min": "amin"}  # names of torch.scatter_reduce


def atomic(kind, cells, index, values, compared=None, ordered=True):
    """Change cells[index], and return what stood there before. kind: one of ATOMICS.

    compared: a value is stored only where this is found. ordered: where an index comes several times, each value meets
    what the one before it has left; otherwise what is returned may have no meaning.
    """
    if kind in IN_ANY_ORDER and not ordered:
        cells.scatter_reduce_(0, index, values, IN_ANY_ORDER[kind])
        return values
    before = torch.empty_like(values)
    size = len(index) if len(index.unique()) == len(index) else 1  # of what can be changed at once
    for start in range(0, len(index), size):
        now = slice(start, start + size)
        before[now] = cells[index[now]]
        after = ATOMICS[kind](before[now], values[now])
        if compared is not None:
            after = torch.where(before[now] == compared[now], after, before[now])
        cells[index[now]] = after
    return before


# ---------------------------------------------------------------------------------------------------------------------
# CUDA's libdevice

ROUNDINGS = {"rd": torch.floor, "ru": torch.ceil, "rn": torch.round, "rz": torch.trunc}


def round_half_away(x):
    return torch.copysign(torch.floor(x.abs() + 0.5), x)


@unsigned
def leading_zeros(x):
    return sum(x >> i == 0 for i in range(8 * x.itemsize))


LIBDEVICE = functions("libdevice", torch) | {
    "round": round_half_away, "llround": round_half_away, "cbrt": lambda x: torch.copysign(x.abs() ** (1 / 3), x),
    "rcbrt": lambda x: torch.copysign(x.abs() ** (-1 / 3), x), "exp10": lambda x: 10 ** x,
    "fma": fused, "fdim": lambda a, b: (a - b).clamp(min=0), "saturate": lambda x: x.clamp(0, 1),
    "tgamma": lambda x: torch.exp(torch.lgamma(x)), "remainder": lambda a, b: a - b * torch.round(a / b),
    "sinpi": lambda x: torch.sin(math.pi * x), "cospi": lambda x: torch.cos(math.pi * x),
    "erfcinv": lambda x: torch.erfinv(1 - x), "umulhi": high_product, "umul64hi": high_product,
    "clz": leading_zeros, "popc": unsigned(numpy.bitwise_count),
    "ffs": unsigned(lambda x: numpy.bitwise_count(x ^ (x - 1)) * (x != 0))}


def libdevice(symbol):
    """The function of a symbol such as __nv_tanhf, __nv_fast_expf, __nv_fmaf_rn. Raises Failed."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    conversion = re.fullmatch(r"(?:float|double)2(?:int|uint|ll|ull)_(r[dunz])", name)
    if conversion:
        return ROUNDINGS[conversion[1]]
    name = re.sub("_r[nduz]$", "", name)  # rounding otherwise than to the nearest is a difference in the last bit
    name = re.sub("^[df](add|sub|mul|div|rcp|sqrt)$", r"\1", name)
    for spelling in (name, name.removesuffix("f"), name.removesuffix("d"), name.removesuffix("ll")):
        if spelling in LIBDEVICE:
            return LIBDEVICE[spelling]
    raise refused(f"libdevice's {symbol[:40]}")


# ---------------------------------------------------------------------------------------------------------------------
# Operations with one result, which need no more than their operands


def splat(operation, value):
    shape = operation.type.shape
    return value.view(-1, *[1] * len(shape)).expand(-1, *shape)


def gather(operation, source, index):
    programs = max(len(source), len(index))
    source, index = [value.expand(programs, *value.shape[1:]) for value in (source, index)]
    return source.gather(operation.integer("axis") + 1, index.long())


def histogram(operation, values, mask=True):
    bins = operation.type.shape[0]
    inside = (values >= 0) & (values < bins) & mask
    counted = torch.zeros(len(inside), bins, dtype=operation.type.dtype)
    return counted.scatter_add(1, values.long().clamp(0, bins - 1).expand(inside.shape), inside.to(counted.dtype))


def add_pointer(operation, pointers, offset):
    return pointers + offset.long() * type_of(type_of(operation.types[0]).pointee).dtype.itemsize


def bitcast(operation, value):
    return value if operation.type.pointee else value.contiguous().view(operation.type.dtype)


def same_type(function):
    """An operation whose result has the type of its last operand, from a function of the operands."""
    return lambda operation, *values: function(*values).to(values[-1].dtype)


def extern(operation, *values):
    return libdevice(operation.attributes["symbol"].strip('"'))(*values).to(operation.type.dtype)


SIMPLE = {
    "arith.constant": lambda operation: operation.constant,
    "ub.poison": lambda operation: torch.zeros(1, *operation.type.shape, dtype=operation.type.dtype),
    "tt.make_range": lambda operation: operation.integer("start") + torch.arange(
        operation.type.shape[0], dtype=torch.int32)[None],
    "tt.splat": splat, "tt.broadcast": lambda operation, x: x.expand(-1, *operation.type.shape),
    "tt.reshape": lambda operation, x: x.reshape(-1, *operation.type.shape),
    "tt.unsplat": lambda operation, x: x.reshape(-1),
    "tt.expand_dims": lambda operation, x: x.unsqueeze(operation.integer("axis") + 1),
    "tt.join": lambda operation, *both: torch.stack(torch.broadcast_tensors(*both), -1),
    "tt.cat": lambda operation, *both: torch.cat(torch.broadcast_tensors(*both), 1),
    "tt.gather": gather, "tt.histogram": histogram, "tt.addptr": add_pointer, "tt.extern_elementwise": extern,
    "arith.select": lambda operation, condition, a, b: select(condition, a, b),
    **dict.fromkeys(("tt.bitcast", "arith.bitcast"), bitcast),
    **dict.fromkeys(("tt.ptr_to_int", "tt.int_to_ptr"), lambda operation, x: x),
    **dict.fromkeys(("arith.cmpi", "arith.cmpf"), lambda operation, a, b: compare(operation.word, a, b)),
    **dict.fromkeys(CASTS, lambda operation, x: convert(operation.name, x, operation.type.dtype)),
    **{name: same_type(function) for name, function in ELEMENTWISE.items()}}
SAME_SHAPES = {*ELEMENTWISE, "arith.cmpi", "arith.cmpf", "tt.addptr", "tt.join"}


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Memory:
    """The storages of a launch's tensors. Nothing else can be reached."""

    def __init__(self):
        self.numbers, self.storages = {}, {}  # {address: number}, {number: its bytes as a tensor}

    def argument(self, kind, value):
        """An argument as a value, the same in all programs."""
        if kind.startswith("!tt.tensordesc"):
            base, shape, strides = value
            base = self.argument("!tt.ptr<i8>", base)
            return Descriptor(base, torch.tensor(shape).view(-1, 1), torch.tensor(strides).view(-1, 1), kind)
        if value is None:
            return torch.zeros(1, dtype=torch.int64)
        if not kind.startswith("!tt.ptr"):
            if type(value) is int:
                value = (value + 2 ** 63) % 2 ** 64 - 2 ** 63  # an unsigned one of 64 bits wraps around
            return torch.tensor([value]).to(type_of(kind).dtype)
        storage = value.untyped_storage()
        number = self.numbers.setdefault(storage.data_ptr(), len(self.numbers) + 1)
        self.storages[number] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return torch.tensor([(number << BYTES) + value.storage_offset() * value.element_size()])

    def find(self, addresses, size, kind, line):
        """[(a storage as integers of `size` bytes, which of the addresses lie there, their indices)]. Raises Failed."""
        if size > 1 and (addresses & (size - 1)).any():
            raise Failed(f"misaligned {kind}", line=line)
        low, high = [int(each) >> BYTES for each in addresses.aminmax()]
        places = []
        for number in [low] if low == high else (addresses >> BYTES).unique().tolist():
            here = slice(None) if low == high else addresses >> BYTES == number
            index = (addresses[here] - (number << BYTES)) >> (size.bit_length() - 1)
            storage = self.storages.get(number, torch.empty(0, dtype=torch.uint8))
            cells = storage[:len(storage) // size * size].view(BITS[size])
            last = int(index.max())
            if last >= len(cells):
                where = f"{last - len(cells) + 1} elements past the end"
                if number not in self.storages:
                    where = "no tensor there"
                if last * size >> (BYTES - 1):
                    where = "before a tensor's beginning"
                raise Failed(f"out-of-bounds {kind} ({where})", line=line)
            places.append((cells, here, index))
        return places


@dataclass
class Descriptor:
    """A tensor descriptor: a value that stands for a whole tensor, and is read and written block by block."""

    base: torch.Tensor
    shape: list  # of values
    strides: list
    kind: str  # !tt.tensordesc<16x16xf32>, <16x16xf32>, !tt.tensordesc<tensor<16x16xf32>>

    @property
    def type(self):
        """Of a block."""
        return type_of("tensor<" + self.kind.split("<")[-1].rstrip(">") + ">")

    def block(self, indices):
        """(pointers, mask) of the block that begins at the indices. An index may be all of a dimension's by itself."""
        lengths = self.type.shape
        pointers, mask = self.base.view(-1, *[1] * len(lengths)), torch.ones(1, dtype=torch.bool)
        for axis, (index, size, stride) in enumerate(zip(indices, self.shape, self.strides)):
            if index.dim() == 1:
                index = index[:, None] + torch.arange(lengths[axis])
            place = index.long().view(len(index), *[1] * axis, -1, *[1] * (len(lengths) - axis - 1))
            mask = mask & (place >= 0) & (place < shaped(size, place))
            pointers = pointers + place * shaped(stride, place) * self.type.dtype.itemsize
        return pointers, mask


def shaped(number, value):
    """One number for each program, with as many dimensions as a value."""
    return number.view(-1, *[1] * (value.dim() - 1))
