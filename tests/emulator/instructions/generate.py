"""Writes the instruction tests: .ptx files with inputs and expected outputs.

    python tests/emulator/instructions/generate.py

Value rows have one file per opcode and form (``values.py``); forms that touch memory, synchronise
or start asynchronous work share a file where they differ in qualifiers that do not change the
result. Expected values come from exact Python arithmetic (``formats.py``), never from the emulator.
``instruction_files.py`` reads the files; each can be run on hardware as it is.
"""

from __future__ import annotations

import pathlib

import copies
import memory
import sync
import tensor_memory
import values
import warp
import wgmma
from files import File, register
from formats import bits_of, inputs

from jax_dsa.emulator.isa import supported_forms

FOLDER = pathlib.Path(__file__).parent


def value_file(name: str, case: values.Case) -> File:
    """One instruction per lane."""
    file = File(name, ulp=case.ulp)
    columns = case.given or [inputs(t, i + 1) for i, t in enumerate(case.sources)]
    expected = [case.function(*row) for row in zip(*columns, strict=True)]
    names = []
    for i, (type_, words) in enumerate(zip(case.sources, columns, strict=True)):
        pointer, bits = file.array(f"in{i}", type_, words), bits_of(type_)
        source = register("b32" if type_ == "pred" else type_, 20 + i)
        file.emit(f"mad.wide.u32 {pointer}, %r0, {bits // 8}, {pointer};",
                  f"ld.global.b{bits} {source}, [{pointer}];")  # fmt: skip
        if type_ == "pred":
            file.emit(f"setp.ne.u32 %p{i + 1}, {source}, 0;")
        names.append(f"%p{i + 1}" if type_ == "pred" else source)
    out, bits = file.array("out", case.result, expected), bits_of(case.result)
    result = register(case.result, 0 if case.result == "pred" else 30)
    file.emit(f"mad.wide.u32 {out}, %r0, {bits // 8}, {out};")
    file.test(case.form, f"{result}, {', '.join(names)}{case.tail}")
    if case.result == "pred":
        file.emit("selp.b32 %r30, 1, 0, %p0;")
        result = "%r30"
    file.emit(f"st.global.b{bits} [{out}], {result};")
    return file


def files() -> list[File]:
    """All files; the forms of the instruction table say which ones there have to be."""
    forms = supported_forms()
    return [
        *(value_file(n, c) for n, c in values.build().items()),
        *memory.files(forms),
        *warp.files(),
        *sync.files(),
        *copies.files(),
        *tensor_memory.files(),
        *wgmma.files(),
    ]


def main() -> None:
    for old in FOLDER.glob("*.ptx"):
        old.unlink()
    for file in files():
        (FOLDER / f"{file.name.replace(' ', '_')}.ptx").write_text(file.text())


if __name__ == "__main__":
    main()
