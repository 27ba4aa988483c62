"""Writes the instruction tests of value rows: one tiny .ptx per opcode and form, with inputs and
expected outputs.

    python tests/emulator/instructions/generate.py

Expected values come from exact Python arithmetic (integers, fractions), not from the emulator. Each
file can be run on
hardware as it is: ``//!`` lines name the arrays of kernel ``test`` in the order of its parameters,
as hexadecimal words.
"""

from __future__ import annotations

import fractions
import itertools
import math
import pathlib
import random
import struct

FOLDER = pathlib.Path(__file__).parent
LANES = 32


# -- number formats
# -----------------------------------------------------------------------------------
def bits_of(type_: str) -> int:
    return {"bf16x2": 32, "f16x2": 32, "f32x2": 64, "pred": 32, "bf16": 16}.get(type_) or int(
        type_[1:]
    )


def signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> bits - 1 else word


def f32(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def round_to(value: fractions.Fraction, mantissa: int, lowest: int) -> fractions.Fraction:
    """Nearest even with ``mantissa`` fraction bits; ``lowest`` is the exponent of the smallest
    normal number.
    """
    if not value:
        return value
    exponent = lowest
    while abs(value) >= fractions.Fraction(2) ** (exponent + 1):
        exponent += 1
    step = fractions.Fraction(2) ** (exponent - mantissa)
    return round(value / step) * step


def f32_word(value: fractions.Fraction | float) -> int:
    if isinstance(value, fractions.Fraction):
        value = float(round_to(value, 23, -126))
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def bf16(word: int) -> fractions.Fraction:
    return fractions.Fraction(f32(word << 16))


def bf16_word(value: fractions.Fraction) -> int:
    return f32_word(float(round_to(value, 7, -126))) >> 16


def exact(word: int) -> fractions.Fraction:
    return fractions.Fraction(f32(word))


# -- inputs
# -------------------------------------------------------------------------------------------
def integers(bits: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    top = (1 << bits) - 1
    edges = [0, 1, top, top >> 1, (top >> 1) + 1, 2, top - 1, 0x55555555 & top]
    return [*edges, *(rng.getrandbits(bits) for _ in range(LANES - len(edges)))]


def floats(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [f32_word(rng.uniform(-2, 2) * 2.0 ** rng.randint(-12, 12)) for _ in range(LANES)]


def halves(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [
        bf16_word(
            fractions.Fraction(rng.uniform(-2, 2)) * fractions.Fraction(2) ** rng.randint(-6, 6)
        )
        for _ in range(LANES)
    ]


def inputs(type_: str, seed: int) -> list[int]:
    if type_ in ("f32", "f32x2"):
        words = floats(seed)
        return (
            words
            if type_ == "f32"
            else [a | b << 32 for a, b in zip(words, floats(seed + 50), strict=True)]
        )
    if type_.startswith("bf16"):
        words = halves(seed)
        return (
            words
            if type_ == "bf16"
            else [a | b << 16 for a, b in zip(words, halves(seed + 50), strict=True)]
        )
    return integers(bits_of(type_), seed)


# -- cases
# --------------------------------------------------------------------------------------------
CASES: dict[str, tuple[list[str], str, object, list | None]] = {}


def case(opcode: str, sources: str, result: str, fn, given: list | None = None) -> None:
    """fn maps source words to the result word; ``given`` replaces generated inputs."""
    CASES[opcode] = (sources.split(), result, fn, given)


def integer_cases() -> None:
    for kind, bits in itertools.product("us", (16, 32, 64)):
        t, mask = f"{kind}{bits}", (1 << bits) - 1
        n = (lambda w, b=bits: signed(w, b)) if kind == "s" else (lambda w: w)
        case(f"add.{t}", f"{t} {t}", t, lambda a, b, m=mask: a + b & m)
        case(f"sub.{t}", f"{t} {t}", t, lambda a, b, m=mask: a - b & m)
        case(f"mul.lo.{t}", f"{t} {t}", t, lambda a, b, m=mask: a * b & m)
        case(f"mad.lo.{t}", f"{t} {t} {t}", t, lambda a, b, c, m=mask: a * b + c & m)
        case(f"min.{t}", f"{t} {t}", t, lambda a, b, n=n, m=mask: min(n(a), n(b)) & m)
        case(f"max.{t}", f"{t} {t}", t, lambda a, b, n=n, m=mask: max(n(a), n(b)) & m)
        case(
            f"shr.{t}",
            f"{t} u32",
            t,
            lambda a, c, n=n, m=mask, b=bits: (
                n(a) >> min(c, b) & m if c < b else (n(a) >> b - 1 >> 1) & m
            ),
        )
        nonzero = [inputs(t, 1), [w or 3 for w in inputs(t, 2)]]
        case(
            f"rem.{t}",
            f"{t} {t}",
            t,
            lambda a, b, n=n, m=mask: int(math.copysign(1, n(a))) * (abs(n(a)) % abs(n(b))) & m,
            nonzero,
        )
        case(
            f"div.{t}", f"{t} {t}", t, lambda a, b, n=n, m=mask: _quotient(n(a), n(b)) & m, nonzero
        )
        if bits < 64:
            wide = f"{kind}{2 * bits}"
            case(
                f"mul.hi.{t}", f"{t} {t}", t, lambda a, b, n=n, m=mask, s=bits: n(a) * n(b) >> s & m
            )
            case(
                f"mul.wide.{t}",
                f"{t} {t}",
                wide,
                lambda a, b, n=n, s=bits: n(a) * n(b) & (1 << 2 * s) - 1,
            )
            case(
                f"mad.wide.{t}",
                f"{t} {t} {wide}",
                wide,
                lambda a, b, c, n=n, s=bits: n(a) * n(b) + c & (1 << 2 * s) - 1,
            )
        if kind == "s":
            case(f"neg.{t}", t, t, lambda a, m=mask: -a & m)
            case(f"abs.{t}", t, t, lambda a, n=n, m=mask: abs(n(a)) & m)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bit_cases() -> None:
    for bits in (16, 32, 64):
        t, mask = f"b{bits}", (1 << bits) - 1
        case(f"and.{t}", f"{t} {t}", t, lambda a, b: a & b)
        case(f"or.{t}", f"{t} {t}", t, lambda a, b: a | b)
        case(f"xor.{t}", f"{t} {t}", t, lambda a, b: a ^ b)
        case(f"not.{t}", t, t, lambda a, m=mask: ~a & m)
        case(
            f"shl.{t}",
            f"{t} u32",
            t,
            lambda a, c, m=mask, b=bits: a << min(c, b) & m,
            [inputs(t, 1), _counts()],
        )
        case(f"mov.{t}", t, t, lambda a: a)
    case("popc.b32", "b32", "u32", lambda a: a.bit_count())
    case("popc.b64", "b64", "u32", lambda a: a.bit_count())
    case("clz.b32", "b32", "u32", lambda a: 32 - a.bit_length())
    case("brev.b32", "b32", "b32", lambda a: int(f"{a:032b}"[::-1], 2))
    case(
        "bfe.u32",
        "u32 u32 u32",
        "u32",
        lambda a, s, n: a >> s & (1 << n) - 1,
        [inputs("u32", 1), _counts(31), _counts(32)],
    )
    case("prmt.b32", "b32 b32 u32", "b32", _prmt)
    case(
        "lop3.b32",
        "b32 b32 b32 u32",
        "b32",
        _lop3,
        [inputs("b32", i) for i in range(3)] + [[0xE8] * LANES],
    )
    case(
        "shf.l.wrap.b32",
        "b32 b32 u32",
        "b32",
        lambda a, b, c: ((b << 32 | a) << c % 32) >> 32 & 0xFFFFFFFF,
    )
    case(
        "shf.r.wrap.b32", "b32 b32 u32", "b32", lambda a, b, c: (b << 32 | a) >> c % 32 & 0xFFFFFFFF
    )


def _counts(top: int = 70) -> list[int]:
    return [i * 7 % (top + 1) for i in range(LANES)]


def _prmt(a: int, b: int, s: int) -> int:
    both, result = b << 32 | a, 0
    for i in range(4):
        pick = s >> 4 * i & 15
        byte = both >> 8 * (pick & 7) & 255
        result |= (byte if not pick & 8 else 255 * (byte >> 7)) << 8 * i
    return result


def _lop3(a: int, b: int, c: int, table: int) -> int:
    rows = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
    return sum((table >> row & 1) << i for i, row in enumerate(rows))


_RELATIONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def compare_cases() -> None:
    for name, relation in _RELATIONS.items():
        for t in ("s16", "s32", "u32", "s64", "u64"):
            n = (lambda w, t=t: signed(w, bits_of(t))) if t[0] == "s" else (lambda w: w)
            same = [
                inputs(t, 1),
                [
                    a if i % 3 == 0 else b
                    for i, (a, b) in enumerate(zip(inputs(t, 1), inputs(t, 2), strict=True))
                ],
            ]
            case(
                f"setp.{name}.{t}",
                f"{t} {t}",
                "pred",
                lambda a, b, r=relation, n=n: int(r(n(a), n(b))),
                same,
            )
        nan = [0x7FC00000, f32_word(1.0), f32_word(-0.0)]
        given = [[*nan, *floats(1)][:LANES], [f32_word(1.0), f32_word(1.0), 0, *floats(2)][:LANES]]
        case(f"setp.{name}.f32", "f32 f32", "pred", _ordered(relation), given)
        case(f"setp.{name}u.f32", "f32 f32", "pred", _unordered(relation), given)


def _is_nan(word: int) -> bool:
    return f32(word) != f32(word)


def _ordered(relation):
    return lambda a, b: int(relation(f32(a), f32(b)) and not _is_nan(a) and not _is_nan(b))


def _unordered(relation):
    return lambda a, b: int(relation(f32(a), f32(b)) or _is_nan(a) or _is_nan(b))


def float_cases() -> None:
    def pairwise(fn):
        return lambda *ws: fn(*(w & 0xFFFFFFFF for w in ws)) | fn(*(w >> 32 for w in ws)) << 32

    def brain(fn):
        return lambda *ws: bf16_word(fn(*map(bf16, ws)))

    def twice(fn):
        return lambda *ws: (
            brain(fn)(*(w & 0xFFFF for w in ws)) | brain(fn)(*(w >> 16 for w in ws)) << 16
        )

    operations = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
    for name, fn in operations.items():
        single = lambda *ws, fn=fn: f32_word(fn(*map(exact, ws)))  # noqa: E731
        for form in (f"{name}.f32", f"{name}.rn.f32"):
            case(form, "f32 f32", "f32", single)
        case(f"{name}.rn.f32x2", "f32x2 f32x2", "f32x2", pairwise(single))
        case(f"{name}.bf16", "bf16 bf16", "bf16", brain(fn))
        case(f"{name}.bf16x2", "bf16x2 bf16x2", "bf16x2", twice(fn))
    fused = lambda a, b, c: f32_word(exact(a) * exact(b) + exact(c))  # noqa: E731
    near = [
        floats(1),
        floats(2),
        [f32_word(-f32(a) * f32(b)) for a, b in zip(floats(1), floats(2), strict=True)],
    ]
    case("fma.rn.f32", "f32 f32 f32", "f32", fused, near)
    case("fma.rn.f32x2", "f32x2 f32x2 f32x2", "f32x2", pairwise(fused))
    case("fma.rn.bf16x2", "bf16x2 bf16x2 bf16x2", "bf16x2", twice(lambda a, b, c: a * b + c))
    case(
        "fma.rn.f32.bf16",
        "bf16 bf16 f32",
        "f32",
        lambda a, b, c: f32_word(bf16(a) * bf16(b) + exact(c)),
    )
    case("add.rn.f32.bf16", "bf16 f32", "f32", lambda a, c: f32_word(bf16(a) + exact(c)))
    case("neg.f32", "f32", "f32", lambda a: a ^ 0x80000000)
    case("abs.f32", "f32", "f32", lambda a: a & 0x7FFFFFFF)
    case("min.f32", "f32 f32", "f32", lambda a, b: a if f32(a) < f32(b) else b)
    case("max.f32", "f32 f32", "f32", lambda a, b: a if f32(a) > f32(b) else b)
    case("rcp.rn.f32", "f32", "f32", lambda a: f32_word(1 / exact(a)))
    case("div.rn.f32", "f32 f32", "f32", lambda a, b: f32_word(exact(a) / exact(b)))
    powers = [f32_word(float(i - 16)) for i in range(LANES)]
    case("ex2.approx.ftz.f32", "f32", "f32", lambda a: f32_word(2.0 ** f32(a)), [powers])
    case(
        "lg2.approx.ftz.f32",
        "f32",
        "f32",
        lambda a: f32_word(math.log2(f32(a))),
        [[f32_word(2.0 ** (i - 16)) for i in range(LANES)]],
    )
    tiny = [[0x00000001, 0x80000001, *floats(1)][:LANES], [0] * 2 + floats(2)[2:]]
    case(
        "add.ftz.f32",
        "f32 f32",
        "f32",
        lambda a, b: (
            f32_word(exact(_flush(a)) + exact(_flush(b)))
            if _flush(a) & 0x7FFFFFFF or b & 0x7FFFFFFF
            else (_flush(a) & b)
        ),
        tiny,
    )


def _flush(word: int) -> int:
    return word if word & 0x7F800000 else word & 0x80000000


def convert_cases() -> None:
    for dst, src in itertools.permutations(("u16", "s16", "u32", "s32", "u64", "s64"), 2):
        n = (lambda w, s=src: signed(w, bits_of(s))) if src[0] == "s" else (lambda w: w)
        case(f"cvt.{dst}.{src}", src, dst, lambda a, n=n, d=dst: n(a) & (1 << bits_of(d)) - 1)
    case("cvt.rn.f32.s32", "s32", "f32", lambda a: f32_word(fractions.Fraction(signed(a, 32))))
    case("cvt.rn.f32.u32", "u32", "f32", lambda a: f32_word(fractions.Fraction(a)))
    case("cvt.rzi.s32.f32", "f32", "s32", lambda a: int(f32(a)) & 0xFFFFFFFF)
    case("cvt.rni.s32.f32", "f32", "s32", lambda a: round(f32(a)) & 0xFFFFFFFF)
    case("cvt.rmi.s32.f32", "f32", "s32", lambda a: math.floor(f32(a)) & 0xFFFFFFFF)
    case("cvt.rpi.s32.f32", "f32", "s32", lambda a: math.ceil(f32(a)) & 0xFFFFFFFF)
    case("cvt.f32.bf16", "bf16", "f32", lambda a: a << 16)
    case("cvt.rn.bf16.f32", "f32", "bf16", lambda a: bf16_word(exact(a)))
    case(
        "cvt.rn.bf16x2.f32",
        "f32 f32",
        "b32",
        lambda a, b: bf16_word(exact(a)) << 16 | bf16_word(exact(b)),
    )


# -- files
# --------------------------------------------------------------------------------------------
_REGISTER = {16: "%h", 32: "%r", 64: "%d"}


def render(opcode: str, sources: list[str], result: str, fn, given: list | None) -> str:
    """The .ptx file of one case."""
    columns = given or [inputs(t, i + 1) for i, t in enumerate(sources)]
    expected = [fn(*row) for row in zip(*columns, strict=True)]
    arrays = [
        (f"in{i}", bits_of(t), c) for i, (t, c) in enumerate(zip(sources, columns, strict=True))
    ]
    arrays.append(("out", bits_of(result), expected))
    lines = [
        f"//! {name} b{bits} " + " ".join(f"{w:x}" for w in words) for name, bits, words in arrays
    ]
    parameters = ", ".join(f".param .u64 p_{name}" for name, *_ in arrays)
    body = ["mov.u32 %r0, %tid.x;"]
    names = []
    for i, (name, bits, _) in enumerate(arrays):
        body += [f"ld.param.u64 %d{i}, [p_{name}];", f"mul.wide.u32 %d{i + 8}, %r0, {bits // 8};"]
        body += [f"add.s64 %d{i}, %d{i}, %d{i + 8};"]
        if name != "out":
            names.append(f"{_REGISTER[bits]}{i + 20}")
            body.append(f"ld.global.b{bits} {names[-1]}, [%d{i}];")
    last, bits = len(arrays) - 1, bits_of(result)
    target = "%p0" if result == "pred" else f"{_REGISTER[bits]}30"
    body.append(f"{opcode} {target}, {', '.join(names)};")
    if result == "pred":
        body.append("selp.b32 %r30, 1, 0, %p0;")
    body += [f"st.global.b{bits} [%d{last}], {_REGISTER[bits]}30;", "ret;"]
    registers = ".reg .pred %p<4>;\n.reg .b16 %h<32>;\n.reg .b32 %r<32>;\n.reg .b64 %d<32>;"
    head = ".version 8.8\n.target sm_100a\n.address_size 64"
    code = "\n".join(body)
    return (
        "\n".join(lines)
        + f"\n{head}\n.visible .entry test({parameters})\n{{\n{registers}\n{code}\n}}\n"
    )


def main() -> None:
    for build in (integer_cases, bit_cases, compare_cases, float_cases, convert_cases):
        build()
    for old in FOLDER.glob("*.ptx"):
        old.unlink()
    for opcode, spec in CASES.items():
        (FOLDER / f"{opcode}.ptx").write_text(render(opcode, *spec))


if __name__ == "__main__":
    main()
