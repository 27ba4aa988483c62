"""Number formats and exact arithmetic on their words, for the expected values of instruction tests.

A number is a ``Real``: a sign and a fraction, infinity or NaN. Operations are exact; ``encode``
rounds once, to nearest even. Nothing here uses a floating-point operation of the machine.
"""

from __future__ import annotations

import fractions
import math
import random
from typing import NamedTuple

LANES = 32
Fraction = fractions.Fraction


class Format(NamedTuple):
    """A binary floating-point format: widths of its fields; e4m3 has no infinity."""

    exponent: int
    mantissa: int
    infinity: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << self.exponent - 1)

    @property
    def largest(self) -> int:
        """Word of the largest finite number."""
        top = ((1 << self.exponent) - 1) << self.mantissa
        return top - 1 if self.infinity else top + (1 << self.mantissa) - 2


FORMATS = {
    "e4m3": Format(4, 3, False), "e5m2": Format(5, 2), "f16": Format(5, 10), "bf16": Format(8, 7),
    "f32": Format(8, 23), "f64": Format(11, 52),
}  # fmt: skip


class Real(NamedTuple):
    """kind "finite", "inf" or "nan"; ``size`` is the absolute value of a finite number."""

    negative: bool
    size: Fraction = Fraction(0)
    kind: str = "finite"

    @property
    def value(self) -> Fraction:
        return -self.size if self.negative else self.size


NAN = Real(False, kind="nan")


def real(value: Fraction, zero_negative: bool = False) -> Real:
    return Real(value < 0 if value else zero_negative, abs(value))


def infinity(negative: bool) -> Real:
    return Real(negative, kind="inf")


def element(type_: str) -> str:
    return type_.removesuffix("x2")


def bits_of(type_: str) -> int:
    """Width of a type's values; predicates are stored as 32-bit words."""
    if type_ == "pred":
        return 32
    one = element(type_)
    bits = FORMATS[one].bits if one in FORMATS else int(one[1:])
    return bits * (2 if type_ != one else 1)


def signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> bits - 1 else word


def integer(word: int, type_: str) -> int:
    return signed(word, bits_of(type_)) if type_[0] == "s" else word


def decode(word: int, type_: str) -> Real:
    f = FORMATS[type_]
    negative, field = bool(word >> f.bits - 1), word >> f.mantissa & (1 << f.exponent) - 1
    fraction = word & (1 << f.mantissa) - 1
    magnitude = word & (1 << f.bits - 1) - 1
    if magnitude > f.largest:
        return infinity(negative) if f.infinity and not fraction else NAN
    whole = fraction + (1 << f.mantissa) * (field > 0)
    return Real(negative, whole * Fraction(2) ** (max(field, 1) - 1 + f.lowest - f.mantissa))


def exponent_of(size: Fraction) -> int:
    """floor(log2(size))."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def encode(number: Real, type_: str, saturate: bool = False) -> int:
    """The word nearest to a number, ties to even; overflow gives infinity or the largest number."""
    f = FORMATS[type_]
    sign = number.negative << f.bits - 1
    if number.kind == "nan":
        return (1 << f.bits - 1) - 1
    if number.kind == "inf":
        return sign | (f.largest if saturate else f.largest + 1)
    if not number.size:
        return sign
    exponent = max(exponent_of(number.size), f.lowest)
    steps = round(number.size / Fraction(2) ** (exponent - f.mantissa))  # Fraction: ties to even
    word = steps + ((exponent - f.lowest) << f.mantissa)
    return sign | (word if word <= f.largest else f.largest + (not saturate))


# -- operations -----------------------------------------------------------------------------------
def add(a: Real, b: Real) -> Real:
    if "nan" in (a.kind, b.kind) or a.kind == b.kind == "inf" and a.negative != b.negative:
        return NAN
    if "inf" in (a.kind, b.kind):
        return a if a.kind == "inf" else b
    return real(a.value + b.value, a.negative and b.negative)


def negate(a: Real) -> Real:
    return a._replace(negative=not a.negative)


def subtract(a: Real, b: Real) -> Real:
    return add(a, negate(b))


def multiply(a: Real, b: Real) -> Real:
    negative, kinds = a.negative != b.negative, (a.kind, b.kind)
    if "nan" in kinds or "inf" in kinds and any(x.kind == "finite" and not x.size for x in (a, b)):
        return NAN
    return infinity(negative) if "inf" in kinds else Real(negative, a.size * b.size)


def divide(a: Real, b: Real) -> Real:
    negative = a.negative != b.negative
    if "nan" in (a.kind, b.kind) or a.kind == b.kind == "inf":
        return NAN
    if b.kind == "inf":
        return Real(negative)
    if a.kind == "inf" or not b.size:
        return infinity(negative) if a.kind == "inf" or a.size else NAN
    return Real(negative, a.size / b.size)


def fused(a: Real, b: Real, c: Real) -> Real:
    return add(multiply(a, b), c)


def root(a: Real) -> Real:
    """Square root, correct to 200 bits with the last one sticky: enough for one rounding."""
    if a.kind == "nan" or a.negative and (a.size or a.kind == "inf"):
        return NAN
    if a.kind == "inf" or not a.size:
        return a
    scaled = a.size * Fraction(4) ** 300
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    return Real(False, (Fraction(whole) + (whole * whole != scaled) * Fraction(1, 2)) / 2**300)


def smaller(a: Real, b: Real) -> Real:
    """NaN loses; -0 is smaller than +0."""
    if "nan" in (a.kind, b.kind):
        return b if a.kind == "nan" else a
    return a if order(a) <= order(b) else b


def larger(a: Real, b: Real) -> Real:
    if "nan" in (a.kind, b.kind):
        return b if a.kind == "nan" else a
    return b if order(a) <= order(b) else a


def order(a: Real):
    size = (1, Fraction(0)) if a.kind == "inf" else (0, a.size)
    return (not a.negative, *((-size[0], -size[1]) if a.negative else size))


def flush(word: int) -> int:
    """A subnormal float32 to zero of its sign."""
    return word if word & 0x7F800000 else word & 0x80000000


# -- inputs ---------------------------------------------------------------------------------------
def integers(bits: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    top = (1 << bits) - 1
    edges = [0, 1, top, top >> 1, (top >> 1) + 1, 2, top - 1, 0x55555555 & top]
    return [*edges, *(rng.getrandbits(bits) for _ in range(LANES - len(edges)))]


def floats(type_: str, seed: int, spread: int = 6) -> list[int]:
    """Finite numbers within 2**spread of 1, so that results are finite and seldom exact."""
    rng = random.Random(seed)
    return [
        encode(real(Fraction(rng.uniform(-2, 2)) * Fraction(2) ** rng.randint(-spread, spread)),
               type_)
        for _ in range(LANES)
    ]  # fmt: skip


def edges(type_: str) -> list[int]:
    """+-0, subnormals, smallest normals, 1, the largest numbers, infinities, NaN."""
    f = FORMATS[type_]
    one, normal = encode(real(Fraction(1)), type_), 1 << f.mantissa
    positive = [0, 1, normal - 1, normal, one, one + 1, f.largest, f.largest + 1]
    return [*positive, *(w | 1 << f.bits - 1 for w in positive), (1 << f.bits - 1) - 1]


def floats_with_edges(type_: str, seed: int) -> list[int]:
    """Every other lane an edge, each seed in another order, so that edges meet each other."""
    rng, plain, special = random.Random(seed), floats(type_, seed), edges(type_)
    rng.shuffle(special)
    return [special[i // 2] if i % 2 == seed % 2 or i < 8 else w for i, w in enumerate(plain)]


def inputs(type_: str, seed: int) -> list[int]:
    """One word per lane."""
    one = element(type_)
    if type_ != one:
        bits = bits_of(one)
        return [a | b << bits for a, b in zip(inputs(one, seed), inputs(one, seed + 50),
                                              strict=True)]  # fmt: skip
    if one in FORMATS:
        return floats_with_edges(one, seed)
    if type_ == "pred":
        return [i >> seed - 1 & 1 for i in range(LANES)]
    return integers(bits_of(type_), seed)
