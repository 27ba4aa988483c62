"""What a compiled kernel is refused for; each test names one reason and nothing else is wrong."""

import dataclasses

import cubin_files
from absl.testing import absltest, parameterized

from jax_dsa.aot import checks
from jax_dsa.cubins import manifest

SPILL = manifest.Spill("epilogue addresses", 8, "read once per row, outside the tile loop")
LOG = """
remark[ptxas info]: ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""
# As CuTeDSL passes it on where ptxas spilled: coloured, indented, wrapped.
WRAPPED = """\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
          ptxas output:
          ptxas info    : (C7519) warpgroup.arrive is injected in around line 701 by compiler to
          allow use of registers in GMMA in function
          'k'
          ptxas info    : (C7519) warpgroup.arrive is injected in around line 712 by compiler to
          allow use of registers in GMMA in function
          'k'
          ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are
          serialized due to insufficient register resources for the wgmma pipeline in the function
          'k' in line 28
          ptxas         .     8 bytes stack frame, 0 bytes spill stores, 124 bytes spill
          loads
          ptxas info    : Used 32
          registers, used 1 barriers
"""


def complete(entry=None, log=LOG, cubin=None, ptx=None):
    return checks.complete(
        entry or cubin_files.entry(), cubin or cubin_files.cubin(), ptx or cubin_files.ptx(), log
    )


class CompleteTest(parameterized.TestCase):
    def test_takes_symbol_registers_and_frame_from_the_cubin(self):
        found = complete()
        self.assertEqual((found.symbol, found.registers, found.stack_frame), ("k", 32, 0))
        self.assertEqual(found.minimum_driver, "525.60.13")
        self.assertEqual(found.messages, ())
        self.assertEqual(found.parameters, cubin_files.PARAMETERS)

    def refused(self, wanted: str, **what):
        with self.assertRaises(checks.Refused) as caught:
            complete(**what)
        (reason,) = str(caught.exception).splitlines()
        self.assertRegex(reason, wanted)

    @parameterized.parameters(
        ({"parameters": cubin_files.PARAMETERS[:3]}, "lists 3 parameters, the .entry has 4"),
        ({"parameters": (*cubin_files.PARAMETERS[:3], cubin_files.PARAMETERS[0])},
         r"parameter 3 \('q'\) has 8 bytes in the manifest, 4 in the .entry"),
        ({"block": (256, 1, 1)}, r"block is \(128, 1, 1\) in the PTX, \(256, 1, 1\) in the"),
        ({"grid": ("S/2", "1", "1")}, "x: formula 'S/2'"),
        ({"zeroed": ("dkv",)}, "zeroed 'dkv' is no pointer"),
        ({"dynamic_shared_bytes": 232_449}, "232449 bytes of shared memory; 232448 fit"),
    )  # fmt: skip
    def test_entry_that_does_not_fit(self, changes, wanted):
        self.refused(wanted, entry=cubin_files.entry(**changes))

    def test_foreign_architecture(self):
        self.refused("compiled for sm_80, wanted sm_90a", cubin=cubin_files.cubin("sm_80"))
        self.refused("the PTX is for sm_90, wanted sm_90a", ptx=cubin_files.ptx("sm_90"))

    def test_broken_files(self):
        self.refused("the cubin is truncated", cubin=cubin_files.cubin()[:-9])
        self.refused("kernel k of the PTX is not in the cubin", cubin=cubin_files.cubin(symbol="j"))
        self.refused("the PTX has 0 kernels", ptx=".version 8.8\n")
        self.refused("the PTX has 2 kernels", ptx=cubin_files.ptx() + cubin_files.ptx(symbol="j"))

    def test_tensor_map_parameter(self):
        parameters = (manifest.Parameter("kv", "tensor_map"), *cubin_files.PARAMETERS)
        found = checks.read_entry(cubin_files.ptx(parameters=parameters))
        self.assertEqual(found.sizes, (128, 8, 8, 4, 4))

    def test_cluster(self):
        text = cubin_files.ptx().replace("{", ".explicitcluster\n.reqnctapercluster 2, 1, 1\n{")
        self.refused(r"cluster is \(2, 1, 1\) in the PTX", ptx=text)
        complete(cubin_files.entry(cluster=(2, 1, 1)), ptx=text)


class SpillTest(parameterized.TestCase):
    log = LOG.replace("0 bytes stack frame", "8 bytes stack frame")

    def spilled(self, *allowed):
        entry = cubin_files.entry(allowed_spills=allowed)
        return complete(entry, self.log, cubin_files.cubin(frame=8))

    def test_refused(self):
        with self.assertRaisesRegex(checks.Refused, "stack frame of 8 bytes.*: none"):
            self.spilled()

    def test_allowed_by_name_bytes_and_reason(self):
        self.assertEqual(self.spilled(SPILL).stack_frame, 8)

    @parameterized.parameters(
        ({"bytes": 7}, "stack frame of 8 bytes per thread.*epilogue addresses 7"),
        ({"name": ""}, "needs a name"),
        ({"reason": ""}, "and a reason"),
    )
    def test_allowance_that_does_not_do(self, change, wanted):
        with self.assertRaisesRegex(checks.Refused, wanted):
            self.spilled(dataclasses.replace(SPILL, **change))


class LogTest(parameterized.TestCase):
    def test_wrapped_messages_are_put_together(self):
        self.assertEqual(checks.messages(WRAPPED), (
            "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due"
            " to insufficient register resources for the wgmma pipeline",
            "(C7519) warpgroup.arrive is injected by compiler to allow use of registers in GMMA",
        ))  # fmt: skip

    def test_wrapped_log_is_read_whole(self):
        with self.assertRaises(checks.Refused) as caught:
            complete(log=WRAPPED)
        reasons = str(caught.exception).splitlines()
        self.assertIn("ptxas says [8] bytes of stack frame, the cubin 0", reasons)
        self.assertIn("ptxas says 124 bytes are spilled, the cubin has no stack frame", reasons)
        self.assertLen([r for r in reasons if "serialized" in r], 1)
        self.assertLen(reasons, 3)

    @parameterized.parameters(
        "ptxas info : (C7510) Potential Performance Loss: x in the function 'k'",
        "ptxas warning : (C7514) Potential Performance Loss: y in function 'k'",
        "ptxas info : (C7519) z instructions are serialized due to w in line 3",
    )
    def test_serialised_wgmma_is_refused(self, line):
        with self.assertRaisesRegex(checks.Refused, "ptxas: .C75"):
            complete(log=LOG + line)

    def test_other_messages_are_kept(self):
        line = "ptxas info : (C7517) warpgroup.wait is injected in around line 9 in function 'k'\n"
        log = LOG.replace("ptxas output: ", "ptxas output: " + line)
        self.assertEqual(complete(log=log).messages, ("(C7517) warpgroup.wait is injected",))

    def test_registers_must_agree(self):
        with self.assertRaisesRegex(checks.Refused, r"ptxas says \[32\] registers, the cubin 40"):
            complete(cubin=cubin_files.cubin(registers=40))


if __name__ == "__main__":
    absltest.main()
