"""Files of asynchronous copies: cp.async, bulk copies and reductions, tensor copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from files import File, register
from formats import LANES, bits_of
from memory import numbers, update

HINTS = ("", ".L2::cache_hint")
# a valid policy: evict_normal
POLICY = "mov.b64 %d40, 0x1000000000000000;"


def policy(form: str) -> str:
    return ", %d40" if "cache_hint" in form else ""


def rows(name: str, words: Sequence[int], shared: int) -> tuple[File, str]:
    """%r3 shared memory, %r4 this lane's 16 bytes in it, %d10 generic; in0 likewise."""
    file = File(name, shared=shared)
    source = file.array("in0", "b32", words)
    file.emit(f"""
        mad.wide.u32 {source}, %r0, 16, {source};
        mov.u32 %r3, smem;
        mad.lo.u32 %r4, %r0, 16, %r3;
        cvt.u64.u32 %d10, %r3;
        cvta.shared.u64 %d10, %d10;
        {POLICY}""")
    return file, source


ROW = "{%r20, %r21, %r22, %r23}"


def out_rows(file: File, words: Sequence[int]) -> str:
    target = file.array("out", "b32", words)
    file.emit(f"mad.wide.u32 {target}, %r0, 16, {target};")
    return target


def clipped(words: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Rows of four words of which the first bytes are kept."""
    return [w if 4 * (i % 4) < sizes[i // 4] else 0 for i, w in enumerate(words)]


# -- cp.async -------------------------------------------------------------------------------------
def cp_async_file(cache: str) -> File:
    """Each form into rows of its own, which hold zeros before."""
    prefetch = ("", ".L2::64B", ".L2::128B", ".L2::256B")
    forms = [f"cp.async.{cache}.shared{cta}.global{hint}{p}"
             for cta in ("", "::cta") for hint in HINTS for p in prefetch]  # fmt: skip
    words = numbers("b32", 128, 1)
    file, source = rows(f"cp.async.{cache}", words, 512 * len(forms))
    sizes = [16 if cache == "cg" else (4, 8, 16)[k % 3] for k in range(len(forms))]
    target = out_rows(file, [w for s in sizes for w in clipped(words, [s] * LANES)])
    file.emit("mov.b32 %r5, 0;")
    for k, (form, size) in enumerate(zip(forms, sizes, strict=True)):
        file.emit(f"st.shared.v4.b32 [%r4+{512 * k}], {{%r5, %r5, %r5, %r5}};")
        file.test(form, f"[%r4+{512 * k}], [{source}], {size}{policy(form)}")
    file.test("cp.async.wait_all")
    for k in range(len(forms)):
        file.emit(f"ld.shared.v4.b32 {ROW}, [%r4+{512 * k}];",
                  f"st.global.v4.b32 [{target}+{512 * k}], {ROW};")  # fmt: skip
    return file


def cp_async_sizes_file() -> File:
    """Source sizes of 0 to 16 bytes and ignored sources: zeros follow."""
    words = numbers("b32", 128, 1)
    file, source = rows("cp.async source sizes", words, 4 * 512)
    sizes = [4 * (i % 5) for i in range(LANES)]
    kept = [16 * (i >= 8) for i in range(LANES)]
    target = out_rows(file, (clipped(words, sizes) + clipped(words, kept)) * 2)
    file.emit("rem.u32 %r5, %r0, 5;", "shl.b32 %r5, %r5, 2;", "setp.lt.u32 %p1, %r0, 8;")
    for k, hint in enumerate(HINTS):
        form = f"cp.async.cg.shared.global{hint}"
        file.test(form, f"[%r4+{1024 * k}], [{source}], 16, %r5{policy(form)}")
        file.test(form, f"[%r4+{1024 * k + 512}], [{source}], 16, %p1{policy(form)}")
    file.emit("cp.async.wait_all;")
    for k in range(4):
        file.emit(f"ld.shared.v4.b32 {ROW}, [%r4+{512 * k}];",
                  f"st.global.v4.b32 [{target}+{512 * k}], {ROW};")  # fmt: skip
    return file


def cp_async_groups_file() -> File:
    words = numbers("b32", 256, 1)
    file, source = rows("cp.async.wait_group", words, 1024)
    target = out_rows(file, words)
    for k in range(2):
        file.emit(f"cp.async.cg.shared.global [%r4+{512 * k}], [{source}+{512 * k}], 16;")
        file.test("cp.async.commit_group")
    for k in range(2):
        file.test("cp.async.wait_group", f"{1 - k}")
        file.emit(f"ld.shared.v4.b32 {ROW}, [%r4+{512 * k}];",
                  f"st.global.v4.b32 [{target}+{512 * k}], {ROW};")  # fmt: skip
    return file


def wait(file: File, barrier: int, label: str) -> None:
    """Waits for phase 0 of the mbarrier ``barrier`` bytes into shared memory."""
    file.emit(f"{label}:", f"mbarrier.try_wait.parity.shared.b64 %p3, [%r3+{barrier}], 0;",
              f"@!%p3 bra {label};")  # fmt: skip


def cp_async_arrive_file() -> File:
    """A lane reads its neighbour's row once all lanes' copies have arrived."""
    spaces = ("", ".shared", ".shared::cta")
    forms = [f"cp.async.mbarrier.arrive{n}{s}.b64" for n in ("", ".noinc") for s in spaces]
    words = numbers("b32", 128, 1)
    file, source = rows("cp.async.mbarrier.arrive", words, 512 * len(forms) + 128)
    at = 512 * len(forms)
    target = out_rows(file, [words[i ^ 4] for i in range(128)] * len(forms))
    file.emit("setp.ne.u32 %p2, %r0, 0;", "@%p2 bra READY;")
    for k, form in enumerate(forms):
        count = 64 if "noinc" in form else 32
        file.emit(f"mbarrier.init.shared.b64 [%r3+{at + 8 * k}], {count};")
    file.emit("READY:", "bar.sync 0;", "xor.b32 %r5, %r4, 16;")
    for k, form in enumerate(forms):
        file.emit(f"cp.async.cg.shared.global [%r4+{512 * k}], [{source}], 16;")
        file.test(form, f"[{'%r3' if 'shared' in form else '%d10'}+{at + 8 * k}]")
        file.emit(f"mbarrier.arrive.shared.b64 _, [%r3+{at + 8 * k}];")
        wait(file, at + 8 * k, f"TRY{k}")
        file.emit(f"ld.shared.v4.b32 {ROW}, [%r5+{512 * k}];",
                  f"st.global.v4.b32 [{target}+{512 * k}], {ROW};")  # fmt: skip
    return file


# -- bulk copies ----------------------------------------------------------------------------------
def bulk_load_file() -> File:
    """Lane 0 copies each form's 512 bytes; all lanes wait and read."""
    forms = [f"cp.async.bulk.shared::{s}.global.mbarrier::complete_tx::bytes{h}"
             for s in ("cta", "cluster") for h in HINTS]  # fmt: skip
    words = numbers("b32", 128 * len(forms), 1)
    file, source = rows("cp.async.bulk.shared", words, 512 * len(forms) + 128)
    target, at = out_rows(file, words), 512 * len(forms)
    file.emit("setp.ne.u32 %p2, %r0, 0;", "@%p2 bra READY;")
    for k in range(len(forms)):
        file.emit(f"mbarrier.init.shared.b64 [%r3+{at + 8 * k}], 1;")
    for k, form in enumerate(forms):
        bar = f"[%r3+{at + 8 * k}]"
        file.emit(f"mbarrier.arrive.expect_tx.shared.b64 _, {bar}, 512;")
        file.test(form, f"[%r3+{512 * k}], [{source}+{512 * k}], 512, {bar}{policy(form)}")
    file.emit("READY:", "bar.sync 0;")
    for k in range(len(forms)):
        wait(file, at + 8 * k, f"TRY{k}")
        file.emit(f"ld.shared.v4.b32 {ROW}, [%r4+{512 * k}];",
                  f"st.global.v4.b32 [{target}+{512 * k}], {ROW};")  # fmt: skip
    return file


def bulk_store_file() -> File:
    """Generic stores, each kind of proxy fence, a store by lane 0, each kind of wait."""
    forms = [f"cp.async.bulk.global.shared::cta.bulk_group{h}" for h in HINTS] * 2
    fences = ("", ".shared::cta", ".shared::cluster", "")
    words = numbers("b32", 128, 1)
    file, source = rows("cp.async.bulk.global", words, 512 * len(forms))
    target = file.array("out", "b32", words, len(forms))
    file.emit(f"ld.global.v4.b32 {ROW}, [{source}];", "setp.ne.u32 %p2, %r0, 0;")
    for k, fence in enumerate(fences):
        file.emit(f"st.shared.v4.b32 [%r4+{512 * k}], {ROW};")
        file.test(f"fence.proxy.async{fence}")
    file.emit("bar.warp.sync -1;", "@%p2 bra END;")
    for k, form in enumerate(forms):
        file.test(form, f"[{target}+{512 * k}], [%r3+{512 * k}], 512{policy(form)}")
        file.test("cp.async.bulk.commit_group")
    file.test("cp.async.bulk.wait_group.read", "1")
    file.test("cp.async.bulk.wait_group", "0")
    file.emit("END:")
    return file


def global_fence_file() -> File:
    """Generic stores to global memory, fence.proxy.async.global, a bulk load of them."""
    words = numbers("b32", 128, 1)
    file, source = rows("fence.proxy.async.global", words, 512 + 128)
    scratch = file.array("scratch", "b32", [0] * 128)
    target = out_rows(file, words)
    file.emit(f"ld.global.v4.b32 {ROW}, [{source}];", f"mad.wide.u32 %d20, %r0, 16, {scratch};",
              f"st.global.v4.b32 [%d20], {ROW};")  # fmt: skip
    file.test("fence.proxy.async.global")
    file.emit(f"""
        bar.warp.sync -1;
        setp.ne.u32 %p2, %r0, 0;
        @%p2 bra READY;
        mbarrier.init.shared.b64 [%r3+512], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3+512], 512;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [{scratch}], 512,
        [%r3+512];
        READY:
        bar.sync 0;""")
    wait(file, 512, "TRY")
    file.emit(f"ld.shared.v4.b32 {ROW}, [%r4];", f"st.global.v4.b32 [{target}], {ROW};")
    return file


def bulk_reduce_file(type_: str, operations: Sequence[str]) -> File:
    """All operations on one type: lanes store first operands, lane 0 reduces."""
    forms = [(o, f"cp.reduce.async.bulk.global.shared::cta.bulk_group{h}.{o}.{type_}")
             for o in operations for h in HINTS]  # fmt: skip
    bits, size = bits_of(type_), bits_of(type_) // 8
    old, new = numbers(type_, LANES, 1), numbers(type_, LANES, 2)
    new[:4] = old[:4]
    file = File(f"cp.reduce.async.bulk.{type_}", shared=LANES * size)
    first, second = file.array("in0", type_, old), file.array("in1", type_, new)
    expected = [update(o.split(".")[0], type_)(*ws) for o, _ in forms
                for ws in zip(old, new, strict=True)]  # fmt: skip
    target, r = file.array("out", type_, expected), register(f"b{bits}", 20)
    file.emit(f"mov.u32 %r3, smem;\nmad.lo.u32 %r4, %r0, {size}, %r3;", POLICY)
    file.emit(f"""
        mad.wide.u32 {second}, %r0, {size}, {second};
        ld.global.b{bits} {r}, [{second}];
        st.shared.b{bits} [%r4], {r};
        mad.wide.u32 {first}, %r0, {size}, {first};
        ld.global.b{bits} {r}, [{first}];
        mad.wide.u32 %d30, %r0, {size}, {target};""")
    for k in range(len(forms)):
        file.emit(f"st.global.b{bits} [%d30+{LANES * size * k}], {r};")
    file.emit(
        "fence.proxy.async;", "bar.warp.sync -1;", "setp.ne.u32 %p2, %r0, 0;", "@%p2 bra END;"
    )
    for k, (_, form) in enumerate(forms):
        at = LANES * size * k
        file.test(form, f"[{target}+{at}], [%r3], {LANES * size}{policy(form)}")
    file.emit("cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "END:")
    return file


def bulk_reduce_files() -> list[File]:
    limits, logic = ["min", "max"], ["and", "or", "xor"]
    found = {
        "u32": ["add", *limits, "inc", "dec"], "s32": ["add", *limits], "u64": ["add", *limits],
        "s64": limits, "f32": ["add"], "f64": ["add"], "b32": logic, "b64": logic,
        "f16": ["add.noftz", *limits], "bf16": ["add.noftz", *limits],
    }  # fmt: skip
    return [bulk_reduce_file(*item) for item in found.items()]


# -- tensor copies --------------------------------------------------------------------------------
DIMS = ((104,), (24, 10), (24, 10, 3), (24, 4, 3, 3), (24, 3, 3, 3, 2))
BOXES = ((64,), (16, 4), (16, 4, 2), (16, 2, 2, 2), (16, 2, 2, 2, 2))
STARTS = ((50,), (12, 8), (-4, -2, 2), (12, 1, -1, 2), (-3, 2, 1, 0, 1))


def inside(index: Sequence[int], dims: Sequence[int]) -> bool:
    return all(0 <= i < n for i, n in zip(index, dims, strict=True))


def position(index: Sequence[int], dims: Sequence[int]) -> int:
    """Number of an element, innermost dimension first."""
    return sum(i * math.prod(dims[:d]) for d, i in enumerate(index))


def indices(start: Sequence[int], box: Sequence[int]) -> list[tuple[int, ...]]:
    """Elements of a box in the order in which they lie in shared memory."""
    spans = [range(s, s + n) for s, n in zip(start, box, strict=True)]
    return [tuple(reversed(i)) for i in itertools.product(*reversed(spans))]


def list_of(numbers_: Sequence[int]) -> str:
    return "x".join(map(str, numbers_)) or "-"


def described(type_: str, dims, box, swizzle: str = "NONE", bits: int = 16) -> str:
    """The header text of a dense tensor's map."""
    strides = [math.prod(dims[:d]) * bits // 8 for d in range(1, len(dims))]
    return f"{type_} {list_of(dims)} {list_of(strides)} {list_of(box)} {swizzle}"


def coordinates(file: File, values: Sequence[int], first: int = 60) -> str:
    names = [f"%r{first + i}" for i in range(len(values))]
    file.emit(*(f"mov.b32 {r}, {v};" for r, v in zip(names, values, strict=True)))
    return "{" + ", ".join(names) + "}"


def tensor_load_file(name: str, forms: Sequence[str], text: str, words: list[int],
                     at: Sequence[int], expected: list[int]) -> File:  # fmt: skip
    """Every form loads the box into a kilobyte of its own; all lanes copy it out as it lies."""
    file = File(name, shared=1024 * len(forms) + 1024)
    count, bar = len(expected) * 2, 1024 * len(forms)
    file.array("in0", "b16", words)
    tensor = file.tensor_map("map", "in0", text)
    target = file.array("out", "b16", expected, len(forms))
    file.emit("mov.u32 %r3, smem;", "mad.lo.u32 %r4, %r0, 4, %r3;", POLICY)
    file.emit(f"mad.wide.u32 {target}, %r0, 4, {target};", "setp.ne.u32 %p2, %r0, 0;")
    place = coordinates(file, at)
    file.emit("@%p2 bra READY;")
    for k in range(len(forms)):
        file.emit(f"mbarrier.init.shared.b64 [%r3+{bar + 8 * k}], 1;")
    if len(at) < 4 and "gather" not in name:
        file.test(
            f"cp.async.bulk.prefetch.tensor.{len(at)}d.L2.global.tile", f"[{tensor}, {place}]"
        )
    file.test("prefetch.tensormap", f"[{tensor}]")
    for k, form in enumerate(forms):
        b = f"[%r3+{bar + 8 * k}]"
        file.emit(f"mbarrier.arrive.expect_tx.shared.b64 _, {b}, {count};")
        file.test(form, f"[%r3+{1024 * k}], [{tensor}, {place}], {b}{policy(form)}")
    file.emit("READY:", "bar.sync 0;")
    for k in range(len(forms)):
        wait(file, bar + 8 * k, f"TRY{k}")
        for part in range(0, count, 128):
            guard = f"@%p{4} " if count - part < 128 else ""
            if guard:
                file.emit(f"setp.lt.u32 %p4, %r0, {(count - part) // 4};")
            file.emit(f"{guard}ld.shared.b32 %r20, [%r4+{1024 * k + part}];",
                      f"{guard}st.global.b32 [{target}+{count * k + part}], %r20;")  # fmt: skip
    return file


def _load_forms(rank: str, mode: str, group: str) -> list[str]:
    return [f"cp.async.bulk.tensor.{rank}.shared::{s}.global{mode}.mbarrier::complete_tx::bytes"
            f"{group}{h}" for s in ("cta", "cluster") for h in HINTS]  # fmt: skip


def tensor_load_files() -> list[File]:
    found = []
    for rank, (dims, box, start) in enumerate(zip(DIMS, BOXES, STARTS, strict=True), 1):
        words = numbers("b16", math.prod(dims), rank)
        expected = [words[position(i, dims)] if inside(i, dims) else 0 for i in indices(start, box)]
        for group in ("", ".cta_group::1"):
            forms = [f for m in ("", ".tile") for f in _load_forms(f"{rank}d", m, group)]
            found.append(tensor_load_file(
                f"cp.async.bulk.tensor.{rank}d{group}", forms, described("UINT16", dims, box),
                words, start, expected))  # fmt: skip
    return [*found, *swizzle_files(), *gather_files()]


def swizzle_files() -> list[File]:
    """Bits 4.. of a byte's address are xored with bits 7..; boxes lie at multiples of 1024."""
    found = []
    for bits, width in ((1, 16), (2, 32), (3, 64)):
        dims, box = (width + 16, 9), (width, 8)
        words = numbers("b16", math.prod(dims), bits)
        plain = [words[position(i, dims)] if inside(i, dims) else 0 for i in indices((8, 2), box)]
        expected = [0] * len(plain)
        for i, word in enumerate(plain):
            expected[(2 * i ^ (2 * i >> 7 & (1 << bits) - 1) << 4) // 2] = word
        name = f"{16 << bits}B"
        text = described("UINT16", dims, box, name)
        found.append(tensor_load_file(f"cp.async.bulk.tensor.2d swizzle {name}",
                                      _load_forms("2d", ".tile", "")[:1], text, words, (8, 2),
                                      expected))  # fmt: skip
    return found


def gather_files() -> list[File]:
    """Four rows by number; those outside the tensor read as 0 and are not stored."""
    dims, picked = (64, 12), (16, 9, 2, -1, 11)
    words = numbers("b16", math.prod(dims), 7)
    chosen = [[words[64 * r + 16 + c] if 0 <= r < 12 else 0 for c in range(32)] for r in picked[1:]]
    rows_ = [w for row in chosen for w in row]
    forms = [f for g in ("", ".cta_group::1") for f in _load_forms("2d", ".tile::gather4", g)]
    load = tensor_load_file("cp.async.bulk.tensor gather4", forms,
                            described("UINT16", dims, (32, 1)), words, picked, rows_)  # fmt: skip
    return [load, scatter_file(dims, picked)]


def shared_source(name: str, type_: str, words: list[int]) -> File:
    """A file with ``in0`` copied to shared memory and shown to the asynchronous proxy."""
    bits = bits_of(type_)
    words = words + [0] * (-len(words) % LANES)
    file = File(name, shared=max(len(words) * bits // 8, 128))
    source, r = file.array("in0", type_, words), register(f"b{bits}", 20)
    file.emit("mov.u32 %r3, smem;", f"mad.lo.u32 %r4, %r0, {bits // 8}, %r3;", POLICY,
              f"mad.wide.u32 {source}, %r0, {bits // 8}, {source};")  # fmt: skip
    for part in range(0, len(words), LANES):
        at = part * bits // 8
        file.emit(f"ld.global.b{bits} {r}, [{source}+{at}];", f"st.shared.b{bits} [%r4+{at}], {r};")
    return file


def issue(file: File, copies: Sequence[tuple[str, str]]) -> None:
    """Lane 0 issues (form, operands) and waits."""
    file.emit(
        "fence.proxy.async;", "bar.warp.sync -1;", "setp.ne.u32 %p2, %r0, 0;", "@%p2 bra END;"
    )
    for form, operands in copies:
        file.test(form, operands)
    file.emit("cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "END:")


def _store_file(name: str, forms, dims, box, at, targets: list[tuple[int, ...]]) -> File:
    """Each form stores the box to a tensor of its own; ``targets``: element of each stored word."""
    words = numbers("b16", len(targets), 5)
    file, copies = shared_source(name, "b16", words), []
    expected = [0] * math.prod(dims)
    for word, index in zip(words, targets, strict=True):
        if inside(index, dims):
            expected[position(index, dims)] = word
    place = coordinates(file, at)
    for k, form in enumerate(forms):
        file.array(f"out{k}", "b16", expected)
        tensor = file.tensor_map(f"map{k}", f"out{k}", described("UINT16", dims, box))
        copies.append((form, f"[{tensor}, {place}], [%r3]{policy(form)}"))
    issue(file, copies)
    return file


def scatter_file(dims, picked) -> File:
    forms = [
        f"cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group{h}" for h in HINTS
    ]
    targets = [(picked[0] + c, row) for row in picked[1:] for c in range(32)]
    return _store_file("cp.async.bulk.tensor scatter4", forms, dims, (32, 1), picked, targets)


def tensor_store_files() -> list[File]:
    return [
        _store_file(
            f"cp.async.bulk.tensor.{rank}d store",
            [f"cp.async.bulk.tensor.{rank}d.global.shared::cta{m}.bulk_group{h}"
             for m in ("", ".tile") for h in HINTS],
            dims, box, start, indices(start, box))
        for rank, (dims, box, start) in enumerate(zip(DIMS, BOXES, STARTS, strict=True), 1)
    ]  # fmt: skip


_MAP_TYPES = {"u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64", "f16": "FLOAT16",
              "bf16": "BFLOAT16", "f32": "FLOAT32"}  # fmt: skip
_REDUCED = ((64,), (64, 2), (64, 2, 2), (64, 2, 1, 2), (64, 1, 2, 1, 2))


def tensor_reduce_file(name: str, rank: int, operations, type_: str) -> File:
    """The four forms of an operation side by side in one tensor, the last one partly outside."""
    dims, bits = _REDUCED[rank - 1], bits_of(type_)
    box = (16, *dims[1:])
    old, new = numbers(type_, math.prod(dims), 1), numbers(type_, math.prod(box), 2)
    file, copies, first = shared_source(name, type_, new), [], ""
    initial, r = file.array("in1", type_, old), register(f"b{bits}", 20)
    file.emit(f"mad.wide.u32 {initial}, %r0, {bits // 8}, {initial};")
    for operation in operations:
        fn, expected = update(operation, type_), list(old)
        starts = (0, 16, 32, 52)
        target = f"out_{operation}"
        forms = [f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}{m}"
                 f".bulk_group{h}" for m in ("", ".tile") for h in HINTS]  # fmt: skip
        for start in starts:
            for word, index in zip(new, indices((start, *[0] * (rank - 1)), box), strict=True):
                if inside(index, dims):
                    at = position(index, dims)
                    expected[at] = fn(expected[at], word)
        first = file.array(target, type_, expected)
        file.emit(f"mad.wide.u32 {first}, %r0, {bits // 8}, {first};")
        for part in range(0, len(old), LANES):
            at = part * bits // 8
            file.emit(
                f"ld.global.b{bits} {r}, [{initial}+{at}];",
                f"st.global.b{bits} [{first}+{at}], {r};",
            )
        tensor = file.tensor_map(f"map_{operation}", target,
                                 described(_MAP_TYPES[type_], dims, box, bits=bits))  # fmt: skip
        for k, form in enumerate(forms):
            names = [f"%r{60 + k}"] + ["%r64"] * (rank - 1)
            copies.append((form, f"[{tensor}, {{{', '.join(names)}}}], [%r3]{policy(form)}"))
    coordinates(file, (0, 16, 32, 52, 0))
    issue(file, copies)
    return file


def tensor_reduce_files() -> list[File]:
    everything = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
    found = [
        tensor_reduce_file(f"cp.reduce.async.bulk.tensor.{rank}d", rank, everything, "u32")
        for rank in range(1, 6)
    ]
    types = {"s32": "min max add", "u64": "add min", "s64": "min max", "f32": "add",
             "f16": "add min max", "bf16": "add min max"}  # fmt: skip
    return found + [
        tensor_reduce_file(f"cp.reduce.async.bulk.tensor.2d {t}", 2, names.split(), t)
        for t, names in types.items()
    ]


def files() -> list[File]:
    return [
        cp_async_file("ca"), cp_async_file("cg"), cp_async_sizes_file(), cp_async_groups_file(),
        cp_async_arrive_file(), bulk_load_file(), bulk_store_file(), global_fence_file(),
        *bulk_reduce_files(), *tensor_load_files(), *tensor_store_files(), *tensor_reduce_files(),
    ]  # fmt: skip
