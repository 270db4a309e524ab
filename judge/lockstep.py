"""Triton's operations on all programs of a launch at once.

Triton's own interpreter runs one program of the grid after the other, about a millisecond each, nearly all of it
Python. Here the programs run in *lockstep*, as on a GPU: every value has one more dimension in front, (programs,
*block), or (1, *block) where all programs agree, and one numpy call serves all programs. A value on which they must
agree and do not (a branch, a loop bound) raises Diverged; interpreter.py then runs them one by one.

Every operation also counts what it costs on the card (the end of prices.py).

What honest kernels hardly ever use is refused by name: block pointers and tensor descriptors, tl.gather, tl.histogram,
tl.cat, tl.atomic_cas, scaled products, inline assembly. With a GPU Triton's compiler has them.

Where it matters for correctness it computes as the hardware does: an fp32 `tl.dot` rounds its operands to TF32 unless
told otherwise (`input_precision="ieee"` or "tf32x3"), and an access outside every tensor is an error. What a masked
load without `other` leaves out is 0: Triton calls it undefined; its compiler writes 0 for all of NVIDIA's cards.
"""

import re

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from judge.compiler import KernelError
from judge.prices import (DOT_COST, ERF, FMA, INSTRUCTION_COST, INTEGER_DIVISION, LIBDEVICE_COST, OTHER_LIBDEVICE,
                          OUTER_PRODUCT, PRECISE_DIVISION, UNALIGNED_DOT, UNIFORM_DIVISION)


class Diverged(Exception):
    """A branch, loop bound or index differs between the programs that run in lockstep."""


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
    """The data of a handle of such numbers."""
    kind, bits = AS_BITS[dtype]
    values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
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


# CUDA's libdevice functions as functions of torch tensors. Most have the name of a torch function; these are others.
# Types are Triton's own (triton/language/extra/cuda/libdevice.py): a result is cast to the type that stands there.
MEANING = {"rint": torch.round, "nearbyint": torch.round, "rcp": torch.reciprocal, "fabs": torch.abs,
           "fma": lambda x, y, z: x.double() * y.double() + z.double(), "exp10": lambda x: 10.0 ** x,
           "round": None, "remainder": None}  # these are not torch's


def meaning(name):
    """What the libdevice function of this name computes, or None if it is not supported here."""
    plain = re.sub(r"^fast_(\w+)f$|^(\w+)_rn$", r"\1\2", name)  # the quick ones are as exact here as the others
    return MEANING.get(plain, getattr(torch, plain, None) or getattr(torch.special, plain, None))


def converted(values, dtype):
    """Numbers as another numpy type. Floats become integers as PTX's cvt.rzi makes them: of 16 bits or more, to whose
    range they are clipped (NaN becomes 0); of 8 bits the lower half of these.
    """
    if values.dtype.kind != "f" or dtype.kind not in "iu":
        return values.astype(dtype)
    wide = np.dtype(f"{dtype.kind}{max(2, dtype.itemsize)}")
    low, high = np.iinfo(wide).min, np.iinfo(wide).max
    inside = np.nan_to_num(values, nan=0).astype(wide)
    return np.where(values <= float(low), low, np.where(values >= float(high), high, inside)).astype(dtype)


def is_outer(a, b):
    """Is a * b, of blocks of floats, that of a column and a row? numpy broadcasts with a stride of 0."""
    columns, rows = expanded_axes(a), expanded_axes(b)
    return a.dtype.kind == "f" and bool(columns - rows and rows - columns)


def expanded_axes(x) -> set:
    return {axis for axis in range(1, x.ndim) if x.strides[axis] == 0 and x.shape[axis] > 1}


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


def as_tuple(value) -> tuple:
    """A tuple as it is, any other value as the only one of a tuple."""
    return value if isinstance(value, tuple) else (value,)


def reshaping(method):
    """One of the interpreter's methods that give a block another shape, with `inherit`."""
    def call(self, *args):
        out = method(self, *args)
        inherit(as_tuple(out), args)
        return out
    return call


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

    # --- where a program is

    def create_get_program_id(self, axis):
        return TensorHandle(self.programs[axis], tl.int32)

    # --- shapes

    def create_make_range(self, kind, start, stop):
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, kind, arg):
        values = arg.data.reshape(-1, *[1] * len(kind.shape))
        return TensorHandle(np.broadcast_to(values, (arg.data.size, *kind.shape)), arg.dtype.scalar)

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
        out = TensorHandle(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar)
        if "steps" in arg.attr:
            out.attr["steps"] = [arg.attr["steps"][axis] for axis in perm]
        return out

    def create_join(self, a, b):
        return TensorHandle(np.stack(np.broadcast_arrays(a.data, b.data), axis=-1), a.dtype.scalar)

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

    def create_atomic_rmw(self, op, pointers, value, mask, sem, scope):
        if value.dtype.scalar in AS_BITS:
            raise KernelError(f"an atomic on {value.dtype.scalar} is not supported here")
        programs = np.zeros((len(self.programs[0]), *[1] * (pointers.data.ndim - 1)))  # it happens in each
        arrays = np.broadcast_arrays(pointers.data, value.data, mask.data, programs)
        kinds = pointers.dtype, value.dtype, mask.dtype
        pointers, value, mask = map(TensorHandle, map(np.ascontiguousarray, arrays), kinds)
        self.memory.before_atomic(pointers.data, mask.data, value.data.dtype)
        return super().create_atomic_rmw(op, pointers, value, mask, sem, scope)

    create_print = lambda self, *_: None  # not shown: nothing reads a replaying process's output

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
        programs = len(self.programs[0])
        times = programs if cost > 1 or data.dtype.kind == "f" else programs == 1
        self.memory.flops += data.size * cost * (times if len(data) == 1 else 1)
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
        values, kept = as_float(a).data, kind.scalar in AS_BITS
        values = as_kept(values, kind.scalar) if kept else converted(values, stock._get_np_dtype(kind))
        return self.count(TensorHandle(values, kind.scalar), 0, a)

    def create_fp_to_fp(self, a, kind, rounding):
        if "RTZ" in str(rounding) or kind.scalar not in AS_BITS and a.dtype.scalar not in AS_BITS:
            return self.count(super().create_fp_to_fp(a, kind, rounding), 0, a)
        return self.cast_impl(a, kind)

    def create_rsqrt(self, x):
        return self.count(super().create_rsqrt(x), INSTRUCTION_COST[np.sqrt], x)

    def create_erf(self, x):
        values = torch.erf(torch.from_numpy(np.ascontiguousarray(x.data))).numpy()
        return self.count(TensorHandle(values, x.dtype.scalar), ERF, x)

    def create_extern_elementwise(self, library, path, symbol, args, kind, pure):
        name, self.libdevice_name = self.libdevice_name, None
        function = meaning(name or "")
        if function is None:
            raise KernelError(f"{f'libdevice.{name}' if name else 'tl.extern_elementwise'} is not supported here")
        values = function(*(torch.from_numpy(np.ascontiguousarray(arg.data)) for arg in args)).numpy()
        values = converted(values, stock._get_np_dtype(kind))
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
        (left, right), steps = UNALIGNED_DOT[rate], b.attr.get("steps", ())
        known = len(steps) == 2  # else the worst
        order = DOT_COST[rate][steps[0] != 1] if known else max(DOT_COST[rate])
        return max(order, left * ("unaligned" in a.attr), right * ("unaligned" in b.attr or not known))

    # --- reductions and scans: a combine function works on whole blocks as well as on scalars

    def reduce(self, inputs, axis, combine, keep_dims=False, **_):
        tensors = as_tuple(inputs)
        block = [int(n) for n in tensors[0].shape]
        arrays = np.broadcast_arrays(*(t.handle.data for t in tensors))
        keep_dims, axis = bool(unwrap(keep_dims)), unwrap(axis)
        if axis is None:
            at, left = 1, [1] * len(block) * keep_dims
            arrays = [x.reshape(len(x), -1) for x in arrays]
        else:
            at = int(axis) % len(block) + 1
            left = block[:at - 1] + [1] * keep_dims + block[at:]
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
        tensors = as_tuple(inputs)
        at = int(unwrap(axis)) % len(tensors[0].shape) + 1
        arrays = list(np.broadcast_arrays(*(t.handle.data for t in tensors)))
        if unwrap(reverse):
            arrays = [np.flip(x, at) for x in arrays]
        function = self.numpy_function(combine, tensors, {"_sum_combine": np.cumsum, "_prod_combine": np.cumprod})
        self.compute(arrays[0])
        if function is not None:
            arrays = [function(arrays[0], axis=at, dtype=arrays[0].dtype)]
        else:
            step, position = 1, np.arange(arrays[0].shape[at]).reshape([-1] + [1] * (arrays[0].ndim - 1 - at))
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


for name in ("dot_scaled", "inline_asm", "atomic_poll", "atomic_cas", "map_elementwise", "gather", "histogram", "cat",
             "make_block_ptr", "make_tensor_descriptor"):
    setattr(Lockstep, f"create_{name}", refusing(f"tl.{name}"))
for name in ("reshape", "trans", "expand_dims", "broadcast", "join", "split", "bitcast"):
    setattr(Lockstep, f"create_{name}", reshaping(getattr(Lockstep, f"create_{name}")))
