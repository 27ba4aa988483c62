"""The delay matrix: warps held before each load of tensor memory and before each store that drains
results, as a sleep at that point of their code would do.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jax_dsa.emulator.controls import problems
from jax_dsa.emulator.launch import Settings
from jax_dsa.emulator.schedule import Delay, Schedule

if TYPE_CHECKING:
    from jax_dsa.emulator.controls.study import Subject

BLOCK = 128  # columns per number
DELAYS = (200, None)  # scheduler steps; None: until nobody else can move
BITWISE = ("dq", "out", "lse")  # results that no order of atomics changes


@dataclasses.dataclass(frozen=True)
class Held:
    """What came out while the warps were held at one instruction.

    Attributes:
      line, opcode: of the instruction; steps: see DELAYS.
      errors: relative L2 error per output and block of 128 columns.
      changed: outputs out of BITWISE that differ from those of the run without delay.
      deadlock: somebody waited for ever.
      limits: error per output from which on it is wrong.
    """

    line: int
    opcode: str
    steps: int | None
    errors: dict[str, list[float]]
    changed: tuple[str, ...]
    deadlock: bool
    limits: dict[str, float]

    @property
    def length(self) -> str:
        return f"{self.steps} steps" if self.steps else "until nobody else can move"

    @property
    def harm(self) -> str:
        """Wrong blocks, changed outputs, a deadlock; "" where all is well."""
        wrong = [
            f"{name}[{i * BLOCK}:{(i + 1) * BLOCK}) {error:.2f}"
            for name, blocks in self.errors.items()
            for i, error in enumerate(blocks)
            if error > self.limits[name]
        ]
        wrong += [f"{name} not bitwise equal" for name in self.changed]
        wrong += ["deadlock"] if self.deadlock else []
        return ", ".join(wrong)

    def __str__(self) -> str:
        return f"line {self.line} held {self.length}: {self.harm or 'harmless'}"


def hold(
    subject: Subject,
    site,
    steps: int | None,
    good: dict[str, np.ndarray],
    limits: dict[str, float],
) -> Held:
    """Runs the main kernel with its warps held before ``site``.

    Args:
      subject: what runs; site: the instruction; steps: see DELAYS.
      good: outputs of a run without delay; limits: see Held.
    """
    schedule = Schedule(delays=(Delay(frozenset({site.line}), steps=steps),))
    outputs, report = subject.execute_main(Settings(schedule=schedule, observers="none"))
    errors = {
        name: blocks(result, subject.reference[name])
        for name, result in outputs.items()
        if name in limits
    }
    changed = tuple(
        name
        for name in BITWISE
        if name in outputs and outputs[name].tobytes() != good[name].tobytes()
    )
    return Held(site.line, site.opcode, steps, errors, changed, bool(report.deadlocks), limits)


def blocks(result: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Relative L2 error of each block of columns."""
    starts = range(0, wanted.shape[-1], BLOCK)
    cuts = [np.s_[..., start : start + BLOCK] for start in starts]
    return [problems.relative(result[cut], wanted[cut]) for cut in cuts]


def table(matrix: list[Held]) -> str:
    """One line per instruction and delay: the error of each block."""
    names = list(matrix[0].errors)
    lines = [f"| line | instruction | held | {' | '.join(names)} | bitwise |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for held in matrix:
        errors = " | ".join(
            " ".join(f"{error:.1e}" for error in held.errors[name]) for name in names
        )
        same = "no: " + ", ".join(held.changed) if held.changed else "yes"
        lines.append(f"| {held.line} | `{held.opcode}` | {held.length} | {errors} | {same} |")
    return "\n".join(lines)
