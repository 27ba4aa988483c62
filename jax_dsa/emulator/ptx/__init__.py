"""PTX text to data: lexer, parser, control flow."""

from jax_dsa.emulator.ptx.parser import parse
from jax_dsa.emulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Module,
    Negated,
    Pair,
    Parameter,
    Register,
    Symbol,
    Vector,
)

__all__ = [
    "Address",
    "Immediate",
    "Instruction",
    "Kernel",
    "Label",
    "Module",
    "Negated",
    "Pair",
    "Parameter",
    "Register",
    "Symbol",
    "Vector",
    "parse",
]
