"""Reads the instruction files: PTX with ``//!`` lines that say what kernel ``test`` is given and
what it must give. Instructions under test end with ``//!``.

    threads N                threads of the one CTA; 32 where absent
    ulp N                    hardware may differ by so many units in the last place
    NAME TYPE [Nx] WORDS     an array, hexadecimal words of TYPE, repeated N times; its address is a
                             parameter
    NAME TYPE value WORDS    a parameter that holds the words themselves
    NAME map ARRAY TYPE DIMENSIONS STRIDES BOX SWIZZLE
                             a parameter: the tensor map of an array; lists as 64x8, - if empty

Parameters come in the order of the lines. Arrays whose name starts with ``out`` hold the expected
contents; they start as zeros. NaN of a floating-point TYPE equals any other NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

import numpy as np

from jax_dsa.emulator import Pointer, TensorMap

FOLDER = pathlib.Path(__file__).parent / "instructions"
_FLOATS = {"e4m3": (8, 0x7F), "e5m2": (8, 0x7D), "f16": (16, 0x7C01), "bf16": (16, 0x7F81),
           "f32": (32, 0x7F800001), "f64": (64, 0x7FF0000000000001)}  # fmt: skip
# type: bits and the smallest word that is NaN


def _bits(type_: str) -> int:
    if type_ == "pred":
        return 32
    one = type_.removesuffix("x2")
    return (_FLOATS[one][0] if one in _FLOATS else int(one[1:])) * (1 + (one != type_))


def canonical(words: np.ndarray, type_: str) -> np.ndarray:
    """Words of the elements, every NaN replaced by the same one."""
    one = type_.removesuffix("x2")
    if one not in _FLOATS:
        return words
    bits, first = _FLOATS[one]
    elements = words.view(f"u{bits // 8}").copy()
    magnitude = elements & elements.dtype.type((1 << bits - 1) - 1)
    elements[magnitude >= elements.dtype.type(first)] = np.iinfo(elements.dtype).max
    return elements


def _ordinal(words: np.ndarray) -> np.ndarray:
    """Words of a floating-point type as integers that differ by units in the last place."""
    bits = 8 * words.itemsize
    sign, size = words >> words.dtype.type(bits - 1), words & words.dtype.type((1 << bits - 1) - 1)
    return np.where(sign, -size.astype(np.int64), size.astype(np.int64))


@dataclasses.dataclass
class File:
    """One instruction file."""

    path: pathlib.Path
    text: str
    forms: set[str] = dataclasses.field(default_factory=set)
    threads: int = 32
    ulp: int = 0
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    types: dict[str, str] = dataclasses.field(default_factory=dict)
    parameters: list[Pointer | TensorMap | bytes] = dataclasses.field(default_factory=list)

    @property
    def target(self) -> str:
        return self.text.split(".target ", 1)[1].split(None, 1)[0]

    @property
    def outputs(self) -> list[str]:
        return [name for name in self.arrays if name.startswith("out")]

    def given(self) -> dict[str, np.ndarray]:
        """The arrays before the launch."""
        return {n: np.zeros_like(a) if n.startswith("out") else a for n, a in self.arrays.items()}

    def check(self, results: dict[str, np.ndarray], ulp: int = 0) -> None:
        """Asserts that the outputs are the expected ones, up to ``ulp`` units in the last place."""
        for name in self.outputs:
            got, want = (canonical(a, self.types[name]) for a in (results[name], self.arrays[name]))
            if ulp:
                got = np.where(np.abs(_ordinal(got) - _ordinal(want)) <= ulp, want, got)
            np.testing.assert_array_equal(got, want, f"{self.path.name}: {name}")

    def _line(self, first: str, second: str, words: list[str]) -> None:
        if first in ("threads", "ulp"):
            setattr(self, first, int(second))
        elif second == "map":
            self.parameters.append(_map(*words))
        else:
            self._array(first, second, words)

    def _array(self, name: str, type_: str, words: list[str]) -> None:
        kind = words[0] if words[0] == "value" or words[0].endswith("x") else ""
        array = np.array([int(w, 16) for w in words[bool(kind) :]], f"u{_bits(type_) // 8}")
        if kind == "value":
            self.parameters.append(array.tobytes())
            return
        self.arrays[name] = np.tile(array, int(kind[:-1])) if kind else array
        self.types[name] = type_
        self.parameters.append(Pointer(name))


def _map(array: str, type_: str, *rest: str) -> TensorMap:
    dims, strides, box = ([int(n) for n in w.split("x") if n != "-"] for w in rest[:3])
    return TensorMap(type_, Pointer(array), dims, strides, box, swizzle=rest[3])


@functools.cache
def read(path: pathlib.Path) -> File:
    file = File(path, path.read_text())
    for line in file.text.splitlines():
        if line.startswith("//!"):
            first, second, *words = line[3:].split()
            file._line(first, second, words)
        elif line.endswith("//!"):
            file.forms.add(re.sub(r"^@\S+ ", "", line).rstrip("/!; ").split()[0].rstrip(";"))
    return file


PATHS = sorted(FOLDER.glob("*.ptx"))
