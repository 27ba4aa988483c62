"""Settings that must stand before jax starts: eight CPU devices, and the CPU by default."""

import os

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Eight devices on two busy cores meet late; by default XLA ends the process after 40 seconds.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ.setdefault(
    "JAX_PLATFORMS", "cuda,cpu" if os.environ.get("JAX_DSA_GPU") == "1" else "cpu"
)
# A compiled program must come from the code under test, never from an earlier run's cache.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# The suite sets the block size where it means to.
os.environ.pop("JAX_DSA_XLA_BLOCK", None)

import hypothesis  # noqa: E402

# Compilation makes the first example of each shape slow; a failure must repeat from run to run.
hypothesis.settings.register_profile(
    "jax_dsa", deadline=None, derandomize=True, max_examples=30, database=None
)
hypothesis.settings.load_profile("jax_dsa")
