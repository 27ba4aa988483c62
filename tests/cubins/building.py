"""A temporary world to build in: two modules of kernels, a compiler that is none, a folder.

    alone.py building FOLDER

builds into it in a process of its own and prints how many kernels it compiled, of how many.
"""

import json
import os
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized

from jax_dsa.aot import builder
from jax_dsa.cubins import store

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[1]
ALONE = (sys.executable, str(REPOSITORY / "jax_dsa" / "aot" / "alone.py"))  # without JAX: fast
WORKER = (*ALONE, "fake_compiler")
MODULES = ("fake_forward", "fake_backward")
KERNELS = {"fake_forward": 2, "fake_backward": 1}


class BuildingTestCase(parameterized.TestCase):
    """Each test has ``folder`` to build into; ``compiled()`` says what was compiled so far."""

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.folder, self.sources = self.root / "cubins", self.root / "sources"
        for path in (self.sources, self.root / "marks"):
            path.mkdir()
        for module in MODULES:
            self.write_source(module, "KERNELS = ()\n")
        self.settings = {
            "folder": str(self.root / "marks"), "tools": {"cuda": "12.9"}, "kernels": KERNELS,
            "seconds": 0, "crash": -1,
        }  # fmt: skip
        self.configure()
        paths = os.pathsep.join(map(str, (self.sources, REPOSITORY, HERE)))
        self.environment = {"FAKE_COMPILER": str(self.root / "settings"), "PYTHONPATH": paths}
        self.enter_context(mock.patch.dict(os.environ, self.environment))
        self.enter_context(mock.patch.object(sys, "path", [str(self.sources), *sys.path]))

    def write_source(self, module: str, text: str) -> None:
        (self.sources / f"{module}.py").write_text(text)

    def configure(self, **changes) -> None:
        self.settings |= changes
        (self.root / "settings").write_text(json.dumps(self.settings))

    def build(self, **changes) -> builder.Report:
        settings = {"modules": MODULES, "worker": WORKER, "jobs": 1} | changes
        return builder.build(["sm_90a"], self.folder, **settings)

    def compiled(self) -> list[str]:
        """Module and index of each compile so far, sorted."""
        names = (p.name.split(".") for p in (self.root / "marks").iterdir())
        return sorted(f"{module} {index}" for module, index, _ in names)

    def entries(self):
        entries, problems = store.Store(self.folder).entries()
        self.assertEqual(problems, [])
        return entries


def main(folder: str) -> None:
    report = builder.build(
        ["sm_90a"], folder, modules=MODULES, worker=WORKER, jobs=1,
        waiting=lambda: print("waiting", flush=True),
    )  # fmt: skip
    print(sum(row.built for row in report.rows), len(report.rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
