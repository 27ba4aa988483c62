"""Tensor maps as data, under the field names of ``cuTensorMapEncodeTiled``, and the addresses of
their boxes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

ELEMENT_BYTES = {
    "UINT8": 1, "UINT16": 2, "UINT32": 4, "INT32": 4, "UINT64": 8, "INT64": 8,
    "FLOAT16": 2, "FLOAT32": 4, "FLOAT64": 8, "BFLOAT16": 2,
}  # fmt: skip
SWIZZLE_BITS = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The address of an array of the run, plus bytes."""

    array: str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What a kernel's tensor-map parameter describes.

    Attributes:
      tensorDataType: a key of ELEMENT_BYTES.
      globalAddress: where element 0 lies.
      globalDim: elements per dimension, innermost first.
      globalStrides: bytes, for dimensions 1 and up (one fewer than dimensions).
      boxDim: elements per dimension that one copy moves.
      elementStrides: 1 each; other strides are refused.
      interleave: "NONE".
      swizzle: "NONE", "32B", "64B" or "128B".
      oobFill: "NONE": elements outside read as 0.
    """

    tensorDataType: str
    globalAddress: Pointer
    globalDim: Sequence[int]
    globalStrides: Sequence[int]
    boxDim: Sequence[int]
    elementStrides: Sequence[int] = ()
    interleave: str = "NONE"
    swizzle: str = "NONE"
    oobFill: str = "NONE"

    @property
    def tensorRank(self) -> int:
        return len(self.globalDim)

    def problems(self) -> list[str]:
        """What is wrong with the map, in words; empty when nothing is."""
        rank, size = self.tensorRank, ELEMENT_BYTES.get(self.tensorDataType)
        found = []
        if size is None:
            return [f"tensorDataType {self.tensorDataType!r} is not one of {sorted(ELEMENT_BYTES)}"]
        if not 1 <= rank <= 5 or len(self.globalStrides) != rank - 1 or len(self.boxDim) != rank:
            found.append(f"rank {rank} wants {rank - 1} globalStrides and {rank} boxDim entries")
        if any(s % 16 for s in self.globalStrides):
            found.append(f"globalStrides {tuple(self.globalStrides)} must be multiples of 16 bytes")
        if any(not 1 <= b <= 256 for b in self.boxDim):
            found.append(f"boxDim {tuple(self.boxDim)} must lie in 1..256")
        if (
            self.interleave != "NONE"
            or self.oobFill != "NONE"
            or any(e != 1 for e in self.elementStrides)
        ):
            found.append("only interleave NONE, oobFill NONE and elementStrides 1 are supported")
        if self.swizzle not in SWIZZLE_BITS:
            found.append(f"swizzle {self.swizzle!r} is not one of {sorted(SWIZZLE_BITS)}")
        elif self.swizzle != "NONE" and self.boxDim[0] * size > 16 << SWIZZLE_BITS[self.swizzle]:
            found.append(
                f"boxDim[0] is {self.boxDim[0] * size} bytes, more than the {self.swizzle} span"
            )
        return found

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.tensorDataType]

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.boxDim)) * self.element_bytes

    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tile mode: byte offset of each box row (innermost dimension) and whether the row is
        inside.

        Rows come in the order in which they are stored; the innermost coordinate is not applied.
        """
        offsets, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for dim in range(1, self.tensorRank):
            index = coordinates[dim] + np.arange(self.boxDim[dim])
            ok = (index >= 0) & (index < self.globalDim[dim])
            offsets = (index[:, None] * self.globalStrides[dim - 1] + offsets).ravel()
            inside = (ok[:, None] & inside).ravel()
        return offsets, inside

    def gathered_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """gather4/scatter4 mode (rank 2, PTX ISA 5.5.4): the rows that four coordinates name."""
        return rows * self.globalStrides[0], (rows >= 0) & (rows < self.globalDim[1])

    def columns(self, start: int) -> tuple[int, int]:
        """How many elements of a box row starting at ``start`` lie before, and up to where inside
        the tensor.
        """
        low = min(max(-start, 0), self.boxDim[0])
        high = max(min(self.globalDim[0] - start, self.boxDim[0]), low)
        return low, high


def swizzle(address: np.ndarray, bits: int) -> np.ndarray:
    """XORs address bits 4.. with bits 7.. (``bits`` of them; PTX ISA 5.5.7) of absolute
    shared-memory addresses.
    """
    return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4)
