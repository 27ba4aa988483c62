"""Instruction tests of value rows: every .ptx under instructions/ computes what its header says."""

import pathlib

import numpy as np
from absl.testing import absltest, parameterized

from jax_dsa.emulator import Launch, Pointer, Program, Settings, run

FILES = sorted(pathlib.Path(__file__).parent.joinpath("instructions").glob("*.ptx"))


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays that a file's ``//!`` lines give: inputs, then ``out`` with the expected words."""
    arrays = {}
    for line in path.read_text().splitlines():
        if line.startswith("//!"):
            _, name, kind, *words = line.split()
            arrays[name] = np.array([int(w, 16) for w in words], f"u{int(kind[1:]) // 8}")
    return arrays


class ValueInstructionsTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_matches_its_header(self, path):
        arrays = read(path)
        expected = arrays["out"]
        given = arrays | {"out": np.zeros_like(expected)}
        launch = Launch("test", (1, 1, 1), (len(expected), 1, 1), [Pointer(name) for name in given])
        results, report = run(
            Program(path.read_text()), launch, given, Settings(outputs=frozenset({"out"}))
        )
        self.assertTrue(report.clean, str(report))
        np.testing.assert_array_equal(results["out"], expected)

    def test_there_are_files(self):
        self.assertGreater(len(FILES), 150)


if __name__ == "__main__":
    absltest.main()
