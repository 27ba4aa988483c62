"""Results as a Markdown table and as a picture."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jax_dsa.bench.programs import KINDS

HEAD = "| shape | pass | implementation | ms (min-max) | speed (rounds) | TFLOP/s | temp MiB |"


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each shape, pass and name; speeds refer to the pass's first row."""
    lines = [HEAD, "|---|---|---|---|---|---|---|"]
    lines += [_line(result["shape"], row) for result in results for row in result["rows"]]
    return "\n".join(lines)


def _line(shape: str, row: dict[str, Any]) -> str:
    title = f"| {shape} | {row['kind']} | {row['name']} |"
    if "error" in row:
        return f"{title} {row['error'][:60]} | | | |"
    temp = "" if row["temp_mib"] is None else f"{row['temp_mib']:.0f}"
    return (
        f"{title} {row['ms']:.2f} ({row['low_ms']:.2f}-{row['high_ms']:.2f}) "
        f"| {row['speed']:.2f} x ({row['low_speed']:.2f}-{row['high_speed']:.2f}) "
        f"| {row['tflops']:.3g} | {temp} |"
    )


def plot(results: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Bars of the medians, a panel for each shape and pass."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'jax_dsa[examples]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results), 3, figsize=(12, 2 + 1.5 * len(results)), squeeze=False
    )
    for line, result in zip(axes, results, strict=True):
        for ax, kind in zip(line, KINDS, strict=True):
            rows = [r for r in result["rows"] if r["kind"] == kind and "ms" in r]
            ax.barh([r["name"] for r in rows], [r["ms"] for r in rows])
            ax.set_title(f"{result['shape']} {kind}", fontsize=9)
            ax.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
