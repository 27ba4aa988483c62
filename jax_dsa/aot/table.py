"""What ``python -m jax_dsa.aot`` prints: a progress bar, and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jax_dsa.aot import builder
from jax_dsa.cubins import elf, manifest, store

COLUMNS: tuple[str, ...] = ("kernel", "cubin", "registers", "frame", "shared", "threads", "")


class Progress:
    """A bar on the standard error output, where tqdm is installed; else one line."""

    def __init__(self):
        self.bar, self.told = None, False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int) -> None:
        if total and not self.told:
            self.bar, self.told = _bar(total), True
        if self.bar is not None:
            self.bar.update(done - self.bar.n)


def _bar(total: int):
    try:
        import tqdm
    except ImportError:
        print(f"compiling {total} kernels", file=sys.stderr, flush=True)
        return None
    return tqdm.tqdm(total=total, desc="compiling", unit="kernel")


def report(found: builder.Report) -> str:
    """The table of a build, the folder and what the compiler newly said."""
    lines = [
        row_of(r.entry, r.size, f"{r.seconds:.1f} s" if r.built else "up to date")
        for r in found.rows
    ]
    built = sum(row.built for row in found.rows)
    news = [f"new: {builder.title(r.entry)}: {text}" for r in found.rows for text in r.news]
    tail = f"{built} compiled, {len(found.rows) - built} up to date, in {found.folder}"
    return "\n".join([render([COLUMNS, *lines]), *news, tail])


def listing(
    archs: Sequence[str], folder: store.Store, modules: Sequence[str] | None, opt_level: int
) -> str:
    """What a folder has for some architectures and, with a compiler, what it lacks."""
    entries, problems = folder.entries()
    lines, fresh = [COLUMNS], None
    if builder.available() is not None:
        plans = [p for arch in archs for p in builder.plan_all(arch, modules, opt_level)]
        fresh = {store.identity(plan.entry): plan.entry for plan in plans}
    for entry in entries:
        if entry.arch in archs:
            lines.append(_state(folder, entry, fresh))
    there = {store.identity(entry) for entry in entries}
    for name, entry in (fresh or {}).items():
        if name not in there:
            lines.append(row_of(entry, None, "not compiled"))
    hint = [] if fresh is not None else [f"{builder.DISTRIBUTION} is not installed"]
    return "\n".join([render(lines), *problems, *hint, f"in {folder.folder}"])


def _state(folder: store.Store, entry: manifest.Kernel, fresh: dict | None) -> tuple[str, ...]:
    try:
        size, state = len(folder.cubin(entry)), "up to date"
    except elf.CubinError as error:
        return row_of(entry, None, f"damaged: {error}")
    if fresh is None:
        state = "compiled"
    elif store.identity(entry) not in fresh:
        state = "from other sources"
    elif fresh[store.identity(entry)].hashes["build"] != entry.hashes.get("build"):
        state = "from other tools or options"
    return row_of(entry, size, state)


def row_of(entry: manifest.Kernel, size: int | None, state: str) -> tuple[str, ...]:
    """One kernel: name, KiB of cubin, registers, bytes of frame, KiB of shared memory, threads."""
    x, y, z = entry.block
    known = lambda value, unit="": "-" if value is None else f"{value}{unit}"  # noqa: E731
    return (
        builder.title(entry),
        "-" if size is None else f"{size / 1024:.1f} KiB",
        known(entry.registers),
        known(entry.stack_frame, " B"),
        f"{entry.dynamic_shared_bytes / 1024:.1f} KiB",
        str(x * y * z),
        state,
    )


def render(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left, numbers to the right, the last as it is."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    rows = []
    for first, *middle, last in lines:
        numbers = [cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=True)]
        rows.append("  ".join([first.ljust(widths[0]), *numbers, last]).rstrip())
    return "\n".join(rows)
