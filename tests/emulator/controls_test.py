"""Tier ``controls``: kernels that others have run on hardware, installed by name and compiled here.

    JAX_DSA_CONTROLS=1 pytest tests/emulator/controls_test.py

JAX_DSA_CONTROLS_DIR keeps packages and PTX between runs (default: a temporary folder);
JAX_DSA_CONTROLS_PYTHON is an
interpreter that has nvidia-cutlass-dsl (default: the running one, which installs it into the folder
when needed).
"""

import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import unittest

import numpy as np
from absl.testing import absltest, parameterized

from jax_dsa.emulator import SCHEDULES, Delay, Schedule, Settings, mutation, run
from jax_dsa.emulator.controls import Source, compile_peer, mutants, problems, study
from jax_dsa.emulator.isa import TABLE
from jax_dsa.emulator.observers.races import Races

ENABLED = os.environ.get("JAX_DSA_CONTROLS") == "1"
WATCH = ("races", "registers")
_TEMPORARY = tempfile.TemporaryDirectory()


@functools.cache
def subject(
    release: str, head_dim: int, kind: str = "backward", lengths=(), exact=False
) -> study.Subject:
    folder = pathlib.Path(os.environ.get("JAX_DSA_CONTROLS_DIR", _TEMPORARY.name))
    python = os.environ.get("JAX_DSA_CONTROLS_PYTHON", sys.executable)
    compiled = compile_peer(Source(release, kind, head_dim), folder, python)
    case = study.case_of(compiled.source)
    changed = problems.Case(head_dim, T=256, K=128, lengths=lengths, sink=case.sink, exact=exact)
    return study.subject_of(compiled, changed)


@unittest.skipUnless(ENABLED, "set JAX_DSA_CONTROLS=1")
class ControlsTest(parameterized.TestCase):
    def assert_right(self, s: study.Subject, outputs):
        for name, error in s.errors(outputs).items():
            self.assertLessEqual(error, study.TOLERANCE[name], name)

    def columns(self, race) -> tuple[int, int]:
        columns = np.array(race.cells) % 512
        return int(columns.min()), int(columns.max())

    @parameterized.product(
        release=("1.27.0", "1.32.0"), head_dim=(576, 512), schedule=tuple(SCHEDULES)
    )
    def test_known_good_backward_is_right_and_clean(self, release, head_dim, schedule):
        s = subject(release, head_dim)
        outputs, report = s.execute(Settings(schedule=SCHEDULES[schedule], observers=WATCH))
        self.assertTrue(report.clean, str(report)[:4000])
        self.assert_right(s, outputs)
        reference, _ = s.execute(Settings(observers="none"))
        self.assertEqual(outputs["dq"].tobytes(), reference["dq"].tobytes())

    @parameterized.parameters(*SCHEDULES)
    def test_known_good_forward_is_right_and_clean(self, schedule):
        """gather4, mma.ws, A in tensor memory, tcgen05.cp and the tcgen05 fences."""
        s = subject("1.32.0", 576, "forward")
        outputs, report = s.execute(Settings(schedule=SCHEDULES[schedule], observers=WATCH))
        self.assertTrue(report.clean, str(report)[:4000])
        self.assert_right(s, outputs)
        self.assertEqual([f for f in report.lints if f.kind == "tcgen05 fence"], [])

    @parameterized.product(head_dim=(576, 512), schedule=("round_robin", "lazy"))
    def test_exact_inputs_give_bitwise_results(self, head_dim, schedule):
        s = subject("1.27.0", head_dim, exact=True)
        outputs, _ = s.execute(Settings(schedule=SCHEDULES[schedule], observers="none"))
        for name in ("dq", "dkv"):
            # Multiples of scale / K = 2**-11; the float64 reference is off by its exp and log.
            exact = np.round(s.reference[name] * 2.0**16) / 2.0**16
            np.testing.assert_array_equal(outputs[name], exact.astype(problems.BF16))

    @parameterized.parameters(*SCHEDULES)
    def test_published_race_of_1_26(self, schedule):
        """dKV2 reads (columns 64-127) against dKV0 products, dKV3 reads (128-191) against dKV1; and
        the deallocation.
        """
        s = subject("1.26.0", 576)
        outputs, report = s.execute(Settings(schedule=SCHEDULES[schedule], observers=WATCH))
        self.assertEqual(report.faults, ())
        dealloc = [r for r in report.races if "dealloc" in r.second.text]
        others = [r for r in report.races if "dealloc" not in r.second.text]
        self.assertLen(dealloc, 4)
        self.assertLen(others, 16)
        for race in others:
            self.assertEqual((race.space, race.kinds), ("tensor", ("read", "write")))
            self.assertEqual((race.first.role, race.second.role), ("reduce", "mma"))
            self.assertIn(self.columns(race), ((64, 127), (128, 191)))
            self.assertStartsWith(race.first.text, "tcgen05.ld")
            self.assertStartsWith(race.second.text, "tcgen05.mma")
            self.assertIn("tcgen05.wait::ld", race.missing)
        self.assert_right(s, outputs)

    @parameterized.parameters("1.26.0", "1.27.0")
    def test_two_processes_give_the_report_of_one(self, release):
        s = subject(release, 576)
        three = study.subject_of(s.control.compiled, dataclasses.replace(s.case, S=3))
        one, two = (three.execute(Settings(processes=n)) for n in (1, 2))
        self.assertEqual(repr(two[1]), repr(one[1]))
        for name, array in one[0].items():
            self.assertEqual(two[0][name].tobytes(), array.tobytes(), name)

    def test_1_26_with_one_tile_or_at_512_shows_the_deallocation_only(self):
        for s, count in ((subject("1.26.0", 576, lengths=(64,)), 4), (subject("1.26.0", 512), 2)):
            _, report = s.execute(Settings(observers=WATCH))
            self.assertLen(report.races, count)
            self.assertTrue(all("dealloc" in r.second.text for r in report.races))

    def wrong_blocks(self, s: study.Subject, line: int) -> list[int]:
        """First columns of the 128-wide blocks of dkv that a hold before ``line`` corrupts."""
        schedule = Schedule(delays=(Delay(frozenset({line})),))
        outputs, _ = s.execute_main(Settings(schedule=schedule, observers="none"))
        self.assertLessEqual(problems.relative(outputs["dq"], s.reference["dq"]), 8e-3)
        wanted = s.reference["dkv"]
        blocks = range(0, wanted.shape[1], 128)
        cut = [np.s_[:, b : b + 128] for b in blocks]
        errors = [problems.relative(outputs["dkv"][c], wanted[c]) for c in cut]
        self.assertTrue(all(e < 8e-3 or e > 0.5 for e in errors), errors)
        return [b for b, e in zip(blocks, errors, strict=True) if e > 0.5]

    def test_a_sleep_between_the_reads_of_1_26_corrupts_what_was_published(self):
        s = subject("1.26.0", 576)
        _, report = s.execute(Settings(observers=("races",)))
        reads = sorted({r.first.line for r in report.races})
        self.assertLen(reads, 4)
        self.assertEqual(self.wrong_blocks(s, reads[0]), [256, 384])
        self.assertEqual(self.wrong_blocks(s, reads[2]), [384])
        earlier = [
            i.line for i in s.sites() if i.opcode.startswith("tcgen05.ld") and i.line < reads[0]
        ]
        self.assertEqual(self.wrong_blocks(s, earlier[-1]), [])

    def test_the_graph_of_1_26_leaves_the_published_pairs_unordered(self):
        s = subject("1.26.0", 576)
        _, report = s.execute(Settings(observers=WATCH))
        races = {(r.first.line, r.second.line) for r in report.races}
        self.assertLen(races, 20)
        self.assertEqual(set(mutants.prover_of(s).unordered()), races)
        self.assertEqual(mutants.prover_of(subject("1.27.0", 576)).unordered(), [])

    def test_removing_named_barrier_10_recreates_the_sixteen_pairs(self):
        s = subject("1.27.0", 576)
        launch, arrays, settings = s.main_alone()
        code = s.control.program.code(launch.kernel)
        mutant = next(
            m
            for m in mutation.mutants(code)
            if m.ins.opcode == "bar.sync" and m.ins.operands[0].value == 10
        )
        changed, _ = mutation.apply(code, mutant)
        codes, races = {launch.kernel: changed}, Races(lints=False)
        _, report = run(s.control.program, launch, arrays, settings, [races], codes)
        self.assertEqual({self.columns(r) for r in report.races}, {(64, 127), (128, 191)})
        self.assertLen(report.races, 16)
        (outcome,) = mutants.survey(s, lambda *_: None, [mutant])
        self.assertEqual(outcome.caught, "race")
        self.assertStartsWith(outcome.detail, "16 pairs in tensor")

    def test_the_table_covers_every_opcode_of_the_controls(self):
        sources = [
            ("1.26.0", 512, "backward"),
            ("1.27.0", 576, "backward"),
            ("1.32.0", 576, "forward"),
        ]
        for release, head_dim, kind in sources:
            for kernel in subject(release, head_dim, kind).control.program.module.kernels.values():
                opcodes = {i.opcode for i in kernel.code}
                self.assertEqual(
                    [
                        o
                        for o in opcodes
                        if o.split(".")[0] not in ("bra", "ret", "exit") and o not in TABLE
                    ],
                    [],
                )


if __name__ == "__main__":
    absltest.main()
