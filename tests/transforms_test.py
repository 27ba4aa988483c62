"""vmap, jit, checkpoint, forward mode, second derivatives, donation, names and scopes."""

import functools
import itertools
import re
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from absl.testing import absltest, parameterized
from cases import Case, Operands
from jax.ad_checkpoint import checkpoint_policies

import jax_dsa

IMPLEMENTATIONS = ("reference", "xla")
FIELDS = Operands._fields
# Compiles in half the time; what is tested here is which numbers meet, not how fast.
QUICK = {"xla_backend_optimization_level": 0}


def quick_jit(fn, **options):
    return jax.jit(fn, compiler_options=QUICK, **options)


def attend(implementation: str, operands, **options):
    q, kv, indices, length, sink = operands
    return jax_dsa.sparse_attention(
        q, kv, indices, topk_length=length, attn_sink=sink, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip


def gradients(implementation: str, operands, dout, dlse):
    """``out, lse, dq, dkv, dsink``."""

    def differentiable(q, kv, sink):
        return attend(implementation, operands._replace(q=q, kv=kv, attn_sink=sink))

    results, vjp = jax.vjp(differentiable, operands.q, operands.kv, operands.attn_sink)
    return *results, *vjp((dout, dlse))


def mapped_inputs(subset, size: int = 3, batch: tuple[int, ...] = ()):
    """For each batch element: operands of which those in ``subset`` differ; dout; dlse."""
    case = Case(
        "mapped", batch=batch, queries=3, keys=5, heads=2, head_dim=8, topk=4,
        lengths=(4, 2, 0), sink=(0.5, -1.0),
    )  # fmt: skip
    inputs = [cases.make_inputs(case, seed=s) for s in range(size)]
    lengths = [np.roll(x.operands.topk_length, s) for s, x in enumerate(inputs)]
    sinks = [x.operands.attn_sink + s for s, x in enumerate(inputs)]
    each = [
        x.operands._replace(topk_length=n, attn_sink=s.astype(np.float32))
        for x, n, s in zip(inputs, lengths, sinks, strict=True)
    ]
    each = [Operands(*(getattr(x if f in subset else each[0], f) for f in FIELDS)) for x in each]
    return each, [x.dout for x in inputs], [x.dlse for x in inputs]


def stack(each, subset, axes):
    """One set of operands and its in_axes, from one set for each batch element."""
    stacked, in_axes = {}, {}
    for field, axis in zip(FIELDS, axes, strict=True):
        values = [getattr(x, field) for x in each]
        mapped = field in subset
        in_axes[field] = axis if mapped else None
        stacked[field] = np.stack(values, axis) if mapped else values[0]
    return Operands(**stacked), Operands(**in_axes)


def check_all(got, each, douts, dlses, dtype: str = "float32"):
    """``got`` = out, lse, dq, dkv, dsink with a leading axis, against the oracle."""
    for n, (operands, dout, dlse) in enumerate(zip(each, douts, dlses, strict=True)):
        element = cases.Inputs(operands, dout, dlse, {})
        cases.check_results([g[n] for g in got], element, dtype)


SUBSETS = [subset for r in range(1, 6) for subset in itertools.combinations(FIELDS, r)]


class VmapTest(parameterized.TestCase):
    @parameterized.named_parameters(*(("_" + "_".join(s), s) for s in SUBSETS))
    def test_function_and_gradient_with_any_subset_mapped(self, subset):
        """in_axes 0 or the last axis by turns; vmap of the gradient: dout and dlse are mapped."""
        each, douts, dlses = mapped_inputs(subset)
        axes = [(0, -1)[(i + len(subset)) % 2] for i in range(5)]
        operands, in_axes = stack(each, subset, axes)
        mapped = jax.vmap(
            lambda *a: gradients("xla", *a), in_axes=(in_axes, 0, 0), axis_size=len(each)
        )
        check_all(quick_jit(mapped)(operands, np.stack(douts), np.stack(dlses)), each, douts, dlses)

    @parameterized.named_parameters(
        ("_q", ("q",)), ("_kv", ("kv",)), ("_indices", ("indices",)),
        ("_attn_sink", ("attn_sink",)), ("_all", FIELDS),
    )  # fmt: skip
    def test_reference_with_subsets_mapped(self, subset):
        each, douts, dlses = mapped_inputs(subset)
        operands, in_axes = stack(each, subset, (0,) * 5)
        mapped = jax.vmap(lambda *a: gradients("reference", *a), in_axes=(in_axes, 0, 0))
        check_all(quick_jit(mapped)(operands, np.stack(douts), np.stack(dlses)), each, douts, dlses)

    @parameterized.named_parameters(
        *(
            ("_" + "_".join(s or ("none",)), s)
            for s in ((), ("q",), ("kv",), ("indices", "attn_sink"))
        )
    )
    def test_gradient_of_vmap_sums_over_what_is_not_mapped(self, subset):
        """The gradient of an operand that is shared is the sum over the elements."""
        each, douts, dlses = mapped_inputs(subset)
        operands, in_axes = stack(each, subset, (0,) * 5)
        dout, dlse = np.stack(douts), np.stack(dlses)

        def loss(q, kv, sink):
            changed = operands._replace(q=q, kv=kv, attn_sink=sink)
            mapped = jax.vmap(
                lambda o, d, g: weighted(attend("xla", o), d, g), in_axes=(in_axes, 0, 0)
            )
            return mapped(changed, dout, dlse).sum()

        grad = quick_jit(jax.grad(loss, (0, 1, 2)))
        got = grad(operands.q, operands.kv, operands.attn_sink)
        every = [oracle.backward(o, d, g) for o, d, g in zip(each, douts, dlses, strict=True)]
        for field, name, g in zip(
            ("q", "kv", "attn_sink"), ("dq", "dkv", "dsink"), got, strict=True
        ):
            parts = np.stack([getattr(x, name) for x in every])
            cases.check_close(name, g, parts if field in subset else parts.sum(0), 2e-6)

    def test_nested_vmap_over_different_operands(self):
        """Outer over kv and sink, inner over q and lengths, beside a batch axis."""
        outer, _, _ = mapped_inputs(("kv", "attn_sink"), 2, batch=(2,))
        inner, douts, dlses = mapped_inputs(("q", "topk_length"), 3, batch=(2,))
        grid = [[o._replace(q=i.q, topk_length=i.topk_length) for i in inner] for o in outer]
        operands = Operands(
            np.stack([i.q for i in inner], 1), np.stack([o.kv for o in outer]), outer[0].indices,
            np.stack([i.topk_length for i in inner]), np.stack([o.attn_sink for o in outer], 1),
        )  # fmt: skip
        inner_axes, outer_axes = Operands(1, None, None, 0, None), Operands(None, 0, None, None, 1)
        mapped = jax.vmap(lambda *a: gradients("xla", *a), in_axes=(inner_axes, 0, 0))
        mapped = jax.vmap(mapped, in_axes=(outer_axes, None, None))
        got = quick_jit(mapped)(operands, np.stack(douts), np.stack(dlses))
        for n, row in enumerate(grid):
            check_all([g[n] for g in got], row, douts, dlses)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_program_does_not_grow_with_the_batch(self, implementation: str):
        """No Python loop, and one operation each for forward and backward."""

        def size(count: int) -> int:
            each, douts, dlses = mapped_inputs(("q", "kv", "attn_sink"), count)
            operands, in_axes = stack(each, ("q", "kv", "attn_sink"), (0,) * 5)
            mapped = jax.vmap(lambda *a: gradients(implementation, *a), in_axes=(in_axes, 0, 0))
            text = jax.jit(mapped).lower(operands, np.stack(douts), np.stack(dlses)).as_text()
            return text.count("\n")

        self.assertEqual(size(2), size(7))

    def test_unmapped_operands_are_not_copied_before_the_operation(self):
        """The shared kv and indices reach the operation with a batch axis of size 1."""
        each, _, _ = mapped_inputs(("q",), 5)
        operands, in_axes = stack(each, ("q",), (0,) * 5)
        jaxpr = jax.make_jaxpr(jax.vmap(lambda o: attend("xla", o), in_axes=(in_axes,)))(operands)
        (equation,) = find(jaxpr, "jax_dsa_forward")
        shapes = [v.aval.shape for v in equation.invars]
        self.assertEqual(shapes[:3], [(5, 3, 2, 8), (1, 5, 8), (1, 3, 4)])


def weighted(results, dout, dlse):
    """``sum(dout out) + sum(dlse lse)`` over rows that have an lse."""
    out, lse = results
    return (out * dout).sum() + jnp.where(lse == -jnp.inf, 0, lse * dlse).sum()


def find(jaxpr, name: str) -> list:
    """The equations of a primitive, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            found.append(equation)
        for value in equation.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                    found += find(sub if hasattr(sub, "eqns") else sub.jaxpr, name)
    return found


SMALL = Case("small", queries=3, keys=5, heads=2, head_dim=8, topk=4, sink=(0.5, -1.0))


class CheckpointTest(parameterized.TestCase):
    def forward_runs(self, policy, wrap=lambda f: f) -> int:
        """How often the gradient of a checkpointed layer runs the forward operation."""
        inputs = cases.make_inputs(SMALL)

        def layer(q, kv, sink):
            q, kv = jnp.sin(q), jnp.sin(kv)
            out, _ = attend("xla", inputs.operands._replace(q=q, kv=kv, attn_sink=sink))
            return jnp.sin(out).sum()

        layer = jax.checkpoint(wrap(layer), policy=policy)
        grad = jax.value_and_grad(layer, (0, 1, 2))
        operands = (inputs.operands.q, inputs.operands.kv, inputs.operands.attn_sink)
        jaxpr = jax.make_jaxpr(grad)(*operands)
        self.assertLen(find(jaxpr, "jax_dsa_backward"), 1)
        # Dead code is part of a jaxpr, so loops are counted in the optimised program: blocks of one
        # query keep the compiler from dissolving them.
        with mock.patch.dict("os.environ", {"JAX_DSA_XLA_BLOCK": "1"}):
            text = str(jax.jit(grad).lower(*operands).compile().as_text())
        self.assertLen(re.findall(r' while\(.*op_name="[^"]*jax_dsa/bwd', text), 1)
        return len(re.findall(r' while\(.*op_name="[^"]*jax_dsa/fwd', text))

    @parameterized.parameters(False, True)
    def test_forward_runs_once_when_its_results_are_saved(self, jitted: bool):
        wrap = jax.jit if jitted else lambda f: f
        names = checkpoint_policies.save_only_these_names("jax_dsa_out", "jax_dsa_lse")
        for policy in (names, jax_dsa.checkpoint_policy):
            self.assertEqual(self.forward_runs(policy, wrap), 1)

    def test_forward_runs_twice_without_a_policy(self):
        """What the count above would be if the names were lost."""
        self.assertEqual(self.forward_runs(None), 2)

    @parameterized.product(implementation=IMPLEMENTATIONS, policy=(None, jax_dsa.checkpoint_policy))
    def test_values_under_checkpoint(self, implementation: str, policy):
        inputs = cases.make_inputs(SMALL)
        run = jax.checkpoint(lambda o: attend(implementation, o), policy=policy)

        def grads(q, kv, sink):
            operands = inputs.operands._replace(q=q, kv=kv, attn_sink=sink)
            return weighted(run(operands), inputs.dout, inputs.dlse)

        operands = inputs.operands
        got = quick_jit(jax.grad(grads, (0, 1, 2)))(operands.q, operands.kv, operands.attn_sink)
        want = oracle.backward(operands, inputs.dout, inputs.dlse)
        for name, g in zip(("dq", "dkv", "dsink"), got, strict=True):
            cases.check_close(name, g, getattr(want, name), 2e-6)

    def test_names_of_the_residuals(self):
        inputs = cases.make_inputs(SMALL)
        run = lambda q: attend("xla", inputs.operands._replace(q=q))[0].sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(run))(inputs.operands.q)
        names = {e.params["name"]: e.outvars[0].aval.shape for e in find(jaxpr, "name")}
        self.assertEqual(names, {"jax_dsa_out": (3, 2, 8), "jax_dsa_lse": (3, 2)})

    def test_profiler_scopes(self):
        inputs = cases.make_inputs(SMALL)
        lowered = jax.jit(lambda *a: gradients("xla", *a)).lower(
            inputs.operands, inputs.dout, inputs.dlse
        )
        text = str(lowered.compile().as_text())
        for scope in ("jax_dsa/fwd", "jax_dsa/bwd"):
            self.assertRegex(text, f'op_name="[^"]*{scope}[^"]*dot_general"')


class ForwardModeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        case = Case(
            "jvp", queries=3, keys=5, heads=2, head_dim=6, topk=5, value_dim=4, lengths=(5, 2, 0),
            sink=(0.5, -1.0), sink_dtype="float64",
        )  # fmt: skip
        self.enter_context(jax.enable_x64(True))
        self.inputs = cases.make_inputs(case, "float64")

    def run_on(self, implementation: str):
        def run(q, kv, sink):
            changed = self.inputs.operands._replace(q=q, kv=kv, attn_sink=sink)
            out, lse = attend(implementation, changed, value_dim=4)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        return run

    def point(self):
        operands = self.inputs.operands
        return operands.q, operands.kv, operands.attn_sink

    def test_reference_jvp_matches_finite_differences(self):
        rng, point = np.random.default_rng(5), self.point()
        tangents = tuple(rng.standard_normal(x.shape) for x in point)
        run = quick_jit(self.run_on("reference"))
        values, got = quick_jit(lambda p, t: jax.jvp(self.run_on("reference"), p, t))(
            point, tangents
        )
        step = 1e-6
        ends = [
            run(*(x + sign * step * t for x, t in zip(point, tangents, strict=True)))
            for sign in (1, -1)
        ]
        for g, high, low in zip(got, *ends, strict=True):
            self.assertGreater(np.abs(g).max(), 1e-2)
            np.testing.assert_allclose(g, (high - low) / (2 * step), atol=1e-8, rtol=1e-8)
        np.testing.assert_array_equal(values[0][2], 0)

    def test_reference_has_second_derivatives(self):
        """The Hessian-vector product against finite differences of the oracle's gradient."""
        point, rng = self.point(), np.random.default_rng(5)
        tangent = rng.standard_normal(point[0].shape)

        def grad(q):
            def loss(q):
                results = self.run_on("reference")(q, *point[1:])
                return weighted(results, self.inputs.dout, self.inputs.dlse)

            return jax.grad(loss)(q)

        got = quick_jit(lambda q: jax.vjp(grad, q)[1](tangent)[0])(point[0])
        step, ends = 1e-5, []
        for sign in (1, -1):
            moved = self.inputs.operands._replace(q=point[0] + sign * step * tangent)
            ends.append(oracle.backward(moved, self.inputs.dout, self.inputs.dlse, value_dim=4).dq)
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * step), atol=1e-7, rtol=1e-7)

    @parameterized.product(
        how=("jvp", "jacfwd", "linearize", "vmapped"), jitted=(False, True), which=(0, 1, 2)
    )
    def test_xla_refuses_forward_mode(self, how: str, jitted: bool, which: int):
        point = self.point()

        def run(x):
            return self.run_on("xla")(*(x if i == which else p for i, p in enumerate(point)))[0]

        x = point[which]
        calls = {
            "jvp": lambda x: jax.jvp(run, (x,), (x,)),
            "jacfwd": jax.jacfwd(run),
            "linearize": lambda x: jax.linearize(run, x)[1](x),
            "vmapped": jax.vmap(lambda x: jax.jvp(run, (x,), (x,))),
        }
        x = x[None] if how == "vmapped" else x
        call = jax.jit(calls[how]) if jitted else calls[how]
        with self.assertRaisesRegex(NotImplementedError, "'xla'.*jvp.*'reference'"):
            call(x)

    @parameterized.product(
        how=("grad_of_grad", "jvp_of_grad", "hessian"), jitted=(False, True), which=(0, 1, 2)
    )
    def test_xla_refuses_second_derivatives(self, how: str, jitted: bool, which: int):
        point = self.point()

        def loss(x):
            out, _ = self.run_on("xla")(*(x if i == which else p for i, p in enumerate(point)))
            return (out**2).sum()

        calls = {
            "grad_of_grad": jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()),
            "jvp_of_grad": lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
            "hessian": jax.hessian(loss),
        }
        call = jax.jit(calls[how]) if jitted else calls[how]
        with self.assertRaisesRegex(NotImplementedError, "'xla'.*derivative.*'reference'"):
            call(point[which])


class JitTest(parameterized.TestCase):
    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_eager_equals_jit(self, implementation: str):
        inputs = cases.make_inputs(SMALL, "bfloat16")
        arguments = (inputs.operands, inputs.dout, inputs.dlse)
        eager = gradients(implementation, *arguments)
        jitted = jax.jit(functools.partial(gradients, implementation))(*arguments)
        for got, want in zip(eager, jitted, strict=True):
            cases.check_close("eager", got, np.asarray(want).astype(np.float64), 8e-3)

    @parameterized.product(
        implementation=IMPLEMENTATIONS,
        setting=(
            ("numpy_dtype_promotion", "strict"), ("numpy_rank_promotion", "raise"),
            ("debug_nans", True),
        ),
    )  # fmt: skip
    def test_under_strict_settings(self, implementation: str, setting):
        """Where the caller forbids implicit promotion, or NaNs in between; with empty rows."""
        name, value = setting
        inputs = cases.make_inputs(cases.CORE[1], "bfloat16")
        with getattr(jax, name)(value):
            got = quick_jit(functools.partial(gradients, implementation))(
                inputs.operands, inputs.dout, inputs.dlse
            )
        check_all(
            [g[None] for g in got], [inputs.operands], [inputs.dout], [inputs.dlse], "bfloat16"
        )

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_donated_operands(self, implementation: str):
        inputs = cases.make_inputs(SMALL)

        def step(q, kv):
            out, _ = attend(implementation, inputs.operands._replace(q=q, kv=kv))
            return out, kv + 1

        donating = quick_jit(step, donate_argnums=(0, 1))
        want = oracle.forward(inputs.operands)
        for _ in range(3):
            q, kv = jnp.array(inputs.operands.q), jnp.array(inputs.operands.kv)
            out, _ = donating(q, kv)
            self.assertTrue(q.is_deleted() and kv.is_deleted())
            cases.check_close("out", out, want.out, 2e-6)

    def test_integer_operands_have_float0_gradients(self):
        inputs = cases.make_inputs(cases.CORE[1])
        _, vjp = jax.vjp(lambda *a: attend("xla", a)[0], *inputs.operands)
        cotangents = vjp(inputs.dout)
        for i in (2, 3):
            self.assertEqual(cotangents[i].dtype, jax.dtypes.float0)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_scan_over_layers(self, implementation: str):
        inputs = cases.make_inputs(SMALL)

        def loss(q):
            def layer(q, _):
                return attend(implementation, inputs.operands._replace(q=q))[0], None

            return jax.lax.scan(layer, q, None, length=2)[0].sum()

        got = quick_jit(jax.grad(loss))(inputs.operands.q)
        first = oracle.forward(inputs.operands).out
        second = inputs.operands._replace(q=first)
        dout = oracle.backward(second, np.ones_like(first), None).dq
        cases.check_close("dq", got, oracle.backward(inputs.operands, dout, None).dq, 2e-6)


if __name__ == "__main__":
    absltest.main()
