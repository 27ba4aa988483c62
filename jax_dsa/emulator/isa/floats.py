"""Floating point: float32/float64 (PTX ISA 9.7.3), packed and 16-bit (9.7.4), mixed precision
(9.7.5).
"""

import functools

import numpy as np

from jax_dsa.emulator.isa import numerics
from jax_dsa.emulator.isa.numerics import fma32, narrow_bf16, widen_bf16
from jax_dsa.emulator.isa.table import value

SUM = "{|.rn}{|.ftz}.{f32|f32x2}"


@value(f"add{SUM}", "add{|.rn}.f64", "add{|.rn}.{f16|f16x2}")
def add(a, b):
    """a + b (9.7.3.3)."""
    return a + b


@value(f"sub{SUM}", "sub{|.rn}.f64", "sub{|.rn}.{f16|f16x2}")
def sub(a, b):
    """a - b (9.7.3.4)."""
    return a - b


@value(f"mul{SUM}", "mul{|.rn}.f64", "mul{|.rn}.{f16|f16x2}")
def mul(a, b):
    """a * b (9.7.3.5)."""
    return a * b


@value("fma.rn{|.ftz}.{f32|f32x2}")
def fma(a, b, c):
    """a*b + c, rounded once (9.7.3.6)."""
    return fma32(a, b, c)


@value("div{.rn|.full|.approx}{|.ftz}.f32", "div.rn.f64")
def div(a, b):
    """a / b; the approximate forms are computed exactly (9.7.3.8)."""
    return a / b


@value("neg{|.ftz}.f32", "neg.f64", "neg.{f16|f16x2}")
def neg(a):
    """-a (9.7.3.10)."""
    return -a


@value("abs{|.ftz}.f32", "abs.f64")
def abs_(a):
    """|a| (9.7.3.9)."""
    return np.abs(a)


@value("min{|.ftz}.f32", "min.f64")
def min_(a, *rest):
    """Smallest of two or three; NaN loses, -0 < +0 (9.7.3.11)."""
    return functools.reduce(numerics.smaller, rest, a)


@value("max{|.ftz}.f32", "max.f64")
def max_(a, *rest):
    """Largest of two or three; NaN loses, -0 < +0 (9.7.3.12)."""
    return functools.reduce(numerics.larger, rest, a)


@value("rcp{.rn|.approx}{|.ftz}.f32")
def rcp(a):
    """1 / a; the approximate form is computed exactly (9.7.3.13)."""
    return np.float32(1) / a


@value("sqrt{.rn|.approx}{|.ftz}.f32")
def sqrt(a):
    """Square root (9.7.3.15)."""
    return np.sqrt(a)


@value("rsqrt.approx{|.ftz}.f32")
def rsqrt(a):
    """1 / square root, computed in float64 (9.7.3.16)."""
    return (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)


@value("ex2.approx{|.ftz}.f32")
def ex2(a):
    """2**a, rounded once; the hardware's is within 2 ulp (9.7.3.20)."""
    return np.exp2(a.astype(np.float64)).astype(np.float32)


@value("lg2.approx{|.ftz}.f32")
def lg2(a):
    """log2(a), rounded once; the hardware's is within 2 ulp (9.7.3.19)."""
    return np.log2(a.astype(np.float64)).astype(np.float32)


@value("tanh.approx.f32")
def tanh(a):
    """tanh(a), rounded once (9.7.3.21)."""
    return np.tanh(a.astype(np.float64)).astype(np.float32)


@value("testp.finite.f32", d="pred")
def testp_finite(a):
    """True where finite (9.7.3.1)."""
    return np.isfinite(a)


@value("add{|.rn}.{bf16|bf16x2}")
def add_bf16(a, b):
    """a + b rounded to bfloat16 (9.7.4.1)."""
    return narrow_bf16(widen_bf16(a) + widen_bf16(b))


@value("sub{|.rn}.{bf16|bf16x2}")
def sub_bf16(a, b):
    """a - b rounded to bfloat16 (9.7.4.2)."""
    return narrow_bf16(widen_bf16(a) - widen_bf16(b))


@value("mul{|.rn}.{bf16|bf16x2}")
def mul_bf16(a, b):
    """a * b rounded to bfloat16 (9.7.4.3): the product is exact in float32."""
    return narrow_bf16(widen_bf16(a) * widen_bf16(b))


@value("fma.rn.{bf16|bf16x2}")
def fma_bf16(a, b, c):
    """a*b + c rounded once to bfloat16 (9.7.4.4)."""
    return numerics.fma_bf16(a, b, c)


@value("max.{bf16|bf16x2}")
def max_bf16(a, b):
    """Larger one (9.7.4.8)."""
    return narrow_bf16(numerics.larger(widen_bf16(a), widen_bf16(b)))


@value("min.{bf16|bf16x2}")
def min_bf16(a, b):
    """Smaller one (9.7.4.7)."""
    return narrow_bf16(numerics.smaller(widen_bf16(a), widen_bf16(b)))


@value("add{|.rn}.f32.bf16", d="f32", s="bf16 f32")
def add_mixed(a, c):
    """bfloat16 a plus float32 c, in float32 (9.7.5.1)."""
    return widen_bf16(a) + c


@value("sub{|.rn}.f32.bf16", d="f32", s="bf16 f32")
def sub_mixed(a, c):
    """bfloat16 a minus float32 c, in float32 (9.7.5.2)."""
    return widen_bf16(a) - c


@value("fma.rn.f32.bf16", d="f32", s="bf16 bf16 f32")
def fma_mixed(a, b, c):
    """bfloat16 a*b plus float32 c, rounded once to float32 (9.7.5.3)."""
    return fma32(widen_bf16(a), widen_bf16(b), c)
