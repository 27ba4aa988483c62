"""A wheel in a fresh environment without a compiler of kernels; the tier of JAX_DSA_WHEEL=FILE.

    JAX_DSA_WHEEL=dist/jax_dsa-….whl pytest tests/wheel_test.py

``.ci/release`` builds a release wheel and runs this on it. JAX_DSA_WHEEL=. builds one from the
sources first, as a plain ``pip install .`` does: with the bridge and without kernels.
"""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from absl.testing import absltest, parameterized

WHEEL = os.environ.get("JAX_DSA_WHEEL", "")
ROOT = pathlib.Path(__file__).parents[1]
TAGS = "py3-none-manylinux_2_28_x86_64"


def run(*command: str, **options) -> str:
    # Of the environment only what finds programs and packages: no PYTHONPATH, no cache of kernels.
    kept = ("PATH", "HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"JAX_PLATFORMS": "cpu"} | options.pop("environment", {})
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, **options
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@absltest.skipUnless(WHEEL, "JAX_DSA_WHEEL names no wheel")
class WheelTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(functools.partial(shutil.rmtree, cls.folder))
        cls.wheel = cls._built() if WHEEL == "." else pathlib.Path(WHEEL)
        cls.python = str(cls.folder / "venv/bin/python")
        run(sys.executable, "-m", "venv", str(cls.folder / "venv"))
        run(cls.python, "-m", "pip", "install", "--quiet", str(cls.wheel))

    @classmethod
    def _built(cls) -> pathlib.Path:
        command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir")
        run(*command, str(cls.folder), str(ROOT))
        (wheel,) = cls.folder.glob("jax_dsa-*.whl")
        return wheel

    def python_says(self, code: str) -> str:
        return run(self.python, "-W", "error", "-c", code, cwd=self.folder)

    def test_is_for_every_python_and_many_linuxes(self):
        if WHEEL != ".":
            self.assertEqual(self.wheel.stem.split("-", 2)[2], TAGS)
        names = zipfile.ZipFile(self.wheel).namelist()
        self.assertEqual(
            [n for n in names if n.endswith(".so")], ["jax_dsa/ffi/libjax_dsa_bridge.so"]
        )
        outside = [n for n in names if not n.startswith(("jax_dsa/", "jax_dsa-"))]
        self.assertEqual(outside, [])

    def test_has_no_compiler(self):
        self.assertEqual(self.python_says(
            "import importlib.util as u; print(u.find_spec('cutlass'), u.find_spec('cuda'))"
        ).split(), ["None", "None"])  # fmt: skip

    def test_imports_and_attends(self):
        code = (
            "import jax.numpy as jnp, jax_dsa; "
            "q, kv = jnp.ones((2, 3, 8)), jnp.ones((4, 8)); "
            "print(jax_dsa.sparse_attention(q, kv, jnp.zeros((2, 1), jnp.int32)).sum())"
        )
        self.assertEqual(self.python_says(code).strip(), "48.0")

    def test_bridge_is_registered_with_xla(self):
        code = "from jax_dsa.ffi import library; library.register(); print(library.path())"
        self.assertTrue(self.python_says(code).strip().startswith(str(self.folder)))

    def test_doctor_finds_the_kernels_of_the_package(self):
        found = json.loads(run(self.python, "-m", "jax_dsa.doctor", "--json", cwd=self.folder))
        self.assertIn("libjax_dsa_bridge.so", found["bridge"])
        if WHEEL == ".":
            self.assertRegex(found["cubins"], "absent: no compiled kernels; .*jax_dsa.aot")
            return
        wanted = {(op, d) for op in ("forward", "backward") for d in (512, 576)}
        rows = [row for row in found["cubins"] if row["arch"] == "sm_90a"]
        for dtype in ("bfloat16", "float16"):
            facts = [
                (r["op"], r["facts"]["head_dim"]) for r in rows if r["facts"]["dtype"] == dtype
            ]
            self.assertEqual(set(facts), wanted)
        for row in rows:
            self.assertTrue(row["folder"].startswith(str(self.folder)), row["folder"])
            self.assertRegex(row["minimum_driver"], r"^\d{3}\.")

    def test_the_bridge_takes_every_kernel_of_the_package(self):
        code = (
            "from jax_dsa.cubins import registry; from jax_dsa.ffi import library; "
            "found = [f for arch in registry.archs() for f in registry.entries(arch)]; "
            "library.install((f.entry, f.cubin) for f in found); print(len(found))"
        )
        self.assertEqual(int(self.python_says(code)) > 0, WHEEL != ".")

    def test_none_is_exported_with_the_kernels(self):
        """From a CPU, for a GPU: kernels where the package has them, else "xla"."""
        code = (
            "import jax, jax.numpy as jnp, jax_dsa; s = jax.ShapeDtypeStruct; b = jnp.bfloat16; "
            "f = jax.jit(jax_dsa.sparse_attention); "
            "a = s((2, 3, 576), b), s((4, 576), b), s((2, 5), jnp.int32); "
            "e = jax.export.export(f, platforms=['cuda'], "
            "disabled_checks=jax_dsa.EXPORT_DISABLED_CHECKS)(*a); "
            "print('jax_dsa_fwd_v1' in e.mlir_module())"
        )
        code = code.replace("import jax,", "import jax, jax.export,")
        self.assertEqual(self.python_says(code).strip(), str(WHEEL != "."))


if __name__ == "__main__":
    absltest.main()
