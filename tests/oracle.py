"""The contract's formulas in NumPy float64, one query at a time: the measure of all others.

s_i = scale q . kv_i      lse = ln sum exp(s_i)      lse* = ln(exp(lse) + exp(sink))
P_i = exp(s_i - lse*)     out = sum P_i v_i          Delta = dout . out
dS_i = P_i (dout . v_i - Delta) + dlse exp(s_i - lse)
dq = scale sum dS_i kv_i  dkv_j = scale sum dS_i q + [sum P_i dout, 0]
dsink = -sum exp(sink - lse*) Delta
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Values:
    """``out [*B, S, H, V]`` and ``lse [*B, S, H]``, float64."""

    out: np.ndarray
    lse: np.ndarray


@dataclasses.dataclass(frozen=True)
class Gradients:
    """``dq [*B, S, H, D]``, ``dkv [*B, T, D]`` and ``dsink [H]``, float64."""

    dq: np.ndarray
    dkv: np.ndarray
    dsink: np.ndarray


def forward(operands: Any, *, scale: float | None = None, value_dim: int | None = None) -> Values:
    """Out and lse of ``operands = (q, kv, indices, topk_length or None, attn_sink or None)``."""
    return _run(operands, scale, value_dim, None, None)[0]


def backward(
    operands: Any, dout: Any, dlse: Any, *, scale: float | None = None, value_dim: int | None = None
) -> Gradients:
    """Gradients of ``sum(dout out) + sum(dlse lse)``, over rows that have an lse."""
    return _run(operands, scale, value_dim, dout, dlse)[1]


def valid_slots(operands: Any) -> np.ndarray:
    """Bool ``[*B, S, K]``: the slots that count."""
    _, kv, indices, length, _ = operands
    indices = np.asarray(indices).astype(np.int64)
    if length is None:
        length = np.full(indices.shape[:-1], indices.shape[-1])
    within = np.arange(indices.shape[-1]) < np.asarray(length).astype(np.int64)[..., None]
    return within & (indices >= 0) & (indices < kv.shape[-2])


def _run(operands, scale, value_dim, dout, dlse) -> tuple[Values, Gradients]:
    q, kv, indices, _, sink = operands
    q, kv = np.asarray(q).astype(np.float64), np.asarray(kv).astype(np.float64)
    *batch, queries, heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    value_dim = (512 if head_dim == 576 else head_dim) if value_dim is None else value_dim
    sink = np.full(heads, -np.inf) if sink is None else np.asarray(sink).astype(np.float64)
    values = Values(
        np.zeros((*batch, queries, heads, value_dim)), np.full((*batch, queries, heads), -np.inf)
    )
    gradients = Gradients(np.zeros_like(q), np.zeros_like(kv), np.zeros(heads))
    dout = np.zeros_like(values.out) if dout is None else np.asarray(dout).astype(np.float64)
    dlse = np.zeros_like(values.lse) if dlse is None else np.asarray(dlse).astype(np.float64)
    valid = valid_slots(operands)
    for at in np.ndindex(*batch, queries):
        rows = np.asarray(indices)[at][valid[at]]
        if rows.size:
            values.out[at], values.lse[at], dq, dkv_rows, dsink = _query(
                q[at], kv[at[:-1]][rows], sink, scale, dout[at], dlse[at]
            )
            gradients.dq[at] = dq
            np.add.at(gradients.dkv[at[:-1]], rows, dkv_rows)
            gradients.dsink[:] += dsink
    return values, gradients


def _query(q, keys, sink, scale, dout, dlse):
    """One query, n >= 1 keys: ``q [H, D], keys [n, D], sink [H], dout [H, V], dlse [H]``."""
    value = keys[:, : dout.shape[-1]]
    s = scale * q @ keys.T  # [H, n]
    top = s.max(-1)
    lse = top + np.log(np.exp(s - top[:, None]).sum(-1))
    e = np.exp(s - top[:, None]) / np.exp(s - top[:, None]).sum(-1, keepdims=True)
    # exp(lse - lse*) and exp(sink - lse*), never inf - inf, and ln n is not lost beside a large s.
    keys_share = np.exp(-np.logaddexp(0, sink - lse))
    sink_share = np.exp(-np.logaddexp(0, lse - sink))
    p = keys_share[:, None] * e
    out = p @ value
    delta = (dout * out).sum(-1)
    ds = p * (dout @ value.T - delta[:, None]) + dlse[:, None] * e
    dkv_rows = scale * ds.T @ q
    dkv_rows[:, : value.shape[-1]] += p.T @ dout
    return out, lse, scale * ds @ keys, dkv_rows, -sink_share * delta
