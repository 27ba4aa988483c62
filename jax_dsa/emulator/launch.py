"""Programs, launches and settings: what ``run`` is given, checked before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from jax_dsa.cubins import manifest
from jax_dsa.emulator import memory, ptx
from jax_dsa.emulator.code import Code
from jax_dsa.emulator.collector import paused
from jax_dsa.emulator.errors import LaunchError
from jax_dsa.emulator.isa.tensor_copies import BoundMap
from jax_dsa.emulator.memory import GlobalMemory, Linear
from jax_dsa.emulator.schedule import Schedule
from jax_dsa.emulator.tensor_map import Pointer, TensorMap


@dataclasses.dataclass(frozen=True)
class Structure:
    """A parameter that starts with a pointer; ``tail`` are the bytes behind it."""

    pointer: Pointer
    tail: bytes


Value = Pointer | TensorMap | Structure | bytes | int | float
_FORMATS = {"i32": "<i", "u32": "<I", "f32": "<f", "i64": "<q", "u64": "<Q", "f64": "<d"}


class Program:
    """PTX text with the manifest entries of its kernels.

    Args:
      text: PTX of one module.
      entries: manifest entries; kernels without one can be launched, with parameters told by size
        alone.

    Raises:
      PtxSyntaxError, UnsupportedInstruction: when a kernel is first used.
      ManifestError: when an entry's parameters are not those of its ``.entry``.
    """

    def __init__(self, text: str, entries: Sequence[manifest.Kernel] = ()):
        with paused():
            self.module = ptx.parse(text)
        self.entries = {e.symbol: e for e in entries}
        for symbol, entry in self.entries.items():
            if symbol not in self.module.kernels:
                raise LaunchError(
                    f"The manifest names kernel {symbol!r}; the PTX has"
                    f" {list(self.module.kernels)}."
                )
            entry.check_parameters([p.size for p in self.module.kernels[symbol].parameters])

    @functools.cache  # noqa: B019  (a program lives as long as its runs)
    def code(self, kernel: str) -> Code:
        """The kernel bound to closures; made once."""
        if kernel not in self.module.kernels:
            raise LaunchError(
                f"No kernel {kernel!r} in the PTX; it has {list(self.module.kernels)}."
            )
        with paused():
            return Code(self.module.kernels[kernel])


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
      kernel: symbol of the ``.entry``.
      grid, block: CTAs and threads per dimension.
      parameters: one value per parameter: Pointer, TensorMap, Structure, int, float, or the bytes
        themselves.
      dynamic_shared_bytes: per CTA.
      cluster: must be (1, 1, 1).
      entry: the manifest entry, for roles, registers and scalar types.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: Sequence[Value]
    dynamic_shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    entry: manifest.Kernel | None = None

    def role(self, warp: int) -> str:
        return self.entry.role(warp) if self.entry else ""

    @property
    def registers(self) -> int | None:
        return self.entry.registers if self.entry else None


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
      schedule: see ``schedule.Schedule``.
      observers: "all", "none", or names out of "races", "coverage", "timeline".
      outputs: arrays that start unwritten: reading them before a write is reported.
      concurrent_ctas: how many CTAs are in flight at once; 0: all (kernels that wait on global
        memory).
      processes: CTAs of a launch run in so many processes, with the same results and the same
        report, where ``concurrent_ctas`` is 1 and no CTA can learn of another: a launch whose
        kernel has acquire, release, relaxed or volatile accesses of global memory, fences wider
        than a CTA, atomics whose result is read or bulk reductions runs in one process, and so does
        one whose CTAs touch what others wrote (see ``parallel``).
      step_limit: scheduler steps of one launch before StepLimit is raised.
      lints: also report what is legal but strict code would not do.
    """

    schedule: Schedule = Schedule()
    observers: str | Sequence[str] = "all"
    outputs: frozenset[str] = frozenset()
    concurrent_ctas: int = 1
    processes: int = 1
    step_limit: int = 50_000_000
    lints: bool = True


def check(program: Program, launch: Launch, arrays: Mapping[str, np.ndarray]) -> None:
    """Everything that can be wrong with a launch before it runs; raises LaunchError."""
    code = program.code(launch.kernel)
    _check_shape(launch, code)
    parameters = code.kernel.parameters
    if len(parameters) != len(launch.parameters):
        raise LaunchError(
            f"{launch.kernel}: {len(launch.parameters)} parameters given, {len(parameters)} wanted."
        )
    for i, (parameter, value) in enumerate(zip(parameters, launch.parameters, strict=True)):
        problem = _problem(value, parameter.size, arrays)
        if problem:
            raise LaunchError(f"{launch.kernel}: parameter {i}: {problem}.")


def _check_shape(launch: Launch, code: Code) -> None:
    threads = int(np.prod(launch.block))
    if min(launch.grid) < 1 or launch.grid[0] >= 2**31 or max(launch.grid[1:]) > 65535:
        raise LaunchError(
            f"{launch.kernel}: grid {launch.grid}; wanted 1..2^31-1, 1..65535, 1..65535."
        )
    if not 1 <= threads <= 1024:
        raise LaunchError(
            f"{launch.kernel}: block {launch.block} has {threads} threads; wanted 1..1024."
        )
    if code.kernel.block not in (None, tuple(launch.block)):
        raise LaunchError(
            f"{launch.kernel}: block {launch.block}; the PTX requires {code.kernel.block}."
        )
    if tuple(launch.cluster) != (1, 1, 1):
        raise LaunchError(
            f"{launch.kernel}: cluster {launch.cluster}; only (1, 1, 1) is supported."
        )
    shared = code.assembler.dynamic_start - memory.SHARED_START + launch.dynamic_shared_bytes
    if shared > memory.SHARED_LIMIT:
        raise LaunchError(
            f"{launch.kernel}: {shared} bytes of shared memory; at most {memory.SHARED_LIMIT}."
        )


def _problem(value: Value, size: int, arrays: Mapping[str, np.ndarray]) -> str:
    pointer = (
        value.globalAddress if isinstance(value, TensorMap) else getattr(value, "pointer", value)
    )
    if isinstance(pointer, Pointer) and pointer.array not in arrays:
        return f"array {pointer.array!r} is not among {sorted(arrays)}"
    if isinstance(value, TensorMap):
        problems = [
            *value.problems(),
            *([] if size == 128 else [f"the parameter has {size} bytes, not 128"]),
        ]
        return "; ".join(problems)
    given = None
    if isinstance(value, bytes | Pointer | Structure):
        given = len(value) if isinstance(value, bytes) else 8 + len(getattr(value, "tail", b""))
    if given is not None and given != size:
        return f"{type(value).__name__} of {given} bytes for a parameter of {size}"
    if isinstance(value, int | float) and size not in (1, 2, 4, 8):
        return f"a number for a parameter of {size} bytes"
    return ""


def pack(launch: Launch, code: Code, heap: GlobalMemory) -> tuple[Linear, dict[int, BoundMap]]:
    """The parameter bytes and the tensor maps by generic address."""
    parameters = code.kernel.parameters
    end = max((p.offset + p.size for p in parameters), default=0)
    data = np.zeros(-(-max(end, 1) // 16) * 16, np.uint8)
    maps: dict[int, BoundMap] = {}
    for i, (parameter, value) in enumerate(zip(parameters, launch.parameters, strict=True)):
        raw = b""
        if isinstance(value, TensorMap):
            pointer = value.globalAddress
            bound = BoundMap(value, heap.buffers[pointer.array], pointer.offset)
            maps[memory.PARAM_WINDOW + parameter.offset] = bound
        else:
            raw = _raw(value, parameter.size, _type_of(launch, i), heap)
        data[parameter.offset : parameter.offset + len(raw)] = np.frombuffer(raw, np.uint8)
    return Linear("param", "parameters", data, 0, end), maps


def _type_of(launch: Launch, index: int) -> str:
    return launch.entry.parameters[index].type if launch.entry else ""


def _raw(value: Value, size: int, type_: str, heap: GlobalMemory) -> bytes:
    if isinstance(value, Pointer):
        return struct.pack("<Q", heap.buffers[value.array].base + value.offset)
    if isinstance(value, Structure):
        return _raw(value.pointer, 8, "", heap) + value.tail
    if isinstance(value, bytes):
        return value
    if type_:
        return struct.pack(_FORMATS[type_], value)
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    assert isinstance(value, int)
    return value.to_bytes(size, "little", signed=value < 0)
