"""The instruction table: one small function per opcode, registered under every form that it
supports.

Two kinds of rows. A *value* row is a pure function from typed vectors of 32 lanes to a vector; the
assembler reads
its sources, writes its destination under the mask of active lanes, and no observer hears of it. An
*effect* row binds
an instruction to a closure ``run(group, active)`` that touches memory, synchronises, or starts
asynchronous work;
it returns None when it is done and ``WAIT`` when its lanes have to wait and try again.
"""

from jax_dsa.emulator.isa import (  # noqa: F401  (importing a module fills the table)
    arithmetic,
    barriers,
    bits,
    bulk,
    control,
    convert,
    copies,
    floats,
    matrix,
    memory,
    mma,
    tensor_copies,
    tensor_core,
    warp,
    wgmma,
)
from jax_dsa.emulator.isa.table import TABLE, find, supported_forms

__all__ = ["TABLE", "find", "supported_forms"]
