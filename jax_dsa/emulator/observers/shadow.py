"""Shadow memory: who wrote each cell last, and everyone who has read it or updated it atomically.

A tick is the position of an access in its component. Tick 0 in component 0 is "before the launch".
A *key* is component << 32 | tick, -1 for a cell that has never been written. All concurrent readers
are kept, each in a row of its component.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_dsa.emulator.observers.clocks import Known

_TICK = 0xFFFFFFFF
NOBODY = -1


class Conflict(NamedTuple):
    """Cells whose earlier access (component, tick) of this kind is not known to have happened."""

    kind: str
    component: int
    tick: int
    cells: np.ndarray


class Written(NamedTuple):
    """Cells of one access with the keys of their last writes; ``only``: the key that all share, or
    None.
    """

    cells: slice | np.ndarray
    keys: np.ndarray
    only: int | None

    def unwritten(self) -> np.ndarray:
        """Cells that nobody has written."""
        if self.only is not None:
            return as_array(self.cells) if self.only < 0 else _NO_CELLS
        missing = self.keys < 0
        return as_array(self.cells)[missing] if holds_somewhere(missing) else _NO_CELLS

    def unknown(self, known: Known) -> np.ndarray | None:
        """Where the last write is not covered by ``known``; None: nowhere."""
        if self.only is not None:
            if self.only < 0 or self.only & _TICK <= known.of(self.only >> 32):
                return None
            return np.ones(self.keys.size, bool)
        keys = np.maximum(self.keys, 0)
        bad = keys & _TICK > known.row()[keys >> 32]
        return bad if holds_somewhere(bad) else None

    def distinct(self, where: np.ndarray) -> list[int]:
        """The keys there, ascending."""
        return _distinct(self.keys[where]) if self.only is None else [self.only]

    def conflicts(self, known: Known) -> list[Conflict]:
        bad = self.unknown(known)
        return [] if bad is None else _by_key("write", self.keys[bad], as_array(self.cells)[bad])


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

    def suspects(self, cells, known: Known):
        """(component, ticks of the cells, where ``known`` does not cover them) per component that
        has such.
        """
        count = len(self.rows)
        components = self.components[:count]
        limits = known.row()[components]
        late = self.newest[:count] > limits
        for row in late.nonzero()[0].tolist() if holds_somewhere(late) else ():
            ticks = self.ticks[row][cells]
            bad = ticks > limits[row]
            if holds_somewhere(bad):
                yield int(components[row]), ticks, bad

    def conflicts(self, cells, known: Known, kind: str) -> list[Conflict]:
        """Accesses of cells that ``known`` does not cover."""
        found = []
        for component, ticks, bad in self.suspects(cells, known):
            keys = ticks[bad].astype(np.int64) | component << 32
            found += _by_key(kind, keys, as_array(cells)[bad])
        return found


class Shadow:
    """Races on one memory. Methods return conflicts; ``known`` is what the accessing agent knows.

    An access asks ``written`` once and hands the answer on.
    """

    def __init__(self, cells: int, initialised: bool):
        self.last = np.full(cells, 0 if initialised else NOBODY, np.int64)
        self.cells = cells
        self.readers: Table | None = None
        self.updaters: Table | None = None
        self.loaders: Table | None = None
        self.untouched = initialised  # nobody has written since the launch

    def written(self, cells) -> Written:
        """The last writes of an access's cells."""
        if self.untouched:
            return Written(cells, self.last[:0], 0)
        keys = self.last[cells]
        first = int(keys[0])
        return Written(cells, keys, None if holds_somewhere(keys != first) else first)

    def read(self, found: Written, component: int, tick: int, known: Known) -> list[Conflict]:
        conflicts = found.conflicts(known)
        if self.updaters is not None:
            conflicts += self.updaters.conflicts(found.cells, known, "atomic")
        if self.readers is None:
            self.readers = Table(self.cells)
        self.readers.note(component, found.cells, tick)
        return conflicts

    def write(self, found: Written, component: int, tick: int, known: Known) -> list[Conflict]:
        conflicts = found.conflicts(known)
        for table, kind in (
            (self.readers, "read"), (self.updaters, "atomic"), (self.loaders, "atomic read"),
        ):  # fmt: skip
            if table is not None:
                conflicts += table.conflicts(found.cells, known, kind)
        self.last[found.cells] = component << 32 | tick
        self.untouched = False
        return conflicts

    def load(self, found: Written, component: int, tick: int, known: Known) -> list[Conflict]:
        """An atomic read: ordered with atomics, in no conflict with plain reads."""
        if self.loaders is None:
            self.loaders = Table(self.cells)
        self.loaders.note(component, found.cells, tick)
        return found.conflicts(known)

    def update(self, found: Written, component: int, tick: int, known: Known) -> list[Conflict]:
        """An atomic: ordered with other atomics, not with plain accesses."""
        conflicts = found.conflicts(known)
        if self.readers is not None:
            conflicts += self.readers.conflicts(found.cells, known, "read")
        if self.updaters is None:
            self.updaters = Table(self.cells)
        self.updaters.note(component, found.cells, tick)
        self.last[found.unwritten()] = 0
        return conflicts

    def earlier(self, found: Written, known: Known, readers: bool) -> list[tuple[int, int]]:
        """(component, tick) of the last writers, and of the readers if wanted, that ``known`` does
        not cover; in the order of their components.
        """
        bad = found.unknown(known)
        keys = [] if bad is None else found.distinct(bad)
        if readers and self.readers is not None:
            for component, ticks, late in self.readers.suspects(found.cells, known):
                keys += [component << 32 | tick for tick in _distinct(ticks[late])]
        return [(key >> 32, key & _TICK) for key in dict.fromkeys(keys)]

    def settle(self) -> None:
        """A launch ends: everything is ordered before the next one."""
        self.last[self.last > 0] = 0
        self.untouched = not holds_somewhere(self.last < 0)
        self.readers = self.updaters = self.loaders = None


_NO_CELLS = np.empty(0, np.int64)


def holds_somewhere(flags: np.ndarray) -> bool:
    """flags.any(), several times faster on short arrays."""
    return 1 in flags.tobytes()


def as_array(cells) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _distinct(values: np.ndarray) -> list[int]:
    """The different values, ascending."""
    first = values[0]
    return np.unique(values).tolist() if holds_somewhere(values != first) else [int(first)]


def _by_key(kind: str, keys: np.ndarray, cells: np.ndarray) -> list[Conflict]:
    """One conflict per earlier access."""
    first = int(keys[0])
    different = keys != first
    if not holds_somewhere(different):
        return [Conflict(kind, first >> 32, first & _TICK, cells)]
    return [
        Conflict(kind, key >> 32, key & _TICK, cells[keys == key])
        for key in np.unique(keys).tolist()
    ]
