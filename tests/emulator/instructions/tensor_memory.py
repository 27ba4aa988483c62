"""Files of tcgen05: allocation, loads and stores of every shape, copies, products, commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import formats
from files import File, vector
from formats import LANES
from memory import numbers

WORD = 0xFFFFFFFF
# (thread, register) -> (row, column): figures of PTX ISA 9.7.16.2.3; registers per repetition
FRAGMENTS: dict[str, tuple[Callable, int]] = {
    "32x32b": (lambda t, i: (t, i), 1),
    "16x64b": (lambda t, i: (t // 4 + 8 * (t % 2), 2 * i + t // 2 % 2), 1),
    "16x128b": (lambda t, i: (t // 4 + 8 * (i % 2), i // 2 * 4 + t % 4), 2),
    "16x256b": (lambda t, i: (t // 4 + 8 * (i // 2 % 2), i // 4 * 8 + 2 * (t % 4) + i % 2), 4),
}


def checksum(words: Sequence[int]) -> int:
    """Tells apart where each word is: the sum of (2 i + 1) times word i."""
    return sum((2 * i + 1) * w for i, w in enumerate(words)) & WORD


def emit_checksum(file: File, registers: Sequence[str], total: str, first: int = 0) -> None:
    file.emit(*(f"mad.lo.u32 {total}, {r}, {2 * (first + i) + 1}, {total};"
                for i, r in enumerate(registers)))  # fmt: skip


def allocate(file: File, columns: int, space: str = ".shared::cta") -> None:
    """%r3 shared memory, %r9 the first column's address."""
    file.emit("mov.u32 %r3, smem;", "cvt.u64.u32 %d10, %r3;", "cvta.shared.u64 %d10, %d10;")
    file.test(f"tcgen05.alloc.cta_group::1.sync.aligned{space}.b32",
              f"[{'%r3' if space else '%d10'}], {columns}")  # fmt: skip
    file.emit("ld.shared.b32 %r9, [%r3];")


def release(file: File, columns: int) -> None:
    file.test("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
    file.test("tcgen05.dealloc.cta_group::1.sync.aligned.b32", f"%r9, {columns}")


def load_columns(file: File, columns: int, total: str, base: str = "%r9") -> None:
    """Adds the checksum of this lane's row to ``total``, 64 columns at a time."""
    first = 0
    while first < columns:
        count = min(64, 1 << (columns - first).bit_length() - 1)
        registers = [f"%r{20 + i}" for i in range(count)]
        file.emit(f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{', '.join(registers)}}}, "
                  f"[{base}+{first}];", "tcgen05.wait::ld.sync.aligned;")  # fmt: skip
        emit_checksum(file, registers, total, first)
        first += count


def shape_file(shape: str, repeat: int) -> File:
    """Zeros by columns, st by the shape, all rows by columns; then ld by the shape."""
    place, per = FRAGMENTS[shape]
    count = per * repeat
    places = {(t, i): place(t, i) for t in range(LANES) for i in range(count)}
    columns = 1 + max(c for _, c in places.values())
    rows = [[0] * columns for _ in range(LANES)]
    for (t, i), (row, column) in places.items():
        rows[row][column] = 1000 * t + 7 * i + 1
    file = File(f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32", shared=128)
    given = [[1000 * t + 7 * i + 1 for i in range(count)] for t in range(LANES)]
    target = file.array("out", "b32", [checksum(r) for r in rows])
    loaded = file.array("out_loaded", "b32", [checksum(r) for r in given])
    size = max(32, 1 << (columns - 1).bit_length())
    allocate(file, size)
    file.emit("mov.b32 %r5, 0;", "mov.b32 %r6, 0;", "mov.b32 %r7, 0;")
    for first in range(0, columns, 64):
        n = min(64, columns - first)
        zeros = vector(["%r5"] * n) if n > 1 else "{%r5}"
        file.emit(f"tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%r9+{first}], {zeros};")
    file.emit("tcgen05.wait::st.sync.aligned;", "mul.lo.u32 %r8, %r0, 1000;")
    registers = [f"%r{20 + i}" for i in range(count)]
    file.emit(*(f"add.u32 {r}, %r8, {7 * i + 1};" for i, r in enumerate(registers)))
    names = f"{{{', '.join(registers)}}}"
    file.test(f"tcgen05.st.sync.aligned.{shape}.x{repeat}.b32", f"[%r9], {names}")
    file.test("tcgen05.wait::st.sync.aligned")
    load_columns(file, columns, "%r6")
    file.test(f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32", f"{names}, [%r9]")
    file.test("tcgen05.wait::ld.sync.aligned")
    emit_checksum(file, registers, "%r7")
    for pointer, r in ((target, "%r6"), (loaded, "%r7")):
        file.emit(f"mad.wide.u32 {pointer}, %r0, 4, {pointer};", f"st.global.b32 [{pointer}], {r};")
    release(file, size)
    return file


# -- operations on shared memory ------------------------------------------------------------------
IMAGE = 1024  # where the image starts in shared memory


def start(file: File, image: list[int], columns: int, space: str) -> None:
    """Four warps: warp 0 allocates, lanes copy the image of 32-bit words to shared memory, thread 0
    initialises the mbarriers at bytes 16 and 24. %p1: not thread 0.
    """
    source = file.array("in0", "b32", image)
    file.emit("setp.ge.u32 %p2, %r0, 32;", "setp.ne.u32 %p1, %r0, 0;", "mov.u32 %r3, smem;",
              "@%p2 bra ALLOCATED;")  # fmt: skip
    allocate(file, columns, space)
    file.emit("ALLOCATED:", "@%p1 bra COPY;", "mbarrier.init.shared.b64 [%r3+16], 1;",
              "mbarrier.init.shared.b64 [%r3+24], 1;", "COPY:")  # fmt: skip
    file.emit(f"mad.wide.u32 {source}, %r0, 4, {source};", "mad.lo.u32 %r4, %r0, 4, %r3;")
    for at in range(0, 4 * len(image), 512):
        file.emit(f"ld.global.b32 %r5, [{source}+{at}];", f"st.shared.b32 [%r4+{IMAGE + at}], %r5;")
    file.emit("fence.proxy.async.shared::cta;")
    _meet(file)
    file.emit("ld.shared.b32 %r9, [%r3];", "@%p1 bra DONE;")


def _meet(file: File) -> None:
    file.test("tcgen05.fence::before_thread_sync")
    file.emit("bar.sync 0;")
    file.test("tcgen05.fence::after_thread_sync")


def descriptor(file: File, register: str, offset: int, leading: int, stride: int) -> None:
    """Matrix descriptor without swizzle of the image's byte ``offset`` (9.7.16.4.1)."""
    file.emit(f"add.u32 %r5, %r3, {IMAGE + offset};", "shr.u32 %r5, %r5, 4;",
              f"or.b32 %r5, %r5, {leading >> 4 << 16};", f"mov.b32 %r6, {stride >> 4 | 1 << 14};",
              f"mov.b64 {register}, {{%r5, %r6}};")  # fmt: skip


def commit(file: File, barrier: int, space: str) -> None:
    file.test(f"tcgen05.commit.cta_group::1.mbarrier::arrive::one{space}.b64",
              f"[{'%r3' if space else '%d11'}+{barrier}]")  # fmt: skip
    file.emit(f"TRY{barrier}:", f"mbarrier.try_wait.parity.shared.b64 %p3, [%r3+{barrier}], 0;",
              f"@!%p3 bra TRY{barrier};")  # fmt: skip


def finish(file: File, columns: int, allocated: int, expected: list[int]) -> None:
    """Every thread's row to ``out`` as a checksum; then the memory is freed."""
    target = "%d12"
    file.emit("tcgen05.fence::after_thread_sync;", "DONE:")
    _meet(file)
    file.emit("and.b32 %r5, %r0, 96;", "shl.b32 %r5, %r5, 16;", "add.u32 %r8, %r9, %r5;",
              "mov.b32 %r6, 0;")  # fmt: skip
    load_columns(file, columns, "%r6", "%r8")
    pointer = file.array("out", "b32", expected)
    file.emit(f"mad.wide.u32 {target}, %r0, 4, {pointer};", f"st.global.b32 [{target}], %r6;")
    _meet(file)
    file.emit("@%p2 bra END;")
    release(file, allocated)
    file.emit("END:")


def core_matrices(rows: int, row_words: int, words: Sequence[int]) -> list[int]:
    """32-bit words of a K-major image without swizzle: 8 rows x 16 bytes are contiguous; then the
    next 16 bytes of these rows, then the next 8 rows.
    """
    image = [0] * (rows * row_words)
    for r in range(rows):
        for c in range(row_words):
            at = r // 8 * 8 * row_words + c // 4 * 32 + r % 8 * 4 + c % 4
            image[at] = words[r * row_words + c]
    return image


def copy_file() -> File:
    """Both shapes: 128 rows of 32 and of 16 bytes to 8 and 4 columns."""
    wide, narrow = numbers("b32", 128 * 8, 1), numbers("b32", 128 * 4, 2)
    image = core_matrices(128, 8, wide) + core_matrices(128, 4, narrow)
    file = File("tcgen05.cp", threads=128, shared=IMAGE + 4 * len(image))
    start(file, image, 32, "")
    descriptor(file, "%d5", 0, 128, 256)
    descriptor(file, "%d6", 4 * len(wide), 128, 128)
    file.test("tcgen05.cp.cta_group::1.128x256b", "[%r9], %d5")
    file.test("tcgen05.cp.cta_group::1.128x128b", "[%r9+8], %d6")
    file.emit("cvt.u64.u32 %d11, %r3;", "cvta.shared.u64 %d11, %d11;")
    commit(file, 16, "")
    both = [wide[8 * r : 8 * r + 8] + narrow[4 * r : 4 * r + 4] for r in range(128)]
    finish(file, 12, 32, [checksum(row) for row in both])
    return file


def bf16(value: int) -> int:
    return formats.encode(formats.real(formats.Fraction(value)), "bf16")


def product_file(name: str, forms: Sequence[str], n: int) -> File:
    """D = A B^T of small integers, in columns of its own per form; odd forms accumulate a second
    time.
    """
    a = [[(3 * r + 5 * k) % 9 - 4 for k in range(16)] for r in range(128)]
    b = [[(7 * r + 2 * k) % 7 - 3 for k in range(16)] for r in range(n)]

    def image(matrix):
        words = [bf16(row[2 * c]) | bf16(row[2 * c + 1]) << 16 for row in matrix for c in range(8)]
        return core_matrices(len(matrix), 8, words)

    file = File(name, threads=128, shared=IMAGE + 32 * (128 + n))
    allocated = 1 << (n * len(forms) - 1).bit_length()
    start(file, image(a) + image(b), allocated, ".shared::cta")
    descriptor(file, "%d5", 0, 128, 256)
    descriptor(file, "%d6", 128 * 32, 128, 256)
    word = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | 128 >> 4 << 24
    file.emit("setp.ne.u32 %p4, 0, 0;", "setp.eq.u32 %p5, 0, 0;", f"mov.b32 %r7, {word};",
              "mov.b32 %r8, %r9;")  # fmt: skip
    for k, form in enumerate(forms):
        for predicate in ("%p4", "%p5")[: 1 + k % 2]:
            file.test(form, f"[%r8], %d5, %d6, %r7, {predicate}")
        file.emit(f"add.u32 %r8, %r8, {n};")
    commit(file, 24, ".shared::cluster")
    rows = [
        [formats.encode(formats.real(formats.Fraction((1 + k % 2) * sum(x * y for x, y in
         zip(row, other, strict=True)))), "f32") for k in range(len(forms)) for other in b]
        for row in a
    ]  # fmt: skip
    finish(file, n * len(forms), allocated, [checksum(row) for row in rows])
    return file


def files() -> list[File]:
    most = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32}
    shapes = [shape_file(s, 1 << e) for s, top in most.items() for e in range(top.bit_length())]
    plain, ws = "tcgen05.mma.cta_group::1.kind::f16", "tcgen05.mma.ws.cta_group::1.kind::f16"
    collect = [f"{plain}.collector::a::{c}" for c in ("fill", "use", "lastuse", "discard")]
    keep = [f"{ws}.collector::b0::{c}" for c in ("fill", "use", "discard")]
    return [*shapes, copy_file(), product_file("tcgen05.mma", [*collect, plain], 64),
            product_file("tcgen05.mma.ws", [*keep, ws], 64)]  # fmt: skip
