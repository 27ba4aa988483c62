"""What the NVIDIA driver of this machine says of itself, for reports.

Asked through cuda-python where it is installed, else through the bridge.
"""

import dataclasses
import pathlib
import re
from typing import Any

from jax_dsa.ffi import library

# Written by the kernel module; its release is what manifests call a driver.
MODULE = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Driver:
    """A working driver.

    Attributes:
        cuda: the CUDA version that it serves, e.g. "13.0".
        release: e.g. "580.65.06"; "" where it cannot be read.
        capabilities: compute capability of each device, e.g. "9.0".
        source: who was asked.
    """

    cuda: str
    release: str
    capabilities: tuple[str, ...]
    source: str

    def serves(self, minimum: str) -> bool | None:
        """Whether a minimum release is reached; None where that cannot be said."""
        if not (self.release and minimum):
            return None
        return _numbers(self.release) >= _numbers(minimum)


def query() -> Driver:
    """Asks the driver.

    Raises:
        RuntimeError: there is none, it fails, or there is nothing to ask it with.
    """
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        cuda, capabilities = library.query_driver()
        return Driver(cuda, _release(), tuple(capabilities), "the bridge")
    return _ask(driver)


def _ask(driver) -> Driver:
    def call(function, *arguments) -> Any:
        try:
            error, *values = function(*arguments)
        except RuntimeError as absent:  # cuda-python finds no libcuda
            raise RuntimeError(f"the CUDA driver cannot be opened: {absent}") from absent
        if int(error) != 0:
            raise RuntimeError(f"{function.__name__} failed with {error!r}")
        return values[0] if values else None

    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    call(driver.cuInit, 0)
    version, capabilities = call(driver.cuDriverGetVersion), []
    for ordinal in range(call(driver.cuDeviceGetCount)):
        device = call(driver.cuDeviceGet, ordinal)
        parts = [call(driver.cuDeviceGetAttribute, which, device) for which in (major, minor)]
        capabilities.append(".".join(map(str, parts)))
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    return Driver(cuda, _release(), tuple(capabilities), "cuda-python")


def _release() -> str:
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", MODULE.read_text())
    except OSError:
        return ""
    return found[0] if found else ""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
