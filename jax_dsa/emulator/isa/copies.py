"""cp.async: copies of 4, 8 or 16 bytes per thread, global to shared (PTX ISA 9.7.9.25.1-9.7.9.25.3,
9.7.13.15.15).

They write shared memory through the generic proxy.
"""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import READ, WRITE
from jax_dsa.emulator.isa.addressing import distinct, lane_numbers, places, shared_addresses
from jax_dsa.emulator.isa.barriers import find
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.memory import cells_of_bytes
from jax_dsa.emulator.ptx.syntax import Immediate, Register

FAMILY = "cp.async"
NONE = bytes(32)
_WORD = np.dtype(np.uint32)


@effect("cp.async.{ca|cg}.shared{|::cta}.global{|.L2::cache_hint}{|.L2::64B|.L2::128B|.L2::256B}")
def cp_async(asm, ins, parts):
    """Copies cp-size bytes; bytes beyond src-size become 0 and are not read (9.7.9.25.1)."""
    target, source, size, *rest = ins.operands
    to, to_offset = asm.address(target)
    frm, from_offset = asm.address(source)
    hinted = any(p == "L2::cache_hint" for p in parts)
    rest = rest[: len(rest) - hinted]
    read = _source_size(asm, ins, rest[0] if rest else None, size.value)

    def run(group, active):
        targets = places(group, active, to, to_offset, size.value, "shared", ins)
        lanes = lane_numbers(group, active)
        limits = read(group, lanes) if read else None
        if limits is not None and min(limits.tolist()) == size.value:
            limits = None  # every lane reads all of it
        wanted = active
        if limits is not None:
            wanted, some = active.copy(), limits
            wanted[lanes] = some > 0
            limits = np.zeros(32, np.int64)
            limits[lanes] = some
        sources = (
            places(group, wanted, frm, from_offset, size.value, "global", ins)
            if wanted.tobytes() != NONE
            else []
        )

        def carry_out(op):
            _copy(group.machine, op, targets, sources, limits, size.value)

        op = Op("copy", group, ins, active.copy(), carry_out, family=FAMILY)
        group.warp.tracker(FAMILY).add(op)
        group.machine.engines.issue(op)

    return run


def _source_size(asm, ins, operand, size: int):
    """src-size (a number of bytes) or ignore-src (a predicate) as a function of the group; None:
    all bytes.
    """
    if operand is None or isinstance(operand, Immediate) and operand.value == size:
        return None
    if isinstance(operand, Register) and operand.type == "pred":
        ignore = asm.source(operand, "pred")
        return lambda group, lanes: np.where(group.R[ignore][lanes], 0, size)
    count = asm.source(operand, "u32")
    return lambda group, lanes: np.minimum(group.R[count][lanes].astype(np.int64), size)


def _copy(machine, op, targets, sources, limits: np.ndarray | None, size: int) -> None:
    """Reads words of four bytes of each lane, zeroes what lies beyond its limit, writes them."""
    words, count = np.zeros((32, size // 4), np.uint32), size // 4
    for place in sources:
        words[place.lanes] = place.memory.rows(_WORD, count).take(place.offsets // size, axis=0)
        if machine.on.access:
            machine.on.access(op, op.ins, place.memory, cells_of_bytes(place.offsets, size), READ)
    if limits is not None:
        keep = np.arange(size) < limits[:, None]
        words = (
            np.where(keep, words.view(np.uint8).reshape(32, size), 0)
            .astype(np.uint8)
            .view(np.uint32)
        )
    for place in targets:
        place.memory.rows(_WORD, count)[place.offsets // size] = words[place.lanes]
        if machine.on.access:
            machine.on.access(op, op.ins, place.memory, cells_of_bytes(place.offsets, size), WRITE)


def close_group(family: str, ins):
    """The effect of commit_group."""

    def run(group, active):
        group.warp.tracker(family).commit(active)
        if group.machine.on.commit:
            group.machine.on.commit(group, family, ins)

    return run


@effect("cp.async.commit_group")
def commit_group(asm, ins, parts):
    """Closes each lane's group (9.7.9.25.2)."""
    return close_group(FAMILY, ins)


def wait_for(group, ins, family: str, ops: list, everything: bool):
    """Waits until the operations are done, then tells the observers and forgets them."""
    running = [op for op in ops if not op.done]
    if running:
        # The newest one is usually the last to finish; the instruction is tried again then.
        running[-1].waiters.append(group)
        return group.machine.wait(group, f"waits for {running[-1]}", running[-1])
    if group.machine.on.wait:
        group.machine.on.wait(group, family, ops, ins, everything)
    return None


@effect("cp.async.wait_group", "cp.async.wait_all")
def wait_group(asm, ins, parts):
    """Waits for all but the newest n groups; wait_all for every copy (9.7.9.25.3)."""
    newest = ins.operands[0].value if ins.operands else None

    def run(group, active):
        tracker = group.warp.tracker(FAMILY)
        ops = tracker.of(active) if newest is None else tracker.before(active, newest)
        everything = not newest and len(ops) == len(tracker.of(active))
        if wait_for(group, ins, FAMILY, ops, everything) is not None:
            return "wait"
        tracker.forget(ops)

    return run


@effect("cp.async.mbarrier.arrive{|.noinc}{|.shared|.shared::cta}.b64")
def mbarrier_arrive(asm, ins, parts):
    """Arrives once the thread's earlier cp.async are done; without .noinc it first raises the
    pending count.
    """
    base, offset = asm.address(ins.operands[0])
    raises = "noinc" not in parts

    def run(group, active):
        tracker = group.warp.tracker(FAMILY)
        words = shared_addresses(group, lane_numbers(group, active), base, offset)
        barriers = [(find(group, a, group, ins), n) for a, n in distinct(words)]
        if raises:
            for barrier, lanes in barriers:
                if barrier is not None:
                    barrier.pending += lanes

        def carry_out(op):
            for barrier, lanes in barriers:
                if barrier is not None:
                    barrier.arrive(op, ins, lanes)

        chain = ("cp.async.arrive", id(group.warp))
        group.machine.engines.issue(
            Op(
                "arrive",
                group,
                ins,
                active.copy(),
                carry_out,
                chain,
                tracks=tracker.of(active),
                family=FAMILY,
            )
        )
        tracker.forget([op for op in tracker.ops if op.done])

    return run
