"""The kernels assembled at ptxas's optimisation levels 1, 2 and 3 give the same bits."""

import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import tempfile

import cases
import jax
import numpy as np
import suite
from absl.testing import absltest, parameterized
from cases import Case
from suites_gpu_test import KERNELS

from jax_dsa.cubins import registry
from jax_dsa.ffi import library

ARCH = "sm_90a"


def assemble(found: registry.Found, level: int) -> bytes:
    """The cubin of a kernel's PTX at an optimisation level."""
    ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    source = found.folder / f"{found.entry.hashes['ptx']}.ptx"
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "kernel.cubin"
        command = [ptxas, f"-arch={ARCH}", f"-O{level}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()


class LevelsTest(suite.Suite):
    locals().update(KERNELS)

    def install(self, level: int | None) -> set[str]:
        """Installs every kernel, at a level or as shipped; the images' hashes."""
        chosen = []
        for found in registry.entries(ARCH):
            image = found.cubin if level is None else assemble(found, level)
            digest = hashlib.sha256(image).hexdigest()
            hashes = {**found.entry.hashes, "cubin": digest}
            chosen.append((dataclasses.replace(found.entry, hashes=hashes), image))
        library.install(chosen)
        return {entry.hashes["cubin"] for entry, _ in chosen}

    @parameterized.product(dtype=KERNELS["dtypes"], width=(512, 576))
    def test_same_bits(self, dtype: str, width: int):
        case = Case("levels", queries=4, keys=300, heads=70, head_dim=width, topk=330, sink=(0.5,))
        random = self.inputs(case, dtype)
        exact = cases.exact_inputs(256, dtype, tail=width == 576, queries=4, heads=64)
        got, images = {}, []
        self.addCleanup(self.install, None)
        for level in (None, 1, 2, 3):
            images.append(self.install(level))
            got[level] = [self.evaluate(i) for i in (random, exact)]
            jax.clear_caches()
        self.assertEmpty(images[1] & images[3])
        for level in (1, 2, 3):
            for kind, first, other in zip(("random", "exact"), got[None], got[level], strict=True):
                for name in ("out", "lse", "dq") + ("dkv",) * (kind == "exact"):
                    np.testing.assert_array_equal(
                        getattr(first, name), getattr(other, name), f"{name} {kind} -O{level}"
                    )


if __name__ == "__main__":
    absltest.main()
