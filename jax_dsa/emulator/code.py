"""A kernel made ready to run: straight pieces of value closures, each followed by one effect,
branch or exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax_dsa.emulator.isa.assembler import Assembler
from jax_dsa.emulator.isa.steps import Step, guarded
from jax_dsa.emulator.isa.table import find
from jax_dsa.emulator.ptx import flow
from jax_dsa.emulator.ptx.syntax import Instruction, Kernel, Label

FALL, EFFECT, BRANCH, EXIT = range(4)


class Segment(NamedTuple):
    """Steps for all lanes, the same under a mask; then ``kind`` says what follows at ``pc`` (the
    effect, the branch, ...).
    """

    full: tuple
    masked: tuple
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
        self.steps: dict[int, Step] = {}
        for instruction in kernel.code:
            self._bind(instruction)
        self.segments: dict[int, Segment] = {}
        self.notes: dict = {}  # what observers have worked out about the instructions

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
                number, negated = self.predicates[ins.pc]
                self.steps[ins.pc] = guarded(closure, self.layout.views[number], negated)
            else:
                self.steps[ins.pc] = closure

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
        found = self.segments.get(pc)
        if found is None:
            found = self.segments[pc] = self._make(pc)
        return found

    def _make(self, pc: int) -> Segment:
        steps, code = [], self.kernel.code
        while pc < len(code):
            if pc in self.branches:
                return _segment(steps, BRANCH, pc)
            if flow.ends_thread(code[pc]):
                return _segment(steps, EXIT, pc)
            if pc in self.effects:
                return _segment(steps, EFFECT, pc)
            steps.append(self.steps[pc])
            pc += 1
            if pc in self.leaders:
                return _segment(steps, FALL, pc)
        return _segment(steps, EXIT, pc)


def _segment(steps: list[Step], kind: int, pc: int) -> Segment:
    return Segment(tuple(s.full for s in steps), tuple(s.masked for s in steps), kind, pc)
