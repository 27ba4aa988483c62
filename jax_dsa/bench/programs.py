"""What is timed: shapes, operands, and the programs of implementations and naive formulations.

``naive`` is what a user would write: gather all keys, softmax, differentiated by JAX; ``naive_map``
does so for 32 queries at a time under ``jax.checkpoint`` and ``lax.map``.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_dsa import api, dispatch, vjp
from jax_dsa.problem import Facts, Problem

KINDS = ("forward", "backward", "gradient")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named problem: S queries, T keys, H heads, K slots, width D, value width 512 or D."""

    queries: int
    keys: int
    heads: int
    topk: int
    head_dim: int = 576

    @property
    def value_dim(self) -> int:
        return 512 if self.head_dim == 576 else self.head_dim

    def problem(self, dtype: str) -> Problem:
        facts = Facts(dtype, self.head_dim**-0.5, self.value_dim, False)
        return Problem((), self.queries, self.heads, self.head_dim, self.keys, self.topk, facts)

    def flops(self, kind: str, dtype: str) -> int:
        """Floating-point operations of the algorithm itself, none for recomputation."""
        problem = self.problem(dtype)
        forward, backward = (problem.flops(backward=b) for b in (False, True))
        return {"forward": forward, "backward": backward, "gradient": forward + backward}[kind]


SHAPES = {
    "tiny": Shape(32, 64, 4, 16, 64),
    "cpu": Shape(512, 2048, 16, 256),
    "linear_2048": Shape(2048, 2048, 16, 512),
    "linear_4096": Shape(4096, 4096, 16, 512),
    "v32_h16": Shape(4096, 8192, 16, 2048),
    "v32_h64": Shape(4096, 8192, 64, 2048),
    "v32_h128": Shape(4096, 8192, 128, 2048),
    "train_h64": Shape(8192, 8192, 64, 1024),
    "d512_h64": Shape(4096, 8192, 64, 1024, 512),
    "long_h64": Shape(4096, 131072, 64, 2048),
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """``q [S, H, D]``, ``kv [T, D]``, ``indices [S, K]``, ``dout [S, H, V]``, and what a backward
    pass keeps of the forward pass: ``out [S, H, V]``, ``lse [S, H]``."""

    q: jax.Array
    kv: jax.Array
    indices: jax.Array
    dout: jax.Array
    out: jax.Array | None = None
    lse: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A call to time, and how many bytes of its own it takes on the device (None: not known)."""

    run: Callable[[], object]
    temp_bytes: int | None = None


def naive(q, kv, indices, value_dim: int):
    """All keys gathered at once: memory S K D."""
    keys = kv[indices]
    s = jnp.einsum("shd,skd->shk", q, keys, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(s * q.shape[-1] ** -0.5, -1).astype(q.dtype)
    values = keys[..., :value_dim]
    return jnp.einsum("shk,skv->shv", p, values, preferred_element_type=jnp.float32).astype(q.dtype)


def naive_map(q, kv, indices, value_dim: int, block: int = 32):
    """``naive`` for a block of queries at a time, recomputed in the backward pass."""
    body = jax.checkpoint(lambda kv, x: naive(x[0], kv, x[1], value_dim))
    blocks = [x.reshape(-1, min(block, len(x)), *x.shape[1:]) for x in (q, indices)]
    return jax.lax.map(lambda x: body(kv, x), tuple(blocks)).reshape(*q.shape[:2], value_dim)


NAIVE = {"naive": naive, "naive_map": naive_map}


def attention(name: str, value_dim: int) -> Callable:
    """``q, kv, indices -> out`` of an implementation's or a naive formulation's name."""
    if name in NAIVE:
        return functools.partial(NAIVE[name], value_dim=value_dim)
    return functools.partial(api.sparse_attention, value_dim=value_dim, implementation=name)


def gradient(forward: Callable) -> Callable:
    """``q, kv, indices, dout -> dq, dkv``: forward and backward pass together."""

    def run(q, kv, indices, dout):
        return jax.vjp(lambda q, kv: forward(q, kv, indices), q, kv)[1](dout)

    return run


def backward(name: str, facts: Facts) -> Callable:
    """``q, kv, indices, out, lse, dout -> dq, dkv``, in the dtype of q: the backward pass alone."""

    def run(q, kv, indices, out, lse, dout):
        length = jnp.full(indices.shape[:-1], indices.shape[-1], jnp.int32)
        sink = jnp.full(q.shape[-2:-1], -jnp.inf, jnp.float32)
        residuals = (q, kv, indices, length, sink, out, lse)
        cotangents = dout, jnp.zeros_like(lse)
        dq, dkv, *_ = vjp.backward(vjp.Call(facts, name), residuals, cotangents)
        return dq.astype(q.dtype), dkv.astype(kv.dtype)

    return run


def operands(shape: Shape, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    """Standard normal q, kv, dout; for every query K distinct rows in random order."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, *dims: jax.random.normal(key, dims, jnp.dtype(dtype))  # noqa: E731
    choose = lambda key: jax.random.permutation(key, shape.keys)[: shape.topk]  # noqa: E731
    indices = jax.lax.map(choose, jax.random.split(keys[2], shape.queries)).astype(jnp.int32)
    q = normal(keys[0], shape.queries, shape.heads, shape.head_dim)
    kv = normal(keys[1], shape.keys, shape.head_dim)
    return q, kv, indices, normal(keys[3], shape.queries, shape.heads, shape.value_dim)


def with_residuals(shape: Shape, dtype: str) -> Operands:
    """Operands and the residuals of a backward pass, by the implementation that None chooses."""
    q, kv, indices, dout = operands(shape, dtype)
    attend = functools.partial(api.sparse_attention, value_dim=shape.value_dim, return_lse=True)
    out, lse = jax.jit(attend)(q, kv, indices)
    return Operands(q, kv, indices, dout, out, lse)


def program(name: str, kind: str, shape: Shape, dtype: str, given: Operands) -> Program | None:
    """The compiled program of an implementation or a naive formulation; None: it has no such."""
    common = (given.q, given.kv, given.indices)
    if kind == "forward":
        fn, args = attention(name, shape.value_dim), common
    elif kind == "gradient":
        fn, args = gradient(attention(name, shape.value_dim)), (*common, given.dout)
    elif name not in NAIVE and name != "reference":
        problem = shape.problem(dtype)
        dispatch.choose(problem, name)
        fn, args = backward(name, problem.facts), (*common, given.out, given.lse, given.dout)
    else:
        return None
    compiled = jax.jit(fn).lower(*args).compile()
    memory = compiled.memory_analysis()
    temp = None if memory is None else memory.temp_size_in_bytes
    return Program(functools.partial(compiled, *args), temp)
