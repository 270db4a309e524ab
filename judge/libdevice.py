"""CUDA's libdevice functions where there is no GPU: what each of them computes, as a function of torch tensors.

Most have the name of a torch function; MEANING has the others. Types, and which of them a function takes, are Triton's
own (triton/language/extra/cuda/libdevice.py): a result is cast to the type that stands there. What is not known here is
refused by name.
"""

import math
import re

import numpy as np
import torch

ROUND = {"n": torch.round, "z": torch.trunc, "d": torch.floor, "u": torch.ceil}  # by the last letter of float2int_rn


def half_away(x):
    """Rounded to the nearest integer, halves away from zero."""
    return x.trunc() + x.sign() * ((x - x.trunc()).abs() >= 0.5)


MEANING = {
    "rint": torch.round, "nearbyint": torch.round, "llrint": torch.round, "round": half_away, "llround": half_away,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3), "rcbrt": lambda x: x.sign() * x.abs() ** (-1 / 3),
    "rhypot": lambda x, y: 1 / torch.hypot(x, y), "rcp": torch.reciprocal, "fabs": torch.abs,
    "fma": lambda x, y, z: x.double() * y.double() + z.double(), "exp10": lambda x: 10.0 ** x,
    "fdim": lambda x, y: (x - y).clamp(min=0), "saturatef": lambda x: x.nan_to_num(0.0).clamp(0, 1),
    "remainder": lambda x, y: x.double() - y.double() * torch.round(x.double() / y.double()),
    "logb": lambda x: torch.frexp(x).exponent - 1, "ilogb": lambda x: torch.frexp(x).exponent - 1,
    "scalbn": torch.ldexp,
    "sinpi": lambda x: (x.double() * math.pi).sin(), "cospi": lambda x: (x.double() * math.pi).cos(),
    "normcdf": torch.special.ndtr, "normcdfinv": torch.special.ndtri, "erfcinv": lambda x: (1 - x.double()).erfinv(),
    "finitef": torch.isfinite, "isfinited": torch.isfinite}


def meaning(name):
    """What the libdevice function of this name computes, or None if it is not supported here."""
    conversion = re.fullmatch(r"(float|double)2u?(int|ll)_r([nzdu])", name)
    if conversion:
        return ROUND[conversion[3]]
    if re.fullmatch(r"(u?int|u?ll|double)2(float|double)_rn", name):
        return torch.clone
    plain = re.sub(r"^fast_(\w+)f$|^(\w+)_rn$", r"\1\2", name)  # the quick ones are as exact here as the others
    return MEANING.get(plain) or getattr(torch, plain, None) or getattr(torch.special, plain, None)


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
