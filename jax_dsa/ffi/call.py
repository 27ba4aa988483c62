"""One device's operands to a custom call. Attributes are facts of the problem, never an arch."""

import jax
import numpy as np

from jax_dsa.problem import Facts

FORWARD, BACKWARD = "jax_dsa_fwd_v1", "jax_dsa_bwd_v1"
# Version of operands, results and attributes; the launcher refuses another.
ABI = 1


def forward(facts: Facts, q, kv, indices, topk_length, sink) -> list[jax.Array]:
    """``out [G, S, H, value_dim]`` in ``facts.dtype`` and ``lse [G, S, H]`` float32.

    Args:
        facts: facts of the call.
        q: ``[G, S, H, D]``.
        kv: ``[G, T, D]``.
        indices: int32 ``[G, S, K]``.
        topk_length: int32 ``[G, S]``.
        sink: float32 ``[1 or G, H]``.
    """
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], facts.value_dim), facts.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], np.float32),
    )
    return _call(FORWARD, facts, results, q, kv, indices, topk_length, sink)


def backward(facts: Facts, q, kv, indices, topk_length, lse, alpha, beta, dout) -> list[jax.Array]:
    """``dq [G, S, H, D]`` in ``facts.dtype`` and ``dkv [G, T, D]`` float32.

    Args:
        facts: facts of the call.
        q, kv, indices, topk_length: as for `forward`.
        lse, alpha, beta: float32 ``[G, S, H]``; formulas: ``vjp.py``.
        dout: ``[G, S, H, value_dim]``.
    """
    results = (
        jax.ShapeDtypeStruct(q.shape, facts.dtype),
        jax.ShapeDtypeStruct(kv.shape, np.float32),
    )
    operands = (q, kv, indices, topk_length, lse, alpha, beta, dout)
    return _call(BACKWARD, facts, results, *operands)


def _call(target: str, facts: Facts, results, *operands) -> list[jax.Array]:
    attributes = {
        "scale": np.float64(facts.scale),
        "value_dim": np.int64(facts.value_dim),
        "abi": np.int64(ABI),
    }
    called = jax.ffi.ffi_call(target, results)(*operands, **attributes)
    # XLA fuses a custom call with the slice of a loop's results that it is written to, and runs it
    # a second time for its other users: the forward kernel twice a layer in a scan over layers.
    return jax.lax.optimization_barrier(called)
