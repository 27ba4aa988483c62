"""Any indices, lengths, sinks and shapes against the oracle."""

import functools
import os
from unittest import mock

import cases
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import oracle
from absl.testing import absltest, parameterized
from cases import Case, Inputs

import jax_dsa

# A small pool: every entry compiles once for each way of running.
SHAPES = (
    Case("one", queries=1, keys=1, heads=1, head_dim=1, topk=1),
    Case("odd", queries=7, keys=5, heads=3, head_dim=5, topk=6, value_dim=2),
    Case("batch", batch=(2, 1), queries=3, keys=9, heads=2, head_dim=8, topk=4),
    Case("more_slots_than_rows", batch=(3,), queries=2, keys=2, heads=4, head_dim=4, topk=17),
)
EDGES = (cases.INT_MIN, cases.INT_MIN + 1, -2, -1, 0, 1, cases.INT_MAX - 1, cases.INT_MAX)
SINKS = (np.inf, -np.inf, 1e38, -1e38, 3e38, 88.8, -88.8, 104.0, -104.0, 0.0, -0.0)


def integers(high: int):
    """Mostly within -2 to high + 1, and anywhere in int32."""
    near = st.integers(-2, high + 1)
    return st.one_of(near, near, st.sampled_from(EDGES), st.integers(cases.INT_MIN, cases.INT_MAX))


@st.composite
def inputs(draw) -> tuple[Case, Inputs]:
    case = draw(st.sampled_from(SHAPES))
    made = cases.make_inputs(case, seed=draw(st.integers(0, 2**16)))
    rows = (*case.batch, case.queries)
    sinks = st.one_of(st.sampled_from(SINKS), st.floats(-20, 20, width=32))
    operands = made.operands._replace(
        indices=draw(hnp.arrays(np.int32, (*rows, case.topk), elements=integers(case.keys))),
        topk_length=draw(hnp.arrays(np.int32, rows, elements=integers(case.topk))),
        attn_sink=draw(hnp.arrays(np.float32, (case.heads,), elements=sinks)),
    )
    return case, Inputs(operands, made.dout, made.dlse, made.options)


@functools.cache
def program(implementation: str, case: Case, block: int | None, deterministic: bool):
    """A jitted program of one shape; the block size is read when its first call lowers it."""

    def run(operands, dout, dlse):
        def attend(q, kv, sink):
            return jax_dsa.sparse_attention(
                q, kv, operands.indices, topk_length=operands.topk_length, attn_sink=sink,
                return_lse=True, implementation=implementation, deterministic=deterministic,
                **case.options,
            )  # fmt: skip

        results, vjp = jax.vjp(attend, operands.q, operands.kv, operands.attn_sink)
        return *results, *vjp((dout, dlse))

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def check(got, made: Inputs):
    """Special values by place, the rest by L2 over each tensor."""
    values = oracle.forward(made.operands, **made.options)
    grads = oracle.backward(made.operands, made.dout, made.dlse, **made.options)
    wanted = (values.out, values.lse, grads.dq, grads.dkv, grads.dsink)
    for name, g, want in zip(("out", "lse", "dq", "dkv", "dsink"), got, wanted, strict=True):
        cases.check_special(name, g, want)
        finite = np.isfinite(want)
        error = np.linalg.norm(np.asarray(g, np.float64)[finite] - want[finite])
        size = np.linalg.norm(want[finite])
        # Where terms cancel or a sink takes the weight, the terms, of order one, are the measure.
        assert error <= 2e-6 * max(size, 0.5), f"{name}: error {error:.3g} of {size:.3g}"


class PropertiesTest(parameterized.TestCase):
    @hypothesis.given(inputs())
    def test_reference(self, drawn):
        case, made = drawn
        run = program("reference", case, None, False)
        check(run(made.operands, made.dout, made.dlse), made)

    @parameterized.parameters(1, 2, 4, 5, None)
    def test_xla_with_blocks(self, block: int | None):
        """Blocks of one query, blocks that do not divide the rows, and the default."""

        @hypothesis.given(inputs())
        def holds(drawn):
            case, made = drawn
            check(program("xla", case, block, False)(made.operands, made.dout, made.dlse), made)

        override = {} if block is None else {"JAX_DSA_XLA_BLOCK": str(block)}
        with mock.patch.dict(os.environ, override):
            holds()

    @parameterized.parameters(2, None)
    def test_xla_deterministic(self, block: int | None):
        """Equal to the oracle, and bitwise from run to run; duplicates are common here."""

        @hypothesis.given(inputs())
        def holds(drawn):
            case, made = drawn
            run = program("xla", case, block, True)
            first = run(made.operands, made.dout, made.dlse)
            check(first, made)
            for a, b in zip(first, run(made.operands, made.dout, made.dlse), strict=True):
                np.testing.assert_array_equal(a, b)

        override = {} if block is None else {"JAX_DSA_XLA_BLOCK": str(block)}
        with mock.patch.dict(os.environ, override):
            holds()

    @hypothesis.given(inputs(), st.randoms(use_true_random=False))
    def test_order_of_slots_does_not_matter(self, drawn, random):
        case, made = drawn
        order = list(range(case.topk))
        random.shuffle(order)
        # A length counts slots by position: without one, positions mean nothing.
        operands = made.operands._replace(
            topk_length=np.full_like(made.operands.topk_length, case.topk)
        )
        run = program("xla", case, None, False)
        first = run(operands, made.dout, made.dlse)
        moved = operands._replace(indices=operands.indices[..., order])
        for a, b in zip(first, run(moved, made.dout, made.dlse), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    absltest.main()
