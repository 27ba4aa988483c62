"""stmatrix and ldmatrix: 8x8 matrices of 16-bit elements, rows addressed by lanes (PTX ISA
9.7.14.5.15, 9.7.14.5.16).

Lanes 8i to 8i + 7 give the addresses of matrix i's rows; thread t holds elements 2(t % 4), +1 of
row t / 4, or, with
.trans, of column t / 4.
"""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.events import READ, WRITE
from jax_dsa.emulator.isa.addressing import places, told
from jax_dsa.emulator.isa.table import effect

FORM = "sync.aligned.m8n8.{x1|x2|x4}{|.trans}{|.shared|.shared::cta}.b16"


def _fragments(values: np.ndarray, trans: bool) -> np.ndarray:
    """[matrices, 32 lanes, 2] <-> [matrices, 8, 8]: rows of the stored matrices."""
    matrices = values.reshape(-1, 8, 8)
    return matrices.transpose(0, 2, 1) if trans else matrices


def _bind(asm, ins, parts, address, registers):
    base, offset = asm.address(address)
    items = asm.items(registers)
    space = "shared" if any(p.startswith("shared") for p in parts) else ""
    rows = np.arange(32) < 8 * len(items)
    if len(items) != int(parts[4][1:]):
        asm.refuse(ins, f"{len(items)} registers for {parts[4]}")

    def locate(group, active):
        found = places(group, active & rows, base, offset, 16, space, ins)
        return found[0] if found and found[0].offsets.size == rows.sum() else None

    return items, locate


@effect(f"stmatrix.{FORM}")
def stmatrix(asm, ins, parts):
    """Stores one, two or four matrices."""
    items, locate = _bind(asm, ins, parts, *ins.operands)
    sources, trans = [asm.source(i, "b32") for i in items], "trans" in parts

    def run(group, active):
        place = locate(group, active)
        if place is None:
            return
        values = np.stack([group.R[s] for s in sources]).view(np.uint16)
        matrices = _fragments(values, trans)
        place.memory.views[2][(place.offsets >> 1)[:, None] + np.arange(8)] = matrices.reshape(
            -1, 8
        )
        told(group, ins, place, 16, WRITE)

    return run


@effect(f"ldmatrix.{FORM}")
def ldmatrix(asm, ins, parts):
    """Loads one, two or four matrices."""
    items, locate = _bind(asm, ins, parts, ins.operands[1], ins.operands[0])
    targets, trans = [asm.destination(i, "b32") for i in items], "trans" in parts

    def run(group, active):
        place = locate(group, active)
        if place is None:
            return
        rows = place.memory.views[2][(place.offsets >> 1)[:, None] + np.arange(8)]
        matrices = np.ascontiguousarray(_fragments(rows, trans))
        for target, words in zip(
            targets, matrices.reshape(len(targets), 64).view(np.uint32), strict=True
        ):
            np.copyto(group.R[target], words, where=active)
        told(group, ins, place, 16, READ)

    return run
