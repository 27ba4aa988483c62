"""Every synchronisation rule of copies as a pair: silent with the edge, a race without it."""

import numpy as np
from absl.testing import absltest, parameterized
from harness import BOTH, INIT, SCHEDULES, WARPS, PairTest, execute, lanes, wait_loop


class CopyTest(PairTest):
    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_cp_async_then_read_requires_wait_group(self, ordered, schedule):
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            add.s64 %d1, %a, %d0;
            cp.async.ca.shared.global [%r4], [%d1], 4;
            cp.async.commit_group;
            {"cp.async.wait_group 0;" if ordered else ""}
            ld.shared.b32 %r5, [%r4];
            cp.async.wait_all;"""
        self.check(
            ordered,
            body,
            "cp.async.wait_group",
            arrays={"a": lanes()},
            schedule=SCHEDULES[schedule],
        )

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES), kind=("cp.async", "bulk"))
    def test_wait_group_requires_the_commit_of_the_group(self, ordered, schedule, kind):
        """A copy in a group that is still open is not waited for, not even by wait_group 0."""
        copies = {
            "cp.async": ("cp.async.ca.shared.global [%r4], [%d1], 4;", "ld.shared.b32 %r5, [%r4];"),
            "bulk": (
                "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [%r3], 128;",
                "st.global.b32 [%d1], 7;",
            ),
        }
        copy, use = copies[kind]
        stem = "cp.async" if kind == "cp.async" else "cp.async.bulk"
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            add.s64 %d1, %a, %d0;
            st.shared.b32 [%r4], %r0;
            fence.proxy.async;
            bar.warp.sync 0xffffffff;
            {copy}
            {f"{stem}.commit_group;" if ordered else ""}
            {stem}.wait_group 0;
            bar.warp.sync 0xffffffff;
            {use}"""
        arrays = {"a": lanes()}
        _, report = execute(body, arrays, shared=4096, schedule=SCHEDULES[schedule], lints=False)
        self.assertEqual(report.races == (), ordered, str(report))

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_two_groups_then_read_of_the_second_requires_wait_for_it(self, ordered, schedule):
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            add.s64 %d1, %a, %d0;
            cp.async.ca.shared.global [%r4], [%d1], 4;
            cp.async.commit_group;
            cp.async.ca.shared.global [%r4+256], [%d1], 4;
            cp.async.commit_group;
            cp.async.wait_group {0 if ordered else 1};
            ld.shared.b32 %r6, [%r4];
            ld.shared.b32 %r5, [%r4+256];
            cp.async.wait_all;"""
        report = self.check(ordered, body, arrays={"a": lanes()}, schedule=SCHEDULES[schedule])
        self.assertLen(report.races, 0 if ordered else 1)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_cp_async_then_read_by_another_warp_requires_the_noinc_arrival(self, ordered, schedule):
        arrive = (
            "cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];"
            if ordered
            else "mbarrier.arrive.shared.b64 _, [%r3];"
        )
        body = f"""{WARPS}{INIT}
            bar.sync 0;
            @%p0 bra LOAD;
            {wait_loop("W", "%r3", "0")}
            ld.shared.b32 %r5, [%r3+64];
            bra END;
        LOAD:
            add.s32 %r4, %r3, %r1;
            add.s64 %d1, %a, %d0;
            cp.async.ca.shared.global [%r4+64], [%d1], 4;
            {arrive}
            cp.async.wait_all;
        END:"""
        settings = {"arrays": {"a": lanes()}, "threads": 64, "schedule": SCHEDULES[schedule]}
        self.check(ordered, body, "cp.async.mbarrier.arrive", **settings)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_generic_write_then_bulk_store_requires_the_proxy_fence(self, ordered, schedule):
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4], %r0;
            {"fence.proxy.async.shared::cta;" if ordered else ""}
            bar.sync 0;
            @%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [%r3], 128;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;"""
        self.check(
            ordered,
            body,
            "fence.proxy.async is missing",
            arrays={"a": lanes()},
            schedule=SCHEDULES[schedule],
        )

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_zeroing_of_global_memory_then_bulk_reduction_requires_the_proxy_fence(
        self, ordered, schedule
    ):
        body = f"""{WARPS}
            add.s64 %d1, %a, %d0;
            st.global.b32 [%d1], 0;
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4], %r0;
            fence.proxy.async.{"global" if ordered else "shared::cta"};
            {"fence.proxy.async.shared::cta;" if ordered else ""}
            bar.sync 0;
            @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%a], [%r3], 128;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;"""
        settings = {"arrays": {"a": lanes()}, "schedule": SCHEDULES[schedule], "space": "global"}
        self.check(ordered, body, "fence.proxy.async is missing", **settings)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_bulk_store_then_reuse_of_its_source_requires_wait_group_read(self, ordered, schedule):
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4], %r0;
            fence.proxy.async.shared::cta;
            bar.sync 0;
            @%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [%r3], 128;
            cp.async.bulk.commit_group;
            {"cp.async.bulk.wait_group.read 0;" if ordered else ""}
            bar.sync 0;
            st.shared.b32 [%r4], 0;
            cp.async.bulk.wait_group 0;"""
        self.check(
            ordered,
            body,
            "cp.async.bulk.wait_group",
            arrays={"a": lanes()},
            schedule=SCHEDULES[schedule],
        )

    @parameterized.parameters(*BOTH)
    def test_exit_requires_wait_group(self, ordered):
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4], %r0;
            fence.proxy.async.shared::cta;
            bar.sync 0;
            @%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [%r3], 128;
            cp.async.bulk.commit_group;
            {"cp.async.bulk.wait_group.read 0;" if ordered else ""}"""
        arrays, report = execute(
            body, {"a": np.zeros(32, np.uint32)}, shared=256, schedule=SCHEDULES["lazy"]
        )
        self.assertEqual([f.kind for f in report.faults], [] if ordered else ["async at exit"])
        np.testing.assert_array_equal(arrays["a"], lanes())


if __name__ == "__main__":
    absltest.main()
