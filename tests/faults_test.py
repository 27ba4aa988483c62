"""Faults that other sparse-attention packages had, tried on ours; named after what went wrong.

What only a kernel can get wrong (pipelines, tensor memory, grids, compiler levels) is not here.
"""

import dataclasses
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from absl.testing import absltest, parameterized
from cases import Case, Operands

import jax_dsa

IMPLEMENTATIONS = ("reference", "xla")
# Compiles in half the time, where many programs are compiled.
QUICK = {"xla_backend_optimization_level": 0}


def program(implementation: str, **options):
    """Jitted ``(operands, dout, dlse) -> out, lse, dq, dkv, dsink``."""

    def run(operands, dout, dlse):
        def attend(q, kv, sink):
            return jax_dsa.sparse_attention(
                q, kv, operands.indices, topk_length=operands.topk_length, attn_sink=sink,
                return_lse=True, implementation=implementation, **options,
            )  # fmt: skip

        results, vjp = jax.vjp(attend, operands.q, operands.kv, operands.attn_sink)
        return *results, *vjp((dout, dlse))

    return jax.jit(run)


def run_and_check(implementation: str, inputs: cases.Inputs, **options):
    got = program(implementation, **inputs.options, **options)(
        inputs.operands, inputs.dout, inputs.dlse
    )
    cases.check_results(got, inputs)
    return got


class FaultsTest(parameterized.TestCase):
    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_slot_position_is_not_compared_with_the_number_of_rows(self, implementation: str):
        """T = 4, K = 128: the only valid ids stand at slots 100 to 103."""
        inputs = cases.make_inputs(Case("k_beyond_t", queries=2, keys=4, topk=128))
        indices = np.full((2, 128), -1, np.int32)
        indices[:, 100:104] = [3, 1, 0, 2]
        inputs = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        got = run_and_check(implementation, inputs)
        self.assertTrue((np.abs(got[3]).max(-1) > 1e-3).all())

    @parameterized.product(implementation=IMPLEMENTATIONS, heads=(1, 2, 16, 32, 64, 128))
    def test_rows_of_different_queries_never_mix(self, implementation: str, heads: int):
        """S = 2, indices [[0], [1]]: every out is the one value its query names, bit for bit."""
        inputs = cases.make_inputs(Case("two_queries", queries=2, keys=2, topk=1, heads=heads))
        indices = np.array([[0], [1]], np.int32)
        inputs = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        out, _, dq, dkv, _ = run_and_check(implementation, inputs)
        np.testing.assert_array_equal(out, np.repeat(inputs.operands.kv[:, None], heads, 1))
        self.assertGreater(np.abs(dq).max(), 1e-3)
        self.assertLess(np.abs(dkv).max(), 1e3)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_zero_and_negative_lengths_end(self, implementation: str):
        case = Case("lengths", queries=4, lengths=(0, 1, 0, -5), sink=cases.SINKS)
        out, lse, dq, _, _ = run_and_check(implementation, cases.make_inputs(case))
        for t in (0, 2, 3):
            np.testing.assert_array_equal(out[t], 0)
            np.testing.assert_array_equal(dq[t], 0)
            np.testing.assert_array_equal(lse[t], -np.inf)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_same_buffers_twice_and_donated(self, implementation: str):
        """dkv starts from zero in each of ten calls of one program, its operands donated."""
        inputs = cases.make_inputs(Case("again", sink=cases.SINKS))
        run = program(implementation)
        first = jax.device_get(run(inputs.operands, inputs.dout, inputs.dlse))
        cases.check_results(first, inputs)

        def on_donated(q, kv, dout, operands, dlse):
            return run(operands._replace(q=q, kv=kv), dout, dlse)

        donating = jax.jit(on_donated, donate_argnums=(0, 1, 2))
        for _ in range(10):
            fresh = map(jnp.array, (inputs.operands.q, inputs.operands.kv, inputs.dout))
            results = donating(*fresh, inputs.operands, inputs.dlse)
            for got, want in zip(results, first, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_shapes_and_dtypes_interleaved_in_one_process(self, implementation: str):
        """Nothing leaks from one call to the next: K, H and dtype change from call to call."""
        sizes = ((16, 8), (32, 4), (16, 4))
        run = jax.jit(program(implementation), compiler_options=QUICK)
        for (topk, heads), dtype in itertools.product(sizes, ("bfloat16", "float16")):
            inputs = cases.make_inputs(Case("mixed", topk=topk, heads=heads, queries=3), dtype)
            results = run(inputs.operands, inputs.dout, inputs.dlse)
            cases.check_results(results, inputs, dtype)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_lse_is_natural(self, implementation: str):
        """Two zero logits: ln 2."""
        operands = Operands(
            np.zeros((1, 1, 8), "f"), np.ones((2, 8), "f"), np.array([[0, 1]], "i"), None, None
        )
        zeros = (np.zeros((1, 1, 8), "f"), np.zeros((1, 1), "f"))
        lse = program(implementation)(operands, *zeros)[1]
        np.testing.assert_allclose(lse, [[np.log(2)]], rtol=1e-7)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_every_column_is_distinct(self, implementation: str):
        """All 576 columns of dkv differ: a permuted or repeated column shows; exact integers."""
        operands = Operands(
            np.arange(576, dtype="f").reshape(1, 1, 576), np.zeros((2, 576), "f"),
            np.array([[1]], "i"), None, None,
        )  # fmt: skip
        dout, dlse = np.arange(1, 513, dtype="f").reshape(1, 1, 512) * 1024, np.ones((1, 1), "f")
        got = program(implementation, scale=1.0)(operands, dout, dlse)
        want = np.zeros((2, 576), "f")
        want[1] = operands.q[0, 0]
        want[1, :512] += dout[0, 0]
        np.testing.assert_array_equal(got[3], want)
        self.assertLen(np.unique(want[1]), 576)

    @parameterized.product(
        implementation=("xla",), topk=(64, 65, 127, 128, 192, 320, 384, 1152, 2047)
    )
    def test_dq_is_equal_over_many_runs(self, implementation: str, topk: int):
        inputs = cases.make_inputs(Case("runs", topk=topk, keys=50, queries=3, heads=2))
        run = program(implementation)
        arguments = (inputs.operands, inputs.dout, inputs.dlse)
        first = run(*arguments)
        cases.check_results(first, inputs)
        for _ in range(10):
            np.testing.assert_array_equal(run(*arguments)[2], first[2])

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_cotangent_that_is_computed_in_the_same_program(self, implementation: str):
        """jit(matmul -> dout -> backward) equals the two run apart, bit for bit."""
        inputs = cases.make_inputs(Case("fused", sink=cases.SINKS), "bfloat16")
        rng = np.random.default_rng(2)
        weight = cases.as_dtype(rng.integers(-1, 2, (32, 32)), "bfloat16")
        dout = cases.as_dtype(rng.integers(-4, 5, inputs.dout.shape), "bfloat16")
        run = program(implementation)
        fused = jax.jit(lambda o, d, w, g: run(o, d @ w, g))
        together = fused(inputs.operands, dout, weight, inputs.dlse)
        apart = run(inputs.operands, jax.jit(jnp.matmul)(dout, weight), inputs.dlse)
        for got, want in zip(together, apart, strict=True):
            np.testing.assert_array_equal(got, want)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_seventy_thousand_queries(self, implementation: str):
        case = Case("long", queries=70_000, keys=3, heads=1, head_dim=2, topk=2)
        inputs = cases.make_inputs(case)
        out, _, dq, _, _ = program(implementation)(inputs.operands, inputs.dout, inputs.dlse)
        tail = slice(65_530, 65_545)
        part = inputs.operands._replace(
            q=inputs.operands.q[tail], indices=inputs.operands.indices[tail]
        )
        grads = oracle.backward(part, inputs.dout[tail], inputs.dlse[tail])
        cases.check_close("out", out[tail], oracle.forward(part).out, 2e-6)
        cases.check_close("dq", dq[tail], grads.dq, 2e-6)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_loss_on_out_and_lse_together(self, implementation: str):
        """Each cotangent alone, and both."""
        inputs = cases.make_inputs(Case("both", sink=cases.SINKS))
        for part in (
            inputs,
            dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse)),
            dataclasses.replace(inputs, dout=np.zeros_like(inputs.dout)),
        ):
            run_and_check(implementation, part)

    @parameterized.product(implementation=IMPLEMENTATIONS, invalid=(-1, cases.INT_MIN))
    def test_invalid_slot_first_with_kv_at_the_start_of_an_allocation(
        self, implementation: str, invalid: int
    ):
        """Nothing in front of kv is read; nor is row 0, which holds NaN, in its place."""
        inputs = cases.make_inputs(Case("first", sink=cases.SINKS))
        indices = np.where(inputs.operands.indices == 0, 1, inputs.operands.indices)
        indices[:, 0], indices[:, 1] = invalid, 1
        kv = inputs.operands.kv.copy()
        kv[0] = np.nan
        operands = inputs.operands._replace(indices=indices.astype(np.int32), kv=kv)
        got = program(implementation)(operands, inputs.dout, inputs.dlse)
        kv = np.where(np.isnan(kv), 0, kv)
        cases.check_results(got, dataclasses.replace(inputs, operands=operands._replace(kv=kv)))

    @parameterized.product(implementation=IMPLEMENTATIONS, invalid=(9, 10, cases.INT_MAX))
    def test_invalid_slot_last_with_kv_at_the_end_of_an_allocation(
        self, implementation: str, invalid: int
    ):
        inputs = cases.make_inputs(Case("last", keys=9, batch=(2,)))
        indices = inputs.operands.indices.copy()
        indices[..., -1] = invalid
        indices = np.where(indices == 8, 7, indices).astype(np.int32)
        kv = inputs.operands.kv.copy()
        kv[:, 8] = np.nan
        operands = inputs.operands._replace(indices=indices, kv=kv)
        got = program(implementation)(operands, inputs.dout, inputs.dlse)
        kv = np.where(np.isnan(kv), 0, kv)
        cases.check_results(got, dataclasses.replace(inputs, operands=operands._replace(kv=kv)))

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_slices_that_start_inside_a_buffer(self, implementation: str):
        """x[1:] of every operand, taken inside the program."""
        whole = cases.make_inputs(Case("whole", queries=6, keys=10, lengths=(8, 5, 3, 0, 7, 2)))

        def cut(o):
            return Operands(*(x if x is None else x[1:] for x in o))

        run = program(implementation)
        sliced = jax.jit(lambda o, d, g: run(cut(o), d[1:], g[1:]))
        got = sliced(whole.operands, whole.dout, whole.dlse)
        part = dataclasses.replace(
            whole, operands=cut(whole.operands), dout=whole.dout[1:], dlse=whole.dlse[1:]
        )
        cases.check_results(got, part)

    @parameterized.product(implementation=IMPLEMENTATIONS, topk=(1, 3, 192), heads=(1, 16, 24))
    def test_any_number_of_slots_and_heads_runs(self, implementation: str, topk: int, heads: int):
        case = Case("sweep", queries=2, keys=20, topk=topk, heads=heads, head_dim=8)
        run_and_check(implementation, cases.make_inputs(case))

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_very_negative_logits_leave_no_weight_to_padding(self, implementation: str):
        """All valid logits near -200: invalid slots, with logit 0, would take the weight."""
        inputs = cases.make_inputs(
            Case("negative", scale=1.0, lengths=(3,), sink=(-200.0, -np.inf))
        )
        q, kv = inputs.operands.q.copy(), inputs.operands.kv.copy()
        q[..., 0], kv[..., 0] = -20.0, 10.0
        q[..., 1:] *= 0.1
        operands = inputs.operands._replace(q=q, kv=kv)
        inputs = dataclasses.replace(inputs, operands=operands)
        got = program(implementation, scale=1.0)(operands, inputs.dout, inputs.dlse)
        self.assertLess(got[1].max(), -150)
        # s and lse near -200 have a rounding error of 2**-17 each in float32, and s comes from two
        # roundings at least, of its product and of its sum: ln P is wrong by up to four of them.
        values = oracle.forward(operands, scale=1.0)
        grads = oracle.backward(operands, inputs.dout, inputs.dlse, scale=1.0)
        wanted = (values.out, values.lse, grads.dq, grads.dkv, grads.dsink)
        for name, g, want in zip(("out", "lse", "dq", "dkv", "dsink"), got, wanted, strict=True):
            cases.check_close(name, g, want, 4 * 2**-17)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_delta_is_not_rounded_to_sixteen_bits(self, implementation: str):
        """Products of dout and out need 15 bits each here."""
        inputs = cases.make_inputs(
            Case("delta", keys=2, topk=1, heads=1, sink=(0.0,), lse_loss=False), "bfloat16"
        )
        near_one = 1 + 2.0**-7
        operands = inputs.operands._replace(
            q=np.zeros_like(inputs.operands.q), kv=np.full_like(inputs.operands.kv, near_one)
        )
        dout = np.full_like(inputs.dout, near_one)
        dsink = program(implementation)(operands, dout, inputs.dlse)[4]
        # Logit 0 and sink 0: out = v / 2, Delta = 32 dout v / 2, dsink = -Delta / 2 a query.
        np.testing.assert_allclose(dsink, [-5 * 32 * near_one**2 / 4], rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
