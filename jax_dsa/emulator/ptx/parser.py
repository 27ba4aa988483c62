"""Tokens to ``Module``: a recursive-descent parser for the PTX that compilers write.

Inline assembly opens scopes that repeat names, so registers and labels of a scope are renamed
``name@scope``.
"""

from __future__ import annotations

import re
from typing import Any

from jax_dsa.emulator.errors import PtxSyntaxError
from jax_dsa.emulator.ptx import syntax
from jax_dsa.emulator.ptx.lexer import Token, number, tokenize

_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|%(laneid|warpid|nwarpid|smid|cluster_ctarank"
    r"|cluster_nctarank|clock|clock64|globaltimer|lanemask_(eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size)"
)
_WIDE_SPECIAL = {"%clock64", "%globaltimer"}


def parse(text: str) -> syntax.Module:
    """Parses PTX.

    Args:
      text: the PTX of one module.

    Returns:
      The module: target, version and kernels.

    Raises:
      PtxSyntaxError: with line and token.
    """
    return _Parser(text).module()


class _Scope:
    """Names of one ``{}`` block: register renames and label positions."""

    def __init__(self, parent: _Scope | None, number: int):
        self.parent = parent
        self.suffix = f"@{number}" if number else ""
        self.registers: dict[str, syntax.Register] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> syntax.Register | None:
        found = self.registers.get(name)
        return found if found or self.parent is None else self.parent.register(name)

    def label(self, name: str) -> int | None:
        found = self.labels.get(name)
        return found if found is not None or self.parent is None else self.parent.label(name)


class _Parser:
    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.tokens = tokenize(text)
        self.at = 0
        self.shared: list[syntax.SharedVariable] = []

    # -- tokens ---------------------------------------------------------------------------------
    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.token.text != text:
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(repr(text))

    def fail(self, wanted: str):
        raise PtxSyntaxError(self.token.line, self.token.text, wanted)

    def take(self, kind: str) -> str:
        if self.token.kind != kind:
            self.fail(f"a {kind}")
        return self.next().text

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        value = number(self.take("number"))
        if isinstance(value, float):
            self.at -= 1
            self.fail("an integer")
        return sign * int(value)

    # -- module level -----------------------------------------------------------------------------
    def module(self) -> syntax.Module:
        module = syntax.Module("", "", {})
        while self.token.kind != "end":
            self.top_level(module)
        return module

    def top_level(self, module: syntax.Module) -> None:
        word = self.next()
        if word.text == ".version":
            module.version = self.next().text
        elif word.text == ".target":
            module.target = self.next().text
            while self.accept(","):
                self.next()
        elif word.text == ".address_size":
            self.integer()
        elif word.text in (".visible", ".extern", ".weak"):
            pass
        elif word.text == ".shared":
            self.shared.append(self.variable())
        elif word.text == ".entry":
            kernel = self.entry()
            module.kernels[kernel.name] = kernel
        elif word.text in (".file", ".loc", ".section"):
            self.skip_line(word.line)
        else:
            self.at -= 1
            self.fail("a module-level directive (.version, .target, .entry, .shared, ...)")

    def skip_line(self, line: int) -> None:
        while self.token.line == line and self.token.kind != "end":
            self.next()

    def type_and_align(self) -> tuple[str, int]:
        align = self.integer() if self.accept(".align") else 0
        name = self.take("directive")[1:]
        if name not in syntax.SIZES:
            self.at -= 1
            self.fail("a type such as .b32")
        return name, align or syntax.SIZES[name]

    def variable(self) -> syntax.SharedVariable:
        name_type, align = self.type_and_align()
        name, count = self.take("word"), 1
        if self.accept("["):
            count = 0 if self.token.text == "]" else self.integer()
            self.expect("]")
        self.expect(";")
        return syntax.SharedVariable(name, count * syntax.SIZES[name_type], align)

    def entry(self) -> syntax.Kernel:
        name = self.take("word")
        kernel = syntax.Kernel(name, self.parameters(), shared=list(self.shared))
        while self.token.kind == "directive":
            directive = self.next().text
            if directive in (".reqntid", ".maxntid"):
                kernel.block = self.dimensions()
            elif directive in (
                ".minnctapersm",
                ".maxnreg",
                ".maxclusterrank",
                ".reqnctapercluster",
            ):
                self.dimensions()
            elif directive not in (".explicitcluster",):
                self.at -= 1
                self.fail("a performance directive or '{'")
        _Body(self, kernel).parse()
        return kernel

    def dimensions(self) -> tuple[int, int, int]:
        sizes = [self.integer()]
        while self.accept(","):
            sizes.append(self.integer())
        x, y, z = (sizes + [1, 1])[:3]
        return x, y, z

    def parameters(self) -> tuple[syntax.Parameter, ...]:
        found, offset = [], 0
        if not self.accept("("):
            return ()
        while not self.accept(")"):
            self.expect(".param")
            kind, align = self.type_and_align()
            while self.token.text in (".ptr", ".global", ".shared", ".align"):
                if self.next().text == ".align":
                    self.integer()
            name, size = self.take("word"), syntax.SIZES[kind]
            if self.accept("["):
                size *= self.integer()
                self.expect("]")
            offset = -(-offset // align) * align
            found.append(syntax.Parameter(name, size, align, offset))
            offset += size
            self.accept(",")
        return tuple(found)


class _Body:
    """The statements of one kernel."""

    def __init__(self, parser: _Parser, kernel: syntax.Kernel):
        self.p = parser
        self.kernel = kernel
        self.scopes = 0
        self.code: list[tuple] = []

    def parse(self) -> None:
        self.p.expect("{")
        self.block(_Scope(None, 0))
        self.kernel.code = [self.finish(pc, *raw) for pc, raw in enumerate(self.code)]

    def block(self, scope: _Scope) -> None:
        while not self.p.accept("}"):
            self.statement(scope)

    def statement(self, scope: _Scope) -> None:
        p = self.p
        if p.token.kind == "directive":
            self.directive(scope)
        elif p.accept("{"):
            self.scopes += 1
            self.block(_Scope(scope, self.scopes))
        elif p.accept(";"):
            pass
        elif p.token.kind == "word" and p.tokens[p.at + 1].text == ":":
            name = p.next().text
            p.next()
            scope.labels[name] = len(self.code)
            self.kernel.labels[len(self.code)] = name
        else:
            self.instruction(scope)

    def directive(self, scope: _Scope) -> None:
        p = self.p
        directive = p.next()
        if directive.text == ".reg":
            self.registers(scope)
        elif directive.text == ".shared":
            self.kernel.shared.append(p.variable())
        elif directive.text == ".pragma":
            p.take("string")
            p.expect(";")
        elif directive.text in (".loc", ".file"):
            p.skip_line(directive.line)
        else:
            p.at -= 1
            p.fail(".reg, .shared, .pragma or an instruction")

    def registers(self, scope: _Scope) -> None:
        p = self.p
        kind, _ = p.type_and_align()
        while True:
            name = p.take("word")
            names = [name]
            if p.accept("<"):
                names = [f"{name}{i}" for i in range(p.integer())]
                p.expect(">")
            for each in names:
                register = syntax.Register(each + scope.suffix, kind)
                scope.registers[each] = register
                self.kernel.registers[register.name] = kind
            if not p.accept(","):
                break
        p.expect(";")

    def instruction(self, scope: _Scope) -> None:
        p = self.p
        guard, negated, line = None, False, p.token.line
        if p.accept("@"):
            negated = p.accept("!")
            guard = self.register(scope)
        if p.token.kind != "word":
            p.fail("an opcode")
        opcode = p.next().text
        operands = []
        while not p.accept(";"):
            operands.append(self.operand(scope))
            if not p.accept(",") and p.token.text != ";":
                p.fail("',' or ';'")
        self.code.append((opcode, operands, guard, negated, line, scope))

    def finish(self, pc, opcode, operands, guard, negated, line, scope) -> syntax.Instruction:
        """Resolves labels once the whole scope is known."""
        resolved = tuple(self.resolve(o, scope, line, opcode) for o in operands)
        text = self.p.lines[line - 1].strip().rstrip(";").strip()
        return syntax.Instruction(
            opcode, resolved, guard, negated, line, pc, " ".join(text.split())
        )

    def resolve(self, operand, scope: _Scope, line: int, opcode: str):
        if not (isinstance(operand, syntax.Symbol) and opcode.split(".")[0] in ("bra", "brx")):
            return operand
        target = scope.label(operand.name)
        if target is None:
            raise PtxSyntaxError(line, operand.name, "a label of this kernel")
        return syntax.Label(operand.name, target)

    # -- operands ---------------------------------------------------------------------------------
    def register(self, scope: _Scope) -> syntax.Register:
        name = self.p.take("word")
        found = scope.register(name)
        if found is None:
            self.p.at -= 1
            self.p.fail("a declared register")
        assert found is not None
        return found

    def operand(self, scope: _Scope):
        p = self.p
        if p.accept("{"):
            return syntax.Vector(self.items(scope, "}"))
        if p.accept("["):
            return self.address(scope)
        if p.accept("!"):
            return syntax.Negated(self.register(scope))
        return self.simple(scope)

    def items(self, scope: _Scope, close: str) -> tuple:
        found = []
        while not self.p.accept(close):
            found.append(self.simple(scope))
            if not self.p.accept(",") and self.p.token.text != close:
                self.p.fail(f"',' or {close!r}")
        return tuple(found)

    def simple(self, scope: _Scope) -> Any:
        p = self.p
        sign = -1 if p.accept("-") else 1
        if p.token.kind == "number":
            return syntax.Immediate(sign * number(p.next().text))
        if p.token.kind != "word":
            p.fail("an operand")
        name = p.next().text
        if name == "_":
            first = None
        else:
            first = scope.register(name) or self.other_name(name)
        if p.accept("|"):
            second = None if p.accept("_") else self.register(scope)
            assert first is None or isinstance(first, syntax.Register)
            return syntax.Pair(first, second)
        return first

    def other_name(self, name: str):
        if _SPECIAL.fullmatch(name):
            return syntax.Register(name, "b64" if name in _WIDE_SPECIAL else "b32")
        if name.startswith("%"):
            self.p.at -= 1
            self.p.fail("a declared register")
        return syntax.Symbol(name)

    def address(self, scope: _Scope) -> syntax.Address:
        p = self.p
        base, offset = self.simple(scope), 0
        while p.token.text in ("+", "-"):
            sign = -1 if p.next().text == "-" else 1
            offset += sign * p.integer()
        coordinates: tuple = ()
        if p.accept(","):
            p.expect("{")
            coordinates = self.items(scope, "}")
        p.expect("]")
        return syntax.Address(base, offset, coordinates)
