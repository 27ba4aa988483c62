"""Builds the compiled kernels that a package carries, as JAX_DSA_BUILD_CUBINS says, into a folder.

auto (default): all of them where nvidia-cutlass-dsl can be imported, else none. none: none. Else a
list of architectures, separated by commas: these, or the build fails.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

VARIABLE = "JAX_DSA_BUILD_CUBINS"
ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(folder: str) -> int:
    wanted = os.environ.get(VARIABLE, "auto").strip()
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    missing = [name for name in ("cutlass", "jax") if importlib.util.find_spec(name) is None]
    if wanted == "none" or (wanted == "auto" and missing):
        why = "asked for none" if wanted == "none" else f"{missing[0]} cannot be imported here"
        print(f"jax_dsa: no compiled kernels in this package ({VARIABLE}={wanted}: {why})")
        return 0
    if missing:
        print(
            f"jax_dsa: {VARIABLE}={wanted} wants kernels built, but {missing[0]} cannot be "
            "imported: install nvidia-cutlass-dsl and jax and build with --no-build-isolation",
            file=sys.stderr,
        )
        return 1
    command = [sys.executable, "-m", "jax_dsa.aot", "--out", folder]
    command += [] if wanted == "auto" else ["--arch", *wanted.replace(",", " ").split()]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
