"""Mutation: delete, weaken or move each ordering element of a kernel in turn, run, and tell what
notices.

A mutant that nobody notices is *silent*; ``proof`` then shows from the happens-before graph of the
unchanged kernel that every pair of conflicting accesses stays ordered without the element, and
through what. A silent mutant without proof is *missed*.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

from jax_dsa.emulator import changes
from jax_dsa.emulator.code import Code
from jax_dsa.emulator.errors import StepLimit
from jax_dsa.emulator.isa.table import find
from jax_dsa.emulator.observers.registers import Use
from jax_dsa.emulator.proof import Change, Proof, Prover
from jax_dsa.emulator.ptx import flow
from jax_dsa.emulator.ptx.syntax import Immediate, Instruction, Register
from jax_dsa.emulator.registers import LANES
from jax_dsa.emulator.report import Report, Site

ORDERING = (
    "bar.", "barrier.", "mbarrier.arrive", "mbarrier.try_wait", "mbarrier.test_wait",
    "mbarrier.init", "fence.", "tcgen05.fence", "tcgen05.wait", "tcgen05.commit", "cp.async.wait",
    "cp.async.commit", "cp.async.bulk.wait", "cp.async.bulk.commit", "cp.async.mbarrier",
    "wgmma.fence", "wgmma.commit", "wgmma.wait",
)  # fmt: skip
WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
NO_EFFECT_HERE = ("fence.mbarrier_init",)  # orders clusters of several CTAs
# Lints that say that an element is gone; a kernel that is not free of them is run without.
LINTS = ("tcgen05 fence", "wgmma fence", "single-lane arrive")
NAMED = ("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one instruction.

    Attributes:
      ins: the ordering element.
      change: "delete"; "weaken": ``detail`` says how; "move": it comes after ``over``.
      value: the new count, for "weaken" (operand ``operand``).
      over: the instruction that it moves over.
    """

    ins: Instruction
    change: str
    operand: int = 0
    value: int = 0
    over: Instruction | None = None

    @property
    def detail(self) -> str:
        if self.over is not None:
            return f"move over line {self.over.line}"
        return f"weaken to {self.value}" if self.change == "weaken" else self.change

    def __str__(self) -> str:
        return f"{self.detail}: line {self.ins.line} `{self.ins.text}`"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What noticed a mutant: "race", "deadlock", "hang", "fault", "wrong result", "lint" (one of
    LINTS, on a kernel that is free of them), "not executed", "silent" (proven redundant) or
    "missed" (silent, without proof).
    """

    mutant: Mutant
    caught: str
    detail: str
    proof: Proof | None = None

    @property
    def missed(self) -> bool:
        return self.caught == "missed"


# -- which mutants there are ----------------------------------------------------------------------
def mutants(code: Code) -> list[Mutant]:
    """Every change of every ordering element of a kernel, in program order."""
    found, use = [], Use(code)
    constants = _constants(code)
    for ins in code.kernel.code:
        if not ins.opcode.startswith(ORDERING) or ins.opcode.startswith(NO_EFFECT_HERE):
            continue
        found.append(Mutant(ins, "delete"))
        weaker = _weaker(ins, constants)
        over = _passable(code, use, ins)
        found += [Mutant(ins, "weaken", *weaker)] if weaker else []
        found += [Mutant(ins, "move", over=over)] if over else []
    return found


def _constants(code: Code) -> dict[str, int]:
    """Registers that hold one literal: those written once, by a mov of it."""
    values: dict[str, list] = {}
    for ins in code.kernel.code:
        if ins.operands and isinstance(ins.operands[0], Register):
            literal = ins.opcode.startswith("mov.") and isinstance(ins.operands[1], Immediate)
            values.setdefault(ins.operands[0].name, []).append(
                ins.operands[1].value if literal else None
            )
    return {n: v[0] for n, v in values.items() if len(v) == 1 and isinstance(v[0], int)}


def _weaker(ins: Instruction, constants: dict[str, int]) -> tuple[int, int] | None:
    """(operand, its weaker value): a group less to wait for, a warp or an arrival less in a count
    (one more where it is 1), half of the bytes.
    """

    def value(index: int) -> int | None:
        operand = ins.operands[index] if 0 <= index < len(ins.operands) else None
        if isinstance(operand, Immediate):
            return int(operand.value)
        return constants.get(operand.name) if isinstance(operand, Register) else None

    if "wait_group" in ins.opcode:
        return 0, int(ins.operands[0].value) + 1
    for stems, index, weaker in (
        (NAMED, 1, lambda n: n - LANES),
        (("mbarrier.init",), 1, lambda n: n - 1 if n > 1 else 2),
        (("mbarrier.arrive.expect_tx",), len(ins.operands) - 1, lambda n: n // 2),
    ):
        count = value(index)
        if ins.opcode.startswith(stems) and count is not None and weaker(count) > 0:
            return index, weaker(count)
    return None


def _passable(code: Code, use: Use, ins: Instruction) -> Instruction | None:
    """The next instruction of the same block that does more than compute, when ``ins`` may come
    after it.
    """
    read, written = use.instruction(ins)
    for other in code.kernel.code[ins.pc + 1 :]:
        if other.pc in code.leaders or flow.is_branch(other) or flow.ends_thread(other):
            return None
        reads, writes = use.instruction(other)
        if written & (reads | writes) or read & writes:
            return None
        if other.pc in code.effects:
            return other
    return None


# -- mutated kernels ------------------------------------------------------------------------------
def apply(code: Code, mutant: Mutant) -> tuple[Code, list[int]]:
    """A copy of ``code`` with the change, and a counter of how often the element was reached."""
    changed, count, ins = copy.copy(code), [0], mutant.ins
    closure = code.effects[ins.pc]
    if mutant.change == "delete":
        closure = _skip(code, ins)
    elif mutant.change == "weaken":
        operands = list(ins.operands)
        operands[mutant.operand] = Immediate(mutant.value)
        weaker = dataclasses.replace(ins, operands=tuple(operands))
        closure = find(weaker).bind(code.assembler, weaker)

    def counted(group, active):
        count[0] += 1
        return closure(group, active)

    changed.effects = {**code.effects, ins.pc: counted}
    if mutant.over is not None:
        _rotate(changed, ins.pc, mutant.over.pc)
    return changed, count


def _skip(code: Code, ins: Instruction) -> Callable:
    """Does nothing; a wait reports success, so that its loop ends."""
    is_wait = ins.opcode.startswith(WAITS)
    predicate = code.assembler.destination(ins.operands[0], "pred") if is_wait else None

    def run(group, active):
        if predicate is not None:
            group.R[predicate][active] = True

    return run


def _rotate(code: Code, start: int, stop: int) -> None:
    """The instruction at ``start`` comes behind the one at ``stop``; those between move up."""
    old = [*range(start + 1, stop + 1), start]
    place = dict(zip(old, range(start, stop + 1), strict=True))
    text = list(code.kernel.code)
    text[start : stop + 1] = [text[pc] for pc in old]
    code.kernel = dataclasses.replace(code.kernel, code=text)
    for name in ("effects", "steps", "predicates"):
        setattr(code, name, {place.get(pc, pc): v for pc, v in getattr(code, name).items()})
    code.segments, code.notes = {}, {}


# -- what notices ---------------------------------------------------------------------------------
def change_of(prover: Prover, mutant: Mutant, registers: bool = False) -> Change:
    """What the mutant does to the happens-before graph, which does not hold registers:
    ``registers`` says that the mutant's run has watched those of wgmma (see ``survey``).
    """
    if mutant.ins.opcode.startswith("wgmma.") and not registers:
        return Change(refusal="it orders registers of wgmma, and nobody watched them")
    if mutant.ins.opcode.startswith("wgmma.fence"):
        return Change(idle="no product uses registers touched since the fence before it")
    if mutant.over is not None:
        return changes.move(prover, mutant.ins, mutant.over)
    if mutant.change == "delete":
        return changes.delete(prover, mutant.ins)
    if "wait_group" in mutant.ins.opcode:
        return changes.weaken_group(prover, mutant.ins)
    return changes.recount(prover, mutant.ins)


def judge(
    mutant: Mutant, count: int, report: Report, wrong: str, prover: Prover, registers: bool = False
) -> Outcome:
    """Turns one mutant's run into an outcome; ``wrong`` says which results are wrong, or ""."""
    if report.races:
        return Outcome(mutant, "race", _pairs(report))
    if report.deadlocks:
        return Outcome(mutant, "deadlock", report.deadlocks[0].splitlines()[0])
    if report.faults:
        return Outcome(mutant, "fault", f"{report.faults[0].kind}: {report.faults[0].text}")
    if wrong:
        return Outcome(mutant, "wrong result", wrong)
    lints = [f for f in report.lints if f.kind in LINTS]
    if lints:
        first = lints[0]
        return Outcome(mutant, "lint", f"line {first.site.line}: {first.kind}: {first.text}")
    if count == 0:
        return Outcome(mutant, "not executed", "this configuration does not reach it")
    proof = prover.prove(change_of(prover, mutant, registers))
    return Outcome(mutant, "silent" if proof.holds else "missed", str(proof), proof)


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
    execute: Callable[[Code], tuple[Report, str]],
    prover: Prover,
    chosen: list[Mutant] | None = None,
    registers: bool = False,
) -> Iterator[Outcome]:
    """Runs every mutant.

    Args:
      code: the kernel.
      execute: runs a mutated Code with the race check; returns the report and what is wrong with
        the results ("" when they are right).
      prover: on the graph of a run of the unchanged kernel.
      chosen: mutants to run; default: all.
      registers: ``execute`` has ``WarpgroupRegisters`` with lints. What that finds depends on each
        warp's own instructions alone, so that its silence holds for every schedule.
    """
    for mutant in chosen if chosen is not None else mutants(code):
        changed, count = apply(code, mutant)
        try:
            report, wrong = execute(changed)
        except StepLimit:
            yield Outcome(mutant, "hang", "step limit")
            continue
        yield judge(mutant, count[0], report, wrong, prover, registers)
