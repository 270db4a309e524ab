import math
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

GLOBAL = tl.constexpr(4)


@triton.jit
def double(c):
    return c * 2


@triton.jit
def both(c, d):
    return c + d, c - d


@triton.jit
def power(c, N: tl.constexpr):
    if N == 1:
        return c
    else:
        return c * power(c, N - 1)


@triton.jit(noinline=True)
def apart(c):
    return c * 3


@triton.jit(noinline=True)
def early(c):
    if c > 3:
        return 10
    return 20


@triton.jit
def apply(c, f: tl.constexpr):
    return f(c)


@triton.jit
def larger(c, d):
    return tl.maximum(tl.abs(c), tl.abs(d))


@triton.jit
def branching(c, d):
    if c > d:
        e = c
    else:
        e = d
    return e


@triton.jit
def pairs(c, d, e, f):
    return c + e, d + f


@triton.jit
def recurrence(c, d, e, f):
    return c * e, d * e + f


@triton.jit
def by_sign(c, d):
    if c > 0:
        return c * 2
    else:
        return d


@triton.constexpr_function
def three():
    return 3
