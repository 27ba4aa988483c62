"""Sparse attention in blocked jnp: any device, memory O(block K D) beyond inputs and outputs.

Queries of all groups are rows of one list; a loop takes a block of them, gathers the block's keys
and multiplies. Matrix products run in the input dtype with float32 accumulation. The backward pass
recomputes E = exp(s - lse) (formulas: ``vjp.py``) and adds a block's dkv rows to the float32
accumulator by one scatter-add.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dsa.problem import Facts

BLOCK_VARIABLE = "JAX_DSA_XLA_BLOCK"
# Budget of one block's keys and products: small enough for a CPU's cache, enough to fill a GPU.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}


def block_queries(queries: int, heads: int, topk: int, head_dim: int, platform: str) -> int:
    """Queries per block: as many as keep ``K (4 D + 8 H)`` bytes a query within the budget.

    The environment variable ``JAX_DSA_XLA_BLOCK``, read when a program is lowered, overrides it.
    """
    override = os.environ.get(BLOCK_VARIABLE)
    if override is not None:
        if not override.isdigit() or int(override) < 1:
            raise ValueError(
                f"{BLOCK_VARIABLE}: got {override!r}, want a positive integer or unset"
            )
        return min(int(override), queries)
    bytes_each = topk * (4 * head_dim + 8 * heads)
    budget = BLOCK_BYTES.get(platform, BLOCK_BYTES["cpu"])
    return max(1, min(queries, budget // bytes_each))


def unusable(groups: int, keys: int, topk: int) -> str | None:
    """Why a problem of these sizes cannot be served, or None."""
    if groups * keys + topk >= 2**31:
        return f"{groups} x {keys} rows of kv exceed the int32 numbers of rows"
    return None


class _Rows:
    """The rows of a call in blocks; the last starts early enough to be whole and repeats rows."""

    def __init__(self, facts: Facts, platform: str, q, kv, indices, topk_length):
        self.groups, self.queries, self.heads, self.head_dim = q.shape
        self.rows = self.groups * self.queries
        self.topk, self.keys = indices.shape[-1], kv.shape[1]
        self.end = self.groups * self.keys
        if reason := unusable(self.groups, self.keys, self.topk):  # vmap may have added groups
            raise NotImplementedError(f"implementation='xla' cannot serve this call: {reason}")
        self.facts = facts
        self.block = block_queries(self.rows, self.heads, self.topk, self.head_dim, platform)
        self.count = -(-self.rows // self.block)
        # A CPU multiplies 16-bit floats as float32, and XLA would cast all of an operand before the
        # loop; as bits it cannot.
        self.as_bits = platform == "cpu" and q.dtype.itemsize == 2
        self.q, self.kv = self.bits(self.flat(q)), self.bits(kv.reshape(-1, self.head_dim))
        self.indices, self.topk_length = self.flat(indices), self.flat(topk_length)

    def flat(self, x):
        """``[G, S, ...] -> [G S, ...]``."""
        return x.reshape(self.rows, *x.shape[2:])

    def bits(self, x):
        return lax.bitcast_convert_type(x, np.uint16) if self.as_bits else x

    def floats(self, x):
        return lax.bitcast_convert_type(x, self.facts.dtype) if self.as_bits else x

    def start(self, i):
        return jnp.minimum(i * self.block, self.rows - self.block)

    def take(self, x, i):
        return lax.dynamic_slice_in_dim(x, self.start(i), self.block)

    def put(self, x, update, i):
        return lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), self.start(i), 0)

    def group(self, i):
        return (self.start(i) + jnp.arange(self.block)) // self.queries  # [B]

    def slots(self, i):
        """``valid [B, K]`` and ``row [B, K]`` of the flat kv, one past its end where invalid."""
        index = self.take(self.indices, i)
        length = self.take(self.topk_length, i)[:, None]
        slot = lax.broadcasted_iota(jnp.int32, index.shape, 1)
        valid = (slot < length) & (index >= 0) & (index < self.keys)
        row = jnp.where(valid, index + self.group(i)[:, None] * self.keys, self.end)
        if self.facts.deterministic:
            row = jnp.sort(
                row
            )  # the order of slots means nothing; sorted, equal rows stand together
        return row < self.end, row

    def gather(self, row):
        """``[B, K, D]``, zeros where invalid: what stands in such a row of kv reaches nothing."""
        return self.floats(self.kv.at[row].get(mode="fill", fill_value=0))

    def logits(self, q, kv_rows, valid):
        s = _dot("bkd,bhd->bkh", kv_rows, q, self.facts) * self.facts.scale
        return jnp.where(valid[..., None], s, -jnp.inf)  # [B, K, H]


def _dot(equation: str, a, b, facts: Facts):
    """A product of operands in the problem's dtype, accumulated in float32 (float64)."""
    a, b = a.astype(facts.dtype), b.astype(facts.dtype)
    precision = lax.Precision.HIGHEST if a.dtype.itemsize > 2 else lax.Precision.DEFAULT
    accum = facts.accum_dtype
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=accum)


def forward(facts: Facts, platform: str, q, kv, indices, topk_length, sink):
    """Sparse attention of every group.

    Args:
        facts: facts of the call.
        platform: the one that is lowered for; chooses the block.
        q: ``[G, S, H, D]``.
        kv: ``[G, T, D]``.
        indices: ``[G, S, K]``.
        topk_length: ``[G, S]``.
        sink: ``[G, H]``.

    Returns:
        out ``[G, S, H, value_dim]`` in ``facts.dtype`` and lse ``[G, S, H]``.
    """
    rows = _Rows(facts, platform, q, kv, indices, topk_length)

    def body(i, carry):
        out, lse = carry
        valid, row = rows.slots(i)
        kv_rows = rows.gather(row)  # [B, K, D]
        s = rows.logits(rows.floats(rows.take(rows.q, i)), kv_rows, valid)  # [B, K, H]
        some = valid.any(1)[:, None]  # [B, 1]: the query has a valid slot
        top = jnp.where(some, s.max(1), 0)  # [B, H]
        weight = jnp.exp(s - top[:, None])
        total = jnp.where(some, weight.sum(1), 1)
        lse_block = jnp.where(some, top + jnp.log(total), -jnp.inf)
        alpha = jnp.where(some, jax.nn.sigmoid(lse_block - sink[rows.group(i)]), 0)
        o = _dot("bkh,bkv->bhv", weight, kv_rows[..., : facts.value_dim], facts)
        return rows.put(out, o * (alpha / total)[..., None], i), rows.put(lse, lse_block, i)

    out = jnp.zeros((rows.rows, rows.heads, facts.value_dim), facts.dtype)
    lse = jnp.zeros((rows.rows, rows.heads), facts.accum_dtype)
    out, lse = lax.fori_loop(0, rows.count, body, (out, lse))
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def backward(facts: Facts, platform: str, q, kv, indices, topk_length, lse, alpha, beta, dout):
    """Gradients of `forward`; ``lse, alpha, beta [G, S, H]``, ``dout [G, S, H, value_dim]``.

    Returns:
        dq ``[G, S, H, D]`` in ``facts.dtype`` and dkv ``[G, T, D]`` in the accumulation dtype.
    """
    rows = _Rows(facts, platform, q, kv, indices, topk_length)
    lse, alpha, beta, dout = (rows.flat(x) for x in (lse, alpha, beta, dout))
    dout = rows.bits(dout)
    pad = [(0, 0), (0, 0), (0, rows.head_dim - facts.value_dim)]
    add = _add_rows_in_order if facts.deterministic else _add_rows

    def body(i, carry):
        dq, dkv = carry
        valid, row = rows.slots(i)
        kv_rows = rows.gather(row)  # [B, K, D]
        q_block, do = (rows.floats(rows.take(x, i)) for x in (rows.q, dout))
        lse_b, alpha_b, beta_b = (rows.take(x, i)[:, None] for x in (lse, alpha, beta))  # [B, 1, H]
        s = rows.logits(q_block, kv_rows, valid)  # [B, K, H]
        e = jnp.where(valid[..., None], jnp.exp(s - lse_b), 0)
        dp = _dot("bkv,bhv->bkh", kv_rows[..., : facts.value_dim], do, facts)
        ds = jnp.where(valid[..., None], e * (alpha_b * dp + beta_b), 0) * facts.scale
        dq_block = _scaled_dot("bkh,bkd->bhd", ds, kv_rows, facts, per_head=True)
        # Both terms of dkv in one product: [dS, P] [scale q; (dout, 0)].
        left = jnp.concatenate([ds, e * alpha_b], 2)  # [B, K, 2H]
        right = jnp.concatenate([q_block, jnp.pad(do, pad)], 1)  # [B, 2H, D]
        dkv_rows = _scaled_dot("bkh,bhd->bkd", left, right, facts, per_head=False)
        fresh = rows.start(i) + jnp.arange(rows.block) >= i * rows.block  # [B]: not done before
        row = jnp.where(fresh[:, None], row, rows.end)
        return rows.put(dq, dq_block, i), add(dkv, row, dkv_rows)

    dq = jnp.zeros(rows.q.shape, facts.dtype)
    dkv = jnp.zeros(rows.kv.shape, facts.accum_dtype)
    dq, dkv = lax.fori_loop(0, rows.count, body, (dq, dkv))
    return dq.reshape(q.shape), dkv.reshape(kv.shape)


def _scaled_dot(equation: str, a, b, facts: Facts, *, per_head: bool):
    """A product whose left operand ``[B, K, H]`` may leave float16's range on either side.

    It is scaled by a power of two per query (and head, where heads are not summed over), which is
    undone in float32.
    """
    if facts.dtype != "float16":
        return _dot(equation, a, b, facts)
    peak = jnp.max(jnp.abs(a), 1 if per_head else (1, 2), keepdims=True)  # [B, 1, H] or [B, 1, 1]
    exponent = jnp.where(jnp.isfinite(peak) & (peak > 0), jnp.frexp(peak)[1], 0)
    product = _dot(equation, jnp.ldexp(a, 14 - exponent), b, facts)
    undo = jnp.swapaxes(exponent, 1, 2) if per_head else exponent
    return jnp.ldexp(product, undo - 14)


def _add_rows(dkv, row, updates):
    """``dkv[row] += updates``; ``row [B, K], updates [B, K, D]``; rows past the end are dropped."""
    return dkv.at[row].add(updates, mode="drop")


def _add_rows_in_order(dkv, row, updates):
    """The same bit for bit in every run, one query after the other; ``row`` sorted along K.

    Slots of one query that name the same row have equal updates (equal keys, equal logits): the
    first brings the update times their number, the others are dropped. What is left is unique and
    needs no atomic adds.
    """
    slot = lax.broadcasted_iota(jnp.int32, row.shape, 1)
    first = jnp.concatenate([jnp.ones_like(row[:, :1], bool), row[:, 1:] != row[:, :-1]], 1)
    start = jnp.where(first, slot, row.shape[1])
    following = lax.cummin(
        jnp.pad(start[:, 1:], [(0, 0), (0, 1)], constant_values=row.shape[1]), axis=1, reverse=True
    )
    number = jnp.where(first, following - slot, 0)  # [B, K]: slots that name this row
    row = jnp.where(first, row, len(dkv) + slot)
    updates = updates * number[..., None].astype(updates.dtype)

    def add(b, dkv):
        return dkv.at[row[b]].add(updates[b], mode="drop", unique_indices=True)

    return lax.fori_loop(0, len(row), add, dkv)
