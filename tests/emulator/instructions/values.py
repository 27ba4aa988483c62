"""Cases of value rows: for every form the sources, the result and a function on words."""

from __future__ import annotations

import decimal
import fractions
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import formats
from formats import LANES, Real, bits_of, decode, element, encode, inputs, integer, real, signed

Fraction = fractions.Fraction


class Case(NamedTuple):
    """``function`` maps source words to the result's word; ``ulp``: what hardware may be off by."""

    sources: list[str]
    result: str
    function: Callable
    given: list[list[int]] | None = None
    ulp: int = 0
    form: str = ""
    tail: str = ""  # operands behind the sources


CASES: dict[str, Case] = {}


def case(form, sources, result, function, given=None, ulp=0, name="", tail="") -> None:
    assert (name or form) not in CASES, form
    CASES[name or form] = Case(sources.split(), result, function, given, ulp, form, tail)


def mask(type_: str) -> int:
    return (1 << bits_of(type_)) - 1


def integers(fn: Callable, type_: str, result: str = "") -> Callable:
    """fn on signed or unsigned integers, wrapped to the result's width."""
    return lambda *ws: fn(*(integer(w, type_) for w in ws)) & mask(result or type_)


def halves(fn: Callable, bits: int) -> Callable:
    """fn on the two elements of a packed type."""
    low = (1 << bits) - 1
    return lambda *ws: fn(*(w & low for w in ws)) | fn(*(w >> bits for w in ws)) << bits


# -- integers -------------------------------------------------------------------------------------
def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int:
    return a - b * _quotient(a, b)


_INTEGER = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c, "min": min, "max": max,
}  # fmt: skip


def integer_cases() -> None:
    for kind, bits in itertools.product("us", (16, 32, 64)):
        t, wide = f"{kind}{bits}", f"{kind}{2 * bits}"
        for name, fn in _INTEGER.items():
            case(f"{name}.{t}", " ".join([t] * (3 if name == "mad.lo" else 2)), t, integers(fn, t))
        nonzero = [inputs(t, 1), [w or 3 for w in inputs(t, 2)][::-1]]
        case(f"rem.{t}", f"{t} {t}", t, integers(_remainder, t), nonzero)
        case(f"div.{t}", f"{t} {t}", t, integers(_quotient, t), nonzero)
        if bits < 64:
            product = integers(lambda a, b: a * b, t, wide)
            case(f"mul.wide.{t}", f"{t} {t}", wide, product)
            case(f"mul.hi.{t}", f"{t} {t}", t, lambda a, b, p=product, s=bits: p(a, b) >> s)
            total = lambda a, b, c, p=product, w=wide: p(a, b) + c & mask(w)  # noqa: E731
            case(f"mad.wide.{t}", f"{t} {t} {wide}", wide, total)
        if kind == "s":
            case(f"neg.{t}", t, t, integers(lambda a: -a, t))
            case(f"abs.{t}", t, t, integers(abs, t))


# -- bits -----------------------------------------------------------------------------------------
def counts() -> list[int]:
    """Shift counts: within, at and beyond every width."""
    return [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 2**31, 2**32 - 1, *range(17)]


def bit_cases() -> None:
    logic = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    for t, (name, fn) in itertools.product(("b16", "b32", "b64", "pred"), logic.items()):
        case(f"{name}.{t}", f"{t} {t}", t, fn)
    case("not.pred", "pred", "pred", lambda a: 1 - a)
    for t in ("b16", "b32", "b64"):
        case(f"not.{t}", t, t, integers(lambda a: ~a, t))
        case(f"shl.{t}", f"{t} u32", t, _shift_left(t), [inputs(t, 1), counts()])
    for kind, bits in itertools.product("bus", (16, 32, 64)):
        t = f"{kind}{bits}"
        shift = lambda a, c, t=t: integer(a, t) >> min(c, bits_of(t)) & mask(t)  # noqa: E731
        case(f"shr.{t}", f"{t} u32", t, shift, [inputs(t, 1), counts()])
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "pred"):
        case(f"mov.{t}", t, t, lambda a: a)
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
        case(f"selp.{t}", f"{t} {t} pred", t, lambda a, b, p: a if p else b)
    case("popc.b32", "b32", "u32", int.bit_count)
    case("popc.b64", "b64", "u32", int.bit_count)
    case("clz.b32", "b32", "u32", lambda a: 32 - a.bit_length())
    case("brev.b32", "b32", "b32", lambda a: int(f"{a:032b}"[::-1], 2))
    fields = [inputs("u32", 1), counts(), counts()[::-1]]
    case("bfe.u32", "u32 u32 u32", "u32", _field, fields)
    case("prmt.b32", "b32 b32 u32", "b32", _permute)
    shf = [inputs("b32", 1), inputs("b32", 2), counts()]
    case("shf.l.wrap.b32", "b32 b32 u32", "b32",
         lambda a, b, c: ((b << 32 | a) << c % 32) >> 32 & mask("b32"), shf)  # fmt: skip
    case("shf.r.wrap.b32", "b32 b32 u32", "b32",
         lambda a, b, c: (b << 32 | a) >> c % 32 & mask("b32"), shf)  # fmt: skip
    for table in (0x80, 0xE8, 0x96, 0x1B):
        case("lop3.b32", "b32 b32 b32", "b32", lambda a, b, c, t=table: _lop3(a, b, c, t),
             name=f"lop3.b32 {table:#x}", tail=f", {table:#x}")  # fmt: skip


def _shift_left(t: str) -> Callable:
    return lambda a, c: a << min(c, bits_of(t)) & mask(t)


def _field(a: int, start: int, length: int) -> int:
    """Start and length are taken modulo 256."""
    return a >> start % 256 & (1 << length % 256) - 1


def _permute(a: int, b: int, s: int) -> int:
    both, result = b << 32 | a, 0
    for i in range(4):
        pick = s >> 4 * i & 15
        byte = both >> 8 * (pick & 7) & 255
        result |= (byte if not pick & 8 else 255 * (byte >> 7)) << 8 * i
    return result


def _lop3(a: int, b: int, c: int, table: int) -> int:
    rows = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
    return sum((table >> row & 1) << i for i, row in enumerate(rows))


# -- comparisons ----------------------------------------------------------------------------------
_RELATIONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}


def _compare(name: str, type_: str, fn: Callable, ftz: str = "") -> None:
    """setp alone and combined with a predicate; half of the pairs are equal."""
    a, b = inputs(type_, 1), inputs(type_, 2)
    columns = [a, [x if i % 4 == 0 else y for i, (x, y) in enumerate(zip(a, b, strict=True))]]
    case(f"setp.{name}{ftz}.{type_}", f"{type_} {type_}", "pred", fn, columns)
    for word, combine in _COMBINE.items():
        case(f"setp.{name}.{word}{ftz}.{type_}", f"{type_} {type_} pred", "pred",
             lambda a, b, p, combine=combine: combine(fn(a, b), p), [*columns, inputs("pred", 2)]
             )  # fmt: skip


def _numbers(relation: Callable, t: str, unordered: bool, ftz: bool = False) -> Callable:
    def fn(*words):
        a, b = (decode(formats.flush(w) if ftz else w, t) for w in words)
        if "nan" in (a.kind, b.kind):
            return int(unordered)
        key = [_ordinal(x) for x in (a, b)]
        return int(relation(*key))

    return fn


def _ordinal(a: Real):
    """A key that orders infinities and numbers; -0 equals +0."""
    return (-1 if a.negative else 1, 0) if a.kind == "inf" else (0, a.value)


def compare_cases() -> None:
    for name, relation in _RELATIONS.items():
        for t in ("u16", "u32", "u64", "s16", "s32", "s64"):
            _compare(name, t, lambda a, b, r=relation, t=t: int(r(integer(a, t), integer(b, t))))
        for t in ("f32", "f64"):
            _compare(name, t, _numbers(relation, t, False))
            _compare(f"{name}u", t, _numbers(relation, t, True))
        _compare(name, "f32", _numbers(relation, "f32", False, True), ".ftz")
    for name, t in itertools.product(("eq", "ne"), ("b16", "b32", "b64")):
        _compare(name, t, lambda a, b, r=_RELATIONS[name]: int(r(a, b)))
    for (name, same), t in itertools.product(_UNSIGNED.items(), ("u16", "u32", "u64")):
        _compare(name, t, lambda a, b, r=_RELATIONS[same]: int(r(a, b)))
    for t in ("f32", "f64"):
        _compare("num", t, _numbers(lambda a, b: True, t, False))
        _compare("nan", t, _numbers(lambda a, b: False, t, True))
    case("testp.finite.f32", "f32", "pred", lambda a: int(decode(a, "f32").kind == "finite"))


# -- floating point -------------------------------------------------------------------------------
def floating(fn: Callable, type_: str, ftz: bool = False) -> Callable:
    """fn on numbers, rounded once; subnormal sources and results flushed with ``ftz``."""
    flush = formats.flush if ftz else lambda word: word
    one = element(type_)
    single = lambda *ws: flush(encode(fn(*(decode(flush(w), one) for w in ws)), one))  # noqa: E731
    return single if one == type_ else halves(single, bits_of(one))


def arithmetic_cases() -> None:
    operations = {"add": formats.add, "sub": formats.subtract, "mul": formats.multiply}
    for (name, fn), rn in itertools.product(operations.items(), ("", ".rn")):
        for t, ftz in itertools.product(("f32", "f32x2"), ("", ".ftz")):
            case(f"{name}{rn}{ftz}.{t}", f"{t} {t}", t, floating(fn, t, bool(ftz)))
        for t in ("f64", "f16", "f16x2", "bf16", "bf16x2"):
            case(f"{name}{rn}.{t}", f"{t} {t}", t, floating(fn, t))
    for ftz, t in itertools.product(("", ".ftz"), ("f32", "f32x2")):
        case(f"fma.rn{ftz}.{t}", f"{t} {t} {t}", t, floating(formats.fused, t, bool(ftz)),
             _near_ties("f32") if t == "f32" else None)  # fmt: skip
    case("fma.rn.bf16", "bf16 bf16 bf16", "bf16", floating(formats.fused, "bf16"),
         _near_ties("bf16"))  # fmt: skip
    packed = [[a | b << 16 for a, b in zip(column, column[::-1], strict=True)]
              for column in _near_ties("bf16")]  # fmt: skip
    case("fma.rn.bf16x2", "bf16x2 bf16x2 bf16x2", "bf16x2", floating(formats.fused, "bf16x2"),
         packed)  # fmt: skip
    _mixed_cases()


def _near_ties(t: str) -> list[list[int]]:
    """Products with addends that nearly cancel, and products half-way between two numbers with an
    addend that alone decides the rounding.
    """
    f = formats.FORMATS[t]
    a, b = formats.floats(t, 1), formats.floats(t, 2)
    exact = [formats.multiply(decode(x, t), decode(y, t)) for x, y in zip(a, b, strict=True)]
    c = [encode(formats.negate(p), t) for p in exact]
    one = Fraction(2) ** -f.mantissa
    for i in range(12):
        x, y = 1 + one, 1 + (1 + 2 * (i % 3)) * Fraction(1, 2)  # x * y ends in half a unit
        tiny = Fraction(2) ** (-f.mantissa - 2 - 9 * (i // 4)) * (-1 if i % 2 else 1)
        a[2 * i], b[2 * i], c[2 * i] = (encode(real(v), t) for v in (x, y, tiny))
    for column, seed in zip((a, b, c), (1, 2, 3), strict=True):
        column[25::2] = inputs(t, seed)[25::2]
    return [a, b, c]


def _mixed_cases() -> None:
    """bfloat16 operands, float32 addend and result."""

    def mixed(fn):
        return lambda *ws: encode(fn(*(decode(w, "bf16") for w in ws[:-1]),
                                     decode(ws[-1], "f32")), "f32")  # fmt: skip

    for rn in ("", ".rn"):
        case(f"add{rn}.f32.bf16", "bf16 f32", "f32", mixed(formats.add))
        case(f"sub{rn}.f32.bf16", "bf16 f32", "f32", mixed(formats.subtract))
    case("fma.rn.f32.bf16", "bf16 bf16 f32", "f32", mixed(formats.fused))


def float_cases() -> None:
    for ftz in ("", ".ftz"):
        one = lambda fn, f=bool(ftz): floating(fn, "f32", f)  # noqa: E731
        case(f"neg{ftz}.f32", "f32", "f32", one(formats.negate))
        case(f"abs{ftz}.f32", "f32", "f32", one(lambda a: a._replace(negative=False)))
        for name, fn in (("min", formats.smaller), ("max", formats.larger)):
            case(f"{name}{ftz}.f32", "f32 f32", "f32", one(fn))
            case(f"{name}{ftz}.f32", "f32 f32 f32", "f32", one(lambda a, b, c, f=fn: f(f(a, b), c)),
                 name=f"{name}{ftz}.f32 of three")  # fmt: skip
        case(f"div.rn{ftz}.f32", "f32 f32", "f32", one(formats.divide))
        case(f"rcp.rn{ftz}.f32", "f32", "f32", one(lambda a: formats.divide(_ONE, a)))
        case(f"sqrt.rn{ftz}.f32", "f32", "f32", one(formats.root))
    for name, fn in (("min", formats.smaller), ("max", formats.larger)):
        for t in ("bf16", "bf16x2"):
            case(f"{name}.{t}", f"{t} {t}", t, floating(fn, t))
        case(f"{name}.f64", "f64 f64", "f64", floating(fn, "f64"))
    case("neg.f64", "f64", "f64", floating(formats.negate, "f64"))
    case("abs.f64", "f64", "f64", floating(lambda a: a._replace(negative=False), "f64"))
    case("div.rn.f64", "f64 f64", "f64", floating(formats.divide, "f64"))
    for t in ("f16", "f16x2"):
        case(f"neg.{t}", t, t, floating(formats.negate, t))


# -- approximations -------------------------------------------------------------------------------
_ONE = real(Fraction(1))
decimal.getcontext().prec = 60


def _decimal(fn: Callable) -> Callable:
    """fn on decimals of 60 digits, as a function of finite numbers."""

    def call(a: Real) -> Real:
        x = decimal.Decimal(a.value.numerator) / decimal.Decimal(a.value.denominator)
        return real(Fraction(fn(x)), a.negative)

    return call


def _tanh(x: decimal.Decimal) -> decimal.Decimal:
    e = (2 * x).exp()
    return (e - 1) / (e + 1)


def _exponential(x: decimal.Decimal) -> decimal.Decimal:
    return (x * decimal.Decimal(2).ln()).exp()


def _logarithm(x: decimal.Decimal) -> decimal.Decimal:
    """Exact for powers of two, which 60 digits of ln x / ln 2 are not."""
    return round(x.ln() / decimal.Decimal(2).ln(), 50)


def approximate_cases() -> None:
    """Hardware may differ by the units that the PTX ISA allows; the emulator rounds the exact value
    correctly. Division: |b| within 2**126, where the approximations are specified.
    """
    plain, other = formats.floats("f32", 1), formats.floats("f32", 2)
    positive = [w & 0x7FFFFFFF for w in plain]
    for ftz in ("", ".ftz"):
        one = lambda fn, f=bool(ftz): floating(fn, "f32", f)  # noqa: E731
        for name, ulp in (("div.full", 2), ("div.approx", 2)):
            case(f"{name}{ftz}.f32", "f32 f32", "f32", one(formats.divide), [plain, other], ulp)
        special = inputs("f32", 1)[:8] + plain[8:] if ftz else plain
        case(f"rcp.approx{ftz}.f32", "f32", "f32", one(lambda a: formats.divide(_ONE, a)),
             [special], 1)  # fmt: skip
        case(f"sqrt.approx{ftz}.f32", "f32", "f32", one(formats.root), [positive], 2)
        inverse = one(lambda a: formats.divide(_ONE, formats.root(a)))
        case(f"rsqrt.approx{ftz}.f32", "f32", "f32", inverse, [positive], 2)
        exponents = [encode(real(Fraction(i - 16, 1 + i % 3)), "f32") for i in range(LANES)]
        case(f"ex2.approx{ftz}.f32", "f32", "f32", one(_decimal(_exponential)), [exponents], 2)
        powers = [encode(real(Fraction(2) ** (i - 16)), "f32") for i in range(16)]
        logarithms = [*powers, *[w for w in positive if not 0x3F000000 < w < 0x40000000]][:LANES]
        logarithms += powers[: LANES - len(logarithms)]
        case(f"lg2.approx{ftz}.f32", "f32", "f32", one(_decimal(_logarithm)), [logarithms], 2)
    case("tanh.approx.f32", "f32", "f32", floating(_decimal(_tanh), "f32"), [plain], 1 << 13)


# -- conversions ----------------------------------------------------------------------------------
_INTEGERS = [f"{k}{n}" for k in "us" for n in (8, 16, 32, 64)]
_ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def to_integer(dst: str, src: str, rounding: Callable, ftz: bool) -> Callable:
    """Clamped. NaN gives 0, or the top bit where source or destination has 64 bits (9.7.9.21)."""
    bits = bits_of(dst)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dst[0] == "s" else (0, (1 << bits) - 1)

    def fn(word):
        a = decode(formats.flush(word) if ftz else word, src)
        if a.kind == "nan":
            return 1 << bits - 1 if 64 in (bits, bits_of(src)) else 0
        if a.kind == "inf":
            return (low if a.negative else high) & mask(dst)
        return min(max(rounding(a.value), low), high) & mask(dst)

    return fn


def _wide_inputs(dst: str, src: str) -> list[int]:
    """Edges of the format, halves, and numbers around the limits of the integer type."""
    limits = [Fraction(2) ** (bits_of(dst) - k) * s for k in (0, 1, 2) for s in (1, -1)]
    around = [v + d for v in limits for d in (Fraction(-1, 2), Fraction(0), Fraction(1))]
    words = [
        encode(real(v), src) for v in (*around, Fraction(1, 2), Fraction(3, 2), Fraction(-5, 2))
    ]
    return (words + formats.edges(src))[: LANES - 1] + [mask(src) >> 1]


def _stored(fn: Callable, dst: str) -> Callable:
    """8-bit results fill their 16-bit register: extended by their sign."""
    return lambda *ws: signed(fn(*ws), 8) & 0xFFFF if dst == "s8" else fn(*ws)


def integer_conversions() -> None:
    store = {"u8": "u16", "s8": "s16"}
    for dst, src in itertools.permutations(_INTEGERS, 2):
        resize = lambda a, d=dst, s=src: signed_of(a, s) & mask(d)  # noqa: E731
        case(f"cvt.{dst}.{src}", store.get(src, src), store.get(dst, dst), _stored(resize, dst))
    for i, f in itertools.product(_INTEGERS, ("f32", "f64")):
        number = lambda a, i=i, f=f: encode(real(Fraction(signed_of(a, i))), f)  # noqa: E731
        case(f"cvt.rn.{f}.{i}", store.get(i, i), f, number)
        for rounding, fn in _ROUND.items():
            for ftz in ("", ".ftz") if f == "f32" else ("",):
                convert = _stored(to_integer(i, f, fn, bool(ftz)), i)
                case(f"cvt.{rounding}{ftz}.{i}.{f}", f, store.get(i, i), convert,
                     [_wide_inputs(i, f)])  # fmt: skip


def signed_of(word: int, type_: str) -> int:
    """The value of a register's low bits as an integer type."""
    return integer(word & mask(type_), type_)


def change(dst: str, src: str, ftz: bool = False, saturate: bool = False) -> Callable:
    """From one floating-point format to another.

    From float64, what is subnormal before it is rounded is flushed: just below the least normal
    number an H200 gives 0.
    """

    def fn(word):
        if ftz and src == "f64" and (word >> 52 & 0x7FF) < 1023 - 126:
            return word >> 32 & 0x80000000
        source = formats.flush(word) if ftz and src == "f32" else word
        result = encode(decode(source, src), dst, saturate)
        return formats.flush(result) if ftz and dst == "f32" else result

    return fn


def float_conversions() -> None:
    case("cvt.f64.f32", "f32", "f64", change("f64", "f32"))
    for ftz in ("", ".ftz"):
        case(f"cvt.rn{ftz}.f32.f64", "f64", "f32", change("f32", "f64", bool(ftz)),
             [_narrowing("f32", "f64")])  # fmt: skip
        case(f"cvt{ftz}.f32.bf16", "bf16", "f32", change("f32", "bf16", bool(ftz)))
    case("cvt.f32.f16", "f16", "f32", change("f32", "f16"))
    for t in ("f16", "bf16"):
        narrow = [_narrowing(t, "f32"), _narrowing(t, "f32")[::-1]]
        case(f"cvt.rn.{t}.f32", "f32", t, change(t, "f32"), narrow[:1])
        case(f"cvt.rn.{t}x2.f32", "f32 f32", f"{t}x2", _join(change(t, "f32"), 16), narrow)
    for t in ("e4m3", "e5m2"):
        narrow = [_narrowing(t, "f32"), _narrowing(t, "f32")[::-1]]
        pack = _join(change(t, "f32", saturate=True), 8)
        case(f"cvt.rn.satfinite.{t}x2.f32", "f32 f32", f"{t}x2", pack, narrow)
        words = [(37 * i + 5) % 256 | (255 - 8 * i) << 8 for i in range(LANES)]
        widen = change("f16", t)
        case(f"cvt.rn.f16x2.{t}x2", f"{t}x2", "f16x2",
             lambda a, w=widen: w(a & 255) | w(a >> 8) << 16, [words])  # fmt: skip


def _join(fn: Callable, bits: int) -> Callable:
    """Two results in one register: the first source in the upper half."""
    return lambda a, b: fn(a) << bits | fn(b)


def _narrowing(dst: str, src: str) -> list[int]:
    """Words of ``src`` at, just beside and half-way between words of ``dst``, and edges of both."""
    found = []
    for word in formats.edges(dst)[:7] + formats.floats(dst, 3)[:3]:
        low = decode(word & mask(dst) >> 1, dst)
        step = (
            Fraction(2)
            ** (
                max(formats.exponent_of(low.size), formats.FORMATS[dst].lowest)
                - formats.FORMATS[dst].mantissa
            )
            if low.size
            else Fraction(0)
        )
        half = low.size + step / 2
        found += [encode(real(low.size * (-1) ** len(found)), src), encode(real(half), src),
                  encode(real(half), src) + 1]  # fmt: skip
    found = found[: LANES - 6] + formats.edges(src)[-5:]
    return (found + formats.floats(src, 4))[:LANES]


def build() -> dict[str, Case]:
    """All cases, by file name."""
    CASES.clear()
    for part in (
        integer_cases,
        bit_cases,
        compare_cases,
        arithmetic_cases,
        float_cases,
        approximate_cases,
        integer_conversions,
        float_conversions,
    ):
        part()  # fmt: skip
    return CASES
