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
    missing = importlib.util.find_spec("cutlass") is None
    if wanted == "none" or (wanted == "auto" and missing):
        why = "asked for none" if wanted == "none" else "nvidia-cutlass-dsl is not installed here"
        print(f"jax_dsa: no compiled kernels in this package ({VARIABLE}={wanted}: {why})")
        return 0
    if missing:
        print(
            f"jax_dsa: {VARIABLE}={wanted} wants kernels compiled, but nvidia-cutlass-dsl is not "
            "installed in this environment: install it and build with --no-build-isolation",
            file=sys.stderr,
        )
        return 1
    # Compiling needs no JAX, which an environment that only builds wheels does not have.
    command = [sys.executable, str(ROOT / "jax_dsa/aot/alone.py"), "jax_dsa.aot", "--out", folder]
    for arch in wanted.replace(",", " ").split() if wanted != "auto" else ():
        command += ["--arch", arch]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
