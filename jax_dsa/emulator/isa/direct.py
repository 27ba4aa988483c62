"""Value rows that are a NumPy ufunc: the ufunc writes straight into the destination register."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_dsa.emulator import registers
from jax_dsa.emulator.isa.table import expand

_INTEGERS = "{u16|u32|u64|s16|s32|s64}"
_BITS = "{b16|b32|b64|pred}"
_FLOATS = "{|.rn}.{f32|f32x2|f64|f16|f16x2}"
_FORMS = {
    np.add: (f"add.{_INTEGERS}", f"add{_FLOATS}"),
    np.subtract: (f"sub.{_INTEGERS}", f"sub{_FLOATS}"),
    np.multiply: (f"mul.lo.{_INTEGERS}", f"mul{_FLOATS}"),
    np.bitwise_and: (f"and.{_BITS}",),
    np.bitwise_or: (f"or.{_BITS}",),
    np.bitwise_xor: (f"xor.{_BITS}",),
    np.invert: (f"not.{_BITS}",),
    np.equal: (f"setp.eq.{_INTEGERS}", "setp.eq.{b16|b32|b64|f32|f64}"),
    np.not_equal: (f"setp.ne.{_INTEGERS}", "setp.ne.{b16|b32|b64}"),
    np.less: (f"setp.lt.{_INTEGERS}", "setp.lt.{f32|f64}", "setp.lo.{u16|u32|u64}"),
    np.less_equal: (f"setp.le.{_INTEGERS}", "setp.le.{f32|f64}", "setp.ls.{u16|u32|u64}"),
    np.greater: (f"setp.gt.{_INTEGERS}", "setp.gt.{f32|f64}", "setp.hi.{u16|u32|u64}"),
    np.greater_equal: (f"setp.ge.{_INTEGERS}", "setp.ge.{f32|f64}", "setp.hs.{u16|u32|u64}"),
}
UFUNCS = {
    form: fn
    for fn, templates in _FORMS.items()
    for template in templates
    for form in expand(template)
}
_SHIFTS = {
    "shl": np.left_shift,
    "shr": np.right_shift,
}


def without_clamp(fn: Callable, opcode: str, numbers: list[int], layout: registers.Layout):
    """A shift by a constant below the width needs no test of the count: the ufunc, its views."""
    stem, _, type_ = opcode.partition(".")
    if stem not in _SHIFTS:
        return fn, numbers
    value, count = numbers
    amount, bits = layout.constant_of(count), registers.BITS[type_]
    if amount is None or amount[0] >= bits:
        return fn, numbers
    return _SHIFTS[stem], [value, layout.constant(registers.dtype_of(type_).type(amount[0]))]
