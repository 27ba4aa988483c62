"""tcgen05 without the products: allocation, loads, stores, copies, waits, commits, fences (PTX ISA
9.7.16).
"""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import READ, WRITE
from jax_dsa.emulator.isa.addressing import (
    Place,
    distinct,
    lane_numbers,
    shared_addresses,
    told,
    uniform,
)
from jax_dsa.emulator.isa.barriers import find
from jax_dsa.emulator.isa.copies import wait_for
from jax_dsa.emulator.isa.descriptors import operand_bytes
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.memory import TensorMemory

LD, ST, TCGEN05 = "tcgen05.ld", "tcgen05.st", "tcgen05"
ALL_LANES = range(TensorMemory.LANES)


# -- allocation (9.7.16.7)
# ----------------------------------------------------------------------------
@effect("tcgen05.alloc.cta_group::1.sync.aligned{|.shared::cta}.b32")
def alloc(asm, ins, parts):
    """Allocates columns, waits until there are enough, and writes the first one's address to shared
    memory.
    """
    base, offset = asm.address(ins.operands[0])
    count = asm.source(ins.operands[1], "u32")

    def run(group, active):
        machine, cta = group.machine, group.cta
        columns = uniform(group, active, count)
        if columns not in (32, 64, 128, 256, 512):
            machine.fault(
                "tensor memory",
                group,
                ins,
                f"allocates {columns} columns: wanted a power of two in 32..512",
            )
            return None
        if not cta.tensor.permit:
            machine.fault("tensor memory", group, ins, "allocates after relinquish_alloc_permit")
        start = cta.tensor.allocate(columns)
        if start is None:
            cta.allocators.append(group)
            return machine.wait(
                group, f"waits for {columns} free columns of tensor memory", cta.tensor
            )
        address = int(shared_addresses(group, lane_numbers(group, active), base, offset)[0])
        cta.shared.views[4][address >> 2] = start
        told(group, ins, Place(cta.shared, np.array([address]), np.array([0])), 4, WRITE)

    return run


@effect("tcgen05.dealloc.cta_group::1.sync.aligned.b32")
def dealloc(asm, ins, parts):
    """Frees columns: for race detection a write to all of them."""
    address, count = asm.source(ins.operands[0], "u32"), asm.source(ins.operands[1], "u32")

    def run(group, active):
        machine, memory = group.machine, group.cta.tensor
        base, columns = uniform(group, active, address), uniform(group, active, count)
        if memory.blocks.get(base) != columns:
            machine.fault(
                "tensor memory",
                group,
                ins,
                f"frees {columns} columns at {base:#x}; allocated are {memory.blocks}",
            )
            return None
        if machine.on.access:
            machine.on.access(group, ins, memory, memory.cells_of(ALL_LANES, base, columns), WRITE)
        memory.free(base)
        for waiting in group.cta.allocators:
            machine.wake(waiting, memory)
        group.cta.allocators.clear()

    return run


@effect("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
def relinquish(asm, ins, parts):
    """The CTA will not allocate again."""

    def run(group, active):
        group.cta.tensor.permit = False

    return run


# -- checks
# -------------------------------------------------------------------------------------------
def owned(group, ins, columns: int, count: int, lanes: range) -> bool:
    """Reports columns that do not exist or are not allocated; False only for the former.

    Columns that were freed still hold their last contents: the access is carried out, so that one
    report does not
    hide the next.
    """
    memory = group.cta.tensor
    if columns < 0 or columns + count > memory.COLUMNS or lanes.stop > memory.LANES:
        text = (
            f"columns {columns}..{columns + count - 1}, lanes {lanes.start}..{lanes.stop - 1}"
            f" do not exist"
        )
        group.machine.fault("tensor memory", group, ins, text)
        return False
    if not np.logical_and.reduce(memory.allocated[columns : columns + count]):
        free = columns + int(np.argmin(memory.allocated[columns : columns + count]))
        group.machine.fault("tensor memory", group, ins, f"column {free} is not allocated")
    return True


# -- loads and stores (9.7.16.8)
# ----------------------------------------------------------------------
def fragment(shape: str, repeat: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Where register i of thread t lies: (rows [i, t], columns [i, t], number of lanes touched);
    9.7.16.2.3.
    """
    t, rep = np.arange(32), np.arange(repeat)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(t, (repeat, 32)), np.broadcast_to(rep, (repeat, 32)), 32
    if shape == "16x64b":
        return np.broadcast_to(t // 4 + 8 * (t % 2), (repeat, 32)), 2 * rep + t // 2 % 2, 16
    per = {"16x128b": 1, "16x256b": 2}[shape]  # neighbouring columns that a thread holds
    i = np.arange(2 * per * repeat)[:, None]
    rows = t // 4 + 8 * (i // per % 2)
    columns = i // (2 * per) * 4 * per + per * (t % 4) + i % per
    return rows, columns, 16


class Window:
    """The part of tensor memory that one ld or st touches, relative to its address."""

    def __init__(self, shape: str, repeat: int):
        self.rows, self.columns, self.lanes = fragment(shape, repeat)
        self.count = int(self.columns.max()) + 1
        self.words = self.rows * TensorMemory.COLUMNS + self.columns

    def locate(self, group, ins, address: int) -> tuple[int, int] | None:
        """(lane, column) of an address that the warp may use; a warp reaches the lanes of its
        quarter only.

        An address with quarter 0 means the warp's own quarter: kernels that run on hardware rely on
        it.
        """
        lane, column = address >> 16, address & 0xFFFF
        quarter = 32 * (group.warp.index % 4)
        lane += quarter if lane < 32 else 0
        if lane not in (quarter, quarter + 32 - self.lanes):
            group.machine.fault(
                "tensor memory", group, ins,
                f"lane {lane} in the address: this warp reaches lanes {quarter}..{quarter + 31}"
                f" only",
            )  # fmt: skip
            return None
        if not owned(group, ins, column, self.count, range(lane, lane + self.lanes)):
            return None
        return lane, column


# at most 128 registers per thread
SHAPES = [
    "{16x64b|32x32b}.{x1|x2|x4|x8|x16|x32|x64|x128}",
    "16x128b.{x1|x2|x4|x8|x16|x32|x64}",
    "16x256b.{x1|x2|x4|x8|x16|x32}",
]


@effect(*[f"tcgen05.ld.sync.aligned.{s}.b32" for s in SHAPES])
def ld(asm, ins, parts):
    """Tensor memory to registers. The registers are filled at once; the read ends at wait::ld
    (9.7.16.8.1).
    """
    window = Window(parts[4], int(parts[5][1:]))
    targets = [asm.destination(t, "b32") for t in asm.items(ins.operands[0])]
    base, offset = asm.address(ins.operands[1])
    if len(targets) != len(window.rows):
        asm.refuse(ins, f"{len(targets)} registers where the shape has {len(window.rows)}")

    def run(group, active):
        at = window.locate(group, ins, uniform(group, active, base) + offset)
        if at is None:
            return
        lane, column = at
        memory = group.cta.tensor
        values = memory.words.take(window.words + (lane * memory.COLUMNS + column))
        whole, R = active is group.mask and group.where is True, group.R
        for target, row in zip(targets, values, strict=True):
            if whole:
                R[target][:] = row
            else:
                np.copyto(R[target], row, where=active)
        cells = memory.cells_of(range(lane, lane + window.lanes), column, window.count)
        _start(group, ins, active, "ld", LD, memory, cells, READ, lambda: None)

    return run


def _start(group, ins, active, kind, family, memory, cells, access: str, effect_) -> None:
    """Issues a load or store; stores write when they are carried out."""

    def carry_out(op):
        effect_()
        if group.machine.on.access:
            group.machine.on.access(op, ins, memory, cells, access)

    op = Op(kind, group, ins, active.copy(), carry_out, (family, id(group.warp)), family=family)
    group.warp.tracker(family).add(op)
    engines = group.machine.engines
    engines.issue(op)
    if kind == "ld" and not op.done:  # the registers already hold the values: the read cannot move
        engines.ready.remove(op)
        engines.run(op)


@effect(*[f"tcgen05.st.sync.aligned.{s}.b32" for s in SHAPES])
def st(asm, ins, parts):
    """Registers to tensor memory; complete at wait::st (9.7.16.8.2)."""
    window = Window(parts[4], int(parts[5][1:]))
    base, offset = asm.address(ins.operands[0])
    sources = [asm.source(s, "b32") for s in asm.items(ins.operands[1])]
    if len(sources) != len(window.rows):
        asm.refuse(ins, f"{len(sources)} registers where the shape has {len(window.rows)}")

    def run(group, active):
        at = window.locate(group, ins, uniform(group, active, base) + offset)
        if at is None:
            return
        lane, column = at
        memory, values = group.cta.tensor, np.stack([group.R[s] for s in sources])

        def write():
            memory.words[lane + window.rows, column + window.columns] = values

        cells = memory.cells_of(range(lane, lane + window.lanes), column, window.count)
        _start(group, ins, active, "st", ST, memory, cells, WRITE, write)

    return run


def _bind_wait(family: str):
    def bind(ins):
        def run(group, active):
            tracker = group.warp.tracker(family)
            ops = tracker.of(active)
            if wait_for(group, ins, family, ops, True) is not None:
                return "wait"
            tracker.forget(ops)

        return run

    return bind


@effect("tcgen05.wait::ld.sync.aligned")
def wait_ld(asm, ins, parts):
    """All earlier loads of these threads have read tensor memory (9.7.16.8.3)."""
    return _bind_wait(LD)(ins)


@effect("tcgen05.wait::st.sync.aligned")
def wait_st(asm, ins, parts):
    """All earlier stores of these threads have been performed (9.7.16.8.3)."""
    return _bind_wait(ST)(ins)


# -- copies from shared memory (9.7.16.9)
# -------------------------------------------------------------
@effect("tcgen05.cp.cta_group::1.{128x256b|128x128b}")
def cp(asm, ins, parts):
    """128 rows of 32 or 16 bytes from shared memory, read by the asynchronous proxy, to 8 or 4
    columns.
    """
    base, offset = asm.address(ins.operands[0])
    descriptor = asm.source(ins.operands[1], "u64")
    words = {"128x256b": 8, "128x128b": 4}[parts[-1]]

    def run(group, active):
        address = uniform(group, active, base) + offset
        column, lane = address & 0xFFFF, address >> 16
        where = operand_bytes(group, ins, uniform(group, active, descriptor), 128, 2 * words, False)
        if where is None or not owned(group, ins, column, words, range(lane, lane + 128)):
            return
        issue_tcgen05(group, ins, active, "cp", None, lambda op: _copy(op, where, column, words))

    return run


def _copy(op, where: np.ndarray, column: int, words: int) -> None:
    memory, shared, machine = op.cta.tensor, op.cta.shared, op.group.machine
    halves = shared.views[2][where >> 1]
    memory.words[:, column : column + words] = np.ascontiguousarray(halves).view(np.uint32)
    if machine.on.access:
        machine.on.access(op, op.ins, shared, (where >> 1).ravel(), READ)
        machine.on.access(op, op.ins, memory, memory.cells_of(ALL_LANES, column, words), WRITE)


def issue_tcgen05(group, ins, active, kind: str, chain, effect_) -> Op:
    """Starts an operation that commit tracks. Copies come before later products of the thread
    (9.7.16.6.2).
    """
    tracker = group.warp.tracker(TCGEN05)
    after = (
        [op for op in tracker.of(active) if op.kind == "cp" and not op.done]
        if kind == "mma"
        else []
    )
    op = Op(kind, group, ins, active.copy(), effect_, chain, family=TCGEN05)
    tracker.add(op)
    return group.machine.engines.issue(op, after)


# -- completion and fences (9.7.16.12, 9.7.16.11)
# ------------------------------------------------------
@effect("tcgen05.commit.cta_group::1.mbarrier::arrive::one{|.shared::cluster}.b64")
def commit(asm, ins, parts):
    """One arrival when all earlier asynchronous tcgen05 operations of the thread are complete."""
    base, offset = asm.address(ins.operands[0])

    def run(group, active):
        tracker = group.warp.tracker(TCGEN05)
        barriers = distinct(shared_addresses(group, lane_numbers(group, active), base, offset))
        found = [(find(group, address, group, ins), lanes) for address, lanes in barriers]

        def carry_out(op):
            for barrier, lanes in found:
                if barrier is not None:
                    barrier.arrive(op, ins, lanes)

        chain = ("tcgen05.commit", id(group.warp))
        tracked = tracker.of(active)
        op = Op(
            "arrive", group, ins, active.copy(), carry_out, chain, tracks=tracked, family=TCGEN05
        )
        group.machine.engines.issue(op)
        # Later commits come after this one, so that they need not track the same operations again.
        tracker.forget([op for op in tracked if op.done or op.kind != "cp"])

    return run


@effect("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(asm, ins, parts):
    """Extends the order of tcgen05 operations across the synchronisation that follows or precedes
    (9.7.16.11).
    """
    kind = "tcgen05.before" if "before" in parts[1] else "tcgen05.after"

    def run(group, active):
        if group.machine.on.fence:
            group.machine.on.fence(group, kind, ins)

    return run
