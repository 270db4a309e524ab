"""Reads Triton's IR (TTIR): a kernel's text becomes objects.

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

from judge.verdict import Failed, describe

DTYPES = {"i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
          "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
          "f8E5M2": torch.float8_e5m2, "f8E4M3FN": torch.float8_e4m3fn}
SPELLINGS = {"tt.dot_scaled": "tl.dot_scaled", "tt.elementwise_inline_asm": "tl.inline_asm_elementwise"}
DEEPEST = 40  # regions within regions
LONGEST, LONGEST_LINE = 8_000_000, 50_000  # characters of a text
LARGEST = 1 << 20  # elements of a block: Triton's own limit

NAME = r"%[\w$.-]+(?:#\d+)?"
LOCATION = re.compile(r' loc\(((?:"[^"]*"|[^()"]|\((?:[^()"]|"[^"]*")*\))*)\)')
OPERATION = re.compile(rf'(?:({NAME}(?::\d+)?(?:, {NAME}(?::\d+)?)*) = )?"?([a-z_]\w*\.[\w.]+)"?(.*)')
ATTRIBUTE = re.compile(r'([\w.]+) = (array<i32: [\d, ]+>|"[^"]*"|[\w.+-]+)')
TYPE = r"(?:!?[\w.]+|(?=<))(?:<[^(){]*?>+(?=[ ,)]|$))?"  # of a descriptor sometimes without a name: <16x16xf32>
PARAMETER = re.compile(rf"({NAME}): ({TYPE})")


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
        if not kind.dtype.is_floating_point:
            value = torch.tensor(int({"true": 1, "false": 0}.get(text, text)))
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
    public: bool  # only the kernel itself is
    parameters: list  # (name, type as text)
    blocks: list


@dataclass
class Kernel:
    functions: dict  # {name: Function}
    main: Function
    largest: int = 1  # elements of its largest block
    in_order: bool = False  # do its programs have to run one after the other?
    for_products: set = field(default_factory=set)  # values that only tt.dot uses


def all_operations(blocks):
    """Those of regions, too."""
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from all_operations(region)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a text


def parse_kernel(text, known) -> Kernel:
    """Read a kernel's TTIR. known: names of operations. Raises Failed if it uses others, or makes no sense."""
    try:
        functions = Parser(text).functions()
        [main] = [function for function in functions.values() if function.public]
        kernel = Kernel(functions, main)
        for function in functions.values():
            examine(kernel, list(all_operations(function.blocks)), known)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Failed(f"the kernel's IR makes no sense ({describe(error)[0]})", "compile") from None
    return kernel


def examine(kernel, operations, known):
    """Note what the operations of one of a kernel's functions say about the kernel."""
    used_otherwise = set().union(*(operation.operands for operation in operations if operation.name != "tt.dot"))
    used = used_otherwise.union(*(operation.operands for operation in operations))
    kernel.for_products |= used - used_otherwise
    for operation in operations:
        if operation.name not in known:
            raise refused(SPELLINGS.get(operation.name, operation.name), operation.line)
        if operation.name in ("tt.atomic_cas", "tt.atomic_rmw"):
            kernel.in_order |= operation.name == "tt.atomic_cas" or not used.isdisjoint(operation.results)
        for text in operation.types:
            if text.startswith("tensor<"):
                kernel.largest = max(kernel.largest, math.prod(type_of(text).shape))
    if kernel.largest > LARGEST:
        raise refused(f"a block of more than {LARGEST} elements")


class Parser:
    """Reads the lines of a text from the first to the last."""

    def __init__(self, text):
        if len(text) > LONGEST or any(len(line) > LONGEST_LINE for line in text.split("\n")):
            raise refused("a kernel of such length")
        self.locations = {}
        for line in text.split("\n"):
            if line.startswith("#loc"):
                name, _, place = line.partition(" = loc(")
                self.locations[name] = place
        self.lines = filter(None, map(str.strip, text.split("\n")))  # an iterator: each line is read once

    def functions(self) -> dict:
        functions = {}
        for line in self.lines:
            line = LOCATION.sub("", line)
            header = re.match(r"tt\.func (\w+ )?@\"?([\w$.<>, ]+)\"?\(", line)
            if header:
                blocks, _ = self.region(0)
                functions[header[2]] = Function(header[1] == "public ", PARAMETER.findall(line), blocks)
        return functions

    def region(self, depth):
        """(its blocks, the line that closes it)"""
        if depth > DEEPEST:
            raise refused("such deep nesting")
        blocks = [Block("", [])]
        for raw in self.lines:
            line = LOCATION.sub("", raw)
            if line.startswith("}"):
                if len(blocks) == 1:  # another block could use its values, too
                    note_last_uses(blocks[0])
                return blocks, line
            if line.startswith("^"):
                if not blocks[-1].operations:
                    blocks.pop()
                blocks.append(Block(re.match(r"\^\w+", line)[0], [name for name, _ in PARAMETER.findall(line)]))
            else:
                blocks[-1].operations.append(self.operation(raw, line, depth))
        raise ValueError("a region without an end")

    def operation(self, raw, line, depth) -> Operation:
        """raw: the line with its location"""
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
        names = operation.operands
        if name == "scf.for":  # %i = %low to %high step %step iter_args(%inside = %outside, ...)
            operation.regions[0][0].arguments = [names[0], *names[4::2]]
            operation.operands = [*names[1:4], *names[5::2]]
        elif name == "scf.while":  # (%inside = %outside, ...)
            operation.regions[0][0].arguments = names[0::2]
            operation.operands = names[1::2]
        return operation

    def line_of(self, text, depth=0) -> int | None:
        """The candidate's line of a location: of several, the innermost that is not in Triton's own library."""
        found = re.search(r'"([^"]*)":(\d+):\d+', text)
        if found:
            return None if "/triton/language/" in found[1] else int(found[2])
        aliases = re.findall(r"#loc\d*", text) if depth < DEEPEST else ()
        lines = (self.line_of(self.locations.get(alias, ""), depth + 1) for alias in aliases)
        return next((line for line in lines if line is not None), None)


def result_names(text) -> list:
    """"%a, %b" are two results; "%c:2" are %c#0 and %c#1."""
    names = []
    for name, count in re.findall(rf"({NAME})(?::(\d+))?", text):
        names += [f"{name}#{i}" for i in range(min(int(count), 1000))] if count else [name]
    return names


def split_types(text):
    """(what stands before the types, the types) of "%a, %b {axis = 0 : i32} : (tensor<16xf32>, i32) -> f32"."""
    before, colon, signature = text.removesuffix("{").rpartition(" : ")
    if not colon or "}" in signature or signature.count("(") != signature.count(")"):
        return text, []
    return before, re.findall(TYPE, signature.replace(" to ", ", "))


def note_last_uses(block):
    """Note at each operation which of its block's values it is the last to use, so that their memory is freed."""
    own = set(block.arguments).union(*(operation.results for operation in block.operations))
    later = set()
    for operation in reversed(block.operations):
        inside = all_operations([Block("", [], [operation])])
        used = own & set().union(*(each.operands for each in inside))
        operation.last_uses = list(used - later)
        later |= used
