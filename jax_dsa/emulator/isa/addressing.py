"""From address operands to places in a memory: bounds and alignment, lanes as one vector."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.memory import (
    GLOBAL_BASE,
    PARAM_WINDOW,
    SHARED_WINDOW,
    Linear,
    cells_of_bytes,
)


class Place(NamedTuple):
    """Byte offsets in one memory, for ``lanes`` (indices of lanes)."""

    memory: Linear
    offsets: np.ndarray
    lanes: np.ndarray


ALL = np.arange(32)
ONE_LANE = np.eye(32, dtype=bool)
_WIDE = np.dtype(np.int64)


def lane_numbers(group, active: np.ndarray) -> np.ndarray:
    return ALL if active is group.mask and group.where is True else active.nonzero()[0]


def addresses(group, lanes: np.ndarray, base: int, offset: int) -> np.ndarray:
    values = group.R[base]
    if lanes is not ALL:
        values = values[lanes]
    return values + offset if values.dtype == _WIDE else values.astype(_WIDE) + offset


def shared_addresses(group, lanes: np.ndarray, base: int, offset: int) -> np.ndarray:
    """Addresses in shared memory of operands that may be shared or generic addresses."""
    return addresses(group, lanes, base, offset) & SHARED_WINDOW - 1


def window(space: str, address: int) -> tuple[str, int]:
    """(space, base to subtract) of a generic address."""
    if space:
        return space, 0
    for name, base in (("param", PARAM_WINDOW), ("shared", SHARED_WINDOW)):
        if address >= base:
            return name, base
    return "global", 0


def locate(group, space: str, low: int, high: int) -> Linear | None:
    if space == "global":
        return group.machine.memory.locate(low, high)
    if space == "shared":
        return group.cta.shared.locate(low, high)
    params = group.machine.params
    return params if 0 <= low and high <= params.size else None


def places(
    group, active, base: int, offset: int, size: int, space: str, ins, align: int = 0
) -> list[Place]:
    """Where the active lanes' ``size``-byte accesses go; lanes that go nowhere are reported and
    left out.
    """
    lanes = lane_numbers(group, active)
    where = addresses(group, lanes, base, offset)
    whole = _in_one(group, space, lanes, where, size, align or size) if space else None
    if whole is not None:
        return [whole]
    low, high = int(np.minimum.reduce(where)), int(np.maximum.reduce(where)) + size
    space, origin = window(space, low)
    if origin:
        where, low, high = where - origin, low - origin, high - origin
    if int(np.bitwise_or.reduce(where)) & (align or size) - 1:
        lanes, where = _aligned(group, lanes, where, align or size, ins)
    memory = locate(group, space, low, high)
    if memory is None:
        return _one_by_one(group, lanes, where, size, space, ins)
    return [Place(memory, where - memory.base, lanes)] if where.size else []


def _in_one(group, space: str, lanes, where, size: int, align: int) -> Place | None:
    """The usual case, aligned addresses in one memory, in as few passes as possible; else None."""
    memory = locate(group, space, address := int(where[0]), address + size)
    if memory is None:
        return None
    offsets = where - memory.first
    bits = int(np.bitwise_or.reduce(offsets))  # not less than the largest, negative if one is
    room = memory.limit - memory.first - size
    if bits & align - 1 or bits < 0 or bits > room < int(np.maximum.reduce(offsets)):
        return None
    return Place(memory, offsets if memory.first == memory.base else where - memory.base, lanes)


def _aligned(group, lanes, where, align: int, ins):
    bad = (where & align - 1) != 0
    lane = int(lanes[bad][0])
    group.machine.fault(
        "misaligned",
        group,
        ins,
        f"lane {lane} accesses address {int(where[bad][0]):#x}, not a multiple of {align} bytes",
    )
    return lanes[~bad], where[~bad]


def _one_by_one(group, lanes, where, size: int, space: str, ins) -> list[Place]:
    """Lanes in different arrays, or out of bounds."""
    found: dict[int, tuple[Linear, list[int], list[int]]] = {}
    for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
        memory = locate(group, space, address, address + size)
        if memory is None:
            _out_of_bounds(group, lane, address, size, space, ins)
            continue
        _, offsets, members = found.setdefault(id(memory), (memory, [], []))
        offsets.append(address - memory.base)
        members.append(lane)
    return [Place(m, np.array(o, np.int64), np.array(n)) for m, o, n in found.values()]


def _out_of_bounds(group, lane: int, address: int, size: int, space: str, ins) -> None:
    where = f"{space} address {address:#x}"
    if space == "global":
        near = (
            group.machine.memory.nearest(address) if address >= GLOBAL_BASE else "below every array"
        )
        where += f": {near}"
    group.machine.fault(
        "out of bounds", group, ins, f"lane {lane} accesses {size} bytes at {where}"
    )


def told(group, ins, place: Place, size: int, kind: str) -> None:
    """Reports an access to the observers."""
    if group.machine.on.access:
        group.machine.on.access(group, ins, place.memory, cells_of_bytes(place.offsets, size), kind)


def uniform(group, active, view: int) -> int:
    """A source that the instruction takes from one thread: the first active lane's value."""
    return int(group.R[view][active.tobytes().find(1)])


def distinct(values: np.ndarray) -> list[tuple[int, int]]:
    """(value, how many lanes) pairs; usually one."""
    words = values.tolist()
    if words.count(words[0]) == len(words):
        return [(words[0], len(words))]
    found, counts = np.unique(values, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))
