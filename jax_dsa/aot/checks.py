"""What a compiled kernel must be before it is kept, and how its manifest entry is completed."""

from __future__ import annotations

import dataclasses
import re

from jax_dsa.cubins import elf, manifest

SHARED_LIMIT = 232_448  # bytes per CTA, sm_90 and sm_100
# ptxas: wgmma instructions wait for each other. C7510 and C7514 name two of its reasons; messages
# of the others (C7511, C7519) say "serialized" too.
SERIALISED = re.compile(r"C7510|C7514|serialized")
# By CUDA major version of the tools, for sm_90: "CUDA minor version compatibility", CUDA Toolkit
# release notes.
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([bfsu])(\d+)[^\[,]*(?:\[(\d+)\])?")


class Refused(Exception):
    """A compiled kernel that must not be kept; one line per reason."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the ``.entry`` of a PTX says: symbol, bytes of each parameter, threads and CTAs."""

    symbol: str
    sizes: tuple[int, ...]
    block: tuple[int, ...] | None
    cluster: tuple[int, ...] | None
    target: str


def read_entry(ptx: str) -> Entry:
    """Reads the only ``.entry`` of a PTX text.

    Raises:
      Refused: when there is none, or more than one.
    """
    found = _ENTRY.findall(ptx)
    if len(found) != 1:
        raise Refused(f"the PTX has {len(found)} kernels, wanted one: {[f[0] for f in found]}")
    symbol, parameters, directives = found[0]
    sizes = tuple(
        int(bits) // 8 * int(count or 1) for _, bits, count in _PARAMETER.findall(parameters)
    )
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return Entry(
        symbol, sizes, _dimensions(directives, "reqntid"),
        _dimensions(directives, "reqnctapercluster"), target[1] if target else "",
    )  # fmt: skip


def _dimensions(directives: str, name: str) -> tuple[int, ...] | None:
    found = re.search(rf"\.{name}\s+([\d, ]+)", directives)
    if not found:
        return None
    sizes = [int(size) for size in found[1].split(",")]
    return (*sizes, 1, 1)[:3]


def statements(log: str) -> list[str]:
    """What ptxas said, one statement each. CuTeDSL colours its report and wraps its lines."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    parts = re.split(r"(?=ptxas (?:info|warning|error|fatal|\.))", " ".join(plain.split()))
    return [part.strip() for part in parts if part.startswith("ptxas ")]


def messages(log: str) -> tuple[str, ...]:
    """The compiler's messages that carry a code, without places and repetitions, sorted."""
    coded = (re.search(r"\(C\d+\).*", said) for said in statements(log))
    places = r" (in|around|in around) line \d+| (in|of) (the )?function '[^']*'"
    return tuple(sorted({re.sub(places, "", found[0]) for found in coded if found}))


def complete(entry: manifest.Kernel, cubin: bytes, ptx: str, log: str) -> manifest.Kernel:
    """Adds to an entry what only its compiled form tells, and checks that the two agree.

    Args:
      entry: as the kernel's source describes it.
      cubin, ptx: of one compile.
      log: what the compiler said, ptxas with -v.

    Raises:
      Refused: naming every reason why the kernel must not be kept.
    """
    declared = read_entry(ptx)
    try:
        found = elf.read(cubin)
    except elf.CubinError as error:
        raise Refused(f"the cubin is {error}") from None
    if declared.symbol not in found.kernels:
        raise Refused(f"kernel {declared.symbol} of the PTX is not in the cubin: {found.kernels}")
    needs = found.kernels[declared.symbol]
    full = dataclasses.replace(
        entry, symbol=declared.symbol, registers=needs.registers, stack_frame=needs.stack_frame,
        messages=messages(log), minimum_driver=_driver(entry),
    )  # fmt: skip
    reasons = [*full.problems(), *_against_ptx(full, declared), *_against_log(full, log)]
    if not found.serves(entry.arch):
        reasons.append(f"the cubin is compiled for {found.arch}, wanted {entry.arch}")
    if not 0 <= entry.dynamic_shared_bytes <= SHARED_LIMIT:
        reasons.append(f"{entry.dynamic_shared_bytes} bytes of shared memory; {SHARED_LIMIT} fit")
    reasons += _spills(full) + [f"ptxas: {m}" for m in full.messages if SERIALISED.search(m)]
    if reasons:
        raise Refused("\n".join(reasons))
    return full


def _driver(entry: manifest.Kernel) -> str:
    return DRIVERS.get(entry.tools.get("cuda", "").partition(".")[0], "")


def _against_ptx(entry: manifest.Kernel, declared: Entry) -> list[str]:
    reasons = []
    try:
        entry.check_parameters(declared.sizes)
    except manifest.ManifestError as error:
        reasons.append(str(error))
    if declared.target != entry.arch:
        reasons.append(f"the PTX is for {declared.target}, wanted {entry.arch}")
    for name, found in (("block", declared.block), ("cluster", declared.cluster)):
        listed = tuple(getattr(entry, name))
        if found is not None and found != listed:
            reasons.append(f"{name} is {found} in the PTX, {listed} in the manifest entry")
    return reasons


def _against_log(entry: manifest.Kernel, log: str) -> list[str]:
    """ptxas's own words are a second opinion on what the ELF file says."""
    reasons, said_all = [], "\n".join(statements(log))
    for what, pattern, found in (
        ("registers", r"Used (\d+) registers", entry.registers),
        ("bytes of stack frame", r"(\d+) bytes stack frame", entry.stack_frame),
    ):
        said = {int(n) for n in re.findall(pattern, said_all)}
        if said and said != {found}:
            reasons.append(f"ptxas says {sorted(said)} {what}, the cubin {found}")
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said_all)]
    if any(spilled) and not entry.stack_frame:
        reasons.append(f"ptxas says {max(spilled)} bytes are spilled, the cubin has no stack frame")
    return reasons


def _spills(entry: manifest.Kernel) -> list[str]:
    allowed = sum(spill.bytes for spill in entry.allowed_spills)
    reasons = [
        f"allowed spill {s} needs a name, positive bytes and a reason"
        for s in entry.allowed_spills
        if not (s.name and s.bytes > 0 and s.reason)
    ]
    if (entry.stack_frame or 0) > allowed:
        named = ", ".join(f"{s.name} {s.bytes}" for s in entry.allowed_spills) or "none"
        reasons.append(
            f"stack frame of {entry.stack_frame} bytes per thread: registers are spilled, or an"
            f" array is indexed by a run-time number; allowed_spills of the kernel: {named}"
        )
    return reasons
