"""Registers of wgmma: they belong to a product from its issue to the wait_group that covers it (PTX
ISA 9.7.15.7).

Until then the threads must not touch the accumulators, nor write the fragments of A, and other
products must not touch them either; only products on exactly the same accumulator follow each other
without a wait. wgmma.fence must stand between an access of a register by the threads and a product
that uses it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import READ, WRITE, Observer
from jax_dsa.emulator.observers.faults import add_new
from jax_dsa.emulator.observers.registers import Use
from jax_dsa.emulator.ptx.syntax import Instruction, Vector
from jax_dsa.emulator.report import Fault, Race, Report, Site

PRODUCT = "wgmma.mma_async"
_MISSING = (
    "The registers belong to the product until a wgmma.wait_group that covers its group: that wait"
    " is missing in between."
)


class Touch(Use):
    """What threads do to registers: the operands that a product works on are left out."""

    def __init__(self, code):
        super().__init__(code)
        self.products: dict[int, tuple[int, int]] = {}

    def instruction(self, ins: Instruction) -> tuple[int, int]:
        if ins.opcode.startswith(PRODUCT):
            return self.bits([o for o in ins.operands if not isinstance(o, Vector)]), 0
        return super().instruction(ins)

    def product(self, ins: Instruction) -> tuple[int, int]:
        """(accumulator, fragments of A) of a product, as bits."""
        found = self.products.get(ins.pc)
        if found is None:
            d, a = ins.operands[:2]
            found = self.bits([d]), self.bits([a]) if isinstance(a, Vector) else 0
            self.products[ins.pc] = found
        return found

    def words(self, bits: int) -> str:
        """Names of registers; at most eight are spelled out."""
        names = [name for name, bit in self.bit.items() if bit & bits]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more


class Held(NamedTuple):
    """A product that no wait_group has covered: its accumulator and its fragments of A."""

    op: Op
    d: int
    a: int


@dataclasses.dataclass
class State:
    """One warp: its unfinished products, and what its threads touched since the last fence."""

    held: list[Held] = dataclasses.field(default_factory=list)
    d: int = 0
    a: int = 0
    touched: int = 0
    written: int = 0
    ever_written: int = 0
    fenced: bool = False

    def settle(self, held: list[Held]) -> None:
        self.held, self.d, self.a = held, 0, 0
        for _, d, a in held:
            self.d |= d
            self.a |= a


class WarpgroupRegisters(Observer):
    """Fills races of space "registers", uninitialised accumulators, and the wgmma.fence lint."""

    def __init__(self, lints: bool = True):
        self.want_lints = lints
        self.races: dict[tuple, Race] = {}
        self.faults: dict[tuple, Fault] = {}
        self.lints: dict[tuple, Fault] = {}

    def launch(self, machine) -> None:
        code, notes = machine.code, machine.code.notes
        self.used = any(i.opcode.startswith(PRODUCT) for i in code.kernel.code)
        self.table: Touch = notes.get(Touch) or notes.setdefault(Touch, Touch(code))
        self.states: dict[object, State] = {}

    def _of(self, warp) -> State:
        found = self.states.get(warp)
        if found is None:
            found = self.states[warp] = State()
        return found

    # -- threads ----------------------------------------------------------------------------------
    def execute(self, group, pc: int) -> None:
        if not self.used:
            return
        reads, writes = self.table.piece(pc)
        state = self._of(group.warp)
        if (reads | writes) & state.d or writes & state.a:
            self._early(group, pc, state)
        state.touched |= reads | writes
        state.written |= writes
        state.ever_written |= writes

    def _early(self, group, pc: int, state: State) -> None:
        """The instructions of a piece that touch registers of unfinished products.

        Of several products on one accumulator or with the same A, the newest stands for all.
        """
        code = self.table.code
        results = {h.d: h.op for h in state.held}
        sources = {h.a: h.op for h in state.held}
        for ins in code.kernel.code[pc : code.segment(pc).pc + 1]:
            reads, writes = self.table.instruction(ins)
            second = Site.of(group, ins)
            for d, op in results.items():
                self._race(op, WRITE, second, READ, reads & d)
                self._race(op, WRITE, second, WRITE, writes & d)
            for a, op in sources.items():
                self._race(op, READ, second, WRITE, writes & a)

    def _race(self, op: Op, first: str, site: Site, second: str, bits: int) -> None:
        if not bits:
            return
        key = (op.ins.line, site.line, first, second)
        known = self.races.get(key)
        if known is not None:
            self.races[key] = dataclasses.replace(known, count=known.count + 1)
            return
        cells = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
        where = f"registers {self.table.words(bits)} of warp {site.warp}, CTA {site.cta}"
        one = Site.of(op, op.ins)
        self.races[key] = Race("registers", where, cells, (first, second), one, site, _MISSING)

    # -- products ---------------------------------------------------------------------------------
    def issue(self, op: Op) -> None:
        if op.kind != "wgmma":
            return
        state, (d, a) = self._of(op.group.warp), self.table.product(op.ins)
        site = Site.of(op, op.ins)
        for earlier in state.held:
            if earlier.op.chain != op.chain:
                self._race(earlier.op, WRITE, site, WRITE, earlier.d & d)
            self._race(earlier.op, READ, site, WRITE, earlier.a & d)
            self._race(earlier.op, WRITE, site, READ, earlier.d & a)
        self._fenced(state, site, d, a)
        self._written(op, state, site, d)
        state.settle([*state.held, Held(op, d, a)])

    def _fenced(self, state: State, site: Site, d: int, a: int) -> None:
        bad = state.touched & d | state.written & a
        if not self.want_lints or state.fenced and not bad:
            return
        text = "no wgmma.fence before the first product"
        if bad:
            text = f"no wgmma.fence after the last access of {self.table.words(bad)}"
        self.lints.setdefault((site.line, site.role), Fault("wgmma fence", site, text))

    def _written(self, op: Op, state: State, site: Site, d: int) -> None:
        """An accumulator that is added to must hold something."""
        unknown, state.ever_written = d & ~state.ever_written, state.ever_written | d
        scale = op.group.machine.code.assembler.source(op.ins.operands[3], "pred")
        if not unknown or not op.group.R[scale][int(op.lanes.argmax())]:
            return
        text = f"adds to {self.table.words(unknown)}, which were never written by this warp"
        self.faults.setdefault((site.line, site.warp), Fault("uninitialised", site, text))

    # -- what ends both ---------------------------------------------------------------------------
    def fence(self, group, kind: str, ins) -> None:
        if kind == "wgmma":
            state = self._of(group.warp)
            state.touched = state.written = 0
            state.fenced = True

    def wait(self, group, family: str, ops, ins, everything: bool) -> None:
        if family == "wgmma":
            done = set(map(id, ops))
            state = self._of(group.warp)
            state.settle([h for h in state.held if id(h.op) not in done])

    # -- several processes ------------------------------------------------------------------------
    def fresh(self) -> WarpgroupRegisters:
        return WarpgroupRegisters(self.want_lints)

    def hand_over(self) -> tuple:
        return self.races, self.faults, self.lints

    def adopt(self, found: tuple, machine, touched) -> None:
        for key, race in found[0].items():
            known = self.races.get(key)
            more = 0 if known is None else known.count
            self.races[key] = dataclasses.replace(known or race, count=race.count + more)
        add_new(self.faults, found[1])
        add_new(self.lints, found[2])

    def fill(self, report: Report) -> None:
        report.races = (*report.races, *self.races.values())
        report.faults = (*report.faults, *self.faults.values())
        report.lints = (*report.lints, *self.lints.values())
