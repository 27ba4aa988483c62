"""Errors that need no history: out of bounds, misaligned, wrong use of barriers and tensor memory;
deadlocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.report import Fault, Report, Site


def add_new(known: dict, more: dict) -> None:
    """Findings of which the first one counts."""
    for key, value in more.items():
        known.setdefault(key, value)


class Faults(Observer):
    """Collects faults, each (kind, line, warp) once, with a count."""

    def __init__(self) -> None:
        self.collected: dict[tuple, Fault] = {}
        self.lints: dict[tuple, Fault] = {}
        self.deadlocks: list[str] = []
        self.stuck = False

    def fault(self, kind: str, agent, ins, text: str) -> None:
        site = Site.of(agent, ins)
        key = (kind, site.line, site.warp, site.cta)
        known = self.collected.get(key)
        self.collected[key] = (
            dataclasses.replace(known, count=known.count + 1) if known else Fault(kind, site, text)
        )

    def lint(self, kind: str, agent, ins, text: str) -> None:
        site = Site.of(agent, ins)
        self.lints.setdefault((kind, site.line, site.role), Fault(kind, site, text))

    def deadlock(self, machine, states: Sequence[str]) -> None:
        self.stuck = True
        self.deadlocks.append(
            f"{machine.code.kernel.name}: nobody can move\n  " + "\n  ".join(states)
        )

    def fresh(self) -> Faults:
        return Faults()

    def hand_over(self) -> tuple:
        return self.collected, self.lints, self.deadlocks

    def adopt(self, found: tuple, machine, touched) -> None:
        faults, lints, deadlocks = found
        self.collected.update(faults)  # their keys name the CTA
        add_new(self.lints, lints)
        self.deadlocks += deadlocks
        self.stuck = bool(self.deadlocks)

    def fill(self, report: Report) -> None:
        report.faults = (*report.faults, *self.collected.values())
        report.lints = (*report.lints, *self.lints.values())
        report.deadlocks = tuple(self.deadlocks)
