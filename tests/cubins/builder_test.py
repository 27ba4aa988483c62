"""Building with a compiler that is none: what is compiled again, what fails, who waits."""

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import building
from absl.testing import absltest, parameterized

from jax_dsa.aot import __main__ as command
from jax_dsa.aot import builder, table
from jax_dsa.cubins import store

ALL = ["fake_backward 0", "fake_forward 0", "fake_forward 1"]


class RebuildTest(building.BuildingTestCase):
    def again(self, **changes) -> list[str]:
        """What the next build compiles."""
        before = self.compiled()
        self.build(**changes)
        after = self.compiled()
        for name in before:
            after.remove(name)
        return after

    def setUp(self):
        super().setUp()
        self.first = self.build()

    def test_all_then_nothing_unless_forced(self):
        self.assertEqual([row.built for row in self.first.rows], [True] * 3)
        self.assertEqual(self.compiled(), ALL)
        self.assertEqual(self.again(), [])
        self.assertEqual(self.again(force=True), ALL)

    def test_only_the_changed_module(self):
        self.write_source("fake_backward", "KERNELS = (1,)\n")
        self.assertEqual(self.again(), ["fake_backward 0"])
        self.assertLen(self.entries(), 4)  # the earlier one stays until pruned
        self.assertEqual(self.again(prune=True), [])
        self.assertLen(self.entries(), 3)
        self.assertLen(list(self.folder.glob("*.cubin")), 3)
        self.assertLen(list(self.folder.glob("*.ptx")), 1)  # equal contents, one file

    def test_other_tools_or_options_replace(self):
        self.assertEqual(self.again(opt_level=1), ALL)
        self.configure(tools={"cuda": "13.0"})
        self.assertEqual(self.again(opt_level=1), ALL)
        self.assertLen(self.entries(), 3)
        self.assertEqual({e.minimum_driver for e in self.entries()}, {"580.65.06"})

    @parameterized.parameters("cubin", "ptx")
    def test_damaged_files_are_made_again(self, suffix):
        (found,) = [e for e in self.entries() if e.op == "backward"]
        path = store.Store(self.folder).path(found, suffix)
        whole = path.read_bytes()
        for damage in (lambda: path.write_bytes(whole[:-7]), path.unlink):
            damage()
            self.assertIn("fake_backward 0", self.again())
            self.assertEqual(path.read_bytes(), whole)

    def test_unreadable_manifest_is_made_again(self):
        path = sorted(self.folder.glob("*.json"))[0]
        path.write_text(path.read_text()[:40])
        self.assertLen(self.again(), 1)
        self.assertLen(self.entries(), 3)

    def test_new_messages_are_told_once(self):
        self.assertEqual({row.news for row in self.build(force=True).rows}, {()})
        other = self.root / "other"
        report = builder.build(
            ["sm_90a"], other, modules=building.MODULES, worker=building.WORKER, jobs=1
        )
        self.assertEqual({row.news for row in report.rows}, {("(C7517) a remark",)})
        self.assertIn("new: sm_90a backward head_dim=512 dtype=bfloat16: (C7517) a remark",
                      table.report(report))  # fmt: skip


class FailureTest(building.BuildingTestCase):
    def test_a_crash_names_kernel_and_signal_and_spares_the_others(self):
        self.configure(crash=1)
        with self.assertRaises(builder.BuildError) as caught:
            self.build()
        self.assertRegex(str(caught.exception), "1 of 3 kernels failed")
        self.assertRegex(str(caught.exception), "sm_90a forward head_dim=576 .*\n.*SIGSEGV")
        self.assertLen(self.entries(), 2)
        self.configure(crash=-1)
        self.build()
        self.assertEqual(self.compiled(), sorted([*ALL, "fake_forward 1"]))

    def test_two_kernels_for_the_same_facts(self):
        with self.assertRaisesRegex(builder.BuildError, "2 kernels serve sm_90a backward"):
            self.build(modules=("fake_backward", "fake_backward"))

    def test_modules_that_cannot_be_listed(self):
        with self.assertRaisesRegex(builder.BuildError, "cannot be listed(.|\n)*KeyError: 'none'"):
            self.build(modules=("none",))

    def test_unknown_architecture(self):
        with self.assertRaisesRegex(builder.BuildError, "no kernels for sm_70; there are.* sm_90a"):
            builder.build(["sm_70"], self.folder, worker=building.WORKER)

    def test_folder_that_cannot_be_written(self):
        self.folder.write_text("a file")
        with self.assertRaisesRegex(builder.BuildError, "cannot write to .*cubins.*--out"):
            self.build()

    def test_no_compiler(self):
        with mock.patch.object(builder, "available", lambda: None):
            with self.assertRaisesRegex(builder.BuildError, "pip install 'jax_dsa\\[kernels\\]'"):
                builder.build(["sm_90a"], self.folder)
            self.assertEqual(command.main(["--out", str(self.folder)]), 2)


class ProcessesTest(building.BuildingTestCase):
    def start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [*building.ALONE, "building", str(self.folder)], stdout=subprocess.PIPE, text=True
        )

    def wait_for_compiles(self, count: int) -> None:
        limit = time.monotonic() + 60
        while len(self.compiled()) < count:
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.02)

    def test_two_build_at_once_and_compile_once(self):
        self.configure(seconds=1)
        first = self.start()
        self.wait_for_compiles(1)
        second = self.start()
        said = [process.communicate(timeout=120)[0].split("\n") for process in (first, second)]
        self.assertEqual([first.returncode, second.returncode], [0, 0])
        self.assertEqual(said, [["3 3", ""], ["waiting", "0 3", ""]])
        self.assertEqual(self.compiled(), ALL)

    def test_a_killed_build_leaves_a_usable_folder(self):
        self.configure(seconds=1)
        killed = self.start()
        self.wait_for_compiles(2)  # one is done, one runs
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        self.assertLen(self.entries(), 1)
        self.configure(seconds=0)
        report = self.build()
        self.assertEqual(sum(row.built for row in report.rows), 2)

    def test_readers_see_whole_kernels_only(self):
        self.configure(seconds=0.05)
        process, looks = self.start(), 0
        kept = store.Store(self.folder)
        while process.poll() is None:
            for entry in kept.entries()[0]:
                kept.cubin(entry)
                kept.ptx(entry)
                looks += 1
            self.assertEqual(kept.entries()[1], [])
        process.communicate()
        self.assertEqual(process.returncode, 0)
        self.assertGreater(looks, 0)


class CommandTest(building.BuildingTestCase):
    def run_command(self, *args: str) -> tuple[int, str]:
        with mock.patch.object(builder, "WORKER", building.WORKER):
            with (
                mock.patch.object(builder, "available", lambda: "1.0"),
                mock.patch("sys.stdout.write") as write,
            ):
                code = command.main(["--out", str(self.folder), *args])
        return code, "".join(call.args[0] for call in write.call_args_list)

    def test_table_and_listing(self):
        modules = ("--modules", *building.MODULES)
        code, text = self.run_command("--list", *modules)
        self.assertEqual((code, text.count("not compiled")), (0, 3))
        code, text = self.run_command(*modules)
        self.assertEqual(code, 0)
        self.assertRegex(text, "kernel +cubin +registers +frame +shared +threads")
        row = r"sm_90a backward head_dim=512 dtype=bfloat16 +0.\d KiB +32 +0 B +0.0 KiB +128 +\S+ s"
        self.assertRegex(text, row)
        self.assertIn(f"3 compiled, 0 up to date, in {self.folder}", text)
        code, text = self.run_command("--list", *modules)
        self.assertEqual(text.count("up to date"), 3)
        self.write_source("fake_backward", "")
        sorted(self.folder.glob("*.cubin"))[0].unlink()
        code, text = self.run_command("--list", *modules)
        self.assertEqual(text.count("missing."), 1)
        self.assertIn("not compiled", text)

    def test_failure_is_exit_code_1(self):
        self.configure(crash=1)
        with mock.patch("sys.stderr.write") as write:
            code, _ = self.run_command("--modules", *building.MODULES)
        self.assertEqual(code, 1)
        self.assertIn("1 of 3 kernels failed", "".join(c.args[0] for c in write.call_args_list))

    def test_list_without_compiler(self):
        self.build()
        absent = mock.patch.object(builder, "available", lambda: None)
        with absent, mock.patch("sys.stdout.write") as write:
            self.assertEqual(command.main(["--out", str(self.folder), "--list"]), 0)
        text = "".join(call.args[0] for call in write.call_args_list)
        self.assertIn("nvidia-cutlass-dsl is not installed", text)
        self.assertEqual(text.count(" compiled\n"), 3)

    def test_runs_where_there_is_no_jax(self):
        (self.sources / "jax").mkdir()
        (self.sources / "jax" / "__init__.py").write_text("raise ImportError('no jax here')")
        run = [*building.ALONE, "jax_dsa.aot", "--help"]
        done = subprocess.run(run, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("python -m jax_dsa.aot", done.stdout)
        plain = subprocess.run([sys.executable, "-m", "jax_dsa.aot", "--help"], capture_output=True)
        self.assertIn(b"no jax here", plain.stderr)


if __name__ == "__main__":
    absltest.main()
