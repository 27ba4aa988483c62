"""Tiles of 64 rows in shared memory, as wgmma reads them, and the gather that fills them.

A tile of 64 rows x C columns of 16-bit numbers is a sequence of panels of 64 columns. A panel is 64
lines of 128 bytes, line = row; within a line the 16-byte chunk c lies at position c ^ (row % 8).
That is the 128-byte swizzle of the PTX ISA. The same bytes serve as a K-major operand (rows are M
or N, columns are summed over) and as an MN-major operand (columns are M or N, rows summed over).
"""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm

ROWS = 64
PANEL = 64  # columns
LINE_BYTES = 128
CHUNK_BYTES = 16
PANEL_ELEMENTS = ROWS * PANEL
ROWS_PER_WARP = 16
PASSES = 4  # a warp copies four lines at once: eight lanes a line


def _swizzled(pointer):
    return cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3))


def by_rows(pointer, columns: int, stages: int = 1, stage_elements: int = 0):
    """(64 rows, columns, stages): rows are M or N, columns the summed dimension (K-major)."""
    shape = ((8, 8), (PANEL, columns // PANEL), stages)
    stride = ((PANEL, 8 * PANEL), (1, PANEL_ELEMENTS), stage_elements)
    return cute.make_tensor(_swizzled(pointer), cute.make_layout(shape, stride=stride))


def by_columns(pointer, columns: int, stages: int = 1, stage_elements: int = 0):
    """(columns, 64 rows, stages): columns are M or N, rows the summed dimension (MN-major)."""
    shape = ((PANEL, columns // PANEL), (8, 8), stages)
    stride = ((1, PANEL_ELEMENTS), (PANEL, 8 * PANEL), stage_elements)
    return cute.make_tensor(_swizzled(pointer), cute.make_layout(shape, stride=stride))


def own_slot(warp, lane):
    """The row of the tile whose source lane ``lane`` of copying warp ``warp`` (0..3) must know:
    16 warp + lane for lanes 0..15; lanes 16..31 repeat them.
    """
    return warp * ROWS_PER_WARP + lane % ROWS_PER_WARP


def copy_rows(tile, base, row, valid, columns: int, warp, lane) -> None:
    """Starts the copies of one warp's 16 of a tile's 64 rows, 16 bytes each; no copy is awaited.

    Lane l moves chunk l % 8 of rows 16 w + 4 p + l // 8 in pass p = 0..3. Odd passes differ from
    even ones by bit 2 of row % 8, hence by bit 6 of the swizzled address; all else is a constant.

    Args:
      tile: pointer to the tile in shared memory.
      base: pointer to row 0 in global memory, rows ``columns`` elements apart.
      row: Int32 of lanes 0..15, the row of ``base`` for ``own_slot``; anything if not valid.
      valid: Boolean of lanes 0..15; False fills the row with zeros and reads nothing.
    """
    line, chunk = lane // 8, lane % 8
    even = warp * (ROWS_PER_WARP * PANEL) + line * PANEL + (chunk ^ line) * 8
    bytes_ = cutlass.Int32(valid) * CHUNK_BYTES
    safe = row * cutlass.Int32(valid)
    for step in range(PASSES):
        source = step * 4 + line
        size = cute.arch.shuffle_sync(bytes_, source)
        offset = cutlass.Int64(cute.arch.shuffle_sync(safe, source)) * columns + chunk * 8
        start = tile + (even if step % 2 == 0 else even ^ 32) + step * 4 * PANEL
        for panel in range(columns // PANEL):
            _copy_chunk(start + panel * PANEL_ELEMENTS, base + offset + panel * PANEL, size)


def _copy_chunk(target, source, size) -> None:
    """cp.async of 16 bytes, of which ``size`` (16 or 0) are read and the rest are zeros."""
    nvvm.cp_async_shared_global(
        target.to_llvm_ptr(),
        source.to_llvm_ptr(),
        CHUNK_BYTES,
        nvvm.LoadCacheModifierKind.CG,
        cp_size=size.ir_value(),
    )
