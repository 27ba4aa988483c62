"""What ran when: a track per warp and per engine, a slice per wait and per operation; scheduler
steps are the time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.report import Report

LIMIT = 200_000  # slices of one run; later ones are dropped


class Timeline(Observer):
    """Fills Report.timeline with slices: cta, track, name, start, stop, detail."""

    def __init__(self) -> None:
        self.slices: list[dict] = []
        self.began: dict[object, tuple[int, str]] = {}
        self.offset = 0

    def launch(self, machine) -> None:
        self.machine = machine

    def _now(self) -> int:
        return self.offset + self.machine.now

    def _add(self, cta, track: str, name: str, start: int, stop: int, detail: str) -> None:
        if len(self.slices) < LIMIT:
            self.slices.append(
                {
                    "cta": str(cta),
                    "track": track,
                    "name": name,
                    "start": start,
                    "stop": stop,
                    "detail": detail,
                }
            )

    def block(self, group, why: str) -> None:
        self.began[group] = (self._now(), why)

    def resume(self, group) -> None:
        start, why = self.began.pop(group, (self._now(), ""))
        self._add(group.cta, _track(group), "wait", start, max(self._now(), start + 1), why)

    def issue(self, op) -> None:
        self.began[op] = (self._now(), op.ins.text)
        self._add(op.cta, _track(op.group), op.kind, self._now(), self._now() + 1, str(op.ins))

    def finish(self, op) -> None:
        start, text = self.began.pop(op, (self._now(), ""))
        self._add(op.cta, f"engine {op.family}", op.kind, start, max(self._now(), start + 1), text)

    def arrive(self, agent, barrier, phase: int, ins) -> None:
        if not hasattr(agent, "ins"):
            self._add(
                agent.cta,
                _track(agent),
                "arrive",
                self._now(),
                self._now() + 1,
                f"{barrier}, phase {phase}",
            )

    def end(self, machine) -> None:
        self.offset += machine.now

    def fresh(self) -> Timeline:
        return Timeline()

    def hand_over(self) -> list[dict]:
        return self.slices

    def adopt(self, found: list[dict], machine, touched) -> None:
        now = self._now()
        for s in found[: LIMIT - len(self.slices)]:
            self.slices.append(s | {"start": s["start"] + now, "stop": s["stop"] + now})

    def fill(self, report: Report) -> None:
        report.timeline = self.slices


def _track(group) -> str:
    role = group.warp.role
    return f"warp {group.warp.index:02d}" + (f" {role}" if role else "")


def chrome_trace(slices: Sequence[dict]) -> str:
    """JSON for Perfetto or chrome://tracing."""
    tracks: dict[tuple[str, str], int] = {}
    events = []
    for s in slices:
        tid = tracks.setdefault((s["cta"], s["track"]), len(tracks) + 1)
        events.append(
            {
                "name": s["name"],
                "ph": "X",
                "ts": s["start"],
                "dur": s["stop"] - s["start"],
                "pid": s["cta"],
                "tid": tid,
                "args": {"detail": s["detail"]},
            }  # fmt: skip
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": cta, "tid": tid, "args": {"name": track}}
        for (cta, track), tid in tracks.items()
    ]
    return json.dumps({"traceEvents": names + events})
