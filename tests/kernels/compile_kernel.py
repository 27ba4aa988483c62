"""Compiles one kernel without a GPU: a script for an interpreter that has nvidia-cutlass-dsl.

    python compile_kernel.py MODULE CLASS HEAD_DIM DTYPE FOLDER

MODULE is below ``jax_dsa.kernels``, e.g. ``sm90.forward``. Writes ``kernel.ptx``, ``kernel.cubin``
and ``manifest.json``. That interpreter may lack jax, so the package is entered
without running its ``__init__``.
"""

import dataclasses
import importlib
import pathlib
import re
import sys
import types

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "jax_dsa"


def build(kernel, folder: pathlib.Path) -> tuple[str, bytes]:
    """The PTX text and the cubin."""
    import cutlass.cute as cute  # pyright: ignore

    options = f"--gpu-arch=sm_90a --keep-ptx --keep-cubin --dump-dir={folder}"
    artifacts = cute.compile(kernel, *kernel.compile_arguments(), options=options).artifacts
    text = artifacts.PTX
    return text if isinstance(text, str) else text.decode(), artifacts.CUBIN


def entry_of(kernel, text: str):
    """The manifest entry, as far as a launch needs it."""
    from jax_dsa.cubins import manifest

    (symbol,) = re.findall(r"\.entry\s+(\w+)", text)
    names = [field.name for field in dataclasses.fields(manifest.Kernel)]
    said = {name: getattr(kernel, name) for name in names if hasattr(kernel, name)}
    return manifest.Kernel(symbol=symbol, arch="sm_90a", **said)


def main(module: str, name: str, head_dim: str, dtype: str, folder: str) -> None:
    package = types.ModuleType("jax_dsa")
    package.__path__ = [str(PACKAGE)]
    sys.modules["jax_dsa"] = package
    source = importlib.import_module(f"jax_dsa.kernels.{module}")
    from jax_dsa.cubins import manifest

    kernel = getattr(source, name)(source.Config(int(head_dim), dtype))
    target = pathlib.Path(folder)
    text, cubin = build(kernel, target)
    (target / "kernel.ptx").write_text(text)
    (target / "kernel.cubin").write_bytes(cubin)
    (target / "manifest.json").write_text(manifest.Manifest([entry_of(kernel, text)]).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
