"""Installs a public package into a folder and compiles one of its kernels there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

from jax_dsa.emulator.errors import EmulatorError

SCRIPT = pathlib.Path(__file__).parents[2] / "aot" / "peer.py"
PACKAGE = "nvidia-cudnn-frontend"
COMPILER = "nvidia-cutlass-dsl"


@dataclasses.dataclass(frozen=True)
class Source:
    """A kernel of a release: kind "backward" or "forward"."""

    release: str
    kind: str
    head_dim: int
    max_topk: int = 128
    arch: str = "sm_100a"

    @property
    def name(self) -> str:
        return f"cudnn-{self.release}-{self.kind}-d{self.head_dim}-k{self.max_topk}-{self.arch}"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """PTX text and the dynamic shared memory of the main kernel."""

    source: Source
    text: str
    dynamic_shared_bytes: int


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{what} failed: {done.stderr.strip()[-800:]}")


def _pip(folder: pathlib.Path, *requirements: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *requirements]
    _run(command, f"installing {' '.join(requirements)}")


def _compiler(folder: pathlib.Path) -> list[str]:
    """Site folders of the compiler: none when this Python has it, else one that gets it."""
    if importlib.util.find_spec("cutlass") is not None:
        return []
    target = folder / "compiler"
    if not target.exists():
        _pip(target, COMPILER)
    return [str(target)]


def compile_peer(source: Source, folder: pathlib.Path, python: str = sys.executable) -> Compiled:
    """Installs the release and compiles the kernel, unless ``folder`` already holds the result.

    Args:
      source: what to compile.
      folder: where packages and results go (a temporary folder, or one that is kept between runs).
      python: the interpreter that has nvidia-cutlass-dsl; the running one fetches it when it has
        not.

    Raises:
      EmulatorError: with the end of the failing command's output.
    """
    target = folder / source.name
    if not (target / "facts.json").exists():
        package = folder / f"package-{source.release}"
        if not package.exists():
            _pip(package, "--no-deps", f"{PACKAGE}=={source.release}")
        target.mkdir(parents=True, exist_ok=True)
        paths = _compiler(folder) if python == sys.executable else []
        _compile(source, python, paths, package, target)
    facts = json.loads((target / "facts.json").read_text())
    return Compiled(source, (target / "kernel.ptx").read_text(), facts["dynamic_shared_bytes"])


def _compile(
    source: Source, python: str, paths: list[str], package: pathlib.Path, target: pathlib.Path
) -> None:
    # As site folders: a .pth file of the compiler's adds the path of its modules.
    setup = f"import runpy, site, sys; [site.addsitedir(p) for p in {paths!r}]; "
    launcher = setup + "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = [
        package,
        source.release,
        source.kind,
        source.head_dim,
        source.max_topk,
        source.arch,
        target,
    ]
    _run([python, "-c", launcher, str(SCRIPT), *map(str, arguments)], f"compiling {source.name}")
