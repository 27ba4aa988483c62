"""Inputs of the controls and the float64 definition that their results are compared with. NumPy
only.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
VALUE_DIM = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: S queries of H heads, T keys, K slots; ``lengths`` per query (default: K); seed
    of the inputs.

    ``sink``: False gives every head a sink of -inf (release 1.26 ignores sinks at head_dim 576).
    ``exact``: inputs whose products and sums are exact in every order, so that results must be
      bitwise right.
    """

    head_dim: int
    S: int = 1
    T: int = 256
    K: int = 128
    H: int = 64
    lengths: tuple[int, ...] = ()
    seed: int = 0
    sink: bool = True
    exact: bool = False

    @property
    def length(self) -> np.ndarray:
        return np.array(self.lengths or (self.K,) * self.S, np.int32)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q [S, H, D], kv [T, D], out, dout [S, H, 512] bfloat16; lse [S, H], sink [H] float32; indices
    [S, K], lengths [S].
    """

    q: np.ndarray
    kv: np.ndarray
    out: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    sink: np.ndarray
    indices: np.ndarray
    lengths: np.ndarray
    scale: float


def make(case: Case) -> Inputs:
    """Random or exact inputs with the forward results that a backward takes."""
    rng = np.random.default_rng(case.seed)
    builder = _exact if case.exact else _normal
    q, kv, dout, sink, scale = builder(case, rng)
    indices = np.stack([_slots(case, rng) for _ in range(case.S)]).astype(np.int32)
    out, lse = forward(q, kv, indices, case.length, sink, scale)
    if case.exact:
        out = np.round(out)  # the rows cancel in pairs; exp and log leave 1e-17 of them
    return Inputs(
        q, kv, out.astype(BF16), dout, lse.astype(np.float32), sink, indices, case.length, scale
    )


def _slots(case: Case, rng: np.random.Generator) -> np.ndarray:
    """K different rows; for exact cases whole pairs (2i, 2i + 1), so that out cancels."""
    if case.exact:
        pairs = rng.permutation(case.T // 2)[: case.K // 2]
        return rng.permutation(np.concatenate((2 * pairs, 2 * pairs + 1)))
    return (
        rng.permutation(case.T)[: case.K] if case.K <= case.T else rng.integers(0, case.T, case.K)
    )


def _normal(case: Case, rng: np.random.Generator):
    shapes = (case.S, case.H, case.head_dim), (case.T, case.head_dim), (case.S, case.H, VALUE_DIM)
    q, kv, dout = (rng.standard_normal(s).astype(BF16) for s in shapes)
    sink = (
        rng.standard_normal(case.H).astype(np.float32)
        if case.sink
        else np.full(case.H, -np.inf, np.float32)
    )
    return q, kv, dout, sink, float(np.float32(case.head_dim**-0.5))


def _exact(case: Case, rng: np.random.Generator):
    """Queries and keys live on disjoint dimensions (all logits 0), key rows in pairs +w, -w (out =
    0, Delta = 0).
    """
    D = case.head_dim
    q = np.zeros((case.S, case.H, D))
    q[..., 256:] = rng.integers(-2, 3, (case.S, case.H, D - 256))
    kv = np.zeros((case.T, D))
    w = rng.integers(-2, 3, (case.T // 2, 256))
    kv[0::2, :256], kv[1::2, :256] = w, -w
    dout = np.zeros((case.S, case.H, VALUE_DIM))
    dout[..., rng.permutation(256)[:4]] = rng.choice([-1, 1], (case.S, case.H, 4))
    sink = np.full(case.H, -np.inf, np.float32)
    return q.astype(BF16), kv.astype(BF16), dout.astype(BF16), sink, 2.0**-4


def _logits(q, kv, indices, length, scale):
    """(keys [n, D], scores [H, n]) of one query, float64."""
    keys = kv[indices[:length]].astype(np.float64)
    return keys, scale * (q.astype(np.float64) @ keys.T)


def forward(q, kv, indices, lengths, sink, scale) -> tuple[np.ndarray, np.ndarray]:
    """(out [S, H, 512], lse [S, H]) in float64; lse without the sink, -inf for an empty row."""
    S, H, _ = q.shape
    out, lse = np.zeros((S, H, VALUE_DIM)), np.full((S, H), -np.inf)
    for s in range(S):
        if lengths[s] <= 0:
            continue
        keys, scores = _logits(q[s], kv, indices[s], lengths[s], scale)
        lse[s] = _log_sum_exp(scores)
        total = np.logaddexp(lse[s], sink.astype(np.float64))
        out[s] = np.exp(scores - total[:, None]) @ keys[:, :VALUE_DIM]
    return out, lse


def _log_sum_exp(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=1)
    return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def backward(x: Inputs) -> dict[str, np.ndarray]:
    """dq, dkv, d_sink in float64, from the definition (Delta from the exact output)."""
    S, H, D = x.q.shape
    dq, dkv, d_sink = np.zeros((S, H, D)), np.zeros(x.kv.shape), np.zeros(H)
    out, lse = forward(x.q, x.kv, x.indices, x.lengths, x.sink, x.scale)
    sink = x.sink.astype(np.float64)
    for s in range(S):
        n = int(x.lengths[s])
        if n <= 0:
            continue
        keys, scores = _logits(x.q[s], x.kv, x.indices[s], n, x.scale)
        dout = x.dout[s].astype(np.float64)
        delta = (dout * out[s]).sum(axis=1)
        total = np.logaddexp(lse[s], sink)
        p = np.exp(scores - total[:, None])
        ds = p * (dout @ keys[:, :VALUE_DIM].T - delta[:, None])
        dq[s] = x.scale * ds @ keys
        rows = x.scale * ds.T @ x.q[s].astype(np.float64)
        rows[:, :VALUE_DIM] += p.T @ dout
        np.add.at(dkv, x.indices[s, :n], rows)
        d_sink -= np.exp(sink - total) * delta
    return {"dq": dq, "dkv": dkv, "d_sink": d_sink}


def relative(result: np.ndarray, reference: np.ndarray) -> float:
    """||result - reference|| / ||reference||, NaN counted as infinite."""
    difference = result.astype(np.float64) - reference
    if not np.isfinite(difference).all():
        return float("inf")
    return float(np.linalg.norm(difference) / max(np.linalg.norm(reference), 1e-300))
