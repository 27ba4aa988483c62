"""Synchronisation rules of wgmma in pairs: proxies, barriers, wait_group, registers, warpgroups."""

import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute
from wgmma_kernels import FENCE, REGISTERS, START, accumulators, descriptor, place, product

from jax_dsa.emulator.observers.races import Races
from jax_dsa.emulator.report import Report

BOTH = (True, False)
N, THREADS = 8, 160  # a warpgroup, and a warp of its own (4)
BF16 = np.uint16
A, B = place(np.zeros((64, 16), BF16), False, "none"), place(np.zeros((N, 16), BF16), False, "none")
A_BYTES, B_BYTES = 2048, 256
B_AT = START + A_BYTES
PROXY, BARRIER = "fence.proxy.async.shared::cta;\n", "bar.sync 1, 128;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
ALL = "bar.sync 0;\n"


def wait(newest: int = 0) -> str:
    return f"wgmma.wait_group.sync.aligned {newest};\n"


def mma(first: int = 0, a: str = "%d5", n: int = N, accumulate: bool = False) -> str:
    return product(n, a, "bf16", accumulate, first=first)


DESCRIPTORS = descriptor("%d5", A, 0, 0) + descriptor("%d6", B, A_BYTES, 0)
# Each thread of the warpgroup writes its part of A and B; %p1: warp 4; %p3: thread 0.
BEGIN = f"""{REGISTERS}{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p1, %r2, 4;
    setp.eq.u32 %p3, %r0, 0;
    @%p3 mbarrier.init.shared.b64 [%r3], 1;
    @%p3 mbarrier.init.shared.b64 [%r3+8], 128;
    {ALL}
"""
FILL = f"""
    shl.b32 %r10, %r0, 4;
    add.s32 %r10, %r10, %r3;
    st.shared.v4.b32 [%r10+{START}], {{0, 0, 0, 0}};
    add.s32 %r11, %r3, %r1;
    st.shared.b32 [%r11+{B_AT}], 0;
"""
LOAD_B = (
    f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r12], [%a], {B_BYTES}, [%r3];"
)
OVERWRITE = f"st.shared.b32 [%r11+{B_AT}], 1;\n"


def kernel(body: str, other: str = "") -> str:
    """The warpgroup runs ``body``, warp 4 ``other``."""
    return f"{BEGIN}@%p1 bra OTHER;\n{body}\nbra END;\nOTHER:\n{other}\nEND:\n"


def ready(proxy: bool = True, barrier: bool = True) -> str:
    return FILL + (PROXY if proxy else "") + (BARRIER if barrier else "") + DESCRIPTORS + FENCE


def spin(label: str, address: str, parity: int = 0) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p7, [{address}], {parity};\n"
        f"@!%p7 bra {label};\n"
    )


class WgmmaSyncTest(parameterized.TestCase):
    def run_kernel(self, body, schedule="turn", arrays=None):
        return execute(body, arrays, 8192, THREADS, target="sm_90a", schedule=SCHEDULES[schedule])[
            1
        ]

    def check(self, ordered, body, missing="", schedule="turn", space="shared", arrays=None):
        report = self.run_kernel(body, schedule, arrays)
        self.assertEqual(report.deadlocks, ())
        if ordered:
            self.assertTrue(report.clean, str(report))
            self.assertEqual(report.lints, (), str(report))
        else:
            self.assertNotEmpty(report.races, str(report))
            self.assertEqual({r.space for r in report.races}, {space}, str(report))
            self.assertIn(missing, str(report))
        return report


class OperandTest(WgmmaSyncTest):
    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_generic_write_then_product_requires_the_proxy_fence(self, ordered, schedule):
        body = kernel(ready(proxy=ordered) + mma() + COMMIT + wait())
        report = self.check(ordered, body, "fence.proxy.async is missing", schedule)
        if not ordered:
            self.assertLen(report.races, 2)  # the stores to A and to B

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_write_then_product_of_another_warp_requires_a_barrier(self, ordered, schedule):
        body = kernel(ready(barrier=ordered) + mma() + COMMIT + wait())
        self.check(ordered, body, "a barrier is missing", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_then_overwriting_b_requires_wait_group(self, ordered, schedule):
        late = "" if ordered else wait()
        body = ready() + mma() + COMMIT + (wait() if ordered else "") + BARRIER + OVERWRITE + late
        self.check(ordered, kernel(body), "wgmma.wait_group", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_of_another_warp_then_overwriting_b_requires_a_barrier(self, ordered, schedule):
        """A wait_group speaks for its own warp only."""
        body = ready() + mma() + COMMIT + wait() + (BARRIER if ordered else "") + OVERWRITE
        self.check(ordered, kernel(body), "a barrier is missing", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_two_products_then_overwriting_b_requires_both_groups(self, ordered, schedule):
        body = ready() + mma() + COMMIT + mma(4) + COMMIT + wait(0 if ordered else 1)
        body += BARRIER + OVERWRITE + wait()
        self.check(ordered, kernel(body), "wgmma.wait_group", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_copy_then_product_requires_the_proxy_fence_after_the_wait(self, ordered, schedule):
        """cp.async writes through the generic proxy."""
        copy = f"""
            add.s64 %d1, %a, %d0;
            cp.async.ca.shared.global [%r11+{B_AT}], [%d1], 4;
            cp.async.wait_all;
        """
        body = FILL + (copy + PROXY if ordered else PROXY + copy) + BARRIER
        arrays = {"a": np.zeros(128, np.uint32)}
        body = kernel(body + DESCRIPTORS + FENCE + mma() + COMMIT + wait())
        self.check(ordered, body, "fence.proxy.async is missing", schedule, arrays=arrays)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_bulk_copy_then_product_requires_its_mbarrier(self, ordered, schedule):
        """Both use the asynchronous proxy: no fence."""
        load = f"""
            @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {B_BYTES};
            @%p3 {LOAD_B}
        """
        body = f"add.s32 %r12, %r3, {B_AT};\n" + FILL + PROXY + BARRIER + load
        wait_copy = spin("COPIED", "%r3")
        body += (wait_copy if ordered else "") + DESCRIPTORS + FENCE + mma() + COMMIT + wait()
        body += "" if ordered else wait_copy
        self.check(ordered, kernel(body), "", schedule, arrays={"a": np.zeros(64, np.uint32)})

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_then_bulk_copy_requires_the_arrival_after_wait_group(self, ordered, schedule):
        """The consumer frees a buffer: an arrival before the wait does not publish the read."""
        arrive = "mbarrier.arrive.shared.b64 _, [%r3+8];\n"
        body = ready() + mma() + COMMIT + (wait() + arrive if ordered else arrive + wait())
        producer = f"""{spin("FREE", "%r3+8")}
            add.s32 %r12, %r3, {B_AT};
            elect.sync _|%p8, -1;
            @%p8 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {B_BYTES};
            @%p8 {LOAD_B}
            {spin("LOADED", "%r3")}"""
        arrays = {"a": np.zeros(64, np.uint32)}
        self.check(ordered, kernel(body, producer), "wgmma.wait_group", schedule, arrays=arrays)

    def test_each_warp_reads_its_own_rows_of_a(self):
        """Rows that a warp writes for itself need no barrier with the other warps."""
        refill = f"st.shared.v4.b32 [%r12+{START}], {{1, 1, 1, 1}};\n"
        own = """
            shl.b32 %r12, %r2, 8;
            and.b32 %r13, %r0, 15;
            mad.lo.u32 %r12, %r13, 16, %r12;
            and.b32 %r13, %r0, 16;
            mad.lo.u32 %r12, %r13, 64, %r12;
            add.s32 %r12, %r12, %r3;
        """
        body = ready() + own + refill + PROXY + "bar.warp.sync -1;\n" + mma() + COMMIT + wait()
        self.check(True, kernel(body))


class RegisterTest(WgmmaSyncTest):
    USE = "add.f32 %f1, %acc3, %acc3;\n"

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_then_reading_the_accumulator_requires_wait_group(self, ordered, schedule):
        body = ready() + mma() + COMMIT + (wait() + self.USE if ordered else self.USE + wait())
        report = self.check(ordered, kernel(body), "wgmma.wait_group", schedule, "registers")
        if not ordered:
            (race,) = report.races
            self.assertEqual(race.kinds, ("write", "read"))
            self.assertIn("registers %acc3 of warp", race.where)

    @parameterized.product(ordered=BOTH, newest=(0, 1))
    def test_product_then_reading_the_accumulator_requires_commit_group(self, ordered, newest):
        """wait_group does not speak of products that are in no group yet."""
        group = COMMIT if ordered and newest == 0 else ""
        body = ready() + mma() + group + wait(newest) + self.USE + COMMIT + wait()
        self.check(ordered and newest == 0, kernel(body), "wgmma.wait_group", "turn", "registers")

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_two_groups_then_reading_the_second_requires_wait_for_it(self, ordered, schedule):
        first = "add.f32 %f2, %acc5, %acc5;\n"
        body = ready() + mma(4) + COMMIT + mma() + COMMIT + wait(1) + first
        body += (wait() if ordered else "") + self.USE + wait()
        report = self.check(ordered, kernel(body), "", schedule, "registers")
        self.assertLen(report.races, 0 if ordered else 1)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_then_overwriting_fragments_of_a_requires_wait_group(self, ordered, schedule):
        change = "mov.b32 %a2, 7;\n"
        zero = "".join(f"mov.b32 %a{i}, 0;\n" for i in range(4))
        body = FILL + PROXY + BARRIER + DESCRIPTORS + zero + FENCE + mma(a="") + COMMIT
        body += wait() + change if ordered else change + wait()
        self.check(ordered, kernel(body), "wgmma.wait_group", schedule, "registers")

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_products_on_overlapping_accumulators_require_the_same_shape(self, ordered, schedule):
        second = mma(accumulate=True) if ordered else mma(n=16, accumulate=False)
        b = place(np.zeros((16, 16), BF16), False, "none")
        body = ready() + descriptor("%d6", b, 0, 0) + mma() + second + COMMIT + wait()
        self.check(ordered, kernel(body), "wgmma.wait_group", schedule, "registers")

    @parameterized.product(ordered=BOTH)
    def test_product_then_its_result_as_a_requires_wait_group(self, ordered):
        second = product(N, "", "bf16", False, first=4).replace(
            "{%a0, %a1, %a2, %a3}", accumulators(N)
        )
        body = ready() + mma() + COMMIT + (wait() + FENCE if ordered else "") + second
        self.check(ordered, kernel(body + COMMIT + wait()), "", "turn", "registers")

    def test_numbers_are_those_of_the_race(self):
        """A lazy engine shows what the accumulator held before."""
        body = ready() + "mov.f32 %acc3, 0f40000000;\n" + FENCE + mma() + COMMIT
        body += "add.s64 %d9, %c, %d0;\nst.global.f32 [%d9], %acc3;\n" + wait()
        arrays = {"c": np.ones(160, np.float32)}
        arrays, _ = execute(kernel(body), arrays, 8192, THREADS, schedule=SCHEDULES["lazy"])
        np.testing.assert_array_equal(arrays["c"][:128], 2.0)

    @parameterized.product(ordered=BOTH, what=("accumulator", "fragment", "first"))
    def test_register_access_then_product_requires_the_fence(self, ordered, what):
        write = {
            "accumulator": "".join(f"mov.f32 %acc{i}, 0f00000000;\n" for i in range(4)),
            "fragment": "".join(f"mov.b32 %a{i}, 0;\n" for i in range(4)),
            "first": "",
        }[what]
        before = FILL + PROXY + BARRIER + DESCRIPTORS + (FENCE if what != "first" else "")
        zero = "".join(f"mov.b32 %a{i}, 0;\n" for i in range(4)) if what == "fragment" else ""
        again = mma(a="" if what == "fragment" else "%d5", accumulate=what == "accumulator")
        body = zero + before + write + (FENCE if ordered else "") + again + COMMIT + wait()
        report = self.run_kernel(kernel(body))
        self.assertTrue(report.clean, report)
        self.assertEqual([f.kind for f in report.lints], [] if ordered else ["wgmma fence"])

    @parameterized.parameters(*BOTH)
    def test_adding_to_an_accumulator_requires_that_it_was_written(self, written):
        body = ready() + mma(accumulate=not written) + COMMIT + wait()
        faults = self.run_kernel(kernel(body)).faults
        self.assertEqual({f.kind for f in faults}, set() if written else {"uninitialised"})


class WarpgroupTest(WgmmaSyncTest):
    def fault(self, body, text, kind="warpgroup", threads=THREADS):
        _, report = execute(body, None, 8192, threads, target="sm_90a")
        self.assertEqual({f.kind for f in report.faults}, {kind}, str(report))
        self.assertIn(text, str(report))
        return report

    @parameterized.parameters(*BOTH)
    def test_product_requires_all_four_warps(self, ordered):
        skip = "" if ordered else "setp.eq.u32 %p4, %r2, 2;\n@%p4 bra END;\n"
        report = self.run_kernel(kernel(ready() + skip + mma() + COMMIT + wait()))
        self.assertEqual(report.deadlocks == (), ordered)
        if not ordered:
            self.assertIn("waits for warps 0..3 to arrive", report.deadlocks[0])

    def test_warps_at_different_products(self):
        body = ready() + "setp.eq.u32 %p4, %r2, 2;\n@%p4 bra TWO;\n" + mma() + "bra JOIN;\nTWO:\n"
        body += mma() + "JOIN:\n" + COMMIT + wait()
        self.fault(kernel(body), "start different products")

    def test_descriptors_that_differ_between_lanes(self):
        body = ready() + "and.b32 %r9, %r0, 31;\ncvt.u64.u32 %d7, %r9;\n"
        body += "add.s64 %d5, %d5, %d7;\n" + mma() + COMMIT + wait()
        self.fault(kernel(body), "must be the same in all threads")

    def test_a_fence_that_one_warp_leaves_out(self):
        skip = "setp.eq.u32 %p4, %r2, 2;\n@%p4 bra SKIP;\n"
        body = ready() + skip + FENCE + "SKIP:\n" + mma() + COMMIT + wait()
        self.fault(kernel(body), "have to execute the same wgmma instructions")

    def test_lanes_that_are_missing(self):
        skip = "and.b32 %r9, %r0, 31;\nsetp.eq.u32 %p4, %r9, 2;\n@%p4 bra SKIP;\n"
        body = ready() + skip + FENCE + "SKIP:\n" + mma() + COMMIT + wait()
        self.fault(kernel(body), "only 31 lanes execute it together")

    def test_a_cta_without_a_whole_warpgroup(self):
        body = BEGIN.replace("bar.sync 0", "bar.warp.sync -1") + DESCRIPTORS + FENCE + mma()
        self.fault(body, "are not all in the CTA, which has 2 warps", threads=64)

    @parameterized.parameters((1 << 52, "reserved bits"), (1 << 49, "base offset"))
    def test_descriptors_that_mean_nothing(self, bit, text):
        body = ready() + f"or.b64 %d6, %d6, {bit};\n" + mma() + COMMIT + wait()
        self.fault(kernel(body), text, "tensor core")

    def test_operand_outside_of_shared_memory(self):
        body = ready() + "or.b64 %d6, %d6, 16000;\n" + mma() + COMMIT + wait()
        self.fault(kernel(body), "operand at shared bytes", "out of bounds")

    @parameterized.parameters(*BOTH)
    def test_exit_requires_wait_group(self, ordered):
        report = self.run_kernel(kernel(ready() + mma() + COMMIT + (wait() if ordered else "")))
        self.assertEqual({f.kind for f in report.faults}, set() if ordered else {"async at exit"})


class ReportTest(parameterized.TestCase):
    def test_an_observer_keeps_the_races_of_the_others(self):
        report = Report()
        report.races = ("of registers",)  # pyright: ignore
        Races().fill(report)
        self.assertEqual(report.races, ("of registers",))


if __name__ == "__main__":
    absltest.main()
