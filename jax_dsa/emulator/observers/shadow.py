"""Shadow memory: who wrote each cell last, and everyone who has read it or updated it atomically.

A tick is the position of an access in its component. Tick 0 in component 0 is "before the launch";
component -1 has
never been written. All concurrent readers are kept, each in a row of its component.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Conflict(NamedTuple):
    """Cells whose earlier access (component, tick) of this kind is not known to have happened."""

    kind: str
    component: int
    tick: int
    cells: np.ndarray


class Table:
    """Newest tick per component and cell."""

    def __init__(self, cells: int):
        self.cells = cells
        self.rows: dict[int, int] = {}
        self.ticks: list[np.ndarray] = []
        self.newest = np.zeros(4, np.int32)
        self.components = np.zeros(4, np.int64)

    def note(self, component: int, cells, tick: int) -> None:
        row = self.rows.get(component)
        if row is None:
            row = self._add(component)
        self.ticks[row][cells] = tick
        self.newest[row] = tick

    def _add(self, component: int) -> int:
        row = self.rows[component] = len(self.rows)
        self.ticks.append(np.zeros(self.cells, np.int32))
        if row == len(self.newest):
            self.newest = np.concatenate((self.newest, np.zeros_like(self.newest)))
            self.components = np.concatenate((self.components, np.zeros_like(self.components)))
        self.components[row] = component
        return row

    def conflicts(self, cells, known: np.ndarray, kind: str) -> list[Conflict]:
        """Accesses of cells that ``known`` does not cover."""
        count = len(self.rows)
        if not count:
            return []
        limits = known[self.components[:count]]
        suspects = np.flatnonzero(self.newest[:count] > limits)
        found = []
        for row in suspects.tolist():
            ticks = self.ticks[row][cells]
            bad = ticks > limits[row]
            if np.logical_or.reduce(bad):
                component = int(self.components[row])
                found += _by_tick(kind, np.full(ticks.shape, component), ticks, bad, cells)
        return found


class Shadow:
    """Races on one memory. Methods return conflicts; ``known`` is Components.view of the accessing
    agent.
    """

    def __init__(self, cells: int, initialised: bool):
        self.component = np.full(cells, 0 if initialised else -1, np.int32)
        self.tick = np.zeros(cells, np.int32)
        self.cells = cells
        self.readers: Table | None = None
        self.updaters: Table | None = None
        self.loaders: Table | None = None

    def read(self, cells, component: int, tick: int, known: np.ndarray) -> list[Conflict]:
        found = self._writes(cells, known)
        if self.updaters is not None:
            found += self.updaters.conflicts(cells, known, "atomic")
        if self.readers is None:
            self.readers = Table(self.cells)
        self.readers.note(component, cells, tick)
        return found

    def write(self, cells, component: int, tick: int, known: np.ndarray) -> list[Conflict]:
        found = self._writes(cells, known)
        for table, kind in (
            (self.readers, "read"), (self.updaters, "atomic"), (self.loaders, "atomic read"),
        ):  # fmt: skip
            if table is not None:
                found += table.conflicts(cells, known, kind)
        self.component[cells] = component
        self.tick[cells] = tick
        return found

    def load(self, cells, component: int, tick: int, known: np.ndarray) -> list[Conflict]:
        """An atomic read: ordered with atomics, in no conflict with plain reads."""
        if self.loaders is None:
            self.loaders = Table(self.cells)
        self.loaders.note(component, cells, tick)
        return self._writes(cells, known)

    def update(self, cells, component: int, tick: int, known: np.ndarray) -> list[Conflict]:
        """An atomic: ordered with other atomics, not with plain accesses."""
        found = self._writes(cells, known)
        if self.readers is not None:
            found += self.readers.conflicts(cells, known, "read")
        if self.updaters is None:
            self.updaters = Table(self.cells)
        self.updaters.note(component, cells, tick)
        unwritten = self.component[cells] < 0
        if unwritten.any():
            touched = as_array(cells)[unwritten]
            self.component[touched] = 0
        return found

    def earlier(self, cells, known: np.ndarray, readers: bool) -> set[tuple[int, int]]:
        """(component, tick) of the last writers, and of the readers if wanted, that ``known`` does
        not cover.
        """
        found = self._writes(cells, known)
        if readers and self.readers is not None:
            found += self.readers.conflicts(cells, known, "read")
        return {(c.component, c.tick) for c in found}

    def unwritten(self, cells) -> np.ndarray:
        """Cells among ``cells`` that nobody has written."""
        missing = self.component[cells] < 0
        return as_array(cells)[missing] if missing.any() else np.empty(0, np.int64)

    def settle(self) -> None:
        """A launch ends: everything is ordered before the next one."""
        self.component[self.component > 0] = 0
        self.tick[:] = 0
        self.readers = self.updaters = self.loaders = None

    def _writes(self, cells, known: np.ndarray) -> list[Conflict]:
        components, ticks = self.component[cells], self.tick[cells]
        bad = ticks > known[components]
        return _by_tick("write", components, ticks, bad, cells) if np.logical_or.reduce(bad) else []


def as_array(cells) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _by_tick(kind: str, components, ticks, bad, cells) -> list[Conflict]:
    """One conflict per earlier access."""
    keys = components[bad].astype(np.int64) << 32 | ticks[bad]
    where = as_array(cells)[bad]
    if (keys == keys[0]).all():
        return [Conflict(kind, int(keys[0]) >> 32, int(keys[0]) & 0xFFFFFFFF, where)]
    return [
        Conflict(kind, key >> 32, key & 0xFFFFFFFF, where[keys == key])
        for key in np.unique(keys).tolist()
    ]
