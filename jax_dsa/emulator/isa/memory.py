"""Loads, stores and atomics of threads (PTX ISA 9.7.9.8-9.7.9.13, 9.7.13.7-9.7.13.8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_dsa.emulator.barriers import Flag
from jax_dsa.emulator.events import ATOMIC, ATOMIC_READ, ATOMIC_WRITE, READ, WRITE
from jax_dsa.emulator.isa.addressing import ALL, places, told
from jax_dsa.emulator.isa.numerics import larger, narrow_bf16, smaller, widen_bf16
from jax_dsa.emulator.isa.table import effect
from jax_dsa.emulator.ptx.syntax import SIZES
from jax_dsa.emulator.registers import dtype_of

NARROW = "{b8|b16|b32|u8|u16|u32|s8|s16|s32|f32}"
DOUBLE = "{b64|u64|s64|f64}"
# one register, vectors of up to 16 bytes, and those of 32 bytes, which exist for global memory only
ELEMENTS = (f".{NARROW}", f".{DOUBLE}", f".{{v2|v4}}.{NARROW}", f".v2.{DOUBLE}")
WIDE = (".v8.{b32|u32|s32|f32}", f".v4.{DOUBLE}")
SPACE = "{|.global|.shared|.shared::cta}"
SCOPE = "{cta|cluster|gpu|sys}"
CACHE = ".L1::no_allocate|.L1::evict_first|.L1::evict_last|.L1::evict_normal"
SCOPES = ("cta", "cluster", "gpu", "sys")


def space_of(parts: list[str]) -> str:
    return next(
        (p.split("::")[0] for p in parts if p.split("::")[0] in ("global", "shared", "param")), ""
    )


def _flags(group, place, parts: list[str]):
    """The words accessed, as Flags; ``.cta`` scope orders threads of one CTA only."""
    scope = next((p for p in parts if p in SCOPES), "gpu")
    owner = str(group.cta) if scope == "cta" else "device"
    flags = group.machine.memory.flags
    for offset in np.unique(place.offsets).tolist():
        address = place.memory.base + offset
        yield flags.setdefault((address, owner, place.memory.name), Flag(address, scope))


def _publish(group, ins, place, parts: list[str]) -> None:
    """Before an atomic write: a release makes an edge, a relaxed one after a fence."""
    on = group.machine.on
    if _releases(parts) and on.arrive:
        for flag in _flags(group, place, parts):
            on.arrive(group, flag, 0, ins)
    elif group.machine.memory.fenced and on.relaxed:
        for flag in _flags(group, place, parts):
            on.relaxed(group, flag, True, ins)


def _learn(group, ins, place, parts: list[str]) -> None:
    """After an atomic read: an acquire makes an edge, a relaxed one before a fence."""
    on = group.machine.on
    if _acquires(parts) and on.observe:
        for flag in _flags(group, place, parts):
            on.observe(group, flag, 0, ins)
    elif group.machine.memory.fenced and on.relaxed:
        for flag in _flags(group, place, parts):
            on.relaxed(group, flag, False, ins)


def _acquires(parts) -> bool:
    return "acquire" in parts or "acq_rel" in parts


def _releases(parts) -> bool:
    return "release" in parts or "acq_rel" in parts


def _forms(stem: str, space: str = SPACE, wide: str = "{|.global}") -> list[str]:
    """Templates of a load or store, its vectors of 32 bytes in the ``wide`` spaces."""
    return [f"{stem}{space}{e}" for e in ELEMENTS] + [f"{stem}{wide}{e}" for e in WIDE]


@effect(
    *_forms("ld{|.weak|.volatile}"),
    *[f"ld.param{e}" for e in ELEMENTS],
    *_forms(f"ld.global{{.ca|.cg|.cs|.cv|.lu|{CACHE}}}", "", ""),
    *_forms(f"ld.global.nc{{|.ca|.cg|.cs|{CACHE}}}", "", ""),
    *_forms(f"ld{{.relaxed|.acquire}}.{SCOPE}"),
)
def ld(asm, ins, parts):
    """Load, one or several elements per lane (9.7.9.8, 9.7.9.9)."""
    type_, size, space = parts[-1], SIZES[parts[-1]], space_of(parts)
    destinations = [
        None if t is None else asm.destination(t, type_) for t in asm.items(ins.operands[0])
    ]
    targets = [(i, t) for i, t in enumerate(destinations) if t is not None]
    base, offset = asm.address(ins.operands[1])
    dtype, count = dtype_of(type_), len(destinations)
    total, atomic = size * count, "relaxed" in parts or "acquire" in parts
    fixed = asm.layout.constant_of(base)
    if space == "param" and fixed is not None and (fixed[0] + offset) % total == 0:
        return _bind_parameter(int(fixed[0]) + offset, targets, dtype, total, ins)

    def run(group, active):
        for place in places(group, active, base, offset, total, space, ins):
            rows = place.memory.rows(dtype, count).take(place.offsets // total, axis=0)
            for i, target in targets:
                if place.lanes is ALL:
                    group.R[target][:] = rows[:, i]
                else:
                    group.R[target][place.lanes] = rows[:, i]
            if place.memory.space != "param":
                told(group, ins, place, total, ATOMIC_READ if atomic else READ)
            if atomic:
                _learn(group, ins, place, parts)

    return run


def _bind_parameter(address: int, targets, dtype: np.dtype, total: int, ins):
    """A parameter at a fixed address: one value for all lanes."""

    def run(group, active):
        params = group.machine.params
        if address + total > params.size:
            text = f"accesses {total} bytes at param address {address:#x}"
            group.machine.fault("out of bounds", group, ins, text)
            return
        values = params.typed(dtype)
        for i, target in targets:
            np.copyto(group.R[target], values[address // dtype.itemsize + i], where=active)

    return run


@effect(
    *_forms("st{|.weak|.volatile}"),
    *_forms(f"st.global{{.wb|.cg|.cs|.wt|{CACHE}}}", "", ""),
    *_forms(f"st{{.relaxed|.release}}.{SCOPE}"),
)
def st(asm, ins, parts):
    """Store, one or several elements per lane (9.7.9.12)."""
    type_, size, space = parts[-1], SIZES[parts[-1]], space_of(parts)
    sources = [asm.source(s, type_) for s in asm.items(ins.operands[1])]
    base, offset = asm.address(ins.operands[0])
    dtype, count = dtype_of(type_), len(sources)
    total, atomic = size * count, "relaxed" in parts or "release" in parts

    def run(group, active):
        for place in places(group, active, base, offset, total, space, ins):
            if atomic:
                _publish(group, ins, place, parts)
            index = place.offsets // total
            if count == 1:
                place.memory.typed(dtype)[index] = _of_lanes(group, sources[0], place.lanes)
            else:
                place.memory.rows(dtype, count)[index] = _stack(group, sources, place.lanes)
            told(group, ins, place, total, ATOMIC_WRITE if atomic else WRITE)

    return run


def _bf16(fn):
    return lambda a, b: narrow_bf16(fn(widen_bf16(a), widen_bf16(b)))


_UPDATE: dict[str, Callable] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, b: b, "inc": lambda old, b: np.where(old >= b, 0,
    old + 1),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - 1),
    "cas": lambda old, b, c: np.where(old == b, c, old),
}  # fmt: skip
# element type in memory of packed types
_ELEMENT = {"bf16x2": "bf16", "f16x2": "f16"}


_FLOAT_UPDATE: dict[str, Callable] = {"min": smaller, "max": larger}


def update_of(operation: str, type_: str):
    """The function (old, operand, ...) -> new of an atomic on elements of ``type_``."""
    is_float = type_.startswith(("f", "bf"))
    fn = _FLOAT_UPDATE.get(operation, _UPDATE[operation]) if is_float else _UPDATE[operation]
    return _bf16(fn) if type_.startswith("bf16") else fn


def _bind_atomic(asm, ins, parts, has_result: bool):
    type_ = parts[-1]
    element = str(_ELEMENT.get(type_, type_))
    operation = next(p for p in parts[1:] if p in _UPDATE)
    operands = list(ins.operands)
    results = asm.items(operands.pop(0)) if has_result else []
    targets = [None if r is None else asm.destination(r, type_) for r in results]
    base, offset = asm.address(operands.pop(0))
    columns = [asm.items(o) for o in operands]
    sources = [[asm.source(item, type_) for item in column] for column in columns]
    size = dtype_of(element).itemsize
    total = dtype_of(type_).itemsize * (2 if element != type_ else 1) * len(sources[0])
    fn, space, dtype = update_of(operation, type_), space_of(parts), dtype_of(element)
    count = total // size

    def run(group, active):
        for place in places(group, active, base, offset, total, space, ins):
            _publish(group, ins, place, parts)
            operands = [_stack(group, column, place.lanes) for column in sources]
            old = apply(place.memory.rows(dtype, count), place.offsets // total, fn, operands)
            if group.machine.on.update:
                form = (operation, type_, element, count)
                group.machine.on.update(place.memory, form, place.offsets // total, operands)
            per = count // max(len(targets), 1)
            for i, target in enumerate(targets):
                if target is not None:
                    piece = old[:, i * per : (i + 1) * per]
                    group.R[target][place.lanes] = piece if per > 1 else piece[:, 0]
            told(group, ins, place, total, ATOMIC)
            _learn(group, ins, place, parts)

    return run


def _of_lanes(group, view: int, lanes: np.ndarray) -> np.ndarray:
    values = group.R[view]
    return values if lanes is ALL else values[lanes]


def _stack(group, views, lanes) -> np.ndarray:
    """Registers side by side: [lanes, elements]."""
    columns = [_of_lanes(group, v, lanes) for v in views]
    if columns[0].ndim > 1:
        return np.concatenate(columns, axis=1)
    stacked = np.empty((lanes.size, len(columns)), columns[0].dtype)
    for i, column in enumerate(columns):
        stacked[:, i] = column
    return stacked


def apply(rows: np.ndarray, index: np.ndarray, fn, operands: list[np.ndarray]) -> np.ndarray:
    """Read-modify-write of whole rows, lane after lane where lanes collide; the old rows."""
    if len(set(index.tolist())) == index.size:
        old = rows.take(index, axis=0)
        rows[index] = fn(old, *operands)
        return old
    old = np.empty_like(operands[0])
    for lane, row in enumerate(index.tolist()):
        old[lane] = rows[row]
        rows[row] = fn(old[lane], *[o[lane] for o in operands])
    return old


_SCALAR = (
    "add.{u32|s32|u64|f32|f64}", "add.noftz.{f16|bf16|f16x2|bf16x2}",
    "{min|max}.{u32|s32|u64|s64}", "{and|or|xor}.{b32|b64}", "{inc|dec}.u32",
)  # fmt: skip
_VECTOR = (
    "add.{v2|v4}.f32", "{add|min|max}.noftz.{v2|v4|v8}.{f16|bf16}",
    "{add|min|max}.noftz.{v2|v4}.{f16x2|bf16x2}",
)  # fmt: skip


def _atomics(opcode: str, orders: str, scalar: tuple[str, ...]) -> list[str]:
    """Templates of an atomic: vectors exist in global memory only."""
    stems = (opcode, f"{opcode}.{{{orders}}}.{SCOPE}")
    return [f"{s}{{|.global|.shared|.shared::cta}}.{form}" for s in stems for form in scalar] + [
        f"{s}{{|.global}}.{form}" for s in stems for form in _VECTOR
    ]


@effect(*_atomics("atom", "relaxed|acquire|release|acq_rel", (*_SCALAR, "{exch|cas}.{b32|b64}")))
def atom(asm, ins, parts):
    """Atomic read-modify-write that returns the old value (9.7.13.7)."""
    return _bind_atomic(asm, ins, parts, has_result=True)


@effect(*_atomics("red", "relaxed|release", _SCALAR))
def red(asm, ins, parts):
    """Atomic read-modify-write without a result (9.7.13.8)."""
    return _bind_atomic(asm, ins, parts, has_result=False)


@effect(
    "prefetch.tensormap",
    "prefetch{|.global}.{L1|L2}",
    "prefetchu.L1",
    "discard{|.global}.L2",
    "applypriority{|.global}.L2::evict_normal",
)
def prefetch(asm, ins, parts):
    """Hints without a result (9.7.9.17)."""
    return lambda group, active: None
