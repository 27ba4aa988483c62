"""Makes small cubins, PTX texts and manifest entries for tests, byte by byte."""

import struct

from jax_dsa.cubins import manifest

# e_flags and e_ident[8] as the compiler writes them: read from its cubins.
FLAGS = {
    "sm_80": (0x500550, 7), "sm_90": (0x5A055A, 7), "sm_90a": (0x5A0D5A, 7),
    "sm_100": (0x6006402, 8), "sm_100a": (0x600640A, 8), "sm_103a": (0x600670A, 8),
}  # fmt: skip
PARAMETERS = (
    manifest.Parameter("q", "pointer"),
    manifest.Parameter("out", "pointer"),
    manifest.Parameter("S", "scalar", "i32"),
    manifest.Parameter("scale", "scalar", "f32"),
)


def cubin(arch="sm_90a", symbol="k", registers=32, frame=0, code=b"\0" * 16, machine=190) -> bytes:
    """An ELF file with one kernel: .symtab, .nv.info (with attributes we skip) and .text."""
    flags, abi = FLAGS[arch]
    strings = b"\0" + symbol.encode() + b"\0"
    symtab = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0x10, 4, 0, len(code))
    info = struct.pack("<BBHII", 4, 0x2F, 8, 1, registers) + struct.pack("<BBH", 3, 0x1B, 255)
    info += struct.pack("<BBHII", 4, 0x11, 8, 1, frame) + struct.pack("<BBHI", 4, 0x37, 4, 129)
    names = [b".shstrtab", b".strtab", b".symtab", b".text." + symbol.encode(), b".nv.info"]
    names = [b"", *names, b".nv.shared.reserved.0"]
    name_table = b"\0".join(names) + b"\0"
    bodies = [b"", name_table, strings, symtab, code, info, b""]
    kinds, links = [0, 3, 3, 2, 1, 0x70000000, 8], [0, 0, 0, 2, 0, 3, 0]
    headers, at, name_at = b"", 64, 0
    for name, body, kind, link in zip(names, bodies, kinds, links, strict=True):
        size = 1 << 20 if kind == 8 else len(body)  # NOBITS: larger than the file
        headers += struct.pack("<IIQQQQIIQQ", name_at, kind, 0, 0, at, size, link, 0, 1, 0)
        at, name_at = at + len(body), name_at + len(name) + 1
    ident = struct.pack("<4sBBBBB7x", b"\x7fELF", 2, 1, 1, 0x33, abi)
    rest = (2, machine, 1, 0, 0, at, flags, 64, 0, 0, 64, len(names), 1)
    return ident + struct.pack("<HHIQQQIHHHHHH", *rest) + b"".join(bodies) + headers


def ptx(arch="sm_90a", symbol="k", parameters=PARAMETERS, block=(128, 1, 1)) -> str:
    """A text with one ``.entry``."""
    words = {"i32": "u32", "f32": "f32"}
    listed = ",\n".join(
        f"\t.param .align 64 .b8 {symbol}_param_{i}[{p.bytes}]" if p.kind == "tensor_map"
        else f"\t.param .u64 .ptr .global .align 16 {symbol}_param_{i}" if p.kind == "pointer"
        else f"\t.param .{words[p.type]} {symbol}_param_{i}"
        for i, p in enumerate(parameters)
    )  # fmt: skip
    sizes = ", ".join(map(str, block))
    head = f".version 8.8\n.target {arch}\n.address_size 64\n\n"
    return f"{head}.visible .entry {symbol}(\n{listed}\n)\n.reqntid {sizes}\n{{\n\tret;\n}}\n"


def entry(**changes) -> manifest.Kernel:
    """The entry of the kernel that ``cubin()`` and ``ptx()`` make, as its source describes it."""
    fields = {
        "symbol": "", "arch": "sm_90a", "op": "forward", "parameters": PARAMETERS,
        "block": (128, 1, 1), "grid": ("G*S", "ceil(H/64)", "1"), "tools": {"cuda": "12.9"},
        "facts": {"head_dim": 512, "dtype": "bfloat16"},
    }  # fmt: skip
    return manifest.Kernel(**fields | changes)
