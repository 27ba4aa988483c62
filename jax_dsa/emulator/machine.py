"""The machine: runs the groups and engines of one kernel launch to the end, to a deadlock, or to
the step limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from jax_dsa.emulator import warps
from jax_dsa.emulator.code import BRANCH, EFFECT, EXIT, Code
from jax_dsa.emulator.engines import Engines, Op
from jax_dsa.emulator.errors import StepLimit
from jax_dsa.emulator.events import Bus
from jax_dsa.emulator.isa.table import WAIT
from jax_dsa.emulator.schedule import Schedule, Scheduler


class Machine:
    """One launch.

    Attributes:
      code, launch: what runs; ``memory``: global memory; ``params``: the parameter bytes
      (memory.Linear).
      maps: tensor maps by generic address.
      on: the event bus; now: scheduler steps so far; progress: changes whenever somebody could have
        been unblocked.
    """

    def __init__(
        self, code: Code, launch, memory, params, maps, observers, schedule: Schedule, settings
    ):
        self.code, self.launch, self.memory, self.params, self.maps = (
            code,
            launch,
            memory,
            params,
            maps,
        )
        self.settings = settings
        self.segments = code.segments
        self.shared_bytes = code.assembler.dynamic_start - 1024 + launch.dynamic_shared_bytes
        self.on = Bus(observers)
        self.scheduler = Scheduler(self, schedule)
        self.engines = Engines(self, schedule.engines == "eager")
        self.ready = self.scheduler.ready
        self.groups: dict[int, warps.Group] = {}
        self.ctas: list[warps.Cta] = []
        self.now = self.progress = 0
        self.spinning: dict[int, warps.Group] = {}
        self._waiting_ctas: Iterator[tuple[int, tuple[int, int, int]]] = iter(())
        self._ids = itertools.count()

    # -- life of a launch
    # ---------------------------------------------------------------------------
    def run(self, ctas: Iterable[tuple[int, tuple[int, int, int]]] | None = None) -> None:
        """Runs every CTA, or those given (number, index); at most ``settings.concurrent_ctas`` at a
        time.
        """
        if self.on.launch:
            self.on.launch(self)
        self._waiting_ctas = enumerate(grid_of(self.launch)) if ctas is None else iter(ctas)
        for _ in range(self.settings.concurrent_ctas or int(np.prod(self.launch.grid))):
            self._start_cta()
        while self.ctas:
            agent = self.scheduler.next()
            if agent is None and not self._unstick():
                self._deadlock()
                break
            if isinstance(agent, Op):
                self.engines.run(agent)
            elif agent is not None:
                self._turn(agent)
        if self.on.end:
            self.on.end(self)

    def _start_cta(self) -> None:
        number, index = next(self._waiting_ctas, (0, None))
        if index is None:
            return
        if self.settings.concurrent_ctas == 1:
            self.scheduler.restart(number)
        cta = warps.Cta(self, index)
        self.ctas.append(cta)
        for warp in cta.warps:
            set_special_registers(warp)
            self.add(warp.root)

    def add(self, group: warps.Group) -> None:
        self.groups[id(group)] = group
        if group.parent is not None and self.on.split:
            self.on.split(group.parent, group)
        self.ready.append(group)

    def remove(self, group: warps.Group) -> None:
        del self.groups[id(group)]
        group.waiting = "is over"

    def warp_ended(self, warp) -> None:
        cta = warp.cta
        cta.alive -= 1
        self.progress += 1
        if cta.alive:
            return
        self.engines.flush(cta)
        if self.on.leave:
            self.on.leave(cta)
        self.ctas.remove(cta)
        cta.release()
        self._start_cta()

    # -- one turn
    # -----------------------------------------------------------------------------------
    def _turn(self, group: warps.Group) -> None:
        if group.bytes == warps.NONE:
            warps.unwind(group)
        elif group.frames or group.parent:
            warps.reconverge(group)
        for _ in range(self.scheduler.schedule.quantum):
            if group.waiting is not None:
                return
            self.step(group)
        if group.waiting is None:
            self.ready.append(group)

    def step(self, group: warps.Group) -> None:
        """Runs one straight piece and what follows it."""
        self.now += 1
        if self.now > self.settings.step_limit:
            self._step_limit()
        start = group.pc
        segment = self.segments.get(start) or self.code.segment(start)
        S, where = group.R.slots, group.where
        if where is True:
            for run in segment.full:
                run(S)
        else:
            for run in segment.masked:
                run(S, where)
        if self.on.execute:
            self.on.execute(group, start)
        kind, pc = segment.kind, segment.pc
        group.pc = pc
        if kind == EFFECT:
            if not self._effect(group, pc):
                return
            group.pc = pc + 1
        elif kind == BRANCH:
            self._branch(group, pc)
        elif kind == EXIT:
            self._exit(group, pc)
            return
        if group.frames or group.parent:
            warps.reconverge(group)

    def _effect(self, group: warps.Group, pc: int) -> bool:
        """True when the instruction is done, False when the group waits before it."""
        active = group.mask
        guard = self.code.predicates.get(pc)
        if guard is not None:
            active = self._holds(group, guard)
            if active.tobytes() == warps.NONE:
                return True
        ins = self.code.kernel.code[pc]
        if self.scheduler.schedule.delays and self.scheduler.hold(group, ins):
            return False
        return self.code.effects[pc](group, active) is not WAIT

    def _holds(self, group: warps.Group, guard: tuple[int, bool]):
        predicate = group.R[guard[0]]
        return (~predicate if guard[1] else predicate) & group.mask

    def _branch(self, group: warps.Group, pc: int) -> None:
        target, meet = self.code.branches[pc]
        guard = self.code.predicates.get(pc)
        if guard is None:
            group.pc = target
            return
        taken = self._holds(group, guard)
        lanes = taken.tobytes()
        if lanes == warps.NONE:
            group.pc = pc + 1
        elif lanes == group.bytes:
            group.pc = target
        else:
            warps.branch(group, taken, target, pc + 1, meet)

    def _exit(self, group: warps.Group, pc: int) -> None:
        guard = self.code.predicates.get(pc)
        if guard is None:
            warps.exit_lanes(group)
            return
        leaving = self._holds(group, guard)
        group.warp.exited = group.warp.exited | leaving
        group.set_mask(group.mask & ~leaving)
        group.pc = pc + 1
        if group.bytes == warps.NONE:
            warps.unwind(group)

    # -- waiting
    # ------------------------------------------------------------------------------------
    def wait(self, group: warps.Group, why: str, on: object) -> str:
        """Marks the group as waiting for ``on``; returns WAIT, for effects to return in turn."""
        group.waiting, group.wait_on = why, on
        if self.on.block:
            self.on.block(group, why)
        return WAIT

    def wake(self, group: warps.Group, on: object, past: bool = False) -> None:
        """Lets a group that waits for ``on`` go on: it repeats its instruction, or passes it when
        ``past``.
        """
        if group.waiting is None or group.wait_on is not on:
            return
        group.waiting = group.wait_on = None
        self.spinning.pop(id(group), None)
        if past:
            group.pc += 1
        if self.on.resume:
            self.on.resume(group)
        self.ready.append(group)

    def _unstick(self) -> bool:
        """Nobody can move: let each waiting try_wait fail once. False when that has changed
        nothing.
        """
        candidates = [g for g in self.spinning.values() if g.fail_at != self.progress]
        for group in candidates:
            group.fail_at = self.progress
            group.fail = True
            self.wake(group, group.wait_on)
        return bool(candidates)

    def _deadlock(self) -> None:
        if self.on.deadlock:
            self.on.deadlock(self, [g.state() for g in self.groups.values()])
        self.ctas.clear()

    def _step_limit(self) -> None:
        states = "\n  ".join(g.state() for g in self.groups.values())
        raise StepLimit(
            f"{self.code.kernel.name} took more than {self.settings.step_limit} steps; raise"
            f" Settings.step_limit if"
            f" it is not stuck. The state of every warp:\n  {states}"
        )

    # -- reports
    # ------------------------------------------------------------------------------------
    def fault(self, kind: str, agent, ins, text: str) -> None:
        if self.on.fault:
            self.on.fault(kind, agent, ins, text)

    def role(self, warp: int) -> str:
        return self.launch.role(warp)


def grid_of(launch) -> Iterator[tuple[int, int, int]]:
    """Indices of the CTAs of a launch, in the order in which they start."""
    gx, gy, gz = launch.grid
    return ((x, y, z) for z in range(gz) for y in range(gy) for x in range(gx))


def set_special_registers(warp) -> None:
    """Fills the special registers that the kernel reads (PTX ISA 10)."""
    machine = warp.machine
    for name in sorted(machine.code.assembler.specials):
        warp.registers.set(name, _special(warp, name))


def _special(warp, name: str):
    launch, lane = warp.machine.launch, np.arange(32)
    base, _, axis = name[1:].partition(".")
    if axis:
        at = "xyz".index(axis)
        thread = warp.index * 32 + lane
        bx, by, _ = launch.block
        tid = (thread % bx, thread // bx % by, thread // (bx * by))
        sizes = {"tid": tid, "ntid": launch.block, "ctaid": warp.cta.index, "nctaid": launch.grid}
        sizes |= {"clusterid": warp.cta.index, "nclusterid": launch.grid}
        return sizes[base][at] if base in sizes else {"cluster_ctaid": 0, "cluster_nctaid": 1}[base]
    masks = {"eq": lambda i: 1 << i, "lt": lambda i: (1 << i) - 1, "le": lambda i: (2 << i) - 1}
    masks |= {
        "gt": lambda i: ~((2 << i) - 1) & 0xFFFFFFFF,
        "ge": lambda i: ~((1 << i) - 1) & 0xFFFFFFFF,
    }
    if base.startswith("lanemask_"):
        return np.array([masks[base[-2:]](i) for i in range(32)], np.uint32)
    fixed = {
        "laneid": lane, "warpid": warp.index, "nwarpid": len(warp.cta.warps) if hasattr(warp.cta,
        "warps") else 0,
        "smid": 0, "cluster_ctarank": 0, "cluster_nctarank": 1, "clock": 0, "clock64": 0,
        "globaltimer": 0,
        "dynamic_smem_size": launch.dynamic_shared_bytes,
        "total_smem_size": warp.machine.shared_bytes,
    }  # fmt: skip
    return fixed[base]
