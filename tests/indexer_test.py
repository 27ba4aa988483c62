"""index_scores and select_topk against NumPy in float64, and what the arguments may be."""

import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jax_dsa
from jax_dsa import indexer_blocks

RNG = np.random.default_rng(0)


def x64(dtype: str) -> contextlib.AbstractContextManager:
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def random_index(batch=(), queries=12, keys=12, heads=3, width=8, dtype="float32", seed=0) -> Any:
    """q_index, k_index, weights, standard normal."""
    rng = np.random.default_rng(seed)
    shapes = (*batch, queries, heads, width), (*batch, keys, width), (*batch, queries, heads)
    return tuple(rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes)


def integer_index(batch=(), **options) -> Any:
    """The same, small integers: exact scores, many of them equal, many zero."""
    return tuple(np.clip(np.rint(x), -2, 2) for x in random_index(batch, **options))


def scores(q_index, k_index, weights) -> np.ndarray:
    """``sum_j weights[s, j] relu(q_index[s, j] . k_index[t])`` in float64."""
    q, k, w = (np.asarray(x).astype(np.float64) for x in (q_index, k_index, weights))
    with np.errstate(invalid="ignore"):
        x = np.einsum("...sjd,...td->...sjt", q, k)
        return np.einsum("...sjt,...sj->...st", np.maximum(x, 0), w)


def candidates(shape, positions=None, key_positions=None, segments=None, key_segments=None):
    """Bool ``[*B, S, T]``."""
    *_, queries, keys = shape
    key_positions = np.arange(keys) if key_positions is None else key_positions
    positions = np.arange(queries) if positions is None else positions
    found = np.asarray(key_positions)[..., None, :] <= np.asarray(positions)[..., :, None]
    if segments is not None:
        found = found & (
            np.asarray(key_segments)[..., None, :] == np.asarray(segments)[..., :, None]
        )
    return np.broadcast_to(found, shape)


def choose(values: np.ndarray, candidate: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows, ascending, then -1, and their number: a stable sort, query by query."""
    indices = np.full((*values.shape[:-1], k), -1)
    for at in np.ndindex(values.shape[:-1]):
        rows = [t for t in np.flatnonzero(candidate[at]) if values[at][t] > -np.inf]
        best = sorted(rows, key=lambda t, v=values[at]: -v[t])[:k]  # sorted() is stable
        indices[at][: len(best)] = sorted(best)
    return indices, (indices >= 0).sum(-1)


def by_row(indices: Any) -> np.ndarray:
    """Slots in a definite order: the contract leaves it open."""
    indices = np.asarray(indices)
    return np.sort(np.where(indices < 0, np.iinfo(np.int32).max, indices), -1)


def small_blocks():
    """A context in which tiny problems have several blocks and chunks of heads.

    Programs are cached by shape: use shapes in it that no other test has.
    """
    stack = contextlib.ExitStack()
    for name, value in (("SCORES_BYTES", 256), ("SLOTS_BYTES", 256), ("PRODUCT_BYTES", 256),
                        ("MIN_ROWS", 2), ("MIN_HEADS", 1)):  # fmt: skip
        stack.enter_context(mock.patch.object(indexer_blocks, name, value))
    return stack


class IndexScoresTest(parameterized.TestCase):
    @parameterized.parameters(
        ("bfloat16", "bfloat16", 1e-5), ("float16", "float32", 1e-5), ("float32", "float32", 1e-6),
        ("float32", "bfloat16", 1e-6), ("float64", "float64", 1e-14),
    )  # fmt: skip
    def test_scores_equal_the_formula(self, dtype, weights_dtype, tolerance):
        with x64(dtype):
            q, k, w = random_index((2,), 5, 7, dtype=dtype)
            w = w.astype(jnp.dtype(weights_dtype))
            found = jax_dsa.index_scores(q, k, w)
            self.assertEqual(found.dtype, "float64" if dtype == "float64" else "float32")
        want = scores(q, k, w)
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * np.abs(want).max())

    def test_chunks_of_heads_add_up(self):
        operands = random_index(heads=6)
        with small_blocks():
            found = jax_dsa.index_scores(*operands)
        np.testing.assert_allclose(found, scores(*operands), rtol=0, atol=1e-5)

    def test_gradient_is_that_of_the_formula(self):
        operands = [jnp.asarray(x) for x in random_index()]

        def plain(q, k, w):
            s = jnp.einsum("sjd,td->sjt", q, k, precision="highest")
            return jnp.sin(jnp.einsum("sjt,sj->st", jax.nn.relu(s), w, precision="highest")).sum()

        found = jax.grad(lambda *a: jnp.sin(jax_dsa.index_scores(*a)).sum(), (0, 1, 2))(*operands)
        want = jax.grad(plain, (0, 1, 2))(*operands)
        for name, x, y in zip("qkw", found, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=name)

    @parameterized.parameters((0, 4), (4, 0))
    def test_zero_sizes(self, queries, keys):
        self.assertEqual(
            jax_dsa.index_scores(*random_index((), queries, keys)).shape, (queries, keys)
        )


class SelectTopkTest(parameterized.TestCase):
    def check(self, operands, k, *, values=None, **options):
        """Exact agreement with the stable sort; scores of integers are exact in float32."""
        values = scores(*operands) if values is None else values
        names = ("query_positions", "key_positions", "query_segment_ids", "key_segment_ids")
        candidate = candidates(values.shape, *(options.get(n) for n in names))
        found = jax_dsa.select_topk(*operands, k=k, **options)
        indices, length = (np.asarray(x) for x in found)
        self.assertEqual((indices.dtype, length.dtype), (np.int32, np.int32))
        want, want_length = choose(values, candidate, k)
        np.testing.assert_array_equal(by_row(indices), by_row(want))
        np.testing.assert_array_equal(length, want_length)
        used = np.arange(k) < length[..., None]
        np.testing.assert_array_equal(indices >= 0, used, "unused slots come last")
        return indices

    @parameterized.parameters(1, 3, 12, 13, 40)
    def test_ties_take_the_smaller_row(self, k):
        operands = integer_index()
        values = scores(*operands)
        self.assertLess(len(np.unique(values)), values.size // 2)
        self.check(operands, k)

    @parameterized.parameters(1, 3, 12, 13)
    def test_blocks_and_chunks(self, k):
        with small_blocks():
            self.assertGreater(
                indexer_blocks.block_count(12, 12 * 48 / indexer_blocks.SCORES_BYTES), 1
            )
            self.check(integer_index(heads=6), k)
            self.check(integer_index((2,), queries=11, keys=11), k)  # 11 rows: blocks are padded

    @parameterized.parameters("bfloat16", "float16", "float32", "float64")
    def test_dtypes(self, dtype):
        with x64(dtype):
            self.check(tuple(x.astype(jnp.dtype(dtype)) for x in integer_index((2,))), 4)

    def test_float64_tells_scores_apart_that_float32_does_not(self):
        with x64("float64"):
            k = 1 + np.arange(12)[::-1, None] * 1e-12
            self.check((np.ones((12, 1, 1)), k[::-1], np.ones((12, 1))), 3)

    def test_random_scores(self):
        # The order of float32 scores is that of float64 ones where they are well apart.
        operands = random_index((2,), queries=20, keys=20)
        values = np.asarray(jax_dsa.index_scores(*operands)).astype(np.float64)
        self.check(operands, 6, values=values)

    def test_signed_zeros_are_equal(self):
        q, k = np.ones((6, 1, 1), "f"), np.zeros((6, 1), "f")
        weights = np.ones((6, 1), "f")
        k[[0, 2, 4]] = -1  # relu gives 0 there; a negative weight turns it into -0
        for sign in (1, -1):
            found = self.check((q, k, sign * weights), 3)
            np.testing.assert_array_equal(np.sort(found[5]), [0, 1, 2])
        mixed = jnp.asarray([[0.0, -0.0, 0.0, -0.0, 1.0, -1.0]])
        np.testing.assert_array_equal(indexer_blocks._highest(mixed, 3), [[4, 0, 1]])

    def test_nan_and_minus_infinity_are_never_chosen(self):
        q, k, w = integer_index()
        k[3] = np.nan
        w[7] = np.nan
        w[9] = -np.inf
        self.assertTrue(np.isnan(scores(q, k, w)).any())
        values = scores(q, k, w)
        self.check((q, k, w), 5, values=np.where(np.isnan(values), -np.inf, values))

    def test_plus_infinity_is_chosen_first(self):
        row = jnp.asarray([[1.0, np.inf, -np.inf, -3.0, np.inf, 3e38]])
        np.testing.assert_array_equal(indexer_blocks._highest(row, 3), [[1, 4, 5]])
        np.testing.assert_array_equal(indexer_blocks._highest(row, 6), [[0, 1, 3, 4, 5, -1]])

    def test_positions(self):
        operands = integer_index(queries=5, keys=12)
        self.check(operands, 4, query_positions=np.asarray([11, 3, -1, 0, 100], np.int32))
        order = np.random.default_rng(1).permutation(12).astype(np.int32)
        self.check(operands, 4, query_positions=np.arange(5, dtype=np.int32), key_positions=order)

    def test_without_query_positions_queries_stand_where_the_keys_do(self):
        order = np.random.default_rng(1).permutation(12).astype(np.int32)
        operands = integer_index()
        found = jax_dsa.select_topk(*operands, k=4, key_positions=order)
        want = jax_dsa.select_topk(*operands, k=4, key_positions=order, query_positions=order)
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(x, y)

    @parameterized.parameters((False, False), (True, False), (False, True))
    def test_segments(self, batched_queries, batched_keys):
        segments = np.asarray([0] * 5 + [1] * 4 + [7] * 3, np.int32)
        many = np.stack([segments, segments[::-1]])
        options = {
            "query_segment_ids": many if batched_queries else segments,
            "key_segment_ids": many if batched_keys else segments,
        }
        self.check(integer_index((2,)), 4, **options)

    def test_several_batch_axes(self):
        positions = np.random.default_rng(2).integers(0, 12, (2, 3, 12)).astype(np.int32)
        self.check(integer_index((2, 3)), 4, query_positions=positions)

    @parameterized.parameters((0, None, None), (1, 1, None), (None, None, 0), (0, 0, 1))
    def test_vmap(self, *axes):
        operands = integer_index((4,))
        mapped = [
            x[0] if axis is None else np.moveaxis(x, 0, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]
        found = jax.vmap(lambda *a: jax_dsa.select_topk(*a, k=5), in_axes=axes)(*mapped)
        for b in range(4):
            one = [x[0] if axis is None else x[b] for x, axis in zip(operands, axes, strict=True)]
            want = jax_dsa.select_topk(*one, k=5)
            np.testing.assert_array_equal(found[0][b], want[0])
            np.testing.assert_array_equal(found[1][b], want[1])

    def test_jit_and_traced_positions(self):
        operands = integer_index(queries=1, keys=12)

        @jax.jit
        def decode(position):
            return jax_dsa.select_topk(*operands, k=4, query_positions=position[None])

        for position in (0, 5, 11):
            candidate = candidates((1, 12), np.asarray([position]))
            want, length = choose(scores(*operands), candidate, 4)
            found = decode(jnp.int32(position))
            np.testing.assert_array_equal(by_row(found[0]), by_row(want))
            np.testing.assert_array_equal(found[1], length)

    def test_no_gradient(self):
        q, k, w = (jnp.asarray(x) for x in random_index())

        def loss(q, k, w):
            indices, length = jax_dsa.select_topk(q, k, w, 4)
            return (q.sum((1, 2)) * indices.sum(-1) * length).sum() + 0 * k.sum() + 0 * w.sum()

        gradients = jax.grad(loss, (0, 1, 2))(q, k, w)
        indices, length = jax_dsa.select_topk(q, k, w, 4)
        want = (indices.sum(-1) * length)[:, None, None] * np.ones_like(q)
        np.testing.assert_array_equal(gradients[0], want)
        np.testing.assert_array_equal(gradients[1], 0)
        np.testing.assert_array_equal(gradients[2], 0)

    @parameterized.parameters(((), 0, 4), ((), 4, 0), ((), 0, 0), ((0,), 4, 4), ((2, 0), 3, 3))
    def test_zero_sizes(self, batch, queries, keys):
        positions = np.zeros(queries, np.int32)
        operands = random_index(batch, queries, keys)
        indices, length = jax_dsa.select_topk(*operands, k=3, query_positions=positions)
        np.testing.assert_array_equal(indices, np.full((*batch, queries, 3), -1, np.int32))
        np.testing.assert_array_equal(length, np.zeros((*batch, queries), np.int32))

    def test_one_of_everything(self):
        self.check((np.ones((1, 1, 1), "f"), np.ones((1, 1), "f"), np.ones((1, 1), "f")), 1)

    @parameterized.parameters((64, "bfloat16"), (64, "float32"), (4, "bfloat16"))
    def test_memory(self, heads, dtype):
        """The compiler's own figure: at most 512 MiB; the scores of all pairs would take 1 GiB."""
        size, width = 16384, 128
        shapes = (size, heads, width), (size, width), (size, heads)
        operands = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
        lowered = jax.jit(lambda *a: jax_dsa.select_topk(*a, k=2048)).lower(*operands)
        memory: Any = lowered.compile().memory_analysis()
        self.assertLessEqual(memory.temp_size_in_bytes, 512 << 20)

    def test_blocks_share_out_over_devices(self):
        for queries, budgets in ((16384, 256.0), (24, 2.0), (4096 * 3, 40.0), (640, 7.3)):
            count = indexer_blocks.block_count(queries, budgets)
            block = queries // count
            self.assertEqual(queries % count, 0)
            self.assertEqual(block % 8, 0)
            self.assertBetween(count, budgets, 2 * budgets)
        self.assertEqual(indexer_blocks.block_count(10007, 40.0), 40)  # a prime: padded
        self.assertEqual(indexer_blocks.block_count(64, 1000.0), 64 // indexer_blocks.MIN_ROWS)
        self.assertEqual(indexer_blocks.block_count(3, 0.1), 1)


class ErrorsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("q_index_dtype", TypeError, "q_index: .*int32", {"q_index": np.ones((4, 2, 8), "i")}),
        ("q_index_rank", ValueError, "q_index: .*HI", {"q_index": np.ones((4, 8), "f")}),
        ("no_heads", ValueError, "q_index: .*HI >= 1", {"q_index": np.ones((4, 0, 8), "f")}),
        ("no_width", ValueError, "q_index: .*DI >= 1", {"q_index": np.ones((4, 2, 0), "f")}),
        ("k_index_dtype", TypeError, "k_index: .*float16", {"k_index": np.ones((4, 8), "float16")}),
        ("k_index_rank", ValueError, "k_index: ", {"k_index": np.ones(8, "f")}),
        ("k_index_width", ValueError, r"k_index: .*\(4, 8\)", {"k_index": np.ones((4, 7), "f")}),
        ("k_index_batch", ValueError, "k_index: ", {"k_index": np.ones((2, 4, 8), "f")}),
        ("weights_shape", ValueError, r"weights: .*\(4, 2\)", {"weights": np.ones((4, 3), "f")}),
        ("weights_dtype", TypeError, "weights: .*int", {"weights": np.ones((4, 2), int)}),
        ("weights_type", TypeError, "weights: .*list", {"weights": [[1.0]]}),
        ("k_zero", ValueError, "k: got 0", {"k": 0}),
        ("k_float", TypeError, "k: got 2.0", {"k": 2.0}),
        ("k_bool", TypeError, "k: got True", {"k": True}),
        ("k_array", TypeError, "k: .*traced", {"k": jnp.int32(2)}),
        ("no_positions", ValueError, "query_positions: .*T=5", {"k_index": np.ones((5, 8), "f")}),
        ("int64", TypeError, "query_positions: .*int64", {"query_positions": np.arange(4)}),
        ("positions_shape", ValueError, "key_positions: ", {"key_positions": np.zeros(3, "i")}),
        ("one_segment", ValueError, "key_segment_ids: ", {"query_segment_ids": np.zeros(4, "i")}),
        ("other_segment", ValueError, "query_segment_ids: ", {"key_segment_ids": np.zeros(4, "i")}),
    )  # fmt: skip
    def test_select_topk(self, error, pattern, wrong):
        q, k, w = random_index((), 4, 4, 2)
        arguments = {"q_index": q, "k_index": k, "weights": w, "k": 2} | wrong
        with self.assertRaisesRegex(error, pattern):
            jax_dsa.select_topk(**arguments)

    def test_errors_are_raised_at_trace_time(self):
        q, k, w = random_index((), 4, 5, 2)
        with self.assertRaisesRegex(ValueError, "query_positions"):
            jax.eval_shape(lambda *a: jax_dsa.select_topk(*a, k=2), q, k, w)
        with self.assertRaisesRegex(TypeError, "k: "):
            jax.jit(lambda n: jax_dsa.select_topk(q, k, w, n))(2)
        with self.assertRaisesRegex(ValueError, "weights"):
            jax.eval_shape(jax_dsa.index_scores, q, k, w[:, :1])


if __name__ == "__main__":
    absltest.main()
