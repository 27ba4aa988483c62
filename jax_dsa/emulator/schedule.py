"""Which agent moves next: one cooperative scheduler, seeded, replayable.

Asynchronous engines ("engines" below) run in turn with the warps, at once, as late as possible, or
at random; warps
run in turn or at random; named warps can be held before named instructions, as a sleep in their
code would do.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np


@dataclasses.dataclass(frozen=True)
class Delay:
    """Holds a warp before an instruction.

    Attributes:
      lines: PTX lines of the instructions; empty: every instruction whose opcode starts with
        ``opcode``.
      opcode: opcode prefix, used when ``lines`` is empty.
      warps: warp indices that are held; empty: all.
      steps: for how many scheduler steps; None: until nobody else can move.
      times: how many times each warp is held; None: always.
    """

    lines: frozenset[int] = frozenset()
    opcode: str = ""
    warps: frozenset[int] = frozenset()
    steps: int | None = None
    times: int | None = None

    def applies(self, group, ins) -> bool:
        if self.warps and group.warp.index not in self.warps:
            return False
        return (
            ins.line in self.lines
            if self.lines
            else bool(self.opcode) and ins.opcode.startswith(self.opcode)
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How agents take turns.

    Attributes:
      warps: "turn" or "random".
      engines: "turn", "eager" (work is done the moment it is issued), "lazy" (only when no warp can
        move), "random".
      seed: for "random" and for ``spurious``.
      spurious: probability that a ``mbarrier.try_wait`` that would have to wait fails instead (the
        ISA allows it).
      leader: which active lane ``elect.sync`` picks: "first" or "last".
      quantum: straight pieces of code that a warp runs before the next agent's turn.
      delays: warps held at instructions.
    """

    warps: str = "turn"
    engines: str = "turn"
    seed: int = 0
    spurious: float = 0.0
    leader: str = "first"
    quantum: int = 64
    delays: tuple[Delay, ...] = ()


SCHEDULES = {
    "round_robin": Schedule(),
    "eager": Schedule(engines="eager"),
    "lazy": Schedule(engines="lazy", leader="last"),
    "random": Schedule("random", "random", quantum=4, spurious=0.1),
}


class Scheduler:
    """Applies a Schedule to one machine."""

    def __init__(self, machine, schedule: Schedule):
        self.machine, self.schedule = machine, schedule
        self.random = np.random.default_rng(schedule.seed)
        self.ready: deque = deque()
        self.held: list[tuple[float, object]] = []
        self.counts: dict[tuple[int, int, int], int] = {}
        self._turn = False

    def restart(self, cta: int) -> None:
        """A CTA starts alone: its schedule depends on the seed and its number only."""
        self.random = np.random.default_rng(
            (self.schedule.seed, cta) if cta else self.schedule.seed
        )
        self.counts.clear()
        self._turn = False

    def next(self):
        """The next Group or Op, taken out of its queue; None when nobody can move."""
        self._release_expired()
        ops = self.machine.engines.ready
        if self.schedule.warps == "random":
            return self._random(ops)
        self._turn = not self._turn
        if ops and (not self.ready or (self._turn and self.schedule.engines == "turn")):
            return ops.popleft()
        return self.ready.popleft() if self.ready else self._last_resort()

    def _random(self, ops: deque):
        count = len(self.ready) + (
            len(ops) if self.schedule.engines == "random" or not self.ready else 0
        )
        if not count:
            return self._last_resort()
        pick = int(self.random.integers(count))
        queue, at = (self.ready, pick) if pick < len(self.ready) else (ops, pick - len(self.ready))
        chosen = queue[at]
        del queue[at]
        return chosen

    def spurious(self) -> bool:
        return self.schedule.spurious > 0 and self.random.random() < self.schedule.spurious

    def leader(self, mask: np.ndarray) -> int:
        lanes = mask.tobytes()
        return lanes.find(1) if self.schedule.leader == "first" else lanes.rfind(1)

    # -- delays -----------------------------------------------------------------------------------
    def hold(self, group, ins) -> bool:
        """True when the group must not execute ``ins`` yet."""
        if group.delayed_at == ins.pc:
            group.delayed_at = -1
            return False
        for number, delay in enumerate(self.schedule.delays):
            key = (number, id(group.warp), ins.line)
            if not delay.applies(group, ins) or self.counts.get(key, 0) == delay.times:
                continue
            self.counts[key] = self.counts.get(key, 0) + 1
            until = float("inf") if delay.steps is None else self.machine.now + delay.steps
            group.delayed_at = ins.pc
            self.machine.wait(group, "is held by the schedule", self)
            self.held.append((until, group))
            return True
        return False

    def _release_expired(self) -> None:
        while self.held and self.held[0][0] <= self.machine.now:
            self.machine.wake(self.held.pop(0)[1], self)

    def _last_resort(self):
        """Nobody else can move: release the warp that was held first."""
        if not self.held:
            return None
        self.machine.wake(self.held.pop(0)[1], self)
        return self.ready.popleft()
