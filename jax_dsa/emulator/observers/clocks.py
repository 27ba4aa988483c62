"""Vector clocks for agents, asynchronous operations and barriers.

A clock holds, per *component* (a timeline of some agent), how much of it is known to have happened.
It has five rows:

  ORDER   what happened before.
  SHARED  which generic accesses of shared memory a fence.proxy.async has shown to the asynchronous
  proxy;
  GLOBAL  the same for global memory.
  BEFORE  which tcgen05 work a tcgen05.fence::before_thread_sync has published;
  AFTER   which of it a tcgen05.fence::after_thread_sync has let through (this row belongs to one
  thread, it does not travel).

Components of work that completes in issue order for whoever waits (cp.async, tcgen05.ld, bulk
groups of one warp) hold
the number of the newest completed operation.
"""

from __future__ import annotations

import numpy as np

ORDER, SHARED, GLOBAL, BEFORE, AFTER = range(5)
TRAVELS, ROWS = 4, 5  # rows that go along an edge; all rows
_START = 128


class Clock:
    """Rows over components; grows as components are added."""

    __slots__ = ("rows",)

    def __init__(self, rows: np.ndarray | None = None):
        self.rows = np.zeros((5, _START), np.int32) if rows is None else rows

    def copy(self) -> Clock:
        return Clock(self.rows.copy())

    def grow(self, size: int) -> None:
        if size > self.rows.shape[1]:
            wider = np.zeros((5, max(size, 2 * self.rows.shape[1])), np.int32)
            wider[:, : self.rows.shape[1]] = self.rows
            self.rows = wider

    def join(self, other: Clock) -> None:
        """Learns everything that ``other`` knows."""
        self.grow(other.rows.shape[1])
        mine = self.rows[:TRAVELS, : other.rows.shape[1]]
        np.maximum(mine, other.rows[:TRAVELS], out=mine)

    def get(self, component: int, row: int = ORDER) -> int:
        return int(self.rows[row, component]) if component < self.rows.shape[1] else 0

    def set(self, component: int, value: int) -> None:
        self.grow(component + 1)
        self.rows[ORDER, component] = value

    def fence(self, target: int, source: int = ORDER) -> None:
        """row ``target`` learns row ``source``."""
        np.maximum(self.rows[target], self.rows[source], out=self.rows[target])


class Components:
    """Numbers of components, their newest ticks, and who ticked when (for reports)."""

    def __init__(self) -> None:
        self.history: list[list[tuple]] = [[]]  # component 0: everything before the launch
        self.generic = np.ones(_START, bool)
        self.free: list[int] = []

    def new(self, generic: bool, after: Clock | None = None) -> int:
        """A component for new work; an old one is used again where ``after`` knows all of it."""
        if after is not None:
            for i, candidate in enumerate(self.free[:16]):
                if self.generic[candidate] == generic and after.get(candidate) >= len(
                    self.history[candidate]
                ):
                    return self.free.pop(i)
        number = len(self.history)
        self.history.append([])
        if number >= self.generic.size:
            self.generic = np.concatenate((self.generic, np.ones(number, bool)))
        self.generic[number] = generic
        return number

    def release(self, component: int) -> None:
        self.free.append(component)

    def tick(self, component: int, agent, ins) -> int:
        """The next tick of a component, noted as done by ``agent`` at ``ins``."""
        history = self.history[component]
        history.append((agent, ins))
        return len(history)

    def who(self, component: int, tick: int) -> tuple:
        return self.history[component][tick - 1]

    def known(self, clock: Clock, row: int) -> Known:
        """What an access checks earlier accesses against; ``row`` SHARED or GLOBAL: as the
        asynchronous proxy sees them; AFTER: as tcgen05 fences have let them through.
        """
        clock.grow(len(self.history))
        size = clock.rows.shape[1]
        if self.generic.size < size:
            self.generic = np.concatenate((self.generic, np.ones(size - self.generic.size, bool)))
        return Known(clock.rows, row, self.generic)


class Known:
    """How much of each component an access may rely on."""

    __slots__ = ("_rows", "_row", "_generic", "_whole")

    def __init__(self, rows: np.ndarray, row: int, generic: np.ndarray):
        self._rows, self._row, self._generic = rows, row, generic
        self._whole = rows[row] if row in (ORDER, AFTER) else None

    def of(self, component: int) -> int:
        """The newest known tick of one component."""
        proxy = self._row in (SHARED, GLOBAL) and not self._generic[component]
        return self._rows.item(ORDER if proxy else self._row, component)

    def row(self) -> np.ndarray:
        """The newest known tick of every component."""
        if self._whole is None:
            generic = self._generic[: self._rows.shape[1]]
            self._whole = np.where(generic, self._rows[self._row], self._rows[ORDER])
        return self._whole
