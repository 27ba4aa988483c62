"""Manifest entries of kernels that do not exist, and calls that would run them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_dsa.cubins import manifest
from jax_dsa.problem import Facts

FACTS = Facts("bfloat16", 0.125, 512, False)
G, S, T, K, H, D = 2, 3, 7, 8, 65, 576
FORWARD = "q kv indices topk_length sink out lse | S T K H sink_stride | scale"
BACKWARD = "q kv indices topk_length lse alpha beta dout dq dkv | S T K H | scale"


def parameters(text: str) -> tuple[manifest.Parameter, ...]:
    """ "pointers | 32-bit integers | 32-bit floats"."""
    pointers, integers, floats = (part.split() for part in text.split("|"))
    return (
        *(manifest.Parameter(name, "pointer") for name in pointers),
        *(manifest.Parameter(name, "scalar", "i32") for name in integers),
        *(manifest.Parameter(name, "scalar", "f32") for name in floats),
    )


def entry(op: str = "forward", arch: str = "sm_90a", **changed: Any) -> manifest.Kernel:
    facts = {"head_dim": D, "value_dim": 512, "dtype": "bfloat16"} | changed.pop("facts", {})
    kernel = manifest.Kernel(
        symbol=f"{op}_{facts['dtype']}_{facts['head_dim']}",
        arch=arch,
        op=op,
        parameters=parameters(FORWARD if op == "forward" else BACKWARD),
        grid=("G*S", "ceil(H/64)", "1"),
        block=(384, 1, 1),
        dynamic_shared_bytes=200_000,
        zeroed=("dkv",) if op == "backward" else (),
        facts=facts,
        hashes={"cubin": f"{op}-{arch}-{sorted(facts.items())}"},
    )
    return dataclasses.replace(kernel, **changed)


def image(kernel: manifest.Kernel) -> bytes:
    return b"\x7fELF" + kernel.symbol.encode()


def operands(**changed: Any) -> dict[str, Any]:
    """Operands of a forward call, by name."""
    good = {
        "q": jnp.ones((G, S, H, D), jnp.bfloat16),
        "kv": jnp.ones((G, T, D), jnp.bfloat16),
        "indices": jnp.zeros((G, S, K), jnp.int32),
        "topk_length": jnp.full((G, S), K, jnp.int32),
        "sink": jnp.zeros((G, H), jnp.float32),
    }
    return good | changed


def backward_operands(**changed: Any) -> dict[str, Any]:
    good = operands()
    del good["sink"]
    row = jnp.asarray(np.ones((G, S, H), np.float32))
    good |= {"lse": row, "alpha": row, "beta": row}
    return good | {"dout": jnp.ones((G, S, H, 512), jnp.bfloat16)} | changed
