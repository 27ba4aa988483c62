"""cp.async.bulk.tensor: boxes of tensor maps, to and from shared memory (PTX ISA 9.7.9.25.5)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import ATOMIC, READ, WRITE
from jax_dsa.emulator.isa.addressing import lane_numbers
from jax_dsa.emulator.isa.barriers import find
from jax_dsa.emulator.isa.bulk import LOAD, issue_store, one_lane
from jax_dsa.emulator.isa.memory import update_of
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.memory import Linear
from jax_dsa.emulator.registers import dtype_of
from jax_dsa.emulator.tensor_map import SWIZZLE_BITS, TensorMap, swizzle

RANKS = "{1d|2d|3d|4d|5d}"
HINT = "{|.L2::cache_hint}"
CHUNK = 16


class BoundMap(NamedTuple):
    """A tensor map of this launch and the array it lies in."""

    map: TensorMap
    buffer: Linear
    offset: int


class Box(NamedTuple):
    """One box: byte offsets in the array of its rows' first element, which rows and columns exist,
    place in shared memory.

    ``low`` and ``high`` are the elements of a row that lie inside the tensor.
    """

    bound: BoundMap
    rows: np.ndarray
    inside: np.ndarray
    low: int
    high: int
    shared: int

    @property
    def bytes(self) -> int:
        return self.rows.size * self.bound.map.boxDim[0] * self.bound.map.element_bytes

    def chunks(self) -> np.ndarray:
        """Numbers of the 16-byte chunks of shared memory that hold the box, in the box's order."""
        address = self.shared + np.arange(0, self.bytes, CHUNK)
        return swizzle(address, SWIZZLE_BITS[self.bound.map.swizzle]) >> 4

    def global_bytes(self) -> np.ndarray:
        """(rows inside, bytes inside) byte offsets in the array."""
        size = self.bound.map.element_bytes
        return self.rows[self.inside][:, None] + np.arange(self.low * size, self.high * size)

    def shared_cells(self) -> slice:
        return slice(self.shared >> 1, self.shared + self.bytes >> 1)


def _box(
    group, ins, lane: int, address: int, values: list[int], gather: bool, shared: int
) -> Box | None:
    bound = group.machine.maps.get(address)
    if bound is None:
        group.machine.fault(
            "out of bounds", group, ins, f"lane {lane}: no tensor map lies at address {address:#x}"
        )
        return None
    tensor = bound.map
    wanted = 2 if gather else len(values)
    if tensor.tensorRank != wanted:
        group.machine.fault(
            "out of bounds",
            group,
            ins,
            f"rank {wanted} copy with a rank {tensor.tensorRank} tensor map",
        )
        return None
    rows, inside = tensor.gathered_rows(np.array(values[1:])) if gather else tensor.rows(values)
    low, high = tensor.columns(values[0])
    box = Box(
        bound, bound.offset + rows + values[0] * tensor.element_bytes, inside, low, high, shared
    )
    return box if _fits(group, ins, box) else None


def _fits(group, ins, box: Box) -> bool:
    shared = group.cta.shared
    align = 128
    if box.shared % align:
        group.machine.fault(
            "misaligned",
            group,
            ins,
            f"tensor copy at shared byte {box.shared}: not a multiple of {align}",
        )
        return False
    if shared.locate(box.shared, box.shared + box.bytes) is None:
        group.machine.fault(
            "out of bounds",
            group,
            ins,
            f"tensor copy of {box.bytes} bytes at shared byte {box.shared}",
        )
        return False
    touched = box.global_bytes()
    if touched.size and (touched.min() < 0 or touched.max() >= box.bound.buffer.size):
        group.machine.fault(
            "out of bounds", group, ins, f"the tensor map reaches beyond {box.bound.buffer.name}"
        )
        return False
    return True


def _fetch(op, box: Box) -> np.ndarray:
    """The box's bytes, zero outside the tensor; (rows, row bytes)."""
    size = box.bound.map.element_bytes
    data = np.zeros((box.rows.size, box.bound.map.boxDim[0] * size), np.uint8)
    index = box.global_bytes()
    data[box.inside, box.low * size : box.high * size] = box.bound.buffer.data[index]
    _tell_global(op, box, index, READ)
    return data


def _tell_global(op, box: Box, index: np.ndarray, kind: str) -> None:
    access = op.group.machine.on.access
    if access and index.size:
        access(op, op.ins, box.bound.buffer, index[:, ::2].ravel() >> 1, kind)


def _bind(asm, operand):
    """(view of the map's address, views of the coordinates) of ``[map, {c, ...}]``."""
    base, offset = asm.address(operand)
    return base, offset, [asm.source(c, "s32") for c in operand.coordinates]


def _coordinates(group, lane: int, views) -> list[int]:
    return [int(group.R[v][lane]) for v in views]


@effect(
    f"cp.async.bulk.tensor.{RANKS}.shared::{{cta|cluster}}.global{{|.tile}}.mbarrier::complete_tx::bytes"
    f"{{|.cta_group::1}}{HINT}",
    "cp.async.bulk.tensor.2d.shared::{cta|cluster}.global.tile::gather4.mbarrier::complete_tx::bytes"
    f"{{|.cta_group::1}}{HINT}",
)
def tensor_load(asm, ins, parts):
    """Tensor to shared memory; elements outside the tensor are 0; the mbarrier gets the box's bytes
    (9.7.9.25.5.2).
    """
    to, to_offset = asm.address(ins.operands[0])
    base, offset, views = _bind(asm, ins.operands[1])
    bar, bar_offset = asm.address(ins.operands[2])
    gather = "tile::gather4" in parts

    def run(group, active):
        for lane in lane_numbers(group, active).tolist():
            values, shared = _coordinates(group, lane, views), int(group.R[to][lane]) + to_offset
            barrier = find(group, int(group.R[bar][lane]) + bar_offset, group, ins)
            box = _box(group, ins, lane, int(group.R[base][lane]) + offset, values, gather, shared)
            if box is not None and barrier is not None:
                _issue_load(group, ins, lane, box, barrier)

    return run


def _issue_load(group, ins, lane: int, box: Box, barrier) -> None:
    shared = group.cta.shared

    def carry_out(op):
        shared.data.reshape(-1, CHUNK)[box.chunks()] = _fetch(op, box).reshape(-1, CHUNK)
        if group.machine.on.access:
            group.machine.on.access(op, ins, shared, box.shared_cells(), WRITE)
        barrier.complete(op, ins, box.bytes)

    group.machine.engines.issue(Op("bulk", group, ins, one_lane(lane), carry_out, family=LOAD))


def _bind_store(asm, ins, gather: bool, apply, kind: str):
    base, offset, views = _bind(asm, ins.operands[0])
    frm, from_offset = asm.address(ins.operands[1])

    def run(group, active):
        copies: dict[tuple, np.ndarray] = {}
        for lane in lane_numbers(group, active).tolist():
            place = int(group.R[base][lane]) + offset, int(group.R[frm][lane]) + from_offset
            key = (*place, *_coordinates(group, lane, views))
            copies[key] = copies.get(key, False) | one_lane(lane)
        if int(active.sum()) > len(copies):
            _warn_repeated(group, ins)
        for (address, shared, *values), lanes in copies.items():
            box = _box(group, ins, int(np.argmax(lanes)), address, values, gather, shared)
            if box is not None:
                _issue_store(group, ins, lanes, box, apply, kind)

    return run


def _warn_repeated(group, ins) -> None:
    """Several lanes store the same box: the same bytes are written more than once, which is carried
    out once here.
    """
    if group.machine.on.lint:
        group.machine.on.lint(
            "repeated copy", group, ins, "several lanes issue the same copy; elect one lane"
        )


def _issue_store(group, ins, lanes: np.ndarray, box: Box, apply, kind: str) -> None:
    shared = group.cta.shared

    def carry_out(op):
        if group.machine.on.access:
            group.machine.on.access(op, ins, shared, box.shared_cells(), READ)
        data = shared.data.reshape(-1, CHUNK)[box.chunks()].reshape(box.rows.size, -1)
        size, index = box.bound.map.element_bytes, box.global_bytes()
        inside = data[box.inside, box.low * size : box.high * size]
        box.bound.buffer.data[index] = apply(box.bound.buffer.data[index], inside)
        _tell_global(op, box, index, kind)

    issue_store(group, ins, lanes, carry_out)


@effect(
    f"cp.async.bulk.tensor.{RANKS}.global.shared::cta{{|.tile}}.bulk_group{HINT}",
    f"cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group{HINT}",
)
def tensor_store(asm, ins, parts):
    """Shared memory to tensor; elements outside are dropped (9.7.9.25.5.2)."""
    return _bind_store(asm, ins, "tile::scatter4" in parts, lambda old, new: new, WRITE)


_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@effect(
    f"cp.reduce.async.bulk.tensor.{RANKS}.global.shared::cta.{{{'|'.join(_OPERATIONS)}}}{{|.tile}}.bulk_group{HINT}"
)
def tensor_reduce(asm, ins, parts):
    """Shared memory into a tensor, each element atomically; the tensor map gives the type
    (9.7.9.25.5.3).
    """
    operation = next(p for p in parts if p in _OPERATIONS)

    def apply_as(type_: str):
        fn, dtype = update_of(operation, type_), dtype_of(type_)

        def apply(old, new):
            return fn(old.view(dtype), np.ascontiguousarray(new).view(dtype)).view(np.uint8)

        return apply

    base, offset, views = _bind(asm, ins.operands[0])
    frm, from_offset = asm.address(ins.operands[1])

    def run(group, active):
        for lane in lane_numbers(group, active).tolist():
            values, shared = _coordinates(group, lane, views), int(group.R[frm][lane]) + from_offset
            box = _box(group, ins, lane, int(group.R[base][lane]) + offset, values, False, shared)
            if box is not None:
                type_ = _REGISTER_TYPE[box.bound.map.tensorDataType]
                _issue_store(group, ins, one_lane(lane), box, apply_as(type_), ATOMIC)

    return run


_REGISTER_TYPE = {
    "UINT32": "u32", "INT32": "s32", "UINT64": "u64", "INT64": "s64", "FLOAT16": "f16",
    "BFLOAT16": "bf16",
    "FLOAT32": "f32",
}  # fmt: skip
