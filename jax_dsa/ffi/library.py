"""The C++ bridge as a library of this process: found, loaded, registered with XLA, each once.

Nothing is registered before a backend has started: a target that XLA refuses would then make every
later JAX call of the process fail.
"""

import ctypes
import functools
import importlib.metadata
import importlib.resources
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_dsa.cubins import manifest
from jax_dsa.ffi import structs

NAME = "libjax_dsa_bridge.so"
# Target -> the C symbols of its stages, for each of XLA's platforms.
TARGETS = {"jax_dsa_fwd_v1": "jax_dsa_fwd_v1", "jax_dsa_bwd_v1": "jax_dsa_bwd_v1"}
STAGES = {"CUDA": ("initialize", "execute"), "cpu": ("execute",)}
# JAX's name of a device's platform -> XLA's.
PLATFORMS = {"gpu": "CUDA", "cpu": "cpu"}
_ERROR_BYTES = 4096
_lock = threading.RLock()
_registered: set[str] = set()


class BridgeError(RuntimeError):
    """The bridge is absent, cannot be loaded or registered, or refused what it was given."""


def path() -> pathlib.Path:
    """Where the library lies: in the package, or where an editable install put it.

    Raises:
        BridgeError: it is nowhere.
    """
    found = importlib.resources.files("jax_dsa.ffi").joinpath(NAME)
    if isinstance(found, pathlib.Path) and found.is_file():
        return found
    raise BridgeError(
        f"the bridge {NAME} is not installed: `pip install .` builds it and needs a C++17 compiler"
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        BridgeError: it is absent, cannot be loaded, or is of another version of jax_dsa.
    """
    where = path()
    try:
        library = ctypes.CDLL(str(where))
    except OSError as error:
        raise BridgeError(f"the bridge cannot be loaded: {error}") from error
    got = library.jax_dsa_bridge_version()
    if got != structs.BRIDGE_VERSION:
        raise BridgeError(
            f"the bridge {where} has version {got}, wanted {structs.BRIDGE_VERSION}: it was built "
            "from other sources than this package; install jax_dsa again"
        )
    library.jax_dsa_driver_functions.restype = ctypes.c_char_p
    library.jax_dsa_launch_count.restype = ctypes.c_int64
    return library


def register() -> ctypes.CDLL:
    """Registers the targets for the platforms of this process's devices; idempotent.

    Raises:
        BridgeError: the library is absent, or this jaxlib refuses it. Other JAX calls go on.
    """
    with _lock:
        library = load()
        present = {d.platform for d in jax.local_devices()} | {"cpu"}  # starts the backend
        for platform in (PLATFORMS[p] for p in sorted(present & set(PLATFORMS))):
            if platform not in _registered:
                _register(library, platform)
                _registered.add(platform)
        return library


def _register(library: ctypes.CDLL, platform: str) -> None:
    for target, symbol in TARGETS.items():
        stages = {
            stage: jax.ffi.pycapsule(getattr(library, f"{symbol}_{platform.lower()}_{stage}"))
            for stage in STAGES[platform]
        }
        try:
            jax.ffi.register_ffi_target(target, stages, platform=platform)
        except Exception as error:
            minor, jaxlib = library.jax_dsa_ffi_api_minor(), importlib.metadata.version("jaxlib")
            raise BridgeError(
                f"jaxlib {jaxlib} refuses {target} for {platform}: {error}. The bridge was built "
                f"against version 0.{minor} of the XLA FFI; where jaxlib is older than that, "
                "install a newer jaxlib (0.10 or later), or build jax_dsa from source beside it"
            ) from error


def _checked(call: Callable[..., int], *arguments: Any) -> None:
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    if call(*arguments, error, ctypes.c_size_t(_ERROR_BYTES)) != 0:
        raise BridgeError(error.value.decode(errors="replace"))


def install(kernels: Iterable[tuple[manifest.Kernel, bytes]]) -> None:
    """Gives compiled kernels to the launcher; one of the same arch, op and facts is replaced.

    Args:
        kernels: manifest entries with their cubins.

    Raises:
        BridgeError, ManifestError: an entry names what the launcher does not know; none of the
            kernels is then installed.
    """
    entries = [structs.kernel(entry, image) for entry, image in kernels]
    array = (structs.Kernel * len(entries))(*entries)
    _checked(load().jax_dsa_install_kernels, array, ctypes.c_int32(len(entries)))


_driver: list[Any] = []  # keeps the installed callbacks alive


def install_driver(functions: Mapping[str, Any] | None) -> None:
    """Sets what stands in for the CUDA driver behind platform "cpu"; None removes it.

    Args:
        functions: driver function names of `driver_functions` -> ctypes callbacks.

    Raises:
        BridgeError: a function is missing or unknown.
    """
    given = dict(functions or {})
    names = (ctypes.c_char_p * len(given))(*(name.encode() for name in given))
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in given.values()]
    addresses = (ctypes.c_void_p * len(given))(*pointers)
    _checked(load().jax_dsa_install_driver, names, addresses, ctypes.c_int32(len(given)))
    _driver[:] = given.values()


def driver_functions() -> tuple[Sequence[str], Sequence[str]]:
    """The driver functions that a table must have, and those that it may have."""
    required, optional = load().jax_dsa_driver_functions().decode().split("|")
    return required.split(), optional.split()


def query_driver() -> tuple[str, list[str]]:
    """The CUDA version that the driver serves and the devices' compute capabilities.

    Raises:
        BridgeError: there is no driver, it is too old, or it fails.
    """
    version, count = ctypes.c_int32(), ctypes.c_int32()
    found = (ctypes.c_int32 * 64)()
    _checked(
        load().jax_dsa_query_driver,
        *(ctypes.byref(version), found, ctypes.c_int32(len(found)), ctypes.byref(count)),
    )
    capability = [f"{c // 10}.{c % 10}" for c in found[: count.value]]
    return f"{version.value // 1000}.{version.value % 1000 // 10}", capability


def launch_count() -> int:
    """Kernels launched or captured by this process; a replayed command buffer adds nothing."""
    return load().jax_dsa_launch_count()


def reset() -> None:
    """Forgets all kernels and the installed driver. No call may be running."""
    load().jax_dsa_reset()
    _driver.clear()
