"""Mutation: take each ordering element out of a kernel in turn, run, and tell what notices.

A mutant that nobody notices is *silent*. Its proof is computed in the same run: the happens-before
check has compared
every conflicting pair of accesses and found it ordered, and for each time the element was skipped
the witness records
through which later (or earlier) synchronisation the thread learned what the element would have told
it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jax_dsa.emulator.barriers import Mbarrier
from jax_dsa.emulator.code import Code
from jax_dsa.emulator.errors import StepLimit
from jax_dsa.emulator.isa.addressing import addresses, lane_numbers
from jax_dsa.emulator.isa.table import find
from jax_dsa.emulator.observers.clocks import TRAVELS, Clock
from jax_dsa.emulator.observers.races import Races
from jax_dsa.emulator.ptx.syntax import Address, Immediate, Instruction
from jax_dsa.emulator.registers import LANES
from jax_dsa.emulator.report import Report, Site

ORDERING = (
    "bar.", "barrier.", "mbarrier.arrive", "mbarrier.try_wait", "mbarrier.test_wait",
    "mbarrier.init", "fence.",
    "tcgen05.fence", "tcgen05.wait", "tcgen05.commit", "cp.async.wait", "cp.async.bulk.wait",
    "cp.async.mbarrier", "wgmma.fence", "wgmma.commit", "wgmma.wait",
)  # fmt: skip
ARRIVALS = ("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier")
WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
NO_EFFECT_HERE = ("fence.mbarrier_init",)  # orders clusters of several CTAs


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An instruction taken out ("delete") or weakened ("weaken": a wait_group that waits for one
    group less).
    """

    ins: Instruction
    change: str

    def __str__(self) -> str:
        return f"{self.change} line {self.ins.line} `{self.ins.text}`"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What noticed a mutant: "race", "deadlock", "hang", "fault", "wrong result", "not executed",
    or "silent" with proof.
    """

    mutant: Mutant
    caught: str
    detail: str

    @property
    def noticed(self) -> bool:
        return self.caught not in ("silent", "not executed")


def mutants(code: Code) -> list[Mutant]:
    """Every ordering element of a kernel, in program order."""
    found = []
    for ins in code.kernel.code:
        if not ins.opcode.startswith(ORDERING) or ins.opcode.startswith(NO_EFFECT_HERE):
            continue
        found.append(Mutant(ins, "delete"))
        if "wait_group" in ins.opcode:
            found.append(Mutant(ins, "weaken"))
    return found


def apply(code: Code, mutant: Mutant) -> tuple[Code, list[int]]:
    """A copy of ``code`` with the mutant's instruction changed, and a counter of how often it was
    reached.
    """
    changed, count = copy.copy(code), [0]
    ins = mutant.ins
    if mutant.change == "weaken":
        more = dataclasses.replace(ins.operands[0], value=ins.operands[0].value + 1)
        weaker = dataclasses.replace(ins, operands=(more,))
        closure = find(weaker).bind(code.assembler, weaker)
    else:
        closure = _skip(code, ins)

    def counted(group, active):
        count[0] += 1
        return closure(group, active)

    changed.effects = {**code.effects, ins.pc: counted}
    return changed, count


def _skip(code: Code, ins: Instruction) -> Callable:
    """Does nothing; a wait reports success, so that its loop ends."""
    is_wait = ins.opcode.startswith(WAITS)
    predicate = code.assembler.destination(ins.operands[0], "pred") if is_wait else None

    def run(group, active):
        if predicate is not None:
            group.R[predicate][active] = True
        if group.machine.on.skip:
            group.machine.on.skip(group, ins, active)

    return run


class Witness(Races):
    """Races that also follows what a skipped wait or fence would have taught, until it is learned
    another way.
    """

    def __init__(self) -> None:
        super().__init__(lints=False)
        self.owed: list[tuple] = []
        self.through: set[int] = set()
        self.pairs = 0
        self.open = self.idle = 0
        self.together: dict[tuple, tuple[Clock, list[int]]] = {}
        self.arrivals: dict[tuple, int] = {}

    def launch(self, machine) -> None:
        super().launch(machine)
        self.code = machine.code

    def skip(self, group, ins: Instruction, active) -> None:
        """Notes the debt: a function that gives the rows the group should know, or None while that
        is not settled.
        """
        if ins.opcode.startswith(ARRIVALS):
            self._unheard(group, ins, active)
            return
        debt = self._debt(group, ins, active)
        if debt is None:
            self.idle += 1
        else:
            self.owed.append((group, debt))
            self._settle(group, ins)

    def _barrier(self, group, operand, active) -> Mbarrier | None:
        base, offset = self.code.assembler.address(operand)
        lanes = lane_numbers(group, active)
        return group.cta.mbarriers.get(int(addresses(group, lanes, base, offset)[0]))

    def _unheard(self, group, ins: Instruction, active) -> None:
        """A skipped arrival matters to those who wait for its phase or a later one."""
        barrier = self._barrier(
            group, next(o for o in ins.operands if isinstance(o, Address)), active
        )
        if barrier is not None:
            self.arrivals[barrier, barrier.phase] = (
                self.arrivals.get((barrier, barrier.phase), 0) + 1
            )

    def _debt(self, group, ins: Instruction, active):
        if ins.opcode.startswith(WAITS):
            return self._phase_debt(group, ins, active)
        if ins.opcode.startswith("bar"):
            return self._generation_debt(group, ins)
        clock = self._of(group).copy()
        before = clock.rows.copy()
        mine = self.clock[group]
        self.clock[group] = clock
        self._would(group, ins)
        self.clock[group] = mine
        wanted = clock.rows[:TRAVELS]
        return None if (wanted[:, : before.shape[1]] == before[:TRAVELS]).all() else lambda: wanted

    def _would(self, group, ins: Instruction) -> None:
        """Applies the skipped element to the group's (temporary) clock."""
        if ins.opcode.startswith("fence.proxy.async"):
            space = ins.opcode.split(".")[3].split("::")[0] if ins.opcode.count(".") > 2 else "all"
            self.fence(group, f"proxy.async.{space}", ins)
        elif ins.opcode.startswith("tcgen05.fence"):
            self.fence(group, "tcgen05.before" if "before" in ins.opcode else "tcgen05.after", ins)
        else:
            for (warp, family), pending in self.pending.items():
                if warp is group.warp and family in _families(ins):
                    self.clock[group].join(pending)

    def _generation_debt(self, group, ins: Instruction):
        """What a skipped named barrier would have taught: the clocks of all who come to it."""
        values = [o.value for o in ins.operands if isinstance(o, Immediate)]
        if len(values) != len(ins.operands) or not values:
            return None
        count = values[1] if len(values) > 1 else group.cta.threads
        key = (group.cta, values[0])
        clock, arrived = self.together.setdefault(key, (Clock(), [0]))
        clock.join(self._of(group))
        arrived[0] += LANES
        if arrived[0] >= count:
            del self.together[key]
        if "arrive" in ins.opcode:
            return None
        return lambda: clock.rows[:TRAVELS] if arrived[0] >= count else None

    def _phase_debt(self, group, ins: Instruction, active):
        barrier = self._barrier(group, ins.operands[1], active)
        if barrier is None:
            return None
        lanes = lane_numbers(group, active)
        argument = self.code.assembler.source(ins.operands[2], "u32")
        passed = barrier.passed(int(group.R[argument][lanes[0]]))
        phase = barrier.phase - 1 if passed else barrier.phase

        def rows():
            known = self.phases.get((barrier, phase))
            return known.rows[:TRAVELS] if known is not None and barrier.phase > phase else None

        return rows if phase >= 0 else None

    def _settle(self, group, ins: Instruction) -> None:
        """Which debts does the group's clock cover now?"""
        left = []
        for owner, debt in self.owed:
            rows = debt() if owner.warp is group.warp else None
            if rows is not None and _covers(self._of(group), rows):
                self.through.add(ins.line)
            else:
                left.append((owner, debt))
        self.owed = left

    def observe(self, group, barrier, phase: int, ins) -> None:
        super().observe(group, barrier, phase, ins)
        for known in [k for k in self.arrivals if k[0] is barrier and k[1] <= phase]:
            del self.arrivals[known]
        if self.owed:
            self._settle(group, ins)

    def wait(self, group, family: str, ops, ins, everything: bool) -> None:
        super().wait(group, family, ops, ins, everything)
        if self.owed:
            self._settle(group, ins)

    def fence(self, group, kind: str, ins) -> None:
        super().fence(group, kind, ins)
        if self.owed and self.clock.get(group) is not None:
            self._settle(group, ins)

    def access(self, agent, ins, memory, cells, kind: str) -> None:
        self.pairs += 1
        super().access(agent, ins, memory, cells, kind)

    def end(self, machine) -> None:
        self.open += len(self.owed)
        self.owed = []

    def proof(self, site: Instruction) -> str:
        """The proof of a silent mutant, in words."""
        text = f"all conflicting pairs among {self.pairs} accesses stay ordered"
        through = sorted(self.through - {site.line})
        if site.line in self.through:
            text += "; what it tells is known already when it is reached"
        if through:
            text += (
                f"; what it tells is learned at line{'s' if len(through) > 1 else ''}"
                f" {', '.join(map(str, through))}"
            )
        if self.idle:
            text += f"; {self.idle} times it has nothing to tell"
        if self.open:
            text += (
                f"; {self.open} times nothing that follows needs more of it than is ordered already"
            )
        if self.arrivals:
            text += f"; nobody waits for the phase of {sum(self.arrivals.values())} of its arrivals"
        return text


def _families(ins: Instruction) -> tuple[str, ...]:
    if ins.opcode.startswith("tcgen05.wait"):
        return ("tcgen05.ld",) if "::ld" in ins.opcode else ("tcgen05.st",)
    if ins.opcode.startswith("cp.async.bulk.wait"):
        return ("bulk",)
    if ins.opcode.startswith("wgmma.wait"):
        return ("wgmma",)
    return ("cp.async",) if ins.opcode.startswith("cp.async.wait") else ()


def _covers(clock: Clock, rows: np.ndarray) -> bool:
    clock.grow(rows.shape[1])
    return bool((clock.rows[:TRAVELS, : rows.shape[1]] >= rows).all())


def judge(mutant: Mutant, count: int, report: Report, wrong: str, witness: Witness) -> Outcome:
    """Turns one mutant's run into an outcome; ``wrong`` says which results are wrong, or ""."""
    if count == 0:
        return Outcome(mutant, "not executed", "this configuration does not reach it")
    if report.races:
        return Outcome(mutant, "race", _pairs(report))
    if report.deadlocks:
        return Outcome(mutant, "deadlock", report.deadlocks[0].splitlines()[0])
    if report.faults:
        return Outcome(mutant, "fault", f"{report.faults[0].kind}: {report.faults[0].text}")
    if wrong:
        return Outcome(mutant, "wrong result", wrong)
    return Outcome(mutant, "silent", witness.proof(mutant.ins))


def _pairs(report: Report) -> str:
    def name(site: Site) -> str:
        return f"{site.line} ({site.role or site.warp})"

    pairs = [
        f"{r.kinds[0]} {name(r.first)} / {r.kinds[1]} {name(r.second)}" for r in report.races[:3]
    ]
    return (
        f"{len(report.races)} pairs in {', '.join(sorted({r.space for r in report.races}))}: "
        + "; ".join(pairs)
    )


def survey(
    code: Code,
    execute: Callable[[Code, Witness], tuple[Report, str]],
    chosen: list[Mutant] | None = None,
) -> Iterator[Outcome]:
    """Runs every mutant.

    Args:
      code: the kernel.
      execute: runs a mutated Code with the given extra observer; returns the report and what is
        wrong with the
        results ("" when they are right).
      chosen: mutants to run; default: all.
    """
    for mutant in chosen if chosen is not None else mutants(code):
        changed, count = apply(code, mutant)
        witness = Witness()
        try:
            report, wrong = execute(changed, witness)
        except StepLimit:
            yield Outcome(mutant, "hang", "step limit")
            continue
        yield judge(mutant, count[0], report, wrong, witness)
