"""Triton's IR (TTIR): a kernel's text as objects, and what its operations do to tensors, element by element.

Triton compiles each kernel to this IR before anything else. An operation stands on one line; its regions (the body of a
loop, the combining function of a reduction) stand between braces below it:

    %v_10 = tt.load %v_9, %mask, %other : tensor<256x!tt.ptr<f32>> loc(#loc39)
    results  name   operands              types                    line of the candidate's file

The texts of Triton 3.6 to 3.9 are read alike. The recorder that sends a text is not trusted: whatever makes no sense
raises Failed, or what Python raises by itself.
"""

import functools
import math
import re
from dataclasses import dataclass, field

import torch

from judge.verdict import Failed

DTYPES = {"i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
          "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
          "f8E5M2": torch.float8_e5m2, "f8E4M3FN": torch.float8_e4m3fn}
DEEPEST = 40  # regions within regions

NAME = r"%[\w$.-]+(?:#\d+)?"
LOCATION = re.compile(r' loc\(((?:"[^"]*"|[^()"]|\((?:[^()"]|"[^"]*")*\))*)\)')
OPERATION = re.compile(rf'(?:({NAME}(?::\d+)?(?:, {NAME}(?::\d+)?)*) = )?"?([a-z_]\w*\.[\w.]+)"?(.*)')
ATTRIBUTE = re.compile(r'([\w.]+) = (array<i32: [\d, ]+>|"[^"]*"|[\w.+-]+)')
PARAMETER = re.compile(rf"({NAME}): (!?[\w.]+(?:<[^(){{]*?>+(?=[ ,)]|$))?)")


def refused(what, line=None):
    return Failed(f"{what} is not available inside a Triton kernel without a GPU", "compile", line)


# ---------------------------------------------------------------------------------------------------------------------
# Objects


@dataclass(frozen=True)
class Type:
    shape: tuple  # () of a number
    dtype: torch.dtype  # int64 of a pointer
    pointee: str = ""  # of a pointer: the type that it points to


@functools.lru_cache(maxsize=4096)
def type_of(text) -> Type:
    """"tensor<16x16xf32>" is a block, "tensor<16x!tt.ptr<f32>>" a block of pointers, "i32" a number."""
    match = re.fullmatch(r"tensor<((?:\d+x)*)(.*)>", text)
    shape, element = ((), text) if match is None else (tuple(map(int, match[1].split("x")[:-1])), match[2])
    if element.startswith("!tt.ptr<"):
        return Type(shape, torch.int64, re.sub(r", \d+$", "", element[len("!tt.ptr<"):-1]))
    if element not in DTYPES:
        raise refused(f"the type {element[:40]}")
    return Type(shape, DTYPES[element])


@dataclass
class Operation:
    name: str
    results: list  # names of values
    operands: list
    text: str  # what stands between its name and its types
    types: list  # as text: of its operands, as far as they are written, and last of its result
    line: int | None  # of the candidate's file
    attributes: dict  # {name: text}
    regions: list = field(default_factory=list)  # a list of blocks each
    last_uses: list = field(default_factory=list)  # values of its block that nothing after it uses

    def integer(self, name) -> int:
        return int(self.attributes[name])

    @property
    def word(self) -> str:
        """The first word behind its name: of a comparison the predicate."""
        return re.match(r"\w+", self.text)[0]

    @functools.cached_property
    def type(self) -> Type:
        return type_of(self.types[-1])

    @functools.cached_property
    def constant(self) -> torch.Tensor:
        """Of arith.constant: true, 7, 1.5, dense<0xFF800000> (the bits of a float)."""
        kind = self.type if self.types else Type((), torch.bool)
        text = re.sub(r"^dense<(.*)>$", r"\1", self.text)
        if text in ("true", "false"):
            value = torch.tensor(text == "true")
        elif not kind.dtype.is_floating_point:
            value = torch.tensor(int(text))
        elif text.startswith("0x"):
            value = torch.tensor(list(int(text, 16).to_bytes(8, "little")), dtype=torch.uint8)
            value = value[:kind.dtype.itemsize].view(kind.dtype)
        else:
            value = torch.tensor(float(text), dtype=torch.float64)
        return value.to(kind.dtype).view(1, *[1] * len(kind.shape)).expand(1, *kind.shape)


@dataclass
class Block:
    """Operations that run one after the other. label: "^bb1", if it is jumped to."""

    label: str
    arguments: list
    operations: list = field(default_factory=list)


@dataclass
class Function:
    name: str
    public: bool  # only the kernel itself is
    parameters: list  # (name, type as text)
    blocks: list


def all_operations(blocks):
    """Those of regions, too."""
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from all_operations(region)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a text


class Parser:
    """Reads the lines of a text from the first to the last."""

    def __init__(self, text):
        self.lines, self.locations = [], {}
        for line in text.split("\n"):
            if line.startswith("#loc"):
                name, _, place = line.partition(" = loc(")
                self.locations[name] = place
            elif line.strip():
                self.lines.append(line.strip())
        self.position = 0

    def functions(self) -> dict:
        functions = {}
        while self.position < len(self.lines):
            line = LOCATION.sub("", self.lines[self.position])
            self.position += 1
            header = re.match(r"tt\.func (\w+ )?@\"?([\w$.<>, ]+)\"?\(", line)
            if header:
                blocks, _ = self.region(0)
                functions[header[2]] = Function(header[2], header[1] == "public ", PARAMETER.findall(line), blocks)
        return functions

    def region(self, depth):
        """(its blocks, the line that closes it)"""
        if depth > DEEPEST:
            raise refused("such deep nesting")
        blocks = [Block("", [])]
        while not self.lines[self.position].startswith("}"):
            line = LOCATION.sub("", self.lines[self.position])
            if not line.startswith("^"):
                blocks[-1].operations.append(self.operation(depth))
                continue
            if not blocks[-1].operations:
                blocks.pop()
            blocks.append(Block(re.match(r"\^\w+", line)[0], [name for name, _ in PARAMETER.findall(line)]))
            self.position += 1
        for block in blocks:
            note_last_uses(block, blocks)
        self.position += 1
        return blocks, LOCATION.sub("", self.lines[self.position - 1])

    def operation(self, depth) -> Operation:
        raw = self.lines[self.position]
        self.position += 1
        line = LOCATION.sub("", raw)
        results, name, rest = OPERATION.fullmatch(line).groups()
        text, types = split_types(rest)
        operation = Operation(name, result_names(results or ""), re.findall(NAME, re.sub('"[^"]*"', "", text)),
                              text.strip(), types, self.line_of(raw), dict(ATTRIBUTE.findall(text)))
        closing = line
        while closing.endswith("{"):  # `({`, `} else {`, `} do {`, `}, {`
            blocks, closing = self.region(depth + 1)
            operation.regions.append(blocks)
        if line.endswith("({"):
            operation.types = split_types(closing)[1]
        names, body = operation.operands, operation.regions[0][0] if operation.regions else None
        if name == "scf.for":  # %i = %low to %high step %step iter_args(%inside = %outside, ...)
            body.arguments = [names[0], *names[4::2]]
            operation.operands = [*names[1:4], *names[5::2]]
        elif name == "scf.while":  # (%inside = %outside, ...)
            body.arguments, operation.operands = names[0::2], names[1::2]
        return operation

    def line_of(self, text, depth=0) -> int | None:
        """The candidate's line of a location: of several, the innermost that is not in Triton's own library."""
        found = re.search(r'"([^"]*)":(\d+):\d+', text)
        if found:
            return None if "/triton/language/" in found[1] else int(found[2])
        for alias in re.findall(r"#loc\d*", text) if depth < DEEPEST else ():
            line = self.line_of(self.locations.get(alias, ""), depth + 1)
            if line is not None:
                return line
        return None


def result_names(text) -> list:
    """"%a, %b" are two results; "%c:2" are %c#0 and %c#1."""
    names = []
    for result in filter(None, text.split(", ")):
        name, _, count = result.partition(":")
        names += [f"{name}#{i}" for i in range(min(int(count), 1000))] if count else [name]
    return names


def split_types(text):
    """(what stands before the types, the types) of "%a, %b {axis = 0 : i32} : (tensor<16xf32>, i32) -> f32"."""
    before, colon, signature = text.removesuffix("{").rpartition(" : ")
    if not colon or "}" in signature or signature.count("(") != signature.count(")"):
        return text, []
    types, depth, current = [], 0, ""
    for character in re.sub(r" (->|to|\*) ", ", ", signature) + ",":
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            types.append(current.strip(" ()"))
            current = ""
        else:
            current += character
    return before, types


def names_used(operation) -> set:
    inner = all_operations([block for region in operation.regions for block in region])
    return set(operation.operands).union(*(each.operands for each in inner))


def note_last_uses(block, blocks):
    """Note at each operation which of the block's own values it is the last to use, so that their memory is freed."""
    own, later = set(block.arguments), set()
    for other in blocks:
        for operation in other.operations:
            if other is block:
                own.update(operation.results)
            else:
                later |= names_used(operation)
    for operation in reversed(block.operations):
        used = names_used(operation)
        operation.last_uses = list((used & own) - later)
        later |= used


# ---------------------------------------------------------------------------------------------------------------------
# Integers without a sign: PyTorch has none


def unsigned(x):
    """Their values as int64. Those of 64 bits stay as they are."""
    if x.dtype == torch.bool or x.dtype == torch.int64:
        return x.long()
    return x.long() & ((1 << 8 * x.element_size()) - 1)


def in_order(x):
    """Integers that compare as these do without their sign."""
    return unsigned(x) ^ torch.iinfo(torch.int64).min


def quotient(a, b):
    """Rounded to zero. A division by zero is undefined on a GPU; here it gives zero."""
    return torch.where(b == 0, 0, torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc"))


def unsigned_quotient(a, b):
    """Half of `a` has no sign's bit; what is left over decides the last bit."""
    a, b = unsigned(a), unsigned(b)
    half = quotient(shift_right(a, torch.ones_like(a)), b) * 2
    larger = in_order(a - half * b) >= in_order(b)
    return torch.where(b < 0, (in_order(a) >= in_order(b)).long(), half + larger)


def high_product(a, b):
    """The upper half of a product's bits, from products of the operands' halves."""
    half = 4 * a.element_size()
    low = (1 << half) - 1
    x, y = unsigned(a), unsigned(b)
    middle = (x >> half & low) * (y & low) + ((x & low) * (y & low) >> half & low)
    other = (x & low) * (y >> half & low) + (middle & low)
    return ((x >> half & low) * (y >> half & low) + (middle >> half & low) + (other >> half & low)).to(a.dtype)


def shift_right(a, b):
    """The bits that enter on the left are zeros."""
    bits = 8 * a.element_size()
    entered = torch.bitwise_left_shift(torch.full_like(a, -1), (bits - b).clamp(max=bits - 1))
    return torch.where(b == 0, a, torch.bitwise_right_shift(a, b) & ~entered)


# ---------------------------------------------------------------------------------------------------------------------
# Operations, element by element


def add(a, b):
    return a ^ b if a.dtype == torch.bool else a + b


def fused(a, b, c):
    return (a.double() * b.double() + c.double()).to(c.dtype)


ELEMENTWISE = {
    "arith.addf": torch.add, "arith.subf": torch.sub, "arith.mulf": torch.mul, "arith.divf": torch.div,
    "tt.precise_divf": torch.div, "arith.remf": torch.fmod, "arith.negf": torch.neg, "math.fma": fused,
    "arith.maxnumf": torch.fmax, "arith.minnumf": torch.fmin,  # these two ignore NaN, the next two keep it
    "arith.maximumf": torch.maximum, "arith.minimumf": torch.minimum,
    "tt.clampf": lambda x, low, high: torch.fmin(torch.fmax(x, low), high),
    "arith.addi": add, "arith.subi": torch.sub, "arith.muli": torch.mul, "tt.mulhiui": high_product,
    "arith.divsi": quotient, "arith.remsi": lambda a, b: a - quotient(a, b) * b,
    "arith.divui": unsigned_quotient, "arith.remui": lambda a, b: a - unsigned_quotient(a, b) * b,
    "arith.maxsi": torch.maximum, "arith.minsi": torch.minimum,
    "arith.maxui": lambda a, b: torch.where(in_order(a) > in_order(b), a, b),
    "arith.minui": lambda a, b: torch.where(in_order(a) < in_order(b), a, b),
    "arith.andi": torch.bitwise_and, "arith.ori": torch.bitwise_or, "arith.xori": torch.bitwise_xor,
    "arith.shli": torch.bitwise_left_shift, "arith.shrsi": torch.bitwise_right_shift, "arith.shrui": shift_right,
    "math.exp": torch.exp, "math.exp2": torch.exp2, "math.log": torch.log, "math.log2": torch.log2,
    "math.sqrt": torch.sqrt, "tt.precise_sqrt": torch.sqrt, "math.rsqrt": torch.rsqrt, "math.sin": torch.sin,
    "math.cos": torch.cos, "math.erf": torch.erf, "math.tanh": torch.tanh, "math.absf": torch.abs,
    "math.absi": torch.abs, "math.floor": torch.floor, "math.ceil": torch.ceil}

CASTS = {"arith.sitofp", "arith.uitofp", "arith.extsi", "arith.extui", "arith.trunci", "arith.extf", "arith.truncf",
         "arith.fptosi", "arith.fptoui", "tt.fp_to_fp"}


def convert(name, x, dtype):
    """A cast. name: the operation's, which says whether integers have a sign."""
    if dtype == torch.bool:
        return (x & 1).bool()
    if name in ("arith.uitofp", "arith.extui"):
        x = unsigned(x)
    elif x.dtype == torch.bool:
        x = -x.to(torch.int8)
    if name == "arith.fptoui":
        x = x.to(torch.int64)
    if dtype in (torch.float8_e5m2, torch.float8_e4m3fn):  # a GPU gives the largest number where PyTorch overflows
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


COMPARISONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def compare(predicate, a, b):
    """slt, ult: of integers with and without a sign. olt, ult: of floats; false, or true, where one is NaN."""
    letter, function = predicate[0], COMPARISONS.get(predicate[-2:])
    if not a.is_floating_point():
        return function(in_order(a), in_order(b)) if letter == "u" else function(a, b)
    undefined = a.isnan() | b.isnan()
    if predicate in ("ord", "uno"):
        return ~undefined if predicate == "ord" else undefined
    return function(a, b) | undefined if letter == "u" else function(a, b) & ~undefined


def select(condition, a, b):
    """torch.where with a condition that may have fewer dimensions, and for fp8."""
    condition = condition.view(*condition.shape, *[1] * (a.dim() - condition.dim()))
    if a.element_size() == 1:
        return torch.where(condition, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)
    return torch.where(condition, a, b)


def round_to_tf32(x):
    """fp32 with the 10 bits of mantissa that the tensor cores keep."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def dot(a, b, total, precision):
    """total + a @ b, summed in fp32, or in fp64 for integers and fp64."""
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
    what the one before it has left; otherwise what is returned has no meaning then.
    """
    places, place_of_each = index.unique(return_inverse=True)
    if kind in IN_ANY_ORDER and not ordered and len(places) < len(index):
        cells[places] = cells[places].scatter_reduce(0, place_of_each, values, IN_ANY_ORDER[kind])
        return values
    before = torch.empty_like(values)
    size = len(index) if len(places) == len(index) else 1  # of what can be changed at once
    for start in range(0, len(index), size):
        now = slice(start, start + size)
        before[now] = cells[index[now]]
        after = ATOMICS[kind](before[now], values[now])
        if compared is not None:
            after = torch.where(before[now] == compared[now], after, before[now])
        cells[index[now]] = after
    return before


# ---------------------------------------------------------------------------------------------------------------------
# CUDA's libdevice: functions by their names in it, without "__nv_", "fast_" and the letters of a type

ROUNDINGS = {"rd": torch.floor, "ru": torch.ceil, "rn": torch.round, "rz": torch.trunc}
LIBDEVICE = {name: getattr(torch, name) for name in (
    "abs acos acosh add asin asinh atan atan2 atanh ceil copysign cos cosh div erf erfc erfinv exp exp2 expm1 floor "
    "fmax fmin fmod hypot isinf isnan ldexp lgamma log log10 log1p log2 mul nextafter pow rsqrt signbit sin sinh sqrt "
    "sub tan tanh trunc").split()}


def round_half_away(x):
    return torch.copysign(torch.floor(x.abs() + 0.5), x)


def bits_set(x):
    return sum(unsigned(x) >> i & 1 for i in range(8 * x.element_size()))


def leading_zeros(x):
    bits = 8 * x.element_size()
    return sum((shift_right(x, torch.full_like(x, i)) == 0).int() for i in range(bits))


LIBDEVICE |= {
    "fabs": torch.abs, "llabs": torch.abs, "finite": torch.isfinite, "isfinite": torch.isfinite,
    "rint": torch.round, "nearbyint": torch.round, "llrint": torch.round, "round": round_half_away,
    "llround": round_half_away, "cbrt": lambda x: torch.copysign(x.abs() ** (1 / 3), x),
    "rcbrt": lambda x: torch.copysign(x.abs() ** (-1 / 3), x), "exp10": lambda x: 10 ** x, "rcp": torch.reciprocal,
    "fdivide": torch.div, "powi": torch.pow, "fma": fused, "fdim": lambda a, b: (a - b).clamp(min=0),
    "saturate": lambda x: x.clamp(0, 1), "scalbn": torch.ldexp, "tgamma": lambda x: torch.exp(torch.lgamma(x)),
    "remainder": lambda a, b: a - b * torch.round(a / b), "sinpi": lambda x: torch.sin(math.pi * x),
    "cospi": lambda x: torch.cos(math.pi * x), "normcdf": torch.special.ndtr, "normcdfinv": torch.special.ndtri,
    "erfcx": torch.special.erfcx, "erfcinv": lambda x: torch.erfinv(1 - x), "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1, "cyl_bessel_i0": torch.special.i0, "cyl_bessel_i1": torch.special.i1,
    "umulhi": high_product, "umul64hi": high_product, "popc": bits_set, "clz": leading_zeros,
    "ffs": lambda x: torch.where(x == 0, 0, bits_set(x ^ (x - 1)))}


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
