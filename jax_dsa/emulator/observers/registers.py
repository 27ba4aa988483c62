"""Registers read before they were written, and tcgen05.ld results used before wait::ld."""

from __future__ import annotations

from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.observers.faults import add_new
from jax_dsa.emulator.ptx.syntax import Address, Instruction, Negated, Pair, Register, Vector
from jax_dsa.emulator.report import Fault, Report, Site

_NO_DESTINATION = (
    "st",
    "red",
    "bar",
    "barrier",
    "cp",
    "setmaxnreg",
    "nanosleep",
    "bra",
    "stmatrix",
    "prefetch",
    "fence",
)


def destinations(ins: Instruction) -> tuple:
    """The operands that an instruction writes."""
    stem = ins.opcode.split(".")[0]
    if not ins.operands or stem in _NO_DESTINATION or isinstance(ins.operands[0], Address):
        return ()
    if stem == "tcgen05" and not ins.opcode.startswith("tcgen05.ld"):
        return ()
    return ins.operands[:1]


def names(operand) -> list[str]:
    """Names of the declared registers in an operand (special registers are always written)."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Negated):
        return names(operand.register)
    if isinstance(operand, Pair):
        return [n for o in (operand.first, operand.second) if o is not None for n in names(o)]
    if isinstance(operand, Vector):
        return [n for o in operand.items if o is not None for n in names(o)]
    if isinstance(operand, Address):
        return names(operand.base) + [n for c in operand.coordinates for n in names(c)]
    return []


class Use:
    """Bit sets over a kernel's registers, per straight piece of code."""

    def __init__(self, code):
        self.code = code
        self.bit = {name: 1 << i for i, name in enumerate(code.kernel.registers)}
        self.single: dict[int, tuple[int, int]] = {}
        self.cache: dict[int, tuple[int, int]] = {}

    def bits(self, operands) -> int:
        total = 0
        for operand in operands:
            for name in names(operand):
                total |= self.bit.get(name, 0)
        return total

    def instruction(self, ins: Instruction) -> tuple[int, int]:
        """(read, written) of one instruction."""
        found = self.single.get(ins.pc)
        if found is None:
            written = destinations(ins)
            sources = ins.operands[len(written) :] + ((ins.guard,) if ins.guard is not None else ())
            found = self.single[ins.pc] = self.bits(sources), self.bits(written)
        return found

    def piece(self, start: int) -> tuple[int, int]:
        """(read before written, written) of the piece that starts at ``start``."""
        if start not in self.cache:
            reads = writes = 0
            last = self.code.segment(start).pc
            for ins in self.code.kernel.code[start : last + 1]:
                read, written = self.instruction(ins)
                reads |= read & ~writes
                writes |= written
            self.cache[start] = (reads, writes)
        return self.cache[start]


class RegisterUse(Observer):
    """Fills faults of kind "uninitialised" and the lint on early use of loaded registers."""

    def __init__(self, lints: bool):
        self.want_lints = lints
        self.faults: dict[tuple, Fault] = {}
        self.lints: dict[tuple, Fault] = {}
        self.loading: dict[object, int] = {}
        self.done: set[tuple] = set()  # (warp, piece): executed before, so that it brings no news

    def launch(self, machine) -> None:
        notes = machine.code.notes
        self.table = notes.get(Use) or notes.setdefault(Use, Use(machine.code))
        self.done.clear()
        self.loading.clear()

    def execute(self, group, pc: int) -> None:
        warp = group.warp
        if (warp, pc) not in self.done:
            self.done.add((warp, pc))
            reads, writes = self.table.piece(pc)
            unknown = reads & ~warp.written
            warp.written |= writes
            if unknown:
                self._unknown(group, pc, unknown)
        loading = self.loading.get(warp)
        if loading:
            early = loading & self.table.piece(pc)[0]
            if early:
                self._early(group, pc, early)
                self.loading[warp] = loading & ~early

    def issue(self, op) -> None:
        if op.kind == "ld":
            _, written = self.table.instruction(op.ins)
            self.loading[op.group.warp] = self.loading.get(op.group.warp, 0) | written

    def wait(self, group, family: str, ops, ins, everything: bool) -> None:
        if family == "tcgen05.ld":
            self.loading.pop(group.warp, None)

    def _first(self, pc: int, wanted: int) -> Instruction:
        code = self.table.code
        piece = code.kernel.code[pc : code.segment(pc).pc + 1]
        return next(i for i in piece if self.table.instruction(i)[0] & wanted)

    def _unknown(self, group, pc: int, unknown: int) -> None:
        ins = self._first(pc, unknown)
        name = next(n for n, bit in self.table.bit.items() if bit & unknown)
        site = Site.of(group, ins)
        fault = Fault(
            "uninitialised", site, f"register {name} is read and was never written by this warp"
        )
        self.faults.setdefault((site.line, site.warp), fault)

    def _early(self, group, pc: int, wanted: int) -> None:
        if not self.want_lints:
            return
        site = Site.of(group, self._first(pc, wanted))
        text = "uses registers of a tcgen05.ld before tcgen05.wait::ld"
        self.lints.setdefault((site.line, site.role), Fault("early use", site, text))

    def fresh(self) -> RegisterUse:
        return RegisterUse(self.want_lints)

    def hand_over(self) -> tuple:
        return self.faults, self.lints

    def adopt(self, found: tuple, machine, touched) -> None:
        add_new(self.faults, found[0])
        add_new(self.lints, found[1])

    def fill(self, report: Report) -> None:
        report.faults = (*report.faults, *self.faults.values())
        report.lints = (*report.lints, *self.lints.values())
