"""Synchronisation rules of tensor memory, as pairs: commit, wait::ld, wait::st, dealloc, fences,
proxies, pipelines.
"""

from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute

BOTH = (True, False)
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24  # M = 128, N = 64, bfloat16, K-major
HIGH = 1024 >> 4 | 1 << 14 | 2 << 29  # stride 1024, 128-byte swizzle
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"

# Warp 0 issues products, warp 1 reads and writes tensor memory; operands are zeros written by all
# 64 threads.
START = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p0, %r2, 0;
    and.b32 %r9, %r0, 31;
    setp.eq.u32 %p1, %r9, 0;
    @!%p0 bra FILL;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+16], 256;
    @%p1 mbarrier.init.shared.b64 [%r3], 1;
    @%p1 mbarrier.init.shared.b64 [%r3+8], 1;
FILL:
    mov.u32 %r10, %r0;
FILLING:
    shl.b32 %r11, %r10, 4;
    add.s32 %r11, %r11, %r3;
    st.shared.v4.b32 [%r11+1024], {{0, 0, 0, 0}};
    add.s32 %r10, %r10, 64;
    setp.lt.u32 %p2, %r10, 1536;
    @%p2 bra FILLING;
    PROXY
    {BEFORE}
    bar.sync 0;
    {AFTER}
    ld.shared.b32 %r20, [%r3+16];
    add.s32 %r22, %r20, 2097152;
    add.s32 %r40, %r3, 1024;
    shr.u32 %r40, %r40, 4;
    or.b32 %r40, %r40, 65536;
    add.s32 %r42, %r40, 1024;
    mov.b32 %r41, {HIGH};
    mov.b64 %d5, {{%r40, %r41}};
    mov.b64 %d6, {{%r42, %r41}};
    setp.ne.u32 %p5, 0, 0;
    @%p0 bra FIRST;
"""
MMA = f"@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], %d5, %d6, {IDESC}, %p5;\n"
LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r50, %r51}, [%r22];\n"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;\n"
END = f"""
END:
    {BEFORE}
    bar.sync 0;
    {AFTER}
    @!%p0 bra OUT;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 256;
OUT:
"""


def commit(barrier: str = "%r3") -> str:
    return (
        f"@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];\n"
    )


def wait(label: str, barrier: str = "%r3", parity: int = 0) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p7, [{barrier}], {parity};\n@!%p7 bra"
        f" {label};\n"
    )


def kernel(first: str, second: str, proxy: bool = True, end: str = END) -> str:
    """Warp 0 runs ``first``, warp 1 ``second``."""
    start = START.replace("PROXY", "fence.proxy.async.shared::cta;" if proxy else "")
    return f"{start}{second}\nbra END;\nFIRST:\n{first}{end}"


class TensorSyncTest(parameterized.TestCase):
    def check(self, ordered, body, missing="", schedule="turn", space="tensor"):
        _, report = execute(body, shared=32768, threads=64, schedule=SCHEDULES[schedule])
        self.assertEqual(report.deadlocks, ())
        if ordered:
            self.assertEqual(report.races, (), str(report))
        else:
            self.assertNotEmpty(report.races, str(report))
            self.assertEqual({r.space for r in report.races}, {space}, str(report))
            self.assertIn(missing, str(report))
        return report

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_product_then_load_requires_commit_and_wait(self, ordered, schedule):
        first = MMA + commit() + wait("W0")
        second = (wait("W1") + AFTER if ordered else "") + LD + WAIT_LD
        report = self.check(ordered, kernel(first, second), "commit", schedule)
        if ordered:
            self.assertEqual(report.lints, (), str(report))

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_load_then_product_requires_wait_ld_before_the_arrival(self, ordered, schedule):
        """An arrival between a load and its wait::ld does not publish the read."""
        arrive = f"{BEFORE}\nbar.arrive 1, 64;\n"
        second = wait("W1") + AFTER + LD + (WAIT_LD + arrive if ordered else arrive + WAIT_LD)
        first = (
            MMA
            + commit()
            + wait("W0")
            + "bar.sync 1, 64;\n"
            + AFTER
            + MMA
            + commit("%r3+8")
            + wait("W2", "%r3+8")
        )
        self.check(ordered, kernel(first, second), "tcgen05.wait::ld", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_store_then_load_requires_wait_st(self, ordered, schedule):
        store = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r22], {%r0, %r0};\n"
        complete = "tcgen05.wait::st.sync.aligned;\n"
        second = store + (complete if ordered else "") + LD + WAIT_LD + complete
        self.check(ordered, kernel("", second), "tcgen05.wait::st", schedule)

    @parameterized.product(ordered=BOTH, schedule=list(SCHEDULES))
    def test_load_then_dealloc_requires_a_barrier(self, ordered, schedule):
        end = END if ordered else END.replace("bar.sync 0;", "")
        first = MMA + commit() + wait("W0")
        _, report = execute(
            kernel(first, wait("W1") + AFTER + LD + WAIT_LD, end=end), shared=32768, threads=64,
            schedule=SCHEDULES[schedule],
        )  # fmt: skip
        bad = [r for r in report.races if "dealloc" in r.second.text + r.first.text]
        bad += [f for f in report.faults if f.kind == "tensor memory"]
        self.assertEqual(bad == [], ordered, str(report))

    @parameterized.parameters(*BOTH)
    def test_generic_write_then_product_requires_the_proxy_fence(self, ordered):
        body = kernel(MMA + commit() + wait("W0"), "", proxy=ordered)
        self.check(ordered, body, "fence.proxy.async is missing", space="shared")

    @parameterized.parameters("eager", "lazy")
    def test_products_on_one_accumulator_are_ordered(self, schedule):
        self.check(True, kernel(MMA + MMA + commit() + wait("W0"), ""), schedule=schedule)

    @parameterized.parameters(*BOTH)
    def test_products_of_two_shapes_on_the_same_columns_require_a_commit(self, ordered):
        other = MMA.replace(str(IDESC), str(IDESC & ~(31 << 24) | 4 << 24))
        middle = commit() + wait("W0") if ordered else ""
        first = MMA + middle + other + commit("%r3+8") + wait("W2", "%r3+8")
        self.check(ordered, kernel(first, ""))

    @parameterized.parameters("before", "after", "both")
    def test_strict_fences_are_a_lint(self, kept):
        arrive = f"{BEFORE if kept != 'after' else ''}\nbar.arrive 1, 64;\n"
        second = wait("W1") + AFTER + LD + WAIT_LD + arrive
        first = (
            MMA
            + commit()
            + wait("W0")
            + "bar.sync 1, 64;\n"
            + (AFTER if kept != "before" else "")
            + MMA
        )
        report = self.check(True, kernel(first + commit("%r3+8") + wait("W2", "%r3+8"), second))
        self.assertEqual(
            [f.kind for f in report.lints], [] if kept == "both" else ["tcgen05 fence"], str(report)
        )

    @parameterized.parameters(*BOTH)
    def test_registers_of_a_load_before_wait_ld_are_a_lint(self, waited):
        use = "add.s32 %r52, %r50, %r51;\n"
        second = wait("W1") + AFTER + LD + (WAIT_LD + use if waited else use + WAIT_LD)
        report = self.check(True, kernel(MMA + commit() + wait("W0"), second))
        self.assertEqual([f.kind for f in report.lints], [] if waited else ["early use"])

    @parameterized.parameters(*BOTH)
    def test_accumulating_on_unwritten_columns_is_reported(self, first_overwrites):
        first = (
            ("" if first_overwrites else "setp.eq.u32 %p5, 0, 0;\n") + MMA + commit() + wait("W0")
        )
        _, report = execute(kernel(first, ""), shared=32768, threads=64)
        self.assertEqual(
            [f.kind for f in report.faults],
            [] if first_overwrites else ["uninitialised"],
            str(report),
        )


if __name__ == "__main__":
    absltest.main()
