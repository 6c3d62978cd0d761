"""What generated Triton kernels call beyond `triton.language`: exact division, NaN-keeping extrema.

The names are the ones the templates of `loops.ops` use. Importing this module imports Triton.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# Triton would take annotations for globals of the kernel, so there are none.

from __future__ import annotations

import triton
import triton.language as tl

from weft_codegen.kernels.triton.jit import libdevice


@triton.jit
def add(a, b):
    """a + b, as a combining function."""
    return a + b


@triton.jit
def mul(a, b):
    """a * b, as a combining function."""
    return a * b


@triton.jit
def and_(a, b):
    """a & b, as a combining function."""
    return a & b


@triton.jit
def or_(a, b):
    """a | b, as a combining function."""
    return a | b


@triton.jit
def not_(a):
    """Bitwise not; logical not of a bool."""
    if a.dtype == tl.int1:
        return a == 0
    else:
        return ~a


@triton.jit
def maximum(a, b):
    """The larger operand; NaN if either is NaN."""
    # One operand may be a literal, so only the two together are compared; the sum is NaN.
    return tl.where(a > b, a, tl.where(a <= b, b, a + b))


@triton.jit
def minimum(a, b):
    """The smaller operand; NaN if either is NaN."""
    return tl.where(a < b, a, tl.where(a >= b, b, a + b))


@triton.jit
def argmax(a, i, b, j):
    """The larger (value, index); the first index among equals, NaN is the largest."""
    better = (a > b) | ((a != a) & (b == b))
    tie = (a == b) | ((a != a) & (b != b))
    first = better | (tie & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def argmin(a, i, b, j):
    """The smaller (value, index); the first index among equals, NaN is the smallest."""
    better = (a < b) | ((a != a) & (b == b))
    tie = (a == b) | ((a != a) & (b != b))
    first = better | (tie & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b))."""
    low, high = minimum(a, b), maximum(a, b)
    same = (low == high) & (low - low != 0)
    return tl.where(same, a, high + tl.log(1 + tl.exp(low - high)))


@triton.jit
def div(a, b):
    """a / b of floats, rounded to nearest: Triton's `/` of float32 is off by two roundings."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def truncdiv(a, b):
    """Quotient towards zero (what `//` of Triton integers is)."""
    if a.dtype.is_floating():
        return libdevice.trunc(div(a, b))
    else:
        return a // b


@triton.jit
def floordiv(a, b):
    """Quotient towards minus infinity: Python's `//`, for integers and floats.

    Of floats it is exact, as c10's div_floor_floating: the remainder is subtracted first.
    """
    if a.dtype.is_floating():
        rest = libdevice.fmod(a, b)
        exact = div(a - rest, b)
        exact = tl.where((rest != 0) & ((rest < 0) != (b < 0)), exact - 1, exact)
        whole = tl.floor(exact)
        whole = tl.where(exact - whole > 0.5, whole + 1, whole)
        quotient = div(a, b)
        whole = tl.where(exact == 0, libdevice.copysign(exact * 0, quotient), whole)
        return tl.where(b == 0, quotient, whole)
    else:
        quotient = a // b
        inexact = (a - quotient * b) != 0
        return tl.where(inexact & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def fmod(a, b):
    """Remainder with the sign of the dividend: C's fmod and %."""
    if a.dtype.is_floating():
        return libdevice.fmod(a, b)
    else:
        return a % b


@triton.jit
def remainder(a, b):
    """Remainder with the sign of the divisor: Python's `%`."""
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def sqrt(a):
    """The square root, rounded to nearest."""
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def isinf(a):
    """Whether a float is infinite."""
    return tl.abs(a) == float("inf")


@triton.jit
def signbit(a):
    """Whether the sign bit is set, also of -0.0 and NaN."""
    if a.dtype == tl.float64:
        return a.to(tl.int64, bitcast=True) < 0
    elif a.dtype == tl.float32:
        return a.to(tl.int32, bitcast=True) < 0
    else:
        return a < 0


@triton.jit
def philox(seed, index, stream, word):
    """Word `word` of Philox4x32-10 with key `seed` and counter (index, stream)."""
    a, b, c, d = tl.philox(
        seed,
        index.to(tl.uint32),
        (index >> 32).to(tl.uint32),
        stream.to(tl.uint32),
        (stream >> 32).to(tl.uint32),
    )
    picked = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    return picked.to(tl.int32, bitcast=True)
