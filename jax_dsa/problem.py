"""The frozen facts of one call: what every implementation, rule and report speaks about."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a call apart from its shapes; static under every transformation.

    Attributes:
        dtype: dtype name of q, kv and out.
        scale: factor of the logits.
        value_dim: leading columns of kv that are the value.
        deterministic: gradients are bitwise equal from run to run.
    """

    dtype: str
    scale: float
    value_dim: int
    deterministic: bool

    @property
    def accum_dtype(self) -> np.dtype:
        """The dtype of sums, statistics and sinks: float64 for float64, else float32."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: its shapes, as in ``q [*batch, S, H, D]``, and its facts."""

    batch: tuple[int, ...]
    queries: int
    heads: int
    head_dim: int
    keys: int
    topk: int
    facts: Facts

    @property
    def empty(self) -> bool:
        """Whether no key can meet a query: answered without any implementation."""
        return 0 in (*self.batch, self.queries, self.heads, self.keys, self.topk)

    @property
    def groups(self) -> int:
        return math.prod(self.batch)

    def flops(self, *, backward: bool) -> int:
        """Floating-point operations of the matrix products the definition needs."""
        d, dv = self.head_dim, self.facts.value_dim
        widths = 3 * d + 2 * dv if backward else d + dv
        return 2 * self.groups * self.queries * self.heads * self.topk * widths

    def __str__(self) -> str:
        batch = f"batch={self.batch} " if self.batch else ""
        facts = self.facts
        return (
            f"{batch}S={self.queries} T={self.keys} H={self.heads} D={self.head_dim} "
            f"value_dim={facts.value_dim} K={self.topk} {facts.dtype}"
        )


def float_dtypes() -> tuple[np.dtype, ...]:
    """The dtypes q and kv may have."""
    return tuple(np.dtype(t) for t in (jnp.bfloat16, np.float16, np.float32, np.float64))
