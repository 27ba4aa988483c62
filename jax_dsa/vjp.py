"""How a call is differentiated: custom_vjp around two operations, and what is kept between them.

    E_i = exp(s_i - lse)     alpha = sigmoid(lse - sink)
    Delta = dout . out       beta = dlse - alpha Delta
    dS_i = E_i (alpha (dout . v_i) + beta)
    dq = scale sum_i dS_i kv_i
    dkv_j = scale sum dS_i q + [sum alpha E_i dout, 0]         over every slot i that names row j
    dsink = -sum sigmoid(sink - lse) Delta

Operands come in the accumulation dtype, so that parts of a gradient from several batch elements or
devices are added in it; they are cast down to the problem's dtype here, and each gradient is cast
once, by the transpose of the caller's cast.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa import operations
from jax_dsa.problem import Facts

OUT_NAME = "jax_dsa_out"
LSE_NAME = "jax_dsa_lse"

# Saves what the backward pass needs of the forward pass: the forward kernel is not run again.
checkpoint_policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call: its facts and what was chosen to serve it (`dispatch.Choice`)."""

    facts: Facts
    implementation: str | tuple[str, ...]


def attention(call: Call, q, kv, indices, topk_length, sink) -> tuple[jax.Array, jax.Array]:
    """``out [*B, S, H, value_dim], lse [*B, S, H]`` of the operands of `validate.canonical`."""
    q, kv, sink = (operations.reverse_mode_only(x, call.implementation) for x in (q, kv, sink))
    try:
        return _attention(call, q, kv, indices, topk_length, sink)
    except TypeError as error:  # raised here where a jvp is batched before it is executed
        if "custom_vjp" not in str(error):
            raise
        raise operations.no_forward_mode(call.implementation) from error


def _primal(call: Call, q, kv, indices, topk_length, sink):
    return _forward(call, q, kv, indices, topk_length, sink)[0]


def _forward(call: Call, q, kv, indices, topk_length, sink):
    # Shared with the primal rather than calling it: names do not reach through such a call.
    q, kv = q.astype(call.facts.dtype), kv.astype(call.facts.dtype)
    with jax.named_scope("jax_dsa/fwd"):
        out, lse = operations.forward(call, q, kv, indices, topk_length, sink)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, kv, indices, topk_length, sink, out, lse)


def backward(call: Call, residuals, cotangents):
    """``dq, dkv, None, None, dsink`` of ``(q, kv, indices, topk_length, sink, out, lse)``."""
    q, kv, indices, topk_length, sink, out, lse = residuals
    dout, dlse = cotangents
    accum = call.facts.accum_dtype
    with jax.named_scope("jax_dsa/bwd"):
        some = lse != -jnp.inf  # [*B, S, H]: the row has a valid slot
        delta = jnp.sum(dout.astype(accum) * out.astype(accum), -1)
        alpha = jnp.where(some, jax.nn.sigmoid(lse - sink[..., None, :]), 0)
        beta = jnp.where(some, dlse - alpha * delta, 0)
        dq, dkv = operations.backward(call, q, kv, indices, topk_length, lse, alpha, beta, dout)
        share = jnp.where(some, jax.nn.sigmoid(sink[..., None, :] - lse), 0)
        dsink = -jnp.where(
            share == 0, 0, share * delta
        )  # a sink without weight is not reached by a NaN
        dsink = dsink.sum(tuple(range(dsink.ndim - 1))).reshape(sink.shape)
    return dq.astype(accum), dkv, None, None, dsink


_attention: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attention.defvjp(_forward, backward)
