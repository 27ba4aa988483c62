"""cp.async.bulk without tensor maps: copies and reductions of contiguous bytes (PTX ISA
9.7.9.25.4).

Bulk copies use the asynchronous proxy. Loads announce their bytes to an mbarrier; stores and
reductions belong to the
issuing thread's bulk groups.
"""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import ATOMIC, READ, WRITE
from jax_dsa.emulator.isa.addressing import Place, places
from jax_dsa.emulator.isa.barriers import find
from jax_dsa.emulator.isa.copies import close_group, wait_for
from jax_dsa.emulator.isa.memory import update_of
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.registers import dtype_of

FAMILY = "bulk"
LOAD = "bulk.load"  # loads announce themselves to mbarriers, each alone: they form no groups
HINT = "{|.L2::cache_hint}"


def one_lane(lane: int) -> np.ndarray:
    mask = np.zeros(32, bool)
    mask[lane] = True
    return mask


def span(place: Place, size: int) -> slice:
    """Cells of ``size`` bytes at the place's single offset."""
    start = int(place.offsets[0])
    return slice(start >> 1, start + size + 1 >> 1)


def _place(group, lane: int, base: int, offset: int, size: int, space: str, ins) -> Place | None:
    found = places(group, one_lane(lane), base, offset, size, space, ins, align=16)
    return found[0] if found else None


def _size_ok(group, size: int, ins) -> bool:
    if size % 16 or size <= 0:
        group.machine.fault(
            "misaligned", group, ins, f"a bulk copy of {size} bytes: not a positive multiple of 16"
        )
        return False
    return True


def _tell(op, place: Place, size: int, kind: str) -> None:
    if op.group.machine.on.access:
        op.group.machine.on.access(op, op.ins, place.memory, span(place, size), kind)


def bytes_of(place: Place, size: int) -> np.ndarray:
    start = int(place.offsets[0])
    return place.memory.data[start : start + size]


@effect(f"cp.async.bulk.shared::{{cta|cluster}}.global.mbarrier::complete_tx::bytes{HINT}")
def bulk_load(asm, ins, parts):
    """Global to shared; the mbarrier gets the bytes."""
    to, to_offset = asm.address(ins.operands[0])
    frm, from_offset = asm.address(ins.operands[1])
    count = asm.source(ins.operands[2], "u32")
    bar, bar_offset = asm.address(ins.operands[3])

    def run(group, active):
        for lane in np.flatnonzero(active).tolist():
            size = int(group.R[count][lane])
            barrier = find(group, int(group.R[bar][lane]) + bar_offset, group, ins)
            if not _size_ok(group, size, ins) or barrier is None:
                continue
            source = _place(group, lane, frm, from_offset, size, "global", ins)
            target = _place(group, lane, to, to_offset, size, "shared", ins)
            if source and target:
                load(group, ins, lane, target, source, size, barrier)

    return run


def load(group, ins, lane, target: Place, source: Place, size: int, barrier) -> None:
    def carry_out(op):
        bytes_of(target, size)[:] = bytes_of(source, size)
        _tell(op, source, size, READ)
        _tell(op, target, size, WRITE)
        barrier.complete(op, ins, size)

    group.machine.engines.issue(Op("bulk", group, ins, one_lane(lane), carry_out, family=LOAD))


def _bind_store(asm, ins, apply, kind: str):
    to, to_offset = asm.address(ins.operands[0])
    frm, from_offset = asm.address(ins.operands[1])
    count = asm.source(ins.operands[2], "u32")

    def run(group, active):
        for lane in np.flatnonzero(active).tolist():
            size = int(group.R[count][lane])
            if not _size_ok(group, size, ins):
                continue
            source = _place(group, lane, frm, from_offset, size, "shared", ins)
            target = _place(group, lane, to, to_offset, size, "global", ins)
            if source and target:
                store(group, ins, lane, target, source, size, apply, kind)

    return run


def store(group, ins, lane, target: Place, source: Place, size: int, apply, kind: str) -> None:
    def carry_out(op):
        _tell(op, source, size, READ)
        _tell(op, target, size, kind)
        apply(bytes_of(target, size), bytes_of(source, size))

    issue_store(group, ins, one_lane(lane), carry_out)


def issue_store(group, ins, lanes: np.ndarray, carry_out) -> None:
    """Starts a copy that belongs to the bulk group of these lanes."""
    op = Op("bulk", group, ins, lanes, carry_out, family=FAMILY)
    group.warp.tracker(FAMILY).add(op)
    group.machine.engines.issue(op)


def _overwrite(target: np.ndarray, source: np.ndarray) -> None:
    target[:] = source


def reducer(operation: str, type_: str):
    """apply(target bytes, source bytes) of a reduction."""
    fn, dtype = update_of(operation, type_), dtype_of(type_)

    def apply(target: np.ndarray, source: np.ndarray) -> None:
        target.view(dtype)[...] = fn(target.view(dtype), np.ascontiguousarray(source).view(dtype))

    return apply


@effect(f"cp.async.bulk.global.shared::cta.bulk_group{HINT}")
def bulk_store(asm, ins, parts):
    """Shared to global, in the thread's bulk group."""
    return _bind_store(asm, ins, _overwrite, WRITE)


REDUCTIONS = (
    "add.{u32|s32|u64|f32|f64}", "add.noftz.{f16|bf16}", "{min|max}.{u32|s32|u64|s64|f16|bf16}",
    "{and|or|xor}.{b32|b64}", "{inc|dec}.u32",
)  # fmt: skip


@effect(*[f"cp.reduce.async.bulk.global.shared::cta.bulk_group{HINT}.{r}" for r in REDUCTIONS])
def bulk_reduce(asm, ins, parts):
    """Shared into global, element by element, each atomically (9.7.9.25.4.2)."""
    operation = next(
        p for p in parts if p in ("add", "min", "max", "and", "or", "xor", "inc", "dec")
    )
    return _bind_store(asm, ins, reducer(operation, parts[-1]), ATOMIC)


@effect("cp.async.bulk.commit_group")
def commit_group(asm, ins, parts):
    """Closes each lane's bulk group (9.7.9.25.4.5)."""
    return close_group(FAMILY, ins)


@effect("cp.async.bulk.wait_group{|.read}")
def wait_group(asm, ins, parts):
    """Waits for all but the newest n groups, or (.read) only until their sources were read
    (9.7.9.25.4.6).
    """
    newest, read = ins.operands[0].value, parts[-1] == "read"

    def run(group, active):
        tracker = group.warp.tracker(FAMILY)
        ops = tracker.before(active, newest)
        everything = not newest and len(ops) == len(tracker.of(active))
        if wait_for(group, ins, "bulk.read" if read else FAMILY, ops, everything) is not None:
            return "wait"
        if not read:
            tracker.forget(ops)

    return run


@effect(
    "cp.async.bulk.prefetch.L2.global{|.L2::cache_hint}",
    "cp.async.bulk.prefetch.tensor.{1d|2d|3d}.L2.global.tile",
)
def prefetch(asm, ins, parts):
    """A hint without a result (9.7.9.25.4.4)."""
    return lambda group, active: None
