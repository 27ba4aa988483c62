"""Runs a module of the package without the package's ``__init__``, that is without JAX: a script.

    python jax_dsa/aot/alone.py jax_dsa.aot --arch sm_90a

Compiling needs no JAX, and an environment that only builds wheels has none.
"""

import pathlib
import runpy
import sys
import types

HERE = pathlib.Path(__file__).resolve()


def main() -> None:
    # A script's own folder comes first in the search path: names in it would hide others.
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != HERE.parent]
    package = types.ModuleType("jax_dsa")
    package.__path__ = [str(HERE.parents[1])]
    sys.modules["jax_dsa"] = package
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
