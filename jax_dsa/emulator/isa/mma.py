"""tcgen05.mma: D = A B (+ D) on tensor memory (PTX ISA 9.7.16.10), kind::f16 with float32
accumulators.

A product of K = 16 per instruction. D rows go to lanes as 9.7.16.10.5 lays out: M = 128 row r to
lane r; M = 64 row r
to lane alignment + 32 (r / 16) + r % 16; with .ws, lanes in blocks of M that hold successive slices
of the columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.events import READ, WRITE
from jax_dsa.emulator.isa.addressing import ONE_LANE, lane_numbers
from jax_dsa.emulator.isa.descriptors import InstructionDescriptor, operand_bytes
from jax_dsa.emulator.isa.numerics import widen_bf16
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.isa.tensor_core import issue_tcgen05, owned
from jax_dsa.emulator.ptx.syntax import Address, Vector

DEPTH = 16
COLLECTOR = (
    "{|.collector::a::fill|.collector::a::use|.collector::a::lastuse|.collector::a::discard}"
)


class Accumulator(NamedTuple):
    """Where D lies: ``lanes`` [blocks, rows] of tensor memory; block b holds columns b*width.. of
    D. ``span`` are the lanes from the lowest to the highest.
    """

    lanes: np.ndarray
    column: int
    width: int
    span: range

    def cells(self, memory) -> np.ndarray:
        lanes = self.lanes.tobytes()
        return _cells(lanes, self.column, self.width, memory.GROUP, memory.COLUMNS)


@functools.lru_cache(256)
def _cells(lanes: bytes, column: int, width: int, group: int, columns: int) -> np.ndarray:
    groups = np.unique(np.frombuffer(lanes, np.int64) // group)
    return (groups[:, None] * columns + np.arange(column, column + width)).ravel()


@functools.lru_cache(1024)
def accumulator(address: int, m: int, n: int, ws: bool) -> Accumulator | None:
    """None when the address or shape has no layout."""
    lane, column, rows = address >> 16, address & 0xFFFF, np.arange(m)
    lanes, width = None, n
    if ws and lane == 0 and m in (32, 64, 128):
        lanes, width = np.arange(128).reshape(-1, m), n // (128 // m)
    elif not ws and m == 128 and lane == 0:
        lanes = rows[None]
    elif not ws and m == 64 and lane in (0, 16):
        lanes = (lane + 32 * (rows // 16) + rows % 16)[None]
    if lanes is None:
        return None
    return Accumulator(lanes, column, width, range(int(lanes.min()), int(lanes.max()) + 1))


class Operand(NamedTuple):
    """A or B: elements of shared memory (half their addresses), or (A only) a column of tensor
    memory.
    """

    elements: np.ndarray | None
    column: int
    type: int
    negate: bool


def _widen(bits: np.ndarray, type_: int, negate: bool) -> np.ndarray:
    values = widen_bf16(bits) if type_ == 1 else bits.view(np.float16).astype(np.float32)
    return -values if negate else values


def _rows(op, operand: Operand, d: Accumulator) -> np.ndarray:
    """A as float32 [blocks, M, 16]; from tensor memory each lane uses what its own lane holds."""
    if operand.elements is not None:
        values = _widen(op.cta.shared.views[2].take(operand.elements), operand.type, operand.negate)
        return np.broadcast_to(values, (d.lanes.shape[0], *values.shape))
    words = op.cta.tensor.words[d.lanes[..., None], operand.column + np.arange(DEPTH // 2)]
    return _widen(np.ascontiguousarray(words).view(np.uint16), operand.type, operand.negate)


def _multiply(op, a: Operand, b: Operand, d: Accumulator, accumulate: bool) -> None:
    floats = op.cta.tensor.floats
    rows = _rows(op, a, d)
    assert b.elements is not None
    columns = _widen(op.cta.shared.views[2].take(b.elements), b.type, b.negate)
    slices = columns.reshape(d.lanes.shape[0], d.width, DEPTH)
    target = slice(d.column, d.column + d.width)
    for lanes, left, right in zip(d.lanes, rows, slices, strict=True):
        product = left @ right.T
        floats[lanes, target] = product + floats[lanes, target] if accumulate else product


def _tell(op, a: Operand, b: Operand, d: Accumulator, accumulate: bool) -> None:
    access, memory, shared = op.group.machine.on.access, op.cta.tensor, op.cta.shared
    if not access:
        return
    assert b.elements is not None
    cells = d.cells(memory)
    if a.elements is not None:
        access(op, op.ins, shared, a.elements.reshape(-1), READ)
    else:
        source = d._replace(column=a.column, width=DEPTH // 2)
        access(op, op.ins, memory, source.cells(memory), READ)
    access(op, op.ins, shared, b.elements.reshape(-1), READ)
    if accumulate:
        access(op, op.ins, memory, cells, READ)
    access(op, op.ins, memory, cells, WRITE)


class _Sources:
    """View numbers of an mma's operands."""

    def __init__(self, asm, ins):
        d, a, b, descriptor, *rest = ins.operands
        self.d = asm.address(d)
        self.a_address = asm.address(a) if isinstance(a, Address) else None
        self.a = -1 if self.a_address else asm.source(a, "u64")
        self.b = asm.source(b, "u64")
        self.descriptor = asm.source(descriptor, "u32")
        masks = rest.pop(0) if rest and isinstance(rest[0], Vector) else None
        self.disabled = [asm.source(m, "u32") for m in masks.items] if masks else []
        self.accumulate = asm.source(rest[0], "pred")


def _unsupported(descriptor: InstructionDescriptor) -> str:
    if (
        descriptor.d_type != 1
        or descriptor.a_type not in (0, 1)
        or descriptor.b_type != descriptor.a_type
    ):
        return "only float16 or bfloat16 operands with a float32 accumulator are supported"
    return ""


def _operands(
    group, ins, lane: int, s: _Sources, shape: InstructionDescriptor
) -> tuple[Operand, Operand] | None:
    R, column, a = group.R, 0, None
    if s.a_address is not None:
        column = (int(R[s.a_address[0]][lane]) + s.a_address[1]) & 0xFFFF
        owned(group, ins, column, DEPTH // 2, range(128))
    else:
        a = operand_bytes(group, ins, int(R[s.a][lane]), shape.m, DEPTH, shape.a_mn_major)
        if a is None:
            return None
    b = operand_bytes(group, ins, int(R[s.b][lane]), shape.n, DEPTH, shape.b_mn_major)
    if b is None:
        return None
    return (
        Operand(None if a is None else a >> 1, column, shape.a_type, shape.negate_a),
        Operand(b >> 1, 0, shape.b_type, shape.negate_b),
    )


def _bind(asm, ins, ws: bool):
    s = _Sources(asm, ins)

    def run(group, active):
        for lane in lane_numbers(group, active).tolist():
            _issue(group, ins, lane, s, ws)

    return run


def _issue(group, ins, lane: int, s: _Sources, ws: bool) -> None:
    machine, R = group.machine, group.R
    shape = InstructionDescriptor.decode(int(R[s.descriptor][lane]))
    address = int(R[s.d[0]][lane]) + s.d[1]
    d = accumulator(address, shape.m, shape.n, ws)
    problem = _unsupported(shape)
    if d is None:
        problem = f"no layout for M={shape.m} N={shape.n} at tensor address {address:#x}"
    elif any(R[m][lane] for m in s.disabled):
        problem = "disabled output lanes are not supported"
    if problem or d is None:
        machine.fault("tensor core", group, ins, problem)
        return
    operands = _operands(group, ins, lane, s, shape)
    if operands is None or not owned(group, ins, d.column, d.width, d.span):
        return
    accumulate = bool(R[s.accumulate][lane])

    def carry_out(op):
        _multiply(op, *operands, d, accumulate)
        _tell(op, *operands, d, accumulate)

    chain = ("mma", id(group.warp), address, shape.m, shape.n, ws)
    issue_tcgen05(group, ins, ONE_LANE[lane], "mma", chain, carry_out)


@effect(f"tcgen05.mma.cta_group::1.kind::f16{COLLECTOR}")
def mma(asm, ins, parts):
    """D = A B^T (+ D); A from shared or tensor memory, B [N, K] from shared (9.7.16.10.9.1)."""
    return _bind(asm, ins, ws=False)


@effect(
    "tcgen05.mma.ws.cta_group::1.kind::f16{|.collector::b0::fill|.collector::b0::use|.collector::b0::discard}"
)
def mma_ws(asm, ins, parts):
    """The weight-stationary form: other layouts of D, the same product (9.7.16.10.9.3)."""
    return _bind(asm, ins, ws=True)
