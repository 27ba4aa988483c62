"""A picture of a timeline: a row per warp and engine, waits pale, operations dark, races as red
lines.
"""

from __future__ import annotations

import importlib.util
import pathlib

from jax_dsa.emulator.report import Report

_COLOURS = {
    "wait": "#d9dfe8",
    "mma": "#1f5fa8",
    "cp": "#4c8fd6",
    "ld": "#2d8f5b",
    "st": "#7cc79a",
    "bulk": "#b8762a",
}
_COLOURS |= {"copy": "#d8a657", "arrive": "#8a5fb0"}
_OTHER = "#9aa3ad"


def draw(report: Report, path: pathlib.Path, cta: str | None = None) -> bool:
    """Draws one CTA's timeline; False (and nothing written) when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None or not report.timeline:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = _busiest(report, cta)
    tracks = sorted({s["track"] for s in chosen})
    figure, axes = pyplot.subplots(figsize=(14, 0.32 * len(tracks) + 1.6))
    for (track, name), spans in sorted(
        _spans(chosen).items(), key=lambda item: item[0][1] != "wait"
    ):
        row = tracks.index(track)
        axes.broken_barh(spans, (row - 0.4, 0.8), color=_COLOURS.get(name, _OTHER))
    _mark_races(axes, report, chosen)
    axes.set_yticks(range(len(tracks)), tracks, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("scheduler steps")
    axes.set_title(f"CTA {chosen[0]['cta']}: {len(report.races)} races")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _spans(slices: list[dict]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(start, width) pairs by track and kind: one drawing call each."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for s in slices:
        found.setdefault((s["track"], s["name"]), []).append(
            (s["start"], max(s["stop"] - s["start"], 1))
        )
    return found


def _busiest(report: Report, cta: str | None) -> list[dict]:
    """The slices of one CTA of the longest kernel: those after the last restart of its warps."""
    names = [s["cta"] for s in report.timeline]
    wanted = cta or max(set(names), key=names.count)
    return [
        s
        for s in report.timeline
        if s["cta"] == wanted and s["start"] >= _main_start(report, wanted)
    ]


def _main_start(report: Report, cta: str) -> int:
    """Where the first tensor-core work of the CTA's run begins, less its prologue."""
    slices = [s for s in report.timeline if s["cta"] == cta]
    engines = [s["start"] for s in slices if s["track"].startswith("engine tcgen05")]
    if not engines:
        return 0
    return (
        max(
            s["start"]
            for s in slices
            if s["start"] <= min(engines) and s["track"].startswith("warp")
        )
        - 3000
    )


def _mark_races(axes, report: Report, chosen: list[dict]) -> None:
    """Red where the instructions of a race run on their engine."""
    texts = {r.second.text for r in report.races} | {r.first.text for r in report.races}
    starts = {
        s["start"] for s in chosen if s["detail"] in texts and s["track"].startswith("engine")
    }
    axes.vlines(sorted(starts), *axes.get_ylim(), color="#c0392b", linewidth=0.5, alpha=0.6)
