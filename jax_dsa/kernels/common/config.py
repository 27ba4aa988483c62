"""Compile-time facts of a kernel and the values that stand in for its arguments while compiling."""

import dataclasses

import cutlass
import cutlass.cute as cute

from jax_dsa.cubins import manifest

HEAD_DIMS = (512, 576)
VALUE_DIM = 512
ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT_BYTES = 2
NUMBERS = {"i32": cutlass.Int32, "f32": cutlass.Float32}


@dataclasses.dataclass(frozen=True)
class Config:
    """What one compiled kernel serves.

    Attributes:
      head_dim: columns of q and kv, 512 or 576; the values are the first 512 of them.
      dtype: of q, kv and what is computed from them, "bfloat16" or "float16".

    Raises:
      ValueError: for any other head_dim or dtype.
    """

    head_dim: int
    dtype: str

    def __post_init__(self):
        for name, choices in (("head_dim", HEAD_DIMS), ("dtype", tuple(ELEMENTS))):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"Config: {name} is {value!r}, must be one of {choices}.")

    @property
    def element(self):
        """The CuTeDSL type of ``dtype``."""
        return ELEMENTS[self.dtype]

    @property
    def facts(self) -> dict:
        """What the manifest compares with a problem."""
        return {"head_dim": self.head_dim, "value_dim": VALUE_DIM, "dtype": self.dtype}


def parameters(pointers: str, integers: str, floats: str = "scale") -> tuple:
    """The kernel's parameters: pointers, then int32 scalars, then float32 scalars; names split."""
    entries = [manifest.Parameter(name, "pointer") for name in pointers.split()]
    entries += [manifest.Parameter(name, "scalar", "i32") for name in integers.split()]
    return tuple(entries + [manifest.Parameter(n, "scalar", "f32") for n in floats.split()])


def stand_ins(listed: tuple, elements: dict) -> tuple:
    """Arguments for ``cute.compile``: null pointers and zeros of the right types.

    Args:
      listed: parameters, as ``parameters`` makes them.
      elements: name of a pointer -> CuTeDSL type of what it points to.
    """

    def argument(parameter):
        if parameter.kind == "scalar":
            return NUMBERS[parameter.type](0)
        element = elements[parameter.name]
        wide = 16 if element in ELEMENTS.values() else element.width // 8
        return cute.runtime.make_ptr(element, 0, cute.AddressSpace.gmem, assumed_align=wide)

    return tuple(argument(parameter) for parameter in listed)
