"""The memories: global, shared, parameters, tensor memory. Bytes and bounds only; who may touch
what is checked elsewhere.

A *cell* is the granule of race detection: two bytes of linear memory; 16 lanes of one column of
tensor memory (an
M = 64 accumulator occupies half of the lanes of its columns, so whole columns would give false
reports).
Unwritten bytes are 0xFF: NaN in every floating type.
"""

from __future__ import annotations

import bisect
import functools

import numpy as np

GLOBAL_BASE = 0x0001_0000_0000  # beyond 32 bits, so that truncated addresses are out of bounds
SHARED_WINDOW = 0x0200_0000_0000_0000  # generic addresses of shared memory
PARAM_WINDOW = 0x0300_0000_0000_0000  # generic addresses of parameters
SHARED_START = 1024  # the hardware keeps the first KiB of shared memory
SHARED_LIMIT = 232448  # bytes of shared memory that one CTA may use on SM90 and SM100
GUARD = 4096  # unmapped bytes between two global arrays
CELL = 2
POISON = 0xFF


class Linear:
    """Byte-addressed memory with a typed view per element size; ``space`` and ``name`` label
    reports.
    """

    def __init__(self, space: str, name: str, data: np.ndarray, base: int, size: int | None = None):
        """Args: ``data`` is a multiple of 16 bytes long; the first ``size`` of them (default: all)
        exist.
        """
        self.space, self.name, self.base = space, name, base
        self.size = data.size if size is None else size
        self.cells = -(-data.size // CELL)
        self.data = data
        self.first, self.limit = base, base + self.size  # addresses that exist
        self.views = {size: data.view(f"u{size}") for size in (1, 2, 4, 8)}
        self._typed: dict[tuple, np.ndarray] = {}
        self.initialised = False

    def typed(self, dtype: np.dtype) -> np.ndarray:
        """The memory as elements of ``dtype``."""
        return self.rows(dtype, 0)

    def rows(self, dtype: np.dtype, count: int) -> np.ndarray:
        """The memory as rows of ``count`` elements of ``dtype``; 0: as single elements."""
        found = self._typed.get((dtype, count))
        if found is None:
            size = dtype.itemsize * (count or 1)
            found = self.data[: self.data.size // size * size].view(dtype)
            found = self._typed[dtype, count] = found.reshape(-1, count) if count else found
        return found


def describe(space: str, name: str, cells: np.ndarray) -> str:
    """What ``cells`` (ascending) of a memory are, in words: bytes, or columns and lanes."""
    if space != "tensor":
        return f"{name} bytes {ranges(cells, CELL)}"
    groups, columns = (
        np.unique(cells // TensorMemory.COLUMNS),
        np.unique(cells % TensorMemory.COLUMNS),
    )
    return f"{name} columns {ranges(columns)}, lanes {ranges(groups, TensorMemory.GROUP)}"


def ranges(cells: np.ndarray, scale: int = 1) -> str:
    """``[a, b)`` intervals of sorted cell numbers, times ``scale``; at most six are spelled out."""
    breaks = np.flatnonzero(np.diff(cells) > 1)
    starts = cells[np.concatenate(([0], breaks + 1))] if cells.size else cells
    stops = cells[np.concatenate((breaks, [cells.size - 1]))] + 1 if cells.size else cells
    parts = [f"[{a * scale}, {b * scale})" for a, b in zip(starts[:6], stops[:6], strict=True)]
    return ", ".join(parts) + (f" and {len(starts) - 6} more" if len(starts) > 6 else "")


class SharedMemory(Linear):
    """One CTA's shared memory, static and dynamic."""

    def __init__(self, size: int, cta: str):
        data = np.full(-(-(SHARED_START + size) // 16) * 16, POISON, np.uint8)
        super().__init__("shared", f"shared memory of CTA {cta}", data, 0)
        self.first, self.limit = SHARED_START, SHARED_START + size

    def locate(self, low: int, high: int) -> SharedMemory | None:
        return self if self.first <= low and high <= self.limit else None


class GlobalMemory:
    """All arrays of a run, laid out in one heap with unmapped guards between them."""

    def __init__(self, arrays: dict[str, np.ndarray], outputs: frozenset[str]):
        """Args: arrays by name; ``outputs`` start as poison, and reading them before a write is
        reported.
        """
        sizes = [-(-max(a.nbytes, 1) // 256) * 256 + GUARD for a in arrays.values()]
        self.heap = np.full(sum(sizes) + GUARD, POISON, np.uint8)
        self.buffers: dict[str, Linear] = {}
        offset = GUARD
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            self.buffers[name] = self._place(name, array, offset, name not in outputs)
            offset += size
        ordered = list(self.buffers.values())
        self._starts = [b.base for b in ordered]
        self._ordered = ordered
        self.flags: dict = {}
        self.fenced = (
            False  # some thread has executed a memory fence: relaxed atomics may make edges
        )

    def _place(self, name: str, array: np.ndarray, offset: int, initialised: bool) -> Linear:
        window = self.heap[offset : offset + -(-max(array.nbytes, 1) // 16) * 16]
        if initialised:
            window[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = Linear(
            "global", f"global array {name!r}", window, GLOBAL_BASE + offset, array.nbytes
        )
        buffer.initialised = initialised
        return buffer

    def locate(self, low: int, high: int) -> Linear | None:
        """The array that holds bytes [low, high), or None."""
        i = bisect.bisect_right(self._starts, low) - 1
        if i < 0:
            return None
        buffer = self._ordered[i]
        return buffer if high <= buffer.base + buffer.size else None

    def nearest(self, address: int) -> str:
        """Words that say where an address lies."""
        i = max(bisect.bisect_right(self._starts, address) - 1, 0)
        if not self._ordered:
            return "no array is mapped"
        buffer = self._ordered[i]
        return (
            f"{address - buffer.base} bytes after the start of {buffer.name} ({buffer.size} bytes)"
        )


class TensorMemory:
    """128 lanes x 512 columns x 32 bit of one CTA, with the allocation of columns (PTX ISA
    9.7.16.1).
    """

    LANES, COLUMNS, GROUP = 128, 512, 16
    space = "tensor"

    def __init__(self, cta: str):
        self.name = f"tensor memory of CTA {cta}"
        self.words = np.full((self.LANES, self.COLUMNS), 0xFFFFFFFF, np.uint32)
        self.floats = self.words.view(np.float32)
        self.allocated = np.zeros(self.COLUMNS, bool)
        self.blocks: dict[int, int] = {}
        self.permit = True
        self.cells = self.LANES // self.GROUP * self.COLUMNS
        self.initialised = False

    def allocate(self, columns: int) -> int | None:
        """First aligned free range of ``columns``, or None; the base column."""
        for base in range(0, self.COLUMNS - columns + 1, columns):
            if not self.allocated[base : base + columns].any():
                self.allocated[base : base + columns] = True
                self.blocks[base] = columns
                return base
        return None

    def free(self, base: int) -> None:
        columns = self.blocks.pop(base)
        self.allocated[base : base + columns] = False

    @classmethod
    @functools.lru_cache(1024)  # noqa: B019  (of the class, not of an object)
    def cells_of(cls, lanes: range, column: int, columns: int) -> np.ndarray:
        """Cells of ``columns`` columns from ``column``, in the 16-lane groups of ``lanes``."""
        groups = np.arange(lanes.start // cls.GROUP, (lanes.stop - 1) // cls.GROUP + 1)
        return (groups[:, None] * cls.COLUMNS + np.arange(column, column + columns)).ravel()


def cells_of_bytes(offsets: np.ndarray, size: int) -> np.ndarray:
    """Cells touched by ``size`` bytes at each byte offset."""
    if size <= CELL:
        return offsets >> 1
    return ((offsets >> 1)[:, None] + np.arange(size >> 1)).ravel()
