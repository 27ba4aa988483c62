"""Reading cubins: architecture, registers, stack frame, and every way of being broken."""

import cubin_files
from absl.testing import absltest, parameterized

from jax_dsa.cubins import elf


class ReadTest(parameterized.TestCase):
    @parameterized.parameters(*cubin_files.FLAGS)
    def test_architecture(self, arch):
        found = elf.read(cubin_files.cubin(arch))
        self.assertEqual(found.arch, arch)
        served = [a for a in cubin_files.FLAGS if found.serves(a)]
        self.assertEqual(served, [arch])

    def test_family_cubins_read_as_the_plain_architecture(self):
        self.assertTrue(elf.read(cubin_files.cubin("sm_100")).serves("sm_100f"))
        self.assertFalse(elf.read(cubin_files.cubin("sm_100a")).serves("sm_100f"))

    def test_needs(self):
        found = elf.read(cubin_files.cubin(symbol="kernel_x", registers=168, frame=40))
        self.assertEqual(found.kernels, {"kernel_x": elf.Needs(168, 40)})

    def test_every_truncation_is_noticed(self):
        data = cubin_files.cubin()
        for size in range(len(data)):
            with self.subTest(size), self.assertRaises(elf.CubinError):
                elf.read(data[:size])

    @parameterized.parameters(
        (b"", "no ELF file: 0 bytes"),
        (b"version https://git-lfs" * 9, "no ELF file: 207 bytes"),
        (cubin_files.cubin(machine=62), "for machine 62, not for CUDA"),
        (cubin_files.cubin()[:-1], "truncated: [0-9]+ bytes of at least [0-9]+"),
        (cubin_files.cubin().replace(b".nv.info", b".nv.oofn"), "no kernel in it"),
    )
    def test_what_is_said(self, data, wanted):
        with self.assertRaisesRegex(elf.CubinError, wanted):
            elf.read(data)

    def test_flipped_bytes_never_raise_anything_else(self):
        data = cubin_files.cubin()
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 0xFF
            with self.subTest(at):
                try:
                    elf.read(bytes(changed))
                except elf.CubinError:
                    pass


if __name__ == "__main__":
    absltest.main()
