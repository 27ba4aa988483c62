"""The schema of a compiled kernel: everything that a launcher, the emulator and the doctor need to
know of it.

A ``Manifest`` is a list of ``Kernel`` entries and is stored as JSON. Nothing here imports anything
of the package.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = 1
# What formulas may name and what a launcher passes by name: contract of launchers and kernels.
SIZES = ("G", "S", "T", "K", "H", "D")
LAUNCH_SCALARS = (*SIZES, "sink_stride", "scale")
KINDS = ("pointer", "scalar", "tensor_map", "bytes")
SCALARS = {"i32": 4, "u32": 4, "f32": 4, "i64": 8, "u64": 8, "f64": 8}


class ManifestError(ValueError):
    """A manifest that does not fit its schema or its kernel."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One kernel parameter, in the order of the ``.entry``.

    Attributes:
      name: what it is called in launches and reports.
      kind: "pointer" (8 bytes), "scalar" (``type`` says which), "tensor_map" (128 bytes, aligned to
        64) or "bytes"
        (``size`` bytes that the launcher fills: structures).
      type: a key of SCALARS, for scalars.
      size: bytes, for kind "bytes"; the others know theirs.
      tensor_map: for tensor maps: rank, box, element strides, swizzle, as in
        ``cuTensorMapEncodeTiled``.
    """

    name: str
    kind: str
    type: str = ""
    size: int = 0
    tensor_map: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        fixed = {"pointer": 8, "tensor_map": 128, "bytes": self.size}
        return SCALARS.get(self.type, 0) if self.kind == "scalar" else fixed.get(self.kind, 0)

    def problems(self) -> list[str]:
        if self.kind not in KINDS:
            return [f"parameter {self.name!r}: kind {self.kind!r} is not one of {KINDS}"]
        if self.kind == "scalar" and self.type not in SCALARS:
            return [f"parameter {self.name!r}: type {self.type!r} is not one of {sorted(SCALARS)}"]
        sizeless = f"parameter {self.name!r}: size must be positive, got {self.size}"
        return [] if self.bytes > 0 else [sizeless]


@dataclasses.dataclass(frozen=True)
class Role:
    """Warps ``first`` to ``last`` (inclusive) of each CTA share a task; reports use the name."""

    name: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Region:
    """A named piece of memory: ``space`` "shared" (bytes) or "tensor" (columns); [start, stop)."""

    name: str
    space: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Spill:
    """A stack frame that a build lets pass: at most ``bytes`` per thread, and why that is right."""

    name: str
    bytes: int
    reason: str


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula: a product, with "*", of positive integers, names of SIZES and
    ceil(NAME/INTEGER).

    Args:
      formula: e.g. "G*S" or "4*T*ceil(H/64)".
      sizes: name -> its value in the launch.

    Raises:
      ManifestError: for anything else; it names the factor.
    """
    product = 1
    for factor in formula.replace(" ", "").split("*"):
        found = _FACTOR.fullmatch(factor)
        if not found:
            raise ManifestError(
                f"formula {formula!r}: factor {factor!r} is none of a positive integer, one of"
                f" {', '.join(SIZES)}, or ceil(NAME/INTEGER)."
            )
        number, name, top, divisor = found.groups()
        product *= (
            int(number) if number else sizes[name] if name else -(-sizes[top] // int(divisor))
        )
    return product


_FACTOR = re.compile(r"([1-9]\d*)|([{0}])|ceil\(([{0}])/([1-9]\d*)\)".format("".join(SIZES)))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of one architecture.

    Attributes:
      symbol: name of the ``.entry``; arch: e.g. "sm_100a"; op: e.g. "backward".
      facts: what it serves (head_dim, dtype, ...); compared with a problem by equality.
      parameters: see Parameter.
      grid: CTAs in x, y, z, as formulas (``evaluate``).
      block, cluster: threads per CTA, CTAs per cluster; dynamic_shared_bytes per CTA.
      zeroed: results that the launcher fills with zero bytes before the kernel starts.
      registers: per thread at launch (None: unknown); stack_frame in bytes (0: nothing is spilled).
      allowed_spills: stack frames that the build lets pass.
      workspaces: name -> size in bytes as a formula.
      roles, regions: names for reports.
      module: where the kernel's source is, dotted.
      hashes: "source" (of the module and what it imports), "build" (source, configuration, tools,
        options), "ptx", "cubin" -> SHA-256; tools: tool -> version; minimum_driver of the cubin;
      messages: those of the compiler that carry a code, without line numbers.
    """

    symbol: str
    arch: str
    op: str
    parameters: Sequence[Parameter]
    block: tuple[int, int, int]
    grid: tuple[str, str, str] = ("1", "1", "1")
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared_bytes: int = 0
    registers: int | None = None
    stack_frame: int | None = None
    zeroed: Sequence[str] = ()
    allowed_spills: Sequence[Spill] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workspaces: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roles: Sequence[Role] = ()
    regions: Sequence[Region] = ()
    module: str = ""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tools: Mapping[str, str] = dataclasses.field(default_factory=dict)
    minimum_driver: str = ""
    messages: Sequence[str] = ()

    def role(self, warp: int) -> str:
        """The name of the role of a warp, or ""."""
        return next((r.name for r in self.roles if r.first <= warp <= r.last), "")

    def problems(self) -> list[str]:
        """What keeps a launcher from launching the kernel from this entry: one sentence each."""
        found = [p for parameter in self.parameters for p in parameter.problems()]
        for name, formula in (*zip("xyz", self.grid, strict=True), *self.workspaces.items()):
            try:
                evaluate(formula, dict.fromkeys(SIZES, 1))
            except ManifestError as error:
                found.append(f"{name}: {error}")
        pointers = [p.name for p in self.parameters if p.kind == "pointer"]
        scalars = [p.name for p in self.parameters if p.kind == "scalar"]
        found += [f"zeroed {n!r} is no pointer parameter" for n in self.zeroed if n not in pointers]
        found += [
            f"no launcher knows scalar {n!r}; it knows {', '.join(LAUNCH_SCALARS)}"
            for n in scalars
            if n not in LAUNCH_SCALARS
        ]
        return found

    def check_parameters(self, sizes: Sequence[int]) -> None:
        """Compares the parameter list with the byte sizes that the ``.entry`` declares.

        Raises:
          ManifestError: naming the first parameter that differs.
        """
        for problem in (p for parameter in self.parameters for p in parameter.problems()):
            raise ManifestError(f"kernel {self.symbol}: {problem}")
        listed = [(p.name, p.bytes) for p in self.parameters]
        if len(listed) != len(sizes):
            counts = f"lists {len(listed)} parameters, the .entry has {len(sizes)}"
            raise ManifestError(f"kernel {self.symbol}: the manifest {counts}.")
        for i, ((name, size), declared) in enumerate(zip(listed, sizes, strict=True)):
            if size != declared:
                found = f"has {size} bytes in the manifest, {declared} in the .entry"
                raise ManifestError(f"kernel {self.symbol}: parameter {i} ({name!r}) {found}.")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All kernels of a build."""

    kernels: Sequence[Kernel]

    def to_json(self) -> str:
        return json.dumps(
            {"version": VERSION, "kernels": [dataclasses.asdict(k) for k in self.kernels]}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what ``to_json`` wrote.

        Raises:
          ManifestError: for what is no JSON, another version, unknown or missing fields, or a
            parameter that is none.
        """
        try:
            data = json.loads(text)
            version, entries = data.get("version"), data.get("kernels", ())
        except (json.JSONDecodeError, AttributeError) as error:
            raise ManifestError(f"no manifest: {error}") from None
        if version != VERSION:
            raise ManifestError(
                f"manifest version {version!r}, wanted {VERSION}: rebuild the cubins"
            )
        return cls([kernel_from_dict(entry) for entry in entries])


def kernel_from_dict(entry: dict) -> Kernel:
    """The inverse of ``dataclasses.asdict``, checked; raises ManifestError."""
    nested = {
        "parameters": Parameter, "roles": Role, "regions": Region, "allowed_spills": Spill,
    }  # fmt: skip
    try:
        entry = dict(entry)
        for field, kind in nested.items():
            entry[field] = tuple(kind(**item) for item in entry.get(field, ()))
        for field in ("block", "grid", "cluster", "zeroed", "messages"):
            entry[field] = tuple(entry[field])
        kernel = Kernel(**entry)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ManifestError(f"a kernel entry does not fit the schema: {error}") from None
    for problem in (p for parameter in kernel.parameters for p in parameter.problems()):
        raise ManifestError(f"kernel {kernel.symbol}: {problem}")
    return kernel
