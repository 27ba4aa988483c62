"""The verify command, and the rule that the emulator stands alone."""

import ast
import contextlib
import io
import os
import pathlib
import sys
import tempfile
import unittest

from absl.testing import absltest

import jax_dsa.emulator
from jax_dsa import verify

PACKAGE = pathlib.Path(jax_dsa.emulator.__file__).parent
ALLOWED = ("jax_dsa.emulator", "jax_dsa.cubins.manifest", "jax_dsa.cubins", "numpy", "ml_dtypes")
OPTIONAL = {"picture.py": ("matplotlib",)}


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


class ImportsTest(absltest.TestCase):
    def test_the_emulator_imports_numpy_and_the_manifest_only(self):
        for path in sorted(PACKAGE.rglob("*.py")):
            extra = OPTIONAL.get(path.name, ())
            for name in imported(path):
                standard = name.split(".")[0] in sys.stdlib_module_names
                self.assertTrue(
                    standard or name.startswith(ALLOWED + extra), f"{path.name} imports {name}"
                )

    def test_files_and_functions_stay_small(self):
        lengths = []
        for path in sorted(PACKAGE.rglob("*.py")):
            text = path.read_text()
            self.assertLessEqual(text.count("\n"), 500, path.name)
            functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
            lengths += [(f.end_lineno or 0) - f.lineno + 1 for f in functions]
        self.assertLess(sorted(lengths)[len(lengths) // 2], 12)


class VerifyTest(absltest.TestCase):
    def run_verify(self, *arguments: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = verify.main(list(arguments))
        return code, out.getvalue() + err.getvalue()

    def test_what_cannot_run_says_so(self):
        code, text = self.run_verify("--control", "cudnn-1.27.0", "--op", "forward")
        self.assertEqual(code, 2)
        self.assertIn("--control cudnn-1.32.0", text)

    @unittest.skipUnless(os.environ.get("JAX_DSA_CONTROLS") == "1", "set JAX_DSA_CONTROLS=1")
    def test_the_published_race_gives_exit_code_1_and_a_report(self):
        with tempfile.TemporaryDirectory() as folder:
            packages = os.environ.get("JAX_DSA_CONTROLS_DIR", folder)
            python = os.environ.get("JAX_DSA_CONTROLS_PYTHON", sys.executable)
            report = pathlib.Path(folder) / "report"
            code, text = self.run_verify(
                *("--control", "cudnn-1.26.0", "--quick", "--folder", packages, "--python", python),
                *("--report", str(report)),
            )
            self.assertEqual(code, 1, text)
            self.assertIn("20 races", text)
            self.assertIn("dkv[384:512)", text)
            self.assertIn("tcgen05.wait::ld is missing", (report / "report.md").read_text())
            self.assertTrue((report / "timeline.json").stat().st_size > 10_000)


if __name__ == "__main__":
    absltest.main()
