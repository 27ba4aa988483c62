"""Instruction tests of wgmma, exact: every N, major, swizzle, base offset, scale, source of A."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES
from wgmma_kernels import SWIZZLES, multiply

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def operands(n: int, depth: int = 32, kind: str = "bf16"):
    """Integers whose products and sums are exact in float32."""
    rng = np.random.default_rng(n)
    return (rng.integers(-8, 9, (rows, depth)).astype(TYPES[kind]) for rows in (64, n))


class WgmmaTest(parameterized.TestCase):
    def check(self, n, kind="bf16", depth=32, factor=1.0, schedule="turn", **options):
        a, b = operands(n, depth, kind)
        d, report = multiply(a, b, kind, SCHEDULES[schedule], **options)
        self.assertTrue(report.clean, report)
        self.assertEqual(report.lints, (), report)
        expected = factor * (a.astype(np.float32) @ b.astype(np.float32).T)
        np.testing.assert_array_equal(d, expected)

    @parameterized.product(n=tuple(range(8, 257, 8)), registers=(False, True))
    def test_every_n(self, n, registers):
        self.check(n, registers=registers)

    @parameterized.product(
        a_mn=(False, True), b_mn=(False, True), swizzle=tuple(SWIZZLES), n=(24, 128)
    )
    def test_layouts(self, a_mn, b_mn, swizzle, n):
        self.check(n, depth=64, majors=(a_mn, b_mn), swizzles=(swizzle, swizzle))

    @parameterized.product(b_mn=(False, True), swizzle=tuple(SWIZZLES))
    def test_layouts_of_b_with_a_in_registers(self, b_mn, swizzle):
        self.check(72, majors=(False, b_mn), swizzles=("none", swizzle), registers=True)

    @parameterized.product(
        shift=tuple(range(8)), mn=(False, True), swizzle=("32B", "64B", "128B"), n=(64,)
    )
    def test_base_offset(self, shift, mn, swizzle, n):
        """The pattern starts ``shift`` rows of 128 bytes off its alignment."""
        options = {"majors": (mn, mn), "swizzles": (swizzle, swizzle)}
        self.check(n, shifts=(shift, (3 * shift) % 8), **options)  # pyright: ignore

    @parameterized.product(
        kind=tuple(TYPES), scales=((1, 1), (-1, 1), (1, -1), (-1, -1)), registers=(False, True)
    )
    def test_types_and_scales(self, kind, scales, registers):
        factor = float(scales[0] * scales[1])
        self.check(16, kind, factor=factor, scales=scales, registers=registers)

    @parameterized.parameters(*SCHEDULES)
    def test_schedules(self, schedule):
        self.check(40, schedule=schedule, majors=(True, False))


if __name__ == "__main__":
    absltest.main()
