"""The bridge behind jitted calls, over a driver that records: packing, lookup, errors."""

import dataclasses
import threading
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import manifests
import numpy as np
import recording
from absl.testing import absltest, parameterized

from jax_dsa.cubins import manifest
from jax_dsa.ffi import call, library, structs

FACTS = manifests.FACTS


def forward(facts=FACTS, /, **changed: Any):
    return call.forward(facts, **manifests.operands(**changed))


def backward(facts=FACTS, /, **changed: Any):
    return call.backward(facts, **manifests.backward_operands(**changed))


class BridgeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        library.register()

    def driver(self, *entries: manifest.Kernel, **options: Any) -> recording.Driver:
        driver = self.enterContext(recording.Driver(entries, **options))
        library.install([(entry, manifests.image(entry)) for entry in entries])
        return driver

    def fails(self, function, *words: str):
        with self.assertRaises(Exception) as caught:
            jax.block_until_ready(function())
        for word in words:
            self.assertIn(word, str(caught.exception))


class PackingTest(BridgeTest):
    def test_forward(self):
        """Pointers are those of the operands, sizes and scale what the call says."""
        driver = self.driver(manifests.entry())
        given = manifests.operands()
        jax.block_until_ready(call.forward(FACTS, **given))
        (launch,) = driver.launches
        self.assertEqual(launch.symbol, "forward_bfloat16_576")
        self.assertEqual(launch.grid, (6, 2, 1))
        self.assertEqual((launch.block, launch.shared), ((384, 1, 1), 200_000))
        self.assertEqual(list(launch.arguments), [p.name for p in manifests.entry().parameters])
        scalars = {n: launch.arguments[n] for n in ("S", "T", "K", "H", "sink_stride", "scale")}
        want = {"S": 3, "T": 7, "K": 8, "H": 65, "sink_stride": 65, "scale": 0.125}
        self.assertEqual(scalars, want)
        for name, array in given.items():
            self.assertEqual(launch.arguments[name], array.unsafe_buffer_pointer(), name)

    def test_one_sink_for_all_groups_has_stride_zero(self):
        driver = self.driver(manifests.entry())
        forward(sink=jnp.zeros((1, manifests.H)))
        self.assertEqual(driver.launches[0].arguments["sink_stride"], 0)

    def test_results_are_what_the_kernel_writes(self):
        driver = self.driver(manifests.entry())

        def write(launch):
            recording.at(launch.arguments["lse"], np.float32, 2 * 3 * 65)[:] = np.arange(2 * 3 * 65)

        driver.on_launch = write
        _, lse = jax.jit(forward)()
        np.testing.assert_array_equal(np.ravel(lse), np.arange(2 * 3 * 65))

    def test_backward_zeroes_dkv_before_the_launch(self):
        driver = self.driver(manifests.entry("backward"))
        _, dkv = jax.jit(backward)()
        np.testing.assert_array_equal(dkv, np.zeros((2, 7, 576)))
        names = driver.names("cuMemsetD8Async", "cuLaunchKernelEx")
        self.assertEqual(names, ["cuMemsetD8Async", "cuLaunchKernelEx"])
        self.assertIn(("cuMemsetD8Async", (0, 2 * 7 * 576 * 4)), driver.calls)

    @parameterized.parameters("i32", "u32", "i64", "u64")
    def test_integers_of_every_width(self, kind: str):
        mixed = (
            manifest.Parameter("T", "scalar", kind),
            manifest.Parameter("scale", "scalar", "f64"),
            manifest.Parameter("K", "scalar", kind),
            manifest.Parameter("q", "pointer"),
            manifest.Parameter("G", "scalar", kind),
            manifest.Parameter("D", "scalar", kind),
        )
        driver = self.driver(manifests.entry(parameters=mixed))
        forward(dataclasses.replace(FACTS, scale=0.1))
        arguments = driver.launches[0].arguments
        self.assertEqual([arguments[n] for n in ("T", "scale", "K", "G", "D")], [7, 0.1, 8, 2, 576])

    def test_cluster_is_a_launch_attribute(self):
        driver = self.driver(manifests.entry(cluster=(2, 1, 1)))
        forward()
        self.assertEqual(driver.calls[-1], ("cuLaunchKernelEx", 1))

    def test_tensor_maps(self):
        fields = {
            "tensorDataType": "BFLOAT16",
            "globalAddress": "kv",
            "globalDim": ("D", "G*T"),
            "globalStrides": ("2*D",),
            "boxDim": (64, 32),
            "swizzle": "128B",
            "l2Promotion": "L2_256B",
        }
        entry = manifests.entry(
            parameters=(
                manifest.Parameter("S", "scalar", "i32"),
                manifest.Parameter("kv_map", "tensor_map", tensor_map=fields),
                manifest.Parameter("lse", "pointer"),
            )
        )
        driver = self.driver(entry)
        given = manifests.operands()
        jax.block_until_ready(call.forward(FACTS, **given))
        (got,) = driver.maps
        self.assertEqual(got["address"], given["kv"].unsafe_buffer_pointer())
        self.assertTrue(got["aligned"])
        shape = (got["dims"], got["strides"], got["box"], got["steps"])
        self.assertEqual(shape, ([576, 14], [1152], [64, 32], [1, 1]))
        # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; interleave, swizzle 128B, promotion 256B, fill.
        self.assertEqual((got["dtype"], got["rest"]), (9, (0, 3, 3, 0)))
        self.assertEqual(driver.launches[0].arguments["kv_map"], b"\xa5" * 128)
        self.assertEqual(driver.launches[0].arguments["S"], 3)


class LookupTest(BridgeTest):
    def test_by_op_and_facts(self):
        wide = manifests.entry()
        narrow = manifests.entry(facts={"head_dim": 512})
        half = manifests.entry(facts={"dtype": "float16"})
        driver = self.driver(wide, narrow, half, manifests.entry("backward"))
        forward()
        backward()
        short = {
            "q": jnp.ones((2, 3, 65, 512), "bfloat16"),
            "kv": jnp.ones((2, 7, 512), "bfloat16"),
        }
        forward(**short)
        as_half = {
            k: v.astype("float16") for k, v in manifests.operands().items() if k in ("q", "kv")
        }
        forward(dataclasses.replace(FACTS, dtype="float16"), **as_half)
        symbols = [launch.symbol for launch in driver.launches]
        want = ["forward_bfloat16_576", "backward_bfloat16_576", "forward_bfloat16_512"]
        self.assertEqual(symbols, [*want, "forward_float16_576"])

    @parameterized.parameters(
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_103f", (10, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_120f", (12, 1), True),
    )
    def test_by_compute_capability(self, arch: str, capability: tuple[int, int], serves: bool):
        driver = self.driver(manifests.entry(arch=arch), capability=capability)
        if serves:
            jax.block_until_ready(forward())
            self.assertLen(driver.launches, 1)
        else:
            wanted = f"compute capability {capability[0]}.{capability[1]}"
            self.fails(forward, "NOT_FOUND", "head_dim=576", "bfloat16", wanted, arch)

    def test_loads_once_and_asks_nothing_again(self):
        """The second call makes no driver call but its own."""
        driver = self.driver(manifests.entry())
        run = jax.jit(lambda: forward())
        jax.block_until_ready(run())
        loads = ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"]
        self.assertEqual(driver.names(*loads), loads)
        attribute = (8, 200_000, "forward_bfloat16_576")  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.assertIn(("cuKernelSetAttribute", attribute), driver.calls)
        driver.calls.clear()
        jax.block_until_ready(run())
        self.assertEqual(driver.names(), ["cuLaunchKernelEx"])

    def test_little_shared_memory_needs_no_attribute(self):
        driver = self.driver(manifests.entry(dynamic_shared_bytes=48 * 1024))
        jax.block_until_ready(forward())
        self.assertEqual(driver.names("cuKernelSetAttribute"), [])

    def test_one_image_of_two_kernels_is_loaded_once(self):
        hashes = {"cubin": "both"}
        both = manifests.entry(hashes=hashes), manifests.entry("backward", hashes=hashes)
        driver = self.driver(*both)
        jax.block_until_ready((forward(), backward()))
        self.assertLen(driver.names("cuLibraryLoadData"), 1)

    def test_threads_load_once(self):
        driver = self.driver(manifests.entry())
        start = threading.Barrier(4)

        def work():
            start.wait()
            jax.block_until_ready(forward())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLen(driver.launches, 4)
        self.assertLen(driver.names("cuLibraryLoadData"), 1)

    def test_a_kernel_installed_later_takes_the_place(self):
        driver = self.driver(manifests.entry())
        jax.block_until_ready(forward())
        later = manifests.entry(symbol="later", hashes={"cubin": "later"})
        driver.entries["later"] = later
        library.install([(later, b"new")])
        jax.block_until_ready(forward())
        self.assertEqual([x.symbol for x in driver.launches], ["forward_bfloat16_576", "later"])

    def test_images_are_unloaded_with_the_driver(self):
        driver = self.driver(manifests.entry())
        jax.block_until_ready(forward())
        library.reset()
        self.assertEqual(driver.names("cuLibraryUnload"), ["cuLibraryUnload"])

    def test_launches_are_counted(self):
        self.driver(manifests.entry("backward"))
        before = library.launch_count()
        jax.block_until_ready([backward() for _ in range(3)])
        self.assertEqual(library.launch_count() - before, 3)


class ShapeTest(BridgeTest):
    @parameterized.parameters(
        ("q", (2, 3, 576), "q: got shape [2, 3, 576], want [G, S, H, D]"),
        ("kv", (2, 7, 512), "kv: got shape [2, 7, 512], want [G, T, D], sizes of at least 1, with"),
        ("kv", (1, 7, 576), "with G=2, D=576"),
        ("indices", (2, 4, 8), "indices: got shape [2, 4, 8], want [G, S, K]"),
        ("topk_length", (2,), "topk_length: got shape [2], want [G, S]"),
        ("sink", (3, 65), "sink: got shape [3, 65], want [1 or G, H]"),
        ("sink", (2, 64), "with G=2, H=65"),
        ("kv", (2, 0, 576), "kv: got shape [2, 0, 576]"),
    )
    def test_forward(self, name: str, shape: tuple[int, ...], text: str):
        self.driver(manifests.entry())
        dtype = manifests.operands()[name].dtype
        self.fails(
            lambda: forward(**{name: jnp.zeros(shape, dtype)}), "jax_dsa_fwd_v1", text, "INVALID"
        )

    @parameterized.parameters(
        ("lse", (2, 3), "lse: got shape [2, 3], want [G, S, H]"),
        ("alpha", (2, 3, 1), "alpha: got shape"),
        ("beta", (1, 3, 65), "beta: got shape"),
        ("dout", (2, 3, 65, 576), "dout: got shape [2, 3, 65, 576], want [G, S, H, value_dim]"),
    )
    def test_backward(self, name: str, shape: tuple[int, ...], text: str):
        self.driver(manifests.entry("backward"))
        dtype = manifests.backward_operands()[name].dtype
        self.fails(lambda: backward(**{name: jnp.zeros(shape, dtype)}), "jax_dsa_bwd_v1", text)

    @parameterized.parameters(
        ("q", "float32", "q: got dtype float32, want bfloat16 or float16"),
        ("kv", "float16", "kv: got dtype float16, want bfloat16"),
        ("indices", "float32", "indices: got dtype float32, want int32"),
        ("topk_length", "float32", "topk_length: got dtype float32, want int32"),
        ("sink", "bfloat16", "sink: got dtype bfloat16, want float32"),
    )
    def test_dtype(self, name: str, dtype: str, text: str):
        self.driver(manifests.entry())
        wrong = manifests.operands()[name].astype(dtype)
        self.fails(lambda: forward(**{name: wrong}), text)

    def test_another_abi(self):
        self.driver(manifests.entry())
        with mock.patch.object(call, "ABI", 2):
            self.fails(forward, "abi: got 2, want 1", "another version of jax_dsa")

    def test_a_grid_that_is_too_large(self):
        self.driver(manifests.entry(grid=("G", "1024*H", "1")))
        self.fails(forward, "grid y = 1024*H = 66560, want 1 to 65535")


class ErrorTest(BridgeTest):
    def test_no_driver_on_a_cpu(self):
        library.reset()
        self.fails(forward, "FAILED_PRECONDITION", "CPU", "none is", "implementation='xla'")

    def test_no_kernel_names_what_there_is(self):
        self.driver(manifests.entry(facts={"head_dim": 512}), manifests.entry(arch="sm_100a"))
        self.fails(forward, "head_dim=576", "for: sm_100a", "head_dim=512 value_dim=512")

    @parameterized.parameters(
        ("cuLibraryLoadData", recording.INVALID_IMAGE, "INTERNAL"),
        ("cuLibraryLoadData", recording.OUT_OF_MEMORY, "RESOURCE_EXHAUSTED"),
        ("cuLibraryGetKernel", recording.INVALID_IMAGE, "INTERNAL"),
        ("cuKernelSetAttribute", recording.INVALID_IMAGE, "INTERNAL"),
        ("cuKernelGetFunction", recording.OUT_OF_MEMORY, "RESOURCE_EXHAUSTED"),
        ("cuMemsetD8Async", recording.INVALID_IMAGE, "INTERNAL"),
        ("cuLaunchKernelEx", recording.OUT_OF_MEMORY, "RESOURCE_EXHAUSTED"),
    )
    def test_a_failing_driver_call_is_diagnosed(self, function: str, error: int, status: str):
        """Expression, cause, kernel, arch wanted, arch present; the next call works."""
        driver = self.driver(manifests.entry("backward"))
        driver.failing = {function: error}
        kernel = "'backward_bfloat16_576'", "compiled for sm_90a", "compute capability 9.0"
        name = recording.ERRORS[error].decode()
        self.fails(backward, status, f"{function}(", name, "in words", *kernel)
        driver.failing = {}
        jax.block_until_ready(backward())

    @parameterized.parameters((11080, True), (12000, False), (13000, False))
    def test_a_driver_that_is_too_old(self, version: int, refused: bool):
        entry = manifests.entry(tools={"cuda": "12.9"}, minimum_driver="525.60.13")
        driver = self.driver(entry, version=version)
        if refused:
            words = "CUDA 11.8, wanted is 12.0 or newer", "525.60.13", "'forward_bfloat16_576'"
            self.fails(forward, "FAILED_PRECONDITION", *words)
            self.assertEqual(driver.names("cuLibraryLoadData"), [])
        else:
            jax.block_until_ready(forward())

    def test_a_failing_tensor_map(self):
        fields = {
            "tensorDataType": "FLOAT16", "globalAddress": "q", "globalDim": ("D",),
            "globalStrides": (), "boxDim": (64,),
        }  # fmt: skip
        parameter = manifest.Parameter("m", "tensor_map", tensor_map=fields)
        driver = self.driver(manifests.entry(parameters=(parameter,)))
        driver.failing = {"cuTensorMapEncodeTiled": recording.INVALID_IMAGE}
        self.fails(forward, "cuTensorMapEncodeTiled(", "forward_bfloat16_576")

    def test_after_an_error_other_calls_run(self):
        library.reset()
        self.fails(forward)
        np.testing.assert_array_equal(jnp.arange(3) + 1, [1, 2, 3])


class InstallTest(BridgeTest):
    @parameterized.parameters(
        ({"op": "sideways"}, "op: got 'sideways', want one of forward, backward"),
        ({"grid": ("G", "H/64", "1")}, "formula 'H/64'"),
        ({"grid": ("G", "0", "1")}, "formula '0'"),
        ({"grid": ("G", "ceil(H/0)", "1")}, "formula 'ceil(H/0)'"),
        ({"grid": ("", "1", "1")}, "formula ''"),
        ({"grid": ("G*", "1", "1")}, "formula 'G*'"),
        ({"grid": ("99999999999", "1", "1")}, "formula '99999999999'"),
        ({"block": (0, 1, 1)}, "size of 0"),
        ({"zeroed": ("dk",)}, "got 'dk', which is no operand or result of forward"),
        ({"facts": {"heads": 64}}, "got fact 'heads', want head_dim, value_dim and dtype"),
        ({"facts": {"dtype": "float8"}}, "fact dtype: got 'float8'"),
        ({"facts": {"head_dim": "x"}}, "fact head_dim: got 'x'"),
    )
    def test_entries_that_no_launcher_understands(self, changed, text: str):
        entry = manifests.entry(**changed)
        with self.assertRaises(library.BridgeError) as caught:
            library.install([(entry, b"image")])
        for word in (text, entry.symbol, "sm_90a"):
            self.assertIn(word, str(caught.exception))

    @parameterized.parameters(
        (("dq", "pointer"), "got 'dq', which is no operand or result of forward"),
        (
            ("N", "scalar", "i32"),
            "got scalar 'N', want one of G, S, T, K, H, D, sink_stride, scale",
        ),
        (("S", "scalar", "f32"), "got type f32"),
        (("scale", "scalar", "i32"), "got type i32"),
        (("blob", "bytes", "", 16), "kind: got 'bytes'"),
    )
    def test_parameters_that_no_launcher_knows(self, parameter, text: str):
        entry = manifests.entry(parameters=(manifest.Parameter(*parameter),))
        with self.assertRaises(library.BridgeError) as caught:
            library.install([(entry, b"image")])
        self.assertIn(f"parameter '{parameter[0]}': {text}", str(caught.exception))

    @parameterized.parameters(
        ({"swizzle": "256B"}, "swizzle: got '256B'"),
        ({"tensorDataType": "BF16"}, "tensorDataType: got 'BF16'"),
        ({"globalAddress": "keys"}, "got 'keys'"),
        ({"globalDim": ("D", "N")}, "formula 'N'"),
        ({"globalDim": ("D",)}, "1 globalDim, 2 boxDim"),
    )
    def test_tensor_maps_that_cannot_be_encoded(self, changed, text: str):
        fields = {
            "tensorDataType": "BFLOAT16", "globalAddress": "kv", "globalDim": ("D", "G*T"),
            "globalStrides": ("2*D",), "boxDim": (64, 1),
        }  # fmt: skip
        parameter = manifest.Parameter("m", "tensor_map", tensor_map=fields | changed)
        errors = (library.BridgeError, manifest.ManifestError)
        with self.assertRaisesRegex(errors, text.replace("(", r"\(")):
            library.install([(manifests.entry(parameters=(parameter,)), b"image")])

    def test_a_missing_field_of_a_tensor_map(self):
        parameter = manifest.Parameter("m", "tensor_map", tensor_map={"globalDim": ("D",)})
        with self.assertRaisesRegex(manifest.ManifestError, "tensor map m: field .* is missing"):
            library.install([(manifests.entry(parameters=(parameter,)), b"image")])

    def test_an_empty_image(self):
        with self.assertRaisesRegex(library.BridgeError, "got an empty image"):
            library.install([(manifests.entry(), b"")])

    def test_workspaces_are_refused(self):
        with self.assertRaisesRegex(manifest.ManifestError, "no workspaces, got .'scratch'"):
            library.install([(manifests.entry(workspaces={"scratch": "4*G"}), b"image")])

    def test_nothing_is_installed_with_a_bad_entry(self):
        self.driver()
        with self.assertRaises(library.BridgeError):
            library.install(
                [(manifests.entry(), b"image"), (manifests.entry(op="sideways"), b"image")]
            )
        self.fails(forward, "no compiled jax_dsa forward kernel", "such kernels for: none")

    def test_driver_tables(self):
        functions = recording.Driver().functions()
        del functions["cuLaunchKernelEx"]
        with self.assertRaisesRegex(library.BridgeError, "'cuLaunchKernelEx' is missing"):
            library.install_driver(functions)
        with self.assertRaisesRegex(library.BridgeError, "got function 'cuNothing', want one of"):
            library.install_driver({"cuNothing": functions["cuLibraryUnload"]})
        self.assertEqual(sorted(recording.SIGNATURES), sorted(library.driver_functions()[0]))

    @parameterized.parameters("sm90", "sm_9", "sm_90b", "")
    def test_names_of_no_arch(self, arch: str):
        with self.assertRaisesRegex(ValueError, "arch: got"):
            structs.capabilities(arch)

    @parameterized.parameters(("12.9", 12000), ("13.0", 13000), ("12", 0), ("", 0))
    def test_minimum_cuda(self, tools: str, number: int):
        self.assertEqual(structs.minimum_cuda(tools), number)


if __name__ == "__main__":
    absltest.main()
