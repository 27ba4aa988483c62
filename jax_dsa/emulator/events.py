"""What the machine tells observers. The machine does not know who listens, and pays nothing when
nobody does.

An *agent* is a ``warps.Group`` (lanes of a warp that run together) or an ``engines.Op``
(asynchronous work).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

READ, WRITE, ATOMIC = "read", "write", "atomic"
ATOMIC_READ, ATOMIC_WRITE = "atomic read", "atomic write"


class Observer:
    """Override what you want to hear; ``ins`` is always the ``ptx.Instruction`` at work.

    An observer whose findings can be joined over processes (``parallel``) also has ``fresh()``, one
    like it for a single CTA, ``hand_over()``, what that one found, without references to the
    machine, and ``adopt(found, machine, touched)``, which adds what the next CTA's found.
    """

    def launch(self, machine) -> None:
        """A kernel starts: all earlier work is complete and visible."""

    def execute(self, group, pc: int) -> None:
        """The group runs the straight piece of code that starts at pc."""

    def access(self, agent, ins, memory, cells, kind: str) -> None:
        """The agent touches cells (slice or array) of a memory: READ, WRITE, ATOMIC (both),
        ATOMIC_READ or ATOMIC_WRITE.
        """

    def update(self, memory, form: tuple, index, operands) -> None:
        """An atomic was carried out: ``form`` is (operation, type, type of elements, elements per
        row).
        """

    def issue(self, op) -> None:
        """Asynchronous work was started by op.group."""

    def finish(self, op) -> None:
        """The work was carried out (nobody knows yet)."""

    def arrive(self, agent, barrier, phase: int, ins) -> None:
        """What the agent did so far is published to this phase of the barrier."""

    def observe(self, group, barrier, phase: int, ins) -> None:
        """The group learned that this phase of the barrier is complete."""

    def relaxed(self, group, flag, writes: bool, ins) -> None:
        """A relaxed atomic on a flag: an edge only with fences (kind "memory") around it."""

    def use(self, agent, barrier, ins) -> None:
        """An mbarrier was used (it must have been initialised before)."""

    def wait(self, group, family: str, ops: Sequence, ins, everything: bool) -> None:
        """The group learned that these operations are complete; ``everything``: all that it started
        in the family.

        Family "bulk.read" means that their sources have been read.
        """

    def commit(self, group, family: str, ins) -> None:
        """The group closed its group of copies of this family."""

    def fence(self, group, kind: str, ins) -> None:
        """Kinds: proxy.async, tcgen05.before, tcgen05.after, wgmma, memory."""

    def split(self, parent, child) -> None:
        """Lanes left the group and run on as ``child``."""

    def merge(self, parent, child) -> None:
        """The lanes of ``child`` came back."""

    def synchronise(self, group, ins) -> None:
        """A warp-level synchronisation that orders memory (bar.warp.sync, CTA barriers)."""

    def block(self, group, why: str) -> None:
        """The group waits."""

    def resume(self, group) -> None:
        """The group goes on."""

    def fault(self, kind: str, agent, ins, text: str) -> None:
        """The program did something that is an error by itself."""

    def lint(self, kind: str, agent, ins, text: str) -> None:
        """The program did something that is legal and that strict code avoids."""

    def leave(self, cta) -> None:
        """All warps of a CTA have ended."""

    def deadlock(self, machine, states: Sequence[str]) -> None:
        """Nobody can move."""

    def end(self, machine) -> None:
        """The kernel is over."""

    def fill(self, report) -> None:
        """Adds what was found to the report; called once, after the last launch."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_") and name != "fill")


class Bus:
    """One attribute per event: None, a bound method, or a fan-out over several."""

    def __init__(self, observers: Sequence[Observer]):
        for name in EVENTS:
            listeners = [getattr(o, name) for o in observers if _overrides(o, name)]
            setattr(self, name, _fan_out(listeners))

    def __getattr__(
        self, name: str
    ) -> Any:  # attributes are set in __init__; this is for type checkers
        raise AttributeError(name)


def _overrides(observer: Observer, name: str) -> bool:
    return getattr(type(observer), name) is not getattr(Observer, name)


def _fan_out(listeners: list[Callable]) -> Callable | None:
    if len(listeners) < 2:
        return listeners[0] if listeners else None

    def tell(*args):
        for listener in listeners:
            listener(*args)

    return tell
