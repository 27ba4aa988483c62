"""The model of train_lm.py: a decoder whose every attention layer is ``jax_dsa.sparse_attention``.

Shapes: B windows, S = T bytes of context, E width, H heads, C a head's width, L latent, R rotary,
D = L + R, K chosen keys, HI indexer heads, DI their width.

Multi-head latent attention: a layer keeps one row per byte, shared by all heads, a latent part and
a rotary part, ``kv [T, L + R]``. Its queries are absorbed: a head's content part is multiplied by
the matrix that would have expanded the latent to that head's keys. So ``q [S, H, L + R]`` meets the
latent itself, and the result, ``out [S, H, L]``, is expanded to values afterwards. These are the
operands of ``sparse_attention`` as they stand.

The indexer, a small attention of its own, scores the bytes up to a query; the best K become
``indices``. It learns to predict where the heads look, from a detached input: no gradient passes
between it and the model, in either direction.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from lm_config import Config

import jax_dsa

Params = dict[str, Any]
# Which keys a query attends to: all up to it, those its indexer ranks highest, or K by chance.
CHOICES = ("dense", "topk", "random")


def init(c: Config, seed: int) -> Params:
    """Random parameters, float32: ``model`` and ``indexer``, each with a list of layers."""
    model = {
        "query": (c.width, c.heads, c.content + c.rotary),
        "absorb": (c.content, c.heads, c.latent),
        "latent": (c.width, c.latent),
        "rotary_key": (c.width, c.rotary),
        "expand": (c.latent, c.heads, c.content),
        "output": (c.heads * c.content, c.width),
        "up": (c.width, 4 * c.width),
        "down": (4 * c.width, c.width),
    }
    indexer = {
        "query": (c.width, c.index_heads, c.index_dim),
        "key": (c.width, c.index_dim),
        "weight": (c.width, c.index_heads),
    }
    random = np.random.default_rng(seed)

    def layers(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, np.ndarray]]:
        return [{n: normal(random, s[0], s) for n, s in shapes.items()} for _ in range(c.layers)]

    embed = normal(random, 1, (256, c.width))
    unembed = normal(random, c.width, (c.width, 256))
    model_params = {"embed": embed, "layers": layers(model), "unembed": unembed}
    return {"model": model_params, "indexer": layers(indexer)}


def normal(random: np.random.Generator, fan_in: int, shape: tuple[int, ...]) -> np.ndarray:
    return random.normal(0, fan_in**-0.5, shape).astype(np.float32)


def loss(params: Params, windows, key, c: Config, choice: str, train_indexer=False, recall=False):
    """Mean bits per byte of uint8 ``windows [B, S + 1]`` after the first; report as `predict`."""
    windows = windows.astype(jnp.int32)
    logits, report = predict(params, windows[:, :-1], key, c, choice, train_indexer, recall)
    bits = -jax.nn.log_softmax(logits) / math.log(2)
    return jnp.take_along_axis(bits, windows[:, 1:, None], -1).mean(), report


def predict(params: Params, x, key, c: Config, choice: str, train_indexer=False, recall=False):
    """What follows each byte, and what the layers report.

    Args:
        params: as from `init`.
        x: int32 ``[B, S]``, bytes.
        key: of the choice by chance.
        c: sizes.
        choice: one of ``CHOICES``.
        train_indexer: compute the indexers' losses (nats, their sum); over all keys if "dense".
        recall: measure which share of the K keys with the most attention was chosen (the mean).

    Returns:
        logits ``[B, S, 256]``, float32, and ``{"index_loss": ..., "recall": ...}``, 0 for what was
        not asked for.
    """
    params = jax.tree.map(lambda p: jnp.asarray(p, c.dtype), params)
    x = shard(params["model"]["embed"][x], "data", "seq")  # [B, S, E]
    options = {"choice": choice, "train_indexer": train_indexer, "recall": recall}
    layer = functools.partial(decoder_layer, c=c, **options)
    if c.remat:
        layer = jax.checkpoint(layer, policy=jax_dsa.checkpoint_policy)
    reports = []
    layers = zip(params["model"]["layers"], params["indexer"], strict=True)
    for number, (p, index_p) in enumerate(layers):
        x, report = layer(p, index_p, x, jax.random.fold_in(key, number))
        reports.append(report)
    logits = norm(x) @ params["model"]["unembed"]
    index_loss, recall = (sum(r[name] for r in reports) for name in ("index_loss", "recall"))
    return logits.astype(jnp.float32), {"index_loss": index_loss, "recall": recall / c.layers}


def decoder_layer(p: Params, index_p: Params, x, key, **options):
    """``x [B, S, E] -> [B, S, E]``, and the layer's report."""
    h, report = attention(p, index_p, norm(x), key, **options)
    x = x + h
    return x + jnp.square(jax.nn.relu(norm(x) @ p["up"])) @ p["down"], report


def attention(p, index_p, x, key, c: Config, choice: str, train_indexer: bool, recall: bool):
    """``x [B, S, E] -> [B, S, E]``, and the layer's report."""
    q, kv = operands(p, x, c)  # [B, S, H, D], [B, T, D]
    scored = indexer(index_p, jax.lax.stop_gradient(x), c)
    indices, length = choose(scored, key, c, choice)
    options = {"scale": c.scale, "value_dim": c.latent, "implementation": c.implementation}
    out, lse = jax_dsa.sparse_attention(
        q, kv, indices, topk_length=length, return_lse=True, **options
    )
    report = {"index_loss": jnp.zeros(()), "recall": jnp.zeros(())}
    if train_indexer:
        slots, length = (None, None) if choice == "dense" else (indices, length)
        report["index_loss"] = jax_dsa.indexer_loss(
            *scored, q, kv, lse, slots, topk_length=length, scale=c.scale
        )
    if recall:
        report["recall"] = dense_recall(q, kv, indices, c)
    values = jnp.einsum("bshl,lhc->bshc", out, p["expand"])
    return values.reshape(*x.shape[:2], -1) @ p["output"], report


def operands(p: Params, x, c: Config):
    """``x [B, S, E] -> q [B, S, H, L + R], kv [B, T, L + R]``."""
    head = jnp.einsum("bse,ehc->bshc", x, p["query"])
    content, rotary = head[..., : c.content], head[..., c.content :]
    q = jnp.concatenate([jnp.einsum("bshc,chl->bshl", content, p["absorb"]), rope(rotary)], -1)
    kv = jnp.concatenate([norm(x @ p["latent"]), rope(x @ p["rotary_key"])], -1)
    return shard(q, "data", "seq", "heads"), kv


def indexer(p: Params, x, c: Config):
    """``x [B, S, E] -> q_index [B, S, HI, DI], k_index [B, T, DI], weights [B, S, HI]``."""
    q = jnp.einsum("bse,ehd->bshd", x, p["query"])
    weights = (x @ p["weight"]) * (c.index_heads * c.index_dim) ** -0.5
    return rope(q), rope(norm(x @ p["key"])), weights


def choose(scored, key, c: Config, choice: str):
    """``indices [B, S, K], topk_length [B, S]`` of the keys a query attends to, none after it."""
    if choice == "topk":
        return jax_dsa.select_topk(*scored, k=c.topk)
    batch, context = scored[1].shape[:2]
    if choice == "random":
        return random_candidates(key, batch, context, c.topk)
    row = jnp.arange(context, dtype=jnp.int32)
    indices = jnp.broadcast_to(row, (batch, context, context))
    return indices, jnp.broadcast_to(row + 1, (batch, context))


def random_candidates(key, batch: int, context: int, topk: int):
    """K distinct keys up to each query, drawn uniformly; all of them where there are fewer."""
    queries = jnp.arange(context, dtype=jnp.int32)

    def draw(query):
        luck = jax.random.uniform(jax.random.fold_in(key, query), (batch, context))
        return jax.lax.top_k(jnp.where(queries <= query, luck, -1), topk)[1]  # [B, K]

    # Some queries at a time: the numbers of all of them would be [B, S, T].
    indices = jax.lax.map(draw, queries, batch_size=min(context, 256))
    length = jnp.broadcast_to(jnp.minimum(queries + 1, topk), (batch, context))
    return jnp.swapaxes(indices, 0, 1), length


def dense_recall(q, kv, indices, c: Config, queries: int = 256):
    """The share, among a query's chosen keys, of the K that would get the most attention of all.

    Attention is summed over the heads. Queries with at most K candidates do not count; of a long
    context evenly spaced queries do.
    """
    context = kv.shape[1]
    rows = jnp.arange(c.topk, context, max(1, (context - c.topk) // queries))
    q, indices = q[:, rows], indices[:, rows]
    logits = jnp.einsum("bshd,btd->bsht", q, kv).astype(jnp.float32) * c.scale
    causal = jnp.arange(context) <= rows[:, None]
    p = jax.nn.softmax(jnp.where(causal[:, None], logits, -jnp.inf)).sum(2)  # [B, S, T]
    wanted = jax.lax.top_k(p, c.topk)[1]
    place = jnp.arange(len(q))[:, None, None], jnp.arange(len(rows))[:, None], indices
    chosen = jnp.zeros(p.shape).at[place].set(1)
    return jnp.take_along_axis(chosen, wanted, -1).mean()


def norm(x):
    """Root-mean-square normalisation; its gain is left to the matrix that follows."""
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def rope(x):
    """Rotary embedding of ``[B, S, d]`` or ``[B, S, H, d]``: pairs (i, i + d/2) turn with s."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def shard(x, *axes: str):
    """Splits leading dimensions over the mesh axes of these names, where a mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
