"""Files of wgmma: every N on the first rows of one B, float32 accumulators."""

from __future__ import annotations

from files import File
from formats import FORMATS, Fraction, encode, real
from tensor_memory import IMAGE, checksum, core_matrices, emit_checksum

THREADS = 128
WIDTHS = range(8, 257, 8)


def _image(matrix: list[list[int]], type_: str) -> list[int]:
    bits = FORMATS[type_].bits
    words = [encode(real(Fraction(v)), type_) for row in matrix for v in row]
    pairs = [low | high << bits for low, high in zip(words[::2], words[1::2], strict=True)]
    return core_matrices(len(matrix), 8, pairs)


def descriptor(file: File, register: str, offset: int) -> None:
    """K-major without swizzle: 128 bytes from one half of the depth to the other, 256 between rows
    in eights.
    """
    file.emit(f"add.u32 %r5, %r3, {IMAGE + offset};", "shr.u32 %r5, %r5, 4;",
              f"or.b32 %r5, %r5, {128 >> 4 << 16};", f"mov.b32 %r6, {256 >> 4};",
              f"mov.b64 {register}, {{%r5, %r6}};")  # fmt: skip


def fragment(product: list[list[int]], thread: int, width: int) -> list[int]:
    """Words of a thread's registers (figure of 9.7.15.5.1.1)."""
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    return [
        encode(
            real(Fraction(product[row + 8 * (i // 2 % 2)][column + 8 * (i // 4) + i % 2])), "f32"
        )
        for i in range(width // 2)
    ]


def product_file(type_: str) -> File:
    """D = A B^T of small integers; every thread gives the checksum of its registers."""
    a = [[(3 * r + 5 * k) % 9 - 4 for k in range(16)] for r in range(64)]
    b = [[(7 * r * r + 2 * k) % 11 - 5 for k in range(16)] for r in range(256)]
    product = [[sum(x * y for x, y in zip(row, other, strict=True)) for other in b] for row in a]
    expected = [checksum(fragment(product, t, n)) for n in WIDTHS for t in range(THREADS)]
    image = _image(a, type_) + _image(b, type_)
    file = File(f"wgmma.mma_async {type_}", threads=THREADS, shared=IMAGE + 4 * len(image))
    source, target = file.array("in0", "b32", image), file.array("out", "b32", expected)
    file.emit("mov.u32 %r3, smem;", "mad.lo.u32 %r4, %r0, 4, %r3;",
              f"mad.wide.u32 {source}, %r0, 4, {source};",
              f"mad.wide.u32 {target}, %r0, 4, {target};")  # fmt: skip
    for at in range(0, 4 * len(image), 4 * THREADS):
        file.emit(f"ld.global.b32 %r5, [{source}+{at}];", f"st.shared.b32 [%r4+{IMAGE + at}], %r5;")
    file.emit("fence.proxy.async.shared::cta;", "bar.sync 0;", "setp.ne.u32 %p1, 0, 0;")
    descriptor(file, "%d5", 0)
    descriptor(file, "%d6", 4 * len(_image(a, type_)))
    for k, n in enumerate(WIDTHS):
        registers = [f"%r{20 + i}" for i in range(n // 2)]
        file.test("wgmma.fence.sync.aligned")
        file.test(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type_}.{type_}",
                  f"{{{', '.join(registers)}}}, %d5, %d6, %p1, 1, 1, 0, 0")  # fmt: skip
        file.test("wgmma.commit_group.sync.aligned")
        file.test("wgmma.wait_group.sync.aligned", "0")
        file.emit("mov.b32 %r7, 0;")
        emit_checksum(file, registers, "%r7")
        file.emit(f"st.global.b32 [{target}+{4 * THREADS * k}], %r7;")
    return file


def files() -> list[File]:
    return [product_file("bf16"), product_file("f16")]
