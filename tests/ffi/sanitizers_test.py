"""The bridge's C++ unit tests, under the address and undefined-behaviour sanitizers."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

SOURCES = pathlib.Path(__file__).parents[2] / "csrc_bridge"
FLAGS = ("-std=c++17", "-O0", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@absltest.skipIf(COMPILER is None, "there is no C++ compiler")
class SanitizersTest(parameterized.TestCase):
    def test_unit_tests(self):
        headers = subprocess.run(
            [sys.executable, str(SOURCES / "headers.py")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.assertEqual(headers.returncode, 0, headers.stderr)
        folders = [f"-isystem{folder}" for folder in headers.stdout.splitlines()]
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "bridge_test")
            files = [*SOURCES.glob("*.cc"), *SOURCES.glob("tests/*.cc")]
            self.assertGreater(len(files), 5)
            command = [
                *str(COMPILER).split(), *FLAGS, "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all", *folders, *map(str, files), "-o", str(program),
                "-ldl", "-pthread",
            ]  # fmt: skip
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(built.returncode, 0, built.stderr)
            run = subprocess.run([program], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        found = re.search(r"^(\d+) passed, 0 failed$", run.stdout, re.MULTILINE)
        assert found, run.stdout
        self.assertGreater(int(found[1]), 50)


if __name__ == "__main__":
    absltest.main()
