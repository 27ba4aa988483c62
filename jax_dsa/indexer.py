"""The lightning indexer, which chooses the keys that are attended to, and the loss that trains it.

    I[s, t] = sum_j weights[s, j] relu(q_index[s, j] . k_index[t])     over the indexer's heads
    loss = mean_s KL(p[s] || softmax(I[s]))                            over the support of query s
    p[s, t] = sum_h P[s, h, t] / sum_t' sum_h P[s, h, t']              of the main attention's P

Nothing of size [S, T] or [S, K, D] is formed; `indexer_blocks` says how.
Source: DeepSeek-V3.2 technical report, arXiv 2512.02556.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dsa import indexer_blocks, validate


def index_scores(q_index: Any, k_index: Any, weights: Any) -> jax.Array:
    """``I[s, t] = sum_j weights[s, j] relu(q_index[s, j] . k_index[t])``: for small problems.

    Args:
        q_index: ``[..., S, HI, DI]``, bfloat16, float16, float32 or float64.
        k_index: ``[..., T, DI]``, q_index's dtype.
        weights: ``[..., S, HI]``, any of these dtypes.

    Returns:
        ``[..., S, T]``, float32 (float64 where an operand is float64).

    Raises:
        TypeError, ValueError: an operand is not as above.
    """
    operands, _, dtype, accum = _index_operands(q_index, k_index, weights)

    def scores(_, q_index, k_index, weights):
        return (indexer_blocks.scores_of(dtype, q_index, k_index, weights),)

    return indexer_blocks.distribute(scores, operands, ("st",), accum)[0]


def select_topk(
    q_index: Any,
    k_index: Any,
    weights: Any,
    k: int,
    *,
    query_positions: Any = None,
    key_positions: Any = None,
    query_segment_ids: Any = None,
    key_segment_ids: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The k candidates of the highest index scores, for each query; memory O(block T).

    Key t is a candidate for query s iff ``key_positions[t] <= query_positions[s]`` and their
    segments agree. Of equal scores (-0.0 equals +0.0) the smaller key row is taken first; a score
    of NaN or -inf is never chosen. Inside ``jax.shard_map`` that splits S, say where the local
    queries stand: the default counts from 0 on every device.

    Args:
        q_index, k_index, weights: as for `index_scores`.
        k: slots per query, at least 1; may exceed T.
        query_positions: int32 ``[S]`` or ``[..., S]``. Default, if S equals T: key_positions.
        key_positions: int32 ``[T]`` or ``[..., T]``. Default: 0 to T - 1.
        query_segment_ids, key_segment_ids: int32, shaped as the positions; both or neither.

    Returns:
        indices int32 ``[..., S, k]``, with -1 in the unused slots, which come last, and topk_length
        int32 ``[..., S]``, the number of used ones. Neither has a gradient.

    Raises:
        TypeError, ValueError: an argument is not as above, or query_positions is missing where S is
            not T.
    """
    operands, (*batch, queries, keys), dtype, accum = _index_operands(q_index, k_index, weights)
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise TypeError(f"k: got {k!r}, want a Python integer; it is a shape and cannot be traced")
    if k < 1:
        raise ValueError(f"k: got {k}, want at least 1")
    operands |= _candidate_operands(
        (*batch, queries, keys), query_positions, key_positions, query_segment_ids, key_segment_ids
    )
    if 0 in (*batch, queries, keys):
        unused = jnp.full((*batch, queries, k), -1, jnp.int32)
        return unused, jnp.zeros((*batch, queries), jnp.int32)
    operands = jax.tree.map(lax.stop_gradient, operands)
    return indexer_blocks.select(operands, int(k), dtype, accum)


def indexer_loss(
    q_index: Any,
    k_index: Any,
    weights: Any,
    q: Any,
    kv: Any,
    lse: Any = None,
    indices: Any = None,
    *,
    topk_length: Any = None,
    attn_sink: Any = None,
    scale: float | None = None,
    query_positions: Any = None,
    key_positions: Any = None,
    query_segment_ids: Any = None,
    key_segment_ids: Any = None,
    head_axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Mean over queries of ``KL(p || softmax(I))``, in nats: it trains the indexer alone.

    The support of a query is the valid slots of ``indices``, a row listed twice counting twice;
    without ``indices`` it is all candidates, as in `select_topk` (the dense warm-up). ``p`` are the
    weights ``exp(s_i - lse*)`` of `sparse_attention`, summed over heads and normalised over the
    support. Queries without support do not count; where there are only such, the loss is 0. Given
    indices are taken as they are: positions and segments restrict the dense support only.

    Differentiable in q_index, k_index and weights. Inside ``jax.shard_map`` it is the mean over the
    local queries.

    Args:
        q_index, k_index, weights: as for `index_scores`.
        q, kv: the main attention's ``[..., S, H, D]`` and ``[..., T, D]``, both of one dtype.
        lse: real floating ``[..., S, H]``, as `sparse_attention` returns it. Default: computed.
        indices: int32 ``[..., S, K]``, rows of kv and k_index. Default: the dense support.
        topk_length: int32 ``[..., S]``, only with indices: the slots that count. Default: all.
        attn_sink: real floating ``[H]``, the main attention's. Default: none.
        scale: finite number > 0, factor of the main attention's logits. Default ``D ** -0.5``.
        query_positions, key_positions, query_segment_ids, key_segment_ids: as for `select_topk`.
        head_axis_name: inside ``jax.shard_map``, the mesh axes that split the main heads.

    Returns:
        A float32 scalar (float64 where a floating operand but lse and attn_sink is float64).

    Raises:
        TypeError, ValueError: an argument is not as above, or query_positions is missing for a
            dense support where S is not T.
    """
    operands, shape, dtype, accum = _index_operands(q_index, k_index, weights)
    positions = (query_positions, key_positions, query_segment_ids, key_segment_ids)
    if indices is None and topk_length is not None:
        raise ValueError("topk_length: counts the slots of indices; pass indices too, or neither")
    slots = jax.ShapeDtypeStruct((*shape[:-1], 1), np.int32) if indices is None else indices
    problem = validate.problem(
        q, kv, slots, topk_length=topk_length, attn_sink=attn_sink, scale=scale
    )
    _want("q", q, "[..., S, H, D]", (*shape[:-1], *q.shape[-2:]))
    _want("kv", kv, "[..., T, D]", (*shape[:-2], shape[-1], kv.shape[-1]))
    candidates = _candidate_operands(shape, *positions, needed=indices is None)
    operands |= {"q": jnp.asarray(q), "kv": jnp.asarray(kv)}
    if lse is not None:
        validate.check_real("lse", lse)
        _want("lse", lse, "[..., S, H]", q.shape[:-1])
        operands["lse"] = jnp.asarray(lse)
    if attn_sink is not None:
        operands["attn_sink"] = _lead(jnp.asarray(attn_sink), len(problem.batch))
    if indices is None:
        operands |= candidates
    else:
        length = np.int32(indices.shape[-1]) if topk_length is None else topk_length
        operands["topk_length"] = jnp.broadcast_to(jnp.asarray(length), shape[:-1])
        operands["indices"] = jnp.asarray(indices)
    accum = indexer_blocks.accum_dtype(accum, problem.facts.accum_dtype)
    if problem.empty:
        return jnp.zeros((), accum)
    return indexer_blocks.loss(operands, problem.facts, head_axis_name, dtype, accum)


# ---------------------------------------------------------------------------------------- arguments


def _want(name: str, x: Any, dims: str, *shapes: tuple[int, ...]) -> None:
    if tuple(x.shape) not in [tuple(s) for s in shapes]:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, want {dims} = {' or '.join(map(str, shapes))}"
        )


def _index_operands(q_index, k_index, weights):
    """Checked operands by name, sizes ``(*batch, S, T)``, q_index's dtype, that of sums."""
    dtype = validate.check_float("q_index", q_index)
    if validate.check_float("k_index", k_index) != dtype:
        raise TypeError(f"k_index: got dtype {k_index.dtype}, want q_index's dtype {dtype}")
    accum = indexer_blocks.accum_dtype(dtype, validate.check_float("weights", weights))
    if q_index.ndim < 3 or 0 in q_index.shape[-2:]:
        raise ValueError(f"q_index: got shape {q_index.shape}, want [..., S, HI >= 1, DI >= 1]")
    if k_index.ndim < 2:
        raise ValueError(f"k_index: got shape {k_index.shape}, want [..., T, DI]")
    *batch, queries, heads, width = q_index.shape
    keys = k_index.shape[-2]
    _want("k_index", k_index, "[..., T, DI]", (*batch, keys, width))
    _want("weights", weights, "[..., S, HI]", (*batch, queries, heads))
    operands = {"q_index": q_index, "k_index": k_index, "weights": weights}
    return jax.tree.map(jnp.asarray, operands), (*batch, queries, keys), dtype, accum


def _candidate_operands(
    shape, query_positions, key_positions, query_segment_ids, key_segment_ids, needed=True
):
    """Positions and segments by name, with defaults and batch axes (of size 1 where absent)."""
    *batch, queries, keys = shape
    if (query_segment_ids is None) != (key_segment_ids is None):
        missing = "query" if query_segment_ids is None else "key"
        raise ValueError(f"{missing}_segment_ids: got None; pass both segment ids, or neither")
    given = {
        "query_positions": query_positions, "key_positions": key_positions,
        "query_segment_ids": query_segment_ids, "key_segment_ids": key_segment_ids,
    }  # fmt: skip
    for name, x in given.items():
        if x is not None:
            validate.check_int32(name, x)
            size, dims = (queries, "S") if name.startswith("query") else (keys, "T")
            _want(name, x, f"[..., {dims}] or [{dims}]", (*batch, size), (size,))
    if query_positions is None and queries != keys and needed:
        raise ValueError(
            f"query_positions: got None for S={queries} queries and T={keys} keys; where these "
            "differ, pass int32 positions that say where the queries stand among the keys"
        )
    if key_positions is None:
        given["key_positions"] = np.arange(keys, dtype=np.int32)
    if query_positions is None:
        given["query_positions"] = given["key_positions"]
    return {name: _lead(jnp.asarray(x), len(batch)) for name, x in given.items() if x is not None}


def _lead(x, batch: int):
    return x if x.ndim > batch else x.reshape((1,) * batch + x.shape)
