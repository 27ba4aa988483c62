"""The command lines: what doctor says, what bench measures."""

import contextlib
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from jax_dsa import bench, dispatch, doctor
from jax_dsa.bench import __main__ as bench_command
from jax_dsa.cubins import manifest, registry
from jax_dsa.ffi import driver


def run(main, *argv: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(list(argv))
    return code, printed.getvalue()


class DoctorTest(parameterized.TestCase):
    def test_says_what_runs_and_why_not_the_others(self):
        code, text = run(doctor.main, "--heads", "16", "--head-dim", "576", "--topk", "64")
        self.assertEqual(code, 0)
        self.assertRegex(text, r"jax_dsa \d")
        self.assertIn("cpu:0", text)
        self.assertRegex(text, r"bridge: .*libjax_dsa_bridge.so, XLA FFI 0\.\d")
        self.assertRegex(text, r"driver: (none: .*driver cannot be opened|\d{3}\.)")
        self.assertIn("H=16 D=576 value_dim=512 K=64 bfloat16", text)
        self.assertRegex(text, r"xla +runs")
        self.assertRegex(text, r"cutedsl +no: ")

    def test_json_is_the_report(self):
        code, text = run(doctor.main, "--dtype", "float32", "--json")
        found = json.loads(text)
        self.assertEqual((code, found["chosen"]), (0, "xla"))
        self.assertEqual(set(found["reasons"]), set(dispatch.NAMES))
        self.assertIsNone(found["reasons"]["xla"])
        self.assertIn("float32", found["problem"])

    def test_a_missing_package_names_its_extra(self):
        with mock.patch.object(doctor, "_version", return_value=None):
            _, text = run(doctor.main)
        self.assertIn("optax absent: pip install 'jax_dsa[examples]'", text)

    @parameterized.parameters(("570.26", False), ("525.60.13", True))
    def test_lists_the_kernels_with_minimum_and_present_driver(self, release: str, old: bool):
        entry = manifest.Kernel(
            "k", "sm_90a", "forward", (), (1, 1, 1), facts={"head_dim": 576},
            minimum_driver="530.30",
        )  # fmt: skip
        found = registry.Found(entry, b"12345", pathlib.Path("folder"))
        present = driver.Driver("12.4", release, ("9.0",), "a test")
        with (
            mock.patch.object(registry, "archs", lambda: ("sm_90a",)),
            mock.patch.object(registry, "entries", lambda arch, build: (found,)),
            mock.patch.object(registry, "reason", lambda *_: "none of these facts"),
            mock.patch.object(driver, "query", lambda: present),
        ):
            _, text = run(doctor.main)
        self.assertIn(f"driver: {release}, serves CUDA 12.4, compute capability 9.0", text)
        self.assertIn("sm_90a forward  head_dim=576: 5 bytes in folder, driver 530.30 or", text)
        self.assertEqual("TOO OLD" in text, old)

    def test_without_a_backend_nothing_is_usable(self):
        failure = RuntimeError("no such platform")
        with mock.patch.object(doctor.jax, "local_devices", side_effect=failure):
            code, text = run(doctor.main)
        self.assertEqual(code, 1)
        self.assertIn("no such platform", text)

    def test_a_problem_that_nothing_serves(self):
        with mock.patch.object(dispatch, "unusable", return_value="out of order"):
            code, text = run(doctor.main)
        self.assertEqual(code, 1)
        self.assertRegex(text, "xla +no: out of order")

    def test_a_problem_that_does_not_exist_is_a_usage_error(self):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as exit_:
            doctor.main(["--head-dim", "64", "--value-dim", "65"])
        self.assertEqual(exit_.exception.code, 2)
        self.assertIn("value_dim: got 65", errors.getvalue())


class BenchTest(parameterized.TestCase):
    def test_measures_side_by_side(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        names = ["naive", "naive_map", "xla", "reference"]
        code, text = run(
            bench_command.main,
            *("--shape", "tiny", "--dtype", "float32", "--rounds", "2"),
            *("--implementations", *names),
            *("--json", str(folder / "b.json"), "--plot", str(folder / "b.png")),
        )
        self.assertEqual(code, 0)
        results = json.loads((folder / "b.json").read_text())["results"]
        rows = results[0]["rows"]
        wanted = [(n, "forward") for n in names] + [("xla", "backward")]
        wanted += [(n, "gradient") for n in names]
        self.assertEqual([(r["name"], r["kind"]) for r in rows], wanted)
        for row in rows:
            self.assertLessEqual(row["low_ms"], row["ms"])
            self.assertLessEqual(row["ms"], row["high_ms"])
            self.assertLessEqual(row["low_speed"], row["high_speed"])
        self.assertLen(re.findall(r"^\| tiny ", text, re.MULTILINE), 9)
        again = run(bench_command.main, "--table", str(folder / "b.json"))[1]
        self.assertIn(again.strip(), text)
        self.assertEqual((folder / "b.png").read_bytes()[1:4], b"PNG")

    def test_what_cannot_run_is_reported_and_fails(self):
        code, text = run(
            bench_command.main, "--shape", "tiny", "--implementations", "xla", "cutedsl"
        )
        self.assertEqual(code, 1)
        self.assertRegex(text, r"cutedsl \| NotImplementedError")

    @parameterized.parameters("naive", "naive_map", "xla")
    def test_all_that_is_timed_computes_the_same(self, name):
        shape = bench.SHAPES["tiny"]
        args = bench.operands(shape, "float32")
        got = bench.gradient(bench.attention(name, shape.value_dim))(*args)
        want = bench.gradient(bench.attention("reference", shape.value_dim))(*args)
        for a, b in zip(got, want, strict=True):
            self.assertLess(abs(a - b).max(), 1e-4 * abs(b).max())


if __name__ == "__main__":
    absltest.main()
