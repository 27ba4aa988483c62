"""Arithmetic that NumPy does not have: exact fma, bfloat16, flush to zero, high products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_TINY = np.float32(2.0**-126)


def negating(fn: Callable, flags: list[bool]) -> Callable:
    """fn with the predicates flagged complemented first."""
    return lambda *xs: fn(*[~x if f else x for x, f in zip(xs, flags, strict=True)])


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 to zero of the same sign."""
    return (
        np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)
        if x.dtype == np.float32
        else x
    )


def flushing(fn: Callable) -> Callable:
    """fn with ``.ftz``: subnormal inputs and outputs flushed (PTX ISA 9.7.3)."""
    return lambda *xs: flush(np.asarray(fn(*[flush(x) for x in xs])))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c in float32 with one rounding.

    The product is exact in float64, their sum is not: where the float64 sum lies half-way between
    two float32 (or
    is subnormal), it is first rounded to odd, which makes the second rounding right.
    """
    p = a.astype(np.float64) * b
    s = p + c
    bits = s.view(np.int64)
    doubtful = (bits & 0x1FFFFFFF == 0x10000000) | (np.abs(s) < 2.0**-125)
    if np.logical_or.reduce(doubtful, axis=None):
        s = _to_odd(p, c.astype(np.float64), s)
    return s.astype(np.float32)


def _to_odd(p: np.ndarray, c: np.ndarray, s: np.ndarray) -> np.ndarray:
    """p + c rounded to odd, from the rounded sum s and its error (Knuth's two-sum)."""
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(np.int64)
    toward = np.where((error > 0) == (s > 0), 1, -1)
    inexact = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + toward, bits).view(np.float64)


def fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c on bfloat16 bits, rounded once: to odd in float64 and float32, then to nearest."""
    p = widen_bf16(a).astype(np.float64) * widen_bf16(b)
    wide = widen_bf16(c).astype(np.float64)
    s = _to_odd(p, wide, p + wide)
    near = s.astype(np.float32)
    bits = near.view(np.uint32)
    toward = np.where(np.abs(s) > np.abs(near), 1, -1).astype(np.uint32)
    inexact = np.isfinite(s) & (near != s) & (bits & 1 == 0)
    return narrow_bf16(np.where(inexact, bits + toward, bits).view(np.float32))


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller number; NaN loses, -0 is smaller than +0 (PTX ISA 9.7.3.11)."""
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger number; NaN loses, +0 is larger than -0 (PTX ISA 9.7.3.12)."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest even; NaN gives 0x7FFF as the hardware's does (PTX ISA
    9.7.9.21).
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if np.logical_or.reduce(nan, axis=None):
        result[nan] = 0x7FFF
    return result


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the double-width product of 16- or 32-bit integers."""
    bits = 8 * a.dtype.itemsize
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
