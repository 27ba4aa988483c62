"""Kernels that multiply with wgmma, and the shared-memory images of their operands, for tests.

Images are written element by element from the figures of PTX ISA 9.7.15.5.1 (canonical layouts).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from harness import THREAD, execute

SWIZZLES = {  # name -> (descriptor field, bytes of one contiguous piece)
    "none": (0, 16),
    "32B": (3, 32),
    "64B": (2, 64),
    "128B": (1, 128),
}
START = 1024  # where images start in the shared variable
DEPTH = 16
REGISTERS = ".reg .f32 %acc<128>;\n.reg .b32 %a<4>;\n"


class Image(NamedTuple):
    """16-bit words of shared memory, and how a descriptor names them: offsets in bytes, and the
    byte that a step of 16 elements along K starts at.
    """

    words: np.ndarray
    leading: int
    stride: int
    steps: tuple[int, ...]
    swizzle: str
    base: int

    def descriptor(self, step: int) -> tuple[int, int]:
        """(constant part of the low word, high word) for step ``step``."""
        high = self.stride >> 4 | self.base << 17 | SWIZZLES[self.swizzle][0] << 30
        return self.leading >> 4 << 16, high


def place(matrix: np.ndarray, mn_major: bool, swizzle: str, shift: int = 0) -> Image:
    """[rows, depth] in its canonical layout; ``shift`` rows of 128 bytes off the alignment of the
    swizzling pattern, which then starts there (a base offset in the descriptor).
    """
    span = SWIZZLES[swizzle][1]
    rows, depth = matrix.shape
    per, bits = span // 2, matrix.view(np.uint16)
    words = np.zeros((rows + per) * (depth + per) + 64 * shift, np.uint16)
    blocks = -(-rows // per)
    for r in range(rows):
        for k in range(depth):
            if mn_major:  # pieces of `per` rows; eight k; blocks of rows; then k in eights
                at = r % per * 2 + k % 8 * span + (r // per + k // 8 * blocks) * 8 * span
            else:  # pieces of `per` k; eight rows; then rows in eights; then pieces of k
                at = k % per * 2 + r % 8 * span + (r // 8 + k // per * -(-rows // 8)) * 8 * span
            at ^= (at >> 7 & span // 16 - 1) << 4
            words[(at + 128 * shift) // 2] = bits[r, k]
    steps = range(0, depth, DEPTH)
    if mn_major:
        across, along = 8 * span, 8 * span * blocks
        leading, stride = (along, across) if swizzle == "none" else (across, along)
        starts = [k // 8 * along for k in steps]
    else:
        along = 8 * span * -(-rows // 8)
        leading, stride = (along, 8 * span) if swizzle == "none" else (16, 8 * span)
        starts = [k // per * along + k % per * 2 for k in steps]
    offset = 128 * shift
    return Image(words, leading, stride, tuple(s + offset for s in starts), swizzle, shift)


def load_images(size: int, threads: int = 128) -> str:
    """All threads copy ``size`` bytes of array ``image`` to shared memory and publish them."""
    return f"""
    mov.u32 %r3, smem;
    mov.u32 %r10, %r1;
LOAD:
    cvt.u64.u32 %d1, %r10;
    add.s64 %d1, %image, %d1;
    ld.global.b32 %r11, [%d1];
    add.s32 %r12, %r3, %r10;
    st.shared.b32 [%r12+{START}], %r11;
    add.s32 %r10, %r10, {4 * threads};
    setp.lt.u32 %p2, %r10, {size};
    @%p2 bra LOAD;
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""


def descriptor(register: str, image: Image, offset: int, step: int) -> str:
    low, high = image.descriptor(step)
    return f"""
    add.s32 %r40, %r3, {START + offset + image.steps[step]};
    shr.u32 %r40, %r40, 4;
    or.b32 %r40, %r40, {low};
    mov.b32 %r41, {high if high < 2**31 else high - 2**32};
    mov.b64 {register}, {{%r40, %r41}};"""


def accumulators(n: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%acc{first + i}" for i in range(n // 2)) + "}"


def store(n: int, first: int = 0, row: int = 0) -> str:
    """Each thread stores its part of D to array ``d`` [64, row], by the figure of D."""
    row = row or n
    lines = f"""
    and.b32 %r20, %r0, 31;
    shr.u32 %r21, %r20, 2;
    mad.lo.u32 %r21, %r2, 16, %r21;
    and.b32 %r22, %r20, 3;
    mul.lo.u32 %r23, %r21, {4 * row};
    mad.lo.u32 %r23, %r22, 8, %r23;
    cvt.u64.u32 %d2, %r23;
    add.s64 %d2, %d, %d2;"""
    for i in range(n // 2):
        at = (i // 2 % 2 * 8 * row + i // 4 * 8 + i % 2) * 4
        lines += f"\n    st.global.f32 [%d2+{at}], %acc{first + i};"
    return lines


def load_a(step: int, depth: int) -> str:
    """The fragment of A from array ``a`` [64, depth]: four registers of two elements."""
    lines = f"""
    and.b32 %r20, %r0, 31;
    shr.u32 %r21, %r20, 2;
    mad.lo.u32 %r21, %r2, 16, %r21;
    and.b32 %r22, %r20, 3;
    mul.lo.u32 %r23, %r21, {2 * depth};
    mad.lo.u32 %r23, %r22, 4, %r23;
    cvt.u64.u32 %d2, %r23;
    add.s64 %d2, %a, %d2;"""
    for i in range(4):
        at = i % 2 * 8 * 2 * depth + i // 2 * 16 + 2 * DEPTH * step
        lines += f"\n    ld.global.b32 %a{i}, [%d2+{at}];"
    return lines


def product(n, a: str, kind: str, accumulate: bool, scales=(1, 1), majors=(0, 0), first=0) -> str:
    """One wgmma; ``a``: a descriptor register, or "" for the fragment in %a0..%a3."""
    fragment = a or "{%a0, %a1, %a2, %a3}"
    trans = [*([majors[0]] if a else []), majors[1]]
    immediates = ", ".join(map(str, (*scales, *map(int, trans))))
    return (
        f"\nsetp.ne.u32 %p5, {int(accumulate)}, 0;"
        f"\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        f" {accumulators(n, first)}, {fragment}, %d6, %p5, {immediates};\n"
    )


FENCE = "wgmma.fence.sync.aligned;\n"
FINISH = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def gemm(
    a,
    b,
    kind,
    majors=(False, False),
    swizzles=("128B", "128B"),
    registers=False,
    shifts=(0, 0),
    scales=(1, 1),
):
    """(body, arrays, shared bytes) of a kernel that writes ``d`` = A B^T, K in steps of 16."""
    n, depth = b.shape
    image_a, image_b = (
        place(m, *rest) for m, *rest in zip((a, b), majors, swizzles, shifts, strict=True)
    )
    second = -(-image_a.words.nbytes // 1024) * 1024
    image = np.zeros((second + image_b.words.nbytes + 511) // 512 * 256, np.uint16)
    image[: image_a.words.size] = image_a.words
    image[second // 2 : second // 2 + image_b.words.size] = image_b.words
    body = REGISTERS + THREAD + load_images(image.nbytes)
    for step in range(depth // DEPTH):
        body += load_a(step, depth) if registers else descriptor("%d5", image_a, 0, step)
        body += descriptor("%d6", image_b, second, step) + FENCE
        body += product(n, "" if registers else "%d5", kind, step > 0, scales, majors)
        body += FINISH
    body += store(n)
    arrays = {"image": image, "d": np.zeros((64, n), np.float32)}
    if registers:
        arrays["a"] = a.view(np.uint16)
    return body, arrays, START + image.nbytes


def multiply(a, b, kind, schedule=None, **options):
    """Runs ``gemm``; returns (D, report)."""
    body, arrays, shared = gemm(a, b, kind, **options)
    settings = {} if schedule is None else {"schedule": schedule}
    arrays, report = execute(body, arrays, shared, 128, outputs=("d",), target="sm_90a", **settings)
    return arrays["d"], report
