"""cvt (PTX ISA 9.7.9.21): integers, floats, packed 16-bit and 8-bit floats."""

import ml_dtypes
import numpy as np

from jax_dsa.emulator.isa.numerics import narrow_bf16, widen_bf16
from jax_dsa.emulator.isa.table import value
from jax_dsa.emulator.registers import DTYPES

_INTS = [f"{k}{n}" for k in "us" for n in (8, 16, 32, 64)]
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _integer_form(dst: str, src: str) -> None:
    def cvt(a):
        return a.astype(DTYPES[dst])

    cvt.__doc__ = f"{src} to {dst}: extended by the sign of {src}, or truncated."
    value(f"cvt.{dst}.{src}", d=dst, s=src)(cvt)


def _to_float_form(dst: str, src: str) -> None:
    def cvt(a):
        return a.astype(DTYPES[dst])

    cvt.__doc__ = f"{src} to {dst}, to nearest even."
    value(f"cvt.rn.{dst}.{src}", d=dst, s=src)(cvt)


def _to_integer_form(dst: str, src: str, rounding: str, fn) -> None:
    dtype = np.dtype(DTYPES[dst])
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    top = dtype.type(limits.min or limits.max // 2 + 1)
    unknown = top if "64" in dst + src else dtype.type(0)

    def cvt(a):
        whole = fn(np.nan_to_num(a.astype(np.float64), nan=0.0))
        inside = np.clip(whole, low, high).astype(dtype)
        return np.where(np.isnan(a), unknown, np.where(whole >= high, limits.max, inside)).astype(
            dtype
        )

    cvt.__doc__ = f"{src} to {dst}, {rounding}, clamped; NaN gives {unknown}."
    ftz = "{|.ftz}" if src == "f32" else ""
    value(f"cvt.{rounding}{ftz}.{dst}.{src}", d=dst, s=src)(cvt)


for _dst in _INTS:
    for _src in _INTS:
        if _dst != _src:
            _integer_form(_dst, _src)
    for _src in ("f32", "f64"):
        _to_float_form(_src, _dst)
        for _rounding, _fn in _ROUND.items():
            _to_integer_form(_dst, _src, _rounding, _fn)


@value("cvt.f64.f32", d="f64", s="f32")
def cvt_f64_f32(a):
    """Exact."""
    return a.astype(np.float64)


@value("cvt.rn.f32.f64", d="f32", s="f64")
def cvt_f32_f64(a):
    """To nearest even."""
    return a.astype(np.float32)


@value("cvt.rn.ftz.f32.f64", d="f32", s="f64")
def cvt_ftz_f32_f64(a):
    """To nearest even; zero where subnormal before rounding."""
    return np.where(np.abs(a) < 2.0**-126, np.copysign(0, a), a).astype(np.float32)


@value("cvt.f32.f16", d="f32", s="f16")
def cvt_f32_f16(a):
    """Exact."""
    return a.astype(np.float32)


@value("cvt.rn.f16.f32", d="f16", s="f32")
def cvt_f16_f32(a):
    """To nearest even; overflow gives infinity."""
    return a.astype(np.float16)


@value("cvt{|.ftz}.f32.bf16", d="f32", s="bf16")
def cvt_f32_bf16(a):
    """Exact."""
    return widen_bf16(a)


@value("cvt.rn.bf16.f32", d="bf16", s="f32")
def cvt_bf16_f32(a):
    """To nearest even."""
    return narrow_bf16(a)


def _join(high, low):
    return (high.astype(np.uint32) << np.uint32(16)) | low


@value("cvt.rn.bf16x2.f32", d="b32", s="f32")
def cvt_bf16x2(a, b):
    """Two values to nearest even: a in the upper half, b in the lower."""
    return _join(narrow_bf16(a), narrow_bf16(b))


@value("cvt.rn.f16x2.f32", d="b32", s="f32")
def cvt_f16x2(a, b):
    """Two values to nearest even: a in the upper half, b in the lower."""
    return _join(a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16))


def _fp8_form(name: str, dtype) -> None:
    top = float(ml_dtypes.finfo(dtype).max)

    def cvt(a, b):
        halves = [
            np.clip(x, -top, top).astype(dtype).view(np.uint8).astype(np.uint16) for x in (a, b)
        ]
        return (halves[0] << np.uint16(8)) | halves[1]

    cvt.__doc__ = (
        f"Two float32 to {name}, to nearest even, clamped to the finite range: a upper, b lower."
    )
    value(f"cvt.rn.satfinite.{name}x2.f32", d="b16", s="f32")(cvt)

    def back(a):
        low, high = (
            (a >> np.uint16(s)).astype(np.uint8).view(dtype).astype(np.float16) for s in (0, 8)
        )
        return _join(high.view(np.uint16), low.view(np.uint16))

    back.__doc__ = f"Two {name} to float16, exact."
    value(f"cvt.rn.f16x2.{name}x2", d="b32", s="b16")(back)


_fp8_form("e4m3", ml_dtypes.float8_e4m3fn)
_fp8_form("e5m2", ml_dtypes.float8_e5m2)
