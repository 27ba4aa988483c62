"""Who may import whom, and what an import of the package costs and loads."""

import ast
import pathlib
import statistics
import subprocess
import sys

from absl.testing import absltest, parameterized

import jax_dsa

PACKAGE = pathlib.Path(jax_dsa.__file__).parent
COMMANDS = {"jax_dsa.bench", "jax_dsa.doctor", "jax_dsa.verify", "jax_dsa.aot.__main__"}
HEAVY = ("cutlass", "cuda", "nvidia", "triton", "torch", "matplotlib", "optax", "tqdm")


def modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("jax_dsa", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: pathlib.Path, name: str) -> set[str]:
    """Every dotted name a file imports, anywhere in it; ``from a import b`` is a and a.b."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*base, node.module or ""] if node.level else [node.module or ""])
            source = source.strip(".")
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


def under(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


class ImportRulesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.graph = {name: imports(path, name) for name, path in modules().items()}

    def violations(self, *, of: tuple[str, ...], forbidden) -> list[tuple[str, str]]:
        return [
            (name, target)
            for name, targets in self.graph.items()
            if not of or under(name, *of)
            for target in targets
            if forbidden(target)
        ]

    def test_walk_sees_the_package(self):
        """The rules below are not kept by an empty walk."""
        self.assertIn("jax_dsa.api", self.graph)
        self.assertIn("jax_dsa.validate", self.graph["jax_dsa.api"])
        self.assertIn("jax_dsa.problem", self.graph["jax_dsa.validate"])

    def test_only_kernels_and_aot_import_cutlass(self):
        allowed = ("jax_dsa.kernels", "jax_dsa.aot")
        found = self.violations(of=(), forbidden=lambda target: under(target, "cutlass"))
        self.assertEqual([pair for pair in found if not under(pair[0], *allowed)], [])

    def test_cubins_import_neither_cutlass_nor_what_compiles(self):
        rooms = ("cutlass", "jax_dsa.kernels", "jax_dsa.aot", "jax")
        found = self.violations(of=("jax_dsa.cubins",), forbidden=lambda t: under(t, *rooms))
        self.assertEqual(found, [])

    def test_aot_imports_no_jax_and_cutlass_only_where_it_compiles(self):
        """Compiling needs no JAX; what plans and checks needs no compiler."""
        found = self.violations(of=("jax_dsa.aot",), forbidden=lambda t: under(t, "jax"))
        self.assertEqual(found, [])
        found = self.violations(of=("jax_dsa.aot",), forbidden=lambda t: under(t, "cutlass"))
        self.assertEqual({name for name, _ in found}, {"jax_dsa.aot.worker", "jax_dsa.aot.peer"})

    def test_emulator_imports_only_the_manifest(self):
        def foreign(target):
            inside = ("jax_dsa.emulator", "jax_dsa.cubins.manifest")
            neutral = ("jax_dsa", "jax_dsa.cubins")
            return under(target, "jax_dsa") and not under(target, *inside) and target not in neutral

        self.assertEqual(self.violations(of=("jax_dsa.emulator",), forbidden=foreign), [])

    def test_plain_implementations_import_no_ffi(self):
        rooms = ("jax_dsa.reference", "jax_dsa.xla", "jax_dsa.indexer")
        ffi = lambda target: under(target, "jax_dsa.ffi", "jax.ffi", "ctypes")  # noqa: E731
        self.assertEqual(self.violations(of=rooms, forbidden=ffi), [])

    def test_nothing_imports_the_commands(self):
        found = self.violations(of=(), forbidden=lambda target: under(target, *COMMANDS))
        self.assertEqual([pair for pair in found if not under(pair[0], *COMMANDS)], [])

    def test_derivative_wiring_knows_no_implementation(self):
        modules = ("reference", "xla", "cutedsl", "ffi", "kernels")
        names = [f"jax_dsa.{module}" for module in modules]
        rooms = ("jax_dsa.vjp", "jax_dsa.sharding", "jax_dsa.operations", "jax_dsa.problem")
        self.assertEqual(self.violations(of=rooms, forbidden=lambda t: under(t, *names)), [])

    def test_tests_and_examples_are_not_imported(self):
        found = self.violations(of=(), forbidden=lambda t: under(t, "tests", "examples", "pytest"))
        self.assertEqual(found, [])


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    return run.stdout


class ImportCostTest(parameterized.TestCase):
    def test_import_adds_little_to_import_of_jax(self):
        """Processor time after jax is there; median of five processes."""
        code = (
            "import time; a = time.process_time(); import jax; b = time.process_time(); "
            "import jax_dsa; print(time.process_time() - b)"
        )
        added = statistics.median(float(python(code)) for _ in range(5))
        self.assertLessEqual(added, 0.2)

    def test_import_loads_nothing_heavy_and_starts_no_backend(self):
        code = (
            "import jax, sys; before = set(sys.modules); import jax_dsa; "
            "from jax._src import xla_bridge; assert not xla_bridge._backends; "
            "print(*sorted(set(sys.modules) - before), sep='\\n')"
        )
        loaded = python(code).split()
        self.assertIn("jax_dsa.api", loaded)
        self.assertEqual([name for name in loaded if under(name, *HEAVY)], [])
        self.assertEqual([name for name in loaded if under(name, *COMMANDS)], [])

    def test_public_names(self):
        self.assertEqual(sorted(jax_dsa.__all__), sorted(set(jax_dsa.__all__)))
        for name in jax_dsa.__all__:
            self.assertTrue(hasattr(jax_dsa, name), name)
        self.assertRegex(jax_dsa.__version__, r"^\d+\.\d+\.\d+")
        self.assertTrue((PACKAGE / "py.typed").is_file())


if __name__ == "__main__":
    absltest.main()
