"""Registration of rows: templates of opcodes, decorators, look-up."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax_dsa.emulator.errors import UnsupportedInstruction
from jax_dsa.emulator.ptx.syntax import Instruction

if TYPE_CHECKING:
    from jax_dsa.emulator.isa.assembler import Assembler

WAIT = "wait"  # what an effect returns when its lanes have to try again later
Types = Callable[[list[str]], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One supported form. ``bind`` turns an instruction into a closure; ``effect`` tells which kind
    of closure.
    """

    form: str
    bind: Callable[[Assembler, Instruction], Any]
    effect: bool
    doc: str


TABLE: dict[str, Row] = {}


def expand(template: str) -> list[str]:
    """All opcodes of a template: ``{a|b|}`` stands for a, b or nothing."""
    pieces = re.split(r"\{([^{}]*)\}", template)
    choices = [p.split("|") if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(c) for c in itertools.product(*choices)]


def _register(row: Row) -> None:
    assert row.form not in TABLE, f"{row.form} is registered twice"
    TABLE[row.form] = row


def value(*templates: str, d: str | None = None, s: str | None = None):
    """Registers ``fn(*sources) -> result`` on typed vectors.

    Args:
      templates: opcodes, see ``expand``.
      d, s: types of destination and of the sources (space separated, the last one repeats);
      default: the opcode's
        last suffix. ``-2`` means the opcode's suffix before the last, and so on.
    """

    def pick(text: str | None, parts: list[str]) -> list[str]:
        names = (text or "-1").split()
        return [parts[int(n)] if n.startswith("-") else n for n in names]

    def decorate(fn):
        for form in itertools.chain.from_iterable(expand(t) for t in templates):
            parts = form.split(".")
            dst, src, ftz = pick(d, parts)[0], pick(s, parts), "ftz" in parts
            bind = _value_binder(fn, dst, src, ftz)
            _register(Row(form, bind, False, fn.__doc__ or ""))
        return fn

    return decorate


def _value_binder(fn, dst: str, src: list[str], ftz: bool):
    def bind(asm: Assembler, instruction: Instruction):
        return asm.value(fn, instruction, dst, src, ftz)

    return bind


def effect(*templates: str):
    """Registers ``bind(asm, instruction, parts) -> run(group, active)``; ``parts`` is the dotted
    opcode, split.
    """
    return _binder(templates, True)


def silent(*templates: str):
    """Registers ``bind(asm, instruction, parts) -> Step`` for value rows of unusual shape."""
    return _binder(templates, False)


def _binder(templates, is_effect: bool):
    def decorate(fn):
        def bind(asm: Assembler, instruction: Instruction):
            return fn(asm, instruction, instruction.opcode.split("."))

        for form in itertools.chain.from_iterable(expand(t) for t in templates):
            _register(Row(form, bind, is_effect, fn.__doc__ or ""))
        return fn

    return decorate


def supported_forms() -> list[str]:
    return sorted(TABLE)


def find(instruction: Instruction) -> Row:
    """The row of an instruction, or UnsupportedInstruction with the nearest form."""
    row = TABLE.get(instruction.opcode)
    if row is None:
        near = difflib.get_close_matches(instruction.opcode, TABLE, 1, 0.5)
        raise UnsupportedInstruction(
            instruction.opcode, instruction.line, near[0] if near else None
        )
    return row
