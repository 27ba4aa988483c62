"""Files of barriers and fences: two warps pass data on, once per form."""

from __future__ import annotations

import itertools

from files import File
from formats import inputs

THREADS = 64
ORDERS = ("", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster")
WAITS = ("", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster")
SPACES = ("", ".shared", ".shared::cta", ".shared::cluster")


def two_warps(name: str, shared: int) -> tuple[File, list[int]]:
    """%r0 thread, %r3 shared memory, %r4 this thread's word in it, %r20 its datum, %p1: warp 1."""
    file = File(name, threads=THREADS, shared=shared)
    words = inputs("b32", 1) + inputs("b32", 2)
    source = file.array("in0", "b32", words)
    file.emit(f"""
        mad.wide.u32 {source}, %r0, 4, {source};
        ld.global.b32 %r20, [{source}];
        mov.u32 %r3, smem;
        mad.lo.u32 %r4, %r0, 4, %r3;
        setp.ge.u32 %p1, %r0, 32;""")
    return file, words


# -- named barriers -------------------------------------------------------------------------------
def barrier_file() -> File:
    """sync: both warps read each other's word; arrive: the second one reads the first one's."""
    names = ["bar.{}", "bar.cta.{}", "barrier.{}", "barrier.cta.{}", "barrier.{}.aligned",
             "barrier.cta.{}.aligned"]  # fmt: skip
    file, words = two_warps("bar", 256 * 2 * len(names))
    crossed = [w + k & 0xFFFFFFFF for k in range(len(names)) for w in words[32:] + words[:32]]
    passed = [w + k & 0xFFFFFFFF for k in range(6, 12) for w in words[:32] + words[:32]]
    target = file.array("out", "b32", crossed + passed)
    file.emit(f"mad.wide.u32 {target}, %r0, 4, {target};", "xor.b32 %r5, %r4, 128;",
              "and.b32 %r6, %r4, 0xFFFFFF7F;")  # fmt: skip
    for k, name in enumerate(names * 2):
        file.emit(f"add.u32 %r21, %r20, {k};", f"st.shared.b32 [%r4+{256 * k}], %r21;")
        if k < len(names):
            file.test(name.format("sync"), "1, 64")
        else:
            file.test(name.format("arrive"), f"{k - 4}, 64", guard="@!%p1 ")
            file.emit(f"@%p1 bar.sync {k - 4}, 64;")
        file.emit(f"ld.shared.b32 %r22, [%r{5 if k < len(names) else 6}+{256 * k}];",
                  f"st.global.b32 [{target}+{256 * k}], %r22;")  # fmt: skip
    return file


# -- fences ---------------------------------------------------------------------------------------
def fence_file() -> File:
    """Lane 0 of warp 0 writes, fences and raises a relaxed flag; lane 0 of warp 1 sees the flag,
    fences and reads.
    """
    scopes = ("cta", "cluster", "gpu", "sys")
    pairs = [(f"fence{sem}.{s}",) * 2 for sem in ("", ".sc", ".acq_rel") for s in scopes]
    pairs += [(f"fence.release.{s}", f"fence.acquire.{s}") for s in scopes]
    pairs += [(f"membar.{s}",) * 2 for s in ("cta", "gl", "sys")]
    file = File("fence", threads=THREADS)
    data = file.array("data", "b32", [0] * len(pairs))
    flags = file.array("flags", "b32", [0] * len(pairs))
    target = file.array("out", "b32", [100 + k for k in range(len(pairs))])
    file.emit("and.b32 %r1, %r0, 31;", "setp.ne.u32 %p1, %r1, 0;", "@%p1 bra END;",
              "setp.ge.u32 %p2, %r0, 32;", "@%p2 bra READER;")  # fmt: skip
    for k, (release, _) in enumerate(pairs):
        file.emit(f"st.global.b32 [{data}+{4 * k}], {100 + k};")
        file.test(release)
        file.emit(f"st.relaxed.{_scope(release)}.global.b32 [{flags}+{4 * k}], 1;")
    file.emit("bra END;", "READER:")
    for k, (_, acquire) in enumerate(pairs):
        file.emit(f"TRY{k}:", f"ld.relaxed.{_scope(acquire)}.global.b32 %r5, [{flags}+{4 * k}];",
                  "setp.eq.u32 %p3, %r5, 0;", f"@%p3 bra TRY{k};")  # fmt: skip
        file.test(acquire)
        file.emit(f"ld.global.b32 %r6, [{data}+{4 * k}];",
                  f"st.global.b32 [{target}+{4 * k}], %r6;")  # fmt: skip
    file.emit("END:")
    return file


def _scope(fence: str) -> str:
    return fence.split(".")[-1].replace("gl", "gpu")


# -- mbarriers ------------------------------------------------------------------------------------
def mbarrier_file(name: str, waits: list[str]) -> File:
    """Per form of ``mbarrier.<name>``: warp 0 writes and arrives with it, warp 1 arrives plainly,
    waits with one of ``waits``, then reads warp 0's words; not after a relaxed one, which orders
    nothing.
    """
    forms = [f"mbarrier.{name}{order}{space}.b64" for order in ORDERS for space in SPACES]
    assert len(waits) >= len(forms)
    forms = (forms * 2)[: len(waits)]
    file, words = two_warps(f"mbarrier.{name}", 1024 + 128 * len(forms))
    ordered = ["relaxed" not in a + w for a, w in zip(forms, waits, strict=True)]
    expected = [words[i] if ok else k for k, ok in enumerate(ordered) for i in range(32)]
    target = file.array("out", "b32", expected)
    file.emit(f"""
        mad.wide.u32 {target}, %r0, 4, {target};
        cvt.u64.u32 %d9, %r3;
        cvta.shared.u64 %d9, %d9;
        setp.ne.u32 %p2, %r0, 0;
        @%p2 bra READY;""")
    for k in range(len(forms)):
        space = SPACES[k % 3]
        file.test(f"mbarrier.init{space}.b64", f"[{_base(space)}+{8 * k}], 64")
    file.test("fence.mbarrier_init.release.cluster")
    file.emit("READY:", "bar.sync 0;", "@%p1 bra WAITER;")
    for k, form in enumerate(forms):
        _arrive(file, name, form, k)
    file.emit("bra DONE;", "WAITER:", "and.b32 %r5, %r4, 0xFFFFFF7F;")
    for k, form in enumerate(waits):
        _wait(file, form, k, ordered[k], name == "arrive_drop")
        file.emit(f"st.global.b32 [{target}+{128 * k - 128}], %r22;")
    file.emit("DONE:", "bar.sync 0;", "@%p2 bra END;")
    for k in range(len(forms)):
        space = SPACES[k % 3]
        file.test(f"mbarrier.inval{space}.b64", f"[{_base(space)}+{8 * k}]")
    file.emit("END:")
    return file


def _base(form: str) -> str:
    return "%r3" if ".shared" in form else "%d9"


def _arrive(file: File, name: str, form: str, k: int) -> None:
    """With transactions: twice 16 bytes per lane are expected, half by expect_tx, and completed."""
    address, state = f"[{_base(form)}+{8 * k}]", "_" if "cluster.b64" in form else "%d10"
    file.emit(f"st.shared.b32 [%r4+{1024 + 128 * k}], %r20;")
    if name != "arrive.expect_tx":
        file.test(form, f"{state}, {address}")
        return
    qualifiers = list(itertools.product(("", ".relaxed.cta", ".relaxed.cluster"), SPACES))
    other = "".join(qualifiers[k % len(qualifiers)])
    place = f"[{_base(other)}+{8 * k}]"
    file.test(f"mbarrier.expect_tx{other}.b64", f"{place}, 16")
    file.test(form, f"{state}, {address}, 16")
    file.test(f"mbarrier.complete_tx{other}.b64", f"{place}, 32")


def _wait(file: File, form: str, k: int, ordered: bool, again: bool) -> None:
    """``again``: the lanes of warp 0 have dropped out, warp 1 completes the next phase alone."""
    address, argument = f"[{_base(form)}+{8 * k}]", "0" if ".parity" in form else "%d10"
    file.emit(f"mbarrier.arrive.shared.b64 %d10, [%r3+{8 * k}];", f"TRY{k}:")
    file.test(form, f"%p3, {address}, {argument}")
    file.emit(f"@!%p3 bra TRY{k};")
    if again:
        file.emit(f"mbarrier.arrive.shared.b64 %d10, [%r3+{8 * k}];", f"MORE{k}:",
                  f"mbarrier.try_wait.shared.b64 %p3, [%r3+{8 * k}], %d10;",
                  f"@!%p3 bra MORE{k};")  # fmt: skip
    read = f"ld.shared.b32 %r22, [%r5+{1024 + 128 * k}];"
    file.emit(read if ordered else f"mov.u32 %r22, {k};")


def mbarrier_files() -> list[File]:
    waits = [
        f"mbarrier.{name}{parity}{order}{space}.b64"
        for name in ("try_wait", "test_wait") for parity in ("", ".parity")
        for order in WAITS for space in SPACES[:3]
    ]  # fmt: skip
    names = ("arrive", "arrive.expect_tx", "arrive_drop")
    return [mbarrier_file(name, waits[i::3]) for i, name in enumerate(names)]


def files() -> list[File]:
    return [barrier_file(), fence_file(), *mbarrier_files()]
