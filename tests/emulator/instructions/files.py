"""The text of an instruction file: ``//!`` lines, then one kernel ``test``; see
``instruction_files.py`` for what the lines mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from formats import bits_of

_KINDS = {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}
_PREFIX = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}
# what SM90 lacks
_SM100 = re.compile(
    r"tcgen05|f32x2|\.f32\.bf16$|^(ld|st).*\.(v8\.[busf]32|v4\.[busf]64)$|^redux.*f32$"
    r"|gather4|scatter4|cta_group|of three"
)


def register(type_: str, number: int) -> str:
    return f"%p{number}" if type_ == "pred" else f"{_PREFIX[bits_of(type_)]}{number}"


def declarations(code: str) -> str:
    """``.reg`` lines for the registers that the code uses."""
    last: dict[str, int] = {}
    for kind, number in re.findall(r"%([phrd])(\d+)", code):
        last[kind] = max(last.get(kind, 0), int(number))
    return "\n".join(f".reg .{_KINDS[k]} %{k}<{n + 1}>;" for k, n in sorted(last.items()))


def vector(registers: Sequence[str]) -> str:
    return registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"


class File:
    """One file. Parameters are pointers to the arrays, loaded into %d0, %d1, ... in their order;
    %r0 is the thread.
    """

    def __init__(self, name: str, threads: int = 32, ulp: int = 0, shared: int = 0):
        self.name = name
        self.forms: list[str] = []
        self.threads, self.ulp, self.shared = threads, ulp, shared
        self.directives = ""
        self.header: list[str] = []
        self.parameters: list[str] = []
        self.body: list[str] = ["mov.u32 %r0, %tid.x;"]

    def array(self, name: str, type_: str, words: Sequence[int], repeat: int = 1) -> str:
        """Adds an array; returns the register that points to it."""
        times = f"{repeat}x " if repeat > 1 else ""
        self.header.append(f"{name} {type_} {times}" + " ".join(f"{w:x}" for w in words))
        pointer = f"%d{len(self.parameters)}"
        self.body.append(f"ld.param.u64 {pointer}, [p_{name}];")
        self.parameters.append(f".param .u64 p_{name}")
        return pointer

    def bytes_parameter(self, name: str, type_: str, words: Sequence[int]) -> None:
        """Adds a parameter that holds the words themselves, ``[p_<name>]``."""
        size = len(words) * bits_of(type_) // 8
        self.header.append(f"{name} {type_} value " + " ".join(f"{w:x}" for w in words))
        self.parameters.append(f".param .align 16 .b8 p_{name}[{size}]")

    def tensor_map(self, name: str, array: str, text: str) -> str:
        """Adds a tensor map of an array; returns the register with its generic address."""
        self.header.append(f"{name} map {array} {text}")
        pointer = f"%d{len(self.parameters)}"
        self.parameters.append(f".param .align 64 .b8 p_{name}[128]")
        self.body += [f"mov.b64 {pointer}, p_{name};", f"cvta.param.u64 {pointer}, {pointer};"]
        return pointer

    def emit(self, *lines: str) -> None:
        for text in lines:
            self.body += [line.strip() for line in text.strip().splitlines()]

    def test(self, form: str, operands: str = "", guard: str = "") -> None:
        """Emits an instruction under test."""
        self.forms.append(form)
        self.emit(f"{guard}{form}{' ' if operands else ''}{operands}; //!")

    @property
    def target(self) -> str:
        if any(_SM100.search(f) for f in [self.name, *self.forms]):
            return "sm_100a"
        return "sm_90a" if self.name.startswith(("setmaxnreg", "wgmma")) else "sm_90"

    def text(self) -> str:
        lines = [f"threads {self.threads}"] if self.threads != 32 else []
        lines += [f"ulp {self.ulp}"] if self.ulp else []
        head = "".join(f"//! {line}\n" for line in [*lines, *self.header])
        head += f".version 8.8\n.target {self.target}\n.address_size 64\n"
        shared = f".shared .align 1024 .b8 smem[{self.shared}];\n" if self.shared else ""
        code = "\n".join([*self.body, "ret;"])
        parameters = ", ".join(self.parameters)
        entry = f".visible .entry test({parameters})\n{self.directives}"
        return f"{head}{entry}{{\n{declarations(code)}\n{shared}{code}\n}}\n"
