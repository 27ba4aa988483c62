"""indexer_loss and its gradients against NumPy in float64."""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jax_dsa
from jax_dsa import indexer_blocks

INDEX = ("q_index", "k_index", "weights")


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The loss, and its gradients for q_index, k_index and weights, in float64."""

    loss: float
    gradients: tuple[np.ndarray, ...]


def support(arguments: dict[str, Any], at: tuple[int, ...]) -> np.ndarray:
    """The rows of the query at ``(*batch, s)``, in slot order, with repetitions."""
    keys = arguments["k_index"].shape[-2]
    if arguments.get("indices") is not None:
        row, length = arguments["indices"][at], arguments.get("topk_length")
        row = row if length is None else row[: max(0, length[at])]
        return row[(row >= 0) & (row < keys)]

    def of(name, default, *where):
        x = arguments.get(name)
        return default if x is None else x[where] if x.ndim == 1 else x[(*at[:-1], *where)]

    candidate = of("key_positions", np.arange(keys), slice(None))
    candidate = candidate <= of("query_positions", at[-1], at[-1])
    candidate &= of("key_segment_ids", 0, slice(None)) == of("query_segment_ids", 0, at[-1])
    return np.flatnonzero(candidate)


def target(q, kv, lse, sink, scale) -> np.ndarray:
    """Probabilities ``[N]`` of q ``[H, D]``, kv ``[N, D]``: summed over heads and normalised."""
    s = scale * q @ kv.T
    if lse is None:
        lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    p = np.exp(s - np.logaddexp(lse, sink)[:, None]).sum(0)
    return p / p.sum() if p.sum() > 0 else p


def oracle(arguments: dict[str, Any]) -> Oracle:
    """KL(p || softmax(I)) query by query, and its derivative softmax(I) - p of I."""
    exact: dict[str, Any] = {
        n: np.asarray(x).astype(np.float64)
        for n, x in arguments.items()
        if x is not None and n != "scale"
    }
    q_index, k_index, weights = (exact[n] for n in INDEX)
    sink = exact.get("attn_sink")
    sink = np.full(exact["q"].shape[-2], -np.inf) if sink is None else sink
    scale = arguments.get("scale") or exact["q"].shape[-1] ** -0.5
    gradients = tuple(np.zeros_like(exact[n]) for n in INDEX)
    losses = []
    for at in np.ndindex(weights.shape[:-1]):
        rows, batch = support(arguments, at), at[:-1]
        if not len(rows):
            continue
        lse = None if exact.get("lse") is None else exact["lse"][at]
        p = target(exact["q"][at], exact["kv"][batch][rows], lse, sink, scale)
        x = q_index[at] @ k_index[batch][rows].T  # [HI, N]
        score = weights[at] @ np.maximum(x, 0)
        log_q = score - score.max() - np.log(np.exp(score - score.max()).sum())
        losses.append(sum(a * (np.log(a) - b) for a, b in zip(p, log_q, strict=True) if a > 0))
        d_score = np.exp(log_q) * p.sum() - p
        d_x = weights[at][:, None] * (x > 0) * d_score
        gradients[0][at] += d_x @ k_index[batch][rows]
        np.add.at(gradients[1][batch], rows, d_x.T @ q_index[at])
        gradients[2][at] += np.maximum(x, 0) @ d_score
    count = max(1, len(losses))
    return Oracle(sum(losses) / count, tuple(g / count for g in gradients))


def problem(batch=(), queries=10, keys=10, heads=3, width=8, main_heads=4, head_dim=16, topk=6,
            dtype="float32", main_dtype=None, seed=0) -> dict[str, Any]:  # fmt: skip
    """Random arguments of a sparse problem; ``indices`` repeat rows and name some outside kv."""
    rng = np.random.default_rng(seed)
    dtype, main = jnp.dtype(dtype), jnp.dtype(main_dtype or dtype)
    normal = lambda d, *shape: rng.standard_normal((*batch, *shape)).astype(d)  # noqa: E731
    return {
        "q_index": normal(dtype, queries, heads, width), "k_index": normal(dtype, keys, width),
        "weights": normal(dtype, queries, heads), "q": normal(main, queries, main_heads, head_dim),
        "kv": normal(main, keys, head_dim),
        "indices": rng.integers(-2, keys + 2, (*batch, queries, topk)).astype(np.int32),
    }  # fmt: skip


def dense(**options) -> dict[str, Any]:
    return problem(**options) | {"indices": None}


def lse_of(arguments: dict[str, Any]) -> np.ndarray:
    """What the main attention over the support gives: natural log, without a sink."""
    q, kv = arguments["q"].astype(np.float64), arguments["kv"].astype(np.float64)
    lse = np.full(q.shape[:-1], -np.inf)
    for at in np.ndindex(lse.shape[:-1]):
        rows = support(arguments, at)
        if len(rows):
            lse[at] = np.log(np.exp(q[at] @ kv[at[:-1]][rows].T * q.shape[-1] ** -0.5).sum(-1))
    return lse.astype(np.promote_types(arguments["q"].dtype, np.float32))


LENGTHS = np.asarray([6, 3, 0, -5, 100, 1, 2, 6, 5, 4], np.int32)
SEGMENTS = np.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2, 2], np.int32)
SEGMENT_NAMES = ("query_segment_ids", "key_segment_ids")
POSITIONS = np.arange(-2, 8, dtype=np.int32)
ORDER = np.random.default_rng(3).permutation(10).astype(np.int32)
SINK = np.asarray([0.5, -1.0, 2.0, 0.0], np.float32)
CASES = {
    "sparse": problem(),
    "lengths": problem() | {"topk_length": LENGTHS},
    "sink": problem() | {"attn_sink": SINK},
    "extreme_sinks": problem() | {"attn_sink": np.asarray([np.inf, 1e38, -np.inf, -1e38], "f")},
    "only_sinks": problem() | {"attn_sink": np.full(4, np.inf, np.float32)},
    "batch": problem(batch=(2, 3)) | {"topk_length": np.broadcast_to(LENGTHS, (2, 3, 10))},
    "duplicates": problem() | {"indices": np.full((10, 6), 4, np.int32)},
    "empty": problem() | {"indices": np.full((10, 6), -1, np.int32)},
    "more_keys": problem(keys=17, topk=21, queries=3),
    "scale": problem() | {"scale": 3.0},
    "one": problem(queries=1, keys=1, heads=1, width=1, main_heads=1, head_dim=1, topk=1),
    "dense": dense(),
    "dense_sink": dense(batch=(2,)) | {"attn_sink": SINK},
    "dense_segments": dense(batch=(2,)) | dict.fromkeys(SEGMENT_NAMES, SEGMENTS),
    "dense_positions": dense() | {"query_positions": POSITIONS, "key_positions": ORDER},
    "dense_decode": dense(queries=2, keys=10) | {"query_positions": np.asarray([9, 4], "i")},
    "mixed_dtypes": problem(main_dtype="bfloat16"),
}  # fmt: skip
FEWER_QUERIES = problem(queries=9) | {n: problem()[n] for n in INDEX}
for name in ("sparse", "sink", "dense"):
    CASES[f"{name}_lse"] = CASES[name] | {"lse": lse_of(CASES[name])}


@functools.partial(jax.jit, static_argnames="scale")
def _value_and_gradients(index, rest, scale=None):
    loss = lambda *x: jax_dsa.indexer_loss(*x, **rest, scale=scale)  # noqa: E731
    return jax.value_and_grad(loss, (0, 1, 2))(*index)


def value_and_gradients(arguments: dict[str, Any]):
    """The loss and its gradients for the indexer; cases of the same shapes share a program."""
    rest = {n: x for n, x in arguments.items() if n not in INDEX and x is not None}
    scale = rest.pop("scale", None)
    return _value_and_gradients([arguments[n] for n in INDEX], rest, scale)


def x64(dtype: str) -> contextlib.AbstractContextManager:
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def cast(arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    names = (*INDEX, "q", "kv")
    return arguments | {n: arguments[n].astype(jnp.dtype(dtype)) for n in names}


class OracleTest(parameterized.TestCase):
    @parameterized.parameters(
        "sparse", "lengths", "sink", "duplicates", "dense_segments", "more_keys"
    )
    def test_gradients_are_finite_differences(self, name):
        arguments = cast(CASES[name], "float64")
        found, step = oracle(arguments), 1e-6
        rng = np.random.default_rng(0)
        for name, gradient in zip(INDEX, found.gradients, strict=True):
            x = arguments[name]
            for at in [tuple(rng.integers(0, n) for n in x.shape) for _ in range(8)]:
                ends = []
                for sign in (1, -1):
                    moved = x.copy()
                    moved[at] += sign * step
                    ends.append(oracle(arguments | {name: moved}).loss)
                slope = (ends[0] - ends[1]) / (2 * step)
                np.testing.assert_allclose(gradient[at], slope, rtol=1e-6, atol=1e-8)


class IndexerLossTest(parameterized.TestCase):
    def check(self, arguments, tolerance=1e-5, run=value_and_gradients):
        want = oracle(arguments)
        loss, gradients = run(arguments)
        double = "float64" in [arguments[n].dtype for n in (*INDEX, "q")]
        self.assertEqual(loss.dtype, "float64" if double else "float32")
        np.testing.assert_allclose(loss, want.loss, rtol=tolerance, atol=tolerance * 1e-1)
        for name, x, y in zip(INDEX, gradients, want.gradients, strict=True):
            self.assertEqual(x.dtype, arguments[name].dtype)
            x = np.asarray(x).astype(np.float64)
            self.assertTrue(np.isfinite(x).all(), name)
            error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
            self.assertLessEqual(error if np.any(y) else np.abs(x).max(), tolerance, name)

    @parameterized.named_parameters((f"_{name}", name) for name in CASES)
    def test_equals_the_definition(self, name):
        self.check(CASES[name])

    @parameterized.parameters(True, False)
    def test_blocks_and_chunks(self, sparse):
        """Several blocks, the last rows of which are padding, and several chunks of heads."""
        arguments = problem(batch=(2,), queries=11, keys=11, heads=6, main_heads=6)
        if sparse:
            arguments["topk_length"] = np.resize(LENGTHS, (2, 11))
        else:
            arguments |= {"indices": None, "query_positions": np.arange(-2, 9, dtype="i")}
        budgets: Any = {"SCORES_BYTES": 64, "SLOTS_BYTES": 2048, "PRODUCT_BYTES": 64}
        with mock.patch.multiple(indexer_blocks, **budgets, MIN_ROWS=2, MIN_HEADS=2):
            self.check(arguments)

    @parameterized.product(sparse=(True, False), dtype=("float64", "bfloat16", "float16"))
    def test_dtypes(self, sparse, dtype):
        arguments = cast(CASES["lengths" if sparse else "dense_sink"], dtype)
        with x64(dtype):
            self.check(arguments, {"float64": 1e-12, "bfloat16": 8e-3, "float16": 2e-3}[dtype])

    @parameterized.parameters(("float64", "float32"), ("float32", "float64"))
    def test_float64_of_either_side_makes_the_loss_float64(self, dtype, main_dtype):
        with x64("float64"):
            self.check(problem(dtype=dtype, main_dtype=main_dtype), 1e-6)

    @parameterized.parameters(True, False)
    def test_any_mix_of_dtypes_under_strict_promotion(self, sparse):
        arguments = problem(dtype="bfloat16", main_dtype="float16") | {"attn_sink": SINK}
        arguments["weights"] = arguments["weights"].astype(np.float32)
        arguments["attn_sink"] = SINK.astype(jnp.bfloat16)
        arguments |= {} if sparse else {"indices": None}
        with jax.numpy_dtype_promotion("strict"):
            self.check(arguments, 8e-3)
            index = [arguments[n] for n in INDEX]
            self.assertEqual(jax_dsa.index_scores(*index).dtype, np.float32)
            self.assertEqual(jax_dsa.select_topk(*index, k=3)[0].dtype, np.int32)

    def test_eager(self):
        def run(arguments):
            loss = lambda *x: jax_dsa.indexer_loss(*x, **rest)  # noqa: E731
            rest = {n: x for n, x in arguments.items() if n not in INDEX}
            return jax.value_and_grad(loss, (0, 1, 2))(*(arguments[n] for n in INDEX))

        self.check(CASES["lengths"], run=run)

    def test_attention_gets_no_gradient(self):
        arguments = CASES["sink_lse"]
        names = ("q", "kv", "lse", "attn_sink")

        def loss(*main):
            return jax_dsa.indexer_loss(**arguments | dict(zip(names, main, strict=True)))

        for x in jax.grad(loss, (0, 1, 2, 3))(*(jnp.asarray(arguments[n]) for n in names)):
            np.testing.assert_array_equal(x, 0)

    def test_takes_the_lse_of_the_attention(self):
        arguments = CASES["lengths"]
        names = ("q", "kv", "indices")
        options = {"topk_length": arguments["topk_length"], "return_lse": True}
        _, lse = jax_dsa.sparse_attention(*(arguments[n] for n in names), **options)
        self.check(arguments | {"lse": np.asarray(lse)})

    def test_a_perfect_indexer_has_no_loss(self):
        q, k = np.abs(problem()["q"][:, :1]), np.abs(problem()["kv"])
        arguments = dict(q_index=q, k_index=k, weights=np.full((10, 1), 16**-0.5, "f"), q=q, kv=k)
        loss, gradients = value_and_gradients(arguments)
        self.assertLess(abs(loss), 1e-6)
        self.assertLess(max(np.abs(g).max() for g in gradients), 1e-6)

    @parameterized.parameters("indices", "dense")
    def test_what_no_query_names_reaches_nothing(self, kind):
        """NaN in keys without a query, in queries without keys, and beyond a row's length."""
        segments = np.asarray([0] * 4 + [1] * 3 + [2] * 3, np.int32)
        clean = dense() | {"query_segment_ids": segments, "key_segment_ids": segments.copy()}
        clean["key_segment_ids"][5:7] = 9  # keys 5, 6 are nobody's; query 5, 6 have key 4 only
        clean["query_segment_ids"][8] = 7  # query 8 has no keys
        if kind == "indices":
            rows = [support(clean, (s,)) for s in range(10)]
            padded = [np.pad(r, (0, 10 - len(r)), constant_values=5) for r in rows]
            clean["indices"] = np.stack(padded).astype(np.int32)
            clean["topk_length"] = np.asarray([len(r) for r in rows], np.int32)
        dirty = {n: np.copy(x) if n in (*INDEX, "q", "kv") else x for n, x in clean.items()}
        for name in ("k_index", "kv"):
            dirty[name][5], dirty[name][6] = np.nan, np.inf
        for name in ("q_index", "weights", "q"):
            dirty[name][8] = np.nan
        want, found = value_and_gradients(clean), value_and_gradients(dirty)
        # All but equal: a GPU adds what falls on one row in no fixed order.
        np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
        for x, y in zip(found[1], want[1], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)

    def test_padding_names_no_key(self):
        """13 queries, all before key 0, in blocks that are padded."""
        clean = dense(queries=13, keys=13) | {"query_positions": np.full(13, -1, np.int32)}
        clean["key_positions"] = np.minimum(np.arange(13, dtype=np.int32) * -1, 0)
        dirty = clean | {n: np.copy(clean[n]) for n in ("k_index", "kv")}
        dirty["k_index"][0] = dirty["kv"][0] = np.nan
        with mock.patch.multiple(indexer_blocks, SCORES_BYTES=64, MIN_ROWS=2):
            want, found = value_and_gradients(clean), value_and_gradients(dirty)
        self.assertGreater(want[0], 0)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x, y)

    def test_a_nan_stays_in_its_query(self):
        arguments = dense()
        arguments["q_index"][9] = np.nan  # names all keys, so that k_index's gradient is not finite
        arguments["k_index"][7] = np.nan  # reaches queries 7, 8, 9
        loss, (dq, dk, dw) = value_and_gradients(arguments)
        self.assertTrue(np.isnan(loss))
        self.assertTrue(np.isfinite(dq[:7]).all() and np.isfinite(dw[:7]).all())
        self.assertTrue(np.isnan(dw[9]).any() or np.isnan(dk).any())

    @parameterized.parameters("sparse", "dense")
    def test_large_logits(self, name):
        arguments = dict(CASES[name])
        arguments["q"] = arguments["q"] * 1e4
        arguments["weights"] = arguments["weights"] * 1e6
        want = oracle(arguments)
        loss, gradients = value_and_gradients(arguments)
        np.testing.assert_allclose(loss, want.loss, rtol=1e-4)
        self.assertTrue(all(np.isfinite(g).all() for g in gradients))

    def test_ties_and_zero_scores(self):
        arguments = problem()
        arguments["q_index"] = np.zeros_like(arguments["q_index"])  # relu at its kink
        self.check(arguments)

    @parameterized.parameters((0, 0, 0), (None, 0, None), (1, None, 0))
    def test_vmap_of_value_and_gradient(self, *axes):
        batched = problem(batch=(3,))
        rest = {n: batched[n][0] for n in ("q", "kv", "indices")}
        index = [
            batched[n][0] if a is None else np.moveaxis(batched[n], 0, a)
            for n, a in zip(INDEX, axes, strict=True)
        ]
        loss = lambda *x: jax_dsa.indexer_loss(*x, **rest)  # noqa: E731
        found = jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), in_axes=axes)(*index)
        for b in range(3):
            one = [batched[n][0 if a is None else b] for n, a in zip(INDEX, axes, strict=True)]
            want = oracle(dict(zip(INDEX, one, strict=True)) | rest)
            np.testing.assert_allclose(found[0][b], want.loss, rtol=1e-5)
            for x, y in zip(found[1], want.gradients, strict=True):
                np.testing.assert_allclose(x[b], y, rtol=0, atol=1e-5)

    def test_vmap_of_the_main_attention(self):
        batched = dense(batch=(3,))
        loss = functools.partial(jax_dsa.indexer_loss, *(batched[n][0] for n in INDEX))
        found = jax.vmap(loss)(batched["q"], batched["kv"])
        for b in range(3):
            one = {n: batched[n][0] for n in INDEX} | {n: batched[n][b] for n in ("q", "kv")}
            np.testing.assert_allclose(found[b], oracle(one).loss, rtol=1e-5)

    def test_second_derivative(self):
        arguments = problem(queries=3)
        loss = lambda w: jax_dsa.indexer_loss(**arguments | {"weights": w})  # noqa: E731
        gradient = jax.jit(jax.grad(loss))
        w, step = jnp.asarray(arguments["weights"]), 1e-2
        found = jax.jit(jax.grad(lambda w: gradient(w).sum()))(w)
        want = (gradient(w + step) - gradient(w - step)) / (2 * step)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-3)

    @parameterized.parameters("queries", "keys", "main_heads", "topk", "batch")
    def test_zero_sizes(self, size):
        empty: dict[str, Any] = {size: (0,) if size == "batch" else 0}
        arguments = problem(**empty)
        loss, gradients = value_and_gradients(arguments)
        self.assertEqual((loss, loss.dtype), (0, np.float32))
        for name, x in zip(INDEX, gradients, strict=True):
            self.assertEqual(x.shape, arguments[name].shape)
            np.testing.assert_array_equal(x, 0)

    @parameterized.parameters(None, 512)
    def test_memory(self, topk):
        """The compiler's own figure at S = T = 4096; [S, T, HI] or [S, K, D] takes over 1 GiB."""
        size, shape = 4096, jax.ShapeDtypeStruct
        floats = ((size, 16, 64), (size, 64), (size, 16), (size, 16, 576), (size, 576))
        operands = [shape(s, jnp.bfloat16) for s in floats]
        operands += [] if topk is None else [shape((size, topk), jnp.int32)]
        loss = lambda *x: jax_dsa.indexer_loss(*x[:5], indices=(*x[5:], None)[0])  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands).compile()
        memory: Any = compiled.memory_analysis()
        self.assertLessEqual(memory.temp_size_in_bytes, 320 << 20)

    @parameterized.named_parameters(
        ("length_alone", ValueError, "topk_length: ", {"indices": None, "topk_length": LENGTHS}),
        ("indices_dtype", TypeError, "indices: .*int64", {"indices": np.zeros((10, 6), int)}),
        ("indices_shape", ValueError, "indices: ", {"indices": np.zeros((9, 6), "i")}),
        ("q_shape", ValueError, r"q: .*\(10, 4, 16\)", FEWER_QUERIES),
        ("kv_rows", ValueError, r"kv: .*\(10, 16\)", {"kv": np.ones((11, 16), "f")}),
        ("kv_dtype", TypeError, "kv: .*float16", {"kv": np.ones((10, 16), "float16")}),
        ("lse_shape", ValueError, r"lse: .*\(10, 4\)", {"lse": np.ones((10, 3), "f")}),
        ("lse_dtype", TypeError, "lse: .*int", {"lse": np.ones((10, 4), int)}),
        ("sink_shape", ValueError, r"attn_sink: .*\(4,\)", {"attn_sink": np.ones(3, "f")}),
        ("scale", ValueError, "scale: got -1", {"scale": -1.0}),
        ("positions", ValueError, "query_positions", dense(queries=3)),
        ("segments", ValueError, "key_segment_ids", {"query_segment_ids": SEGMENTS}),
    )  # fmt: skip
    def test_errors(self, error, pattern, wrong):
        with self.assertRaisesRegex(error, pattern):
            jax.eval_shape(lambda: jax_dsa.indexer_loss(**problem() | wrong))


if __name__ == "__main__":
    absltest.main()
