"""From what the caller passed to a Problem and canonical operands.

The only place that raises for the caller's mistakes; behind it nobody checks again.
"""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.problem import Facts, Problem, float_dtypes


def problem(
    q,
    kv,
    indices,
    *,
    topk_length=None,
    attn_sink=None,
    scale=None,
    value_dim=None,
    deterministic=False,
) -> Problem:
    """Checks shapes, dtypes and options of arrays, or of anything with ``shape`` and ``dtype``.

    Raises:
        TypeError: a wrong dtype or kind of argument.
        ValueError: a wrong rank, shape or value.
    """
    dtype = check_float("q", q)
    if check_float("kv", kv) != dtype:
        raise TypeError(f"kv: got dtype {kv.dtype}, want q's dtype {dtype}; cast one of the two")
    check_int32("indices", indices)
    for name, x, ndim, dims in (
        ("q", q, 3, "S, H, D"),
        ("kv", kv, 2, "T, D"),
        ("indices", indices, 2, "S, K"),
    ):
        if len(x.shape) < ndim:
            raise ValueError(f"{name}: got shape {_shape(x)}, want [..., {dims}]")
    *batch, queries, heads, head_dim = q.shape
    keys, topk = kv.shape[-2], indices.shape[-1]
    _check_shape("kv", kv, (*batch, keys, head_dim), "[..., T, D]", q)
    _check_shape("indices", indices, (*batch, queries, topk), "[..., S, K]", q)
    if topk_length is not None:
        check_int32("topk_length", topk_length)
        _check_shape("topk_length", topk_length, (*batch, queries), "[..., S]", q)
    if attn_sink is not None:
        sink(attn_sink, heads)
    if head_dim == 0:
        raise ValueError(f"q: got shape {_shape(q)}, want a last dimension (D) of at least 1")
    flag("deterministic", deterministic)
    facts = Facts(
        str(dtype), _scale(scale, head_dim), _value_dim(value_dim, head_dim), bool(deterministic)
    )
    return Problem(tuple(batch), queries, heads, head_dim, keys, topk, facts)


def canonical(p: Problem, q, kv, indices, topk_length, attn_sink) -> tuple[jax.Array, ...]:
    """The operands every implementation takes: with lengths and a sink, and with batch axes.

    Returns:
        q ``[*B, S, H, D]``, kv ``[*B, T, D]``, indices ``[*B, S, K]``, topk_length ``[*B, S]`` and
        sink ``[*1, H]`` in the accumulation dtype. Without lengths every slot counts, without a
        sink its logit is -inf.
    """
    if topk_length is None:
        topk_length = jnp.full((*p.batch, p.queries), p.topk, jnp.int32)
    if attn_sink is None:
        attn_sink = jnp.full((p.heads,), -jnp.inf, p.facts.accum_dtype)
    logit = jnp.asarray(attn_sink).astype(p.facts.accum_dtype)
    logit = logit.reshape((1,) * len(p.batch) + (p.heads,))
    return jnp.asarray(q), jnp.asarray(kv), jnp.asarray(indices), jnp.asarray(topk_length), logit


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {value!r}, want True or False")


def sink(attn_sink: Any, heads: int) -> None:
    """Checks a sink: real floating ``[H]``."""
    check_real("attn_sink", attn_sink)
    if _shape(attn_sink) != (heads,):
        raise ValueError(f"attn_sink: got shape {_shape(attn_sink)}, want [H] = {(heads,)}")


def _shape(x) -> tuple[int, ...]:
    return tuple(x.shape)


def _dtype(name: str, x: Any) -> np.dtype:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: got {type(x).__name__}, want a JAX or NumPy array")
    return np.dtype(x.dtype)


def check_float(name: str, x: Any) -> np.dtype:
    dtype = _dtype(name, x)
    if dtype not in float_dtypes():
        raise TypeError(f"{name}: got dtype {dtype}, want bfloat16, float16, float32 or float64")
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def check_real(name: str, x: Any) -> None:
    if not jnp.issubdtype(_dtype(name, x), jnp.floating):
        raise TypeError(f"{name}: got dtype {x.dtype}, want a real floating dtype")


def check_int32(name: str, x: Any) -> None:
    # Before JAX canonicalises: an int64 array would silently become int32, large values wrapped.
    if _dtype(name, x) != np.int32:
        raise TypeError(f"{name}: got dtype {x.dtype}, want int32; cast it with .astype('int32')")


def _check_shape(name: str, x: Any, want: tuple[int, ...], dims: str, q: Any) -> None:
    if _shape(x) != want:
        raise ValueError(
            f"{name}: got shape {_shape(x)}, want {dims} = {want} for q of shape {_shape(q)}"
        )


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, jax.Array):
        raise TypeError(
            "scale: got a JAX array, want a Python or NumPy number: multiply q by it instead"
        )
    if isinstance(scale, np.ndarray) and scale.ndim == 0:
        scale = scale[()]
    if not isinstance(scale, numbers.Real | np.floating | np.integer) or isinstance(
        scale, bool | np.bool_
    ):
        raise TypeError(f"scale: got {type(scale).__name__}, want a Python or NumPy real number")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"scale: got {scale}, want a finite number > 0; the default is D ** -0.5")
    return number


def _value_dim(value_dim: Any, head_dim: int) -> int:
    if value_dim is None:
        return 512 if head_dim == 576 else head_dim
    if isinstance(value_dim, jax.Array):
        raise TypeError("value_dim: got a JAX array, want a Python or NumPy integer: it is a shape")
    if not isinstance(value_dim, int | np.integer) or isinstance(value_dim, bool):
        raise TypeError(f"value_dim: got {value_dim!r}, want an integer")
    if not 1 <= value_dim <= head_dim:
        raise ValueError(f"value_dim: got {value_dim}, want 1 <= value_dim <= D = {head_dim}")
    return int(value_dim)
