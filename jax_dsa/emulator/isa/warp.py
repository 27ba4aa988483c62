"""Exchanges within a warp: shfl, vote, match-free elections, redux (PTX ISA 9.7.9.6,
9.7.13.9-9.7.13.16).
"""

from __future__ import annotations

import functools

import numpy as np

from jax_dsa.emulator.isa import numerics
from jax_dsa.emulator.isa.addressing import ONE_LANE
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.ptx.syntax import Negated, Pair
from jax_dsa.emulator.registers import LANES

_LANE = np.arange(LANES)
_WHOLE_WARP = b"\xff" * 4 * LANES


def _member_check(group, active, members: np.ndarray, ins) -> None:
    """Every lane that runs a .sync instruction must be in its member mask."""
    if members.tobytes() == _WHOLE_WARP:
        return
    if not (members[active] >> np.flatnonzero(active).astype(np.uint32) & 1).all():
        group.machine.fault(
            "warp",
            group,
            ins,
            "a lane executes a .sync instruction without being in its member mask",
        )


@functools.lru_cache(1024)
def _source_lane(mode: str, by: bytes, clamps: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Lane that each lane reads (its own one when out of range) and whether it is in range
    (9.7.9.6).
    """
    b, clamp = (np.frombuffer(x, np.uint32).astype(np.int64) for x in (by, clamps))
    lane, ok = _wanted_lane(mode, b & 31, clamp)
    return np.where(ok, np.clip(lane, 0, 31), _LANE), ok


def _wanted_lane(mode: str, b: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    segment = clamp >> 8 & 31
    bound = clamp & 31
    low = _LANE & segment
    top = low | (bound & ~segment)
    if mode == "up":
        lane = _LANE - b
        return lane, lane >= low | (bound & ~segment)
    lane = {"down": _LANE + b, "bfly": _LANE ^ b, "idx": low | (b & ~segment)}[mode]
    return lane, lane <= top


@effect("shfl.sync.{up|down|bfly|idx}.b32")
def shfl(asm, ins, parts):
    """Each lane reads another lane's register (9.7.9.6)."""
    target, source, by, clamp, members = ins.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    d = asm.destination(first, "b32") if first is not None else None
    p = asm.destination(second, "pred") if second is not None else None
    a, b, c, k = (asm.source(o, "u32") for o in (source, by, clamp, members))
    mode = parts[2]

    def run(group, active):
        R = group.R
        _member_check(group, active, R[k], ins)
        lane, ok = _source_lane(mode, R[b].tobytes(), R[c].tobytes())
        values = R[a][lane]
        if d is not None:
            np.copyto(R[d], values, where=active)
        if p is not None:
            np.copyto(R[p], ok, where=active)

    return run


def _votes(group, active, view: int, negated: bool) -> np.ndarray:
    votes = group.R[view]
    return (~votes if negated else votes) & active


def _vote_source(asm, operand):
    negated = isinstance(operand, Negated)
    return asm.source(operand.register if negated else operand, "pred"), negated


@effect("vote.sync.ballot.b32")
def ballot(asm, ins, parts):
    """Mask of lanes whose predicate holds (9.7.13.10)."""
    d, (p, negated) = asm.destination(ins.operands[0], "b32"), _vote_source(asm, ins.operands[1])

    def run(group, active):
        mask = int((_votes(group, active, p, negated) << _LANE.astype(np.int64)).sum())
        group.R[d][active] = mask

    return run


def _register_vote(mode: str, decide, doc: str) -> None:
    def vote(asm, ins, parts):
        d, (p, negated) = (
            asm.destination(ins.operands[0], "pred"),
            _vote_source(asm, ins.operands[1]),
        )

        def run(group, active):
            group.R[d][active] = decide(_votes(group, active, p, negated), active)

        return run

    vote.__doc__ = doc
    effect(f"vote.sync.{mode}.pred")(vote)


_register_vote(
    "any", lambda votes, active: votes.any(), "True when any lane's predicate holds (9.7.13.10)."
)
_register_vote(
    "all", lambda votes, active: votes[active].all(), "True when every lane's holds (9.7.13.10)."
)
_register_vote(
    "uni",
    lambda votes, active: votes[active].all() or not votes.any(),
    "True when all lanes agree (9.7.13.10).",
)


@effect("elect.sync")
def elect(asm, ins, parts):
    """Picks one lane of the mask, the same each time (9.7.13.15): the schedule says which."""
    target, members = ins.operands
    d = asm.destination(target.first, "b32") if target.first is not None else None
    p = asm.destination(target.second, "pred")
    k = asm.source(members, "u32")

    def run(group, active):
        _member_check(group, active, group.R[k], ins)
        leader = group.machine.scheduler.leader(active)
        if d is not None:
            group.R[d][active] = leader
        np.copyto(group.R[p], ONE_LANE[leader], where=active)

    return run


@effect("activemask.b32")
def activemask(asm, ins, parts):
    """Mask of lanes that run (9.7.13.11)."""
    d = asm.destination(ins.operands[0], "b32")

    def run(group, active):
        group.R[d][active] = int((active.astype(np.int64) << _LANE).sum())

    return run


_REDUX = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_REDUX["xor"] = np.bitwise_xor
_FLOAT_REDUX = {"min": numerics.smaller, "max": numerics.larger}


@effect(
    "redux.sync.{add|min|max}.{u32|s32}", "redux.sync.{and|or|xor}.b32", "redux.sync.{min|max}.f32"
)
def redux(asm, ins, parts):
    """One value from all lanes (9.7.13.12)."""
    d, a = asm.destination(ins.operands[0], parts[3]), asm.source(ins.operands[1], parts[3])
    fn = (_FLOAT_REDUX if parts[3] == "f32" else _REDUX)[parts[2]]

    def run(group, active):
        group.R[d][active] = functools.reduce(fn, group.R[a][active])

    return run


@effect("bar.warp.sync")
def bar_warp_sync(asm, ins, parts):
    """Waits for the lanes of the mask and orders their memory accesses (9.7.13.2).

    Lanes that run in another group meet here only after reconvergence, which compilers place before
    it.
    """
    k = asm.source(ins.operands[0], "u32")

    def run(group, active):
        _member_check(group, active, group.R[k], ins)
        if group.machine.on.synchronise:
            group.machine.on.synchronise(group, ins)

    return run
