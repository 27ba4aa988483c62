"""How `indexer` computes: in blocks of queries, in chunks of heads, on one device or several.

Queries are taken in n blocks, and block j holds the rows j, n + j, 2 n + j, ...: an S that is split
over devices stays split inside every block. Nothing of size [S, T] or [S, K, D] is formed.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_dsa import sharding

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


def accum_dtype(*dtypes) -> np.dtype:
    """The dtype of sums; spelled out, so as to work under strict promotion too."""
    return np.dtype(np.float64 if np.float64 in dtypes else np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def select(operands, k: int, dtype, accum):
    def select(_, q_index, k_index, weights, **places):
        axis, keys = q_index.ndim - 3, k_index.astype(dtype)
        size = min(k, keys.shape[-2])

        def block(q_index, weights, **places):
            scores = scores_of(dtype, q_index, keys, weights)  # [*B, block, T]
            chosen = _candidates(**places) & ~jnp.isnan(scores)
            index = _highest(jnp.where(chosen, scores, -jnp.inf), size)
            return index, (index >= 0).sum(-1, dtype=jnp.int32)

        budgets = 4 * q_index.shape[-3] * k_index.size / k_index.shape[-1] / SCORES_BYTES
        rows, whole = _by_query({"q_index": q_index.astype(dtype), "weights": weights, **places})
        block = functools.partial(block, **whole)
        index, length = _map_blocks(block, rows, axis, budgets)
        pad = [(0, 0)] * (axis + 1) + [(0, k - size)]
        return jnp.pad(index, pad, constant_values=-1), length

    return distribute(select, operands, ("sk", "s"), accum)


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
def loss(operands, facts, head_axis_name, dtype, accum):
    operands |= {n: lax.stop_gradient(operands[n]) for n in _MAIN if n in operands}
    divergences = functools.partial(_divergences, facts, dtype)
    kl, some = distribute(divergences, operands, ("s", "s"), accum, head_axis_name)
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


def scores_of(dtype, q_index, k_index, weights):
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
    scores = scores_of(dtype, q_index, k_index, weights)
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
    accum = accum_dtype(a.dtype)
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


def distribute(fn, operands, results: tuple[str, ...], accum, head_axes=None):
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
