"""wgmma: D = A B (+ D) by a warpgroup, D in registers (PTX ISA 9.7.15), float32 accumulators.

A warpgroup is four consecutive warps, the first one a multiple of four. They start a product
together; each warp's share (16 rows of A and D, all of B) is an asynchronous operation of that
warp, carried out at some moment before the wgmma.wait_group that covers it. It reads shared memory
through the asynchronous proxy, and its registers when it is carried out. Products on one
accumulator run in issue order; no other order is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import READ
from jax_dsa.emulator.isa.addressing import uniform
from jax_dsa.emulator.isa.copies import close_group, wait_for
from jax_dsa.emulator.isa.descriptors import (
    SharedDescriptor,
    bounded,
    element_addresses,
    warpgroup_descriptor,
)
from jax_dsa.emulator.isa.numerics import widen_bf16
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.ptx.syntax import Vector

FAMILY = "wgmma"
ROWS, WARP_ROWS, DEPTH, WARPS = 64, 16, 16, 4


# -- fragments (9.7.15.5.1)
# ---------------------------------------------------------------------------
def from_fragment(registers: np.ndarray) -> np.ndarray:
    """[2 n / 8, 32 lanes, e] -> the warp's matrix [16, n]: D and A fragments, 9.7.15.5.1.1.

    Eight columns take two rows of registers: lane 4 g + q holds elements 2 q and 2 q + 1 of row g,
    then of row g + 8.
    """
    parts = registers.reshape(-1, 2, 8, 4, 2)  # [block of columns, half, g, q, element]
    return parts.transpose(1, 2, 0, 3, 4).reshape(WARP_ROWS, -1)


def to_fragment(matrix: np.ndarray) -> np.ndarray:
    """The inverse of ``from_fragment``: [16, n] -> [2 n / 8, 32 lanes, 2]."""
    parts = matrix.reshape(2, 8, -1, 4, 2)
    return parts.transpose(2, 0, 1, 3, 4).reshape(-1, 32, 2)


# -- one product ----------------------------------------------------------------------------------
class Form(NamedTuple):
    """What an instruction fixes: view numbers of operands, scales, majors, element type."""

    n: int
    d: tuple[int, ...]
    a: tuple[int, ...]  # one descriptor, or four registers
    b: int
    accumulate: int
    scale: float  # of the product: imm-scale-a times imm-scale-b
    a_mn_major: bool
    b_mn_major: bool
    bf16: bool

    @property
    def a_in_registers(self) -> bool:
        return len(self.a) > 1

    def widen(self, bits: np.ndarray) -> np.ndarray:
        return widen_bf16(bits) if self.bf16 else bits.view(np.float16).astype(np.float32)


class Call(NamedTuple):
    """What all threads of a warpgroup have to agree on."""

    pc: int
    a: int
    b: int
    accumulate: bool


def decode(asm, ins, parts) -> Form:
    """Reads the operands; refuses immediates that the ISA does not have."""
    n = int(parts[4].split("n")[1].split("k")[0])
    d, a, b, accumulate, *immediates = ins.operands
    scale_a, scale_b, *majors = [i.value for i in immediates]
    if isinstance(a, Vector):
        majors = [0, *majors]
    targets = tuple(asm.destination(t, "f32") for t in asm.items(d))
    if len(targets) != n // 2 or len(majors) != 2 or len(asm.items(a)) not in (1, 4):
        asm.refuse(ins, f"{len(targets)} registers, {len(immediates)} immediates for N = {n}")
    if {scale_a, scale_b} - {1, -1} or set(majors) - {0, 1}:
        asm.refuse(ins, "imm-scale must be 1 or -1, imm-trans 0 or 1")
    sources = tuple(asm.source(x, "b32" if isinstance(a, Vector) else "u64") for x in asm.items(a))
    return Form(
        n,
        targets,
        sources,
        asm.source(b, "u64"),
        asm.source(accumulate, "pred"),
        float(scale_a * scale_b),
        bool(majors[0]),
        bool(majors[1]),
        parts[6] == "bf16",
    )


def _columns(registers, views) -> np.ndarray:
    return np.stack([registers[v] for v in views])


def _left(op, form: Form, addresses: np.ndarray | None) -> np.ndarray:
    """The warp's rows of A, float32 [16, 16]."""
    if addresses is not None:
        return form.widen(op.cta.shared.views[2][addresses >> 1])
    words = _columns(op.group.R, form.a)
    return form.widen(from_fragment(_register_pairs(words)))


def _register_pairs(words: np.ndarray) -> np.ndarray:
    """Four registers (row halves alternate, then blocks of eight columns) as pairs of elements."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(4, 32, 2)


def _multiply(op, form: Form, a: np.ndarray | None, b: np.ndarray, accumulate: bool) -> None:
    R, right = op.group.R, form.widen(op.cta.shared.views[2][b >> 1])
    product = (_left(op, form, a) @ right.T) * np.float32(form.scale)
    fragment = to_fragment(product).transpose(0, 2, 1).reshape(-1, 32)
    for view, values in zip(form.d, fragment, strict=True):
        R[view][:] = R[view] + values if accumulate else values


def _issue(group, ins, active, form: Form, call: Call) -> None:
    """Starts one warp's share."""
    first = WARP_ROWS * (group.warp.index % WARPS)
    b = _addresses(group, ins, call.b, form.n, form.b_mn_major)
    a = None if form.a_in_registers else _addresses(group, ins, call.a, ROWS, form.a_mn_major)
    if b is None or a is None and not form.a_in_registers:
        return
    mine = None if a is None else a[first : first + WARP_ROWS]

    def carry_out(op):
        _multiply(op, form, mine, b, call.accumulate)
        access = op.group.machine.on.access
        for addresses in (mine, b) if access else ():
            if addresses is not None:
                access(op, ins, op.cta.shared, (addresses >> 1).ravel(), READ)

    chain = (FAMILY, id(group.warp), form.d)
    op = Op("wgmma", group, ins, active.copy(), carry_out, chain, family=FAMILY)
    group.warp.tracker(FAMILY).add(op)
    group.machine.engines.issue(op)


def _addresses(group, ins, word: int, rows: int, mn_major: bool) -> np.ndarray | None:
    descriptor = warpgroup_descriptor(word)
    if isinstance(descriptor, SharedDescriptor):
        return bounded(group, ins, element_addresses(descriptor, rows, DEPTH, mn_major))
    text = f"matrix descriptor {word:#018x}: {descriptor}"
    group.machine.fault("tensor core", group, ins, text)
    return None


# -- the warpgroup --------------------------------------------------------------------------------
class Warpgroup:
    """Who has arrived at the next product, and which wgmma instructions the warps have executed."""

    def __init__(self, cta, first: int):
        self.first = first
        self.complete = first + WARPS <= len(cta.warps)
        self.arrived: dict[int, tuple] = {}
        self.log: list[int] = []
        self.position = dict.fromkeys(range(first, first + WARPS), 0)

    @classmethod
    def of(cls, group) -> Warpgroup:
        first = group.warp.index // WARPS * WARPS
        found = group.cta.warpgroups.get(first)
        if found is None:
            found = group.cta.warpgroups[first] = cls(group.cta, first)
        return found

    def __str__(self) -> str:
        return f"warps {self.first}..{self.first + WARPS - 1}"

    def record(self, group, ins, active) -> None:
        """Reports lanes that are missing, and warps that do not execute the same instructions."""
        fault, at = group.machine.fault, self.position[group.warp.index]
        self.position[group.warp.index] = at + 1
        if not (active | group.warp.exited).all():
            fault("warpgroup", group, ins, f"only {int(active.sum())} lanes execute it together")
        if at == len(self.log):
            self.log.append(ins.pc)
        elif self.log[at] != ins.pc:
            other = group.machine.code.kernel.code[self.log[at]]
            text = (
                f"{self}: all have to execute the same wgmma instructions; another one did {other}"
            )
            fault("warpgroup", group, ins, text)


def _call(group, ins, active, form: Form) -> Call:
    """The values of this warp; reports lanes that differ."""
    views = [
        v for v in (form.a[0], form.b, form.accumulate) if v != form.a[0] or not form.a_in_registers
    ]
    for view in views:
        values = group.R[view][active]
        if (values != values[0]).any():
            text = "matrix descriptors and scale-d must be the same in all threads"
            group.machine.fault("warpgroup", group, ins, text)
    a = 0 if form.a_in_registers else uniform(group, active, form.a[0])
    b = uniform(group, active, form.b)
    return Call(ins.pc, a, b, bool(uniform(group, active, form.accumulate)))


@effect(
    *[
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{{f16.f16|bf16.bf16}}"
        for n in range(8, 257, 8)
    ]
)
def mma_async(asm, ins, parts):
    """D = A B^T (+ D), A [64, 16] from shared memory or registers, B [N, 16] from shared memory
    (9.7.15.5.2).
    """
    form = decode(asm, ins, parts)

    def run(group, active):
        warpgroup = Warpgroup.of(group)
        warpgroup.record(group, ins, active)
        if not warpgroup.complete:
            text = f"{warpgroup} are not all in the CTA, which has {len(group.cta.warps)} warps"
            group.machine.fault("warpgroup", group, ins, text)
            return None
        call = _call(group, ins, active, form)
        warpgroup.arrived[group.warp.index] = group, ins, active, form, call
        if len(warpgroup.arrived) < WARPS:
            return group.machine.wait(group, f"waits for {warpgroup} to arrive", warpgroup)
        _start(group, warpgroup)
        return None

    return run


def _start(last, warpgroup: Warpgroup) -> None:
    """All four warps are here: issues their shares, and lets the other three go on."""
    machine, arrived = last.machine, [warpgroup.arrived[w] for w in sorted(warpgroup.arrived)]
    warpgroup.arrived = {}
    machine.progress += 1
    if len({call for *_, call in arrived}) > 1:
        group, ins = arrived[0][:2]
        text = (
            f"{warpgroup} start different products: instruction, descriptors and scale-d must agree"
        )
        machine.fault("warpgroup", group, ins, text)
    for group, *rest in arrived:
        _issue(group, *rest)
        machine.wake(group, warpgroup, past=True)


# -- groups and the fence (9.7.15.7)
# ------------------------------------------------------------------
@effect("wgmma.fence.sync.aligned")
def fence(asm, ins, parts):
    """Orders earlier accesses of registers before later products (9.7.15.7.1)."""

    def run(group, active):
        Warpgroup.of(group).record(group, ins, active)
        if group.machine.on.fence:
            group.machine.on.fence(group, "wgmma", ins)

    return run


@effect("wgmma.commit_group.sync.aligned")
def commit_group(asm, ins, parts):
    """Closes the group of the products issued so far (9.7.15.7.2)."""
    close = close_group(FAMILY, ins)

    def run(group, active):
        Warpgroup.of(group).record(group, ins, active)
        close(group, active)

    return run


@effect("wgmma.wait_group.sync.aligned")
def wait_group(asm, ins, parts):
    """Waits for all but the newest n groups; their registers belong to the threads again
    (9.7.15.7.3).
    """
    newest = ins.operands[0].value

    def run(group, active):
        tracker = group.warp.tracker(FAMILY)
        ops = tracker.before(active, newest)
        if wait_for(group, ins, FAMILY, ops, False) is not None:
            return "wait"
        Warpgroup.of(group).record(group, ins, active)
        tracker.forget(ops)

    return run
