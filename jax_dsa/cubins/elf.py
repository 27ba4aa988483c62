"""Reads a cubin: which architecture it is for, and what each of its kernels needs of a thread.

A cubin is an ELF file. Its architecture stands in ``e_flags``; the section ``.nv.info`` is a list
of attributes, each ``(format: u8, attribute: u8, size or value: u16)``, with ``size`` bytes
following where the format is 4. Layouts read from cubins of sm_80 to sm_120, and compared with
the words of ``ptxas -v``.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator

MACHINE_CUDA = 190
SIZED = 4
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class CubinError(ValueError):
    """Bytes that are no intact cubin, or not the one wanted."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What one thread of a kernel takes: registers, and bytes of stack frame (0: no spill)."""

    registers: int
    stack_frame: int


@dataclasses.dataclass(frozen=True)
class Cubin:
    """What a cubin says of itself.

    Attributes:
      number: of the architecture, 90 for sm_90 and sm_90a.
      specific: built with features of that architecture alone ("a").
      kernels: symbol -> Needs.
    """

    number: int
    specific: bool
    kernels: dict[str, Needs]

    @property
    def arch(self) -> str:
        """E.g. "sm_90a"; "sm_100f" reads as "sm_100", its cubins do not tell."""
        return f"sm_{self.number}{'a' if self.specific else ''}"

    def serves(self, arch: str) -> bool:
        """Whether this was compiled for ``arch``, as far as the file tells."""
        number, suffix = re.fullmatch(r"sm_(\d+)([af]?)", arch).groups()  # pyright: ignore
        return self.number == int(number) and self.specific == (suffix == "a")


@dataclasses.dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    link: int


def read(data: bytes) -> Cubin:
    """Reads a cubin.

    Raises:
      CubinError: for anything that is not a whole cubin; it says what is wrong.
    """
    try:
        flags, abi, sections = _sections(data)
        number, specific = _architecture(flags, abi)
        return Cubin(number, specific, _kernels(sections))
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, CubinError):
            raise
        raise CubinError(f"a damaged ELF file ({error})") from None


def _sections(data: bytes) -> tuple[int, int, list[_Section]]:
    if len(data) < _HEADER.size or data[:4] != b"\x7fELF":
        raise CubinError(f"no ELF file: {len(data)} bytes, starting with {data[:4]!r}")
    _, bits, order, _, _, abi, _, machine, *_ = _HEADER.unpack_from(data)
    if (bits, order, machine) != (2, 1, MACHINE_CUDA):
        raise CubinError(f"an ELF file for machine {machine}, not for CUDA ({MACHINE_CUDA})")
    programs, table, flags, _, program_size, program_count, size, count, names = (
        _HEADER.unpack_from(data)[10:]
    )
    end = max(table + count * size, programs + program_count * program_size)
    if end > len(data):
        raise CubinError(f"truncated: {len(data)} bytes of at least {end}")
    rows = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
    text = lambda at: data[at : data.index(b"\0", at)].decode()  # noqa: E731
    return flags, abi, [_section(data, row, text(rows[names][4] + row[0])) for row in rows]


def _section(data: bytes, row: tuple, name: str) -> _Section:
    _, kind, _, _, start, size, link, *_ = row
    if kind == 8:  # SHT_NOBITS: takes no bytes of the file
        return _Section(name, b"", link)
    if start + size > len(data):
        raise CubinError(f"truncated: {len(data)} bytes, section {name} ends at {start + size}")
    return _Section(name, data[start : start + size], link)


def _architecture(flags: int, abi: int) -> tuple[int, bool]:
    if abi >= 8:  # from sm_100 on
        return flags >> 8 & 0xFF, bool(flags & 0x8)
    return flags & 0xFF, bool(flags & 0x800)


def _kernels(sections: list[_Section]) -> dict[str, Needs]:
    by_name = {section.name: section for section in sections}
    if ".nv.info" not in by_name or ".symtab" not in by_name:
        raise CubinError("an ELF file without .nv.info or .symtab: no kernel in it")
    symbols = by_name[".symtab"]
    strings = sections[symbols.link].data
    found: dict[str, dict[int, int]] = {}
    for attribute, index, value in _attributes(by_name[".nv.info"].data):
        at = _SYMBOL.unpack_from(symbols.data, index * _SYMBOL.size)[0]
        found.setdefault(strings[at : strings.index(b"\0", at)].decode(), {})[attribute] = value
    return {
        name: Needs(of[REGISTER_COUNT], of.get(FRAME_SIZE, 0))
        for name, of in found.items()
        if REGISTER_COUNT in of
    }


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of each attribute of a symbol that we know."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            if attribute in (FRAME_SIZE, REGISTER_COUNT):
                yield attribute, *struct.unpack_from("<II", info, at)
            at += size
