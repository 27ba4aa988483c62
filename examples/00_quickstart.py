"""Sparse attention and its gradients, checked against the definition. Runs anywhere."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_dsa

# Each query attends, in H heads, to K rows of kv. A row is key and, in its first columns, value.
S, T, H, D, K = 64, 256, 4, 64, 32
keys = jax.random.split(jax.random.key(0), 3)
q, kv = jax.random.normal(keys[0], (S, H, D)), jax.random.normal(keys[1], (T, D))
indices = jax.random.randint(keys[2], (S, K), 0, T, jnp.int32)


def loss(q, kv, implementation):
    out = jax_dsa.sparse_attention(q, kv, indices, value_dim=48, implementation=implementation)
    return jnp.sum(out**2)  # out: [S, H, 48]


print(jax_dsa.explain(q, kv, indices, value_dim=48))
attend = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
value, (dq, dkv) = attend(q, kv, None)
expected, (expected_dq, expected_dkv) = attend(q, kv, "reference")
for got, want in ((value, expected), (dq, expected_dq), (dkv, expected_dkv)):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
print(f"loss {value:.4f}, dq {dq.shape} and dkv {dkv.shape} agree with the reference")
