"""What runs the compiler, in a process of its own, because a compiler may crash: a script.

    alone.py jax_dsa.aot.worker describe FILE ARCH MODULE...
    alone.py jax_dsa.aot.worker compile FOLDER ARCH MODULE INDEX OPT_LEVEL

``describe`` writes to FILE, as JSON, the tools' versions and a manifest entry for each kernel of
each module's KERNELS. ``compile`` writes ``kernel.cubin`` and ``kernel.ptx`` of one of them. What
the compiler says goes to the process's output.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import pathlib
import sys

from jax_dsa.cubins import manifest

# Of a kernel object: what must be there, and what may be.
WANTED = ("op", "facts", "parameters", "grid", "block")
OPTIONAL = (
    "cluster", "dynamic_shared_bytes", "zeroed", "allowed_spills", "workspaces", "roles", "regions",
)  # fmt: skip
# remarks{ptx} makes the compiler pass on all that ptxas says, with -v.
OPTIONS = "--gpu-arch={arch} --opt-level {opt_level} --keep-ptx --keep-cubin remarks{{ptx}}"


def describe(arch: str, *modules: str) -> dict:
    """``tools`` (name -> version) and ``kernels``: module, index and manifest entry of each."""
    import cutlass  # pyright: ignore

    cuda = cutlass.CUDA_VERSION
    tools = {
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "cuda": f"{cuda.major}.{cuda.minor}",
    }
    kernels = [
        {"module": name, "index": index, "entry": dataclasses.asdict(entry(arch, name, kernel))}
        for name in modules
        for index, kernel in enumerate(importlib.import_module(name).KERNELS)
    ]
    return {"tools": tools, "kernels": kernels}


def entry(arch: str, module: str, kernel) -> manifest.Kernel:
    """The part of a kernel's manifest entry that its source knows.

    Raises:
      TypeError: where the object lacks an attribute.
    """
    missing = [name for name in WANTED if not hasattr(kernel, name)]
    if missing:
        raise TypeError(f"{module}: kernel {kernel!r} has no {', '.join(missing)}.")
    fields = {n: getattr(kernel, n) for n in (*WANTED, *OPTIONAL) if hasattr(kernel, n)}
    return manifest.Kernel(symbol="", arch=arch, module=module, **fields)


def compile_kernel(folder: str, arch: str, module: str, index: str, opt_level: str) -> None:
    import cutlass.cute as cute  # pyright: ignore

    kernel = importlib.import_module(module).KERNELS[int(index)]
    target = pathlib.Path(folder)
    options = OPTIONS.format(arch=arch, opt_level=opt_level) + f" --dump-dir={target / 'dump'}"
    (target / "dump").mkdir()
    compiled = cute.compile(kernel, *kernel.compile_arguments(), options=options)
    ptx = compiled.artifacts.PTX
    (target / "kernel.ptx").write_bytes(ptx.encode() if isinstance(ptx, str) else ptx)
    (target / "kernel.cubin").write_bytes(compiled.artifacts.CUBIN)


def main(argv: list[str]) -> None:
    command, target, *rest = argv
    if command == "describe":
        pathlib.Path(target).write_text(json.dumps(describe(*rest)))
    else:
        compile_kernel(target, *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
