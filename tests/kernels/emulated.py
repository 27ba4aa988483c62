"""Our kernels, compiled here and run by the emulator. Tier ``kernels``:

    JAX_DSA_KERNELS=1 pytest tests/kernels

JAX_DSA_KERNELS_PYTHON is an interpreter that has nvidia-cutlass-dsl (default: the running one);
JAX_DSA_KERNELS_DIR keeps what it compiles, so that a second run need not (default: a temporary
folder).
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable

from jax_dsa.cubins import manifest
from jax_dsa.emulator import Program, mutation
from jax_dsa.emulator.code import Code
from jax_dsa.emulator.observers.graph import Graph
from jax_dsa.emulator.proof import Prover
from jax_dsa.emulator.report import Report

ENABLED = os.environ.get("JAX_DSA_KERNELS") == "1"
WHY = "set JAX_DSA_KERNELS=1"
SCRIPT = pathlib.Path(__file__).parent / "compile_kernel.py"
_TEMPORARY = tempfile.TemporaryDirectory()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel's PTX text, the program of it, and its manifest entry."""

    text: str
    program: Program
    entry: manifest.Kernel


def call_compiler(*arguments: str) -> subprocess.CompletedProcess:
    """Runs ``compile_kernel.py``."""
    python = os.environ.get("JAX_DSA_KERNELS_PYTHON", sys.executable)
    command = [python, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def compiled(module: str, name: str, head_dim: int, dtype: str) -> Compiled:
    """One kernel of ``jax_dsa.kernels``, e.g. ("sm90.forward", "Forward", 576, "bfloat16")."""
    base = pathlib.Path(os.environ.get("JAX_DSA_KERNELS_DIR", _TEMPORARY.name))
    folder = base / f"{name}-{head_dim}-{dtype}"
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        done = call_compiler(module, name, str(head_dim), dtype, str(folder))
        if done.returncode:
            raise RuntimeError(f"compiling {folder.name} failed:\n{done.stderr}")
    (entry,) = manifest.Manifest.from_json((folder / "manifest.json").read_text()).kernels
    text = (folder / "kernel.ptx").read_text()
    return Compiled(text, Program(text, [entry]), entry)


STEPS = 20  # a mutant that takes this many times the steps of the kernel is stuck
Execute = Callable[[dict[str, Code], int, list], tuple[Report, str]]


def assert_all_needed(
    test: unittest.TestCase, subject: Compiled, execute: Execute, changes: tuple[str, ...]
) -> list[mutation.Outcome]:
    """Changes every ordering element of a kernel: something notices, or the graph proves that it is
    redundant.

    Args:
      execute: (codes, step limit, more observers) -> (report, what is wrong with the results), with
        the observers "races", lints and all.
      changes: which of "delete", "weaken", "move".
    """
    graph, symbol = Graph(), subject.entry.symbol
    report, wrong = execute({}, 10**9, [graph])
    # What the kernel itself does would stand for every mutant.
    test.assertEqual((str(report)[:2000], wrong), ("clean", ""))
    limit, code = STEPS * report.steps, subject.program.code(symbol)
    chosen = [m for m in mutation.mutants(code) if m.change in changes]

    def attempt(changed: Code) -> tuple[Report, str]:
        return execute({symbol: changed}, limit, [])

    outcomes = list(mutation.survey(code, attempt, Prover(graph), chosen, registers=True))
    unnoticed = [f"{o.caught}: {o.mutant}: {o.detail}" for o in outcomes if o.caught in UNNOTICED]
    test.assertEqual(unnoticed, [])
    return outcomes


UNNOTICED = ("missed", "not executed")
