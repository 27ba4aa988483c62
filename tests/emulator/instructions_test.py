"""Instruction tests: every .ptx under instructions/ computes what its header says, and together
they cover the instruction table.
"""

import instruction_files
from absl.testing import absltest, parameterized

from jax_dsa.emulator import Launch, Program, Settings, run
from jax_dsa.emulator.isa import supported_forms

OPCODES = sorted({path.name.split(".")[0] for path in instruction_files.PATHS})


class InstructionsTest(parameterized.TestCase):
    @parameterized.parameters(*OPCODES)
    def test_files_compute_what_their_headers_say(self, opcode):
        for path in instruction_files.PATHS:
            if path.name.split(".")[0] == opcode:
                with self.subTest(path.stem):
                    self.check(instruction_files.read(path))

    def check(self, file: instruction_files.File):
        launch = Launch("test", (1, 1, 1), (file.threads, 1, 1), file.parameters)
        settings = Settings(observers=("races", "coverage"))
        results, report = run(Program(file.text), launch, file.given(), settings)
        self.assertTrue(report.clean, str(report))
        self.assertEqual(report.coverage["test"], (), "lines that never ran")
        file.check(results)

    def test_every_registered_form_has_a_file(self):
        tested = {f for path in instruction_files.PATHS for f in instruction_files.read(path).forms}
        self.assertEqual(sorted(set(supported_forms()) - tested), [])
        self.assertEqual(sorted(tested - set(supported_forms())), [])

    @parameterized.parameters(
        "ld.shared.v8.b32", "ld.global.v8.b16", "ld.global.nc.cv.b32", "st.global.ca.b32",
        "red.acquire.gpu.global.add.u32", "red.exch.b32", "atom.global.add.v2.f16",
        "atom.shared.add.v2.f32", "cvt.rni.ftz.s32.f64", "prefetchu.tensormap",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32",
    )  # fmt: skip
    def test_forms_that_the_isa_lacks_are_not_registered(self, form):
        self.assertNotIn(form, supported_forms())


if __name__ == "__main__":
    absltest.main()
