"""Triton's operations on all programs of a launch at once.

Triton's own interpreter runs one program of the grid after the other, about a millisecond each, nearly all of it
Python. Here the programs run in *lockstep*, as on a GPU: every value has one more dimension in front, (programs,
*block), or (1, *block) where all programs agree, and one numpy call serves all programs. A value on which they must
agree and do not (a branch, a loop bound) raises Diverged; interpreter.py then runs them one by one.

Every operation also counts what it costs on the card (the end of prices.py).

Where it matters for correctness it computes as the hardware does: an fp32 `tl.dot` rounds its operands to TF32 unless
told otherwise (`input_precision="ieee"` or "tf32x3"), and an access outside every tensor is an error. What a masked
load without `other` leaves out is 0: Triton calls it undefined, but for NVIDIA's cards its compiler always writes 0.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from judge.compiler import KernelError
from judge.libdevice import converted, meaning
from judge.prices import (DOT_COST, ERF, FMA, GATHER, INSTRUCTION_COST, INTEGER_DIVISION, LIBDEVICE_COST,
                          OTHER_LIBDEVICE, OUTER_PRODUCT, PRECISE_DIVISION, UNALIGNED_DOT, UNIFORM_DIVISION)


class Diverged(Exception):
    """A branch, loop bound or index differs between the programs that run in lockstep."""


class Waiting(Diverged):
    """Programs wait for one that does not run beside them."""


def uniform(tensor):
    """The value of a scalar on which all programs agree. Raises Diverged if they do not."""
    data = tensor.handle.data.reshape(-1)
    if data.size > 1 and not (data == data[0]).all():
        raise Diverged
    return data[0]


def unwrap(value):
    """The Python value of a constexpr, or of what is one already."""
    return getattr(value, "value", value)


# Kept as bits, for numpy has no such numbers. They are computed with in float32, and rounded to nearest even.
AS_BITS = {tl.bfloat16: (torch.bfloat16, np.int16), tl.float8e5: (torch.float8_e5m2, np.uint8),
           tl.float8e4nv: (torch.float8_e4m3fn, np.uint8)}


def as_float(handle):
    """A handle that numpy can compute with."""
    if handle.dtype.scalar not in AS_BITS:
        return handle
    kind, bits = AS_BITS[handle.dtype.scalar]
    values = torch.from_numpy(np.ascontiguousarray(handle.data).view(bits)).view(kind).float().numpy()
    return TensorHandle(values, tl.float32, handle.attr)


def as_kept(values, dtype):
    """The data of a handle of such numbers. What an 8-bit float cannot hold becomes its largest value."""
    kind, bits = AS_BITS[dtype]
    values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if bits == np.uint8:
        values = values.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    return values.to(kind).view(getattr(torch, bits.__name__)).numpy().view(stock._get_np_dtype(dtype))


def on_floats(operation):
    """One of the interpreter's methods on numbers (op comes last), for those that are kept as bits as well."""
    def call(self, *args):
        *handles, op = args
        if op is np.where or handles[-1].dtype.scalar not in AS_BITS:  # a pointer's type has no hash
            return operation(self, *args)
        out = operation(self, *map(as_float, handles), op)
        data = out.data if out.data.dtype == bool else as_kept(out.data, handles[-1].dtype.scalar)
        return TensorHandle(data, handles[-1].dtype.scalar)
    return call


def round_to_tf32(values):
    """fp32 with the 10 mantissa bits that the tensor cores keep, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def is_outer(a, b):
    """Is a * b, of blocks of floats, that of a column and a row? numpy broadcasts with a stride of 0."""
    columns, rows = ({axis for axis in range(1, x.ndim) if x.strides[axis] == 0 and x.shape[axis] > 1} for x in (a, b))
    return a.dtype.kind == "f" and bool(columns - rows and rows - columns)


def step(addresses, axis, size):
    """How far neighbours along an axis of a block lie apart, in elements: 0 or 1 if all do, otherwise what divides all
    distances, or 2 if nothing does.
    """
    distances = np.abs(np.diff(addresses, axis=axis)).ravel() // size
    common = int(np.gcd.reduce(distances))
    return 2 if common == 1 and (distances != 1).any() else common


def inherit(handles, sources):
    """What is made of a block that was loaded from unaligned rows is no better."""
    if any("unaligned" in source.attr for source in sources if isinstance(source, TensorHandle)):
        for handle in handles:
            handle.attr["unaligned"] = True


def reshaping(method):
    """One of the interpreter's methods that give a block another shape, with `inherit`."""
    def call(self, *args):
        out = method(self, *args)
        inherit(out if isinstance(out, tuple) else [out], args)
        return out
    return call


def block_pointers(handle, offsets, checked):
    """(pointers, mask) of the block that a descriptor or a block pointer names. checked: dimensions with boundaries."""
    base, shape, strides, block = handle.base, handle.shape, handle.strides, handle.block_shape
    kind = base.dtype.element_ty if base.dtype.is_ptr() else base.dtype
    size, ones = max(1, kind.primitive_bitwidth // 8), [1] * len(block)
    pointers, mask = base.data.reshape(-1, *ones), np.ones((1, *ones), dtype=bool)
    for dimension, length in enumerate(block):
        place = [length if i == dimension else 1 for i in range(len(block))]
        offset = offsets[dimension].data.reshape(-1, *ones).astype(np.int64) + np.arange(length).reshape(1, *place)
        pointers = pointers + (size * offset * int(strides[dimension].data.item())).astype(np.uint64)
        if dimension in checked:
            mask = mask & (offset >= 0) & (offset < int(shape[dimension].data.item()))
    programs = max(len(pointers), len(mask))
    return (TensorHandle(np.broadcast_to(pointers, (programs, *block)), base.dtype.scalar),
            TensorHandle(np.broadcast_to(mask, (programs, *block)), tl.int1))


class Lockstep(stock.InterpreterBuilder):
    """Triton's interpreter with a leading dimension for programs. Only what depends on shapes needs another body.

    What a tile was loaded from decides what tl.dot costs, so handles carry it along in `attr`: "steps", the distances
    in elements between neighbours of each dimension; "unaligned", if one of them is no multiple of 16 elements; and
    "filled", which share of its rows is not a masked tail.
    """

    memory = None  # of the launch that runs
    block = 0  # elements of the largest block that the running kernel has computed
    programs = None  # three arrays, the coordinates of the programs that run
    last_division = None, None, None  # operands and result
    libdevice_name = None  # of the function that is being called
    looks, last_seen, patience = 0, None, 0  # times in a row that a scalar atomic has returned the same; the limit

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
        values = arg.data.reshape(len(arg.data), -1)[:, ::-1] if allow_reorder else arg.data  # any other order would do
        return self.count(TensorHandle(values.reshape(len(arg.data), *shape), arg.dtype.scalar), 0, arg)

    def create_trans(self, arg, perm):
        steps = {"steps": [arg.attr["steps"][axis] for axis in perm]} if "steps" in arg.attr else {}
        return TensorHandle(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar, steps)

    def same_programs(self, a, b):
        """Two handles' arrays with as many programs in front."""
        programs = max(len(a.data), len(b.data))
        return [np.broadcast_to(x.data, (programs, *x.data.shape[1:])) for x in (a, b)]

    def create_cat(self, a, b):
        return TensorHandle(np.concatenate(self.same_programs(a, b), axis=1)[:, ::-1], a.dtype.scalar)  # in no order

    def create_join(self, a, b):
        return TensorHandle(np.stack(self.same_programs(a, b), axis=-1), a.dtype.scalar)

    def create_gather(self, source, index, axis):
        values, positions = self.same_programs(source, index)
        if (positions < 0).any():
            raise KernelError("tl.gather with a negative index", stage="launch")
        out = TensorHandle(np.take_along_axis(values, positions, axis=axis + 1), source.dtype.scalar)
        return self.count(out, GATHER, source)

    def create_histogram(self, data, bins, mask):
        masks = np.ones_like(data.data, dtype=bool) if mask is None else np.broadcast_to(mask.data, data.data.shape)
        counts = [np.bincount(row[keep & (row >= 0) & (row < bins)], minlength=bins)
                  for row, keep in zip(data.data, masks)]
        return TensorHandle(np.array(counts, dtype=np.int32), tl.int32)

    # --- memory

    def aligned(self, pointers, mask, *others):
        """Pointers, mask (None where all elements are active) and values, broadcast against each other."""
        pointers, active, *rest = np.broadcast_arrays(pointers.data, True if mask is None else mask.data, *others)
        return pointers, None if mask is None or active.all() else active, *rest

    def create_masked_load(self, pointers, mask, other, *rest, **options):
        kind = pointers.get_element_ty()
        dtype = stock._get_np_dtype(kind)
        other = np.zeros((), dtype) if other is None else other.data
        addresses, active, fill = self.aligned(pointers, mask, other)
        handle = TensorHandle(self.memory.load(addresses, active, fill, dtype), kind)
        if self.memory.counting and addresses.ndim > 1:  # it may go into tl.dot
            block, rows = addresses[0].astype(np.int64), addresses.shape[1]
            handle.attr["steps"] = steps = [step(block, axis, dtype.itemsize) for axis in range(block.ndim)]
            if any(distance > 1 and distance % 16 for distance in steps):
                handle.attr["unaligned"] = True
            if addresses.ndim == 3 and active is not None and not np.any(other):
                used = active.any(axis=2)
                last = rows - np.argmax(used[:, ::-1], axis=1)
                handle.attr["filled"] = np.where(used.any(axis=1), last, 0).mean() / rows
        return handle

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        addresses, active, values = self.aligned(pointers, mask, value.data)
        self.memory.store(addresses, active, values.astype(stock._get_np_dtype(pointers.get_element_ty()), copy=False))

    def in_each_program(self, *handles):
        """Handles with one row for every program: an atomic on one address happens as often as there are programs."""
        programs, arrays = len(self.programs[0]), np.broadcast_arrays(*(handle.data for handle in handles))
        return [TensorHandle(np.ascontiguousarray(np.broadcast_to(x, (programs, *x.shape[1:]))), handle.dtype)
                for x, handle in zip(arrays, handles)]

    def create_atomic_rmw(self, op, pointers, value, mask, sem, scope):
        if value.dtype.scalar in AS_BITS:
            raise KernelError(f"an atomic on {value.dtype.scalar} is not supported here")
        pointers, value, mask = self.in_each_program(pointers, value, mask)
        self.memory.before_atomic(pointers.data, mask.data, value.data.dtype, sem, scope)
        return self.after_atomic(pointers.data, super().create_atomic_rmw(op, pointers, value, mask, sem, scope))

    def create_atomic_cas(self, pointers, compare, value, sem, scope):
        pointers, compare, value = self.in_each_program(pointers, compare, value)
        self.memory.before_atomic(pointers.data, None, value.data.dtype, sem, scope)
        return self.after_atomic(pointers.data, super().create_atomic_cas(pointers, compare, value, sem, scope))

    def after_atomic(self, addresses, out):
        """Raise Waiting where programs do nothing but look at one scalar, and it does not change."""
        if out.data[0].size == 1:
            seen = addresses.tobytes() + out.data.tobytes()
            self.looks, self.last_seen = (self.looks + 1 if seen == self.last_seen else 0), seen
            if self.looks > self.patience:
                raise Waiting("waits for programs of the same launch that need not run beside it: use a second launch")
        return out

    def create_barrier(self):
        self.memory.races.places.clear()

    # --- for debugging

    def create_assert(self, condition, message):
        if not condition.data.all():
            raise KernelError(f"device_assert fails: {message}", stage="launch")

    def create_print(self, *_):
        """Nobody would read it."""

    # --- arithmetic

    def count(self, out, cost, *sources):
        """Count `cost` FLOPs for each element of `out`, and pass on how the tiles that it is made of lie in memory."""
        self.compute(out.data, cost)
        inherit([out], sources)
        steps = [x.attr["steps"] for x in sources if "steps" in x.attr and x.data.shape[1:] == out.data.shape[1:]]
        if steps:
            out.attr["steps"] = [max(step) for step in zip(*steps)]
        return out

    def compute(self, data, cost=1):
        """Count `cost` FLOPs for each element. What all programs share is computed by each, but indices for nothing."""
        shared, programs = len(data) == 1, len(self.programs[0])
        times = programs if cost > 1 or data.dtype.kind == "f" else programs == 1
        self.memory.flops += data.size * cost * (times if shared else 1)
        self.block = max(self.block, data[0].size)

    def binary_op(self, a, b, op):
        cost = INSTRUCTION_COST.get(op, 1)
        if op is np.divide and not any(b.data.strides[1:]):
            cost = UNIFORM_DIVISION
        elif op is np.multiply and is_outer(a.data, b.data):
            cost = OUTER_PRODUCT
        return self.count(on_floats(stock.InterpreterBuilder.binary_op)(self, a, b, op), cost, a, b)

    def unary_op(self, a, op):
        out = on_floats(stock.InterpreterBuilder.unary_op)(self, a, op)
        return self.count(out, INSTRUCTION_COST.get(op, 1), a)

    def ternary_op(self, a, b, c, op):
        return self.count(on_floats(stock.InterpreterBuilder.ternary_op)(self, a, b, c, op), 1, a, b, c)

    def create_fma(self, a, b, c):
        cost = OUTER_PRODUCT + 1 if is_outer(a.data, b.data) else FMA
        out = super().create_fma(*map(as_float, (a, b, c)))
        if c.dtype.scalar in AS_BITS:
            out = TensorHandle(as_kept(out.data, c.dtype.scalar), c.dtype.scalar)
        return self.count(out, cost, a, b, c)

    def create_precise_divf(self, a, b):
        return self.count(on_floats(stock.InterpreterBuilder.binary_op)(self, a, b, np.divide), PRECISE_DIVISION, a, b)

    def create_idiv(self, a, b):
        dividend, divisor, out = self.last_division
        if a is not dividend or not np.array_equal(b.data, divisor.data):  # a compiler does not do twice the same
            out = self.count(super().create_idiv(a, b), INTEGER_DIVISION)
            self.last_division = a, b, out
        return out

    def cast_impl(self, a, kind):
        values, dtype = as_float(a).data, stock._get_np_dtype(kind)
        values = as_kept(values, kind.scalar) if kind.scalar in AS_BITS else converted(values, dtype)
        return self.count(TensorHandle(values, kind.scalar), 0, a)

    def create_fp_to_fp(self, a, kind, rounding):
        toward_zero = "RTZ" in str(rounding) or kind.scalar not in AS_BITS and a.dtype.scalar not in AS_BITS
        return self.count(super().create_fp_to_fp(a, kind, rounding), 0, a) if toward_zero else self.cast_impl(a, kind)

    def create_rsqrt(self, x):
        return self.count(super().create_rsqrt(x), INSTRUCTION_COST[np.sqrt], x)

    def create_erf(self, x):
        values = torch.erf(torch.from_numpy(np.ascontiguousarray(x.data))).numpy()
        return self.count(TensorHandle(values, x.dtype.scalar), ERF, x)

    def create_extern_elementwise(self, library, path, symbol, args, kind, pure):
        name, self.libdevice_name = self.libdevice_name, None
        function = meaning(name) if name else None
        if function is None and "_as_" not in (name or ""):
            raise KernelError(f"{f'libdevice.{name}' if name else 'tl.extern_elementwise'} is not supported here")
        dtype = stock._get_np_dtype(kind)
        if function is None:  # float_as_int and the like
            return TensorHandle(args[0].data.view(dtype), kind.scalar)
        values = function(*(torch.from_numpy(np.ascontiguousarray(arg.data)) for arg in args)).numpy()
        unsigned = np.dtype(f"u{dtype.itemsize}") if "2u" in name else dtype  # Triton's int32 is float2uint's result
        values = converted(values, unsigned).astype(dtype)
        return self.count(TensorHandle(values, kind.scalar), LIBDEVICE_COST.get(name, OTHER_LIBDEVICE))

    # --- matrix products

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, rate = a.data, b.data, "half"
        if a.dtype.scalar == tl.float32:
            precision = str(input_precision).split(".")[-1].lower()
            rate = {"ieee": "fp32", "tf32x3": "tf32x3"}.get(precision, "tf32")
            if rate == "tf32":
                left, right = round_to_tf32(left), round_to_tf32(right)
        elif a.dtype.scalar == tl.float64:
            rate = "fp64"
        elif a.dtype.scalar == tl.bfloat16:  # kept as the upper half of the bits of an fp32
            left, right = ((x.astype(np.uint32) << 16).view(np.float32) for x in (left, right))
        elif a.dtype.primitive_bitwidth == 8 and a.dtype.is_floating():
            left, right = (stock._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16) for x in (a, b))
        out = np.matmul(left, right, dtype=d.data.dtype) + d.data
        self.memory.has_dot = True
        # Masked rows at a tile's end are free: problems here have few rows, and at a GPU's batch sizes tiles are full.
        flops = 2 * left.shape[-1] * a.attr.get("filled", 1.0)  # for each element of the result
        return self.count(TensorHandle(out, d.dtype.scalar), flops * self.cost_of_dot(a, b, rate))

    def cost_of_dot(self, a, b, rate):
        """fp32 FLOPs for each FLOP of a product: the most of what holds it up."""
        (along_k, along_n), (left, right) = DOT_COST[rate], UNALIGNED_DOT[rate]
        steps = b.attr.get("steps", ())  # where nothing is known of how it lies, the worst
        order = max(along_k, along_n) if len(steps) != 2 else along_k if steps[0] == 1 else along_n
        return max(order, left * ("unaligned" in a.attr), right * ("unaligned" in b.attr or len(steps) != 2))

    # --- reductions and scans: a combine function works on whole blocks as well as on scalars

    def reduce(self, inputs, axis, combine, keep_dims=False, **_):
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        block = [int(n) for n in tensors[0].shape]
        arrays = np.broadcast_arrays(*(t.handle.data for t in tensors))
        keep_dims, axis = bool(unwrap(keep_dims)), unwrap(axis)
        if axis is None:
            arrays, at, left = [x.reshape(len(x), -1) for x in arrays], 1, [1] * len(block) if keep_dims else []
        else:
            at = int(axis) % len(block) + 1
            left = block[:at - 1] + ([1] if keep_dims else []) + block[at:]
        ufunc = self.numpy_function(combine, tensors, {
            "_sum_combine": np.add, "_elementwise_max": np.fmax, "_elementwise_min": np.fmin})
        self.compute(arrays[0])
        if ufunc is not None:
            arrays = [ufunc.reduce(arrays[0], axis=at, dtype=arrays[0].dtype)]
        else:
            while arrays[0].shape[at] > 1:  # far ones in pairs, the second first: on a GPU no order is kept either
                first, second = zip(*(np.split(x, 2, axis=at) for x in arrays))
                arrays = self.combine(combine, second, first, tensors)
        out = tuple(self.tensor(x.reshape(len(x), *left), t.dtype) for x, t in zip(arrays, tensors))
        inherit([x.handle for x in out], [t.handle for t in tensors])
        return out if isinstance(inputs, tuple) else out[0]

    def scan(self, inputs, axis, combine, reverse=False, **_):
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        at = int(unwrap(axis)) % len(tensors[0].shape) + 1
        arrays = list(np.broadcast_arrays(*(t.handle.data for t in tensors)))
        if unwrap(reverse):
            arrays = [np.flip(x, at) for x in arrays]
        function = self.numpy_function(combine, tensors, {"_sum_combine": np.cumsum, "_prod_combine": np.cumprod})
        self.compute(arrays[0])
        if function is not None:
            arrays = [function(arrays[0], axis=at, dtype=arrays[0].dtype)]
        else:
            position = np.arange(arrays[0].shape[at]).reshape([-1 if i == at else 1 for i in range(arrays[0].ndim)])
            step = 1
            while step < arrays[0].shape[at]:
                shifted = [np.roll(x, step, axis=at) for x in arrays]
                combined = self.combine(combine, shifted, arrays, tensors)
                arrays = [np.where(position >= step, new, old) for new, old in zip(combined, arrays)]
                step *= 2
        if unwrap(reverse):
            arrays = [np.ascontiguousarray(np.flip(x, at)) for x in arrays]
        out = tuple(self.tensor(x, t.dtype) for x, t in zip(arrays, tensors))
        return out if isinstance(inputs, tuple) else out[0]

    def numpy_function(self, combine, tensors, known):
        """What numpy has for one of Triton's own combine functions, or None."""
        if combine.fn.__module__ == "triton.language.standard" and len(tensors) == 1 and \
                tensors[0].dtype.scalar not in AS_BITS:
            return known.get(combine.fn.__name__)

    def combine(self, function, left, right, tensors):
        """Apply a combine function to arrays, through tensors of its own types."""
        wrapped = [self.tensor(x, t.dtype) for x, t in [*zip(left, tensors), *zip(right, tensors)]]
        out = function(*wrapped)
        results = out if isinstance(out, (tuple, tl.tuple)) else [out]
        return [np.broadcast_to(x.handle.data, left[0].shape) for x in results]

    def tensor(self, data, dtype):
        """A tl.tensor around (programs, *block) data."""
        kind = tl.block_type(dtype.scalar, list(data.shape[1:])) if data.ndim > 1 else dtype.scalar
        data = data.astype(stock._get_np_dtype(dtype.scalar), copy=False)
        return tl.tensor(TensorHandle(data, dtype.scalar), kind)


def refusing(what):
    """A method of the interpreter for a feature that it does not have."""
    def method(self, *args, **options):
        raise KernelError(f"{what} is not supported here")
    return method


for name, what in {
        "create_dot_scaled": "tl.dot_scaled", "create_inline_asm": "inline assembly (tl.inline_asm_elementwise)",
        "create_atomic_poll": "tl.atomic_poll", "create_map_elementwise": "tl.map_elementwise",
        "create_descriptor_gather": "gather of a descriptor",
        "create_descriptor_scatter": "scatter of a descriptor"}.items():
    setattr(Lockstep, name, refusing(what))
for name in ("create_reshape", "create_trans", "create_expand_dims", "create_broadcast", "create_join", "create_split",
             "create_cat", "create_bitcast"):
    setattr(Lockstep, name, reshaping(getattr(Lockstep, name)))
