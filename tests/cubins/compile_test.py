"""Tier ``aot``: the compiler itself, on the smallest kernels, without a GPU.

    JAX_DSA_AOT=1 pytest tests/cubins/compile_test.py

needs nvidia-cutlass-dsl. JAX_DSA_AOT_PYTHON names the interpreter that has it (default: the one
that runs the tests); that one needs no JAX.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import building
from absl.testing import absltest, parameterized

from jax_dsa.aot import builder
from jax_dsa.cubins import elf, registry, store

ENABLED = os.environ.get("JAX_DSA_AOT") == "1"
PYTHON = os.environ.get("JAX_DSA_AOT_PYTHON", sys.executable)
WORKER = (PYTHON, building.ALONE[1], "jax_dsa.aot.worker")
FACTS = {"value_dim": 512, "dtype": "float32"}


@unittest.skipUnless(ENABLED, "set JAX_DSA_AOT=1 where nvidia-cutlass-dsl is installed")
class CompileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        paths = os.pathsep.join(map(str, (building.REPOSITORY, building.HERE)))
        changes = mock.patch.dict(os.environ, {"PYTHONPATH": paths})
        self.enter_context(changes)

    def build(self, *modules: str, **changes) -> list[builder.Row]:
        settings = {"modules": modules, "worker": WORKER} | changes
        return list(builder.build(["sm_90a"], self.folder, **settings).rows)

    def test_compiled_kept_and_found(self):
        rows = self.build("tiny_kernels")
        self.assertEqual([row.built for row in rows], [True, True])
        self.assertEqual([row.built for row in self.build("tiny_kernels")], [False, False])
        found = registry.Registry([self.folder]).find(
            "sm_90a", "forward", {"head_dim": 576} | FACTS
        )
        entry = found.entry
        self.assertEqual(elf.read(found.cubin).kernels[entry.symbol].registers, entry.registers)
        self.assertEqual((entry.stack_frame, entry.dynamic_shared_bytes), (0, 1024))
        self.assertIn(f".entry {entry.symbol}(", store.Store(self.folder).ptx(entry))
        self.assertEqual(set(entry.tools), {"nvidia-cutlass-dsl", "cuda"})
        self.assertEqual(entry.module, "tiny_kernels")

    def test_the_same_bits_every_time(self):
        first = {row.entry.hashes["cubin"] for row in self.build("tiny_kernels")}
        again = {row.entry.hashes["cubin"] for row in self.build("tiny_kernels", force=True)}
        self.assertEqual(first, again)

    def test_optimisation_levels_differ_in_machine_code_only(self):
        hashes = [self.build("tiny_kernels", opt_level=level)[0].entry.hashes for level in (1, 3)]
        self.assertEqual(hashes[0]["ptx"], hashes[1]["ptx"])
        self.assertNotEqual(hashes[0]["cubin"], hashes[1]["cubin"])

    def test_a_spill_is_refused_unless_allowed(self):
        with self.assertRaises(builder.BuildError) as caught:
            self.build("tiny_spilled")
        text = str(caught.exception)
        self.assertIn("1 of 2 kernels failed", text)
        self.assertRegex(text, "head_dim=512.*\n  stack frame of 1[0-9]{3} bytes per thread")
        (entry,) = store.Store(self.folder).entries()[0]
        self.assertEqual(entry.facts["head_dim"], 576)
        self.assertGreaterEqual(entry.stack_frame or 0, 1200)

    def test_a_wrong_parameter_list_is_refused(self):
        with self.assertRaisesRegex(builder.BuildError, "lists 4 parameters, the .entry has 5"):
            self.build("tiny_wrong")

    def test_command(self):
        run = [PYTHON, building.ALONE[1], "jax_dsa.aot", "--out", str(self.folder)]
        run += ["--modules", "tiny_kernels"]
        done = subprocess.run(run, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 compiled, 0 up to date", done.stdout)
        listed = subprocess.run([*run, "--list"], capture_output=True, text=True).stdout
        self.assertEqual(listed.count("up to date"), 2)


if __name__ == "__main__":
    absltest.main()
