"""Sparse attention by compiled kernels: what they serve, and calls of them on a GPU's operands.

Which kernel runs is decided when it runs, by what the device is; here is decided whether to call
one at all.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from jax_dsa.cubins import registry
from jax_dsa.ffi import call, library
from jax_dsa.problem import Facts, Problem

HEAD_DIMS, VALUE_DIM, MAX_HEADS = (512, 576), 512, 128
DTYPES = ("bfloat16", "float16")
OPS = ("forward", "backward")
_lock = threading.Lock()
_installed: set[str] = set()


def limits(problem: Problem) -> str | None:
    """Why no kernel, present or not, is written for a problem, or None."""
    facts, found = problem.facts, []
    if problem.head_dim not in HEAD_DIMS:
        found.append(f"D = {problem.head_dim} (they serve {' and '.join(map(str, HEAD_DIMS))})")
    if facts.value_dim != VALUE_DIM:
        found.append(f"value_dim = {facts.value_dim} (they serve {VALUE_DIM})")
    if facts.dtype not in DTYPES:
        found.append(f"{facts.dtype} (they serve {' and '.join(DTYPES)})")
    if problem.heads > MAX_HEADS:
        found.append(f"H = {problem.heads} (they serve 1 to {MAX_HEADS})")
    return f"the compiled kernels do not serve {', '.join(found)}; use 'xla'" if found else None


def gradient_limits(facts: Facts) -> str | None:
    """Why the gradient of a call cannot be served, or None."""
    if facts.deterministic:
        return "its gradients are not bitwise equal from run to run (deterministic=True); use 'xla'"
    return None


def unusable(problem: Problem, devices: Sequence[Any], *, build: bool) -> str | None:
    """Why the kernels cannot serve a problem on these GPUs, or None.

    Args:
        problem: the call.
        devices: this process's GPUs. Where there are none, a program can only be exported: some
            architecture's kernels must be there.
        build: compile kernels that are missing, where the compiler is installed.
    """
    reason = limits(problem)
    if reason is None and devices:
        reason = _unusable_here(problem, devices, build)
    elif reason is None and not _archs_serving(problem):
        reason = (
            "no compiled kernels for this problem are here, nor a GPU to run them; "
            "`python -m jax_dsa.aot` compiles them; use 'xla'"
        )
    return reason


def _unusable_here(problem: Problem, devices: Sequence[Any], build: bool) -> str | None:
    try:
        library.register()
        for arch in archs(devices):
            for op in OPS:
                registry.find(arch, op, _facts(problem), build=build)
    except (library.BridgeError, registry.KernelMissing) as error:
        return f"{str(error).rstrip('.')}; use 'xla'"
    return None


def _facts(problem: Problem) -> Mapping[str, Any]:
    """As a kernel's manifest entry holds them."""
    facts = problem.facts
    return {"head_dim": problem.head_dim, "value_dim": facts.value_dim, "dtype": facts.dtype}


def _archs_serving(problem: Problem) -> list[str]:
    facts = _facts(problem)
    return [
        arch
        for arch in registry.archs()
        if all(registry.reason(arch, op, facts) is None for op in OPS)
    ]


def archs(devices: Sequence[Any]) -> list[str]:
    """The architectures of whose kernels the devices run.

    Raises:
        KernelMissing: a device is of another architecture.
    """
    capabilities = {str(getattr(d, "compute_capability", "unknown")) for d in devices}
    return sorted({registry.architecture(c) for c in capabilities})


def prepare(devices: Sequence[Any]) -> None:
    """Registers the custom calls and installs the kernels for these GPUs; each once.

    Raises:
        BridgeError: the bridge is absent or was refused.
        KernelMissing: there are no kernels for one of the GPUs.
    """
    library.register()
    with _lock:
        for arch in archs(devices):
            if arch not in _installed:
                library.install((found.entry, found.cubin) for found in registry.entries(arch))
                _installed.add(arch)
                logging.info("jax_dsa: installed the compiled kernels of %s", arch)


def register() -> None:
    """As `prepare` for this process's GPUs; says what is missing in a warning."""
    gpus = local_gpus()
    try:
        prepare(gpus)
    except (library.BridgeError, registry.KernelMissing) as error:
        if gpus:
            logging.warning(
                "jax_dsa: programs that call the compiled kernels cannot run: %s", error
            )


def local_gpus() -> list[Any]:
    """This process's GPUs; none where JAX's backend does not start."""
    try:
        return [d for d in jax.local_devices() if d.platform == "gpu"]
    except RuntimeError:
        return []


def _serve(operation, facts: Facts, platform: str, *operands):
    if platform != "cuda":
        raise NotImplementedError(
            f"implementation='cutedsl' runs on NVIDIA GPUs, and this is lowered for {platform}; "
            "use 'xla', or a sequence of names"
        )
    if gpus := local_gpus():  # without one the program is exported, for whatever runs it
        prepare(gpus)
    return operation(facts, *operands)


# (facts, platform, q, kv, indices, topk_length, sink) -> out, lse. Shapes: `ffi.call`.
forward = functools.partial(_serve, call.forward)
# (facts, platform, q, kv, indices, topk_length, lse, alpha, beta, dout) -> dq, dkv.
backward = functools.partial(_serve, call.backward)
