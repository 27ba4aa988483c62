"""Shared-memory and instruction descriptors of tcgen05 (PTX ISA 9.7.16.4) and the addresses that
they mean.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.tensor_map import swizzle

_SWIZZLE_BITS = {0: 0, 6: 1, 4: 2, 2: 3}


class SharedDescriptor(NamedTuple):
    """Fields of a 64-bit matrix descriptor, in bytes; ``bits`` is the number of swizzled address
    bits; ``base`` how many rows of 128 bytes the pattern's start is off its alignment.
    """

    start: int
    leading: int
    stride: int
    bits: int
    base: int = 0

    @classmethod
    @functools.lru_cache(4096)  # noqa: B019  (of the class, not of an object)
    def decode(cls, word: int) -> SharedDescriptor | None:
        """None for fields that are not supported: base offset, absolute leading dimension, 32-byte
        atoms.
        """
        if word >> 49 & 0xF or word >> 46 & 7 != 1 or word >> 61 not in _SWIZZLE_BITS:
            return None
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, leading, stride, _SWIZZLE_BITS[word >> 61])


_RESERVED_SM90 = 0x3FF1_C000_C000_C000


def warpgroup_descriptor(word: int) -> SharedDescriptor | str:
    """The descriptor of wgmma (9.7.15.5.1.2.2), or what is wrong with it in words."""
    if word & _RESERVED_SM90:
        return f"reserved bits {word & _RESERVED_SM90:#x} are set"
    start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    bits, base = {0: 0, 1: 3, 2: 2, 3: 1}[word >> 62], word >> 49 & 7
    if base and not bits:
        return "a base offset without swizzling"
    return SharedDescriptor(start, leading, stride, bits, base)


class InstructionDescriptor(NamedTuple):
    """Fields of the 32-bit descriptor of kind::f16 (9.7.16.4.2)."""

    d_type: int
    a_type: int
    b_type: int
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    n: int
    m: int

    @classmethod
    @functools.lru_cache(256)  # noqa: B019  (of the class, not of an object)
    def decode(cls, word: int) -> InstructionDescriptor:
        flags = [bool(word >> bit & 1) for bit in (13, 14, 15, 16)]
        types = (word >> 4 & 3, word >> 7 & 7, word >> 10 & 7)
        return cls(*types, *flags, n=(word >> 17 & 63) << 3, m=(word >> 24 & 31) << 4)


@functools.lru_cache(4096)
def extent(descriptor: SharedDescriptor, rows: int, depth: int, mn_major: bool) -> tuple[int, int]:
    """The lowest and the highest of ``element_addresses``."""
    addresses = element_addresses(descriptor, rows, depth, mn_major)
    return int(addresses.min()), int(addresses.max())


@functools.lru_cache(4096)
def element_addresses(
    descriptor: SharedDescriptor, rows: int, depth: int, mn_major: bool
) -> np.ndarray:
    """Byte address of each 16-bit element, [rows, depth]: canonical layouts of 9.7.16.3, swizzled
    at the end.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)
    span = 16 << descriptor.bits  # bytes that are contiguous in the major direction
    if mn_major:
        per = span // 2
        outer, inner = (descriptor.leading, descriptor.stride) if descriptor.bits else (
            descriptor.stride, descriptor.leading)  # fmt: skip
        address = row % per * 2 + row // per * outer + k % 8 * span + k // 8 * inner
    elif descriptor.bits:
        address = row % 8 * span + row // 8 * descriptor.stride + 2 * k
    else:
        address = (
            row % 8 * 16 + row // 8 * descriptor.stride + k // 8 * descriptor.leading + k % 8 * 2
        )
    shift = descriptor.base << 7
    return swizzle(descriptor.start + address - shift, descriptor.bits) + shift


def operand_bytes(
    group, ins, word: int, rows: int, depth: int, mn_major: bool
) -> np.ndarray | None:
    """Addresses of an operand in the CTA's shared memory, or None after a report."""
    descriptor = SharedDescriptor.decode(word)
    if descriptor is None:
        group.machine.fault(
            "tensor core", group, ins, f"descriptor {word:#018x} has fields that are not supported"
        )
        return None
    low, high = extent(descriptor, rows, depth, mn_major)
    if not _inside(group, ins, low, high):
        return None
    return element_addresses(descriptor, rows, depth, mn_major)


def bounded(group, ins, addresses: np.ndarray) -> np.ndarray | None:
    """The addresses, or None after a report when they leave the CTA's shared memory."""
    inside = _inside(group, ins, int(addresses.min()), int(addresses.max()))
    return addresses if inside else None


def _inside(group, ins, low: int, high: int) -> bool:
    if group.cta.shared.locate(low, high + 2) is not None:
        return True
    group.machine.fault("out of bounds", group, ins, f"operand at shared bytes {low}..{high}")
    return False
