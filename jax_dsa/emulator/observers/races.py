"""Happens-before: clocks for every agent, barriers with one clock per phase, shadows for every
memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import ATOMIC, ATOMIC_READ, ATOMIC_WRITE, READ, WRITE, Observer
from jax_dsa.emulator.memory import describe
from jax_dsa.emulator.observers import clocks
from jax_dsa.emulator.observers.clocks import (
    AFTER,
    BEFORE,
    GLOBAL,
    ORDER,
    SHARED,
    Clock,
    Components,
)
from jax_dsa.emulator.observers.faults import add_new
from jax_dsa.emulator.observers.shadow import Conflict, Shadow, Written, as_array
from jax_dsa.emulator.observers.words import missing_edge
from jax_dsa.emulator.report import Fault, Race, Report, Site

_WAITED = {
    "cp.async",
    "bulk",
    "tcgen05.ld",
    "tcgen05.st",
    "wgmma",
}  # families that complete in issue order
_TENSOR_OPS = {"mma", "cp", "ld", "st"}
_CHECKS = {
    READ: "read", WRITE: "write", ATOMIC: "update", ATOMIC_READ: "load", ATOMIC_WRITE: "update",
}  # fmt: skip
_PROXY_ROW = {"shared": SHARED, "global": GLOBAL, "tensor": ORDER}


@dataclasses.dataclass
class Work:
    """Clocks of one asynchronous operation.

    ``clock``: what it may rely on; ``done``: what a waiter learns; ``issued``: (component, tick) of
      its issuer then;
    ``component`` of its accesses, ``sources`` of its source reads where those are waited for alone.
    """

    clock: Clock
    done: Clock
    issued: tuple[int, int]
    component: int
    sources: int = -1
    tick: int = 0


class Races(Observer):
    """Fills Report.races, the uninitialised reads, work left at exit, and the lints on tcgen05
    fences.
    """

    def __init__(self, lints: bool = True):
        self.races: dict[tuple, Race] = {}
        self.faults: dict[tuple, Fault] = {}
        self.lints: dict[tuple, Fault] = {}
        self.names: dict[tuple, str] = {}  # of the memory of each race's latest finding
        self.want_lints = lints
        self.shadows: dict[int, tuple[Any, Shadow]] = {}  # by id of the memory, kept with it

    # -- agents -----------------------------------------------------------------------------------
    def launch(self, machine) -> None:
        self.components = Components()
        self.clock: dict[Any, Clock] = {}
        self.own: dict[object, int] = {}
        self.work: dict[Op, Work] = {}
        self.lines: dict[tuple, int] = {}
        self.pending: dict[tuple, Clock] = {}
        self.phases: dict[tuple, Clock] = {}
        self.inits: dict[object, tuple[int, int]] = {}
        self.fenced: dict[object, Clock] = {}
        self.flagged: dict[object, Clock] = {}
        for _, shadow in self.shadows.values():
            shadow.settle()

    def _of(self, group) -> Clock:
        """The clock of a group, made when it is first heard of."""
        found = self.clock.get(group)
        if found is None:
            found = self.clock[group] = Clock()
            self.own[group] = self.components.new(generic=True)
        return found

    def split(self, parent, child) -> None:
        self.clock[child] = self._of(parent).copy()
        self.own[child] = self.components.new(True, self.clock[child])

    def merge(self, parent, child) -> None:
        self._of(parent).join(self.clock.pop(child))
        self.components.release(self.own.pop(child))

    # -- asynchronous work
    # --------------------------------------------------------------------------
    def issue(self, op: Op) -> None:
        issuer = self._of(op.group)
        issuer.grow(len(self.components.history) + 1)  # copies of it need not grow then
        issued = (self.own[op.group], issuer.get(self.own[op.group]))
        if op.kind == "arrive":
            work = self._announcement(op, issuer, issued)
        elif op.kind == "mma":
            work = self._chained(op, issuer, issued)
        elif op.family in _WAITED or op.kind == "cp":
            work = self._queued(op, issuer, issued)
        else:
            component = self.components.new(False, issuer)
            work = Work(issuer.copy(), issuer.copy(), issued, component)
            self._done(work, op, component)
        self.work[op] = work

    def _done(self, work: Work, op: Op, component: int) -> None:
        work.tick = self.components.tick(component, op, op.ins)
        work.done.set(component, work.tick)

    def _line(self, op: Op, name: str, generic: bool) -> int:
        """The component of one queue of one warp."""
        key = (op.group.warp, name)
        if key not in self.lines:
            self.lines[key] = self.components.new(generic)
        return self.lines[key]

    def _remember(self, op: Op, name: str, done: Clock) -> None:
        key = (op.group.warp, name)
        if key in self.pending:
            self.pending[key].join(done)
        else:
            self.pending[key] = done.copy()

    def _queued(self, op: Op, issuer: Clock, issued) -> Work:
        """cp.async, tcgen05.ld/st/cp, bulk groups: unordered among themselves, complete for a
        waiter in issue order.
        """
        component = self._line(op, op.family + op.kind, op.kind == "copy")
        work = Work(issuer.copy(), issuer.copy(), issued, component)
        self._done(work, op, component)
        if op.family == "bulk":
            work.sources = self._line(op, "bulk.read", False)
            work.done.set(work.sources, self.components.tick(work.sources, op, op.ins))
        self._remember(op, op.family, work.done)
        if op.kind == "cp":
            self._remember(op, "cp", work.done)
        return work

    def _chained(self, op: Op, issuer: Clock, issued) -> Work:
        """Products on one accumulator run in issue order, and after the thread's earlier copies."""
        key = ("chain", op.chain)
        component = self._line(op, str(op.chain), False)
        chain = self.pending.setdefault(key, Clock())
        chain.join(issuer)
        copies = self.pending.get((op.group.warp, "cp"))
        if copies is not None:
            chain.join(copies)
        clock = chain.copy()
        clock.rows[AFTER, : issuer.rows.shape[1]] = issuer.rows[AFTER, : clock.rows.shape[1]]
        work = Work(clock, clock, issued, component)
        work.tick = self.components.tick(component, op, op.ins)
        clock.set(component, work.tick)
        chain.set(component, work.tick)
        self._remember(op, op.family, clock)
        return work

    def _announcement(self, op: Op, issuer: Clock, issued) -> Work:
        """commit and cp.async arrivals publish all earlier work of their family; commit includes a
        before fence.
        """
        clock = issuer.copy()
        earlier = self.pending.get((op.group.warp, op.family))
        if earlier is not None:
            clock.join(earlier)
        if op.family == "tcgen05":
            clock.fence(BEFORE)
        return Work(clock, clock, issued, 0)

    def wait(self, group, family: str, ops, ins, everything: bool) -> None:
        clock, sources_only = self._of(group), family == "bulk.read"
        for op in ops:
            work = self.work.get(op)
            if work is None:
                continue
            if sources_only:
                clock.set(work.sources, max(clock.get(work.sources), work.done.get(work.sources)))
            else:
                clock.join(work.done)
        if everything and not sources_only and (group.warp, family) in self.pending:
            clock.join(self.pending[group.warp, family])

    # -- edges ------------------------------------------------------------------------------------
    def arrive(self, agent, barrier, phase: int, ins) -> None:
        source = self.work[agent].done if isinstance(agent, Op) else self._of(agent)
        key = (barrier, phase)
        if key in self.phases:
            self.phases[key].join(source)
        else:
            self.phases[key] = source.copy()
        self.phases.pop((barrier, phase - 8), None)

    def observe(self, group, barrier, phase: int, ins) -> None:
        known = self.phases.get((barrier, phase))
        if known is not None:
            self._of(group).join(known)

    def relaxed(self, group, flag, writes: bool, ins) -> None:
        """fence; relaxed write -> relaxed read; fence (PTX ISA 8.8): the edge is made at the second
        fence.
        """
        key = (flag, 0)
        if not writes and key in self.phases:
            self.flagged.setdefault(group, Clock()).join(self.phases[key])
        elif writes and group in self.fenced:
            self.phases.setdefault(key, Clock()).join(self.fenced[group])

    def fence(self, group, kind: str, ins) -> None:
        clock = self._of(group)
        if kind == "memory":
            if group in self.flagged:
                clock.join(self.flagged[group])
            self.fenced[group] = clock.copy()
        if kind == "tcgen05.before":
            clock.fence(BEFORE)
        elif kind == "tcgen05.after":
            clock.fence(AFTER, BEFORE)
        elif kind.startswith("proxy.async"):
            for name, row in (("shared", SHARED), ("global", GLOBAL)):
                if kind.endswith((name, "all")):
                    clock.fence(row)

    def use(self, agent, barrier, ins) -> None:
        """Initialising an mbarrier is a write that every use must come after."""
        if isinstance(agent, Op):
            return
        made = self.inits.get((barrier.cta, barrier.address))
        if made is None or self._of(agent).get(made[0]) >= made[1]:
            return
        cells = np.arange(barrier.address >> 1, barrier.address + 8 >> 1)
        self._report(agent, ins, barrier.cta.shared, Conflict(WRITE, *made, cells), ATOMIC, ORDER)

    # -- accesses ---------------------------------------------------------------------------------
    def access(self, agent, ins, memory, cells, kind: str) -> None:
        shadow = self._shadow(memory)
        if isinstance(agent, Op):
            work = self.work[agent]
            row = ORDER if agent.kind == "copy" else _PROXY_ROW[memory.space]
            clock, component = work.clock, work.component
            if kind == READ and work.sources >= 0:
                component = work.sources
            tick = (
                len(self.components.history[component])
                if component != work.component
                else work.tick
            )
        else:
            clock, row, component = self._of(agent), ORDER, self.own[agent]
            tick = self.components.tick(component, agent, ins)
            clock.set(component, tick)
        found = shadow.written(cells)
        if kind not in (WRITE, ATOMIC_WRITE):
            self._unwritten(agent, ins, memory, found)
        if self.want_lints and memory.space == "tensor":
            self._strict(agent, ins, found, kind, clock, shadow)
        check = getattr(shadow, _CHECKS[kind])
        for conflict in check(found, component, tick, self.components.known(clock, row)):
            self._report(agent, ins, memory, conflict, kind, row)
        if ins.opcode.startswith("mbarrier.init"):
            self.inits[agent.cta, int(as_array(cells)[0]) * 2] = (component, tick)

    def _shadow(self, memory) -> Shadow:
        found = self.shadows.get(id(memory))
        if found is None:
            found = self.shadows[id(memory)] = (memory, Shadow(memory.cells, memory.initialised))
        return found[1]

    def _report(self, agent, ins, memory, conflict: Conflict, kind: str, row: int) -> None:
        first_agent, first_ins = self.components.who(conflict.component, conflict.tick)
        first, second = Site.of(first_agent, first_ins), Site.of(agent, ins)
        key = (memory.space, first.line, second.line, conflict.kind, kind)
        known = self.races.get(key)
        self.names[key] = memory.name
        if known is not None:
            self.races[key] = known.again(memory.name, conflict.cells)
            return
        clock = self.work[agent].clock if isinstance(agent, Op) else self._of(agent)
        issued = self.work[first_agent].issued if isinstance(first_agent, Op) else None
        missing = missing_edge(conflict, first_agent, agent, clock, issued, row)
        cells = np.unique(conflict.cells)
        where = describe(memory.space, memory.name, cells)
        kinds = (conflict.kind, kind)
        self.races[key] = Race(
            memory.space, where, tuple(cells.tolist()), kinds, first, second, missing
        )

    def _unwritten(self, agent, ins, memory, found: Written) -> None:
        missing = found.unwritten()
        if not missing.size:
            return
        site = Site.of(agent, ins)
        key = ("uninitialised", site.line, site.warp)
        known = self.faults.get(key)
        where = describe(memory.space, memory.name, np.unique(missing))
        text = f"reads {where}, which nobody has written"
        self.faults[key] = (
            dataclasses.replace(known, count=known.count + 1)
            if known
            else Fault(key[0], site, text)
        )

    def _strict(self, agent, ins, found: Written, kind: str, clock: Clock, shadow: Shadow) -> None:
        """Lint: tensor-memory work of another thread is ordered by barriers alone, without the pair
        of fences.
        """
        if not isinstance(agent, Op) or agent.kind not in _TENSOR_OPS:
            return
        passed = self.components.known(clock, AFTER)
        earlier = shadow.earlier(found, passed, kind == WRITE)
        for component, tick in earlier:
            first_agent, first_ins = self.components.who(component, tick)
            other = isinstance(first_agent, Op) and first_agent.group.warp is not agent.group.warp
            if not other or clock.get(component) < tick:
                continue
            key = ("fence", ins.line, first_ins.line)
            if key in self.lints:
                continue
            site = Site.of(agent, ins)
            text = (
                f"ordered after line {first_ins.line} by barriers only:"
                f" tcgen05.fence::before_thread_sync /"
                " ::after_thread_sync are missing on the way"
            )
            self.lints[key] = Fault("tcgen05 fence", site, text)

    # -- the end ----------------------------------------------------------------------------------
    def leave(self, cta) -> None:
        """Work that no warp of the CTA has learned to be complete is still running when the CTA
        ends.
        """
        final = Clock()
        self.components.free.clear()  # so that numbers of components go up with time
        for group in [g for g in self.clock if g.cta is cta]:
            final.join(self.clock.pop(group))
            self.own.pop(group)
        for op in [o for o in self.work if o.cta is cta]:
            work = self.work.pop(op)
            component = work.sources if work.sources >= 0 else work.component
            if op.kind != "arrive" and final.get(component) < work.done.get(component):
                self._left(op)
        for memory in (cta.shared, cta.tensor):
            self.shadows.pop(id(memory), None)

    def _left(self, op: Op) -> None:
        site = Site.of(op, op.ins)
        text = "nobody has waited for it when the CTA ends"
        self.faults.setdefault(("async at exit", site.line), Fault("async at exit", site, text))

    # -- several processes ------------------------------------------------------------------------
    def fresh(self) -> Races:
        """One that knows what earlier launches wrote."""
        new = Races(self.want_lints)
        for memory, shadow in self.shadows.values():
            new._shadow(memory).last[:] = shadow.last
        return new

    def hand_over(self) -> tuple:
        return self.races, self.names, self.faults, self.lints

    def adopt(self, found: tuple, machine, touched) -> None:
        """The next CTA's findings; it touches nothing that others wrote."""
        races, labels, faults, lints = found
        for key, race in races.items():
            known = self.races.get(key)
            self.races[key] = (
                race if known is None else known.again(labels[key], race.cells, race.count)
            )
        for key, fault in faults.items():
            known = self.faults.get(key)
            if known is None:
                self.faults[key] = fault
            elif fault.kind == "uninitialised":
                count = known.count + fault.count
                self.faults[key] = dataclasses.replace(known, count=count)
        add_new(self.lints, lints)
        for kind in (WRITE, ATOMIC):
            for name, flags in touched[kind].items():
                self._shadow(machine.memory.buffers[name]).last[flags] = 0

    def fill(self, report: Report) -> None:
        report.races = (*report.races, *self.races.values())
        report.faults = (*report.faults, *self.faults.values())
        report.lints = (*report.lints, *self.lints.values())


assert clocks.TRAVELS == AFTER
