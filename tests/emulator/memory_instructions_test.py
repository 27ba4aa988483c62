"""Instruction tests of effect rows that move data: loads, stores, atomics, shuffles, matrices,
copies.
"""

import harness
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute, lanes

from jax_dsa.emulator import Launch, Pointer, Program, Settings, TensorMap, run


def out(*shape, dtype=np.uint32) -> np.ndarray:
    return np.zeros(shape or 32, dtype)


class LoadStoreTest(parameterized.TestCase):
    @parameterized.parameters(
        (1, "", "%r4"), (2, ".v2", "{%r4, %r5}"), (4, ".v4", "{%r4, %r5, %r6, %r7}")
    )
    def test_vectors_of_global_memory(self, count, vector, registers):
        a = np.arange(32 * count, dtype=np.uint32) * 3 + 1
        body = f"""{THREAD}
            mul.wide.u32 %d1, %r0, {4 * count};
            add.s64 %d2, %a, %d1;
            add.s64 %d3, %b, %d1;
            ld.global{vector}.b32 {registers}, [%d2];
            st.global{vector}.b32 [%d3], {registers};"""
        arrays, report = execute(body, {"a": a, "b": np.zeros_like(a)}, outputs=("b",))
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], a)

    @parameterized.parameters(
        ("u8", np.uint8), ("s8", np.int8), ("u16", np.uint16), ("s16", np.int16)
    )
    def test_narrow_loads_extend(self, type_, dtype):
        size = np.dtype(dtype).itemsize
        a = np.array([0, 1, 0x7F, 0x80, 0xFF, 0x8000] * 6, np.int64)[:32].astype(dtype)
        body = f"""{THREAD}
            mul.wide.u32 %d1, %r0, {size};
            add.s64 %d1, %a, %d1;
            ld.global.{type_} %r4, [%d1];
            add.s64 %d2, %b, %d0;
            st.global.b32 [%d2], %r4;"""
        arrays, _ = execute(body, {"a": a, "b": out()})
        np.testing.assert_array_equal(arrays["b"].view(np.int32), a.astype(np.int32))

    def test_shared_memory_and_generic_addresses(self):
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            add.s32 %r4, %r3, %r1;
            st.shared.b32 [%r4+128], %r0;
            mov.u64 %d2, smem;
            cvta.shared.u64 %d3, %d2;
            add.s64 %d3, %d3, %d0;
            ld.b32 %r5, [%d3+128];
            add.s64 %d4, %b, %d0;
            st.global.b32 [%d4], %r5;"""
        arrays, report = execute(body, {"b": out()}, shared=256, outputs=("b",))
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], lanes())

    def test_divergent_lanes_load_from_their_own_addresses(self):
        body = f"""{THREAD}
            setp.lt.u32 %p0, %r0, 8;
            add.s64 %d1, %a, %d0;
            add.s64 %d2, %b, %d0;
            @%p0 bra LOW;
            ld.global.b32 %r4, [%d1+-32];
            bra.uni MEET;
        LOW:
            ld.global.b32 %r4, [%d1+96];
        MEET:
            st.global.b32 [%d2], %r4;"""
        arrays, report = execute(body, {"a": lanes(), "b": out()})
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], np.roll(lanes(), 8))


class AtomicsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("add.u32", 10, np.arange(32), 10 + 496),
        ("min.s32", 5, np.arange(32) - 3, (-3) & 0xFFFFFFFF),
        ("max.u32", 5, np.arange(32), 31),
        ("or.b32", 0, 1 << np.arange(32), 0xFFFFFFFF),
        ("and.b32", 0xFFFFFFFF, ~(1 << np.arange(32)), 0),
        ("inc.u32", 0, np.full(32, 20), 32 % 21),
    )
    def test_all_lanes_on_one_word(self, operation, start, operand, expected):
        body = f"""{THREAD}
            add.s64 %d1, %b, %d0;
            ld.global.b32 %r4, [%d1];
            red.global.{operation} [%a], %r4;"""
        b = (operand.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        arrays, report = execute(body, {"a": np.array([start], np.uint32), "b": b})
        self.assertTrue(report.clean, report)
        self.assertEqual(arrays["a"][0], expected)

    def test_atom_returns_old_values_lane_after_lane(self):
        body = f"""{THREAD}
            atom.global.add.u32 %r4, [%a], 1;
            add.s64 %d1, %b, %d0;
            st.global.b32 [%d1], %r4;"""
        arrays, _ = execute(body, {"a": np.array([7], np.uint32), "b": out()})
        np.testing.assert_array_equal(np.sort(arrays["b"]), lanes() + 7)

    def test_compare_and_swap(self):
        body = f"""{THREAD}
            add.s64 %d1, %a, %d0;
            atom.global.cas.b32 %r4, [%d1], 5, %r0;
            add.s64 %d2, %b, %d0;
            st.global.b32 [%d2], %r4;"""
        a = np.where(lanes() % 2, 5, 9).astype(np.uint32)
        arrays, _ = execute(body, {"a": a, "b": out()})
        np.testing.assert_array_equal(arrays["b"], a)
        np.testing.assert_array_equal(arrays["a"], np.where(lanes() % 2, lanes(), 9))

    @parameterized.parameters(("red", ""), ("atom", "{%f10, %f11, %f12, %f13}, "))
    def test_vector_float_add(self, stem, result):
        body = f"""{THREAD}
            and.b32 %r3, %r0, 1;
            mul.wide.u32 %d1, %r3, 16;
            add.s64 %d1, %a, %d1;
            cvt.rn.f32.u32 %f0, %r0;
            {stem}.global.add.v4.f32 {result}[%d1], {{%f0, 0f3F800000, %f0, 0f40000000}};"""
        arrays, report = execute(body, {"a": np.zeros((2, 4), np.float32)})
        self.assertTrue(report.clean, report)
        sums = [lanes()[i::2].sum() for i in range(2)]
        np.testing.assert_array_equal(arrays["a"], [[s, 16, s, 32] for s in sums])

    def test_packed_bfloat16_add(self):
        body = f"""{THREAD}
            mov.b32 %r4, 0x40003F80;
            red.global.add.noftz.bf16x2 [%a], %r4;"""
        arrays, _ = execute(body, {"a": np.zeros(2, ml_dtypes.bfloat16)})
        np.testing.assert_array_equal(arrays["a"].astype(float), [32, 64])


class AtomicAccessTest(parameterized.TestCase):
    """Relaxed loads and stores of two warps without an edge between them."""

    LOAD, PLAIN = "ld.relaxed.gpu.global.b32 %r4, [%a];", "ld.global.b32 %r4, [%a];"
    STORE, WRITE = "st.relaxed.gpu.global.b32 [%a], %r0;", "st.global.b32 [%a], %r0;"

    @parameterized.parameters(
        (LOAD, PLAIN, False), (LOAD, LOAD, False), (LOAD, STORE, False), (LOAD, WRITE, True),
        (STORE, STORE, False), (STORE, PLAIN, True), (STORE, WRITE, True),
    )  # fmt: skip
    def test_races_only_with_a_plain_access_where_one_of_them_writes(self, first, second, races):
        for one, other in ((first, second), (second, first)):
            body = f"{THREAD} setp.ne.u32 %p0, %r2, 0;\n@%p0 {one}\n@!%p0 {other}"
            _, report = execute(body, {"a": out(1)}, threads=64)
            self.assertEqual(
                bool([r for r in report.races if r.first.line != r.second.line]), races
            )
            self.assertFalse(report.faults)

    def test_a_relaxed_store_reads_nothing(self):
        _, report = execute(f"{THREAD}{self.STORE}", {"a": out(1)}, outputs=("a",))
        self.assertTrue(report.clean, report)


class WarpTest(parameterized.TestCase):
    @parameterized.parameters(
        ("bfly", 4, 31, lanes() ^ 4),
        ("idx", 3, 31, np.full(32, 3)),
        ("down", 2, 31, np.minimum(lanes() + 2, np.where(lanes() < 30, 31, lanes()))),
        ("up", 1, 0, np.maximum(lanes().astype(int) - 1, 0)),
        ("bfly", 1, 0x181F, lanes() ^ 1),
        ("idx", 1, 0x1C1F, lanes() // 4 * 4 + 1),
    )
    def test_shuffle(self, mode, by, clamp, expected):
        body = f"""{THREAD}
            shfl.sync.{mode}.b32 %r4|%p0, %r0, {by}, {clamp}, -1;
            add.s64 %d1, %b, %d0;
            st.global.b32 [%d1], %r4;"""
        arrays, _ = execute(body, {"b": out()})
        np.testing.assert_array_equal(arrays["b"], expected)

    def test_votes_and_elections(self):
        body = f"""{THREAD}
            setp.lt.u32 %p0, %r0, 5;
            vote.sync.ballot.b32 %r4, %p0, -1;
            vote.sync.any.pred %p1, %p0, -1;
            vote.sync.all.pred %p2, !%p0, -1;
            selp.b32 %r5, 32, 0, %p1;
            selp.b32 %r6, 64, 0, %p2;
            add.s32 %r4, %r4, %r5;
            add.s32 %r4, %r4, %r6;
            elect.sync %r7|%p3, -1;
            @%p3 st.global.b32 [%b], %r4;"""
        arrays, _ = execute(body, {"b": out(1)})
        self.assertEqual(arrays["b"][0], 31 + 32)

    def test_redux(self):
        body = f"""{THREAD}
            redux.sync.add.u32 %r4, %r0, -1;
            st.global.b32 [%b], %r4;"""
        arrays, _ = execute(body, {"b": out(1)})
        self.assertEqual(arrays["b"][0], 496)

    @parameterized.parameters("", ".trans")
    def test_stmatrix_then_ldmatrix(self, trans):
        """Matrix i's row r goes where lane 8i + r points; trans stores columns as rows."""
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            shl.b32 %r4, %r0, 4;
            add.s32 %r4, %r3, %r4;
            mul.lo.s32 %r5, %r0, 131074;
            add.s32 %r5, %r5, 65536;
            add.s32 %r6, %r5, 4194368;
            add.s32 %r7, %r6, 4194368;
            add.s32 %r8, %r7, 4194368;
            stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r4], {{%r5, %r6, %r7, %r8}};
            bar.warp.sync -1;
            ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r4];
            ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r15, %r16, %r17, %r18}}, [%r4];
            mul.wide.u32 %d1, %r0, 16;
            add.s64 %d2, %a, %d1;
            st.global.v4.b32 [%d2], {{%r10, %r11, %r12, %r13}};
            sub.s32 %r15, %r15, %r5;
            add.s64 %d3, %b, %d0;
            st.global.b32 [%d3], %r15;"""
        arrays, report = execute(body, {"a": out(128), "b": out()}, shared=512)
        self.assertTrue(report.clean, report)
        stored = arrays["a"].view(np.uint16).reshape(4, 8, 8)
        fragment = np.arange(64).reshape(
            8, 8
        )  # element (t / 4, 2 (t % 4) + j) holds 2t + j (+ 64 per matrix)
        for i in range(4):
            expected = fragment + 64 * i
            np.testing.assert_array_equal(stored[i], expected.T if trans else expected)
        self.assertFalse(arrays["b"].any())


class CopiesTest(parameterized.TestCase):
    @parameterized.product(schedule=list(SCHEDULES), size=(4, 8, 16))
    def test_cp_async_groups(self, schedule, size):
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            mul.lo.u32 %r4, %r0, {size};
            add.s32 %r5, %r3, %r4;
            mul.wide.u32 %d1, %r0, {size};
            add.s64 %d2, %a, %d1;
            cp.async.{"cg" if size == 16 else "ca"}.shared.global [%r5], [%d2], {size};
            cp.async.commit_group;
            cp.async.wait_group 0;
            ld.shared.b32 %r6, [%r5];
            add.s64 %d3, %b, %d0;
            st.global.b32 [%d3], %r6;"""
        a = np.arange(32 * size // 4, dtype=np.uint32)
        arrays, report = execute(
            body, {"a": a, "b": out()}, shared=512, schedule=SCHEDULES[schedule]
        )
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], a[:: size // 4])

    def test_cp_async_with_a_source_size_fills_zeros_and_does_not_read(self):
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            shl.b32 %r4, %r0, 4;
            add.s32 %r5, %r3, %r4;
            setp.lt.u32 %p0, %r0, 4;
            selp.b32 %r6, 8, 0, %p0;
            mul.wide.u32 %d1, %r0, 16;
            add.s64 %d2, %a, %d1;
            cp.async.cg.shared.global [%r5], [%d2], 16, %r6;
            cp.async.wait_all;
            ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r5];
            add.s64 %d3, %b, %d1;
            st.global.v4.b32 [%d3], {{%r10, %r11, %r12, %r13}};"""
        a = np.arange(1, 17, dtype=np.uint32)  # lanes 4.. point beyond the array
        arrays, report = execute(body, {"a": a, "b": out(128)}, shared=512)
        self.assertTrue(report.clean, report)
        expected = np.zeros((32, 4), np.uint32)
        expected[:4, :2] = a.reshape(4, 4)[:, :2]
        np.testing.assert_array_equal(arrays["b"].reshape(32, 4), expected)

    @parameterized.parameters(*SCHEDULES)
    def test_bulk_load_reduce_and_store(self, schedule):
        body = f"""{THREAD}
            mov.u32 %r3, smem;
            setp.ne.u32 %p0, %r0, 0;
            @%p0 bra WAIT;
            mbarrier.init.shared.b64 [%r3], 1;
            mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
            cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
                [%r3+128], [%a], 128, [%r3];
        TRY:
            mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0;
            @!%p1 bra TRY;
            cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%b], [%r3+128], 128;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0;
        WAIT:"""
        a, b = np.arange(32, dtype=np.float32), np.full(32, 100, np.float32)
        arrays, report = execute(body, {"a": a, "b": b}, shared=256, schedule=SCHEDULES[schedule])
        self.assertTrue(report.clean, report)
        np.testing.assert_array_equal(arrays["b"], a + 100)


def tensor_kernel(body: str, maps: int) -> str:
    parameters = ", ".join(f".param .align 64 .b8 m{i}[128]" for i in range(maps))
    loads = "".join(
        f"mov.b64 %d{20 + i}, m{i}; cvta.param.u64 %d{20 + i}, %d{20 + i};\n" for i in range(maps)
    )
    variable = ".shared .align 1024 .b8 smem[16384];\n"
    return (
        f"{harness.HEADER}.visible .entry"
        f" test({parameters})\n{{{harness.REGISTERS}{variable}{loads}{body}ret;\n}}\n"
    )


class TensorCopyTest(parameterized.TestCase):
    def run_copy(self, body, maps, arrays, schedule="turn"):
        program = Program(tensor_kernel(body, len(maps)))
        settings = Settings(schedule=SCHEDULES[schedule])
        arrays, report = run(program, Launch("test", (1, 1, 1), (32, 1, 1), maps), arrays, settings)
        self.assertTrue(report.clean, report)
        return arrays

    LOAD = """
            mov.u32 %r0, %tid.x;
            mov.u32 %r3, smem;
            setp.ne.u32 %p0, %r0, 0;
            @%p0 bra END;
            mbarrier.init.shared.b64 [%r3+8192], 1;
            mbarrier.arrive.expect_tx.shared.b64 _, [%r3+8192], {bytes};
            {load}
        TRY:
            mbarrier.try_wait.parity.shared.b64 %p1, [%r3+8192], 0;
            @!%p1 bra TRY;
            {store}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        END:
        """

    @parameterized.product(swizzle=("NONE", "128B", "64B", "32B"), schedule=("eager", "lazy"))
    def test_box_with_a_corner_outside(self, swizzle, schedule):
        """Load with one swizzle, store without: the bytes land where the swizzle says; outside
        reads 0.
        """
        width = {"NONE": 64, "128B": 64, "64B": 32, "32B": 16}[swizzle]
        a = np.arange(20 * 80, dtype=np.uint16).reshape(20, 80)
        b = np.zeros((16, width), np.uint16)
        maps = [
            TensorMap("UINT16", Pointer("a"), (80, 20), (160,), (width, 16), swizzle=swizzle),
            TensorMap("UINT16", Pointer("b"), (width, 16), (2 * width,), (width, 16)),
        ]
        load = (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            " [%r3], [%d20, {40, 10}], [%r3+8192];"
        )
        store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d21, {0, 0}], [%r3];"
        body = self.LOAD.format(bytes=32 * width, load=load, store=store)
        result = self.run_copy(body, maps, {"a": a, "b": b}, schedule)["b"]
        expected = np.zeros((16, width), np.uint16)
        inside = a[10:, 40 : 40 + width]
        expected[: inside.shape[0], : inside.shape[1]] = inside
        np.testing.assert_array_equal(unswizzled(result, width, swizzle), expected)

    def test_gather4(self):
        a = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
        maps = [
            TensorMap("UINT16", Pointer("a"), (64, 16), (128,), (64, 1), swizzle="128B"),
            TensorMap("UINT16", Pointer("b"), (64, 4), (128,), (64, 4), swizzle="128B"),
        ]
        load = (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
            " [%r3], [%d20, {0, 9, 2, -1, 15}], [%r3+8192];"
        )
        store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d21, {0, 0}], [%r3];"
        body = self.LOAD.format(bytes=512, load=load, store=store)
        result = self.run_copy(body, maps, {"a": a, "b": np.zeros((4, 64), np.uint16)})["b"]
        np.testing.assert_array_equal(result, [a[9], a[2], 0 * a[0], a[15]])

    def test_reduce_adds_and_drops_what_lies_outside(self):
        a = np.ones((4, 32), np.float32)
        maps = [
            TensorMap("FLOAT32", Pointer("a"), (32, 4), (128,), (32, 4)),
            TensorMap("FLOAT32", Pointer("b"), (32, 6), (128,), (32, 4)),
        ]
        load = (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            " [%r3], [%d20, {0, 0}], [%r3+8192];"
        )
        store = (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d21, {16,"
            " 4}], [%r3];"
        )
        body = self.LOAD.format(bytes=512, load=load, store=store)
        result = self.run_copy(body, maps, {"a": a, "b": np.full((6, 32), 5, np.float32)})["b"]
        expected = np.full((6, 32), 5.0)
        expected[4:, 16:] += 1
        np.testing.assert_array_equal(result, expected)


def unswizzled(rows: np.ndarray, width: int, swizzle: str) -> np.ndarray:
    """Undoes the hardware's swizzle by its definition on bit positions of the byte address."""
    bits = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}[swizzle]
    flat, result = rows.reshape(-1), np.empty_like(rows.reshape(-1))
    for i in range(flat.size):
        byte = 2 * i
        moved = byte ^ ((byte // 128 % (1 << bits)) * 16)
        result[i] = flat[moved // 2]
    return result.reshape(-1, width)


if __name__ == "__main__":
    absltest.main()
