"""Errors of the caller and of what cannot be served: they say what came and what is wanted."""

import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from absl.testing import absltest, parameterized

import jax_dsa
from jax_dsa import dispatch

S, T, H, D, K = 5, 7, 3, 16, 6
SHAPES = {"q": (2, S, H, D), "kv": (2, T, D), "indices": (2, S, K), "topk_length": (2, S)}
DTYPES = {"q": "float32", "kv": "float32", "indices": "int32", "topk_length": "int32"}


def arguments(**changed):
    """Good operands as NumPy arrays, with some replaced."""
    good = {name: np.ones(SHAPES[name], DTYPES[name]) for name in SHAPES}
    good["attn_sink"] = np.zeros(H, np.float32)
    return {**good, **changed}


def call(**changed) -> Any:
    named = arguments(**changed)
    q, kv, indices = (named.pop(n) for n in ("q", "kv", "indices"))
    return jax_dsa.sparse_attention(q, kv, indices, **named)


class BadInputTest(parameterized.TestCase):
    def refuses(self, error: type[Exception], *words: str, **changed):
        """The same error eagerly, under jit and from explain; it starts with the first word."""

        def explain():
            named = arguments(**changed)
            q, kv, indices = (named.pop(n) for n in ("q", "kv", "indices"))
            return jax_dsa.explain(q, kv, indices, **named)

        for run in (lambda: call(**changed), lambda: jax.jit(lambda: call(**changed))(), explain):
            with self.assertRaises(error) as caught:
                run()
            message = str(caught.exception)
            self.assertStartsWith(message, words[0])
            for word in words[1:]:
                self.assertIn(word, message)
            self.assertIn("want", message)

    @parameterized.parameters(
        ("q", (H, D), "[..., S, H, D]"),
        ("q", (D,), "[..., S, H, D]"),
        ("q", (), "[..., S, H, D]"),
        ("kv", (D,), "[..., T, D]"),
        ("kv", (T, D), "(2, 7, 16)"),
        ("kv", (3, T, D), "(2, 7, 16)"),
        ("kv", (2, T, D + 1), "(2, 7, 16)"),
        ("kv", (1, 2, T, D), "(2, 7, 16)"),
        ("indices", (K,), "[..., S, K]"),
        ("indices", (S, K), "(2, 5, 6)"),
        ("indices", (2, S + 1, K), "(2, 5, 6)"),
        ("indices", (1, S, K), "(2, 5, 6)"),
        ("topk_length", (), "(2, 5)"),
        ("topk_length", (S,), "(2, 5)"),
        ("topk_length", (2, S, 1), "(2, 5)"),
        ("attn_sink", (), "(3,)"),
        ("attn_sink", (H + 1,), "(3,)"),
        ("attn_sink", (2, H), "(3,)"),
    )
    def test_shape(self, name: str, shape: tuple[int, ...], want: str):
        dtype = DTYPES.get(name, "float32")
        self.refuses(ValueError, f"{name}:", str(shape), want, **{name: np.ones(shape, dtype)})

    def test_head_dimension_of_zero(self):
        changed = {"q": np.ones((2, S, H, 0), "f"), "kv": np.ones((2, T, 0), "f")}
        self.refuses(ValueError, "q:", "(2, 5, 3, 0)", **changed)

    @parameterized.parameters(
        ("q", "int32"),
        ("q", "complex64"),
        ("q", "bool"),
        ("q", "float8_e4m3fn"),
        ("kv", "float16"),
        ("kv", "int32"),
        ("indices", "int64"),
        ("indices", "uint32"),
        ("indices", "int16"),
        ("indices", "float32"),
        ("indices", "bool"),
        ("topk_length", "int64"),
        ("topk_length", "uint8"),
        ("topk_length", "float32"),
        ("attn_sink", "int32"),
        ("attn_sink", "complex64"),
        ("attn_sink", "bool"),
    )
    def test_dtype(self, name: str, dtype: str):
        shape = SHAPES.get(name, (H,))
        self.refuses(
            TypeError, f"{name}:", dtype, "want", **{name: np.ones(shape, jnp.dtype(dtype))}
        )

    def test_float64_and_float32_do_not_mix(self):
        with jax.enable_x64(True):
            self.refuses(TypeError, "kv:", "float64", "float32", kv=np.ones(SHAPES["kv"]))

    @parameterized.parameters("q", "kv", "indices", "topk_length", "attn_sink")
    def test_list_in_place_of_an_array(self, name: str):
        self.refuses(TypeError, f"{name}:", "list", "array", **{name: arguments()[name].tolist()})

    @parameterized.parameters("q", "kv", "indices")
    def test_none_in_place_of_an_array(self, name: str):
        self.refuses(TypeError, f"{name}:", "NoneType", "array", **{name: None})

    @parameterized.parameters(
        0, 0.0, -0.0, -1, -1e-3, float("nan"), float("inf"), -float("inf"), np.float32("nan")
    )
    def test_value_of_scale(self, scale):
        self.refuses(ValueError, "scale:", str(scale), "finite", "> 0", scale=scale)

    @parameterized.parameters(10**400, 5e-324 / 2, np.longdouble("1e400"), np.longdouble("1e-4000"))
    def test_scale_that_no_float_holds(self, scale):
        self.refuses(ValueError, "scale:", scale=scale)

    @parameterized.parameters(True, np.True_, 1j, "1", ((1.0,),), np.complex64(1), object())
    def test_kind_of_scale(self, scale):
        self.refuses(TypeError, "scale:", type(scale).__name__, scale=scale)

    @parameterized.parameters((np.ones(1),), (np.ones((2, 2)),))
    def test_array_as_scale(self, scale):
        self.refuses(TypeError, "scale:", "ndarray", scale=scale)

    def test_jax_array_as_scale(self):
        self.refuses(TypeError, "scale:", "multiply q", scale=jnp.float32(1))

    def test_traced_scale(self):
        with self.assertRaisesRegex(TypeError, "^scale: .*multiply q"):
            jax.jit(lambda scale: call(scale=scale))(1.0)
        with self.assertRaisesRegex(TypeError, "^scale: .*multiply q"):
            jax.grad(lambda scale: call(scale=scale).sum())(1.0)

    @parameterized.parameters(
        1, 0.5, np.float16(0.5), np.float32(0.5), np.int8(2), (np.array(0.5),)
    )
    def test_scales_that_are_taken(self, scale):
        got = call(scale=scale, implementation="reference")
        want = call(scale=float(scale), implementation="reference")
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(0, -1, D + 1, np.int64(D + 1))
    def test_value_of_value_dim(self, value_dim):
        self.refuses(ValueError, "value_dim:", str(value_dim), "16", value_dim=value_dim)

    @parameterized.parameters(1.0, "1", True, np.True_, 1j, (np.ones(1, np.int32),), ([1],))
    def test_kind_of_value_dim(self, value_dim):
        self.refuses(TypeError, "value_dim:", "integer", value_dim=value_dim)

    def test_traced_value_dim(self):
        with self.assertRaisesRegex(TypeError, "^value_dim: .*integer"):
            jax.jit(lambda value_dim: call(value_dim=value_dim))(1)
        self.refuses(TypeError, "value_dim:", "integer", value_dim=jnp.int32(1))

    @parameterized.parameters(1, None, "yes", (np.ones(1),))
    def test_kind_of_deterministic(self, deterministic):
        self.refuses(TypeError, "deterministic:", "True or False", deterministic=deterministic)

    def test_kind_of_return_lse(self):
        with self.assertRaisesRegex(TypeError, "return_lse"):
            jax.jit(lambda flag: call(return_lse=flag))(True)

    @parameterized.parameters("triton", "XLA", "", (("xla", "triton"),))
    def test_unknown_implementation(self, implementation):
        self.refuses(
            ValueError,
            "implementation:",
            "unknown",
            "reference, xla",
            implementation=implementation,
        )

    def test_no_implementation(self):
        self.refuses(ValueError, "implementation:", "empty", implementation=())

    @parameterized.parameters(1, True, 1.5)
    def test_kind_of_implementation(self, implementation):
        self.refuses(TypeError, "implementation:", "sequence", implementation=implementation)

    def test_bad_input_is_an_error_where_nothing_is_to_be_attended(self):
        empty = np.ones((2, 0, D), np.float32)
        self.refuses(TypeError, "indices:", kv=empty, indices=np.ones((2, S, K), np.int64))

    @parameterized.parameters(-(2**31), -1, T, 2**31 - 1)
    def test_values_of_indices_are_data(self, index: int):
        out = call(indices=np.full((2, S, K), index, np.int32), implementation="xla")
        np.testing.assert_array_equal(out, np.zeros_like(out))


class CannotServeTest(parameterized.TestCase):
    @parameterized.parameters("cutedsl", (("cutedsl",),))
    def test_kernels_that_are_not_there(self, implementation):
        expected = NotImplementedError if isinstance(implementation, str) else ExceptionGroup
        with self.assertRaises(expected) as caught:
            call(implementation=implementation)
        error = caught.exception
        if isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        self.assertIsInstance(error, NotImplementedError)
        self.assertRegex(str(error), "'cutedsl'.*S=5 T=7 H=3 D=16.*use .*'xla'")

    def test_sequence_takes_the_first_that_can(self):
        got = jax_dsa.explain(
            *(arguments()[n] for n in ("q", "kv", "indices")), implementation=("cutedsl", "xla")
        )
        self.assertEqual(got.chosen, "xla")

    def test_sequence_reports_one_reason_each(self):
        with mock.patch.object(dispatch, "unusable", lambda name, *_, **__: f"{name} is away"):
            with self.assertRaises(ExceptionGroup) as caught:
                call(implementation=["xla", "reference"])
        messages = [str(e) for e in caught.exception.exceptions]
        self.assertLen(messages, 2)
        self.assertRegex(messages[0], "xla is away")
        self.assertRegex(messages[1], "reference is away")

    def test_deterministic_reference_is_refused_on_a_gpu(self):
        with mock.patch.object(dispatch, "_gpus", lambda: [object()]):
            with self.assertRaisesRegex(NotImplementedError, "'reference'.*use .*'xla'"):
                call(implementation="reference", deterministic=True)

    def test_too_many_rows_for_the_gather(self):
        shape = jax.ShapeDtypeStruct
        q, kv = shape((4, 1, 1, 1), jnp.float32), shape((4, 2**29, 1), jnp.float32)
        with self.assertRaisesRegex(NotImplementedError, "int32"):
            jax_dsa.explain(q, kv, shape((4, 1, 8), jnp.int32), implementation="xla")

    def test_too_many_rows_for_the_gather_under_vmap(self):
        """The mapped axis multiplies the rows; lowered only, never allocated."""
        shape = jax.ShapeDtypeStruct
        operands = (
            shape((2**12, 1, 1, 1), jnp.float32),
            shape((2**12, 2**20, 1), jnp.float32),
            shape((2**12, 1, 8), jnp.int32),
        )
        mapped = jax.vmap(lambda *a: jax_dsa.sparse_attention(*a, implementation="xla"))
        with self.assertRaisesRegex(NotImplementedError, "int32"):
            jax.jit(mapped).lower(*operands)

    @parameterized.parameters("0", "-1", "many", "")
    def test_block_size_override(self, value: str):
        with mock.patch.dict("os.environ", {"JAX_DSA_XLA_BLOCK": value}):
            with self.assertRaisesRegex(ValueError, "JAX_DSA_XLA_BLOCK.*positive integer"):
                jax.jit(lambda: call(implementation="xla"))()


class ExplainTest(parameterized.TestCase):
    def explain(self, **options):
        shape = jax.ShapeDtypeStruct
        operands = [shape(SHAPES[n], DTYPES[n]) for n in ("q", "kv", "indices")]
        return jax_dsa.explain(*operands, **options)

    def test_choice_as_data(self):
        got = self.explain()
        self.assertEqual(got.chosen, "xla")
        self.assertEqual(set(got.reasons), {"reference", "xla", "cutedsl"})
        self.assertIsNone(got.reasons["xla"])
        self.assertIsNone(got.reasons["reference"])
        self.assertIn("kernels", got.reasons["cutedsl"] or "")
        self.assertRegex(str(got), "'xla'(.|\n)*reference: usable(.|\n)*cutedsl: ")

    def test_takes_every_option_of_the_call(self):
        got = self.explain(
            topk_length=jax.ShapeDtypeStruct((2, S), jnp.int32),
            attn_sink=jax.ShapeDtypeStruct((H,), jnp.bfloat16),
            scale=0.5,
            value_dim=4,
            return_lse=True,
            implementation="reference",
            deterministic=True,
        )
        self.assertEqual(got.chosen, "reference")
        self.assertEqual(got.problem.facts.scale, 0.5)
        self.assertEqual(got.problem.facts.value_dim, 4)

    def test_explain_agrees_with_the_call_inside_jit(self):
        chosen = []

        def traced(q, kv, indices):
            chosen.append(jax_dsa.explain(q, kv, indices).chosen)
            return q

        jax.jit(traced).lower(*(arguments()[n] for n in ("q", "kv", "indices")))
        self.assertEqual(chosen, ["xla"])


class LoggingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        dispatch._log_choice.cache_clear()
        dispatch._warn_slow.cache_clear()
        self.info = self.enter_context(mock.patch.object(logging, "info"))
        self.warning = self.enter_context(mock.patch.object(logging, "warning"))

    def trace(self, queries: int = S, **options):
        shape = jax.ShapeDtypeStruct
        q, kv = shape((queries, H, D), jnp.float32), shape((T, D), jnp.float32)
        attend = lambda *operands: jax_dsa.sparse_attention(*operands, **options)  # noqa: E731
        return jax.eval_shape(attend, q, kv, shape((queries, K), jnp.int32))

    def test_choice_is_logged_once_for_each_problem(self):
        for queries in (5, 5, 6, 5, 6):
            self.trace(queries)
        self.assertEqual(self.info.call_count, 2)
        first = self.info.call_args_list[0].args
        self.assertRegex(first[0] % first[1:], "S=5 T=7 H=3 D=16 .*'xla'")
        self.warning.assert_not_called()

    def test_slow_choice_is_warned_of_once_for_each_reason(self):
        with mock.patch.object(dispatch, "_gpus", lambda: [object()]):
            for queries in (5, 6, 5):
                self.trace(queries)
        self.warning.assert_called_once()
        template, *rest = self.warning.call_args.args
        message = template % tuple(rest)
        for words in ("GPU", "'xla'", "do not serve D = 16", "Name implementation='xla'"):
            self.assertRegex(message, re.escape(words))

    @parameterized.parameters("xla", "reference", (("cutedsl", "xla"),))
    def test_named_choice_is_silent(self, implementation):
        with mock.patch.object(dispatch, "_gpus", lambda: [object()]):
            self.trace(implementation=implementation)
        self.warning.assert_not_called()
        self.info.assert_not_called()


if __name__ == "__main__":
    absltest.main()
