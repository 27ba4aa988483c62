"""Binds the instructions of one kernel to closures: value rows to ``steps.Step``, effects over view
numbers (see ``registers``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_dsa.emulator import memory, registers
from jax_dsa.emulator.errors import UnsupportedInstruction
from jax_dsa.emulator.isa import numerics, steps
from jax_dsa.emulator.isa.direct import UFUNCS, without_clamp
from jax_dsa.emulator.isa.steps import Step
from jax_dsa.emulator.ptx import syntax


class Assembler:
    """Knows a kernel's registers, symbols and constants."""

    def __init__(self, kernel: syntax.Kernel):
        self.kernel = kernel
        self.layout = registers.Layout(kernel.registers)
        self.specials: set[str] = set()
        self.symbols = {p.name: p.offset for p in kernel.parameters}
        self.dynamic_start = self._place_shared()

    def _place_shared(self) -> int:
        """Static variables first, each aligned, then the dynamic one; returns the end of the static
        part.
        """
        at = memory.SHARED_START
        for variable in sorted(self.kernel.shared, key=lambda v: v.size == 0):
            at = -(-at // max(variable.align, 1)) * max(variable.align, 1)
            self.symbols[variable.name] = at
            at += variable.size
        return at

    # -- operands ---------------------------------------------------------------------------------
    def refuse(self, instruction: syntax.Instruction, why: str):
        raise UnsupportedInstruction(instruction.opcode, instruction.line, None, why)

    def source(self, operand, type_: str) -> int:
        """View number of a source operand read as ``type_``."""
        if isinstance(operand, syntax.Register):
            return self._register(operand, type_)
        if isinstance(operand, syntax.Symbol):
            return self.layout.constant(registers.dtype_of(type_).type(self.symbol(operand)))
        if isinstance(operand, syntax.Immediate):
            return self.layout.constant(constant(operand.value, type_))
        raise TypeError(f"operand {operand!r} cannot be read as {type_}")

    def destination(self, operand: syntax.Register, type_: str) -> int:
        """View number of a destination: results narrower than the register fill all of it."""
        width = registers.BITS[operand.type]
        if (
            type_ not in registers.PACKED
            and type_ != "pred"
            and registers.BITS.get(type_, 16) < width
        ):
            type_ = f"{'s' if type_[0] == 's' else 'u'}{width}"
        return self._register(operand, type_)

    def part(self, operand: syntax.Register, type_: str, index: int) -> int:
        """View number of piece ``index`` of a register split into pieces of ``type_``."""
        return self.layout.view(operand.name, type_, index)

    def _register(self, operand: syntax.Register, type_: str) -> int:
        if operand.name not in self.layout.types:
            self.specials.add(operand.name)
            self.layout.types[operand.name] = operand.type
        return self.layout.view(operand.name, type_)

    def symbol(self, operand: syntax.Symbol) -> int:
        if operand.name not in self.symbols:
            raise KeyError(
                f"symbol {operand.name!r} is neither a parameter nor a shared variable of this"
                f" kernel"
            )
        return self.symbols[operand.name]

    def address(self, operand) -> tuple[int, int]:
        """(view number of the base as s64, constant offset) of ``[base + offset]``; 32-bit bases
        are unsigned.
        """
        base = operand.base
        if isinstance(base, syntax.Register):
            return self._register(
                base, "s64" if base.type.endswith("64") else "u32"
            ), operand.offset
        value = base.value if isinstance(base, syntax.Immediate) else self.symbol(base)
        return self.layout.constant(np.int64(value)), operand.offset

    def items(self, operand) -> Sequence:
        return operand.items if isinstance(operand, syntax.Vector) else (operand,)

    # -- closures ---------------------------------------------------------------------------------
    def value(
        self, fn: Callable, instruction: syntax.Instruction, dst: str, src: list[str], ftz: bool
    ) -> Step:
        """The step of a value row: destination first, then the sources."""
        target, *operands = instruction.operands
        types = [*src, *[src[-1]] * len(operands)][: len(operands)]
        fn = UFUNCS.get(instruction.opcode, fn)
        if any(isinstance(o, syntax.Negated) for o in operands):
            fn = numerics.negating(fn, [isinstance(o, syntax.Negated) for o in operands])
            operands = [o.register if isinstance(o, syntax.Negated) else o for o in operands]
        if ftz:
            fn = numerics.flushing(fn)
        numbers = [self.source(o, t) for o, t in zip(operands, types, strict=True)]
        fn, numbers = without_clamp(fn, instruction.opcode, numbers, self.layout)
        sources = self.layout.places(*numbers)
        if isinstance(target, syntax.Pair):
            return self._pair(fn, target, sources)
        place = self.layout.views[self.destination(target, dst)]
        return steps.assign(fn, place, sources, dst in registers.PACKED)

    def move(self, target: int, source: int) -> Step:
        return steps.move(*self.layout.places(target, source))

    def _pair(self, fn, target: syntax.Pair, sources) -> Step:
        """``p|q``: the second destination gets the complement (setp, PTX ISA 9.7.6)."""
        assert target.first and target.second
        first, second = (self.destination(t, "pred") for t in (target.first, target.second))
        first, second = self.layout.places(first, second)
        complement = steps.assign(lambda *x: ~fn(*x), second, sources, False)
        return steps.both(steps.assign(fn, first, sources, False), complement)


def constant(value: int | float, type_: str) -> Any:
    """A literal as ``type_``: integers wrap, a float in a bit type gives its IEEE bits."""
    dtype = registers.dtype_of(type_)
    if isinstance(value, float) and dtype.kind in "ui":
        value = (
            struct.unpack("<I", struct.pack("<f", value))[0]
            if dtype.itemsize <= 4
            else _double_bits(value)
        )
    if dtype.kind in "ui":
        return np.array(int(value) & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(
            dtype
        )[()]
    return dtype.type(value != 0 if dtype.kind == "b" else value)


def _double_bits(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]
