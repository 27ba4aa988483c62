"""Uses of barriers that work by luck: phases that a parity cannot tell apart, one lane that speaks
for its warp.
"""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.barriers import Mbarrier
from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.observers.faults import add_new
from jax_dsa.emulator.report import Fault, Report, Site


class BarrierUse(Observer):
    """Fills faults of kind "barrier" and the single-lane lint."""

    def __init__(self, lints: bool):
        self.faults: dict[tuple, Fault] = {}
        self.lints: dict[tuple, Fault] = {}
        self.want_lints = lints
        self.seen: dict[tuple, int] = {}
        self.touched: dict[object, np.ndarray] = {}

    def launch(self, machine) -> None:
        self.seen.clear()
        self.touched.clear()

    def observe(self, group, barrier, phase: int, ins) -> None:
        """Waiting for phase n by parity must not find phase n + 2: the two look alike."""
        if not isinstance(barrier, Mbarrier):
            return
        key = (group.warp, barrier)
        last = self.seen.get(key)
        self.seen[key] = phase
        if last is not None and phase - last >= 2:
            site = Site.of(group, ins)
            text = (
                f"after phase {last} of {barrier} it saw phase {phase}: the barrier ran ahead,"
                f" and parity alone does"
                " not tell the two apart"
            )
            self.faults.setdefault((site.line, site.warp), Fault("barrier", site, text))

    def access(self, agent, ins, memory, cells, kind: str) -> None:
        if isinstance(agent, Op):
            return
        touched = self.touched.get(agent.warp)
        self.touched[agent.warp] = agent.mask if touched is None else touched | agent.mask

    def synchronise(self, group, ins) -> None:
        self.touched[group.warp] = np.zeros(32, bool)

    def arrive(self, agent, barrier, phase: int, ins) -> None:
        """Lint: lanes that have accessed memory and do not arrive themselves are not ordered by the
        arrival.
        """
        if isinstance(agent, Op) or not isinstance(barrier, Mbarrier) or not self.want_lints:
            return
        silent = self.touched.get(agent.warp)
        if silent is not None and (silent & ~agent.mask).any():
            site = Site.of(agent, ins)
            text = (
                "one lane arrives for its warp, whose other lanes accessed memory since the"
                " last warp-level barrier"
            )
            self.lints.setdefault((site.line, site.role), Fault("single-lane arrive", site, text))

    def fresh(self) -> BarrierUse:
        return BarrierUse(self.want_lints)

    def hand_over(self) -> tuple:
        return self.faults, self.lints

    def adopt(self, found: tuple, machine, touched) -> None:
        add_new(self.faults, found[0])
        add_new(self.lints, found[1])

    def fill(self, report: Report) -> None:
        report.faults = (*report.faults, *self.faults.values())
        report.lints = (*report.lints, *self.lints.values())
