"""The hash of a kernel's source: of its module and of all modules of its package that it imports.

Compiled kernels carry it, so that a cubin made from other sources is never taken for the right one.
Nothing is imported here but read: it needs no compiler.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import pathlib
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parents[1]


def source_hash(module: str) -> str:
    """SHA-256 over the files of a module and of what it imports from its own package.

    Args:
      module: dotted name, e.g. "jax_dsa.kernels.sm90.forward".

    Raises:
      ModuleNotFoundError: where there is no such file.
    """
    files = _closure(module)
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def modules_of(module: str) -> list[str]:
    """The modules that ``source_hash`` covers, sorted."""
    return sorted(_closure(module))


def _closure(module: str) -> dict[str, pathlib.Path]:
    first = _file(module)
    if first is None:
        raise ModuleNotFoundError(f"no source file for module {module!r}", name=module)
    found, waiting = {module: first}, [module]
    while waiting:
        name = waiting.pop()
        for target in _imports(name, found[name]):
            path = _file(target) if target not in found else None
            if path is not None:
                found[target] = path
                waiting.append(target)
    return found


def _imports(name: str, path: pathlib.Path) -> Iterator[str]:
    """What a file imports from below its own top package; ``from a import b`` is a and a.b."""
    root = name.partition(".")[0]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        yield from (n for n in names if n.startswith(root + "."))


def _file(module: str) -> pathlib.Path | None:
    root, *rest = module.split(".")
    base = PACKAGE if root == PACKAGE.name else _top(root)
    if base is None or not rest:
        return base if base is not None and base.is_file() else None
    path = base.joinpath(*rest)
    for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _top(name: str) -> pathlib.Path | None:
    """The folder of a package, or the file of a module, that stands alone on the search path."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return pathlib.Path(next(iter(spec.submodule_search_locations)))
    return pathlib.Path(spec.origin) if spec.origin else None
