"""What is installed, what is there to run on, which implementation would serve a problem and why.

    python -m jax_dsa.doctor [--heads 64 --head-dim 576 --topk 2048 --dtype bfloat16] [--json]

Exit code 0 when some implementation is usable, 1 when none is.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa import dispatch, validate
from jax_dsa.cubins import registry
from jax_dsa.ffi import driver, library

# Optional packages: distribution -> the extra of jax_dsa that installs it.
OPTIONAL = {
    "jax-cuda13-plugin": "cuda13",
    "jax-cuda12-plugin": "cuda12",
    "nvidia-cutlass-dsl": "kernels",
    "cuda-python": "kernels",
    "optax": "examples",
    "matplotlib": "examples",
    "tqdm": "examples",
    "flatbuffers": "export",
}
REQUIRED = ("jax", "jaxlib", "numpy", "absl-py")


def report(heads: int, head_dim: int, topk: int, dtype: str, value_dim: int | None) -> dict:
    """Everything the command prints, as data.

    Args:
        heads: H of the problem asked about.
        head_dim: D.
        topk: K.
        dtype: dtype name of q and kv.
        value_dim: value columns; None for the default.

    Returns:
        ``packages``, ``optional``, ``devices``, ``driver``, ``bridge``, ``cubins``, ``problem``,
        ``chosen`` (a name or None) and ``reasons`` (implementation -> why not, or None).
    """
    problem, chosen, reasons = _choice(heads, head_dim, topk, dtype, value_dim)
    devices, found = _devices(), _driver()
    return {
        "python": platform.python_version(),
        "packages": {"jax_dsa": jax_dsa.__version__} | {name: _version(name) for name in REQUIRED},
        "optional": {
            name: _version(name) or f"absent: pip install 'jax_dsa[{extra}]'"
            for name, extra in OPTIONAL.items()
        },
        "devices": devices,
        "driver": found if isinstance(found, str) else dataclasses.asdict(found),
        "bridge": _bridge(),
        "cubins": _cubins(found),
        "problem": problem,
        "chosen": None if isinstance(devices, str) else chosen,
        "reasons": reasons,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]] | str:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return f"none: JAX's backend does not start: {error}"
    return [
        {
            "id": d.id,
            "platform": d.platform,
            "kind": d.device_kind,
            "compute_capability": getattr(d, "compute_capability", None),
            "arch": _arch(getattr(d, "compute_capability", None)),
        }
        for d in devices
    ]


def _arch(capability: str | None) -> str | None:
    """The architecture whose kernels a device runs, or why there is none."""
    if capability is None:
        return None
    try:
        return registry.architecture(capability)
    except registry.KernelMissing as error:
        return str(error)


def _driver() -> driver.Driver | str:
    try:
        return driver.query()
    except RuntimeError as error:
        return f"none: {error}"


def _bridge() -> str:
    try:
        library.load()
        return f"{library.path()}, XLA FFI 0.{library.load().jax_dsa_ffi_api_minor()}"
    except library.BridgeError as error:
        return f"absent: {error}"


def _cubins(found: driver.Driver | str) -> list[dict[str, Any]] | str:
    """One row for each kernel, of every architecture that is there."""
    rows = [_cubin(f, found) for arch in registry.archs() for f in _entries(arch)]
    if rows:
        return rows
    return f"absent: no compiled kernels; `{registry.command('ARCH')}` compiles them"


def _entries(arch: str):
    try:
        return registry.entries(arch, build=False)
    except registry.KernelMissing:
        return ()


def _cubin(f: registry.Found, found: driver.Driver | str) -> dict[str, Any]:
    entry = f.entry
    serves = None if isinstance(found, str) else found.serves(entry.minimum_driver)
    return {
        "arch": entry.arch,
        "op": entry.op,
        "facts": dict(entry.facts),
        "bytes": len(f.cubin),
        "folder": str(f.folder),
        "minimum_driver": entry.minimum_driver,
        "driver_serves": serves,
    }


def _choice(heads, head_dim, topk, dtype, value_dim):
    queries, keys = 1, max(topk, 1)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # noqa: E731
    indices = jax.ShapeDtypeStruct((queries, topk), jnp.int32)
    problem = validate.problem(
        array(queries, heads, head_dim), array(keys, head_dim), indices, value_dim=value_dim
    )
    try:
        found = dispatch.explain(problem, None)
    except NotImplementedError:
        reasons = {name: dispatch.unusable(name, problem) for name in dispatch.NAMES}
        return str(problem), None, reasons
    return str(problem), found.chosen, dict(found.reasons)


def _print(found: dict) -> None:
    print(f"python {found['python']}")
    for name, version in found["packages"].items():
        print(f"{name} {version or 'absent'}")
    print("optional packages:")
    for name, version in found["optional"].items():
        print(f"  {name} {version}")
    print("devices:")
    devices = found["devices"]
    for d in [devices] if isinstance(devices, str) else devices:
        print(f"  {d if isinstance(d, str) else _describe(d)}")
    _print_driver(found["driver"])
    print(f"bridge: {found['bridge']}")
    _print_cubins(found["cubins"])
    print(f"problem: {found['problem']}")
    for name, reason in found["reasons"].items():
        mark = "runs" if name == found["chosen"] else "usable" if reason is None else "no"
        print(f"  {name:10} {mark}{f': {reason}' if reason else ''}")
    if found["chosen"] is None:
        print("nothing usable: no implementation serves this problem, or there is no device")


def _print_driver(found: dict | str) -> None:
    if isinstance(found, str):
        print(f"driver: {found}")
    else:
        devices = ", ".join(found["capabilities"]) or "no devices"
        release = found["release"] or "of an unknown release"
        print(
            f"driver: {release}, serves CUDA {found['cuda']}, compute capability {devices} "
            f"(asked through {found['source']})"
        )


def _print_cubins(found: list[dict] | str) -> None:
    if isinstance(found, str):
        print(f"cubins: {found}")
        return
    print("cubins:")
    for row in found:
        facts = " ".join(f"{name}={value}" for name, value in row["facts"].items())
        old = "; the driver is TOO OLD" if row["driver_serves"] is False else ""
        print(
            f"  {row['arch']} {row['op']:8} {facts}: {row['bytes']} bytes in {row['folder']}, "
            f"driver {row['minimum_driver'] or 'any'} or newer{old}"
        )


def _describe(device: dict) -> str:
    capability = device["compute_capability"]
    suffix = f", compute capability {capability}, {device['arch']}" if capability else ""
    return f"{device['platform']}:{device['id']} {device['kind']}{suffix}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_dsa.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--heads", type=int, default=64, help="H, default 64")
    parser.add_argument("--head-dim", type=int, default=576, help="D, default 576")
    parser.add_argument("--topk", type=int, default=2048, help="K, default 2048")
    parser.add_argument("--value-dim", type=int, help="default 512 where D is 576, else D")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64")
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    try:
        found = report(args.heads, args.head_dim, args.topk, args.dtype, args.value_dim)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if found["chosen"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
