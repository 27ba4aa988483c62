"""A kernel made ready to run: straight pieces of value closures, each followed by one effect,
branch or exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax_dsa.emulator.isa.assembler import Assembler, guarded
from jax_dsa.emulator.isa.table import find
from jax_dsa.emulator.ptx import flow
from jax_dsa.emulator.ptx.syntax import Instruction, Kernel, Label

FALL, EFFECT, BRANCH, EXIT = range(4)


class Segment(NamedTuple):
    """values: closures run(R, m); then ``kind`` says what follows at ``pc`` (the effect, the
    branch, ...).
    """

    values: tuple
    kind: int
    pc: int


class Branch(NamedTuple):
    target: int
    meet: int


class Code:
    """Closures of one kernel.

    Attributes:
      kernel: what was parsed.
      layout: registers and views.
      effects: closures run(group, active) by pc; predicates: (view, negated) of guarded ones by pc.
      branches: targets and meeting points by pc.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.assembler = Assembler(kernel)
        self.layout = self.assembler.layout
        self.meets = flow.reconvergence(kernel)
        self.leaders = set(flow.leaders(kernel))
        self.effects: dict[int, Callable] = {}
        self.branches: dict[int, Branch] = {}
        self.predicates: dict[int, tuple[int, bool]] = {}
        self.values: dict[int, Callable] = {}
        for instruction in kernel.code:
            self._bind(instruction)
        self._segments: dict[int, Segment] = {}

    def _bind(self, ins: Instruction) -> None:
        asm = self.assembler
        if ins.guard is not None:
            self.predicates[ins.pc] = (asm.source(ins.guard, "pred"), ins.guard_negated)
        if flow.is_branch(ins):
            label = ins.operands[0]
            assert isinstance(label, Label)
            self.branches[ins.pc] = Branch(label.target, self.meets[ins.pc])
        elif not flow.ends_thread(ins):
            row = find(ins)
            closure = self._bound(row, ins)
            if row.effect:
                self.effects[ins.pc] = closure
            elif ins.guard is not None:
                self.values[ins.pc] = guarded(closure, *self.predicates[ins.pc])
            else:
                self.values[ins.pc] = closure

    def _bound(self, row, ins: Instruction):
        try:
            return row.bind(self.assembler, ins)
        except (
            TypeError,
            KeyError,
            ValueError,
            AttributeError,
            IndexError,
            AssertionError,
        ) as error:
            self.assembler.refuse(ins, f"operands do not fit ({error})")

    def segment(self, pc: int) -> Segment:
        """The piece that starts at ``pc``; it ends before the next block start."""
        found = self._segments.get(pc)
        if found is None:
            found = self._segments[pc] = self._make(pc)
        return found

    def _make(self, pc: int) -> Segment:
        values, code = [], self.kernel.code
        while pc < len(code):
            if pc in self.branches:
                return Segment(tuple(values), BRANCH, pc)
            if flow.ends_thread(code[pc]):
                return Segment(tuple(values), EXIT, pc)
            if pc in self.effects:
                return Segment(tuple(values), EFFECT, pc)
            values.append(self.values[pc])
            pc += 1
            if pc in self.leaders:
                return Segment(tuple(values), FALL, pc)
        return Segment(tuple(values), EXIT, pc)
