"""Files of loads, stores and atomics: one per opcode, operation, vector and type, with every form
of it in turn.

Each form has its own cells. Inputs come in two blocks that forms use in turn, so that an
instruction that did nothing would leave what the form before it gave.
"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Callable, Iterable
from fractions import Fraction

import formats
from files import File, register, vector
from formats import bits_of, element, integer
from values import floating, integers, mask

LANES = 8  # enough: what is tested is each form, not each lane
_GROUP = re.compile(r"(v[248]|add|min|max|and|or|xor|exch|cas|inc|dec|noftz)$")


def grouped(forms: Iterable[str]) -> dict[str, list[str]]:
    """Forms of each opcode, operation, vector and type; ld.param apart."""
    found = collections.defaultdict(list)
    for form in forms:
        parts = form.split(".")
        kept = [p for p in parts[1:-1] if _GROUP.match(p) or p == "param"]
        found[".".join([parts[0], *kept, parts[-1]])].append(form)
    return found


def width(form: str) -> int:
    """Registers of the form's vector."""
    return next((int(p[1:]) for p in form.split(".") if re.fullmatch("v[248]", p)), 1)


def spaces(form: str) -> list[str]:
    """Where to test a form: generic addresses point to both memories (vectors of atomics and of 32
    bytes: to global memory only).
    """
    found = [p.split("::")[0] for p in form.split(".") if p.split("::")[0] in ("global", "shared")]
    total = width(form) * bits_of(form.split(".")[-1]) // 8
    atomic = form.startswith(("atom", "red")) and width(form) > 1
    return found or (["global"] if total > 16 or atomic else ["global", "shared"])


class Cells:
    """Addresses of per-lane cells: global (%d<n>), shared (%r<n>) and generic shared (%d<n+1>)."""

    def __init__(self, file: File, pointer: str, size: int, number: int):
        self.wide, self.narrow = f"%d{number}", f"%r{number}"
        self.generic = f"%d{number + 1}"
        file.emit(f"mad.wide.u32 {self.wide}, %r0, {size}, {pointer};",
                  f"mov.u32 {self.narrow}, smem;",
                  f"cvt.u64.u32 {self.generic}, {self.narrow};",
                  f"cvta.shared.u64 {self.generic}, {self.generic};",
                  f"mad.wide.u32 {self.generic}, %r0, {size}, {self.generic};",
                  f"mad.lo.u32 {self.narrow}, %r0, {size}, {self.narrow};")  # fmt: skip

    def of(self, form: str, space: str) -> str:
        if space == "global":
            return self.wide
        return self.narrow if "shared" in form else self.generic


def numbers(type_: str, count: int, seed: int) -> list[int]:
    """``count`` words; extremes among integers, moderate numbers among floats."""
    one = element(type_)
    if one not in formats.FORMATS:
        rng, bits = random.Random(seed), bits_of(type_)
        edges = [0, mask(type_), 1 << bits - 1, (1 << bits - 1) - 1]
        return [rng.choice(edges) if i % 5 == 0 else rng.getrandbits(bits) for i in range(count)]
    rng = random.Random(seed)
    exact = [Fraction(rng.uniform(-2, 2)) * 2 ** rng.randint(0, 4) for _ in range(2 * count)]
    words = [formats.encode(formats.real(v), one) for v in exact]
    if type_ == one:
        return words[:count]
    return [a | b << bits_of(one) for a, b in zip(words[::2], words[1::2], strict=True)]


def places(forms: list[str]) -> list[tuple[str, str]]:
    return [(form, space) for form in forms for space in spaces(form)]


# -- loads ----------------------------------------------------------------------------------------
def extended(word: int, type_: str) -> int:
    """What a load leaves in a register of at least 32 bits."""
    return integer(word, type_) & (2**64 - 1 if bits_of(type_) == 64 else 2**32 - 1)


def store_out(file: File, out: str, offset: int, registers: list[str], wide: int) -> None:
    """Stores registers of ``wide`` bits, at most four and 16 bytes at a time."""
    per = min(128 // wide, 4)
    for i in range(0, len(registers), per):
        part = registers[i : i + per]
        kind = f".v{len(part)}" if len(part) > 1 else ""
        at = offset + i * wide // 8
        file.emit(f"st.global{kind}.b{wide} [{out}+{at}], {vector(part)};")


def load_file(name: str, forms: list[str]) -> File:
    type_, count = forms[0].split(".")[-1], width(forms[0])
    bits, wide = bits_of(type_), max(bits_of(type_), 32)
    size, where = count * bits // 8, places(forms)
    file = File(name, threads=LANES, shared=2 * LANES * size)
    words = numbers(type_, 2 * LANES * count, 1)
    cells = Cells(file, file.array("in0", type_, words), size, 10)
    blocks = -(-len(where) // 2)
    expected = [extended(w, type_) for w in words]
    out = file.array("out", f"b{wide}", expected, blocks)
    file.emit(f"mad.wide.u32 {out}, %r0, {count * wide // 8}, {out};")
    registers = [register(f"b{wide}", 20 + i) for i in range(count)]
    if any(space == "shared" for _, space in where):
        for at in (0, LANES * size):
            _transfer(file, "global", f"{cells.wide}+{at}", "shared", f"{cells.narrow}+{at}",
                      bits, count)  # fmt: skip
    where += where[: 2 * blocks - len(where)]
    for k, (form, space) in enumerate(where):
        address = f"[{cells.of(form, space)}+{k % 2 * LANES * size}]"
        file.test(form, f"{vector(registers)}, {address}")
        store_out(file, out, k * LANES * count * wide // 8, registers, wide)
    return file


def parameter_file(name: str, forms: list[str]) -> File:
    """ld.param: all lanes read the same bytes, the second vector of the parameter."""
    type_, count = forms[0].split(".")[-1], width(forms[0])
    wide = max(bits_of(type_), 32)
    file = File(name, threads=LANES)
    words = numbers(type_, 2 * count, 1)
    file.bytes_parameter("data", type_, words)
    out = file.array("out", f"b{wide}", [extended(w, type_) for w in words[count:]], LANES)
    registers = [register(f"b{wide}", 20 + i) for i in range(count)]
    file.emit(f"mad.wide.u32 {out}, %r0, {count * wide // 8}, {out};")
    file.test(forms[0], f"{vector(registers)}, [p_data+{count * bits_of(type_) // 8}]")
    store_out(file, out, 0, registers, wide)
    return file


# -- stores ---------------------------------------------------------------------------------------
def store_file(name: str, forms: list[str]) -> File:
    """Each form stores to cells of its own; those in shared memory are copied out afterwards."""
    type_, count = forms[0].split(".")[-1], width(forms[0])
    bits, size, where = bits_of(type_), count * bits_of(type_) // 8, places(forms)
    block = LANES * size
    file = File(name, threads=LANES, shared=len(where) * block)
    words = numbers(type_, LANES * count, 1)
    source = file.array("in0", type_, words)
    file.emit(f"mad.wide.u32 {source}, %r0, {size}, {source};")
    registers = [register(f"b{max(bits, 32)}", 20 + i) for i in range(count)]
    for i, r in enumerate(registers):
        file.emit(f"ld.global.u{bits} {r}, [{source}+{i * bits // 8}];")
    cells = Cells(file, file.array("out", type_, words, len(where)), size, 10)
    for k, (form, space) in enumerate(where):
        file.test(form, f"[{cells.of(form, space)}+{k * block}], {vector(registers)}")
        if space == "shared":
            _transfer(file, "shared", f"{cells.narrow}+{k * block}", "global",
                      f"{cells.wide}+{k * block}", bits, count)  # fmt: skip
    return file


OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


# -- atomics --------------------------------------------------------------------------------------
def update(operation: str, type_: str) -> Callable:
    """New word of (old, operand): exact, rounded once where the type is a float."""
    one = element(type_)
    if one in formats.FORMATS:
        number = {"add": formats.add, "min": formats.smaller, "max": formats.larger}[operation]
        return floating(number, type_)
    return integers({
        "add": lambda a, b: a + b, "min": min, "max": max, "and": int.__and__, "or": int.__or__,
        "xor": int.__xor__, "exch": lambda a, b: b, "cas": lambda a, b, c: c if a == b else a,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }[operation], type_)  # fmt: skip


def _operands(operation: str, type_: str, old: list[int]) -> list[list[int]]:
    count = len(old)
    first = [a if i % 3 == 0 else b for i, (a, b) in
             enumerate(zip(old, numbers(type_, count, 2), strict=True))]  # fmt: skip
    return [first, numbers(type_, count, 3)] if operation == "cas" else [first]


def atomic_file(name: str, forms: list[str]) -> File:
    """Every lane initialises its cell with plain stores, updates it, and stores the old value."""
    parts = forms[0].split(".")
    operation = next(p for p in parts if p in OPERATIONS)
    type_, count, returns = parts[-1], width(forms[0]), parts[0] == "atom"
    bits, size, where = bits_of(type_), count * bits_of(type_) // 8, places(forms)
    where += where[: len(where) % 2]
    block = LANES * size
    file = File(name, threads=LANES, shared=2 * block)
    old = numbers(type_, 2 * LANES * count, 1)
    operands = _operands(operation, type_, old)
    new = [update(operation, type_)(*ws) for ws in zip(old, *operands, strict=True)]
    initial = file.array("in0", type_, old)
    file.emit(f"mad.wide.u32 {initial}, %r0, {size}, {initial};")
    columns = [_load_operands(file, i, type_, count, ws) for i, ws in enumerate(operands)]
    cells = Cells(file, file.array("out", type_, new, len(where) // 2), size, 12)
    olds = file.array("out_old", type_, old, len(where) // 2) if returns else ""
    if returns:
        file.emit(f"mad.wide.u32 {olds}, %r0, {size}, {olds};")
    results = [register(f"b{bits}", 20 + i) for i in range(count)]
    for k, (form, space) in enumerate(where):
        turn = k % 2
        address = f"{cells.of(form, space)}+{k * block if space == 'global' else turn * block}"
        plain = "global" if space == "global" else "shared"
        own = f"{cells.wide}+{k * block}" if space == "global" else f"{cells.narrow}+{turn * block}"
        _transfer(file, "global", f"{initial}+{turn * block}", plain, own, bits, count)
        target = f"{vector(results)}, " if returns else ""
        file.test(form, f"{target}[{address}], {', '.join(vector(c[turn]) for c in columns)}")
        if space == "shared":
            _transfer(file, plain, own, "global", f"{cells.wide}+{k * block}", bits, count)
        if returns:
            store_out(file, olds, k * block, results, bits)
    return file


def _load_operands(file, index: int, type_: str, count: int, words: list[int]) -> list[list[str]]:
    """Registers of both blocks of an operand."""
    bits = bits_of(type_)
    pointer = file.array(f"in{index + 1}", type_, words)
    file.emit(f"mad.wide.u32 {pointer}, %r0, {count * bits // 8}, {pointer};")
    columns = []
    for turn in range(2):
        first = 30 + 16 * (2 * index + turn) if count > 1 else 30 + 2 * index + turn
        columns.append([register(f"b{bits}", first + i) for i in range(count)])
        for i, r in enumerate(columns[-1]):
            at = (turn * LANES * count + i) * bits // 8
            file.emit(f"ld.global.b{bits} {r}, [{pointer}+{at}];")
    return columns


def _transfer(file, load: str, source: str, store: str, target: str, bits: int, count: int) -> None:
    """Plain copies of one lane's elements, 16 bytes at a time where there are so many."""
    total = count * bits
    kind = f".b{total}" if total <= 64 else ".v2.b64"
    registers = vector([register("b64" if total > 64 else f"b{total}", 60 + i)
                        for i in range(1 + (total > 64))])  # fmt: skip
    for at in range(0, total // 8, 16):
        file.emit(f"ld.{load}{kind} {registers}, [{moved(source, at)}];",
                  f"st.{store}{kind} [{moved(target, at)}], {registers};")  # fmt: skip


def moved(address: str, by: int) -> str:
    """``base+offset``, so many bytes on."""
    base, offset = address.split("+")
    return f"{base}+{int(offset) + by}"


def files(forms: list[str]) -> list[File]:
    """Files of all ld, st, atom and red forms among ``forms``."""
    groups = grouped(f for f in forms if f.split(".")[0] in ("ld", "st", "atom", "red"))
    make = {"ld": load_file, "st": store_file, "atom": atomic_file, "red": atomic_file}
    return [
        (parameter_file if ".param." in name else make[name.split(".")[0]])(name, members)
        for name, members in groups.items()
    ]
