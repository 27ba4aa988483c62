"""compute-sanitizer on small problems: no error of memcheck or racecheck."""

import os
import shutil
import subprocess
import sys

import pytest
from absl.testing import absltest, parameterized

PROGRAM = """
import cases, jax
from suites_gpu_test import CutedslTest
test = CutedslTest()
for width in (512, 576):
    for dtype in ("bfloat16", "float16"):
        case = cases.Case("small", queries=2, keys=70, heads=70, head_dim=width, topk=130,
                          lengths=(130, 65), sink=cases.SINKS)
        test.run_and_check(test.inputs(case, dtype))
print("checked")
"""


class SanitizerTest(parameterized.TestCase):
    def test_no_error(self):
        self.check("memcheck")

    @pytest.mark.xfail(
        strict=True,
        reason="racecheck sees no order in mbarrier phases that copies complete: RESULTS.md",
    )
    def test_no_hazard(self):
        self.check("racecheck")

    def check(self, tool: str):
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        environment = dict(os.environ, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        environment["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer="
        run = subprocess.run(
            [
                sanitizer, f"--tool={tool}", "--error-exitcode=9", "--kernel-name",
                "kernel_substring=jax_dsa", sys.executable, "-c", PROGRAM,
            ],
            capture_output=True, text=True, env=environment, timeout=500,
        )  # fmt: skip
        text = run.stdout + run.stderr
        self.assertEqual(run.returncode, 0, text[-3000:])
        self.assertIn("checked", text)
        self.assertRegex(text, "ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")


if __name__ == "__main__":
    absltest.main()
