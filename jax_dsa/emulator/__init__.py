"""Executes compiled kernels (PTX) on the CPU under every ordering that the hardware may choose, and
checks the order.

    program = Program(ptx_text, entries)
    arrays, report = run(program, Launch("kernel", grid, block, parameters), arrays, Settings())
    assert report.clean

Nothing here needs a GPU, CUDA, JAX or a compiler.
"""

from jax_dsa.emulator.errors import (
    EmulatorError,
    LaunchError,
    PtxSyntaxError,
    StepLimit,
    UnsupportedInstruction,
)
from jax_dsa.emulator.launch import Launch, Program, Settings
from jax_dsa.emulator.report import Fault, Race, Report, Site
from jax_dsa.emulator.run import run
from jax_dsa.emulator.schedule import SCHEDULES, Delay, Schedule
from jax_dsa.emulator.tensor_map import Pointer, TensorMap

__all__ = [
    "SCHEDULES",
    "Delay",
    "EmulatorError",
    "Fault",
    "Launch",
    "LaunchError",
    "Pointer",
    "Program",
    "PtxSyntaxError",
    "Race",
    "Report",
    "Schedule",
    "Settings",
    "Site",
    "StepLimit",
    "TensorMap",
    "UnsupportedInstruction",
    "run",
]
