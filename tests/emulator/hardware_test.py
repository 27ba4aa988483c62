"""The instruction files on a real GPU, bit for bit, and through the assembler.

Opt-in: ``JAX_DSA_HW=1``. Needs the CUDA driver (``libcuda.so.1``) and a device of compute
capability 9.0 or newer; files whose target the device lacks are left out. ``ptxas``, where it is on
the PATH, has to accept every file.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import instruction_files
import numpy as np
from absl.testing import absltest

from jax_dsa.emulator import Pointer, TensorMap

WANTED = os.environ.get("JAX_DSA_HW") == "1"
ALIGN = 256
PER_MODULE = 64
_TYPES = ["UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT64",
          "BFLOAT16"]  # fmt: skip
_SWIZZLES = ["NONE", "32B", "64B", "128B"]


def module_text(files: list[instruction_files.File], target: str) -> str:
    """One module: kernel ``test`` of file i becomes ``test<i>``."""
    head = f".version 8.8\n.target {target}\n.address_size 64\n"
    kernels = [f.text[f.text.index(".visible .entry") :] for f in files]
    renamed = (k.replace(".entry test(", f".entry test{i}(") for i, k in enumerate(kernels))
    return head + "\n".join(renamed)


def batches(files: list) -> list[list]:
    return [list(b) for b in (files[i : i + PER_MODULE] for i in range(0, len(files), PER_MODULE))]


class Driver:
    """The few calls of the CUDA driver that the files need; errors name the call."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, major, minor = (ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(),
                                         ctypes.c_int())  # fmt: skip
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        for value, attribute in ((major, 75), (minor, 76)):  # compute capability
            self("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        self.capability = 10 * major.value + minor.value

    def __call__(self, name: str, *arguments) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: error {code}, {(text.value or b'unknown').decode()}")

    @property
    def target(self) -> str:
        return f"sm_{self.capability}a"

    def runs(self, file: instruction_files.File) -> bool:
        """sm_90 runs on everything newer, sm_90a and sm_100a on their own architecture."""
        number, only = re.fullmatch(r"sm_(\d+)(a?)", file.target).groups()  # pyright: ignore
        return self.capability == int(number) if only else self.capability >= int(number)

    def load(self, text: str):
        """Compiles PTX; returns the module."""
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(1 << 16)
        options = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), len(log))
        try:
            self("cuModuleLoadDataEx", ctypes.byref(module), text.encode(), 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode()}") from None
        return module

    def map(self, tensor: TensorMap, address: int):
        """The 128 bytes of a tensor map, on a multiple of 64."""
        raw = ctypes.create_string_buffer(192)
        at = -(-ctypes.addressof(raw) // 64) * 64
        rank = tensor.tensorRank
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        strides = wide(*tensor.globalStrides, *[0] * (rank - len(tensor.globalStrides)))
        self("cuTensorMapEncodeTiled", ctypes.c_void_p(at), _TYPES.index(tensor.tensorDataType),
             ctypes.c_uint32(rank), ctypes.c_void_p(address), wide(*tensor.globalDim), strides,
             narrow(*tensor.boxDim), narrow(*[1] * rank), 0, _SWIZZLES.index(tensor.swizzle), 0, 0,
             )  # fmt: skip
        return ctypes.create_string_buffer(ctypes.string_at(at, 128), 128)

    def launch(self, module, name: str, file: instruction_files.File) -> dict[str, np.ndarray]:
        """Runs one file's kernel and waits for it; returns its arrays."""
        function, memory = ctypes.c_void_p(), ctypes.c_uint64()
        self("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        given = file.given()
        sizes = [-(-a.nbytes // ALIGN) * ALIGN + ALIGN for a in given.values()]
        self("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(sum(sizes) or 1))
        offsets = [0, *itertools.accumulate(sizes)]
        places = {n: memory.value + o for n, o in zip(given, offsets, strict=False)}
        for n, array in given.items():
            self("cuMemcpyHtoD_v2", ctypes.c_uint64(places[n]), ctypes.c_void_p(array.ctypes.data),
                 ctypes.c_size_t(array.nbytes))  # fmt: skip
        parameters = [self._parameter(p, places) for p in file.parameters]
        pointers = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        self("cuLaunchKernel", function, 1, 1, 1, file.threads, 1, 1, 0, None, pointers, None)
        self("cuCtxSynchronize")
        results = {n: np.empty_like(a) for n, a in given.items()}
        for n, array in results.items():
            self("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(places[n]),
                 ctypes.c_size_t(array.nbytes))  # fmt: skip
        self("cuMemFree_v2", memory)
        return results

    def _parameter(self, value, places: dict[str, int]):
        if isinstance(value, Pointer):
            return ctypes.c_uint64(places[value.array])
        if isinstance(value, TensorMap):
            return self.map(value, places[value.globalAddress.array])
        return ctypes.create_string_buffer(value, len(value))


@absltest.skipUnless(WANTED, "JAX_DSA_HW=1 runs the instruction files on a GPU")
class HardwareTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.files = [instruction_files.read(p) for p in instruction_files.PATHS]

    def test_a_gpu_gives_the_expected_words(self):
        wrong, start, spawn = [], 0, multiprocessing.get_context("spawn")
        while start is not None:  # a kernel that fails leaves its process without a device
            queue = spawn.SimpleQueue()
            child = spawn.Process(target=_survey, args=(start, queue))
            child.start()
            found, start, count = queue.get()
            child.join()
            if not count:
                self.skipTest(found[0])
            wrong += found
        print(f"{count} of {len(self.files)} files ran, {len(wrong)} differ")
        self.assertEqual(wrong, [], "\n".join(wrong))

    @absltest.skipUnless(shutil.which("ptxas"), "no ptxas on the PATH")
    def test_the_assembler_accepts_every_file(self):
        for target in ("sm_90a", "sm_100a"):
            files = [f for f in self.files if f.target in ("sm_90", target)]
            for batch in batches(files):
                with tempfile.TemporaryDirectory() as folder:
                    path = pathlib.Path(folder, "module.ptx")
                    path.write_text(module_text(batch, target))
                    command = ["ptxas", "-O0", "-arch", target, str(path), "-o", os.devnull]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)


def _survey(start: int, queue) -> None:
    """Runs the files from number ``start`` on, to the end or to one that fails.

    Puts (messages, where to go on or None, number of files for this device) into ``queue``.
    """
    try:
        driver = Driver()
    except (OSError, RuntimeError) as error:
        return queue.put(([f"no CUDA device: {error}"], None, 0))
    files = [f for f in map(instruction_files.read, instruction_files.PATHS) if driver.runs(f)]
    if not files:
        text = f"no file runs on compute capability {driver.capability / 10}"
        return queue.put(([text], None, 0))
    wrong, done = [], start
    for batch in batches(files[start:]):
        module = driver.load(module_text(batch, driver.target))
        for i, file in enumerate(batch):
            done += 1
            try:
                results = driver.launch(module, f"test{i}", file)
            except RuntimeError as error:
                message = f"{file.path.name}: {error}"
                return queue.put(
                    ([*wrong, message], done if done < len(files) else None, len(files))
                )
            with _collect(wrong):
                file.check(results, file.ulp)
        driver("cuModuleUnload", module)
    return queue.put((wrong, None, len(files)))


@contextlib.contextmanager
def _collect(messages: list[str]):
    try:
        yield
    except AssertionError as error:
        messages.append(str(error).strip())


if __name__ == "__main__":
    absltest.main()
