"""What only a kernel on a real GPU can get wrong: races, sweeps of K and H, offsets, widths."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import suite
from absl.testing import absltest, parameterized
from cases import Case
from suites_gpu_test import KERNELS

import jax_dsa

HEADS = (1, 2, 15, 16, 17, 24, 32, 48, 63, 64, 65, 96, 127, 128)
TOPK = (1, 2, 63, 64, 65, 127, 128, 192, 200, 256, 320, 384, 1152, 2047, 2048)


class Kernels(suite.Suite):
    locals().update(KERNELS)


class SweepTest(Kernels):
    @parameterized.product(topk=TOPK, dtype=("bfloat16", "float16"))
    def test_every_number_of_slots(self, topk: int, dtype: str):
        case = Case("topk", queries=3, keys=300, heads=20, topk=topk, sink=cases.SINKS)
        self.run_and_check(self.inputs(case, dtype))

    @parameterized.product(heads=HEADS, width=(512, 576))
    def test_every_number_of_heads(self, heads: int, width: int):
        case = Case("heads", queries=2, keys=90, heads=heads, head_dim=width, topk=130)
        self.run_and_check(self.inputs(case))

    @parameterized.product(topk=(1, 70, 640), width=(512, 576), dtype=("bfloat16", "float16"))
    def test_lengths_of_neighbouring_queries_differ_by_a_tile(self, topk, width, dtype):
        lengths = (topk, topk - 64, 0, topk // 2, -3, topk - 65, 1)
        case = Case(
            "ragged", batch=(2,), queries=7, keys=99, heads=33, head_dim=width, topk=topk,
            lengths=lengths, sink=cases.EXTREME_SINKS,
        )  # fmt: skip
        self.run_and_check(self.inputs(case, dtype))

    def test_a_program_is_right_for_shapes_it_alternates_between(self):
        run = jax.jit(self.program({}))
        for topk, heads in 2 * ((128, 64), (2048, 64), (128, 32), (65, 128)):
            for dtype in self.dtypes:
                inputs = self.inputs(Case("mixed", keys=200, topk=topk, heads=heads), dtype)
                self.check(self.evaluate(inputs, run), inputs, dtype)


class ExactTest(Kernels):
    """A race shows as a changed bit: all sums are exact in any order."""

    @parameterized.product(
        topk=(64, 128, 512, 2048), heads=(16, 64, 128), tail=(False, True), dtype=KERNELS["dtypes"]
    )
    def test_two_hundred_runs(self, topk: int, heads: int, tail: bool, dtype: str):
        inputs = cases.exact_inputs(topk, dtype, tail=tail, queries=64, heads=heads)
        run = jax.jit(self.program(inputs.options))
        arguments = jax.device_put((inputs.operands, inputs.dout, inputs.dlse))
        first = self.evaluate(inputs, run)
        for name, want in cases.exact_results(inputs, dtype).items():
            np.testing.assert_array_equal(getattr(first, name), want, err_msg=name)

        @jax.jit
        def differs(*results):
            wanted = jax.tree.leaves(want_on_device)
            return sum(jnp.sum(a != b) for a, b in zip(results, wanted, strict=True))

        want_on_device = (first.out, first.dq, first.dkv)
        for _ in range(200):
            out, _, (dq, dkv, _) = run(*arguments)
            self.assertEqual(int(differs(out, dq, dkv)), 0)


class OffsetTest(Kernels):
    """More than 2**31 elements: the last rows equal a small call on the same rows."""

    def rows(self, key, count: int, *tail: int):
        return jax.random.normal(key, (count, *tail), jnp.bfloat16)

    def gradients(self, q, kv, indices, dout):
        attend = functools.partial(jax_dsa.sparse_attention, implementation="cutedsl")
        out, vjp = jax.vjp(lambda q, kv: attend(q, kv, indices), q, kv)
        return out, *vjp(dout)

    def test_keys(self):
        keys = jax.random.split(jax.random.key(0), 3)
        rows, tail = 2**31 // 576 + 5000, 256
        kv = self.rows(keys[0], rows, 576)
        q, dout = self.rows(keys[1], 8, 16, 576), self.rows(keys[2], 8, 16, 512)
        near = jnp.arange(8 * 128, dtype=jnp.int32).reshape(8, 128) * 5 % tail
        out, dq, dkv = jax.jit(self.gradients)(q, kv, near + rows - tail, dout)
        wanted = jax.jit(self.gradients)(q, kv[-tail:], near, dout)
        np.testing.assert_array_equal(out, wanted[0])
        np.testing.assert_array_equal(dq, wanted[1])
        cases.check_close("dkv", dkv[-tail:], np.asarray(wanted[2]).astype("d"), 1e-4)
        self.assertEqual(float(jnp.abs(dkv[:-tail].astype(jnp.float32)).max()), 0.0)

    def test_queries(self):
        keys = jax.random.split(jax.random.key(1), 3)
        count, tail = 2**31 // (64 * 512) + 3000, 40
        q, dout = self.rows(keys[0], count, 64, 576), self.rows(keys[1], count, 64, 512)
        kv = self.rows(keys[2], 100, 576)
        indices = (jnp.arange(count * 4, dtype=jnp.int32) % 100).reshape(count, 4)
        out, dq, _ = jax.jit(self.gradients)(q, kv, indices, dout)
        part = (q[-tail:], kv, indices[-tail:], dout[-tail:])
        for got, want in zip((out, dq), jax.jit(self.gradients)(*part), strict=False):
            np.testing.assert_array_equal(got[-tail:], want)


if __name__ == "__main__":
    absltest.main()
