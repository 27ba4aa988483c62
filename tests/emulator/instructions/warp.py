"""Files of exchanges within a warp, matrices, address conversions and hints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from files import File
from formats import LANES, inputs
from memory import numbers, update

SHARED = ("", ".shared", ".shared::cta")


def warp_file(name: str, type_: str, words: list[int], shared: int = 0) -> tuple[File, str]:
    """A file whose lanes hold one word of ``in0`` each; returns it and the register."""
    file = File(name, shared=shared)
    source = file.array("in0", type_, words)
    file.emit(f"mad.wide.u32 {source}, %r0, 4, {source};", f"ld.global.b32 %r20, [{source}];")
    return file, "%r20"


def out(file: File, name: str, type_: str, words: list[int]) -> str:
    """An output with blocks of one word per lane, addressed by this lane."""
    pointer = file.array(name, type_, words)
    file.emit(f"mad.wide.u32 {pointer}, %r0, 4, {pointer};")
    return pointer


# -- shuffles, votes, elections, reductions -------------------------------------------------------
def shuffled(mode: str, lane: int, by: int, clamp: int) -> tuple[int, bool]:
    """(lane to read, in range) as in the pseudo-code of 9.7.9.6."""
    segment, low = clamp >> 8 & 31, lane & clamp >> 8 & 31
    limit = low | clamp & ~segment & 31
    j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment & 31}
    ok = j[mode] >= limit if mode == "up" else j[mode] <= limit
    return (j[mode] if ok else lane), ok


def shuffle_file(mode: str) -> File:
    file, source = warp_file(f"shfl.sync.{mode}.b32", "b32", inputs("b32", 1))
    words, tail = inputs("b32", 1), 0 if mode == "up" else 31
    cases = [(4, tail), (1, 0x1800 | tail), (3, 0x1C00 | tail), (9, 0x1000 | tail & 7), (0, tail)]
    found = [shuffled(mode, lane, *case) for case in cases for lane in range(LANES)]
    target = out(file, "out", "b32", [words[j] for j, _ in found])
    inside = out(file, "out_inside", "b32", [int(ok) for _, ok in found])
    for k, (by, clamp) in enumerate(cases):
        file.test(file.name, f"%r30|%p1, {source}, {by}, {clamp}, -1")
        file.emit("selp.b32 %r31, 1, 0, %p1;", f"st.global.b32 [{target}+{128 * k}], %r30;",
                  f"st.global.b32 [{inside}+{128 * k}], %r31;")  # fmt: skip
    return file


def vote_file(mode: str, fn: Callable[[list[int]], int]) -> File:
    """Bit k of a lane's word is its predicate of case k: mixed, none, all, one lane."""
    mixed = [i * 7 >> 2 & 1 for i in range(LANES)]
    cases = [mixed, [0] * LANES, [1] * LANES, [int(i == 13) for i in range(LANES)]]
    words = [sum(case[i] << k for k, case in enumerate(cases)) for i in range(LANES)]
    file, source = warp_file(f"vote.sync.{mode}", "b32", words)
    voted = [c for case in cases for c in (case, [1 - b for b in case])]
    target = out(file, "out", "b32", [fn(c) for c in voted for _ in range(LANES)])
    for k, negated in itertools.product(range(len(cases)), (False, True)):
        file.emit(f"and.b32 %r21, {source}, {1 << k};", "setp.ne.u32 %p1, %r21, 0;")
        result = "%r30" if mode == "ballot.b32" else "%p2"
        file.test(file.name, f"{result}, {'!' * negated}%p1, -1")
        if result == "%p2":
            file.emit("selp.b32 %r30, 1, 0, %p2;")
        file.emit(f"st.global.b32 [{target}+{128 * (2 * k + negated)}], %r30;")
    return file


def elect_file() -> File:
    """Exactly one lane is elected, and all lanes know which one."""
    file = File("elect.sync")
    target = out(file, "out", "b32", [0x101] * LANES)
    file.test("elect.sync", "%r20|%p1, -1")
    file.emit(f"""
        vote.sync.ballot.b32 %r21, %p1, -1;
        popc.b32 %r22, %r21;
        shr.u32 %r23, %r21, %r20;
        shl.b32 %r23, %r23, 8;
        add.u32 %r22, %r22, %r23;
        st.global.b32 [{target}], %r22;""")
    return file


def activemask_file() -> File:
    file = File("activemask.b32")
    target = out(file, "out", "b32", [0xFFFFFFFF] * LANES)
    file.test("activemask.b32", "%r20")
    file.emit(f"st.global.b32 [{target}], %r20;")
    return file


def redux_file(operation: str, type_: str) -> File:
    words = inputs(type_, 2)
    file, source = warp_file(f"redux.sync.{operation}.{type_}", type_, words)
    total = functools.reduce(update(operation, type_), words)
    target = out(file, "out", type_, [total] * LANES)
    file.test(file.name, f"%r30, {source}, -1")
    file.emit(f"st.global.b32 [{target}], %r30;")
    return file


def warp_files() -> list[File]:
    votes = {
        "any.pred": any, "all.pred": all, "uni.pred": lambda c: any(c) == all(c),
        "ballot.b32": lambda c: sum(b << i for i, b in enumerate(c)),
    }  # fmt: skip
    reductions = [*itertools.product(("add", "min", "max"), ("u32", "s32")),
                  *itertools.product(("and", "or", "xor"), ("b32",)),
                  ("min", "f32"), ("max", "f32")]  # fmt: skip
    return [
        *(shuffle_file(mode) for mode in ("up", "down", "bfly", "idx")),
        *(vote_file(mode, lambda c, fn=fn: int(fn(c))) for mode, fn in votes.items()),
        elect_file(), activemask_file(), *(redux_file(*r) for r in reductions), warp_sync_file(),
    ]  # fmt: skip


def warp_sync_file() -> File:
    """A neighbour's word through shared memory."""
    words = inputs("b32", 1)
    file, source = warp_file("bar.warp.sync", "b32", words, shared=128)
    target = out(file, "out", "b32", [words[i ^ 5] for i in range(LANES)])
    file.emit(
        "mov.u32 %r3, smem;", "mad.lo.u32 %r4, %r0, 4, %r3;", f"st.shared.b32 [%r4], {source};"
    )
    file.test("bar.warp.sync", "-1")
    file.emit("xor.b32 %r5, %r0, 5;", "mad.lo.u32 %r5, %r5, 4, %r3;", "ld.shared.b32 %r6, [%r5];",
              f"st.global.b32 [{target}], %r6;")  # fmt: skip
    return file


# -- matrices -------------------------------------------------------------------------------------
def _fragment(rows: list[list[int]], matrix: int, thread: int, trans: bool) -> int:
    """Register of one thread: elements (t / 4, 2 (t % 4)) and the next, or transposed."""
    a, b = thread // 4, 2 * (thread % 4)
    pair = [rows[8 * matrix + b + j][a] if trans else rows[8 * matrix + a][b + j] for j in (0, 1)]
    return pair[0] | pair[1] << 16


def _addresses(file: File, rows: int) -> None:
    """%r4, %d14: where lane i's row lies: row 5 i modulo the number of rows."""
    file.emit(f"""
        mov.u32 %r3, smem;
        mul.lo.u32 %r5, %r0, 5;
        rem.u32 %r5, %r5, {rows};
        mad.lo.u32 %r4, %r5, 16, %r3;
        cvt.u64.u32 %d14, %r4;
        cvta.shared.u64 %d14, %d14;""")


def _of(space: str) -> str:
    return "%r4" if space else "%d14"


def load_matrix_file(count: int, trans: str) -> File:
    file = File(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.b16", shared=3 * 512)
    words = numbers("b16", 3 * 32 * 8, count)
    source = file.array("in0", "b16", words)
    file.emit(f"mad.wide.u32 {source}, %r0, 16, {source};", "mov.u32 %r6, smem;",
              "mad.lo.u32 %r6, %r0, 16, %r6;")  # fmt: skip
    for k in range(3):
        file.emit(f"ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [{source}+{512 * k}];",
                  f"st.shared.v4.b32 [%r6+{512 * k}], {{%r10, %r11, %r12, %r13}};")  # fmt: skip
    file.emit("bar.warp.sync -1;")
    _addresses(file, 32)
    expected = []
    for k in range(3):
        stored = [words[256 * k + 8 * r : 256 * k + 8 * r + 8] for r in range(32)]
        rows = [stored[5 * i % 32] for i in range(32)]
        expected += [_fragment(rows, m, t, bool(trans)) for m in range(count) for t in range(LANES)]
    target = out(file, "out", "b32", expected)
    registers = [f"%r{20 + i}" for i in range(count)]
    for k, space in enumerate(SHARED):
        file.test(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16",
                  f"{{{', '.join(registers)}}}, [{_of(space)}+{512 * k}]")  # fmt: skip
        for i, r in enumerate(registers):
            file.emit(f"st.global.b32 [{target}+{128 * (count * k + i)}], {r};")
    return file


def store_matrix_file(count: int, trans: str) -> File:
    file = File(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.b16", shared=3 * 512)
    rows = 8 * count
    stored = [numbers("b16", 8, r) for r in range(rows)]  # the rows, in memory
    given = [stored[5 * i % rows] for i in range(rows)]  # row of lane i
    words = [_fragment(given, m, t, bool(trans)) for m in range(count) for t in range(LANES)]
    source = file.array("in0", "b32", words)
    file.emit(f"mad.wide.u32 {source}, %r0, 4, {source};")
    for i in range(count):
        file.emit(f"ld.global.b32 %r{20 + i}, [{source}+{128 * i}];")
    _addresses(file, rows)
    target = file.array("out", "b16", [w for row in stored for w in row], 3)
    file.emit(f"mad.wide.u32 {target}, %r0, 16, {target};", f"setp.lt.u32 %p1, %r0, {rows};",
              "mad.lo.u32 %r6, %r0, 16, %r3;")  # fmt: skip
    for k, space in enumerate(SHARED):
        registers = ", ".join(f"%r{20 + i}" for i in range(count))
        file.test(f"stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16",
                  f"[{_of(space)}+{512 * k}], {{{registers}}}")  # fmt: skip
    file.emit("bar.warp.sync -1;")
    for k in range(3):
        file.emit(
            f"@%p1 ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r6+{512 * k}];",
            f"@%p1 st.global.v4.b32 [{target}+{16 * rows * k}], {{%r10, %r11, %r12, %r13}};",
        )
    return file


# -- addresses and hints --------------------------------------------------------------------------
def address_file() -> File:
    """A generic address leads to what the other address leads to, and back."""
    words = inputs("b32", 1)
    file, source = warp_file("cvta", "b32", words, shared=128)
    file.bytes_parameter("data", "b32", words[:4])
    target = out(file, "out", "b32", [*words * 3, *[words[2]] * 32, *words])
    file.emit("mov.u32 %r3, smem;", "mad.lo.u32 %r4, %r0, 4, %r3;", "cvt.u64.u32 %d10, %r4;")
    for k, space in enumerate(("shared", "shared::cta")):
        file.test(f"cvta.{space}.u64", "%d11, %d10")
        file.emit(f"st.b32 [%d11], {source};", "ld.shared.b32 %r21, [%r4];",
                  f"st.global.b32 [{target}+{128 * k}], %r21;",
                  "st.shared.b32 [%r4], 0;")  # fmt: skip
    file.test("cvta.to.shared.u64", "%d12, %d11")
    file.emit(f"st.shared.b32 [%d12], {source};", "ld.b32 %r21, [%d11];",
              f"st.global.b32 [{target}+256], %r21;", "mov.b64 %d13, p_data;")  # fmt: skip
    file.test("cvta.param.u64", "%d13, %d13")
    file.emit("ld.b32 %r21, [%d13+8];", f"st.global.b32 [{target}+384], %r21;")
    file.test("cvta.global.u64", f"%d14, {target}")
    file.test("cvta.to.global.u64", "%d15, %d14")
    file.emit(f"st.b32 [%d14+512], {source};", "ld.global.b32 %r21, [%d15+512];",
              "st.global.b32 [%d15+512], %r21;")  # fmt: skip
    return file


def hint_file() -> File:
    """Hints change no value (discard takes memory that nobody reads)."""
    words = inputs("b32", 1)
    file = File("prefetch")
    source = file.array("in0", "b32", words)
    scratch = file.array("scratch", "b32", [0] * 32)
    target = out(file, "out", "b32", words)
    for form in ("prefetch.L1", "prefetch.L2", "prefetch.global.L1", "prefetch.global.L2",
                 "prefetchu.L1"):  # fmt: skip
        file.test(form, f"[{source}]")
    for space in ("", ".global"):
        file.test(f"applypriority{space}.L2::evict_normal", f"[{source}], 128")
        file.test(f"discard{space}.L2", f"[{scratch}], 128")
    for hint in ("", ".L2::cache_hint"):
        file.emit("mov.b64 %d9, 0x1000000000000000;")
        file.test(f"cp.async.bulk.prefetch.L2.global{hint}",
                  f"[{source}], 128" + (", %d9" if hint else ""))  # fmt: skip
    file.test("nanosleep.u32", "20")
    file.test("griddepcontrol.launch_dependents")
    file.test("griddepcontrol.wait")
    file.emit(f"mad.wide.u32 {source}, %r0, 4, {source};", f"ld.global.b32 %r20, [{source}];",
              f"st.global.b32 [{target}], %r20;")  # fmt: skip
    return file


def register_file() -> File:
    """A warpgroup gives registers back and takes them again."""
    words = [i * 3 for i in range(128)]
    file = File("setmaxnreg", threads=128)
    file.directives = ".reqntid 128, 1, 1\n.maxnreg 64\n"
    target = out(file, "out", "b32", words)
    file.emit("mul.lo.u32 %r20, %r0, 3;")
    file.test("setmaxnreg.dec.sync.aligned.u32", "40")
    file.test("setmaxnreg.inc.sync.aligned.u32", "64")
    file.emit(f"st.global.b32 [{target}], %r20;")
    return file


def files() -> list[File]:
    shapes = list(itertools.product((1, 2, 4), ("", ".trans")))
    return [
        *warp_files(), *(load_matrix_file(*s) for s in shapes),
        *(store_matrix_file(*s) for s in shapes), address_file(), hint_file(), register_file(),
    ]  # fmt: skip
