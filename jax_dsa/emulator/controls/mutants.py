"""Mutants of a subject's main kernel: the runs, and the tables of what noticed them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jax_dsa.emulator import mutation
from jax_dsa.emulator.observers.graph import Graph
from jax_dsa.emulator.observers.races import Races
from jax_dsa.emulator.proof import Prover
from jax_dsa.emulator.run import run

if TYPE_CHECKING:
    from jax_dsa.emulator.controls.study import Subject

STEPS = 20  # a mutant that takes this many times the steps of the original is stuck


def prover_of(subject: Subject) -> Prover:
    """On the happens-before graph of one run of the unchanged main kernel."""
    graph = Graph()
    launch, arrays, settings = subject.main_alone()
    run(subject.control.program, launch, arrays, settings, [graph])
    return Prover(graph)


def survey(
    subject: Subject,
    progress: Callable[[int, int, str], None],
    chosen: list[mutation.Mutant] | None = None,
) -> list[mutation.Outcome]:
    """Runs the mutants (default: all) of the main kernel."""
    program = subject.control.program
    launch, arrays, settings = subject.main_alone()
    code = program.code(launch.kernel)
    good, report = run(program, launch, arrays, settings, [Races()])
    strict = all(lint.kind != "tcgen05 fence" for lint in report.lints)
    limited = dataclasses.replace(settings, step_limit=STEPS * report.steps)

    def execute(changed):
        results, found = run(
            program, launch, arrays, limited, [Races(lints=strict)], {launch.kernel: changed}
        )
        return found, _difference(results, good)

    chosen, outcomes = mutation.mutants(code) if chosen is None else chosen, []
    for outcome in mutation.survey(code, execute, prover_of(subject), chosen):
        outcomes.append(outcome)
        progress(len(outcomes), len(chosen), str(outcome.mutant))
    return outcomes


def _difference(results, good) -> str:
    """Which arrays differ: those of one order bitwise, sums of atomics by more than rounding."""
    wrong = []
    for name, wanted in good.items():
        same = results[name].tobytes() == wanted.tobytes()
        if not same and not (
            wanted.dtype == np.float32 and np.allclose(results[name], wanted, 1e-3, 1e-3)
        ):
            wrong.append(name)
    return f"{', '.join(wrong)} differ" if wrong else ""


def score(outcomes: list[mutation.Outcome]) -> str:
    """How many were run, and what noticed how many."""
    kinds = collections.Counter(o.caught for o in outcomes)
    return f"{len(outcomes)} mutants: " + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))


def table(outcomes: list[mutation.Outcome]) -> str:
    """One line per mutant; the detail of a silent one is its proof, shortened."""
    lines = ["| line | change | instruction | caught by | detail |", "|---|---|---|---|---|"]
    for o in outcomes:
        ins = o.mutant.ins
        lines.append(
            f"| {ins.line} | {o.mutant.detail} | `{ins.opcode}` | {o.caught} | {o.detail} |"
        )
    return "\n".join(lines)


def proofs(outcomes: list[mutation.Outcome]) -> str:
    """Every remaining path of every silent mutant."""
    parts = []
    for o in outcomes:
        if o.proof is not None and o.proof.ways:
            words = "\n".join(f"- {text}" for text in o.proof.words())
            parts.append(f"### {o.mutant}\n{o.proof.pairs} pairs\n{words}")
    return "\n\n".join(parts)
