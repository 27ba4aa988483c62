"""The manifest's schema: formulas, what makes an entry unlaunchable, JSON."""

import dataclasses

from absl.testing import absltest, parameterized

from jax_dsa.cubins import manifest

SIZES = {"G": 3, "S": 5, "T": 1 << 33, "K": 7, "H": 65, "D": 576}
KERNEL = manifest.Kernel(
    "k", "sm_90a", "backward",
    [
        manifest.Parameter("q", "pointer"),
        manifest.Parameter("dkv", "pointer"),
        manifest.Parameter("S", "scalar", "i32"),
        manifest.Parameter("scale", "scalar", "f32"),
    ],
    (128, 1, 1), ("G*S", "ceil(H/64)", "1"), zeroed=("dkv",),
    allowed_spills=(manifest.Spill("epilogue", 8, "outside the tile loop"),),
    workspaces={"partial": "4*T*D"}, module="somewhere.forward",
)  # fmt: skip


class FormulaTest(parameterized.TestCase):
    @parameterized.parameters(
        ("1", 1), ("12", 12), ("G*S", 15), ("ceil(H/64)", 2), ("ceil(H/65)", 1), ("K", 7),
        ("4 * T * D", 4 * (1 << 33) * 576), ("2*ceil(K/2)*G", 24),
    )  # fmt: skip
    def test_value(self, formula, wanted):
        self.assertEqual(manifest.evaluate(formula, SIZES), wanted)

    @parameterized.parameters(
        "", "0", "-1", "G+S", "G**S", "X", "ceil(H/0)", "ceil(64/H)", "ceil(H)", "H/64", "G*",
        "__import__('os')", "1.5", "GS", "sink_stride",
    )  # fmt: skip
    def test_everything_else_is_refused(self, formula):
        with self.assertRaisesRegex(manifest.ManifestError, "formula .*: factor .* is none of"):
            manifest.evaluate(formula, SIZES)


class ProblemsTest(parameterized.TestCase):
    def test_none(self):
        self.assertEqual(KERNEL.problems(), [])

    @parameterized.parameters(
        ({"grid": ("G*S", "H/64", "1")}, "y: formula 'H/64'"),
        ({"workspaces": {"partial": "T+1"}}, "partial: formula"),
        ({"zeroed": ("dv",)}, "zeroed 'dv' is no pointer parameter"),
        ({"zeroed": ("S",)}, "zeroed 'S' is no pointer parameter"),
        ({"parameters": (manifest.Parameter("stride", "scalar", "i32"),)}, "no launcher knows"),
        ({"parameters": (manifest.Parameter("S", "scalar", "i16"),)}, "type 'i16' is not one of"),
    )
    def test_one_each(self, change, wanted):
        zeroed = {"zeroed": ()} if "parameters" in change else {}
        (problem,) = dataclasses.replace(KERNEL, **zeroed | change).problems()
        self.assertIn(wanted, problem)


class JsonTest(parameterized.TestCase):
    def test_round_trip(self):
        (back,) = manifest.Manifest.from_json(manifest.Manifest([KERNEL]).to_json()).kernels
        self.assertEqual(back, dataclasses.replace(KERNEL, parameters=tuple(KERNEL.parameters)))

    @parameterized.parameters(
        ('"grid"', '"gird"', "grid"),
        ('"version": 1', '"version": 2', "version 2, wanted 1: rebuild the cubins"),
        ('"reason"', '"because"', "because"),
    )
    def test_what_does_not_fit_is_refused(self, old, new, wanted):
        text = manifest.Manifest([KERNEL]).to_json()
        self.assertIn(old, text)
        with self.assertRaisesRegex(manifest.ManifestError, wanted):
            manifest.Manifest.from_json(text.replace(old, new))


if __name__ == "__main__":
    absltest.main()
