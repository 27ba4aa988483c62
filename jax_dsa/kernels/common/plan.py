"""The plan of a CTA's dynamic shared memory: one list that both places and names its parts."""

import dataclasses

import cutlass
import cutlass.cute as cute

from jax_dsa.cubins import manifest

LIMIT = 232_448  # bytes of dynamic shared memory that a CTA may have on sm_90 and sm_100
ALIGNMENT = 1024  # of the whole: one 128-byte swizzle pattern


@dataclasses.dataclass(frozen=True)
class Part:
    """``count`` values of CuTeDSL type ``element``, at a multiple of ``align`` bytes."""

    name: str
    element: type
    count: int
    align: int = 16

    @property
    def bytes(self) -> int:
        return self.count * self.element.width // 8


class Plan:
    """Parts one after the other.

    Attributes:
      regions: the parts as the manifest names them; bytes: the total.
    """

    def __init__(self, *parts: Part):
        self.parts, self.regions, self.bytes = {p.name: p for p in parts}, (), 0
        for part in parts:
            start = -(-self.bytes // part.align) * part.align
            self.bytes = start + part.bytes
            self.regions += (manifest.Region(part.name, "shared", start, self.bytes),)
        assert self.bytes <= LIMIT, f"shared memory {self.bytes} > {LIMIT}:\n{self}"

    def __str__(self) -> str:
        return "\n".join(f"{r.start:>8} {r.stop - r.start:>8} {r.name}" for r in self.regions)

    def pointers(self) -> dict:
        """Name -> pointer to the part; called inside a kernel."""
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=ALIGNMENT)
        return {
            r.name: cute.recast_ptr(base + r.start, dtype=self.parts[r.name].element)
            for r in self.regions
        }
