"""Adding accumulators to rows of a float32 array in global memory, in whole 128-byte lines.

A lane of a 64 x 64 accumulator holds two adjacent columns of eight groups of eight columns (module
``products``); added like that, pieces of 32 bytes would travel. Two exchanges make each warp-level
``red.v4`` cover four rows of 128 bytes: bits of the column that say which element of the lane it is
change places with bits that say which lane. Column = 32 a + 16 b + 8 c + 4 d + 2 e + f:

    before        element (a, b, c, i, f), lane (rrr, d e)     row 16 w + r + 8 i
    lane bit 0    element (a, b, e, i, f), lane (rrr, d c)     the same
    lane bit 2    element (a, s, e, i, f), lane (rrr, d c)     row of s = 0: r, of s = 1: r ^ 1;
                                                               b = bit 0 of r
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector

from jax_dsa.kernels.common.numbers import choose

PANEL = 64  # columns of an accumulator


class Rows:
    """The four rows of a tile to which one lane adds, and where its part of a line lies.

    Args:
      base: pointer to row 0 of the array, float32; columns: of the array.
      numbers: (64,) Int32 in shared memory, the rows of the tile in the array, negative: none.
      warp: of the warpgroup; lane: of the warp.
    """

    def __init__(self, base, columns: int, numbers, warp, lane):
        own = warp * 16 + lane // 4
        part = (lane // 4 % 2) * 16 + (lane % 2) * 8 + (lane // 2 % 2) * 4
        self.targets = []  # (pointer, number) of (i, s) = own row, neighbour's; both again, 8 below
        for down in (0, 8):
            for row in (own, own ^ 1):
                number = numbers[row + down]
                # Int64: the array may have more than 2**31 elements.
                self.targets.append((base + (Int64(number) * columns + part), number))


def _swap(first, second, bit, distance: int):
    """(kept, received): lanes with ``bit`` keep ``second`` and give ``first``, the others keep
    ``first`` and give ``second``, to the lane at ``distance``.
    """
    given = choose(bit, first, second)
    return choose(bit, second, first), cute.arch.shuffle_sync_bfly(given, distance)


def _quads(values, a: int, b: int, i: int, odd) -> list:
    """Four adjacent columns of row i from the lane pair: the exchange of lane bit 0."""
    at = 16 * a + 8 * b + 2 * i
    pairs = [_swap(values[at + f], values[at + 4 + f], odd, 1) for f in (0, 1)]
    low = [choose(odd, received, kept) for kept, received in pairs]
    return low + [choose(odd, kept, received) for kept, received in pairs]


def add(values, rows: Rows, panel: int, lane) -> None:
    """Adds a 64 x 64 accumulator to columns ``64 panel ...`` of the rows that exist.

    Args:
      values: the accumulator's 32 elements of this lane.
      rows: see ``Rows``; every lane of the warp calls this together.
    """
    odd, high = lane % 2 == 1, lane // 4 % 2 == 1
    for a in (0, 1):
        for i in (0, 1):
            left, right = (_quads(values, a, b, i, odd) for b in (0, 1))
            swapped = [_swap(left[n], right[n], high, 4) for n in range(4)]
            for s in (0, 1):
                pointer, number = rows.targets[2 * i + s]
                _add_quad(pointer + (PANEL * panel + 32 * a), number, [x[s] for x in swapped])


@cute.jit
def _add_quad(pointer, number, quad: cutlass.Constexpr):
    if number >= 0:
        kind = ir.VectorType.get([4], Float32.mlir_type)
        packed = vector.from_elements(kind, [x.ir_value() for x in quad])
        cute.arch.red(pointer, packed, op="add", dtype="f32", sem="relaxed", scope="gpu")
