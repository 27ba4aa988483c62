"""What a run found, as data."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_dsa.emulator.memory import describe


@dataclasses.dataclass(frozen=True)
class Site:
    """Who did it: instruction text and PTX line, warp and role, CTA; ``engine`` names asynchronous
    work.
    """

    line: int
    text: str
    warp: int
    role: str
    cta: str
    engine: str = ""

    @classmethod
    def of(cls, agent, ins) -> Site:
        """The site of an agent of events.py at an instruction."""
        group = getattr(agent, "group", agent)
        warp = group.warp
        return cls(
            ins.line, ins.text, warp.index, warp.role, str(warp.cta), getattr(agent, "kind", "")
        )

    def __str__(self) -> str:
        who = f"warp {self.warp}" + (f" ({self.role})" if self.role else "")
        return f"line {self.line} `{self.text}` of {who}, CTA {self.cta}"


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses that must be ordered and are not.

    Attributes:
      space: "shared", "tensor", "global" or "registers" (of wgmma); where: bytes, columns or names.
      cells: the cell numbers; kinds: e.g. ("read", "write"), in the order in which they ran here.
      first, second: the two sites; missing: which edge is missing, in words; count: how often this
      pair was seen.
    """

    space: str
    where: str
    cells: tuple[int, ...]
    kinds: tuple[str, str]
    first: Site
    second: Site
    missing: str
    count: int = 1

    def again(self, name: str, cells, count: int = 1) -> Race:
        """The race when it was found ``count`` times more, on ``cells`` of the memory ``name``."""
        union = np.union1d(self.cells, cells)
        where = describe(self.space, name, union)
        count += self.count
        return dataclasses.replace(self, cells=tuple(union.tolist()), where=where, count=count)

    def __str__(self) -> str:
        return (
            f"{self.kinds[0]} then {self.kinds[1]} of {self.where}\n    {self.first}\n   "
            f" {self.second}\n    {self.missing}"
        )


@dataclasses.dataclass(frozen=True)
class Fault:
    """An error by itself.

    kind: "out of bounds", "misaligned", "uninitialised", "tensor memory", "tensor core", "barrier",
      "warp", "warpgroup",
    "async at exit".
    """

    kind: str
    site: Site
    text: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n    {self.site}"


@dataclasses.dataclass
class Report:
    """The findings of one run; empty tuples mean that nothing was found.

    Attributes:
      races, faults, lints: see the classes; deadlocks: one text per launch that hung, naming who
      waits on what.
      coverage: kernel -> PTX lines that were never executed.
      steps: scheduler steps; timeline: events for ``timeline.chrome_trace``.
    """

    races: tuple[Race, ...] = ()
    faults: tuple[Fault, ...] = ()
    lints: tuple[Fault, ...] = ()
    deadlocks: tuple[str, ...] = ()
    coverage: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    steps: int = 0
    timeline: list[dict] = dataclasses.field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True when there is no race, no fault and no deadlock (lints do not count)."""
        return not (self.races or self.faults or self.deadlocks)

    def __str__(self) -> str:
        parts = [f"race: {r}" for r in self.races] + [str(f) for f in self.faults]
        parts += [f"deadlock: {d}" for d in self.deadlocks] + [f"lint: {f}" for f in self.lints]
        return "\n".join(parts) or "clean"
