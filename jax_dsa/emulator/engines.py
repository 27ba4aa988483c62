"""Asynchronous work: operations, their order, and who waits for them.

An operation is carried out at some moment between its issue and the point where something waits for
it; the schedule
chooses. Only the orders that the ISA gives are kept: ``chain`` names a pipeline whose operations
run in issue order.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np


def bits(lanes: np.ndarray) -> int:
    """A mask of lanes as an integer."""
    return _bits(lanes.tobytes())


@functools.lru_cache(4096)
def _bits(lanes: bytes) -> int:
    return sum(1 << lane for lane, on in enumerate(lanes) if on)


class Op:
    """One asynchronous operation of one instruction.

    Attributes:
      kind: what the engine does: "mma", "wgmma", "cp", "ld", "st", "copy" (cp.async), "bulk",
        "arrive".
      group, ins: who issued it, with which instruction; ``lanes`` are the issuing lanes.
      chain: pipeline key, or None when unordered.
      tracks: the operations whose completion this one announces (commit, cp.async.mbarrier.arrive).
      family: what waits speak of: "cp.async", "bulk", "bulk.load", "tcgen05", "tcgen05.ld",
        "tcgen05.st", "wgmma".
      effect: carries it out.
    """

    __slots__ = (
        "kind", "group", "ins", "lanes", "bits", "chain", "tracks", "effect", "blockers",
        "dependents", "done",
        "waiters", "sequence", "serial", "cta", "family",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        group,
        ins,
        lanes,
        effect: Callable,
        chain=None,
        tracks: Iterable[Op] = (),
        family="",
    ):
        self.kind, self.group, self.ins, self.lanes = kind, group, ins, lanes
        self.bits = bits(lanes)
        self.effect, self.chain, self.tracks = effect, chain, tuple(tracks)
        self.blockers = 0
        self.dependents: list[Op] = []
        self.done = False
        self.waiters: list = []
        self.sequence = np.zeros(32, np.int64)
        self.serial = 0
        self.cta = group.cta
        self.family = family or kind

    def __str__(self) -> str:
        return f"{self.kind} issued by {self.group} at {self.ins}"


def _done(op: Op) -> None:
    raise AssertionError(f"{op} is carried out twice")


class Engines:
    """Every operation that has been issued and not carried out."""

    def __init__(self, machine, eager: bool):
        self.machine = machine
        self.eager = eager
        self.ready: deque[Op] = deque()
        self.last: dict[tuple, Op] = {}
        self.pending: dict[int, Op] = {}
        self._serial = itertools.count()

    def issue(self, op: Op, after: Iterable[Op] = ()) -> Op:
        """Starts ``op``; it will not run before the operations in ``after`` and its pipeline's
        earlier ones.
        """
        machine = self.machine
        op.serial = next(self._serial)
        for earlier in self._before(op, after):
            if not earlier.done:
                op.blockers += 1
                earlier.dependents.append(op)
        if op.chain is not None:
            self.last[op.chain] = op
        if machine.on.issue:
            machine.on.issue(op)
        self.pending[op.serial] = op
        if op.blockers == 0:
            self.ready.append(op)
        if self.eager:
            self.drain()
        return op

    def _before(self, op: Op, after: Iterable[Op]) -> list[Op]:
        last = self.last.get(op.chain) if op.chain is not None else None
        return [*after, *op.tracks, *([last] if last else [])]

    def drain(self) -> None:
        while self.ready:
            self.run(self.ready.popleft())

    def run(self, op: Op) -> None:
        """Carries ``op`` out now (it has left ``ready``)."""
        machine = self.machine
        machine.progress += 1
        op.effect(op)
        op.effect = _done  # what it holds, places in memory above all, is needed no longer
        op.done = True
        del self.pending[op.serial]
        for later in op.dependents:
            later.blockers -= 1
            if later.blockers == 0:
                self.ready.append(later)
        op.dependents.clear()
        if machine.on.finish:
            machine.on.finish(op)
        for group in op.waiters:
            machine.wake(group, op)
        op.waiters.clear()

    def flush(self, cta) -> list[Op]:
        """Carries out what a CTA left behind; returns those operations."""
        left = [op for op in self.pending.values() if op.cta is cta]
        while any(not op.done for op in left):
            op = next(o for o in self.ready if o.cta is cta)
            self.ready.remove(op)
            self.run(op)
        return left


class Tracker:
    """The operations of one family that one warp has started and not yet waited for, with groups
    per lane.

    cp.async and bulk copies are waited for by group: ``commit`` closes a lane's group,
    ``before(lanes, n)`` lists
    what all but the newest n groups of these lanes hold (PTX ISA 9.7.9.25.1, 9.7.9.25.3).
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.closed = np.zeros(32, np.int64)

    def add(self, op: Op) -> None:
        op.sequence = self.closed.copy()
        self.ops.append(op)

    def commit(self, lanes: np.ndarray) -> None:
        self.closed[lanes] += 1

    def of(self, lanes: np.ndarray) -> list[Op]:
        """Every operation of these lanes."""
        mine = bits(lanes)
        return [op for op in self.ops if op.bits & mine]

    def before(self, lanes: np.ndarray, newest: int) -> list[Op]:
        """Operations of these lanes in groups other than the newest ``newest`` closed ones."""
        limit, mine = self.closed - newest, bits(lanes)
        return [op for op in self.ops if op.bits & mine & bits(op.sequence < limit)]

    def forget(self, ops: Iterable[Op]) -> None:
        gone = set(map(id, ops))
        self.ops = [op for op in self.ops if id(op) not in gone]
