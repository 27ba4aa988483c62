"""The verify command, and the rule that the emulator stands alone."""

import ast
import contextlib
import io
import os
import pathlib
import sys
import unittest
from unittest import mock

from absl.testing import absltest, parameterized

import jax_dsa.emulator
from jax_dsa import verify
from jax_dsa.emulator import controls, mutation
from jax_dsa.emulator.controls import study
from jax_dsa.emulator.ptx.syntax import Instruction

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


class VerifyCase(parameterized.TestCase):
    def run_verify(self, *arguments: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = verify.main(list(arguments))
        return code, out.getvalue() + err.getvalue()


class VerifyTest(VerifyCase):
    def test_what_cannot_run_says_so(self):
        code, text = self.run_verify("--control", "cudnn-1.27.0", "--op", "forward")
        self.assertEqual(code, 2)
        self.assertIn("--control cudnn-1.32.0", text)

    @parameterized.parameters(("silent", 0), ("missed", 1))
    def test_a_missed_mutant_gives_exit_code_1(self, caught, code):
        """All else stands in: what counts is the way from an outcome to the exit code."""
        ins = Instruction("bar.sync", (), None, False, 7, 0, "bar.sync 0")
        outcome = mutation.Outcome(mutation.Mutant(ins, "delete"), caught, "no proof: because")
        with contextlib.ExitStack() as stack:
            for target, name, result in (
                (controls, "compile_peer", None),
                (study, "subject_of", None),
                (study.Study, "_schedule", None),
                (study.Study, "_delays", None),
                (study.mutants, "survey", [outcome]),
            ):
                stack.enter_context(mock.patch.object(target, name, return_value=result))
            found, text = self.run_verify("--control", "cudnn-1.27.0", "--mutate")
        self.assertEqual(found, code, text)
        self.assertEqual("missed delete: line 7 `bar.sync 0`" in text, bool(code))


@unittest.skipUnless(os.environ.get("JAX_DSA_CONTROLS") == "1", "set JAX_DSA_CONTROLS=1")
class ControlsTest(VerifyCase):
    """Tier ``controls``: the command from end to end; see controls_test.py."""

    def verify_control(self, control: str, *arguments: str) -> tuple[int, str, pathlib.Path]:
        """(exit code, output, folder of the report)."""
        folder = os.environ.get("JAX_DSA_CONTROLS_DIR") or self.create_tempdir().full_path
        python = os.environ.get("JAX_DSA_CONTROLS_PYTHON", sys.executable)
        name = "".join((control, *arguments))
        report = pathlib.Path(folder) / "reports" / name
        where = ("--folder", folder, "--python", python, "--report", str(report))
        return *self.run_verify("--control", control, *arguments, *where), report

    def test_the_published_race_gives_exit_code_1_and_a_report(self):
        code, text, report = self.verify_control("cudnn-1.26.0", "--quick")
        self.assertEqual(code, 1, text)
        self.assertIn("20 races", text)
        self.assertIn("dkv[384:512)", text)
        self.assertIn("tcgen05.wait::ld is missing", (report / "report.md").read_text())
        self.assertTrue((report / "timeline.json").stat().st_size > 10_000)

    @parameterized.parameters(
        ("cudnn-1.27.0", "--head-dim=576"),
        ("cudnn-1.27.0", "--head-dim=512"),
        ("cudnn-1.32.0", "--head-dim=512", "--quick"),
        ("cudnn-1.32.0", "--op=forward", "--quick"),
    )
    def test_a_clean_control_gives_exit_code_0(self, *arguments):
        """Without --quick every load of tensor memory and every drain is held, for a while and for
        as long as anybody else can move.
        """
        code, text, report = self.verify_control(*arguments)
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"delays \| clean \| \d+ sites x 2 delays; all harmless")
        written = (report / "report.md").read_text()
        matrix = written[written.index("## Delays") :]
        sites = int(text.split(" sites x 2 delays")[0].split()[-1])
        self.assertGreater(sites, 3)
        self.assertEqual(matrix.count("| until nobody else can move |"), sites)
        self.assertNotIn("| no: ", matrix)

    def test_no_mutant_of_a_clean_control_is_missed(self):
        code, text, report = self.verify_control("cudnn-1.27.0", "--mutate", "--quick")
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"mutants \| clean \| 2\d\d mutants: .* race, .* silent")
        written = (report / "report.md").read_text()
        self.assertNotIn("| missed |", written)
        self.assertNotIn("no proof", written)
        self.assertRegex(written, r"edge implied by line \d+ -> line \d+")


if __name__ == "__main__":
    absltest.main()
