"""Finding, loading and registering the bridge, and what the driver says of itself."""

import ctypes
import pathlib
import subprocess
import sys
import tempfile
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jax_dsa.ffi import driver, library


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata up to the version."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int64),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    ]


class Frame(ctypes.Structure):
    """XLA_FFI_CallFrame up to its extensions."""

    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.POINTER(Extension))]


HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))


@HANDLER
def from_newer_headers(frame):
    """A handler that says it was built against version 0.99 of the FFI."""
    metadata = frame[0].extension[0].metadata[0]
    metadata.major, metadata.minor = 0, 99
    return None


class LoadTest(parameterized.TestCase):
    def test_is_found_and_loaded_once(self):
        self.assertTrue(library.path().is_file())
        self.assertIs(library.load(), library.load())
        self.assertIs(library.register(), library.register())

    def test_absent(self):
        with mock.patch.object(library, "NAME", "libnone.so"):
            with self.assertRaisesRegex(library.BridgeError, "libnone.so is not inst.*compiler"):
                library.path()

    def test_no_library(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            with mock.patch.object(library, "path", lambda: pathlib.Path(file.name)):
                with self.assertRaisesRegex(library.BridgeError, "cannot be loaded: "):
                    library.load.__wrapped__()

    def test_of_another_version(self):
        with mock.patch.object(library.structs, "BRIDGE_VERSION", 77):
            with self.assertRaisesRegex(library.BridgeError, "version 2, wanted 77.*again"):
                library.load.__wrapped__()

    def test_an_older_jaxlib_is_told_of(self):
        """XLA refuses the handler; the error says why, and JAX goes on."""
        fake: ctypes.CDLL = types.SimpleNamespace(  # pyright: ignore[reportAssignmentType]
            new_v1_cpu_execute=from_newer_headers, jax_dsa_ffi_api_minor=lambda: 99
        )
        jax.local_devices()
        with mock.patch.object(library, "TARGETS", {"jax_dsa_new_v1": "new_v1"}):
            with self.assertRaises(library.BridgeError) as caught:
                library._register(fake, "cpu")
        for words in ("jaxlib", "refuses jax_dsa_new_v1 for cpu", "0.99 of the XLA FFI", "newer"):
            self.assertIn(words, str(caught.exception))
        np.testing.assert_array_equal(jnp.arange(3) + 1, [1, 2, 3])

    def test_nothing_is_loaded_by_an_import(self):
        code = (
            "import jax_dsa; from jax._src import xla_bridge; "
            "from jax_dsa.ffi import library; "
            "print(library.load.cache_info().currsize, len(xla_bridge._backends))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            cwd=pathlib.Path(library.__file__).parents[2],
        )  # fmt: skip
        self.assertEqual(run.stdout.split(), ["0", "0"])


def cuda_python(capabilities=((9, 0),), error=0):
    """What stands for ``cuda.bindings.driver``."""
    attributes = {"COMPUTE_CAPABILITY_MAJOR": 0, "COMPUTE_CAPABILITY_MINOR": 1}
    attributes = {f"CU_DEVICE_ATTRIBUTE_{name}": i for name, i in attributes.items()}

    def cuInit(flags):
        return (error,)

    return types.SimpleNamespace(
        CUdevice_attribute=types.SimpleNamespace(**attributes),
        cuInit=cuInit,
        cuDriverGetVersion=lambda: (0, 12080),
        cuDeviceGetCount=lambda: (0, len(capabilities)),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda which, device: (0, capabilities[device][which]),
    )


class DriverTest(parameterized.TestCase):
    def query(self, bindings) -> driver.Driver:
        modules = {"cuda": types.ModuleType("cuda"), "cuda.bindings": types.ModuleType("b")}
        modules["cuda.bindings"].driver = bindings  # pyright: ignore
        with mock.patch.dict(sys.modules, modules):
            return driver.query()

    def test_through_cuda_python(self):
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write(text)
            file.flush()
            with mock.patch.object(driver, "MODULE", pathlib.Path(file.name)):
                got = self.query(cuda_python(((9, 0), (10, 3))))
        self.assertEqual(got, driver.Driver("12.8", "580.65.06", ("9.0", "10.3"), "cuda-python"))

    def test_without_cuda_python_the_bridge_is_asked(self):
        with mock.patch.dict(sys.modules, {"cuda.bindings": None}):
            with mock.patch.object(library, "query_driver", lambda: ("13.0", ["9.0"])):
                got = driver.query()
        self.assertEqual((got.cuda, got.capabilities, got.source), ("13.0", ("9.0",), "the bridge"))

    def test_errors(self):
        with self.assertRaisesRegex(RuntimeError, "cuInit failed with 100"):
            self.query(cuda_python(error=100))
        absent = mock.Mock(cuInit=mock.Mock(side_effect=RuntimeError("no libcuda")))
        with self.assertRaisesRegex(RuntimeError, "cannot be opened: no libcuda"):
            self.query(absent)

    @parameterized.parameters(
        ("525.60.13", True), ("580.65.06", True), ("580.100", False), ("", None)
    )
    def test_minimum(self, minimum: str, serves: bool | None):
        found = driver.Driver("13.0", "580.65.06", (), "")
        self.assertEqual(found.serves(minimum), serves)
        self.assertIsNone(driver.Driver("13.0", "", (), "").serves(minimum))


if __name__ == "__main__":
    absltest.main()
