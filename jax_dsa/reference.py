"""The definition in a few lines of jnp, in float32 (float64), differentiated by JAX itself."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_dsa.problem import Facts


def attention(facts: Facts, q, kv, indices, topk_length, sink):
    """Sparse attention of queries over the rows of ``kv`` that ``indices`` name.

    Args:
        facts: scale and value_dim.
        q: ``[*B, S, H, D]``.
        kv: ``[*B, T, D]``.
        indices: int32 ``[*B, S, K]``.
        topk_length: int32 ``[*B, S]``.
        sink: ``[*1, H]``.

    Returns:
        ``out [*B, S, H, value_dim]`` in ``facts.dtype`` and ``lse [*B, S, H]``.
    """
    q, kv, sink = (x.astype(facts.accum_dtype) for x in (q, kv, sink))
    slot = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    valid = (slot < topk_length[..., None]) & (indices >= 0) & (indices < kv.shape[-2])
    kv_rows = _rows(kv, jnp.where(valid, indices, 0))  # [*B, S, K, D]
    kv_rows = jnp.where(valid[..., None], kv_rows, 0)
    s = jnp.einsum("...shd,...skd->...shk", q, kv_rows, precision="highest") * facts.scale
    s = jnp.where(valid[..., None, :], s, -jnp.inf)  # [*B, S, H, K]

    some = valid.any(-1)[..., None]  # [*B, S, 1]: the row has a valid slot
    top = lax.stop_gradient(jnp.where(some, s.max(-1), 0))  # [*B, S, H]
    weight = jnp.exp(s - top[..., None])
    total = jnp.where(some, weight.sum(-1), 1)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    # The sink takes its share of the weight but brings no value: P = softmax(s) * alpha.
    alpha = jnp.where(some, jax.nn.sigmoid(jnp.where(some, lse, 0) - sink[..., None, :]), 0)
    p = weight * (alpha / total)[..., None]  # [*B, S, H, K]
    value = kv_rows[..., : facts.value_dim]
    out = jnp.einsum("...shk,...skv->...shv", p, value, precision="highest")
    return out.astype(facts.dtype), lse


def _rows(kv, indices):
    """``kv[indices]`` per batch element: ``[*B, T, D], [*B, S, K] -> [*B, S, K, D]``."""
    gather = lambda rows, index: rows.at[index].get(mode="promise_in_bounds")  # noqa: E731
    for _ in range(kv.ndim - 2):
        gather = jax.vmap(gather)
    return gather(kv, indices)
