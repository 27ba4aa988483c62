"""Register files: one array row of 32 lanes per PTX register, seen through typed views.

The instruction table works on typed vectors, PTX registers are bits. A *view* is a pair (register,
type); the
assembler numbers the views that a kernel uses, and a warp's ``RegisterFile`` makes each NumPy view
on first use.
Constants are views as well, shared by all warps, so that every source operand is read the same way.
"""

from __future__ import annotations

import numpy as np

LANES = 32
CONSTANTS = -1  # the last slot
BITS = {"pred": 8} | {f"{k}{n}": n for k in "busf" for n in (8, 16, 32, 64)}
DTYPES = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
} | {
    f"{k}{n}": np.dtype(f"{'i' if k == 's' else 'u'}{n // 8}")
    for k in "bus"
    for n in (8, 16, 32, 64)
}
PACKED = {"f32x2": np.float32, "f16x2": np.float16, "bf16x2": np.uint16}
_POISON = {np.dtype(np.bool_): True}


def dtype_of(type_: str) -> np.dtype:
    return np.dtype(DTYPES.get(type_) or PACKED[type_])


class Layout:
    """The registers and views of one kernel, numbered while it is assembled."""

    def __init__(self, declared: dict[str, str]):
        self.types = dict(declared)
        self.rows: dict[str, tuple[np.dtype, int]] = {}
        self.counts: dict[np.dtype, int] = {}
        self.views: list[tuple[int, int]] = []  # (slot, row) of each view
        self.slots: list[tuple[np.dtype, np.dtype, bool, int]] = []  # storage, type, packed, part
        self._slot_numbers: dict[tuple, int] = {}
        self.numbers: dict[tuple, int] = {}
        self.constants: list[np.ndarray] = []

    def view(self, register: str, type_: str, part: int | None = None) -> int:
        """Number of the view of ``register`` as ``type_``; ``part`` picks one of several smaller
        pieces.
        """
        key = (register, type_, part)
        if key not in self.numbers:
            self._row(register)
            storage, row = self.rows[register]
            slot = self._slot((storage, dtype_of(type_), type_ in PACKED, part or 0))
            self.numbers[key] = len(self.views)
            self.views.append((slot, row))
        return self.numbers[key]

    def _slot(self, key: tuple) -> int:
        """Number of a way to look at all registers of one width: all views of a slot differ by row
        only.
        """
        if key not in self._slot_numbers:
            self._slot_numbers[key] = len(self.slots)
            self.slots.append(key)
        return self._slot_numbers[key]

    def constant(self, value: np.generic) -> int:
        """Number of the view that reads as ``value`` in every lane."""
        key = ("constant", value.dtype, value.tobytes())
        if key not in self.numbers:
            self.numbers[key] = len(self.views)
            self.views.append((CONSTANTS, len(self.constants)))
            array = np.full(LANES, value)
            array.flags.writeable = False
            self.constants.append(array)
        return self.numbers[key]

    def constant_of(self, number: int) -> np.ndarray | None:
        """The 32 equal elements of a view that is a constant."""
        slot, row = self.views[number]
        return self.constants[row] if slot == CONSTANTS else None

    def places(self, *numbers: int) -> list[tuple[int, int]]:
        """(slot, row) of views."""
        return [self.views[n] for n in numbers]

    def _row(self, register: str) -> None:
        if register not in self.rows:
            bits = BITS[self.types[register]]
            storage = (
                np.dtype(np.bool_) if self.types[register] == "pred" else np.dtype(f"u{bits // 8}")
            )
            row = self.counts.get(storage, 0)
            self.rows[register] = (storage, row)
            self.counts[storage] = row + 1


class RegisterFile(dict):
    """View number -> array of 32 lanes ((32, 2) for packed types), for one warp."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout
        self.storage = {
            dtype: np.full(
                (count, LANES),
                _POISON.get(dtype, np.iinfo(dtype).max if dtype.kind == "u" else 0),
                dtype,
            )
            for dtype, count in layout.counts.items()
        }
        self.slots = [
            _look(self.storage[s], t, packed, part) for s, t, packed, part in layout.slots
        ]
        self.slots: list = [*self.slots, layout.constants]  # S[CONSTANTS]

    def __missing__(self, number: int) -> np.ndarray:
        slot, row = self.layout.views[number]
        view = self[number] = self.slots[slot][row]
        return view

    def release(self) -> None:
        """Gives the memory back; agents in reports keep their warp, not its registers."""
        self.clear()
        self.storage.clear()
        self.slots.clear()

    def set(self, register: str, values) -> None:
        """Writes a whole register (special registers at the start of a warp)."""
        storage, row = self.layout.rows[register]
        self.storage[storage][row] = values


def _look(storage: np.ndarray, dtype: np.dtype, packed: bool, part: int) -> np.ndarray:
    """All registers of one width as ``dtype``: [registers, 32], or [registers, 32, 2] for packed
    types.
    """
    typed = storage.view(dtype)
    if packed:
        return typed.reshape(len(storage), LANES, -1)
    return typed[:, part :: typed.shape[1] // LANES]
