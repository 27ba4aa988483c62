"""What the compiled kernels compute, in NumPy float64, as launches of a recording driver.

Formulas: ``vjp.py``. Only what the kernel's arguments say is used.
"""

import jax.numpy as jnp
import manifests
import numpy as np
import recording

WIDTH = 512


def entries(head_dim: int, dtype: str) -> list:
    facts = {"head_dim": head_dim, "dtype": dtype}
    return [manifests.entry(op, facts=facts) for op in ("forward", "backward")]


class Run:
    """Called with each launch; ``dtype`` and ``head_dim`` are facts of the kernel."""

    def __init__(self, head_dim: int, dtype: str):
        self.head_dim, self.dtype = head_dim, jnp.dtype(dtype)

    def __call__(self, launch: recording.Launch) -> None:
        a, f32, i32 = launch.arguments, np.float32, np.int32
        S, T, K, H, D = a["S"], a["T"], a["K"], a["H"], self.head_dim
        G = launch.grid[0] // S
        assert launch.grid == (G * S, -(-H // 64), 1), launch.grid
        q = recording.at(a["q"], self.dtype, G, S, H, D)
        kv = recording.at(a["kv"], self.dtype, G, T, D)
        indices = recording.at(a["indices"], i32, G, S, K)
        length = recording.at(a["topk_length"], i32, G, S)
        lse = recording.at(a["lse"], f32, G, S, H)
        for g, s in np.ndindex(G, S):
            valid = np.arange(K) < length[g, s]
            valid &= (indices[g, s] >= 0) & (indices[g, s] < T)
            rows = indices[g, s][valid]
            keys, query = kv[g][rows].astype(float), q[g, s].astype(float)
            logits = a["scale"] * query @ keys.T  # [H, valid]
            if "out" in a:
                row = a["sink"] + 4 * g * a["sink_stride"]
                out = recording.at(a["out"], self.dtype, G, S, H, WIDTH)[g, s]
                out[:], lse[g, s] = _forward(logits, keys, recording.at(row, f32, H))
                continue
            dout = recording.at(a["dout"], self.dtype, G, S, H, WIDTH)[g, s].astype(float)
            alpha, beta = (
                recording.at(a[n], f32, G, S, H)[g, s, :, None] for n in ("alpha", "beta")
            )
            weight = np.exp(logits - lse[g, s, :, None]) if rows.size else logits
            ds = a["scale"] * weight * (alpha * (dout @ keys[:, :WIDTH].T) + beta)
            recording.at(a["dq"], self.dtype, G, S, H, D)[g, s] = ds @ keys
            update = ds.T @ query
            update[:, :WIDTH] += (alpha * weight).T @ dout
            np.add.at(recording.at(a["dkv"], f32, G, T, D)[g], rows, update)


def _forward(logits, keys, sink):
    if not logits.size:
        return 0, -np.inf
    top = logits.max(1, keepdims=True)
    weight = np.exp(logits - top)
    lse = np.log(weight.sum(1)) + top[:, 0]
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(sink.astype(float) - lse))
    return (share / weight.sum(1))[:, None] * (weight @ keys[:, :WIDTH]), lse
