"""Faults that other sparse-attention packages had, tried on ours; named after what went wrong."""

import dataclasses
import itertools
from typing import ClassVar

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import suite
from absl.testing import parameterized
from cases import Case, Operands

# Compiles in half the time, where many programs are compiled.
QUICK = {"xla_backend_optimization_level": 0}


class FaultsSuite(suite.Suite):
    """Each fault on one implementation.

    Attributes:
        runs: how often a program is repeated where its bits must not change.
    """

    runs: ClassVar[int] = 10

    def flat(self, **options):
        """Jitted ``(operands, dout, dlse) -> out, lse, dq, dkv, dsink``."""
        run = self.program(options)

        def flattened(operands, dout, dlse):
            out, lse, gradients = run(operands, dout, dlse)
            return out, lse, *gradients

        return jax.jit(flattened)

    def zeros(self, *shape: int) -> np.ndarray:
        return cases.as_dtype(np.zeros(shape), self.dtype)

    def widths(self) -> tuple[int, int]:
        """A head_dim and its value_dim."""
        return (self.head_dims[-1], 512) if self.head_dims else (8, 8)

    def test_slot_position_is_not_compared_with_the_number_of_rows(self):
        """T = 4, K = 128: the only valid ids stand at slots 100 to 103."""
        inputs = self.inputs(Case("k_beyond_t", queries=2, keys=4, topk=128))
        indices = np.full((2, 128), -1, np.int32)
        indices[:, 100:104] = [3, 1, 0, 2]
        inputs = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        got = self.run_and_check(inputs)
        self.assertTrue((np.abs(got.dkv.astype("f")).max(-1) > 1e-3).all())

    @parameterized.parameters(1, 2, 16, 32, 64, 128)
    def test_rows_of_different_queries_never_mix(self, heads: int):
        """S = 2, indices [[0], [1]]: every out is the one value its query names, bit for bit."""
        inputs = self.inputs(Case("two_queries", queries=2, keys=2, topk=1, heads=heads))
        indices = np.array([[0], [1]], np.int32)
        inputs = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        got = self.run_and_check(inputs)
        value = inputs.operands.kv[:, None, : got.out.shape[-1]]
        np.testing.assert_array_equal(got.out, np.repeat(value, heads, 1))
        self.assertGreater(np.abs(got.dq.astype("f")).max(), 1e-3)
        self.assertLess(np.abs(got.dkv.astype("f")).max(), 1e3)

    def test_zero_and_negative_lengths_end(self):
        case = Case("lengths", queries=4, lengths=(0, 1, 0, -5), sink=cases.SINKS)
        got = self.run_and_check(self.inputs(case))
        for t in (0, 2, 3):
            np.testing.assert_array_equal(got.out[t], 0 * got.out[t])
            np.testing.assert_array_equal(got.dq[t], 0 * got.dq[t])
            np.testing.assert_array_equal(got.lse[t], -np.inf)

    def test_same_buffers_twice_and_donated(self):
        """dkv starts from zero in each of ten calls of one program, its operands donated."""
        inputs = self.inputs(Case("again", sink=cases.SINKS))
        run = self.flat()
        first = jax.device_get(run(inputs.operands, inputs.dout, inputs.dlse))
        cases.check_results(first, inputs, self.dtype)

        def on_donated(q, kv, dout, operands, dlse):
            return run(operands._replace(q=q, kv=kv), dout, dlse)

        donating = jax.jit(on_donated, donate_argnums=(0, 1, 2))
        rounding = 1e-5 if self.dtype == "float32" else 2**-7
        for _ in range(10):
            fresh = map(jnp.array, (inputs.operands.q, inputs.operands.kv, inputs.dout))
            results = donating(*fresh, inputs.operands, inputs.dlse)
            for got, want in zip(results, first, strict=True):
                got, want = (np.asarray(x).astype("f") for x in (got, want))
                np.testing.assert_allclose(got, want, rtol=rounding, atol=1e-6)

    def test_shapes_and_dtypes_interleaved_in_one_process(self):
        """Nothing leaks from one call to the next: K, H and dtype change from call to call."""
        sizes = ((16, 8), (32, 4), (16, 4), (128, 64), (128, 32))
        run = jax.jit(self.flat(), compiler_options=QUICK)
        for (topk, heads), dtype in itertools.product(sizes, ("bfloat16", "float16")):
            inputs = self.inputs(Case("mixed", topk=topk, heads=heads, queries=3), dtype)
            results = run(inputs.operands, inputs.dout, inputs.dlse)
            cases.check_results(results, inputs, dtype)

    def test_lse_is_natural(self):
        """Two zero logits: ln 2."""
        width, value_dim = self.widths()
        kv = self.zeros(2, width) + cases.as_dtype(1, self.dtype)
        operands = Operands(self.zeros(1, 1, width), kv, np.array([[0, 1]], "i"), None, None)
        lse = self.flat()(operands, self.zeros(1, 1, value_dim), np.zeros((1, 1), "f"))[1]
        np.testing.assert_allclose(lse, [[np.log(2)]], rtol=2e-7)

    def test_every_column_is_distinct(self):
        """All 576 columns of dkv differ: a permuted or repeated column shows; exact numbers.

        Significands of 8 bits, 128 to an exponent: 5 exponents of q, 4 others of dout.
        """
        column = np.arange(576)
        q = (1 + column % 128 / 128) * 2.0 ** -(column // 128 + 4)
        dout = (1 + column[:512] % 128 / 128) * 2.0 ** (column[:512] // 128)
        operands = Operands(
            cases.as_dtype(q.reshape(1, 1, 576), self.dtype), self.zeros(2, 576),
            np.array([[1]], "i"), None, None,
        )  # fmt: skip
        for part in ("q", "dout"):
            cotangent = dout.reshape(1, 1, 512) * (part == "dout")
            dlse = np.full((1, 1), float(part == "q"), "f")
            got = self.flat(scale=1.0)(operands, cases.as_dtype(cotangent, self.dtype), dlse)
            want = np.zeros((2, 576))
            want[1] = q if part == "q" else np.pad(dout, (0, 64))
            np.testing.assert_array_equal(np.asarray(got[3]).astype("d"), want)
            self.assertLen(np.unique(want[1]), 576 if part == "q" else 513)

    @parameterized.parameters(64, 65, 127, 128, 192, 320, 384, 1152, 2047)
    def test_dq_is_equal_over_many_runs(self, topk: int):
        inputs = self.inputs(Case("runs", topk=topk, keys=50, queries=3, heads=2))
        run = self.flat()
        arguments = (inputs.operands, inputs.dout, inputs.dlse)
        first = run(*arguments)
        cases.check_results(first, inputs, self.dtype)
        for _ in range(self.runs):
            np.testing.assert_array_equal(run(*arguments)[2], first[2])

    def test_cotangent_that_is_computed_in_the_same_program(self):
        """jit(matmul -> dout -> backward) equals the two run apart, bit for bit."""
        inputs = self.inputs(Case("fused", sink=cases.SINKS), "bfloat16")
        rng, width = np.random.default_rng(2), inputs.dout.shape[-1]
        weight = cases.as_dtype(rng.integers(-1, 2, (width, width)), "bfloat16")
        dout = cases.as_dtype(rng.integers(-4, 5, inputs.dout.shape), "bfloat16")
        run = self.flat()
        fused = jax.jit(lambda o, d, w, g: run(o, d @ w, g))
        together = fused(inputs.operands, dout, weight, inputs.dlse)
        apart = run(inputs.operands, jax.jit(jnp.matmul)(dout, weight), inputs.dlse)
        for name, got, want in zip(suite.RESULTS, together, apart, strict=True):
            self.check_equal(name, got, want)

    def test_seventy_thousand_queries(self):
        case = Case("long", queries=70_000, keys=3, heads=1, head_dim=2, topk=2)
        inputs = self.inputs(case)
        out, _, dq, _, _ = self.flat(**inputs.options)(inputs.operands, inputs.dout, inputs.dlse)
        tail = slice(65_530, 65_545)
        part = inputs.operands._replace(
            q=inputs.operands.q[tail], indices=inputs.operands.indices[tail]
        )
        options = inputs.options
        grads = oracle.backward(part, inputs.dout[tail], inputs.dlse[tail], **options)
        bounds = cases.BOUNDS[self.dtype]
        cases.check_close("out", out[tail], oracle.forward(part, **options).out, bounds.out)
        cases.check_close("dq", dq[tail], grads.dq, bounds.gradient)

    def test_loss_on_out_and_lse_together(self):
        """Each cotangent alone, and both."""
        inputs = self.inputs(Case("both", sink=cases.SINKS))
        for part in (
            inputs,
            dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse)),
            dataclasses.replace(inputs, dout=np.zeros_like(inputs.dout)),
        ):
            self.run_and_check(part)

    def check_poisoned(self, inputs: cases.Inputs, indices: np.ndarray, row: int) -> None:
        """NaN in a row that no valid slot names changes nothing."""
        kv = inputs.operands.kv.copy()
        kv[..., row, :] = np.nan
        operands = inputs.operands._replace(indices=indices.astype(np.int32), kv=kv)
        got = self.flat()(operands, inputs.dout, inputs.dlse)
        operands = operands._replace(kv=np.where(np.isnan(kv), cases.as_dtype(0, self.dtype), kv))
        clean = dataclasses.replace(inputs, operands=operands)
        cases.check_results(got, clean, self.dtype)

    @parameterized.parameters(-1, cases.INT_MIN)
    def test_invalid_slot_first_with_kv_at_the_start_of_an_allocation(self, invalid: int):
        """Nothing in front of kv is read; nor is row 0, which holds NaN, in its place."""
        inputs = self.inputs(Case("first", sink=cases.SINKS))
        indices = np.where(inputs.operands.indices == 0, 1, inputs.operands.indices)
        indices[:, 0], indices[:, 1] = invalid, 1
        self.check_poisoned(inputs, indices, 0)

    @parameterized.parameters(9, 10, cases.INT_MAX)
    def test_invalid_slot_last_with_kv_at_the_end_of_an_allocation(self, invalid: int):
        inputs = self.inputs(Case("last", keys=9, batch=(2,)))
        indices = inputs.operands.indices.copy()
        indices[..., -1] = invalid
        self.check_poisoned(inputs, np.where(indices == 8, 7, indices), 8)

    def test_slices_that_start_inside_a_buffer(self):
        """x[1:] of every operand, taken inside the program."""
        whole = self.inputs(Case("whole", queries=6, keys=10, lengths=(8, 5, 3, 0, 7, 2)))

        def cut(o):
            return Operands(*(x if x is None else x[1:] for x in o))

        run = self.flat()
        sliced = jax.jit(lambda o, d, g: run(cut(o), d[1:], g[1:]))
        got = sliced(whole.operands, whole.dout, whole.dlse)
        part = dataclasses.replace(
            whole, operands=cut(whole.operands), dout=whole.dout[1:], dlse=whole.dlse[1:]
        )
        cases.check_results(got, part, self.dtype)

    @parameterized.product(topk=(1, 3, 192), heads=(1, 16, 24))
    def test_any_number_of_slots_and_heads_runs(self, topk: int, heads: int):
        case = Case("sweep", queries=2, keys=20, topk=topk, heads=heads, head_dim=8)
        self.run_and_check(self.inputs(case))

    def test_very_negative_logits_leave_no_weight_to_padding(self):
        """All valid logits near -200: invalid slots, with logit 0, would take the weight."""
        case = Case("negative", lengths=(3,), sink=(-200.0, -np.inf))
        inputs = self.inputs(case)
        q, kv = inputs.operands.q.copy(), inputs.operands.kv.copy()
        q[..., 0], kv[..., 0] = -20.0, 10.0
        q[..., 1:] = q[..., 1:] * cases.as_dtype(0.1, self.dtype)
        operands = inputs.operands._replace(q=q, kv=kv)
        inputs = dataclasses.replace(inputs, operands=operands)
        got = self.flat(scale=1.0)(operands, inputs.dout, inputs.dlse)
        self.assertLess(got[1].max(), -150)
        # s and lse near -200 have a rounding error of 2**-17 each in float32, and s comes from two
        # roundings at least, of its product and of its sum: ln P is wrong by up to four of them.
        values = oracle.forward(operands, scale=1.0)
        grads = oracle.backward(operands, inputs.dout, inputs.dlse, scale=1.0)
        wanted = (values.out, values.lse, grads.dq, grads.dkv, grads.dsink)
        bounds = dataclasses.asdict(cases.BOUNDS[self.dtype])
        limits = (bounds["out"], 0, *3 * (bounds["gradient"],))
        for name, g, want, limit in zip(suite.RESULTS, got, wanted, limits, strict=True):
            cases.check_close(name, g, want, max(limit, 4 * 2**-17))

    def test_delta_is_not_rounded_to_sixteen_bits(self):
        """Products of dout and out need 15 bits each here."""
        inputs = self.inputs(
            Case("delta", keys=2, topk=1, heads=1, sink=(0.0,), lse_loss=False), "bfloat16"
        )
        near_one, width = 1 + 2.0**-7, inputs.dout.shape[-1]
        operands = inputs.operands._replace(
            q=np.zeros_like(inputs.operands.q), kv=np.full_like(inputs.operands.kv, near_one)
        )
        dout = np.full_like(inputs.dout, near_one)
        dsink = self.flat()(operands, dout, inputs.dlse)[4]
        # Logit 0 and sink 0: out = v / 2, Delta = V dout v / 2, dsink = -Delta / 2 a query.
        np.testing.assert_allclose(dsink, [-5 * width * near_one**2 / 4], rtol=1e-6)
