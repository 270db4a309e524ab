"""Triton kernels where there is no GPU, second half: run in numpy.

    interpreter = Interpreter(kernels)                    of compiler.build; from now on this process interprets
    interpreter.launch(name, grid, arguments, memory)     every access is checked; `memory` says what it cost

Triton's own interpreter runs one program of the grid after the other, about a millisecond each, nearly all of it
Python. This one runs them in lockstep, as a GPU does: every value has one more dimension in front, (programs, *block),
or (1, *block) where all programs agree, and one numpy call serves all programs. When a branch or a loop bound differs
between programs, what has been stored is taken back and the programs run one by one.

Where it matters for correctness it computes as the hardware does: an fp32 `tl.dot` rounds its operands to TF32 unless
told otherwise (`input_precision="ieee"` or "tf32x3"), and an access outside every tensor is an error.
"""

import inspect
import math
import types

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime import jit
from triton.runtime.interpreter import TensorHandle

from judge.compiler import FILE, KernelError

# What one element of an operation costs: how many fp32 FLOPs at full rate an H200 does in that time. What is not named
# costs 1. Measured by results/instructions.py (which says 10 for exp and sqrt, as results/README.md explains).
COST = {np.exp: 15, np.exp2: 15, np.log: 50, np.log2: 50, np.sqrt: 15, np.sin: 70, np.cos: 70, np.divide: 14,
        np.fmod: 30, np.floor: 10, np.ceil: 10}
INTEGER_DIVISION, UNIFORM_DIVISION, PRECISE_DIVISION, FMA, ERF = 30, 2, 30, 2, 60
LIBDEVICE = {"sin": 70, "cos": 70, "erf": ERF, "log": 50, "exp": 15, "sqrt": 15, "rsqrt": 15, "tanh": 40, "pow": 250,
             "fast_powf": 250}  # others: 60
# The same for a FLOP of tl.dot, by what its right operand is like in memory: neighbours along K, neighbours along N
# (which the tensor cores take as they are only if they have 16 bits). fp64 is a guess.
DOT_COST = {"fp32": (2.8, 1.4), "tf32x3": (0.8, 1.1), "tf32": (0.22, 0.8), "half": (0.13, 0.13), "fp64": (2, 2)}
# No less than this where rows of the (left, right) operand are not whole multiples of 16 elements.
UNALIGNED_DOT = {"fp32": (1.7, 1.5), "tf32x3": (1.7, 3.7), "tf32": (0.65, 0.43), "half": (0.4, 0.24), "fp64": (2, 2)}
OUTER_PRODUCT = 5  # an element of column times row: with the addition that follows, no cheaper than tl.dot in fp32


# ---------------------------------------------------------------------------------------------------------------------
# Memory: every access is checked, and counted


class Memory:
    """The storages that a launch may touch. Reads and writes go through numpy views of them, never through an address.

    With `counting`, accesses are logged and `settle` charges them to the bill: the 32-byte sectors that a cache of
    `cache_sectors` would have fetched, if the programs had run in order. `fetched` counts sectors so far; each sector
    remembers when it was last touched, and one not touched for a cache's worth of fetches is paid again. `parameters`
    are addresses of storages that are no smaller here than on a GPU: they cost `parameters_share` of the price, and
    once fetched they stay at hand without taking room in the cache, until something is stored in them. `work` is what
    the arithmetic costs, in fp32 FLOPs; `multiplies` says whether tl.dot is part of it.
    """

    SECTOR = 5  # log2 of the bytes in which memory is fetched

    def __init__(self, storages, cache_sectors=0, counting=False, parameters=(), parameters_share=1.0):
        self.storages = sorted({s.data_ptr(): s for s in storages if s.nbytes()}.values(), key=lambda s: s.data_ptr())
        self.starts = np.array([s.data_ptr() for s in self.storages], dtype=np.uint64)
        self.views, self.written, self.undo = {}, set(), []
        self.cache_sectors, self.counting = cache_sectors, counting
        self.parameters = {number for number, s in enumerate(self.storages) if s.data_ptr() in parameters}
        self.parameters_share = parameters_share
        self.log, self.touched, self.fetched, self.bytes = [], {}, 0, 0
        self.work, self.settled_work, self.multiplies = 0, 0, False

    def locate(self, pointers, active, size, store):
        """(storage number, element indices with 0 for inactive lanes). Raises KernelError outside of every tensor."""
        lanes = pointers if active is None else pointers[active]
        if lanes.size == 0:
            return None, None
        low, high = int(lanes.min()), int(lanes.max())
        number = int(np.searchsorted(self.starts, low, side="right")) - 1
        start = int(self.starts[number]) if number >= 0 else 0
        end = start + self.storages[number].nbytes() if number >= 0 else 0
        if low >= end or high + size > end:
            where = f"{(high + size - end) // size} elements past the end" if low < end else "no tensor there"
            raise KernelError(f"out-of-bounds {'store' if store else 'load'} ({where})", stage="launch")
        offsets = pointers - np.uint64(start)
        if active is not None:
            offsets = np.where(active, offsets, np.uint64(0))
        if self.counting:
            self.log.append((number, (offsets >> np.uint64(self.SECTOR)).astype(np.int64), active))
        if (low - start) % size:
            raise KernelError("misaligned address", stage="launch")
        return number, (offsets // np.uint64(size)).astype(np.int64)

    def view(self, number, dtype):
        """A storage as a numpy array of `dtype`."""
        if (number, dtype) not in self.views:
            raw = torch.empty(0, dtype=torch.uint8).set_(self.storages[number]).numpy()
            self.views[number, dtype] = raw[:raw.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return self.views[number, dtype]

    def load(self, pointers, active, other, dtype):
        number, index = self.locate(pointers, active, dtype.itemsize, store=False)
        if number is None:
            return np.broadcast_to(other, pointers.shape)
        values = self.view(number, dtype)[index]
        return values if active is None else np.where(active, values, other)

    def store(self, pointers, active, values):
        number, index = self.locate(pointers, active, values.dtype.itemsize, store=True)
        if number is not None:
            if active is not None:
                index, values = index[active], values[active]
            self.before(number, values.dtype, index)
            self.view(number, values.dtype)[index] = values

    def before(self, number, dtype, index):
        """Note what is about to be overwritten."""
        self.written.add(self.storages[number].data_ptr())
        if number in self.parameters:
            self.parameters.remove(number)
            self.touched.pop(number, None)
        view = self.view(number, dtype)
        self.undo.append((view, index, view[index]))

    def roll_back(self):
        for view, index, values in reversed(self.undo):
            view[index] = values
        self.work = self.settled_work
        self.commit()

    def commit(self):
        self.undo, self.log, self.settled_work = [], [], self.work

    def arithmetic(self, work):
        if self.counting:
            self.work += work

    def settle(self, programs):
        """Charge what the log holds, program by program: each finds in the cache what those before it left there."""
        for program in range(programs if self.log else 0):
            for number, sectors, active in self.log:
                row = sectors[program if len(sectors) > 1 else 0]
                if active is not None:
                    row = row[active[program if len(active) > 1 else 0]]
                row = np.unique(row)
                if number not in self.touched:
                    count = (self.storages[number].nbytes() >> self.SECTOR) + 1
                    self.touched[number] = np.full(count, -self.cache_sectors - 1, dtype=np.int64)
                last = self.touched[number]
                missed = int((self.fetched - last[row] > self.cache_sectors).sum())
                if number in self.parameters:
                    last[row] = np.iinfo(last.dtype).max
                    self.bytes += self.parameters_share * (missed << self.SECTOR)
                else:
                    self.fetched += missed
                    last[row] = self.fetched
                    self.bytes += missed << self.SECTOR


# ---------------------------------------------------------------------------------------------------------------------
# Running all programs at once


class Diverged(Exception):
    """A branch, loop bound or index differs between the programs that run in lockstep."""


def round_to_tf32(values):
    """fp32 with the 10 mantissa bits that the tensor cores keep, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def numpy_type(kind):
    return stock._get_np_dtype(kind)


def materialize(base, shape, strides, offsets, block, checked):
    """(pointers, mask) of a block that a descriptor or block pointer names. checked: dimensions with boundaries."""
    kind = base.dtype.element_ty if base.dtype.is_ptr() else base.dtype
    size, ones = max(1, kind.primitive_bitwidth // 8), [1] * len(block)
    pointers, mask = base.data.reshape(-1, *ones), np.ones((1, *ones), dtype=bool)
    for dimension, length in enumerate(block):
        place = [length if i == dimension else 1 for i in range(len(block))]
        offset = offsets[dimension].data.reshape(-1, *ones).astype(np.int64) + np.arange(length).reshape(1, *place)
        pointers = pointers + (size * offset * int(strides[dimension].data.item())).astype(np.uint64)
        if dimension in checked:
            mask = mask & (offset >= 0) & (offset < int(shape[dimension].data.item()))
    rows = max(len(pointers), len(mask))
    return (TensorHandle(np.broadcast_to(pointers, (rows, *block)), base.dtype.scalar),
            TensorHandle(np.broadcast_to(mask, (rows, *block)), tl.int1))


class Lockstep(stock.InterpreterBuilder):
    """Triton's interpreter with a leading dimension for programs. Only what depends on shapes needs another body."""

    memory, programs = None, None  # of the launch that runs; programs: three arrays of program ids
    divided = None, None, None  # the operands and the result of the last integer division

    # --- where a program is
    def create_get_program_id(self, axis):
        return TensorHandle(self.programs[axis], tl.int32)

    # --- shapes
    def create_make_range(self, kind, start, stop):
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, kind, arg):
        shape = tuple(kind.shape)
        return TensorHandle(np.broadcast_to(arg.data.reshape(-1, *[1] * len(shape)), (arg.data.size, *shape)),
                            arg.dtype.scalar)

    def create_unsplat(self, arg):
        return TensorHandle(arg.data.reshape(len(arg.data), -1)[:, 0], arg.dtype.scalar)

    def create_broadcast(self, arg, shape):
        return TensorHandle(np.broadcast_to(arg.data, (len(arg.data), *shape)), arg.dtype.scalar)

    def create_expand_dims(self, arg, axis):
        return TensorHandle(np.expand_dims(arg.data, axis + 1 if axis >= 0 else axis), arg.dtype.scalar)

    def create_reshape(self, arg, shape, allow_reorder):
        return self.paid(TensorHandle(arg.data.reshape(len(arg.data), *shape), arg.dtype.scalar), 0, arg)

    def create_trans(self, arg, perm):
        steps = {"steps": [arg.attr["steps"][axis] for axis in perm]} if "steps" in arg.attr else {}
        return TensorHandle(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar, steps)

    def pair(self, a, b):
        rows = max(len(a.data), len(b.data))
        return [np.broadcast_to(x.data, (rows, *x.data.shape[1:])) for x in (a, b)]

    def create_cat(self, a, b):
        return TensorHandle(np.concatenate(self.pair(a, b), axis=1), a.dtype.scalar)

    def create_join(self, a, b):
        return TensorHandle(np.stack(self.pair(a, b), axis=-1), a.dtype.scalar)

    def create_gather(self, source, index, axis):
        values, positions = self.pair(source, index)
        return TensorHandle(np.take_along_axis(values, positions, axis=axis + 1), source.dtype.scalar)

    def create_histogram(self, data, bins, mask):
        masks = np.ones_like(data.data, dtype=bool) if mask is None else np.broadcast_to(mask.data, data.data.shape)
        rows = [np.bincount(row[keep & (row >= 0) & (row < bins)], minlength=bins)
                for row, keep in zip(data.data, masks)]
        return TensorHandle(np.array(rows, dtype=np.int32), tl.int32)

    # --- memory
    def lanes(self, pointers, mask, *others):
        """Pointers, mask (None where all lanes are active) and values, broadcast against each other."""
        arrays = [np.asarray(getattr(x, "data", x)) for x in (pointers, mask, *others) if x is not None]
        pointers, *rest = np.broadcast_arrays(*arrays)
        active = rest.pop(0) if mask is not None else None
        return pointers, None if active is not None and active.all() else active, *rest

    def create_load(self, pointers, *rest, **options):
        return self.create_masked_load(pointers, None, None)

    def create_store(self, pointers, value, *rest, **options):
        return self.create_masked_store(pointers, value, None)

    def create_masked_load(self, pointers, mask, other, *rest, **options):
        kind = pointers.get_element_ty()
        if other is None:
            addresses, active = self.lanes(pointers, mask)
            fill = np.zeros((), dtype=numpy_type(kind))
        else:
            addresses, active, fill = self.lanes(pointers, mask, other)
        handle = TensorHandle(self.memory.load(addresses, active, fill, numpy_type(kind)), kind)
        if addresses.ndim == 3:  # a tile, which may go into tl.dot
            size, (rows, columns), corner = numpy_type(kind).itemsize, addresses.shape[1:], int(addresses[0, 0, 0])
            below, beside = int(addresses[0, min(1, rows - 1), 0]), int(addresses[0, 0, min(1, columns - 1)])
            handle.attr["steps"] = [abs(below - corner) // size, abs(beside - corner) // size]  # in elements
            if active is not None and not np.any(fill):  # how much of it is left without a masked tail of rows
                used = active.any(axis=2)
                last = rows - np.argmax(used[:, ::-1], axis=1)
                handle.attr["filled"] = np.where(used.any(axis=1), last, 0).mean() / rows
        return handle

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        kind = numpy_type(pointers.get_element_ty())
        addresses, active, values = self.lanes(pointers, mask, value)
        self.memory.store(addresses, active, values.astype(kind, copy=False))

    def everyone(self, *arrays):
        """Arrays with one row for every program: an atomic on one address happens as often as there are programs."""
        rows = len(self.programs[0])
        return [np.ascontiguousarray(np.broadcast_to(x, (rows, *x.shape[1:]))) for x in np.broadcast_arrays(*arrays)]

    def atomically(self, pointers, active, dtype, run):
        number, index = self.memory.locate(pointers, active, dtype.itemsize, store=True)
        if number is not None:
            self.memory.before(number, dtype, index)
        return run()

    def create_atomic_rmw(self, op, pointers, value, mask, sem, scope):
        addresses, values, active = self.everyone(pointers.data, value.data, mask.data)
        return self.atomically(addresses, active, values.dtype, lambda: super(Lockstep, self).create_atomic_rmw(
            op, TensorHandle(addresses, pointers.dtype), TensorHandle(values, value.dtype),
            TensorHandle(active, tl.int1), sem, scope))

    def create_atomic_cas(self, pointers, compare, value, sem, scope):
        addresses, expected, values = self.everyone(pointers.data, compare.data, value.data)
        return self.atomically(addresses, None, values.dtype, lambda: super(Lockstep, self).create_atomic_cas(
            TensorHandle(addresses, pointers.dtype), TensorHandle(expected, compare.dtype),
            TensorHandle(values, value.dtype), sem, scope))

    # --- arithmetic
    def paid(self, out, cost, *sources):
        """Charge for `out`, and let it remember how the tiles that it was computed from lie in memory."""
        # What all programs share is computed by each of them (which for indices and masks is not worth counting).
        shared = out.data.ndim > 1 and len(out.data) == 1 and cost > 1
        self.memory.arithmetic(out.data.size * cost * (len(self.programs[0]) if shared else 1))
        steps = [x.attr["steps"] for x in sources if "steps" in x.attr and x.data.shape[1:] == out.data.shape[1:]]
        if steps:
            out.attr["steps"] = [max(step) for step in zip(*steps)]
        return out

    def binary_op(self, a, b, op):
        cost = COST.get(op, 1)
        if op is np.divide and not any(b.data.strides[1:]):  # by one value, broadcast: times its reciprocal
            cost = UNIFORM_DIVISION
        elif op is np.multiply and is_outer(a.data, b.data):
            cost = OUTER_PRODUCT
        return self.paid(super().binary_op(a, b, op), cost, a, b)

    def create_precise_divf(self, a, b):
        return self.paid(super().binary_op(a, b, np.divide), PRECISE_DIVISION, a, b)

    def unary_op(self, a, op):
        return self.paid(super().unary_op(a, op), COST.get(op, 1), a)

    def ternary_op(self, a, b, c, op):
        return self.paid(super().ternary_op(a, b, c, op), 1, a, b, c)

    def create_fma(self, a, b, c):
        cost = OUTER_PRODUCT + 1 if is_outer(a.data, b.data) else FMA
        return self.paid(super().create_fma(a, b, c), cost, a, b, c)

    def cast_impl(self, a, kind):
        return self.paid(super().cast_impl(a, kind), 0, a)

    def create_fp_to_fp(self, a, kind, rounding):
        return self.paid(super().create_fp_to_fp(a, kind, rounding), 0, a)

    def create_idiv(self, a, b):
        before, by, out = self.divided
        if a is not before or not np.array_equal(b.data, by.data):  # the compiler does not do twice what it has done
            out = self.paid(super().create_idiv(a, b), INTEGER_DIVISION)
            self.divided = a, b, out
        return out

    def create_rsqrt(self, x):
        return self.paid(super().create_rsqrt(x), COST[np.sqrt], x)

    def create_erf(self, x):
        values = torch.erf(torch.from_numpy(np.ascontiguousarray(x.data))).numpy()
        return self.paid(TensorHandle(values, x.dtype.scalar), ERF, x)

    def create_dot_scaled(self, *operands):
        raise KernelError("tl.dot_scaled is not supported here")

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, rate = a.data, b.data, "half"
        if a.dtype.scalar == tl.float32:
            kind = str(input_precision).split(".")[-1].lower()
            rate = {"ieee": "fp32", "tf32x3": "tf32x3"}.get(kind, "tf32")
            if rate == "tf32":
                left, right = round_to_tf32(left), round_to_tf32(right)
        elif a.dtype.scalar == tl.float64:
            rate = "fp64"
        elif a.dtype.scalar == tl.bfloat16:  # kept as the upper half of the bits of an fp32
            left, right = ((x.astype(np.uint32) << 16).view(np.float32) for x in (left, right))
        elif a.dtype.primitive_bitwidth == 8 and a.dtype.is_floating():
            left, right = (stock._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16) for x in (a, b))
        out = np.matmul(left, right, dtype=d.data.dtype) + d.data
        self.memory.multiplies = True
        # Masked rows at a tile's end are free: problems here have few rows, and at a GPU's batch sizes tiles are full.
        flops = 2 * left.shape[-1] * a.attr.get("filled", 1.0)  # for each element of the result
        return self.paid(TensorHandle(out, d.dtype.scalar), flops * self.cost_of_dot(a, b, rate))

    def cost_of_dot(self, a, b, rate):
        """fp32 FLOPs for each FLOP of a product: the most of what holds it up."""
        (along_k, along_n), (left, right) = DOT_COST[rate], UNALIGNED_DOT[rate]
        if "steps" not in b.attr:  # nothing is known of how it lies
            return max(along_k, along_n, right)
        unaligned = [any(step > 1 and step % 16 for step in x.attr.get("steps", ())) for x in (a, b)]
        return max(along_k if b.attr["steps"][0] == 1 else along_n, left * unaligned[0], right * unaligned[1])

    # --- reductions and scans: `combine` works on whole blocks as well as on scalars
    def reduce(self, inputs, axis, combine, keep_dims=False, **_):
        many = isinstance(inputs, tuple)
        tensors = inputs if many else (inputs,)
        block = [int(n) for n in tensors[0].shape]
        arrays = np.broadcast_arrays(*(t.handle.data for t in tensors))
        axis = None if axis is None else int(getattr(axis, "value", axis)) % len(block)
        keep_dims = bool(getattr(keep_dims, "value", keep_dims))
        if axis is None:
            arrays, at, left = [x.reshape(len(x), -1) for x in arrays], 1, [1] * len(block) if keep_dims else []
        else:
            at, left = axis + 1, [1 if i == axis else n for i, n in enumerate(block) if keep_dims or i != axis]
        direct = {"_sum_combine": np.add, "_elementwise_max": np.fmax, "_elementwise_min": np.fmin}.get(
            combine.fn.__name__ if combine.fn.__module__ == "triton.language.standard" else "")
        self.memory.arithmetic(arrays[0].size)
        if direct is not None and len(arrays) == 1:
            results = [direct.reduce(arrays[0], axis=at, dtype=arrays[0].dtype)]
        else:
            while arrays[0].shape[at] > 1:  # neighbours in pairs: the order is kept, the depth is logarithmic
                even, odd = ([np.take(x, range(k, x.shape[at], 2), axis=at) for x in arrays] for k in (0, 1))
                arrays = self.combine(combine, even, odd, tensors)
            results = [np.take(x, 0, axis=at) for x in arrays]
        out = tuple(self.tensor(x.reshape(len(x), *left), t.dtype) for x, t in zip(results, tensors))
        return out if many else out[0]

    def scan(self, inputs, axis, combine, reverse=False, **_):
        many = isinstance(inputs, tuple)
        tensors = inputs if many else (inputs,)
        at = int(getattr(axis, "value", axis)) % len(tensors[0].shape) + 1
        arrays = list(np.broadcast_arrays(*(t.handle.data for t in tensors)))
        reverse = bool(getattr(reverse, "value", reverse))
        if reverse:
            arrays = [np.flip(x, at) for x in arrays]
        direct = {"_sum_combine": np.cumsum, "_prod_combine": np.cumprod}.get(
            combine.fn.__name__ if combine.fn.__module__ == "triton.language.standard" else "")
        self.memory.arithmetic(arrays[0].size)
        if direct is not None and len(arrays) == 1:
            arrays = [direct(arrays[0], axis=at, dtype=arrays[0].dtype)]
        else:
            position = np.arange(arrays[0].shape[at]).reshape([-1 if i == at else 1 for i in range(arrays[0].ndim)])
            step = 1
            while step < arrays[0].shape[at]:
                shifted = [np.roll(x, step, axis=at) for x in arrays]
                arrays = [np.where(position >= step, new, old) for new, old in
                          zip(self.combine(combine, shifted, arrays, tensors), arrays)]
                step *= 2
        if reverse:
            arrays = [np.ascontiguousarray(np.flip(x, at)) for x in arrays]
        out = tuple(self.tensor(x, t.dtype) for x, t in zip(arrays, tensors))
        return out if many else out[0]

    def combine(self, function, left, right, tensors):
        """Apply a combine function to arrays, through tensors of its own types."""
        wrapped = [self.tensor(x, t.dtype) for x, t in [*zip(left, tensors), *zip(right, tensors)]]
        out = function(*wrapped)
        results = out if isinstance(out, (tuple, tl.tuple)) else [out]
        return [np.broadcast_to(x.handle.data, left[0].shape) for x in results]

    def tensor(self, data, dtype):
        """A tl.tensor around (programs, *block) data."""
        kind = tl.block_type(dtype.scalar, list(data.shape[1:])) if data.ndim > 1 else dtype.scalar
        return tl.tensor(TensorHandle(data.astype(numpy_type(dtype.scalar), copy=False), dtype.scalar), kind)


class Interpreter:
    """Runs kernels. Making one turns this process into an interpreter of Triton for good: it cannot compile any more.

    (Triton decides at import whether its own helpers, tl.sum, tl.sigmoid and so on, are compiled or interpreted. The
    compiler was needed first, so they are converted here, once; the stock interpreter patches them at every call.)
    """

    def __init__(self, kernels):
        self.builder, converted = Lockstep(), {}
        stock.interpreter_builder, stock.interpreter_semantic = self.builder, stock.TritonSemantic(self.builder)
        np.seterr(all="ignore")

        def convert(function):
            if function.fn not in converted:
                converted[function.fn] = stock.InterpretedFunction(function.fn)
            return converted[function.fn]

        def member(function):
            return lambda *args, **kwargs: convert(function)(*args, **kwargs)

        for module in (tl, tl.core, tl.standard, tl.math, tl.random):
            for name, value in list(vars(module).items()):
                if isinstance(value, jit.JITFunction):
                    setattr(module, name, convert(value))
        for name, value in list(vars(tl.tensor).items()):
            if isinstance(value, jit.JITFunction):
                setattr(tl.tensor, name, member(value))
        stock.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
        stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for module in (tl, tl.core):
            module.reduce, module.associative_scan = self.builder.reduce, self.builder.scan
        tl.tensor.__index__ = lambda tensor: int(uniform(tensor))
        tl.tensor.__bool__ = lambda tensor: bool(uniform(tensor)) if not tensor.type.is_block() else True
        tl.tensor.T = property(lambda x: stock.interpreter_semantic.permute(x, (1, 0)))
        for name, dims in (("TensorDescHandle", None), ("BlockPointerHandle", "boundary_check")):
            if hasattr(stock, name):  # the second is gone since triton 3.7
                getattr(stock, name).materialize_pointers = block_pointers if dims else descriptor_pointers
        self.install_libdevice()
        self.functions = {name: convert(kernel) for name, kernel in kernels.items()}
        self.constexprs = {name: {p.name for p in kernel.params if p.is_constexpr} for name, kernel in kernels.items()}
        for function in self.functions.values():
            function.fn.__globals__.update(self.functions)  # a kernel that calls a kernel finds the interpreted one
        self.diverging = set()

    def install_libdevice(self):
        """Give CUDA's libdevice functions their meaning: the torch function of the same name."""
        from triton.language.extra import libdevice
        from triton.language.extra.cuda import libdevice as cuda_libdevice

        special = {"fast_expf": torch.exp, "fast_logf": torch.log, "fast_sinf": torch.sin, "fast_cosf": torch.cos,
                   "fast_powf": torch.pow, "fast_tanhf": torch.tanh, "fabs": torch.abs, "rint": torch.round,
                   "rcp_rn": torch.reciprocal, "div_rn": torch.div, "sqrt_rn": torch.sqrt,
                   "normcdf": torch.special.ndtr, "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3)}

        def wrap(name, function):
            def call(*args, **_):
                shaped = next(a for a in args if isinstance(a, tl.tensor))
                values = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) if isinstance(a, tl.tensor) else
                          torch.tensor(float(getattr(a, "value", a))) for a in args]
                out = function(*values).numpy()
                out = self.builder.tensor(out, tl.int1 if out.dtype == bool else shaped.dtype)
                self.builder.paid(out.handle, LIBDEVICE.get(name, 60))
                return out
            return call

        for module in (libdevice, cuda_libdevice):
            for name in [name for name in vars(module) if not name.startswith("_")]:
                function = special.get(name) or getattr(torch, name, None) or getattr(torch.special, name, None)
                if inspect.isfunction(getattr(module, name)) and callable(function):
                    setattr(module, name, wrap(name, function))

    def launch(self, name, grid, arguments, memory):
        """Run one launch on `memory`. Raises KernelError (stage "launch") with the candidate's line."""
        function, constexprs = self.functions[name], self.constexprs[name]
        values = {key: value if key in constexprs else stock._implicit_cvt(value) for key, value in arguments.items()}
        ids = np.indices(grid, dtype=np.int32).reshape(3, -1)
        sizes = sorted((v for v in (getattr(arguments[k], "value", arguments[k]) for k in constexprs)
                        if isinstance(v, int) and v > 1), reverse=True)
        together = max(1, min(256, (1 << 17) // math.prod(sizes[:2] if len(sizes) > 2 else sizes[:1] or [1024])))
        self.builder.memory, self.builder.grid_idx = memory, (0, 0, 0)
        self.builder.set_grid_dim(*grid)
        start = 0
        while start < ids.shape[1]:
            count = 1 if name in self.diverging else min(together, ids.shape[1] - start)
            self.builder.programs = ids[:, start:start + count]
            try:
                function.rewrite()(**values)
            except Exception as error:
                chain = error
                while chain.__cause__ is not None and not isinstance(chain, Diverged):
                    chain = chain.__cause__
                if isinstance(chain, Diverged) and count > 1:
                    memory.roll_back()
                    self.diverging.add(name)
                    continue
                frames, line = chain.__traceback__, None
                while frames is not None:
                    line = frames.tb_lineno if frames.tb_frame.f_code.co_filename == FILE else line
                    frames = frames.tb_next
                text = str(chain) if isinstance(chain, KernelError) else f"{type(chain).__name__}: {chain}"
                raise KernelError(f"{name}: {text}", line, "launch") from None
            memory.settle(count)
            memory.commit()
            start += count


def uniform(tensor):
    """The value of a scalar that all programs agree on."""
    data = tensor.handle.data.reshape(-1)
    if data.size > 1 and not (data == data[0]).all():
        raise Diverged
    return data[0]


def is_outer(a, b):
    """Is a * b, of blocks of floats, that of a column and a row? numpy broadcasts with a stride of 0."""
    columns, rows = ({axis for axis in range(1, x.ndim) if x.strides[axis] == 0 and x.shape[axis] > 1} for x in (a, b))
    return a.dtype.kind == "f" and bool(columns - rows and rows - columns)


def descriptor_pointers(self, offsets):
    return materialize(self.base, self.shape, self.strides, offsets, self.block_shape, range(len(self.block_shape)))


def block_pointers(self, boundary_check):
    pointers, mask = materialize(self.base, self.shape, self.strides, self.offsets, self.block_shape, boundary_check)
    return pointers, mask.data
