"""Instruction tests of tcgen05: every shape of ld and st, products in every layout, copies."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute

BF16 = ml_dtypes.bfloat16
SWIZZLES = {
    "none": (0, 16),
    "32B": (6, 32),
    "64B": (4, 64),
    "128B": (2, 128),
}  # field, bytes of a row
PROLOGUE = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.ne.u32 %p0, %r2, 0;
    @%p0 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+16], 512;
ALLOCATED:
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra COPY;
    mbarrier.init.shared.b64 [%r3], 1;
COPY:
    mov.u32 %r10, %r1;
LOOP:
    cvt.u64.u32 %d1, %r10;
    add.s64 %d1, %image, %d1;
    ld.global.b32 %r11, [%d1];
    add.s32 %r12, %r3, %r10;
    st.shared.b32 [%r12+1024], %r11;
    add.s32 %r10, %r10, 512;
    setp.lt.u32 %p2, %r10, {{size}};
    @%p2 bra LOOP;
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r20, [%r3+16];
"""
EPILOGUE = """
    shl.b32 %r30, %r2, 21;
    add.s32 %r30, %r30, %r20;
    mov.u32 %r31, 0;
    mul.wide.u32 %d2, %r0, {row};
    add.s64 %d2, %b, %d2;
READ:
    add.s32 %r32, %r30, %r31;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r33}}, [%r32];
    tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%d2], %r33;
    add.s64 %d2, %d2, 4;
    add.s32 %r31, %r31, 1;
    setp.lt.u32 %p3, %r31, {columns};
    @%p3 bra READ;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p0 bra END;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
END:
"""
COMMIT = """
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;
    @!%p4 bra WAIT;
    tcgen05.fence::after_thread_sync;
"""


def place(matrix: np.ndarray, mn_major: bool, swizzle: str) -> tuple[np.ndarray, int, int]:
    """Shared-memory image of a [rows, 16] operand in a canonical layout, and its leading and stride
    offsets in bytes.

    Written element by element from the figures of PTX ISA 9.7.16.3.
    """
    _, span = SWIZZLES[swizzle]
    rows, depth = matrix.shape
    image = np.zeros(32768 // 2, np.uint16)
    bits = matrix.view(np.uint16)
    per = span // 2
    blocks = -(-rows // per)
    for r in range(rows):
        for k in range(depth):
            if mn_major:  # atoms of `per` rows x 8 k; then k in eights; then blocks of rows
                address = (
                    r % per * 2
                    + k % 8 * span
                    + (k // 8) * (8 * span * blocks)
                    + r // per * (8 * span)
                )
            elif swizzle == "none":  # atoms of 8 rows x 8 k
                address = r % 8 * 16 + k % 8 * 2 + k // 8 * 128 + r // 8 * 256
            else:
                address = r % 8 * span + 2 * k + r // 8 * (8 * span)
            mask = span // 16 - 1
            address ^= (address >> 7 & mask) << 4
            image[address // 2] = bits[r, k]
    if mn_major:
        leading, stride = 8 * span, 8 * span * blocks
        return (image, stride, leading) if swizzle == "none" else (image, leading, stride)
    return (image, 128, 256) if swizzle == "none" else (image, 16, 8 * span)


def placed(*arguments) -> tuple[np.ndarray, tuple[int, int]]:
    image, leading, stride = place(*arguments)
    return image, (leading, stride)


def descriptor(start_offset: int, leading: int, stride: int, swizzle: str) -> str:
    """PTX that builds the matrix descriptor in %d<n> for smem + 1024 + offset; high word and the
    constant part.
    """
    high = stride >> 4 | 1 << 14 | SWIZZLES[swizzle][0] << 29
    return f"""
        add.s32 %r40, %r3, {1024 + start_offset};
        shr.u32 %r40, %r40, 4;
        or.b32 %r40, %r40, {leading >> 4 << 16};
        mov.b32 %r41, {high};
        mov.b64 %d{{n}}, {{{{%r40, %r41}}}};"""


def instruction_descriptor(m: int, n: int, a_mn: bool, b_mn: bool) -> int:
    return 1 << 4 | 1 << 7 | 1 << 10 | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


def operands(m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m * n)
    return tuple(rng.integers(-4, 5, (rows, 16)).astype(BF16) for rows in (m, n))  # pyright: ignore


class MmaTest(parameterized.TestCase):
    def multiply(
        self,
        m,
        n,
        a,
        b,
        a_mn=False,
        b_mn=False,
        swizzle="128B",
        schedule="turn",
        lane=0,
        ws=False,
        twice=False,
    ):
        """Runs D = A B^T (twice: a second time, accumulating); returns the 128 x 64 words of tensor
        memory.
        """
        image_a, layout_a = placed(a, a_mn, swizzle)
        image_b, layout_b = placed(b, b_mn, swizzle)
        image = np.concatenate((image_a, image_b)).view(np.uint32)
        form = (
            "tcgen05.mma.ws.cta_group::1.kind::f16" if ws else "tcgen05.mma.cta_group::1.kind::f16"
        )
        tail = ", 0" if ws else ""
        body = PROLOGUE.format(size=image.nbytes) + "@%p1 bra DONE;\n"
        body += descriptor(0, *layout_a, swizzle).format(n=5) + descriptor(
            32768, *layout_b, swizzle
        ).format(n=6)
        body += f"add.s32 %r42, %r20, {lane << 16};\n"
        for predicate in ["0", "1"] if twice else ["0"]:
            body += f"setp.ne.u32 %p5, {predicate}, 0;\n"
            body += (
                f"{form} [%r42], %d5, %d6, {instruction_descriptor(m, n, a_mn, b_mn)}, %p5{tail};\n"
            )
        body += (
            COMMIT.replace("WAIT", "WAIT_MMA")
            + "DONE:\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        )
        body += "tcgen05.fence::after_thread_sync;\n" + EPILOGUE.format(row=256, columns=64)
        arrays = {"image": image, "b": np.zeros((128, 64), np.float32)}
        arrays, report = execute(
            body, arrays, shared=70000, threads=128, schedule=SCHEDULES[schedule], outputs=("b",)
        )
        self.assertFalse(report.races, report)
        unexpected = [
            f for f in report.faults if f.kind != "uninitialised"
        ]  # lanes and columns outside D
        self.assertFalse(unexpected, report)
        return arrays["b"]

    @parameterized.product(
        m=(64, 128), a_mn=(False, True), b_mn=(False, True), swizzle=tuple(SWIZZLES)
    )
    def test_layouts(self, m, a_mn, b_mn, swizzle):
        a, b = operands(m, 64)
        d = self.multiply(m, 64, a, b, a_mn, b_mn, swizzle)
        expected = a.astype(np.float32) @ b.astype(np.float32).T
        rows = d if m == 128 else d.reshape(4, 2, 16, 64)[:, 0].reshape(64, 64)
        np.testing.assert_array_equal(rows, expected)

    @parameterized.parameters(*SCHEDULES)
    def test_half_the_lanes_at_alignment_16_and_accumulation(self, schedule):
        a, b = operands(64, 32)
        d = self.multiply(64, 32, a, b, schedule=schedule, lane=16, twice=True)
        expected = 2 * (a.astype(np.float32) @ b.astype(np.float32).T)
        np.testing.assert_array_equal(
            d.reshape(4, 2, 16, 64)[:, 1].reshape(64, 64)[:, :32], expected
        )

    @parameterized.parameters(32, 64, 128)
    def test_weight_stationary_layouts(self, m):
        """Blocks of M lanes hold successive slices of the columns."""
        a, b = operands(m, 64)
        d = self.multiply(m, 64, a, b, ws=True)
        expected = a.astype(np.float32) @ b.astype(np.float32).T
        blocks = 128 // m
        for i in range(blocks):
            width = 64 // blocks
            np.testing.assert_array_equal(
                d[i * m : (i + 1) * m, :width], expected[:, i * width : (i + 1) * width]
            )

    def test_a_in_tensor_memory(self):
        """Row r of A: lane r, two elements per column, the lower one first."""
        a, b = operands(128, 64)
        image_b, layout_b = placed(b, False, "128B")
        image = np.concatenate((a.view(np.uint16).reshape(-1), image_b)).view(np.uint32)
        body = PROLOGUE.format(size=image.nbytes)
        body += """
            mul.lo.u32 %r50, %r0, 32;
            add.s32 %r50, %r50, %r3;
            ld.shared.v4.b32 {%r51, %r52, %r53, %r54}, [%r50+1024];
            ld.shared.v4.b32 {%r55, %r56, %r57, %r58}, [%r50+1040];
            shl.b32 %r60, %r2, 21;
            add.s32 %r60, %r60, %r20;
            tcgen05.st.sync.aligned.32x32b.x8.b32 [%r60+128],
                {%r51, %r52, %r53, %r54, %r55, %r56, %r57, %r58};
            tcgen05.wait::st.sync.aligned;
            tcgen05.fence::before_thread_sync;
            bar.sync 0;
            tcgen05.fence::after_thread_sync;
            @%p1 bra DONE;
            setp.ne.u32 %p5, 0, 0;
        """
        body += descriptor(a.nbytes, *layout_b, "128B").format(n=6)
        word = instruction_descriptor(128, 64, False, False)
        body += (
            f"tcgen05.mma.cta_group::1.kind::f16 [%r20], [%r20+128], %d6, {word}, %p5;\n" + COMMIT
        )
        body += (
            "DONE:\ntcgen05.fence::before_thread_sync;\nbar.sync"
            " 0;\ntcgen05.fence::after_thread_sync;\n"
        )
        body += EPILOGUE.format(row=256, columns=64)
        arrays = {"image": image, "b": np.zeros((128, 64), np.float32)}
        arrays, report = execute(body, arrays, shared=70000, threads=128, outputs=("b",))
        self.assertTrue(report.clean, report)
        self.assertFalse(report.lints, report)
        np.testing.assert_array_equal(arrays["b"], a.astype(np.float32) @ b.astype(np.float32).T)

    @parameterized.parameters(("128x256b", 8), ("128x128b", 4))
    def test_copy_from_shared_memory(self, shape, words):
        rows = np.arange(128 * 16, dtype=np.uint16).reshape(128, 16)[:, : 2 * words]
        image, layout = placed(
            np.pad(rows, ((0, 0), (0, 16 - 2 * words))).view(BF16), False, "128B"
        )
        image = image.view(np.uint32)
        body = (
            PROLOGUE.format(size=image.nbytes)
            + "@%p1 bra DONE;\n"
            + descriptor(0, *layout, "128B").format(n=5)
        )
        body += f"tcgen05.cp.cta_group::1.{shape} [%r20], %d5;\n" + COMMIT
        body += (
            "DONE:\ntcgen05.fence::before_thread_sync;\nbar.sync"
            " 0;\ntcgen05.fence::after_thread_sync;\n"
        )
        body += EPILOGUE.format(row=4 * words, columns=words)
        arrays = {"image": image, "b": np.zeros((128, words), np.uint32)}
        arrays, report = execute(body, arrays, shared=70000, threads=128, outputs=("b",))
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], np.ascontiguousarray(rows).view(np.uint32))


class LoadStoreTest(parameterized.TestCase):
    FRAGMENTS = {  # (thread, register) -> (row, column): figures of PTX ISA 9.7.16.2.3
        "32x32b": lambda t, i: (t, i),
        "16x64b": lambda t, i: (t // 4 + 8 * (t % 2), 2 * i + t // 2 % 2),
        "16x128b": lambda t, i: (t // 4 + 8 * (i % 2), i // 2 * 4 + t % 4),
        "16x256b": lambda t, i: (t // 4 + 8 * (i // 2 % 2), i // 4 * 8 + 2 * (t % 4) + i % 2),
    }

    @parameterized.product(
        shape=(("32x32b", 1), ("32x32b", 1), ("16x64b", 1), ("16x128b", 2), ("16x256b", 4)),
        repeat=(1, 2, 4, 8),
    )
    def test_store_then_load(self, shape, repeat):
        """st by one shape, ld by columns; then ld by the same shape gives the registers back."""
        name, per = shape
        count = per * repeat
        registers = ", ".join(f"%r{60 + i}" for i in range(count))
        again = ", ".join(f"%r{100 + i}" for i in range(count))
        values = "".join(f"add.s32 %r{60 + i}, %r0, {1000 * i};\n" for i in range(count))
        same = "".join(
            f"sub.s32 %r{100 + i}, %r{100 + i}, %r{60 + i};\nor.b32 %r59, %r59, %r{100 + i};\n"
            for i in range(count)
        )
        columns = 1 + max(self.FRAGMENTS[name](t, i)[1] for t in range(32) for i in range(count))
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            mov.u32 %r59, 0;
            setp.ne.u32 %p0, %r0, 99;
            tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+16], 64;
            ld.shared.b32 %r20, [%r3+16];
            {values}
            tcgen05.st.sync.aligned.{name}.x{repeat}.b32 [%r20], {{{registers}}};
            tcgen05.wait::st.sync.aligned;
            tcgen05.ld.sync.aligned.{name}.x{repeat}.b32 {{{again}}}, [%r20];
            tcgen05.wait::ld.sync.aligned;
            {same}
            add.s64 %d9, %c, %d0;
            st.global.b32 [%d9], %r59;
            {EPILOGUE.format(row=4 * columns, columns=columns)}
            tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;"""
        arrays = {"b": np.zeros((32, columns), np.uint32), "c": np.ones(32, np.uint32)}
        arrays, report = execute(body, arrays, shared=64)
        self.assertFalse(report.races, report)
        self.assertFalse(arrays["c"].any())
        for t in range(32):
            for i in range(count):
                self.assertEqual(arrays["b"][self.FRAGMENTS[name](t, i)], t + 1000 * i)

    def test_ownership(self):
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
            ld.shared.b32 %r20, [%r3];
            tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r21}}, [%r20+40];
            tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r21}}, [%r20+2097152];
            tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;"""
        _, report = execute(body, shared=64)
        self.assertLen([f for f in report.faults if f.kind == "tensor memory"], 3)
        self.assertIn("column 40 is not allocated", str(report))


if __name__ == "__main__":
    absltest.main()
