"""The lightning indexer, which chooses the keys that are attended to, and the loss that trains it.

    I[s, t] = sum_j weights[s, j] relu(q_index[s, j] . k_index[t])     over the indexer's heads
    loss = mean_s KL(p[s] || softmax(I[s]))                            over the support of query s
    p[s, t] = sum_h P[s, h, t] / sum_t' sum_h P[s, h, t']              of the main attention's P

Queries are taken in n blocks, and block j holds the rows j, n + j, 2 n + j, ...: an S that is split
over devices stays split inside every block. Nothing of size [S, T] or [S, K, D] is formed.
Source: DeepSeek-V3.2 technical report, arXiv 2512.02556.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_dsa import sharding, validate

# The size of a block follows from the bytes of a query: its scores, 4 T, on the dense support,
# within SCORES_BYTES; its gathered keys and their products, K (4 (DI + D) + 8 (HI + H)), on the
# sparse one, within SLOTS_BYTES. It is MIN_ROWS queries at least. Batch axes count; axes that vmap
# adds come on top.
SCORES_BYTES = 4 << 20
SLOTS_BYTES = 64 << 20
MIN_ROWS = 8
# Bytes of the products [block, heads, T] that stand at a time, of MIN_HEADS heads at least. Heads
# are strided like rows, for the same reason.
PRODUCT_BYTES = 32 << 20
MIN_HEADS = 8

# The dimensions behind the batch axes.
_DIMS = {
    "q_index": "sjd", "k_index": "td", "weights": "sj",
    "query_positions": "s", "key_positions": "t", "query_segment_ids": "s", "key_segment_ids": "t",
    "indices": "sk", "topk_length": "s",
    "q": "shd", "kv": "td", "lse": "sh", "attn_sink": "h",
}  # fmt: skip
_MAIN = ("q", "kv", "lse", "attn_sink")
_TARGET = "jax_dsa_indexer_target"


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
        return (_scores(dtype, q_index, k_index, weights),)

    return _distribute(scores, operands, ("st",), accum)[0]


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
    return _select(operands, int(k), dtype, accum)


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
        validate._check_real("lse", lse)
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
    accum = jnp.promote_types(accum, problem.facts.accum_dtype)
    if problem.empty:
        return jnp.zeros((), accum)
    return _loss(operands, problem.facts, head_axis_name, dtype, accum)


# ---------------------------------------------------------------------------------------- arguments


def _want(name: str, x: Any, dims: str, *shapes: tuple[int, ...]) -> None:
    if tuple(x.shape) not in [tuple(s) for s in shapes]:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, want {dims} = {' or '.join(map(str, shapes))}"
        )


def _index_operands(q_index, k_index, weights):
    """Checked operands by name, sizes ``(*batch, S, T)``, q_index's dtype, that of sums."""
    dtype = validate._check_float("q_index", q_index)
    if validate._check_float("k_index", k_index) != dtype:
        raise TypeError(f"k_index: got dtype {k_index.dtype}, want q_index's dtype {dtype}")
    accum = jnp.promote_types(
        jnp.promote_types(dtype, validate._check_float("weights", weights)), np.float32
    )
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
            validate._check_int32(name, x)
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


# --------------------------------------------------------------------------------------- operations


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _select(operands, k: int, dtype, accum):
    def select(_, q_index, k_index, weights, **places):
        axis, keys = q_index.ndim - 3, k_index.astype(dtype)
        size = min(k, keys.shape[-2])

        def block(q_index, weights, **places):
            scores = _scores(dtype, q_index, keys, weights)  # [*B, block, T]
            chosen = _candidates(**places) & ~jnp.isnan(scores)
            index = _highest(jnp.where(chosen, scores, -jnp.inf), size)
            return index, (index >= 0).sum(-1, dtype=jnp.int32)

        budgets = 4 * q_index.shape[-3] * k_index.size / k_index.shape[-1] / SCORES_BYTES
        rows, whole = _by_query({"q_index": q_index.astype(dtype), "weights": weights, **places})
        block = functools.partial(block, **whole)
        index, length = _map_blocks(block, rows, axis, budgets)
        pad = [(0, 0)] * (axis + 1) + [(0, k - size)]
        return jnp.pad(index, pad, constant_values=-1), length

    return _distribute(select, operands, ("sk", "s"), accum)


def _highest(scores, k: int):
    """``[..., T] -> int32 [..., k]``, the rows of the k highest scores above -inf, then -1.

    Two sorts of one integer operand, as fast as top_k, which XLA does not split over devices. The
    first finds the k-th score, the second brings the rows above it to the front, then the tied.
    """
    rows = scores.shape[-1]
    bits = lax.bitcast_convert_type(
        jnp.where(scores == 0, 0, scores), f"int{8 * scores.dtype.itemsize}"
    )
    rank = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)  # ordered as the scores
    kth = lax.sort(rank, is_stable=False)[..., rows - k, None]
    row = jnp.arange(rows, dtype=jnp.int32)
    order = jnp.where(rank > kth, row, jnp.where(rank == kth, row + rows, 2 * rows))
    order = jnp.where(scores == -jnp.inf, 2 * rows, order)
    order = lax.sort(order, is_stable=False)[..., :k]
    return jnp.where(order < 2 * rows, order % rows, -1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _loss(operands, facts, head_axis_name, dtype, accum):
    operands |= {n: lax.stop_gradient(operands[n]) for n in _MAIN if n in operands}
    divergences = functools.partial(_divergences, facts, dtype)
    kl, some = _distribute(divergences, operands, ("s", "s"), accum, head_axis_name)
    return kl.sum() / jnp.maximum(some.sum(), 1)


def _divergences(facts, dtype, head_axes, **operands):
    """Per query KL(p || softmax(I)) and whether it has support, as 0 or 1, both ``[*B, S]``."""
    q_index, kv = operands["q_index"], operands["kv"].astype(facts.dtype)
    operands |= {"q_index": q_index.astype(dtype), "q": operands["q"].astype(facts.dtype)}
    rows, whole = _by_query({n: x for n, x in operands.items() if n != "kv"})
    k_index, sink = whole.pop("k_index"), whole.pop("attn_sink", None)

    def block(q_index, weights, q, lse=None, indices=None, topk_length=None, **places):
        keys, values = k_index, kv
        if indices is None or topk_length is None:
            valid = _candidates(**places, **whole)
        else:
            valid = (jnp.arange(indices.shape[-1]) < topk_length[..., None]) & (indices >= 0)
            valid &= indices < kv.shape[-2]
            row = jnp.where(valid, indices, kv.shape[-2])
            keys, values = _gather(keys, row), _gather(values, row)
        valid = jnp.broadcast_to(valid, (*q.shape[:-2], valid.shape[-1]))  # [*B, block, N]
        target = lax.stop_gradient(_target(facts, head_axes, q, values, valid, lse, sink))
        if indices is not None:  # no larger than indices: saved, so as not to attend again
            target = checkpoint_name(target, _TARGET)
        some = valid.any(-1)
        scores = _finite_scores(dtype, q_index, keys, weights, some)
        kl = _divergence(target.astype(scores.dtype), scores, valid)
        return kl, some.astype(kl.dtype)

    if "indices" in operands:
        (*_, heads, width), (*_, main_heads, main_width) = q_index.shape, operands["q"].shape
        each = 4 * (width + main_width) + 8 * (heads + main_heads)
        budgets = each * operands["indices"].size / SLOTS_BYTES
    else:
        budgets = 4 * q_index.shape[-3] * k_index.size / k_index.shape[-1] / SCORES_BYTES
    return _map_blocks(block, rows, q_index.ndim - 3, budgets, ("q_index", "weights"))


def _target(facts, head_axes, q, kv, valid, lse, sink):
    """The main attention's weights, summed over heads and normalised: ``[*B, block, N]``."""

    def weights(q, sink, lse=None):
        s = facts.scale * _logits(facts.dtype, q, kv)
        s = jnp.where(valid[..., None, :], s, -jnp.inf)  # [*B, block, heads, N]
        if lse is None:
            lse = jax.nn.logsumexp(s, -1, keepdims=True)
        some = lse != -jnp.inf
        p = jnp.exp(s - jnp.where(some, lse, 0))
        alpha = jax.nn.sigmoid(jnp.where(some, lse, 0) - sink)
        return jnp.where(some, alpha * p, 0).sum(-2)

    accum = facts.accum_dtype
    sink = jnp.full((q.shape[-2],), -jnp.inf, accum) if sink is None else sink.astype(accum)
    sink = jnp.broadcast_to(sink[..., None, :, None], (*q.shape[:-1], 1))
    arrays = [q, sink] if lse is None else [q, sink, lse.astype(accum)[..., None]]
    p = _sum_over_heads(weights, arrays, valid.shape[-1], accum)
    if head_axes:
        p = lax.psum(p, head_axes)
    total = p.sum(-1, keepdims=True)
    return p / jnp.where(total == 0, 1, total)


def _divergence(p, scores, valid):
    """``sum_i p_i (ln p_i - ln softmax(scores)_i)`` over valid slots, terms with p = 0 being 0."""
    top = lax.stop_gradient(jnp.where(valid, scores, -jnp.inf).max(-1, keepdims=True))
    shifted = jnp.where(valid, scores - jnp.where(jnp.isfinite(top), top, 0), -jnp.inf)
    total = jnp.where(valid, jnp.exp(shifted), 0).sum(-1, keepdims=True)
    log_q = shifted - jnp.log(jnp.where(total == 0, 1, total))
    weighs = valid & (p != 0)
    return jnp.where(
        weighs, p * (jnp.log(jnp.where(weighs, p, 1)) - jnp.where(weighs, log_q, 0)), 0
    ).sum(-1)


def _scores(dtype, q_index, k_index, weights):
    """``[*B, S, T]`` for keys ``[*B, T, DI]``, ``[*B, S, K]`` for ``[*B, S, K, DI]``."""

    def scores(q, w):
        return (w * jax.nn.relu(_logits(dtype, q, k_index)).astype(w.dtype)).sum(-2)

    arrays = [q_index, weights[..., None]]
    return _sum_over_heads(scores, arrays, k_index.shape[-2], weights.dtype)


def _finite_scores(dtype, q_index, k_index, weights, some):
    """The scores, NaN and without gradient where an operand is not finite: 0 NaN would not be 0.

    So a key that is nobody's candidate and a query without support reach no gradient, whatever
    they hold.
    """
    q_fine = some & jnp.isfinite(q_index).all((-2, -1)) & jnp.isfinite(weights).all(-1)
    k_fine = jnp.isfinite(k_index).all(-1)
    q_index = jnp.where(q_fine[..., None, None], q_index, 0)
    weights = jnp.where(q_fine[..., None], weights, 0)
    k_index = jnp.where(k_fine[..., None], k_index, 0)
    scores = _scores(dtype, q_index, k_index, weights)
    k_fine = k_fine if k_fine.ndim == scores.ndim else k_fine[..., None, :]
    return jnp.where(q_fine[..., None] & k_fine, scores, jnp.nan)


def _candidates(query_positions, key_positions, query_segment_ids=None, key_segment_ids=None):
    """``[*B, S, T]``, batch axes of size 1 where no operand has them."""
    candidates = key_positions[..., None, :] <= query_positions[..., None]
    if query_segment_ids is not None and key_segment_ids is not None:
        candidates &= key_segment_ids[..., None, :] == query_segment_ids[..., None]
    return candidates


# ---------------------------------------------------------------------------------- building blocks


def _logits(dtype, q, k):
    """``[*B, S, H, T]`` for keys ``[*B, T, D]``, or ``[*B, S, H, K]`` for ``[*B, S, K, D]``."""
    return _dot(
        "...shd,...skd->...shk" if k.ndim == q.ndim else "...shd,...kd->...shk", dtype, q, k
    )


def _product(equation: str, dtype, a, b) -> jax.Array:
    """Operands in ``dtype``, sums in float32 (float64)."""
    a, b = a.astype(dtype), b.astype(dtype)
    precision = lax.Precision.HIGHEST if a.dtype.itemsize > 2 else lax.Precision.DEFAULT
    accum = jnp.promote_types(dtype, np.float32)
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=accum)


# Unlike JAX's own derivative, this one multiplies in ``dtype`` and leaves a block's sums uncast.
_dot = jax.custom_vjp(_product, nondiff_argnums=(0, 1))


def _dot_fwd(equation, dtype, a, b):
    return _product(equation, dtype, a, b), (a, b)


def _dot_bwd(equation, dtype, residuals, g):
    a, b = residuals
    # Gradients of a mean are small: float16 would lose them.
    dtype = g.dtype if dtype == np.float16 else dtype
    operands, result = equation.split("->")
    left, right = operands.split(",")
    da = _product(f"{result},{right}->{left}", dtype, g, b)
    return da.astype(a.dtype), _product(f"{result},{left}->{right}", dtype, g, a).astype(b.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def _sum_over_heads(fn, arrays, width: int, accum):
    """``fn(*arrays)``, a sum over axis -2 of all arrays, of a chunk of heads after the other."""
    *rows, heads, _ = arrays[0].shape
    most = max(MIN_HEADS, PRODUCT_BYTES // max(1, 4 * width * math.prod(rows)))
    chunk = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)
    if chunk == heads:
        return fn(*arrays)

    def add(total, parts):
        return total + jax.checkpoint(fn, prevent_cse=False)(*parts), None

    parts = [
        jnp.moveaxis(x.reshape(*rows, chunk, heads // chunk, x.shape[-1]), -2, 0) for x in arrays
    ]
    zeros = sharding.align([jnp.zeros((*rows, width), accum), *arrays], accum)[0]
    return lax.scan(add, zeros, parts)[0]


def _by_query(operands):
    """The operands that have a row per query, and the others."""
    rows = {n: x for n, x in operands.items() if _DIMS[n][0] == "s"}
    return rows, {n: x for n, x in operands.items() if n not in rows}


def block_count(queries: int, budgets: float) -> int:
    """The number of blocks, where all queries together take so many budgets.

    Of the numbers from the least to its double, one that divides ``queries`` and leaves the largest
    power of two in the size of a block, so that many devices can share it; where none divides, the
    least, and rows are padded.
    """
    least = max(1, min(math.ceil(budgets), queries // MIN_ROWS))
    even = [n for n in range(least, 2 * least) if queries % n == 0]
    return max(even, key=lambda n: ((queries // n) & -(queries // n), -n), default=least)


def _map_blocks(fn, rows, axis: int, budgets: float, differentiated=()):
    """``fn(**block of rows)`` for all blocks; rows and results have the queries on ``axis``.

    Differentiated operands are the scan's own slices, the others are read in place: that needs no
    copy, but its transpose would write all of an operand once a block.
    """
    size = rows["q_index"].shape[axis]
    count = block_count(size, budgets)
    length = -(-size // count)

    def split(x):  # [*B, S, ...] -> [*B, length, count, ...]; padded queries are 0: no gradient
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, length * count - size)
        x = jnp.pad(x, pad)
        return x.reshape(*x.shape[:axis], length, count, *x.shape[axis + 1 :])

    rows = {n: split(x) for n, x in rows.items()}
    sliced = {n: jnp.moveaxis(rows.pop(n), axis + 1, 0) for n in differentiated}
    types = {n: x.dtype for n, x in rows.items()}
    # As bits: else XLA casts all of the operand before the loop, where a CPU multiplies in float32.
    rows = {
        n: lax.bitcast_convert_type(x, np.uint16) if x.dtype.itemsize == 2 else x
        for n, x in rows.items()
    }

    def block(i, sliced):
        taken = {
            n: lax.dynamic_index_in_dim(x, i, axis + 1, keepdims=False) for n, x in rows.items()
        }
        return fn(**{n: lax.bitcast_convert_type(x, types[n]) for n, x in taken.items()}, **sliced)

    policy = jax.checkpoint_policies.save_only_these_names(_TARGET)
    block = jax.checkpoint(block, prevent_cse=False, policy=policy)
    _, results = lax.scan(lambda _, x: (None, block(*x)), None, (jnp.arange(count), sliced))
    results = [jnp.moveaxis(y, 0, axis + 1) for y in results]
    results = [y.reshape(*y.shape[:axis], length * count, *y.shape[axis + 2 :]) for y in results]
    return tuple(lax.slice_in_dim(y, 0, size, axis=axis) for y in results)


def _gather(x, row):
    """``[*B, T, D], [*B, S, K] -> [*B, S, K, D]``: zeros for rows past the end."""
    gather = lambda x, row: x.at[row].get(mode="fill", fill_value=0)  # noqa: E731
    for _ in range(x.ndim - 2):
        gather = jax.vmap(gather)
    return gather(x, row)


def _distribute(fn, operands, results: tuple[str, ...], accum, head_axes=None):
    """``fn(head_axes, **operands)`` on every device's own part, in all modes of ``sharding``."""
    names, arrays = tuple(operands), list(operands.values())
    rule = sharding.Rule(tuple(_DIMS[n] for n in names), results, sharded="sh")
    if sharding.explicit_mesh(*map(jax.typeof, arrays)) is None:
        # Devices that split the main heads all run the same indexer: the two vary apart.
        for side in (_MAIN, [n for n in names if n not in _MAIN]):
            side = [n for n in names if n in side]
            operands |= zip(side, sharding.align([operands[n] for n in side], accum), strict=True)
        return fn(head_axes, **operands)
    heads = sharding.split_of(rule, arrays, "h")

    def local(*arrays):
        results = fn(heads, **dict(zip(names, arrays, strict=True)))
        return tuple(lax.pmean(x, heads) if heads else x for x in results)  # equal on all of them

    return sharding.distribute(local, rule, accum, arrays, names)
