"""A folder of compiled kernels.

    <SHA-256 of the content>.cubin, .ptx     one pair per kernel, of the same compile
    <identity>.json                          a manifest of that one kernel

The identity is a hash of architecture, op, facts and source hash: kernels of several versions of
the package live in one folder, and a later build of the same kernel takes the place of the earlier.
Every file is written to a temporary name and renamed, the manifest last; so a reader needs no lock.
Writers hold ``Store.lock``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping

from jax_dsa.cubins import elf, manifest

LOCK = "build.lock"


def digest(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def identity(entry: manifest.Kernel) -> str:
    """What a kernel is called in a folder; equal for builds that may replace each other."""
    source = entry.hashes.get("source", "")
    facts = json.dumps(
        [entry.arch, entry.op, entry.module, dict(entry.facts), source], sort_keys=True
    )
    return digest(facts.encode())


class Store:
    """Compiled kernels in one folder, which need not exist."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = pathlib.Path(folder)

    def entries(self) -> tuple[list[manifest.Kernel], list[str]]:
        """All manifest entries, sorted by file name, and what is wrong with unreadable ones."""
        found, problems = [], []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                found += manifest.Manifest.from_json(path.read_text()).kernels
            except FileNotFoundError:  # replaced or removed since it was listed
                continue
            except (OSError, UnicodeDecodeError, manifest.ManifestError) as error:
                problems.append(f"{path}: {error}")
        return found, problems

    def cubin(self, entry: manifest.Kernel) -> bytes:
        """The machine code of an entry, checked.

        Raises:
          CubinError: when it is missing, truncated, altered, of another architecture, or without
            the kernel; it names the file.
        """
        path = self.path(entry, "cubin")
        data = _read(path)
        try:
            found = elf.read(data)
        except elf.CubinError as error:
            self._check_hash(entry, "cubin", data, f" ({error})")
            raise elf.CubinError(f"{path}: {error}.") from None
        self._check_hash(entry, "cubin", data)
        if not found.serves(entry.arch):
            raise elf.CubinError(f"{path}: compiled for {found.arch}, not for {entry.arch}.")
        if entry.symbol not in found.kernels:
            raise elf.CubinError(f"{path}: has no kernel {entry.symbol}, but {[*found.kernels]}.")
        return data

    def ptx(self, entry: manifest.Kernel) -> str:
        """The PTX of an entry, checked against its hash.

        Raises:
          CubinError: when it is missing or altered.
        """
        data = _read(self.path(entry, "ptx"))
        self._check_hash(entry, "ptx", data)
        return data.decode()

    def path(self, entry: manifest.Kernel, suffix: str) -> pathlib.Path:
        """Where the file of an entry lies; suffix "cubin" or "ptx"."""
        return self.folder / f"{entry.hashes.get(suffix, 'none')}.{suffix}"

    def _check_hash(self, entry: manifest.Kernel, suffix: str, data: bytes, how: str = "") -> None:
        if digest(data) != entry.hashes.get(suffix):
            path = self.path(entry, suffix)
            raise elf.CubinError(f"{path}: altered{how}, its SHA-256 is now {digest(data)}.")

    def add(self, entry: manifest.Kernel, cubin: bytes, ptx: str) -> manifest.Kernel:
        """Writes a kernel; returns its entry with the hashes of both files."""
        content = {"cubin": cubin, "ptx": ptx.encode()}
        hashes = dict(entry.hashes) | {suffix: digest(data) for suffix, data in content.items()}
        entry = dataclasses.replace(entry, hashes=hashes)
        self.folder.mkdir(parents=True, exist_ok=True)
        for suffix, data in content.items():
            self._write(self.path(entry, suffix), data)
        text = manifest.Manifest([entry]).to_json()
        self._write(self.folder / f"{identity(entry)}.json", text.encode())
        return entry

    def prune(self, keep: Callable[[manifest.Kernel], bool]) -> None:
        """Removes the entries that ``keep`` refuses, unreadable ones, and files of no entry."""
        kept = [entry for entry in self.entries()[0] if keep(entry)]
        names = {f"{identity(entry)}.json" for entry in kept}
        names |= {self.path(entry, suffix).name for entry in kept for suffix in ("cubin", "ptx")}
        for suffix in ("json", "cubin", "ptx", "tmp"):
            for path in self.folder.glob(f"*.{suffix}"):
                if path.name not in names:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the folder against other processes; calls ``waiting`` if another holds it.

        The system drops the lock when its holder ends, however it ends.
        """
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            pathlib.Path(name).chmod(0o644)
            pathlib.Path(name).replace(path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise elf.CubinError(f"{path}: missing.") from None
    except OSError as error:
        raise elf.CubinError(f"{path}: cannot be read: {error.strerror}.") from None


def default_cache(environment: Mapping[str, str] = os.environ) -> pathlib.Path:
    """JAX_DSA_CACHE_DIR, or ``jax_dsa`` in the user's cache directory."""
    chosen = environment.get("JAX_DSA_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "jax_dsa"
