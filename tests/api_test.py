"""merge_partials, gather_kv, register, export, and the compiler's own figures of memory."""

import functools
import os
from typing import Any
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from absl.testing import absltest, parameterized
from cases import Case
from jax import export
from jax.sharding import AxisType, PartitionSpec

import jax_dsa

IMPLEMENTATIONS = ("reference", "xla")
SPLIT = Case("split", batch=(2,), queries=4, lengths=(8, 5, 0, 3), sink=cases.SINKS, value_dim=20)


def attend(operands, implementation="xla", **options):
    q, kv, indices, length, sink = operands
    return jax_dsa.sparse_attention(
        q, kv, indices, topk_length=length, attn_sink=sink, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip


class MergePartialsTest(parameterized.TestCase):
    def parts(self, operands, count: int):
        """The slots dealt out to ``count`` calls without a sink."""
        results = []
        for n in range(count):
            mine = np.arange(8) % count == n
            valid = oracle.valid_slots(operands) & mine
            indices = np.where(valid, operands.indices, -1).astype(np.int32)
            some = operands._replace(indices=indices, topk_length=None, attn_sink=None)
            results.append(attend(some, value_dim=20))
        return [o for o, _ in results], [x for _, x in results]

    @parameterized.product(count=(1, 2, 3), stacked=(False, True))
    def test_parts_equal_one_call(self, count: int, stacked: bool):
        """Values and gradients, the sink applied once; rows with some or all parts empty."""
        inputs = cases.make_inputs(SPLIT)
        operands = inputs.operands

        def run(q, kv, sink):
            outs, lses = self.parts(operands._replace(q=q, kv=kv), count)
            if stacked:
                outs, lses = jnp.stack(outs), jnp.stack(lses)
            return jax_dsa.merge_partials(outs, lses, sink)

        @jax.jit
        def program(q, kv, sink):
            results, vjp = jax.vjp(run, q, kv, sink)
            return *results, *vjp((inputs.dout, inputs.dlse))

        got = program(operands.q, operands.kv, operands.attn_sink)
        values = oracle.forward(operands, **inputs.options)
        grads = oracle.backward(operands, inputs.dout, inputs.dlse, **inputs.options)
        wanted = (values.out, values.lse, grads.dq, grads.dkv, grads.dsink)
        for name, g, want in zip(("out", "lse", "dq", "dkv", "dsink"), got, wanted, strict=True):
            cases.check_close(name, g, want, 2e-6)

    def test_two_zero_logits_merge_to_ln_2(self):
        out, lse = jax_dsa.merge_partials([jnp.ones((1, 2)), jnp.zeros((1, 2))], [jnp.zeros(1)] * 2)
        np.testing.assert_allclose(lse, [np.log(2)], rtol=1e-7)
        np.testing.assert_allclose(out, [[0.5, 0.5]], rtol=1e-6)

    @parameterized.parameters(None, 0.0, np.inf, -np.inf, 1e38)
    def test_all_parts_empty(self, sink):
        """Out 0, lse -inf, every gradient 0 and finite, eagerly under debug_nans."""
        outs, lses = jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf)
        sinks = None if sink is None else jnp.full(3, sink, jnp.float32)

        def run(outs, lses, sinks):
            return jax_dsa.merge_partials(outs, lses, sinks)

        with jax.debug_nans(True):
            (out, lse), vjp = jax.vjp(run, outs, lses, sinks)
            grads = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
        for g in grads[1:]:
            if g is not None:
                np.testing.assert_array_equal(g, 0)
        self.assertTrue(np.isfinite(grads[0]).all())

    @parameterized.parameters(np.inf, -np.inf, 1e38, -1e38, 40.0)
    def test_extreme_sinks(self, sink: float):
        rng = np.random.default_rng(0)
        outs, lses = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3))
        lses[0, 1] = -np.inf
        got = jax_dsa.merge_partials(outs.astype("f"), lses.astype("f"), np.full(3, sink, "f"))
        weight = np.exp(lses - np.logaddexp(lses[0], lses[1]))
        share = np.exp(-np.logaddexp(0, sink - np.logaddexp(lses[0], lses[1])))
        want = (weight[..., None] * outs).sum(0) * share[:, None]
        cases.check_close("out", got[0], want, 2e-6)
        cases.check_close("lse", got[1], np.logaddexp(lses[0], lses[1]), 2e-6)

    @parameterized.parameters("bfloat16", "float16")
    def test_keeps_the_dtype_of_the_parts(self, dtype: str):
        out, lse = jax_dsa.merge_partials(jnp.ones((2, 3, 4), dtype), jnp.zeros((2, 3)))
        self.assertEqual((out.dtype, lse.dtype), (jnp.dtype(dtype), jnp.dtype("float32")))

    @parameterized.parameters(
        ([], [], "0 outs and 0 lses"),
        ([(3, 4)], [(3,), (3,)], "1 outs and 2 lses"),
        ([(3, 4), (3, 5)], [(3,), (3,)], r"part 1 has out \(3, 5\)"),
        ([(3, 4), (3, 4)], [(3,), (4,)], r"part 1 .* lse \(4,\)"),
        ([(3, 4)], [(1,)], r"part 0 .* lse \(1,\)"),
    )
    def test_errors(self, outs, lses, message: str):
        with self.assertRaisesRegex(ValueError, f"merge_partials: .*{message}.*want"):
            jax_dsa.merge_partials([jnp.zeros(s) for s in outs], [jnp.zeros(s) for s in lses])

    @parameterized.parameters((1,), (3,), (5, 2), (5, 1))
    def test_shape_of_the_sink(self, *shape: int):
        with self.assertRaisesRegex(ValueError, "attn_sink: got shape"):
            jax_dsa.merge_partials([jnp.zeros((5, 2, 4))], [jnp.zeros((5, 2))], jnp.zeros(shape))


class GatherKvTest(parameterized.TestCase):
    def mesh(self):
        return jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))

    @parameterized.product(check_vma=(True, False), batch=((), (2,)))
    def test_values_and_gradient(self, check_vma: bool, batch: tuple[int, ...]):
        """Eight devices' gradients add in float32: to 1, bfloat16 adds seven 2**-9 in vain."""
        rng = np.random.default_rng(0)
        kv = cases.as_dtype(rng.standard_normal((*batch, 16, 4)), "bfloat16")
        spec = PartitionSpec(*[None] * len(batch), "t")

        def local(kv):
            whole = jax_dsa.gather_kv(kv, "t")
            self.assertEqual((whole.shape, whole.dtype), ((*batch, 16, 4), kv.dtype))
            mine = jnp.where(jax.lax.axis_index("t") == 0, 1, 2.0**-9).astype(kv.dtype)
            return whole[None], (whole * mine).sum()[None]

        run = jax.shard_map(
            local, mesh=self.mesh(), in_specs=spec, out_specs=(PartitionSpec("t"),) * 2,
            check_vma=check_vma,
        )  # fmt: skip
        copies, _ = jax.jit(run)(kv)
        for copy in copies:
            np.testing.assert_array_equal(copy, kv)
        grad = jax.jit(jax.grad(lambda kv: run(kv)[1].sum()))(kv)
        want = cases.as_dtype(np.full(kv.shape, 1 + 7 * 2.0**-9), "bfloat16")
        np.testing.assert_array_equal(grad, want)
        self.assertGreater(float(want.flat[0]), 1)

    def test_reduce_scatter_is_in_float32(self):
        run = jax.shard_map(
            lambda kv: jax_dsa.gather_kv(kv, "t").sum()[None], mesh=self.mesh(),
            in_specs=PartitionSpec("t"), out_specs=PartitionSpec("t"),
        )  # fmt: skip
        text = str(
            jax.make_jaxpr(jax.grad(lambda kv: run(kv).sum()))(jnp.ones((16, 4), "bfloat16"))
        )
        self.assertRegex(text, r"f32\[2,4\]\S* = reduce_scatter")

    def test_rank(self):
        with self.assertRaisesRegex(ValueError, r"^kv: got shape \(4,\), want \[\.\.\., T, D\]"):
            jax_dsa.gather_kv(jnp.ones(4), "t")


class RegisterTest(parameterized.TestCase):
    def test_twice(self):
        jax_dsa.register()
        jax_dsa.register()

    def test_names_of_exported_custom_calls(self):
        names = [str(check) for check in jax_dsa.EXPORT_DISABLED_CHECKS]
        for name in ("jax_dsa_fwd_v1", "jax_dsa_bwd_v1"):
            self.assertTrue(any(name in text for text in names), names)


class ExportTest(parameterized.TestCase):
    def gradients(self, implementation, operands, dout, dlse):
        def run(q, kv, sink):
            return attend(operands._replace(q=q, kv=kv, attn_sink=sink), implementation)

        results, vjp = jax.vjp(run, operands.q, operands.kv, operands.attn_sink)
        return *results, *vjp((dout, dlse))

    def exported(self, implementation, inputs, **options):
        run = jax.jit(functools.partial(self.gradients, implementation))
        # Plain tuples: serialisation need not know a NamedTuple.
        flat = jax.jit(lambda *a: run(cases.Operands(*a[:5]), *a[5:]))
        arguments = (*inputs.operands, inputs.dout, inputs.dlse)
        checks = jax_dsa.EXPORT_DISABLED_CHECKS
        return export.export(flat, disabled_checks=checks, **options)(*arguments), arguments

    @parameterized.parameters("xla", "reference", None)
    def test_round_trip_of_values_and_gradients(self, implementation):
        inputs = cases.make_inputs(Case("export", queries=3, lengths=(8, 2, 0), sink=cases.SINKS))
        artefact, arguments = self.exported(implementation, inputs)
        jax_dsa.register()
        got = export.deserialize(artefact.serialize()).call(*arguments)
        values = oracle.forward(inputs.operands)
        grads = oracle.backward(inputs.operands, inputs.dout, inputs.dlse)
        wanted = (values.out, values.lse, grads.dq, grads.dkv, grads.dsink)
        for name, g, want in zip(("out", "lse", "dq", "dkv", "dsink"), got, wanted, strict=True):
            cases.check_close(name, g, want, 2e-6)

    @parameterized.parameters("xla", "reference", None)
    def test_for_a_gpu_from_here(self, implementation):
        inputs = cases.make_inputs(Case("export", queries=3, sink=cases.SINKS))
        artefact, _ = self.exported(implementation, inputs, platforms=("cuda",))
        self.assertEqual(artefact.platforms, ("cuda",))
        self.assertIn("stablehlo.scatter", artefact.mlir_module())

    def test_for_both_platforms_at_once(self):
        inputs = cases.make_inputs(Case("export", queries=3, sink=cases.SINKS))
        artefact, arguments = self.exported("xla", inputs, platforms=("cpu", "cuda"))
        out = export.deserialize(artefact.serialize()).call(*arguments)[0]
        cases.check_close("out", out, oracle.forward(inputs.operands).out, 2e-6)

    def test_symbolic_sizes(self):
        """One artefact for any S and T."""
        shapes = export.symbolic_args_specs(
            (np.zeros((2, 3, 8), "f"), np.zeros((2, 8), "f"), np.zeros((2, 4), "i")),
            ("s, 3, 8", "t, 8", "s, 4"),
        )
        run = jax.jit(lambda *a: jax_dsa.sparse_attention(*a, implementation="reference"))
        artefact = export.export(run)(*shapes)
        inputs = cases.make_inputs(Case("symbolic", queries=6, keys=7, head_dim=8, topk=4))
        got = artefact.call(*inputs.operands[:3])
        cases.check_close("out", got, oracle.forward(inputs.operands).out, 2e-6)


def mib(compiled) -> float:
    """Temporary memory by the compiler's own figures."""
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


class MemoryTest(parameterized.TestCase):
    """The compiler's own figures for temporaries; the programs are not run."""

    def compiled(self, queries: int, gradient: bool):
        shape = jax.ShapeDtypeStruct
        q, kv = shape((queries, 16, 576), jnp.bfloat16), shape((4096, 576), jnp.bfloat16)
        indices = shape((queries, 512), jnp.int32)

        def run(q, kv, indices):
            return jax_dsa.sparse_attention(q, kv, indices, implementation="xla")

        def gradients(q, kv, indices, dout):
            out, vjp = jax.vjp(lambda q, kv: run(q, kv, indices), q, kv)
            return vjp(dout)

        arguments = (q, kv, indices)
        if gradient:
            arguments += (shape((queries, 16, 512), jnp.bfloat16),)
        return jax.jit(gradients if gradient else run).lower(*arguments).compile()

    def temporaries(self, queries: int, gradient: bool) -> float:
        return mib(self.compiled(queries, gradient))

    @parameterized.parameters((False, 256), (True, 512))
    def test_temporaries(self, gradient: bool, limit: int):
        self.assertLessEqual(self.temporaries(4096, gradient), limit)

    @parameterized.parameters(False, True)
    def test_temporaries_grow_linearly_in_queries(self, gradient: bool):
        sizes = [self.temporaries(s, gradient) for s in (1024, 2048, 4096)]
        self.assertLessEqual(sizes[2] - sizes[1], 2.1 * (sizes[1] - sizes[0]) + 1)

    def test_nothing_as_large_as_all_gathered_keys_exists(self):
        """No buffer of [S, K, D], nor [S, H, K], in the optimised program."""
        text = str(self.compiled(4096, True).as_text())
        for shape in ("4096,512,576", "2097152,576", "4096,16,512,512"):
            self.assertNotIn(f"[{shape}]", text)

    def test_deterministic_gradient_stays_within_the_same_limit(self):
        shape = jax.ShapeDtypeStruct
        q, kv = shape((1024, 16, 576), jnp.bfloat16), shape((4096, 576), jnp.bfloat16)
        sizes = []
        for deterministic in (False, True):

            def loss(q, kv, indices, deterministic=deterministic):
                out: Any = jax_dsa.sparse_attention(
                    q, kv, indices, implementation="xla", deterministic=deterministic
                )
                return out.sum()

            lowered = jax.jit(jax.grad(loss, (0, 1))).lower(q, kv, shape((1024, 512), jnp.int32))
            sizes.append(mib(lowered.compile()))
        self.assertLessEqual(sizes[1], sizes[0] + 64)


class BlockSizeTest(parameterized.TestCase):
    def test_override_decides_the_block(self):
        """S = 7 in blocks of 3: the loop runs three times, the last block starts at row 4."""
        inputs = cases.make_inputs(Case("block", queries=7, sink=cases.SINKS))
        with mock.patch.dict(os.environ, {"JAX_DSA_XLA_BLOCK": "3"}):
            lowered = jax.jit(attend).lower(inputs.operands)
        self.assertIn("tensor<3x8x32xf32>", lowered.as_text())
        out, _ = lowered.compile()(inputs.operands)
        cases.check_close("out", out, oracle.forward(inputs.operands).out, 2e-6)


if __name__ == "__main__":
    absltest.main()
