"""Every synchronisation rule as a pair: silent with the edge, a race without it."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from harness import ARRIVE, BOTH, INIT, SCHEDULES, WARPS, PairTest, execute, lanes, wait_loop


class NamedBarrierTest(PairTest):
    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_write_then_read_requires_bar_sync(self, ordered, schedule):
        body = f"""{WARPS}
            @%p0 bra WRITE;
            {"bar.sync 1, 64;" if ordered else ""}
            ld.shared.b32 %r5, [%r3];
            bra END;
        WRITE:
            @%p1 st.shared.b32 [%r3], %r0;
            {"bar.sync 1, 64;" if ordered else ""}
        END:"""
        _, report = execute(body, shared=64, threads=64, schedule=SCHEDULES[schedule])
        self.assertEqual(report.races == (), ordered, str(report))

    @parameterized.parameters(*BOTH)
    def test_write_then_read_requires_the_arrive_after_the_write(self, ordered):
        arrive, write = "bar.arrive 1, 64;", "@%p1 st.shared.b32 [%r3], %r0;"
        body = f"""{WARPS}
            @%p0 bra WRITE;
            bar.sync 1, 64;
            ld.shared.b32 %r5, [%r3];
            bra END;
        WRITE:
            {write + arrive if ordered else arrive + write}
        END:"""
        _, report = execute(body, shared=64, threads=64)
        self.assertEqual(report.races == (), ordered, str(report))

    @parameterized.parameters(*BOTH)
    def test_two_readers_then_write_requires_both(self, ordered):
        """The writer waits for one reader; the other one is remembered too."""
        count = 96 if ordered else 64
        body = f"""{WARPS}
            @%p0 st.shared.b32 [%r3], %r0;
            bar.sync 0;
            setp.eq.u32 %p2, %r2, 2;
            @%p2 bra WRITE;
            ld.shared.b32 %r5, [%r3];
            setp.eq.u32 %p3, %r2, 1;
            {"" if ordered else "@%p3 bra END;"}
            bar.arrive 1, {count};
            bra END;
        WRITE:
            bar.sync 1, {count};
            @%p1 st.shared.b32 [%r3], %r0;
        END:"""
        _, report = execute(body, shared=64, threads=96)
        self.assertEqual(report.races == (), ordered, str(report))
        if not ordered:
            (race,) = report.races
            self.assertEqual(
                (race.kinds, race.first.warp, race.second.warp), (("read", "write"), 1, 2)
            )


class MbarrierTest(PairTest):
    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_write_then_read_requires_arrive_and_wait(self, ordered, schedule):
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra WRITE;
            {wait_loop("W", "%r3", "0") if ordered else ""}
            ld.shared.b32 %r5, [%r3+64];
            bra END;
        WRITE:
            st.shared.b32 [%r3+64], 5;
            mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        _, report = execute(body, shared=128, threads=64, schedule=SCHEDULES[schedule])
        self.assertEqual(report.races == (), ordered, str(report))

    @parameterized.parameters(*BOTH)
    def test_init_then_use_requires_a_barrier(self, ordered):
        body = f"""{WARPS}{INIT}
            {"bar.sync 0;" if ordered else ""}
            @%p0 bra END;
            mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        self.check(ordered, body, "a barrier is missing", threads=64)

    @parameterized.parameters(*BOTH)
    def test_late_waiter_does_not_inherit_the_next_phase(self, ordered):
        """Warp 0 writes one word per phase; warp 1 waits for the first phase after both are
        complete.
        """
        word = 64 if ordered else 68
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra WRITE;
            bar.sync 2, 64;
            mbarrier.test_wait.shared.b64 %p5, [%r3], 0;
            ld.shared.b32 %r5, [%r3+{word}];
            bra END;
        WRITE:
            st.shared.b32 [%r3+64], 1;
            mbarrier.arrive.shared.b64 _, [%r3];
            bar.arrive 2, 64;
            st.shared.b32 [%r3+68], 2;
            mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        self.check(ordered, body, threads=64)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_bulk_load_then_read_requires_the_transaction_wait(self, ordered, schedule):
        body = f"""{WARPS}
            @%p1 bra LOAD; bra GO;
        LOAD:
            mbarrier.init.shared.b64 [%r3], 1;
            mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64;
            cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3+64], [%a], 64, [%r3];
        GO:
            bar.sync 0;
            {wait_loop("W", "%r3", "0") if ordered else ""}
            ld.shared.b32 %r5, [%r3+64];
            {wait_loop("X", "%r3", "0")}"""
        report = self.check(
            ordered,
            body,
            "a wait on its mbarrier",
            arrays={"a": lanes()},
            schedule=SCHEDULES[schedule],
        )
        self.assertLen(report.races, 0 if ordered else 1)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_two_bulk_loads_then_reads_require_both_waits(self, ordered, schedule):
        """Loads complete in any order: the second barrier says nothing about the first load."""
        load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        expect = "mbarrier.arrive.expect_tx.shared.b64 _,"
        body = f"""{WARPS}
            @!%p0 bra READY;
            @%p1 mbarrier.init.shared.b64 [%r3], 1;
            @%p1 mbarrier.init.shared.b64 [%r3+8], 1;
        READY:
            bar.sync 0;
            @!%p0 bra READ;
            @%p1 {expect} [%r3], 128;
            @%p1 {load} [%r3+128], [%x], 128, [%r3];
            @%p1 {expect} [%r3+8], 128;
            @%p1 {load} [%r3+256], [%x], 128, [%r3+8];
        READ:
            {wait_loop("W1", "%r3", "0") if ordered else ""}
            {wait_loop("W2", "%r3+8", "0")}
            @%p0 bra END;
            add.s32 %r4, %r3, %r9;
            ld.shared.b8 %h5, [%r4+128];
            ld.shared.b8 %h6, [%r4+256];
        END:"""
        arrays = {"x": lanes()}
        _, report = execute(
            body, arrays, shared=512, threads=64, schedule=SCHEDULES[schedule], lints=False
        )
        self.assertEqual(report.races == (), ordered, str(report))

    @parameterized.parameters(*BOTH)
    def test_spurious_failures_require_a_loop(self, looped):
        """try_wait may fail before the phase ends: code that does not look at its result reads too
        early.
        """
        wait = (
            wait_loop("W", "%r3", "0")
            if looped
            else "mbarrier.try_wait.parity.shared.b64 %p7, [%r3], 0;"
        )
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra WRITE;
            {wait}
            ld.shared.b32 %r5, [%r3+64];
            bra END;
        WRITE:
            bar.sync 3, 32;
            bar.sync 3, 32;
            st.shared.b32 [%r3+64], 5;
            mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        schedule = dataclasses.replace(
            SCHEDULES["turn"], spurious=1.0 if not looped else 0.5, quantum=1
        )
        _, report = execute(body, shared=128, threads=64, schedule=schedule)
        self.assertEqual(report.races == (), looped, str(report))

    @parameterized.parameters(*BOTH)
    def test_parity_confusion(self, kept_in_step):
        """The producer runs two phases ahead: to the consumer phase 2 looks like phase 0."""
        step = "bar.sync 2, 64;" if kept_in_step else ""
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra PRODUCE;
            mbarrier.try_wait.parity.shared.b64 %p7, [%r3], 1;
            {step}
            {"" if kept_in_step else "bar.sync 2, 64;"}
            {wait_loop("W", "%r3", "0" if kept_in_step else "0")}
            bra END;
        PRODUCE:
            mbarrier.arrive.shared.b64 _, [%r3];
            {step}
            {"" if kept_in_step else 2 * ARRIVE + "bar.sync 2, 64;"}
        END:"""
        _, report = execute(body, shared=128, threads=64)
        confused = [f for f in report.faults if "ran ahead" in f.text]
        self.assertEqual(confused == [], kept_in_step, str(report))

    @parameterized.parameters(*BOTH)
    def test_missing_arrival_deadlocks(self, complete):
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra ARRIVE;
            {wait_loop("W", "%r3", "0")}
            bra END;
        ARRIVE:
            {"" if complete else "@%p1"} mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        _, report = execute(body, shared=128, threads=64)
        self.assertEqual(report.deadlocks == (), complete)
        if not complete:
            self.assertIn("waits on mbarrier at shared byte 1024", report.deadlocks[0])
            self.assertIn("31 of 32 arrivals", report.deadlocks[0])

    @parameterized.parameters(*BOTH)
    def test_named_barrier_count_deadlocks(self, complete):
        body = f"{WARPS} bar.sync 1, {64 if complete else 96};"
        _, report = execute(body, shared=64, threads=64)
        self.assertEqual(report.deadlocks == (), complete)

    def test_too_many_arrivals_and_shared_ids(self):
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            mbarrier.arrive.shared.b64 _, [%r3], 2;
            @%p0 bra ONE;
            bar.arrive 5, 96;
            bra END;
        ONE:
            bar.arrive 5, 128;
        END:"""
        _, report = execute(body, shared=64, threads=64)
        self.assertIn("64 arrivals on mbarrier", str(report))
        self.assertIn("two protocols share one barrier id", str(report))


class GlobalTest(PairTest):
    @parameterized.parameters(*BOTH)
    def test_ctas_that_add_require_atomics(self, atomic):
        add = "red.global.add.u32 [%a], 1;" if atomic else "@%p1 st.global.b32 [%a], 1;"
        self.check(atomic, WARPS + add, arrays={"a": lanes()}, space="global", grid=2)

    @parameterized.product(scope=("gpu", "cta"), ordered=BOTH)
    def test_flag_between_ctas_requires_release_and_acquire_at_gpu_scope(self, scope, ordered):
        release = (
            f"red.release.{scope}.global.add.u32" if ordered else "red.relaxed.gpu.global.add.u32"
        )
        body = f"""{WARPS}
            mov.u32 %r10, %ctaid.x;
            setp.eq.u32 %p2, %r10, 0;
            @!%p1 bra END;
            @%p2 bra WRITE;
        POLL:
            ld.acquire.{scope}.global.b32 %r11, [%a+4];
            setp.eq.u32 %p3, %r11, 0;
            @%p3 bra POLL;
            ld.global.b32 %r12, [%a];
            bra END;
        WRITE:
            st.global.b32 [%a], 7;
            {release} [%a+4], 1;
        END:"""
        arrays = {"a": np.zeros(2, np.uint32)}
        self.check(
            ordered and scope == "gpu",
            body,
            arrays=arrays,
            space="global",
            grid=2,
            concurrent_ctas=0,
        )

    @parameterized.parameters(*BOTH)
    def test_relaxed_flag_requires_the_fences(self, fenced):
        fence = "fence.acq_rel.gpu;" if fenced else ""
        body = f"""{WARPS}
            mov.u32 %r10, %ctaid.x;
            setp.eq.u32 %p2, %r10, 0;
            @!%p1 bra END;
            @%p2 bra WRITE;
        POLL:
            ld.relaxed.gpu.global.b32 %r11, [%a+4];
            setp.eq.u32 %p3, %r11, 0;
            @%p3 bra POLL;
            {fence}
            ld.global.b32 %r12, [%a];
            bra END;
        WRITE:
            st.global.b32 [%a], 7;
            {fence}
            st.relaxed.gpu.global.b32 [%a+4], 1;
        END:"""
        arrays = {"a": np.zeros(2, np.uint32)}
        self.check(fenced, body, arrays=arrays, space="global", grid=2, concurrent_ctas=0)


class LanesTest(PairTest):
    @parameterized.parameters(*BOTH)
    def test_lanes_that_run_apart_require_reconvergence(self, together):
        read = "ld.shared.b32 %r5, [%r3];"
        body = f"""{WARPS}
            mov.u32 %r5, 0;
            @%p1 bra WRITE;
            {"" if together else read}
            add.s32 %r6, %r0, 1;
            bra MEET;
        WRITE:
            st.shared.b32 [%r3], %r0;
        MEET:
            bar.warp.sync -1;
            {read if together else ""}"""
        _, report = execute(body, shared=64)
        self.assertEqual(report.races == (), together, str(report))

    @parameterized.parameters(*BOTH)
    def test_single_lane_arrival_requires_a_warp_barrier(self, synchronised):
        body = f"""{WARPS}
            @%p1 mbarrier.init.shared.b64 [%r3], 1;
            bar.sync 0;
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4+64], %r0;
            {"bar.warp.sync -1;" if synchronised else ""}
            @%p1 bra ARRIVE;
            bra END;
        ARRIVE:
            mbarrier.arrive.shared.b64 _, [%r3];
        END:"""
        _, report = execute(body, shared=256)
        self.assertEqual(
            [f.kind for f in report.lints], [] if synchronised else ["single-lane arrive"]
        )


if __name__ == "__main__":
    absltest.main()
