"""Integer arithmetic (PTX ISA 9.7.1) and comparison (9.7.6, 9.7.7)."""

import numpy as np

from jax_dsa.emulator.isa.numerics import high_product
from jax_dsa.emulator.isa.table import value

INTEGERS = "{u16|u32|u64|s16|s32|s64}"
NARROW = "{u16|u32|s16|s32}"


@value(f"add.{INTEGERS}")
def add(a, b):
    """a + b, wrapping (9.7.1.1)."""
    return a + b


@value(f"sub.{INTEGERS}")
def sub(a, b):
    """a - b, wrapping (9.7.1.2)."""
    return a - b


@value(f"mul.lo.{INTEGERS}")
def mul_lo(a, b):
    """Low half of the product (9.7.1.3)."""
    return a * b


@value(f"mul.hi.{NARROW}")
def mul_hi(a, b):
    """High half of the product (9.7.1.3)."""
    return high_product(a, b)


def _wide(a, b):
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(wide) * b


@value("mul.wide.u16", d="u32")
@value("mul.wide.s16", d="s32")
@value("mul.wide.u32", d="u64")
@value("mul.wide.s32", d="s64")
def mul_wide(a, b):
    """The whole product, twice as wide (9.7.1.3)."""
    return _wide(a, b)


@value(f"mad.lo.{INTEGERS}")
def mad_lo(a, b, c):
    """Low half of a*b, plus c (9.7.1.4)."""
    return a * b + c


@value("mad.wide.u32", d="u64", s="u32 u32 u64")
@value("mad.wide.s32", d="s64", s="s32 s32 s64")
@value("mad.wide.u16", d="u32", s="u16 u16 u32")
@value("mad.wide.s16", d="s32", s="s16 s16 s32")
def mad_wide(a, b, c):
    """Whole product plus a wide addend (9.7.1.4)."""
    return _wide(a, b) + c


def _nonzero(b):
    """Division by zero gives a machine-specific value: divide by one instead of trapping."""
    return np.where(b == 0, b.dtype.type(1), b)


@value(f"div.{INTEGERS}")
def div(a, b):
    """Quotient truncated toward zero (9.7.1.8)."""
    b = _nonzero(b)
    quotient = a // b
    return (
        quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)
        if a.dtype.kind == "i"
        else quotient
    )


@value(f"rem.{INTEGERS}")
def rem(a, b):
    """Remainder of truncated division (9.7.1.9)."""
    return np.fmod(a, _nonzero(b))


@value("neg.{s16|s32|s64}")
def neg(a):
    """-a (9.7.1.11)."""
    return -a


@value("abs.{s16|s32|s64}")
def abs_(a):
    """|a| (9.7.1.10)."""
    return np.abs(a)


@value(f"min.{INTEGERS}")
def min_(a, b):
    """Smaller one (9.7.1.12)."""
    return np.minimum(a, b)


@value(f"max.{INTEGERS}")
def max_(a, b):
    """Larger one (9.7.1.13)."""
    return np.maximum(a, b)


def _unordered(fn):
    return lambda a, b: fn(a, b) | np.isnan(a) | np.isnan(b)


_COMPARE = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_FLOATS = "{f32|f64}"


def _setp(name: str, fn, types: str, ftz: str = "") -> None:
    """setp (9.7.6.2): a comparison, alone or combined with a predicate."""
    fn_doc = f"a {name} b (9.7.6.2)"

    def compare(a, b):
        return fn(a, b)

    compare.__doc__ = fn_doc
    value(f"setp.{name}{ftz}.{types}", d="pred")(compare)
    for word, combine in _COMBINE.items():

        def combined(a, b, c, combine=combine):
            return combine(fn(a, b), c)

        combined.__doc__ = f"(a {name} b) {word} c (9.7.6.2)"
        value(f"setp.{name}.{word}{ftz}.{types}", d="pred", s="-1 -1 pred")(combined)


for _name, _fn in _COMPARE.items():
    _setp(_name, _fn, INTEGERS)
    _setp(_name, _fn, _FLOATS)
    _setp(_name, _fn, "f32", ".ftz")
    _setp(
        _name + "u",
        _unordered(np.equal if _name == "eq" else np.not_equal if _name == "ne" else _fn),
        _FLOATS,
    )
for _name in ("eq", "ne"):
    _setp(_name, _COMPARE[_name], "{b16|b32|b64}")
for _name, _same in _UNSIGNED.items():
    _setp(_name, _COMPARE[_same], "{u16|u32|u64}")
_setp("num", lambda a, b: ~(np.isnan(a) | np.isnan(b)), _FLOATS)
_setp("nan", lambda a, b: np.isnan(a) | np.isnan(b), _FLOATS)


@value("selp.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64}", s="-1 -1 pred")
def selp(a, b, p):
    """a where p, else b (9.7.6.3)."""
    return np.where(p, a, b)
