"""Compiles the package's kernels ahead of time, without a GPU: ``python -m jax_dsa.aot``.

Nothing here but ``worker`` imports the compiler, and ``worker`` runs in processes of its own.
"""

from jax_dsa.aot.builder import MODULES, BuildError, Report, available, build

__all__ = ["MODULES", "BuildError", "Report", "available", "build"]
