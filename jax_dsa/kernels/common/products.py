"""wgmma products of one warpgroup, M = 64, float32 sums, and its fragments' coordinates.

Accumulator (64 x N): thread t of the warpgroup (warp w = t // 32, lane l = t % 32) holds element i
of row 16 w + l // 4 + 8 (i // 2 % 2) and column 8 (i // 4) + 2 (l % 4) + i % 2. The A operand held
in registers has the same order, sixteen columns per instruction: element i is element i.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
STEP = 16  # of the summed dimension, per instruction


@dataclasses.dataclass(frozen=True)
class Product:
    """A kind of m64 x n x k16 products.

    Attributes:
      element: CuTeDSL type of both operands.
      n: columns of the accumulator that one instruction covers, a multiple of 8, at most 256.
      a, b: major modes; a_source: SHARED or REGISTERS (then ``a`` is K_MAJOR).
    """

    element: type
    n: int
    a: OperandMajorMode = K_MAJOR
    b: OperandMajorMode = K_MAJOR
    a_source: warpgroup.OperandSource = SHARED


def _mma(kind: Product):
    shape = (64, kind.n, STEP)
    modes = (kind.a_source, kind.a, kind.b)
    op = warpgroup.MmaF16BF16Op(kind.element, cutlass.Float32, shape, *modes)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def a_operand(kind: Product, tile):
    """(1, 1, k steps, ...): descriptors of an A operand (64, k, ...) in shared memory."""
    mma = _mma(kind)
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def b_operand(kind: Product, tile):
    """(1, n blocks, k steps, ...): descriptors of a B operand (n, k, ...) in shared memory."""
    mma = _mma(kind)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def accumulator(kind: Product, n: int):
    """A float32 fragment of 64 x n."""
    return cute.make_rmem_tensor(_mma(kind).partition_shape_C((64, n)), cutlass.Float32)


def a_registers(kind: Product, k: int):
    """An A operand of 64 x k in registers."""
    return cute.make_rmem_tensor(_mma(kind).partition_shape_A((64, k)), kind.element)


def issue(kind: Product, result, a, b, fresh: bool) -> None:
    """Issues result (+)= a b over all k steps; ``fresh``: the first overwrites the result.

    The caller puts ``fence()`` before a run of these, ``commit()`` after it, and leaves the
    fragments alone until ``wait()`` has covered that commit.
    """
    mma = _mma(kind)
    for step in range(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (fresh and step == 0))
        at = (None, None, step)
        cute.gemm(mma, result, a[at], b[at], result)


def fence() -> None:
    """Orders this warp's register accesses before the wgmma that follow."""
    warpgroup.fence()


def commit() -> None:
    """Closes the group of the wgmma issued since the last one."""
    warpgroup.commit_group()


def wait(pending: int = 0) -> None:
    """Waits until at most ``pending`` groups run; then the others' registers may be touched."""
    warpgroup.wait_group(pending)


def flat(fragment):
    """A fragment as a vector, in the order of the module's docstring."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
