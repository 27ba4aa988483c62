"""The parsed form of PTX: operands, instructions, kernels."""

from __future__ import annotations

import dataclasses

SIZES = {"pred": 1} | {
    f"{kind}{bits}": bits // 8
    for kind in "busf"
    for bits in (8, 16, 32, 64)
    if (kind, bits) != ("f", 8)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """A declared register (name unique in its kernel: scopes are renamed) or a special one."""

    name: str
    type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Immediate:
    """A literal: an integer, or a float with the bit pattern already decoded."""

    value: int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a parameter or of a shared or global variable."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """A branch target, resolved to the position of the instruction behind it."""

    name: str
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``; None stands for the sink ``_``."""

    items: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]`` or ``[base, {coordinates}]``."""

    base: Register | Immediate | Symbol
    offset: int = 0
    coordinates: tuple = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Register | None
    second: Register | None


@dataclasses.dataclass(frozen=True, slots=True)
class Negated:
    """``!p`` as a source operand."""

    register: Register


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: full dotted opcode, operands, guard, line in the PTX text, position in the
    kernel.
    """

    opcode: str
    operands: tuple
    guard: Register | None
    guard_negated: bool
    line: int
    pc: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One ``.param`` of an entry: bytes, alignment and offset in the parameter space."""

    name: str
    size: int
    align: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class SharedVariable:
    """A ``.shared`` variable; size 0 is the dynamic one (``.extern``)."""

    name: str
    size: int
    align: int


@dataclasses.dataclass
class Kernel:
    """One ``.entry``: parameters, registers, code, and the limits that the text states."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str] = dataclasses.field(default_factory=dict)
    code: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[int, str] = dataclasses.field(default_factory=dict)
    shared: list[SharedVariable] = dataclasses.field(default_factory=list)
    block: tuple[int, int, int] | None = None


@dataclasses.dataclass
class Module:
    """A PTX file: target architecture, version, kernels by name in their order."""

    version: str
    target: str
    kernels: dict[str, Kernel]
