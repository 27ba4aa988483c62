"""A CUDA driver that writes down what it is asked and computes nothing unless told to.

It stands behind platform "cpu", where addresses are host memory: memsets are carried out, and a
launch calls ``on_launch`` with the decoded arguments.
"""

import ctypes
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from jax_dsa.cubins import manifest
from jax_dsa.ffi import library

SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE = 0, 2, 200
ERRORS = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_IMAGE: b"CUDA_ERROR_INVALID_IMAGE"}
SCALARS = {"i32": ctypes.c_int32, "u32": c_uint32, "i64": ctypes.c_int64, "u64": c_uint64}
SCALARS |= {"f32": ctypes.c_float, "f64": ctypes.c_double}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig up to what is read here."""

    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint32),
    ]


@dataclasses.dataclass
class Launch:
    """One launch: the kernel's symbol, its shape, and its arguments by name."""

    symbol: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    arguments: dict[str, Any]


SIGNATURES = {
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuLaunchKernelEx": (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), c_void_p),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLibraryLoadData": (
        *(POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint32),
        *(c_void_p, c_void_p, c_uint32),
    ),
    "cuLibraryUnload": (c_void_p,),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuTensorMapEncodeTiled": (
        *(c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64)),
        *(POINTER(c_uint32), POINTER(c_uint32), c_int, c_int, c_int, c_int),
    ),
}


class Driver:
    """Install it with ``with Driver(entries):``.

    Attributes:
        calls: names of the functions called, with what identifies the call.
        launches: what was launched.
        maps: arguments of the tensor maps encoded.
        failing: function name -> the error it returns.
        capability: compute capability of the device.
        version: what cuDriverGetVersion answers; None leaves that function out.
        on_launch: called with each Launch.
    """

    def __init__(
        self, entries: Sequence[manifest.Kernel] = (), capability=(9, 0), version: int | None = None
    ):
        self.entries = {entry.symbol: entry for entry in entries}
        self.capability = capability
        self.version = version
        self.calls: list[tuple[str, Any]] = []
        self.launches: list[Launch] = []
        self.maps: list[dict[str, Any]] = []
        self.failing: dict[str, int] = {}
        self.on_launch: Callable[[Launch], None] = lambda launch: None
        self.symbols: list[str] = []  # a kernel's handle is its place here, from 1
        self.images = 0
        self.lock = threading.Lock()

    def names(self, *only: str) -> list[str]:
        return [name for name, _ in self.calls if not only or name in only]

    def functions(self) -> dict[str, Any]:
        table = {}
        signatures = dict(SIGNATURES)
        if self.version is not None:
            signatures["cuDriverGetVersion"] = (POINTER(c_int),)
        for name, arguments in signatures.items():
            table[name] = ctypes.CFUNCTYPE(c_int, *arguments)(self._called(name))
        return table

    def _called(self, name: str):
        def call(*arguments) -> int:
            with self.lock:
                error = self.failing.get(name, SUCCESS)
                what = getattr(self, f"_{name}")(*arguments) if error == SUCCESS else None
                if not name.startswith("cuGetError"):
                    self.calls.append((name, what))
                return error

        return call

    def __enter__(self):
        library.install_driver(self.functions())
        return self

    def __exit__(self, *_):
        library.reset()

    def _cuDeviceGetAttribute(self, value, attribute, device):
        value[0] = self.capability[{75: 0, 76: 1}[attribute]]

    def _cuDriverGetVersion(self, value):
        value[0] = self.version

    def _cuGetErrorName(self, error, text):
        text[0] = ERRORS[error]

    def _cuGetErrorString(self, error, text):
        text[0] = b"in words"

    def _cuLibraryLoadData(self, handle, image, *_):
        self.images += 1
        handle[0] = self.images
        return ctypes.string_at(image, 4)

    def _cuLibraryUnload(self, handle):
        return handle

    def _cuLibraryGetKernel(self, kernel, handle, name):
        self.symbols.append(name.decode())
        kernel[0] = len(self.symbols)
        return self.symbols[-1]

    def _cuKernelSetAttribute(self, attribute, value, kernel, device):
        return attribute, value, self.symbols[kernel - 1]

    def _cuKernelGetFunction(self, function, kernel):
        function[0] = kernel

    def _cuMemsetD8Async(self, address, value, count, stream):
        ctypes.memset(address, value, count)
        return value, count

    def _cuTensorMapEncodeTiled(self, out, dtype, rank, address, dims, strides, box, steps, *rest):
        ctypes.memset(out, 0xA5, 128)
        self.maps.append(
            {
                "aligned": out % 64 == 0, "dtype": dtype, "address": address, "dims": dims[:rank],
                "strides": strides[: rank - 1], "box": box[:rank], "steps": steps[:rank],
                "rest": rest,
            }
        )  # fmt: skip

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        entry = self.entries[self.symbols[function - 1]]
        arguments = {p.name: _decode(p, parameters[i]) for i, p in enumerate(entry.parameters)}
        c = config[0]
        launch = Launch(entry.symbol, tuple(c.grid), tuple(c.block), c.shared, arguments)
        self.launches.append(launch)
        self.on_launch(launch)
        return c.num_attributes


def _decode(parameter: manifest.Parameter, address: int) -> Any:
    if parameter.kind == "tensor_map":
        return ctypes.string_at(address, 128)
    if parameter.kind == "pointer":
        return ctypes.cast(address, POINTER(c_uint64))[0]
    return ctypes.cast(address, POINTER(SCALARS[parameter.type]))[0]


def at(address: int, dtype: Any, *shape: int) -> np.ndarray:
    """The array at an address."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((c_ubyte * size).from_address(address)), dtype).reshape(shape)
