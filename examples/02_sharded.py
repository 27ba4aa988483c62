"""What 00_quickstart.py does, on several devices: batch, queries and heads split over a mesh.

Under jit, sparse_attention is split as its operands are; inside shard_map every device calls it on
its own part. Both are checked against one device, values and gradients. A CPU plays 8 devices here.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_dsa

B, S, T, H, D, K = 2, 64, 128, 4, 32, 16
Q_SPEC = PartitionSpec("data", "seq", "heads", None)
INDEX_SPEC = PartitionSpec("data", "seq", None)
KV_SPEC = PartitionSpec("data", None, None)  # all keys on every device that shares a batch element
KV_SPLIT_SPEC = PartitionSpec("data", "seq", None)


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, kv = jax.random.normal(keys[0], (B, S, H, D)), jax.random.normal(keys[1], (B, T, D))
    return q, kv, jax.random.randint(keys[2], (B, S, K), 0, T, jnp.int32)


def value_and_gradients(attend, q, kv, indices):
    """The sum of squares of ``attend(q, kv, indices)`` and its gradients by q and kv."""

    def loss(q, kv):
        return jnp.sum(attend(q, kv, indices) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(q, kv)


def make_mesh(kind: AxisType) -> Mesh:
    """data=2, seq=2, heads=2 on 8 devices; on fewer, axes of size 1, data first."""
    ways = [2 if jax.device_count() >= n else 1 for n in (8, 4, 2)]
    return jax.make_mesh(tuple(ways), ("data", "seq", "heads"), axis_types=(kind,) * 3)


def split(mesh: Mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def check(name: str, got, expected) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, jax.device_get(got), expected)
    dq = got[1][0]
    print(f"{name}: as on one device; dq is split as {dq.sharding.spec}")


def attend_locally(q, kv, indices):
    """On one device's part: indices name rows of the whole kv, so that its parts are gathered."""
    return jax_dsa.sparse_attention(q, jax_dsa.gather_kv(kv, "seq"), indices)


def main() -> None:
    arrays = operands()
    expected = jax.device_get(value_and_gradients(jax_dsa.sparse_attention, *arrays))
    print(f"{jax.device_count()} devices ({jax.default_backend()})")

    # The same call, operands that are split. Auto: the compiler decides; Explicit: the types do.
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(kind)
        parts = split(mesh, arrays, (Q_SPEC, KV_SPEC, INDEX_SPEC))
        with jax.set_mesh(mesh):
            got = value_and_gradients(jax_dsa.sparse_attention, *parts)
        check(f"jit, {kind.name} mesh {dict(mesh.shape)}", got, expected)

    # By hand: kv split along T, gathered by the caller.
    mesh, specs = make_mesh(AxisType.Auto), (Q_SPEC, KV_SPLIT_SPEC, INDEX_SPEC)
    attend = jax.shard_map(attend_locally, mesh=mesh, in_specs=specs, out_specs=Q_SPEC)
    got = value_and_gradients(attend, *split(mesh, arrays, specs))
    check("shard_map, kv split along T", got, expected)


if __name__ == "__main__":
    main()
