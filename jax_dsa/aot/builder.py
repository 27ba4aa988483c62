"""Builds what is missing or out of date in a folder of compiled kernels."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from jax_dsa.aot import checks
from jax_dsa.cubins import elf, manifest, sources, store

# Architecture -> the modules whose KERNELS are compiled for it.
MODULES = {"sm_90a": ("jax_dsa.kernels.sm90.forward", "jax_dsa.kernels.sm90.backward")}
DISTRIBUTION = "nvidia-cutlass-dsl"
WORKER = (sys.executable, str(pathlib.Path(__file__).with_name("alone.py")), "jax_dsa.aot.worker")
LOG_LINES = 30  # of a failed compile, shown in the error


class BuildError(RuntimeError):
    """Kernels that could not be compiled or must not be kept; names each with its reasons."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of a build: its entry, compiled now or kept, seconds it took, cubin's bytes.

    ``news`` are messages of the compiler that the previous build of this kernel did not have.
    """

    entry: manifest.Kernel
    built: bool
    seconds: float
    size: int
    news: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All kernels of a build and the folder they are in."""

    folder: pathlib.Path
    rows: Sequence[Row]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel to be compiled: where its source is, and its entry with the hashes that are known
    before it is compiled."""

    index: int
    entry: manifest.Kernel
    opt_level: int


def available() -> str | None:
    """The version of the compiler, or None where it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def build(
    archs: Iterable[str],
    out: str | os.PathLike[str] | None = None,
    *,
    modules: Sequence[str] | None = None,
    opt_level: int = 3,
    jobs: int | None = None,
    force: bool = False,
    prune: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    waiting: Callable[[], None] = lambda: None,
    worker: Sequence[str] | None = None,
) -> Report:
    """Compiles the kernels of some architectures, those that ``out`` has not yet.

    Args:
      archs: keys of MODULES.
      out: folder; None is the one that ``jax_dsa`` looks into (JAX_DSA_CACHE_DIR).
      modules: instead of those in MODULES.
      opt_level: of ptxas, 0 to 3.
      jobs: compilers at a time; None is one per core.
      force: also what is up to date.
      prune: remove from ``out`` everything else.
      progress: called with (kernels done, kernels to compile).
      waiting: called when another process builds in the folder and is waited for.
      worker: the command that runs ``aot.worker``; None is WORKER.

    Raises:
      BuildError: when the compiler is not installed, an architecture is unknown, or kernels failed;
        those that did not fail are in ``out``.
    """
    if worker is None and available() is None:
        raise BuildError(
            f"compiling needs {DISTRIBUTION}, which is not installed:"
            " pip install 'jax_dsa[kernels]'."
        )
    plans = [plan for arch in archs for plan in plan_all(arch, modules, opt_level, worker)]
    folder = store.Store(out if out is not None else store.default_cache())
    with _writable(folder), folder.lock(waiting):
        old = {store.identity(entry): entry for entry in folder.entries()[0]}
        kept = [None if force else _kept(folder, old, plan) for plan in plans]
        todo = [plan for plan, row in zip(plans, kept, strict=True) if row is None]
        rows, failures = _compile_all(folder, todo, jobs or os.cpu_count() or 1, progress, worker)
        rows += [row for row in kept if row is not None]
        if prune:
            ours = {store.identity(plan.entry) for plan in plans}
            folder.prune(lambda entry: store.identity(entry) in ours)
    if failures:
        raise BuildError(f"{len(failures)} of {len(plans)} kernels failed\n" + "\n".join(failures))
    rows = [_with_news(row, old) for row in rows]
    return Report(folder.folder, sorted(rows, key=lambda row: title(row.entry)))


def title(entry: manifest.Kernel) -> str:
    """E.g. "sm_90a backward head_dim=576 value_dim=512 dtype=bfloat16"."""
    facts = " ".join(f"{name}={value}" for name, value in entry.facts.items())
    return f"{entry.arch} {entry.op} {facts}"


def plan_all(
    arch: str, modules: Sequence[str] | None = None, opt_level: int = 3,
    worker: Sequence[str] | None = None,
) -> list[Plan]:  # fmt: skip
    """The kernels of an architecture, with their "source" and "build" hashes.

    Raises:
      BuildError: for an unknown architecture, a module that cannot be imported, or two kernels that
        serve the same facts.
    """
    if modules is None and arch not in MODULES:
        raise BuildError(f"no kernels for {arch}; there are kernels for {', '.join(MODULES)}.")
    with tempfile.TemporaryDirectory() as scratch:
        answer = pathlib.Path(scratch) / "described.json"
        names = MODULES[arch] if modules is None else modules
        code, log = _run([*(worker or WORKER), "describe", str(answer), arch, *names])
        if code:
            raise BuildError(f"the kernels of {arch} cannot be listed: {_failure(code, log)}")
        described = json.loads(answer.read_text())
    plans = [_plan(item, described["tools"], opt_level) for item in described["kernels"]]
    for plan in plans:
        twins = [p for p in plans if _serves(p.entry) == _serves(plan.entry)]
        if len(twins) > 1:
            raise BuildError(f"{len(twins)} kernels serve {title(plan.entry)}; one must.")
    return plans


def _serves(entry: manifest.Kernel) -> tuple:
    return entry.arch, entry.op, tuple(sorted(entry.facts.items()))


def _plan(item: dict, tools: dict[str, str], opt_level: int) -> Plan:
    entry = manifest.kernel_from_dict(item["entry"])
    source = sources.source_hash(entry.module)
    compiler = sources.source_hash("jax_dsa.aot.worker")
    facts = [item["entry"], item["index"], source, compiler, tools, opt_level]
    build_hash = store.digest(json.dumps(facts, sort_keys=True).encode())
    hashes = {"source": source, "build": build_hash}
    return Plan(item["index"], dataclasses.replace(entry, hashes=hashes, tools=tools), opt_level)


def _kept(folder: store.Store, old: dict, plan: Plan) -> Row | None:
    """The row of a kernel that need not be compiled."""
    found = old.get(store.identity(plan.entry))
    if found is None or found.hashes.get("build") != plan.entry.hashes["build"]:
        return None
    try:
        folder.ptx(found)
        return Row(found, False, 0.0, len(folder.cubin(found)))
    except elf.CubinError:
        return None


def _compile_all(folder, plans, jobs, progress, worker) -> tuple[list[Row], list[str]]:
    rows, failures = [], []
    progress(0, len(plans))
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        work = functools.partial(_compile, folder, worker=worker)
        running = {pool.submit(work, plan): plan for plan in plans}
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            try:
                rows.append(future.result())
            except checks.Refused as error:
                lines = "\n".join(f"  {line}" for line in str(error).splitlines())
                failures.append(f"{title(running[future].entry)}:\n{lines}")
            progress(done, len(plans))
    return rows, sorted(failures)


def _compile(folder: store.Store, plan: Plan, *, worker: Sequence[str] | None) -> Row:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        job = [scratch, plan.entry.arch, plan.entry.module, str(plan.index), str(plan.opt_level)]
        code, log = _run([*(worker or WORKER), "compile", *job])
        if code:
            raise checks.Refused(_failure(code, log))
        results = [pathlib.Path(scratch) / f"kernel.{suffix}" for suffix in ("cubin", "ptx")]
        if not all(path.is_file() for path in results):
            raise checks.Refused(_failure(code, log) + "\nbut it left no cubin or no PTX")
        cubin, ptx = results[0].read_bytes(), results[1].read_text()
    entry = folder.add(checks.complete(plan.entry, cubin, ptx, log), cubin, ptx)
    return Row(entry, True, time.monotonic() - start, len(cubin))


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout.decode(errors="replace")


def _failure(code: int, log: str) -> str:
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join([f"the compiler's process: {how}", *log.splitlines()[-LOG_LINES:]])


def _with_news(row: Row, old: dict[str, manifest.Kernel]) -> Row:
    """Compares messages with the previous build of the same kernel, whatever its sources."""
    before = [e for e in old.values() if _serves(e) == _serves(row.entry)]
    if not row.built:
        return row
    known = {message for entry in before for message in entry.messages}
    return dataclasses.replace(row, news=tuple(m for m in row.entry.messages if m not in known))


@contextlib.contextmanager
def _writable(folder: store.Store) -> Iterator[None]:
    """Turns a folder that cannot be written into a BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"cannot write to {folder.folder}: {error.strerror or error}. Choose another folder"
            " with --out or JAX_DSA_CACHE_DIR."
        ) from error
