"""Float32 functions of the softmax."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SMALLEST = 1.1754943508222875e-38  # normal float32


def _approximate(opcode: str, x):
    return cute.arch.inline_ptx(
        f"{opcode}.approx.ftz.f32 {{$w0}}, {{$r0}};", write_only_types=[Float32], read_only_args=[x]
    )


def exp2(x):
    """2 ** x, relative error 2**-22; -inf -> 0, +inf -> +inf, results below SMALLEST -> 0."""
    return _approximate("ex2", x)


def log2(x):
    """log2(x), absolute error 2**-22 for x in [1/2, 2], else relative 2**-22; 0 -> -inf."""
    return _approximate("lg2", x)


def reciprocal(x):
    """1 / x, relative error 2**-23; 0 -> inf, inf -> 0."""
    return _approximate("rcp", x)


def choose(condition, yes, no):
    """``yes`` where ``condition`` holds, else ``no``, both Float32, without a branch."""
    return Float32(cutlass.select_(condition, Float32(yes), Float32(no)))


def maximum(x, y):
    """The larger; a NaN loses against a number."""
    return cute.arch.fmax(x, y)


def minimum(x, y):
    """The smaller; a NaN loses against a number."""
    return cute.arch.fmin(x, y)


def over_quad(value, combine):
    """``value`` combined over the four lanes that share an accumulator row."""
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value
