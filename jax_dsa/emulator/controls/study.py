"""What ``jax_dsa.verify`` does with a kernel: results, schedules, delays, mutants; one table and a
report folder.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from jax_dsa.emulator import mutation
from jax_dsa.emulator.controls import delays, mutants, problems
from jax_dsa.emulator.controls.backward import BackwardControl
from jax_dsa.emulator.controls.fetch import Compiled, Source
from jax_dsa.emulator.controls.forward import ForwardControl
from jax_dsa.emulator.controls.picture import draw
from jax_dsa.emulator.launch import Settings
from jax_dsa.emulator.observers.timeline import chrome_trace
from jax_dsa.emulator.report import Report
from jax_dsa.emulator.schedule import SCHEDULES

TOLERANCE = {"out": 4e-3, "dq": 8e-3, "dkv": 8e-3, "d_sink": 8e-3, "lse": 2e-5}
Progress = Callable[[int, int, str], None]


def case_of(source: Source, queries: int = 1) -> problems.Case:
    """The problem that a source is studied on."""
    ignores_sink = source.release == "1.26.0" and source.head_dim == 576
    rows = max(256, 2 * source.max_topk)
    return problems.Case(
        source.head_dim, S=queries, T=rows, K=source.max_topk, sink=not ignores_sink
    )


@dataclasses.dataclass
class Subject:
    """A kernel with a problem: ``execute(settings)`` gives (outputs, report)."""

    control: BackwardControl | ForwardControl
    case: problems.Case
    inputs: problems.Inputs
    reference: dict[str, np.ndarray]
    main: str
    prepared: dict[str, np.ndarray] | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.control.compiled.source.name}, S={self.case.S} T={self.case.T}"
            f" K={self.case.K} H={self.case.H}"
        )

    def execute(self, settings: Settings) -> tuple[dict[str, np.ndarray], Report]:
        result = self.control.run(self.case, settings, self.inputs)
        return {name: getattr(result, name) for name in self.reference}, result.report

    def execute_main(self, settings: Settings) -> tuple[dict[str, np.ndarray], Report]:
        """As ``execute``, without the launches whose results stay the same whatever the main kernel
        does.
        """
        if isinstance(self.control, ForwardControl):
            return self.execute(settings)
        if self.prepared is None:
            _, self.prepared, _ = self.control.main_alone(self.case, self.inputs)
        result = self.control.run_main(self.case, self.inputs, settings, self.prepared)
        return {"dq": result.dq, "dkv": result.dkv}, result.report

    def main_alone(self):
        """The main kernel's launch, and the arrays and settings that it runs with by itself."""
        return self.control.main_alone(self.case, self.inputs)

    def errors(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Relative L2 per output; lse absolutely."""
        found = {}
        for name, wanted in self.reference.items():
            difference = float(np.abs(outputs[name] - wanted).max()) if name == "lse" else 0.0
            found[name] = difference if name == "lse" else problems.relative(outputs[name], wanted)
        return found

    def sites(self) -> list:
        """Where delays go: every tcgen05.ld and every atomic or bulk store that drains results."""
        code = self.control.program.module.kernels[self.main].code
        drains = ("tcgen05.ld", "atom.", "red.", "cp.async.bulk.tensor", "cp.reduce")
        return [
            i for i in code if i.opcode.startswith(drains) and "shared::cta.global" not in i.opcode
        ]


def subject_of(compiled: Compiled, case: problems.Case) -> Subject:
    x = problems.make(case)
    if compiled.source.kind == "forward":
        control = ForwardControl(compiled)
        out, lse = problems.forward(x.q, x.kv, x.indices, x.lengths, x.sink, x.scale)
        return Subject(control, case, x, {"out": out, "lse": lse}, control.symbol)
    control = BackwardControl(compiled)
    reference = problems.backward(x)
    if not control.symbols["sum_dSink"]:
        reference.pop("d_sink")
    return Subject(control, case, x, reference, control.symbols["bwd"])


@dataclasses.dataclass
class Row:
    """One line of the table."""

    step: str
    verdict: str
    detail: str
    clean: bool


class Study:
    """Runs everything and keeps the rows.

    Args:
      subject: what is studied.
      quick: one schedule and every eighth delay site.
      mutate: also the mutants of the main kernel.
      progress: called with (done, total, what).
    """

    def __init__(self, subject: Subject, quick: bool, mutate: bool, progress: Progress):
        self.subject, self.quick, self.progress = subject, quick, progress
        self.rows: list[Row] = []
        self.first: Report | None = None
        self.outcomes: list[mutation.Outcome] = []
        self.matrix: list[delays.Held] = []
        self.mutate = mutate

    @property
    def clean(self) -> bool:
        return all(row.clean for row in self.rows)

    def run(self) -> None:
        names = ["round_robin"] if self.quick else list(SCHEDULES)
        for i, name in enumerate(names):
            self.progress(i, len(names), f"schedule {name}")
            self._schedule(name)
        self.progress(len(names), len(names), "schedules")
        self._delays()
        if self.mutate:
            self._mutants()

    def _schedule(self, name: str) -> None:
        watch = (
            ("races", "registers", "coverage", "timeline")
            if self.first is None
            else ("races", "registers")
        )
        outputs, report = self.subject.execute(Settings(schedule=SCHEDULES[name], observers=watch))
        if self.first is None:
            self.first = report
        errors = self.subject.errors(outputs)
        right = all(error <= TOLERANCE[key] for key, error in errors.items())
        found = (
            f"{len(report.races)} races, {len(report.faults)} faults, {len(report.deadlocks)}"
            f" deadlocks"
        )
        numbers = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        self.rows.append(
            Row(
                f"schedule {name}",
                "clean" if report.clean and right else "NOT CLEAN",
                f"{found}; {numbers}",
                report.clean and right,
            )
        )

    def _delays(self) -> None:
        sites = self.subject.sites()[:: 8 if self.quick else 1]
        tasks = [(site, steps) for site in sites for steps in delays.DELAYS]
        limits = {k: 2 * v for k, v in TOLERANCE.items() if k not in ("lse", "d_sink")}
        good, _ = self.subject.execute_main(Settings(observers="none"))
        for i, (site, steps) in enumerate(tasks):
            self.progress(i, len(tasks), f"delay at line {site.line}")
            self.matrix.append(delays.hold(self.subject, site, steps, good, limits))
        self.progress(len(tasks), len(tasks), "delays")
        harmful = [str(held) for held in self.matrix if held.harm]
        size = f"{len(sites)} sites x {len(delays.DELAYS)} delays; "
        detail = size + ("; ".join(harmful) or "all harmless")
        self.rows.append(Row("delays", "harmful" if harmful else "clean", detail, not harmful))

    def _mutants(self) -> None:
        """Clean when each one is noticed or proven to be redundant."""
        self.outcomes = mutants.survey(self.subject, self.progress)
        missed = [str(o.mutant) for o in self.outcomes if o.missed]
        detail = mutants.score(self.outcomes) + "".join(f"; missed {text}" for text in missed)
        self.rows.append(Row("mutants", "MISSED" if missed else "clean", detail, not missed))

    # -- output
    # -------------------------------------------------------------------------------------
    def table(self) -> str:
        """The result as a Markdown table."""
        lines = ["| step | verdict | detail |", "|---|---|---|"]
        lines += [f"| {r.step} | {r.verdict} | {r.detail} |" for r in self.rows]
        return "\n".join(lines)

    def markdown(self) -> str:
        assert self.first is not None
        parts = [
            f"# {self.subject.name}",
            self.table(),
            "## Findings (round robin)",
            f"```\n{self.first}\n```",
        ]
        for kernel, lines in self.first.coverage.items():
            parts.append(
                f"{kernel[:60]}: {len(lines)} instructions were never executed: lines"
                f" {_spans(lines)}"
            )
        if self.matrix:
            errors = "Relative L2 error per block of 128 columns.\n\n" + delays.table(self.matrix)
            parts.append(f"## Delays\n{errors}")
        if self.outcomes:
            parts.append(f"## Mutants\n{mutants.table(self.outcomes)}")
            parts.append(f"## Proofs\n{mutants.proofs(self.outcomes)}")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: pathlib.Path) -> None:
        """report.md, timeline.json (Perfetto) and, where matplotlib is installed, timeline.png."""
        assert self.first is not None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(self.markdown())
        (folder / "timeline.json").write_text(chrome_trace(self.first.timeline))
        draw(self.first, folder / "timeline.png")


def _spans(lines) -> str:
    """Runs of lines, shortened."""
    spans: list[list[int]] = []
    for line in lines:
        if spans and line - spans[-1][1] <= 2:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in spans)
