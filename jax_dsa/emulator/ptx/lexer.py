"""PTX text to tokens: words (with their dots), numbers, strings, punctuation; comments dropped."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from jax_dsa.emulator.errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|/\*.*?\*/)
    |(?P<newline>\n)
    |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
    |(?P<word>[%$A-Za-z_][\w$%]*(?:(?:\.|::)\w+)*)
    |(?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
    |(?P<string>"[^"\n]*")
    |(?P<punct>[{}\[\]()<>,;:@!|+\-=])""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """kind: number, word, directive, string, punct or end."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """Returns the tokens of ``text`` and a last one of kind ``end``; raises PtxSyntaxError."""
    tokens, position, line = [], 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxSyntaxError(line, text[position], "a PTX token")
        kind = match.lastgroup
        if kind not in ("space", "newline"):
            tokens.append(Token(str(kind), match.group(), line))
        line += match.group().count("\n")
        position = match.end()
    tokens.append(Token("end", "end of text", line))
    return tokens


def number(text: str) -> int | float:
    """The value of a numeric literal; ``0f``/``0d`` hold IEEE bits."""
    lowered = text.lower()
    if lowered.startswith("0f") and len(text) == 10:
        return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
    if lowered.startswith("0d") and len(text) == 18:
        return struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    if "." in text:
        return float(text)
    return int(text.rstrip("U"), 0) if lowered.startswith("0x") else int(text.rstrip("U"))
