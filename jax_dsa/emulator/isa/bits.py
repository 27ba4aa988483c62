"""Logic, shifts, moves and bit fields (PTX ISA 9.7.8, 9.7.9.3-9.7.9.6, 9.7.1.14-9.7.1.21)."""

import functools

import numpy as np

from jax_dsa.emulator.isa.steps import both
from jax_dsa.emulator.isa.table import silent, value
from jax_dsa.emulator.memory import PARAM_WINDOW, SHARED_WINDOW
from jax_dsa.emulator.ptx import syntax

BITS = "{b16|b32|b64|pred}"


@value(f"and.{BITS}")
def and_(a, b):
    """Bitwise and (9.7.8.1)."""
    return a & b


@value(f"or.{BITS}")
def or_(a, b):
    """Bitwise or (9.7.8.2)."""
    return a | b


@value(f"xor.{BITS}")
def xor(a, b):
    """Bitwise exclusive or (9.7.8.3)."""
    return a ^ b


@value(f"not.{BITS}")
def not_(a):
    """Complement (9.7.8.4)."""
    return ~a


def _shifted(shift, a, count):
    bits = 8 * a.dtype.itemsize
    return shift(a, np.minimum(count, bits - 1).astype(a.dtype))


@value("shl.{b16|b32|b64}", s="-1 u32")
def shl(a, count):
    """Left shift; counts beyond the width give 0 (9.7.8.7)."""
    return np.where(
        count < 8 * a.dtype.itemsize, _shifted(np.left_shift, a, count), a.dtype.type(0)
    )


@value("shr.{u16|u32|u64|b16|b32|b64}", s="-1 u32")
def shr(a, count):
    """Logical right shift; counts beyond the width give 0 (9.7.8.8)."""
    return np.where(
        count < 8 * a.dtype.itemsize, _shifted(np.right_shift, a, count), a.dtype.type(0)
    )


@value("shr.{s16|s32|s64}", s="-1 u32")
def shr_signed(a, count):
    """Arithmetic right shift; counts are clamped (9.7.8.8)."""
    return _shifted(np.right_shift, a, count)


def _both(low, high):
    return (high.astype(np.uint64) << np.uint64(32)) | low


@value("shf.r.wrap.b32", s="b32 b32 u32")
def shf_right(low, high, count):
    """Low word of high:low shifted right by count mod 32 (9.7.8.6)."""
    return (_both(low, high) >> (count & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


@value("shf.l.wrap.b32", s="b32 b32 u32")
def shf_left(low, high, count):
    """High word of high:low shifted left by count mod 32 (9.7.8.6)."""
    shifted = _both(low, high) << (count & np.uint32(31)).astype(np.uint64)
    return (shifted >> np.uint64(32)).astype(np.uint32)


@value("lop3.b32", s="b32 b32 b32 u32")
def lop3(a, b, c, table):
    """Any function of three bits, by its table of eight (9.7.8.5)."""
    result = np.zeros_like(a)
    for row in range(8):
        terms = [x if row >> 2 - i & 1 else ~x for i, x in enumerate((a, b, c))]
        chosen = np.where(table >> np.uint32(row) & 1, np.uint32(0xFFFFFFFF), np.uint32(0))
        result |= terms[0] & terms[1] & terms[2] & chosen
    return result


@value("prmt.b32", s="b32 b32 u32")
def prmt(a, b, selector):
    """Any four of eight bytes; bit 3 of a selector replicates the sign (9.7.9.7)."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros_like(a)
    for i in range(4):
        pick = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (pick & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint8)
        byte = np.where(pick & 8, (byte.view(np.int8) >> 7).view(np.uint8), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


@value("popc.{b32|b64}", d="u32")
def popc(a):
    """Number of ones (9.7.1.15)."""
    return np.bitwise_count(a).astype(np.uint32)


@value("clz.b32", d="u32")
def clz(a):
    """Leading zeros (9.7.1.16)."""
    return np.where(a == 0, 32, 31 - np.floor(np.log2(np.maximum(a, 1).astype(np.float64)))).astype(
        np.uint32
    )


@value("brev.b32")
def brev(a):
    """Bits in reverse order (9.7.1.18)."""
    for width, mask in (
        (1, 0x55555555),
        (2, 0x33333333),
        (4, 0x0F0F0F0F),
        (8, 0x00FF00FF),
        (16, 0x0000FFFF),
    ):
        shift, mask = np.uint32(width), np.uint32(mask)
        a = ((a >> shift) & mask) | ((a & mask) << shift)
    return a


@value("bfe.u32", s="u32 u32 u32")
def bfe(a, start, length):
    """Bit field, zero extended; start and length modulo 256 (9.7.1.19)."""
    start, length = start & np.uint32(255), length & np.uint32(255)
    shifted = np.where(start < 32, a >> np.minimum(start, 31), np.uint32(0))
    mask = np.where(
        length < 32, (np.uint32(1) << np.minimum(length, 31)) - np.uint32(1), np.uint32(0xFFFFFFFF)
    )
    return shifted & mask


@silent("mov.{b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|pred}")
def mov(asm, instruction, parts):
    """Copies; packs a vector into a register or unpacks one (9.7.9.3, 9.7.9.4)."""
    target, source = instruction.operands
    if isinstance(target, syntax.Vector):
        return _unpack(asm, target.items, source, parts[1])
    if isinstance(source, syntax.Vector):
        return _pack(asm, target, source.items, parts[1])
    return asm.move(asm.destination(target, parts[1]), asm.source(source, parts[1]))


def _piece(kind: str, count: int) -> str:
    return f"b{int(kind[1:]) // count}"


def _pack(asm, target, items, kind: str):
    piece = _piece(kind, len(items))
    if any(isinstance(item, syntax.Register) and item.name == target.name for item in items):
        raise TypeError("mov packs a register into itself")
    moves = [
        asm.move(asm.part(target, piece, i), asm.source(item, piece))
        for i, item in enumerate(items)
    ]
    return functools.reduce(both, moves)


def _unpack(asm, items, source, kind: str):
    piece = _piece(kind, len(items))
    if not isinstance(source, syntax.Register):
        raise TypeError("mov unpacks registers only")
    moves = [
        asm.move(asm.destination(item, piece), asm.part(source, piece, i))
        for i, item in enumerate(items)
        if item is not None
    ]
    return functools.reduce(both, moves)


@value("cvta.param.u64")
def cvta_param(a):
    """Parameter address to generic address (9.7.9.20)."""
    return a + np.uint64(PARAM_WINDOW)


@value("cvta.shared{|::cta}.u64")
def cvta_shared(a):
    """Shared address to generic address (9.7.9.20)."""
    return a + np.uint64(SHARED_WINDOW)


@value("cvta.to.shared.u64")
def cvta_to_shared(a):
    """Generic address to shared address (9.7.9.20)."""
    return a - np.uint64(SHARED_WINDOW)


@value("cvta{|.to}.global.u64")
def cvta_global(a):
    """Global addresses are generic addresses (9.7.9.20)."""
    return a
