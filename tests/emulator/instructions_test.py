"""Instruction tests: every .ptx under instructions/ computes what its header says, and together they
cover the instruction table.
"""

import instruction_files
import numpy as np
from absl.testing import absltest, parameterized

from jax_dsa.emulator import Launch, Program, Settings, run
from jax_dsa.emulator.isa import supported_forms


class InstructionsTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in instruction_files.PATHS)
    def test_matches_its_header(self, path):
        file = instruction_files.read(path)
        launch = Launch("test", (1, 1, 1), (file.threads, 1, 1), file.parameters)
        settings = Settings(observers=("races", "coverage"))
        program = Program(file.text)
        results, report = run(program, launch, file.given(), settings)
        self.assertTrue(report.clean, str(report))
        self.assertEqual(report.coverage["test"], (), "lines that never ran")
        for name in file.outputs:
            got, want = (
                instruction_files.canonical(a, file.types[name])
                for a in (results[name], file.arrays[name])
            )
            np.testing.assert_array_equal(got, want, name)

    def test_every_registered_form_has_a_file(self):
        tested = {f for path in instruction_files.PATHS for f in instruction_files.read(path).forms}
        self.assertEqual(sorted(set(supported_forms()) - tested), [])
        self.assertEqual(sorted(tested - set(supported_forms())), [])


if __name__ == "__main__":
    absltest.main()
