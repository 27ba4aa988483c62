"""The public functions of sparse attention: check, choose, distribute, attend."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import export

from jax_dsa import dispatch, operations, reference, sharding, validate, vjp

# For ``jax.export.export(..., disabled_checks=)``: the custom calls an exported program may hold.
EXPORT_DISABLED_CHECKS = [
    export.DisabledSafetyCheck.custom_call(n) for n in ("jax_dsa_fwd_v1", "jax_dsa_bwd_v1")
]


@overload
def sparse_attention(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    topk_length: Any = ...,
    attn_sink: Any = ...,
    scale: float | None = ...,
    value_dim: int | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | Sequence[str] | None = ...,
    deterministic: bool = ...,
) -> jax.Array: ...
@overload
def sparse_attention(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    topk_length: Any = ...,
    attn_sink: Any = ...,
    scale: float | None = ...,
    value_dim: int | None = ...,
    return_lse: Literal[True],
    implementation: str | Sequence[str] | None = ...,
    deterministic: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def sparse_attention(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    topk_length: Any = ...,
    attn_sink: Any = ...,
    scale: float | None = ...,
    value_dim: int | None = ...,
    return_lse: bool,
    implementation: str | Sequence[str] | None = ...,
    deterministic: bool = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def sparse_attention(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    topk_length: Any = None,
    attn_sink: Any = None,
    scale: float | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
    deterministic: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of every query over the keys that its row of ``indices`` names.

    For query t and head h, slot i is valid iff ``i < topk_length[t]`` and
    ``0 <= indices[t, i] < T``. Over valid slots::

        s_i  = scale * q[t, h] . kv[indices[t, i]]
        lse  = ln sum_i exp(s_i)
        lse* = ln(exp(lse) + exp(attn_sink[h]))
        P_i  = exp(s_i - lse*)
        out  = sum_i P_i kv[indices[t, i], :value_dim]

    A query without a valid slot gives out 0, lse -inf, gradients 0. An index listed m times counts
    m times. Nothing is assumed about causality or order. Values of indices are never an error.
    Sums run in float32 (float64 for float64 operands) and results are cast once.

    Works under jit, grad, vmap, checkpoint, shard_map, export, and with operands sharded along
    batch axes, S and H. Source: DeepSeek-V3.2 technical report, arXiv 2512.02556.

    Args:
        q: ``[..., S, H, D]``, bfloat16, float16, float32 or float64.
        kv: ``[..., T, D]``, q's dtype; a row is the key and, in its first columns, the value.
        indices: int32 ``[..., S, K]``, rows of kv in any order.
        topk_length: int32 ``[..., S]``: only the first so many slots count. Default: all.
        attn_sink: real floating ``[H]``: logit of one extra, value-less key per head. Default:
            none, that is -inf.
        scale: finite number > 0, factor of the logits. Default ``D ** -0.5``.
        value_dim: columns of kv that are the value, 1 to D. Default 512 where D is 576, else D.
        return_lse: also return lse, in natural-log units, without the sink.
        implementation: ``"reference"``, ``"xla"`` or ``"cutedsl"``; a sequence of them, to try in
            order; or None, to choose.
        deterministic: gradients are bitwise equal from run to run of one compiled program.

    Returns:
        out ``[..., S, H, value_dim]`` in q's dtype, or ``(out, lse)`` with lse ``[..., S, H]`` in
        float32 (float64 for float64 operands).

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: the named implementation cannot serve the call, or its derivative.
        ExceptionGroup: none of a sequence of implementations can.
    """
    problem = validate.problem(
        q,
        kv,
        indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
        scale=scale,
        value_dim=value_dim,
        deterministic=deterministic,
    )
    validate.flag("return_lse", return_lse)
    name = dispatch.choose(problem, implementation)
    operands = validate.canonical(problem, q, kv, indices, topk_length, attn_sink)
    rule, accum = operations.FORWARD, problem.facts.accum_dtype
    if problem.empty:
        out, lse = _nothing_to_attend(problem, operands[0])
    elif name == "reference":
        attend = functools.partial(reference.attention, problem.facts)
        out, lse = sharding.distribute(attend, rule, accum, operands, _NAMES)
    else:
        settled = sharding.settle(rule, accum, operands, _NAMES)
        out, lse = vjp.attention(vjp.Call(problem.facts, name), *settled)
    return (out, lse) if return_lse else out


_NAMES = ("q", "kv", "indices", "topk_length", "attn_sink")


def _nothing_to_attend(problem, q):
    out = jnp.zeros_like(q[..., : problem.facts.value_dim])
    return out, jnp.full_like(q[..., 0], -jnp.inf, dtype=problem.facts.accum_dtype)


def explain(q: Any, kv: Any, indices: Any, **options: Any) -> dispatch.Explanation:
    """Which implementation would serve `sparse_attention` with these arguments, and why not others.

    Args:
        q, kv, indices: arrays, or anything with ``shape`` and ``dtype`` (``jax.ShapeDtypeStruct``).
        **options: keyword arguments of `sparse_attention`.

    Returns:
        The choice as data: ``chosen``, and in ``reasons`` for each implementation why it cannot
        serve the call, or None.

    Raises:
        As `sparse_attention`.
    """
    options.pop("return_lse", None)
    implementation = options.pop("implementation", None)
    return dispatch.explain(validate.problem(q, kv, indices, **options), implementation)


def merge_partials(outs, lses, attn_sink=None) -> tuple[jax.Array, jax.Array]:
    """Combines attention over disjoint sets of keys into attention over all of them.

    ``lse = ln sum_n exp(lse_n)``, ``out = sigmoid(lse - attn_sink) sum_n exp(lse_n - lse) out_n``.
    The parts are computed without a sink. One in which a query had no key (lse -inf) weighs
    nothing; gradients are finite also where all are empty.

    Args:
        outs: N arrays ``[..., H, value_dim]`` of one dtype: a sequence, or an array with axis 0.
        lses: N arrays ``[..., H]``, natural log: a sequence, or an array with axis 0.
        attn_sink: ``[H]``, applied once, here. Default: none.

    Returns:
        out ``[..., H, value_dim]`` in the dtype of the parts; lse ``[..., H]`` without the sink.

    Raises:
        ValueError: no parts, numbers of parts that differ, or shapes that do not fit.
    """
    outs, lses = [jnp.asarray(o) for o in outs], [jnp.asarray(x) for x in lses]
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_partials: got {len(outs)} outs and {len(lses)} lses, want as many of each"
        )
    for n, (o, x) in enumerate(zip(outs, lses, strict=True)):
        if o.shape != outs[0].shape or x.shape != outs[0].shape[:-1]:
            raise ValueError(
                f"merge_partials: part {n} has out {o.shape} and lse {x.shape}, "
                f"want {outs[0].shape} and {outs[0].shape[:-1]} as the first part's out says"
            )
    accum = jnp.promote_types(lses[0].dtype, jnp.float32)
    lse_parts = jnp.stack(lses).astype(accum)  # [N, ..., H]
    some = lse_parts.max(0) != -jnp.inf
    top = jax.lax.stop_gradient(jnp.where(some, lse_parts.max(0), 0))
    weights = jnp.where(
        lse_parts == -jnp.inf,
        0,
        jnp.exp(jnp.where(lse_parts == -jnp.inf, 0, lse_parts - top[None])),
    )
    total = jnp.where(some, weights.sum(0), 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    share = 1 / total
    if attn_sink is not None:
        validate.sink(attn_sink, lse.shape[-1])
        sink = jnp.asarray(attn_sink).astype(accum)
        sink = sink.reshape((1,) * (lse.ndim - 1) + sink.shape)
        share *= jax.nn.sigmoid(jnp.where(some, lse, 0) - sink)
    out = jnp.einsum(
        "n...h,n...hv->...hv",
        weights * share[None],
        jnp.stack(outs).astype(accum),
        precision="highest",
    )
    return out.astype(outs[0].dtype), lse


def gather_kv(kv: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
    """All-gathers kv along T inside ``jax.shard_map``, so that indices may name rows of the whole.

    Its gradient is reduce-scattered in float32 (float64) and cast once.

    Args:
        kv: ``[..., T / n, D]``, one device's rows.
        axis_name: the mesh axes, of n devices together, that split T.

    Returns:
        ``[..., T, D]``.

    Raises:
        ValueError: kv has fewer than two dimensions.
    """
    if kv.ndim < 2:
        raise ValueError(f"kv: got shape {kv.shape}, want [..., T, D]")
    return sharding.gather(kv, axis_name, jnp.promote_types(kv.dtype, jnp.float32)).astype(kv.dtype)


def register() -> None:
    """Registers the custom-call targets of this process's platforms and installs the kernels for
    its GPUs; idempotent.

    Call it before running a program deserialised by ``jax.export``. What is missing is logged as a
    warning: such a program may hold no custom call, and one that does names what it lacks.
    """
    dispatch.register()
