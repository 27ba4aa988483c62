"""The machine as a whole: divergence, launches, limits, bad input, replay, coverage, timeline."""

import dataclasses
import json

import harness
import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute, lanes

from jax_dsa.cubins import manifest
from jax_dsa.emulator import (
    Delay,
    Launch,
    LaunchError,
    Pointer,
    Program,
    Schedule,
    Settings,
    StepLimit,
    TensorMap,
    run,
)
from jax_dsa.emulator.observers.timeline import chrome_trace


class DivergenceTest(parameterized.TestCase):
    def test_each_lane_loops_its_own_number_of_times(self):
        body = f"""{THREAD}
            mov.u32 %r4, 0;
            mov.u32 %r5, %r0;
        LOOP:
            setp.eq.u32 %p0, %r5, 0;
            @%p0 bra DONE;
            add.s32 %r4, %r4, %r5;
            sub.s32 %r5, %r5, 1;
            bra LOOP;
        DONE:
            add.s64 %d1, %b, %d0;
            st.global.b32 [%d1], %r4;"""
        arrays, report = execute(body, {"b": lanes()})
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], np.cumsum(lanes()))

    def test_nested_branches_and_early_exits(self):
        body = f"""{THREAD}
            and.b32 %r4, %r0, 3;
            setp.eq.u32 %p0, %r4, 0;
            setp.lt.u32 %p1, %r4, 2;
            mov.u32 %r5, 100;
            @%p0 exit;
            @%p1 bra ONE;
            setp.eq.u32 %p2, %r4, 2;
            @%p2 bra TWO;
            add.s32 %r5, %r5, 3;
            bra MEET;
        TWO:
            add.s32 %r5, %r5, 2;
            bra MEET;
        ONE:
            add.s32 %r5, %r5, 1;
        MEET:
            add.s64 %d1, %b, %d0;
            st.global.b32 [%d1], %r5;"""
        arrays, report = execute(body, {"b": np.zeros(32, np.uint32)})
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], np.where(lanes() % 4, 100 + lanes() % 4, 0))

    def test_one_side_of_a_branch_may_wait_for_the_other(self):
        """Lane 0 waits for an arrival that the other lanes of its warp make."""
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            setp.eq.u32 %p0, %r0, 0;
            @%p0 mbarrier.init.shared.b64 [%r3], 31;
            bar.warp.sync -1;
            @%p0 bra WAIT;
            mbarrier.arrive.shared.b64 _, [%r3];
            bra MEET;
        WAIT:
            mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0;
            @!%p1 bra WAIT;
        MEET:
            add.s32 %r4, %r0, 1;"""
        _, report = execute(body, shared=64)
        self.assertTrue(report.clean, report)

    def test_setmaxnreg_waits_for_the_pool(self):
        body = f"""{THREAD}
            setp.eq.u32 %p0, %r2, 0;
            @%p0 bra TAKE;
            setmaxnreg.dec.sync.aligned.u32 40;
            bra END;
        TAKE:
            setmaxnreg.inc.sync.aligned.u32 88;
        END:"""
        entry = manifest.Kernel("test", "sm_100a", "test", [], (64, 1, 1), registers=64)
        program = Program(harness.text(body), [entry])
        _, report = run(program, Launch("test", (1, 1, 1), (64, 1, 1), [], entry=entry), {})
        self.assertTrue(report.clean, report)
        few = dataclasses.replace(entry, registers=60)
        _, report = run(program, Launch("test", (1, 1, 1), (64, 1, 1), [], entry=few), {})
        self.assertIn("waits for 88 registers", report.deadlocks[0])


class FaultTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "beyond",
            "st.global.b32 [%a+128], %r0;",
            "out of bounds",
            "128 bytes after the start of global array 'a'",
        ),
        ("before", "st.global.b32 [%a+-4], %r0;", "out of bounds", "global address"),
        ("null", "ld.global.b32 %r4, [0];", "out of bounds", "below every array"),
        ("shared", "ld.shared.b32 %r4, [%r3+8192];", "out of bounds", "shared address"),
        ("aligned", "ld.global.b64 %d4, [%a+4];", "misaligned", "not a multiple of 8"),
        ("unwritten", "ld.shared.b32 %r4, [%r3];", "uninitialised", "bytes [1024, 1028)"),
        ("output", "ld.global.b32 %r4, [%b];", "uninitialised", "global array 'b'"),
        ("register", "add.s32 %r4, %r77, 1;", "uninitialised", "register %r77"),
    )
    def test_reported_with_place_and_instruction(self, instruction, kind, text):
        body = f"{THREAD} mov.u32 %r3, smem; {instruction}"
        arrays = {"a": lanes(), "b": lanes()}
        _, report = execute(body, arrays, shared=64, outputs=("b",))
        self.assertEqual({f.kind for f in report.faults}, {kind}, str(report))
        self.assertIn(text, str(report))
        self.assertIn(instruction.rstrip(";"), report.faults[0].site.text)


POINTER = (Pointer("a"),)


class LaunchTest(parameterized.TestCase):
    TEXT = harness.text("ret;", ("a",))

    def launch(
        self,
        parameters=POINTER,
        grid=(1, 1, 1),
        block=(32, 1, 1),
        shared=0,
        arrays=None,
        **more,
    ):
        launch = Launch("test", grid, block, list(parameters), shared, **more)
        return run(Program(self.TEXT), launch, {"a": lanes()} if arrays is None else arrays)

    def test_bad_launches_are_refused_before_anything_runs(self):
        cases = [
            (dict(parameters=[]), "0 parameters given, 1 wanted"),
            (dict(parameters=[b"1234"]), "4 bytes for a parameter of 8"),
            (dict(arrays={}), "array 'a' is not among"),
            (dict(grid=(0, 1, 1)), "grid"),
            (dict(grid=(1, 70000, 1)), "grid"),
            (dict(block=(2048, 1, 1)), "2048 threads"),
            (dict(shared=300000), "bytes of shared memory"),
            (dict(cluster=(2, 1, 1)), "cluster"),
        ]
        for given, text in cases:
            with self.subTest(text), self.assertRaisesRegex(LaunchError, text):
                self.launch(**given)

    def test_manifest_must_match_the_entry(self):
        parameter = manifest.Parameter("a", "scalar", "i32")
        entry = manifest.Kernel("test", "sm_100a", "test", [parameter], (32, 1, 1))
        with self.assertRaisesRegex(
            manifest.ManifestError, "parameter 0 .'a'. has 4 bytes in the manifest, 8"
        ):
            Program(self.TEXT, [entry])

    def test_tensor_maps_are_checked(self):
        text = harness.HEADER + ".visible .entry test(.param .align 64 .b8 m[128]) { ret; }"
        bad = TensorMap("FLOAT32", Pointer("a"), (8, 4), (20,), (512, 4), swizzle="128B")
        with self.assertRaisesRegex(LaunchError, "multiples of 16"):
            run(Program(text), Launch("test", (1, 1, 1), (32, 1, 1), [bad]), {"a": lanes()})

    def test_step_limit_shows_every_warp(self):
        with self.assertRaisesRegex(StepLimit, "warp 1 .32 lanes. at line"):
            execute("L: add.s32 %r1, 1, 1; bra L;", threads=64, step_limit=500)

    def test_launches_run_in_stream_order_on_shared_arrays(self):
        body = (
            f"{THREAD} add.s64 %d1, %a, %d0; ld.global.b32 %r4, [%d1]; add.s32 %r4, %r4, %r4;"
            f" st.global.b32 [%d1], %r4;"
        )
        launch = Launch("test", (1, 1, 1), (32, 1, 1), [Pointer("a")])
        arrays, report = run(Program(harness.text(body, ("a",))), [launch] * 3, {"a": lanes()})
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["a"], 8 * lanes())

    def test_manifest_survives_json(self):
        entry = manifest.Kernel(
            "k", "sm_100a", "backward", [manifest.Parameter("q", "tensor_map",
            tensor_map={"rank": 3})], (640, 1, 1),
            roles=[manifest.Role("mma", 16, 16)], regions=[manifest.Region("S", "tensor", 0, 64)],
            facts={"head_dim": 576},
        )  # fmt: skip
        (back,) = manifest.Manifest.from_json(manifest.Manifest([entry]).to_json()).kernels
        self.assertEqual((back.symbol, back.role(16), back.parameters[0].bytes), ("k", "mma", 128))
        with self.assertRaises(manifest.ManifestError):
            manifest.Manifest.from_json('{"version": 0, "kernels": []}')


RACY = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p0, %r2, 0;
    @%p0 st.shared.b32 [%r3], %r0;
    @!%p0 ld.shared.b32 %r5, [%r3];
    bar.sync 0;"""


class ReplayTest(parameterized.TestCase):
    @parameterized.parameters(*SCHEDULES)
    def test_same_seed_same_report_byte_for_byte(self, schedule):
        reports = [
            execute(RACY, shared=64, threads=96, schedule=SCHEDULES[schedule])[1] for _ in range(2)
        ]
        self.assertEqual(str(reports[0]), str(reports[1]))
        self.assertEqual(chrome_trace(reports[0].timeline), chrome_trace(reports[1].timeline))
        self.assertNotEmpty(reports[0].races)

    def test_delays_hold_a_warp(self):
        """Warp 0 stores, warp 1 loads; holding warp 0 makes warp 1 read what was there before."""
        body = (
            f"{THREAD} setp.eq.u32 %p0, %r2, 0; @%p0 bra W; ld.global.b32 %r4, [%a];"
            f" st.global.b32 [%b], %r4; exit; W: st.global.b32 [%a], 5;"
        )
        arrays = {"a": np.full(1, 3, np.uint32), "b": np.zeros(1, np.uint32)}
        for steps, warp, expected in ((None, 0, 3), (None, 1, 5), (50, 1, 5)):
            delay = Delay(
                opcode="st.global" if warp == 0 else "ld.global",
                warps=frozenset({warp}),
                steps=steps,
            )
            result, _ = execute(
                body, arrays, threads=64, schedule=Schedule(delays=(delay,)), observers="none"
            )
            self.assertEqual(result["b"][0], expected, (steps, warp))

    def test_coverage_names_lines(self):
        _, report = execute("setp.eq.u32 %p0, 0, 1; @%p0 bra A; exit; A: add.s32 %r1, 1, 1;")
        (lines,) = report.coverage.values()
        self.assertLen(lines, 2)

    def test_timeline_has_waits_and_work(self):
        _, report = execute(RACY, shared=64, threads=64)
        events = json.loads(chrome_trace(report.timeline))["traceEvents"]
        self.assertContainsSubset({"wait", "arrive", "thread_name"}, {e["name"] for e in events})

    def test_no_observers_means_no_findings(self):
        _, report = execute(RACY, shared=64, threads=64, observers="none")
        self.assertTrue(report.clean)

    def test_unknown_observers_are_refused(self):
        with self.assertRaisesRegex(LaunchError, "nonsense"):
            execute("ret;", observers=("nonsense",))
        with self.assertRaisesRegex(LaunchError, "outputs"):
            run(
                Program(harness.text("ret;")),
                Launch("test", (1, 1, 1), (32, 1, 1), []),
                {},
                Settings(outputs=frozenset({"x"})),
            )


if __name__ == "__main__":
    absltest.main()
