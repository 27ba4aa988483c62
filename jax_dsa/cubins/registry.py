"""Which compiled kernel serves (architecture, op, facts), with its machine code, or why none does.

Looked for in this order: the package's ``cubins/data``, then JAX_DSA_CACHE_DIR (default: jax_dsa in
the user's cache directory), then compiled into the latter where nvidia-cutlass-dsl is installed,
once, with a log line. A kernel counts only when its files are intact and it was compiled from the
sources that are installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jax_dsa.cubins import elf, manifest, sources, store

DATA = pathlib.Path(__file__).with_name("data")
# Compute capability of a device -> the architecture whose kernels it runs.
ARCHITECTURES = {"9.0": "sm_90a"}
COMPILER = "nvidia-cutlass-dsl"


class KernelMissing(LookupError):
    """No usable compiled kernel; says what was wanted, what is there and which command helps."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A kernel that may be loaded: its manifest entry, its machine code, the folder of both."""

    entry: manifest.Kernel
    cubin: bytes
    folder: pathlib.Path


def architecture(compute_capability: str) -> str:
    """The architecture whose kernels a device runs, e.g. "9.0" -> "sm_90a".

    Raises:
      KernelMissing: for a device that no kernels are written for.
    """
    if compute_capability not in ARCHITECTURES:
        served = ", ".join(f"{c} ({arch})" for c, arch in ARCHITECTURES.items())
        raise KernelMissing(
            f"no kernels for compute capability {compute_capability}; there are for {served}."
        )
    return ARCHITECTURES[compute_capability]


@dataclasses.dataclass(frozen=True)
class Look:
    """What the folders have for an architecture: usable kernels; what is wrong with those that are
    damaged and not found intact elsewhere; what else may explain that one is not found."""

    found: Sequence[Found]
    damaged: Sequence[str] = ()
    notes: Sequence[str] = ()

    def match(self, op: str, facts: Mapping[str, Any]) -> Found | None:
        wanted = dict(facts)
        same = (f for f in self.found if f.entry.op == op and dict(f.entry.facts) == wanted)
        return next(same, None)


class Registry:
    """The kernels in some folders.

    Args:
      folders: searched in this order.
      builder: called with an architecture when nothing usable is there, fills the last folder and
        raises KernelMissing when it cannot; called at most once per architecture.
    """

    def __init__(
        self, folders: Sequence[pathlib.Path], builder: Callable[[str], None] | None = None
    ):
        self.stores = [store.Store(folder) for folder in folders]
        self.builder = builder
        self.tried: dict[str, str] = {}
        self.hashes: dict[str, str] = {}
        self.looked: dict[str, Look] = {}
        self.lock = threading.RLock()  # a second thread waits for what the first compiles

    def find(self, arch: str, op: str, facts: Mapping[str, Any], *, build: bool = True) -> Found:
        """The kernel of an op whose facts equal these; ``build``: compiled where it is missing.
        Raises:
          KernelMissing: with the reason.
        """
        with self.lock:
            match = self._look(arch).match(op, facts)
            if match is None and build and self._build(arch):
                match = self._look(arch).match(op, facts)
            if match is None:
                raise KernelMissing(self._why(arch, op, facts))
            return match

    def reason(self, arch: str, op: str, facts: Mapping[str, Any], *, build: bool = False):
        """None where ``find`` would find, else why it would not."""
        try:
            self.find(arch, op, facts, build=build)
        except KernelMissing as error:
            return str(error)
        return None

    def entries(self, arch: str, *, build: bool = True) -> tuple[Found, ...]:
        """All usable kernels of an architecture, one per (op, facts).

        Raises:
          KernelMissing: when there is none.
        """
        with self.lock:
            look = self._look(arch)
            if (not look.found or look.damaged) and build and self._build(arch):
                look = self._look(arch)
            if not look.found:
                raise KernelMissing(self._why(arch))
            for problem in look.damaged:
                logging.warning("jax_dsa: %s", problem)
            return tuple(look.found)

    def archs(self) -> tuple[str, ...]:
        """The architectures of which a usable kernel is there."""
        listed = {e.arch for kept in self.stores for e in kept.entries()[0]}
        return tuple(sorted(arch for arch in listed if self._look(arch).found))

    def _look(self, arch: str) -> Look:
        if arch not in self.looked or not self.looked[arch].found:
            self.looked[arch] = self._read(arch)
        return self.looked[arch]

    def _read(self, arch: str) -> Look:
        found, damaged, notes = {}, {}, []
        for kept in self.stores:
            entries, unreadable = kept.entries()
            mine = [entry for entry in entries if entry.arch == arch]
            fresh = [entry for entry in mine if self._is_fresh(entry)]
            notes += unreadable
            if len(fresh) < len(mine):
                stale = f"{len(mine) - len(fresh)} of {arch} are of other sources"
                notes.append(f"{kept.folder}: {stale} than those installed.")
            for entry in fresh:
                key = entry.op, frozenset(entry.facts.items())
                try:
                    if key not in found:
                        found[key] = Found(entry, kept.cubin(entry), kept.folder)
                except elf.CubinError as error:
                    damaged[key] = str(error)
        lost = [text for key, text in damaged.items() if key not in found]
        return Look([*found.values()], lost, notes)

    def _is_fresh(self, entry: manifest.Kernel) -> bool:
        if entry.module not in self.hashes:
            try:
                self.hashes[entry.module] = sources.source_hash(entry.module)
            except ModuleNotFoundError:
                return False
        return self.hashes[entry.module] == entry.hashes.get("source")

    def _build(self, arch: str) -> bool:
        if self.builder is None or arch in self.tried:
            return False
        self.tried[arch] = ""
        self.looked.pop(arch, None)
        try:
            self.builder(arch)
        except KernelMissing as error:
            self.tried[arch] = str(error)
        return True

    def _why(self, arch: str, op: str = "", facts: Mapping[str, Any] | None = None) -> str:
        look = self._look(arch)
        served = [_named(f.entry.facts) for f in look.found if f.entry.op == op]
        wanted = " ".join(filter(None, [arch, op, _named(facts or {})]))
        lines = [f"no compiled kernel for {wanted}."]
        lines += [f"{arch} {op} serves: {'; '.join(served)}."] if served else []
        lines += [*look.damaged, *look.notes, *filter(None, [self.tried.get(arch)])]
        if look.damaged or not served:
            folders = ", ".join(str(kept.folder) for kept in self.stores)
            archs = ", ".join(self.archs()) or "none"
            lines.append(f"Architectures there: {archs}; looked in {folders}.")
            hint = f"To compile: {command(arch)} (needs pip install 'jax_dsa[kernels]')."
            lines += [hint] if arch in ARCHITECTURES.values() else []
        return " ".join(lines)


def _named(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())


def command(arch: str) -> str:  # what a user types
    return f"python -m jax_dsa.aot --arch {arch}"


def compile_on_miss(arch: str, cache: pathlib.Path | None = None) -> None:
    """Compiles the kernels of an architecture into the cache, in a process of its own.

    Raises:
      KernelMissing: where the compiler is not installed, or fails.
    """
    if arch not in ARCHITECTURES.values():
        raise KernelMissing(f"No kernels are written for {arch}.")
    try:
        importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        raise KernelMissing(f"{COMPILER} is not installed, so none was compiled.") from None
    folder = cache or store.default_cache()
    logging.warning(
        "jax_dsa: compiling the kernels of %s into %s, once; this takes a minute or more. Done"
        " beforehand by: %s", arch, folder, command(arch),
    )  # fmt: skip
    script = sources.PACKAGE / "aot" / "alone.py"
    job = [sys.executable, str(script), "jax_dsa.aot", "--arch", arch, "--out", str(folder)]
    done = subprocess.run(job, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise KernelMissing(f"compiling them failed: {done.stderr.strip() or done.stdout.strip()}")


@functools.cache
def default() -> Registry:
    """The registry of this process: the package's data, then the cache, then the compiler."""
    return Registry([DATA, store.default_cache()], compile_on_miss)


def find(arch: str, op: str, facts: Mapping[str, Any], *, build: bool = True) -> Found:
    """``Registry.find`` of ``default()``."""
    return default().find(arch, op, facts, build=build)


def reason(arch: str, op: str, facts: Mapping[str, Any], *, build: bool = False) -> str | None:
    """``Registry.reason`` of ``default()``."""
    return default().reason(arch, op, facts, build=build)


def entries(arch: str, *, build: bool = True) -> tuple[Found, ...]:
    """``Registry.entries`` of ``default()``."""
    return default().entries(arch, build=build)


def archs() -> tuple[str, ...]:
    """``Registry.archs`` of ``default()``."""
    return default().archs()
