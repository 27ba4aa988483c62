"""Which instructions were never executed."""

from __future__ import annotations

from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.report import Report


class Coverage(Observer):
    """Fills Report.coverage: kernel -> PTX lines that no warp has reached."""

    def __init__(self) -> None:
        self.starts: dict[str, set[int]] = {}
        self.codes: dict = {}

    def launch(self, machine) -> None:
        self.code = machine.code
        self.codes[machine.code.kernel.name] = machine.code
        self.current = self.starts.setdefault(machine.code.kernel.name, set())

    def execute(self, group, pc: int) -> None:
        self.current.add(pc)

    def fresh(self) -> Coverage:
        return Coverage()

    def hand_over(self) -> set[int]:
        return self.current

    def adopt(self, found: set[int], machine, touched) -> None:
        self.current |= found

    def fill(self, report: Report) -> None:
        for name, starts in self.starts.items():
            code = self.codes[name]
            reached: set[int] = set()
            for start in starts:
                reached.update(range(start, code.segment(start).pc + 1))
            report.coverage[name] = tuple(i.line for i in code.kernel.code if i.pc not in reached)
