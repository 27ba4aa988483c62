"""The compiled kernels' place in JAX: selection, lowering, export, registration."""

import re
import types
from typing import Any
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from absl.testing import absltest, parameterized
from cases import Case
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_dsa
from jax_dsa import cutedsl, dispatch
from jax_dsa.cubins import registry
from jax_dsa.ffi import library

S, T, H, D, K = 3, 7, 4, 576, 5


def shapes(dtype="bfloat16", heads=H, head_dim=D):
    shape = jax.ShapeDtypeStruct
    q, kv = shape((S, heads, head_dim), jnp.dtype(dtype)), shape((T, head_dim), jnp.dtype(dtype))
    return q, kv, shape((S, K), jnp.int32)


def attend(implementation, *operands, **options):
    return jax_dsa.sparse_attention(*operands, implementation=implementation, **options)


def gradients(implementation, q, kv, indices, **options):
    """Of the sum of out."""

    def loss(q, kv):
        return attend(implementation, q, kv, indices, **options).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(q, kv)


def lowered(fn, *operands, platforms=("cuda",)) -> export.Exported:
    checks = jax_dsa.EXPORT_DISABLED_CHECKS
    return export.export(jax.jit(fn), platforms=platforms, disabled_checks=checks)(*operands)


class SelectionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        dispatch._log_choice.cache_clear()
        dispatch._warn_slow.cache_clear()
        self.info = self.enter_context(mock.patch.object(logging, "info"))
        self.warning = self.enter_context(mock.patch.object(logging, "warning"))

    def gpus(self, *capabilities: str, missing: str = ""):
        """This process has these GPUs and, unless missing, kernels for sm_90a."""
        devices = [types.SimpleNamespace(compute_capability=c) for c in capabilities]

        def find(arch, op, facts, build):
            if missing:
                raise registry.KernelMissing(missing)

        self.enter_context(mock.patch.object(cutedsl, "local_gpus", lambda: devices))
        self.enter_context(mock.patch.object(library, "register"))
        self.enter_context(mock.patch.object(registry, "find", find))

    @parameterized.parameters(
        ({"dtype": "float32"}, "float32 (they serve bfloat16 and float16)"),
        ({"head_dim": 64}, "D = 64 (they serve 512 and 576), value_dim = 64 (they serve 512)"),
        ({"heads": 129}, "H = 129 (they serve 1 to 128)"),
    )
    def test_limits(self, changed: dict[str, Any], text: str):
        self.gpus("9.0")
        with self.assertRaisesRegex(NotImplementedError, re.escape(text) + ".*use 'xla'"):
            jax_dsa.explain(*shapes(**changed), implementation="cutedsl")
        got = jax_dsa.explain(*shapes(**changed))
        self.assertEqual(got.chosen, "xla")
        self.assertIn(text, got.reasons["cutedsl"] or "")

    def test_value_dim(self):
        with self.assertRaisesRegex(NotImplementedError, "value_dim = 576 .they serve 512"):
            jax_dsa.explain(*shapes(), value_dim=576, implementation="cutedsl")

    def test_supported_gpu(self):
        self.gpus("9.0", "9.0")
        for asked in (None, "cutedsl", ("cutedsl", "xla"), ("cutedsl", "reference")):
            got = jax_dsa.explain(*shapes(), implementation=asked)
            self.assertEqual(got.chosen, "cutedsl")
            self.assertIsNone(got.reasons["cutedsl"])
        self.warning.assert_not_called()
        self.assertIn("cutedsl", str(self.info.call_args))

    def test_one_gpu_of_another_architecture(self):
        """None needs every local GPU."""
        self.gpus("9.0", "8.0")
        got = jax_dsa.explain(*shapes())
        self.assertEqual(got.chosen, "xla")
        self.assertRegex(got.reasons["cutedsl"] or "", r"compute capability 8\.0.*9\.0.*use 'xla'")
        self.assertIn("capability 8.0", str(self.warning.call_args))
        with self.assertRaisesRegex(NotImplementedError, "capability 8.0"):
            jax_dsa.explain(*shapes(), implementation="cutedsl")

    def test_kernels_are_missing(self):
        self.gpus("9.0", missing="nothing compiled.")
        got = jax_dsa.explain(*shapes())
        self.assertEqual(got.chosen, "xla")
        self.assertIn("nothing compiled; use 'xla'", str(self.warning.call_args))

    def test_bridge_is_missing(self):
        self.gpus("9.0")
        with mock.patch.object(library, "register", side_effect=library.BridgeError("no bridge")):
            self.assertEqual(jax_dsa.explain(*shapes()).chosen, "xla")
        self.assertIn("no bridge", str(self.warning.call_args))

    @parameterized.parameters(((),), (("sm_90a",),))
    def test_no_gpu(self, archs: tuple[str, ...]):
        """None runs "xla" here, also where kernels are there for export."""
        self.enter_context(mock.patch.object(registry, "archs", lambda: archs))
        self.enter_context(mock.patch.object(registry, "reason", lambda *_: None))
        got = jax_dsa.explain(*shapes())
        self.assertEqual(got.chosen, "xla")
        self.assertRegex(got.reasons["cutedsl"] or "", "GPU")

    def test_deterministic(self):
        self.gpus("9.0")
        got = jax_dsa.explain(*shapes(), deterministic=True)
        self.assertEqual(got.chosen, "xla")
        self.assertIn("deterministic=True", got.reasons["cutedsl"] or "")
        got = jax_dsa.explain(*shapes(), deterministic=True, implementation="cutedsl")
        self.assertEqual(got.chosen, "cutedsl")

    def test_deterministic_gradient_names_xla(self):
        named = lambda *a: gradients("cutedsl", *a, deterministic=True)  # noqa: E731
        with self.assertRaisesRegex(NotImplementedError, "'cutedsl'.*gradient.*use 'xla'"):
            jax.eval_shape(named, *shapes())


class LoweringTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(registry, "archs", lambda: ("sm_90a",)))
        self.enter_context(mock.patch.object(registry, "reason", lambda *_: None))

    @parameterized.parameters("cutedsl", (("cutedsl",),))
    def test_named_raises_when_lowered_for_a_cpu(self, implementation):
        run = jax.jit(lambda *a: attend(implementation, *a))
        traced = run.trace(*shapes())
        with self.assertRaisesRegex(NotImplementedError, "'cutedsl'.*lowered for cpu.*'xla'"):
            traced.lower()
        with self.assertRaisesRegex(NotImplementedError, "lowered for cpu"):
            lowered(run, *shapes(), platforms=("cuda", "cpu"))
        self.assertIn("jax_dsa_fwd_v1", lowered(run, *shapes()).mlir_module())

    def test_attributes_are_facts_and_no_architecture(self):
        run = lambda *a: attend("cutedsl", *a, scale=0.25)  # noqa: E731
        text = lowered(run, *shapes()).mlir_module()
        found = re.search(r"custom_call @jax_dsa_fwd_v1.*?backend_config = \{(.*?)\}", text)
        assert found, text
        want = "abi = 1 : i64, scale = 2.500000e-01 : f64, value_dim = 512 : i64"
        self.assertEqual(found[1], want)
        self.assertNotIn("sm_90", text)

    @parameterized.parameters(None, (("cutedsl", "xla"),), "cutedsl")
    def test_for_a_gpu_from_here(self, implementation):
        run = lambda *a: gradients(implementation, *a)  # noqa: E731
        text = lowered(run, *shapes()).mlir_module()
        for target in ("jax_dsa_fwd_v1", "jax_dsa_bwd_v1"):
            self.assertIn(f"@{target}", text)
        self.assertNotIn("stablehlo.scatter", text)

    @parameterized.parameters(None, (("cutedsl", "xla"),))
    def test_for_both_platforms_at_once(self, implementation):
        """Kernels for one, "xla" for the other; what runs here is right."""
        inputs = cases.make_inputs(
            Case("both", queries=S, keys=T, heads=H, head_dim=D, topk=K), "bfloat16"
        )
        q, kv, indices, *_ = inputs.operands
        run = lambda *a: (attend(implementation, *a), *gradients(implementation, *a))  # noqa: E731
        artefact = lowered(run, q, kv, indices, platforms=("cpu", "cuda"))
        for target in ("jax_dsa_fwd_v1", "jax_dsa_bwd_v1"):
            self.assertIn(f"@{target}", artefact.mlir_module())
        got = export.deserialize(artefact.serialize()).call(q, kv, indices)
        want = attend("xla", q, kv, indices), *gradients("xla", q, kv, indices)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)

    def test_without_kernels_none_is_exported_as_xla(self):
        with mock.patch.object(registry, "archs", lambda: ()):
            text = lowered(lambda *a: attend(None, *a), *shapes()).mlir_module()
        self.assertNotIn("jax_dsa_fwd_v1", text)

    def test_on_a_cpu_none_runs_xla(self):
        got = attend(None, *(np.ones(x.shape, x.dtype) for x in shapes()))
        self.assertEqual(got.shape, (S, H, 512))

    def test_vmap_folds_into_groups_without_a_loop(self):
        batched = [jax.ShapeDtypeStruct((6, *x.shape), x.dtype) for x in shapes()]
        run = jax.vmap(lambda *a: gradients("cutedsl", *a))
        text = lowered(run, *batched).mlir_module()
        self.assertIn("tensor<6x3x4x576xbf16>, tensor<6x7x576xbf16>", text)
        self.assertEqual(len(re.findall("@jax_dsa_bwd_v1", text)), 1)
        self.assertNotIn("stablehlo.while", text)

    @parameterized.parameters("explicit", "shard_map")
    def test_for_eight_gpus_from_here(self, mode: str):
        """Each device calls the kernels on its own queries; q is not gathered."""
        kinds = (AxisType.Explicit if mode == "explicit" else AxisType.Auto,)
        mesh = jax.make_mesh((8,), ("seq",), axis_types=kinds)
        specs = PartitionSpec("seq"), PartitionSpec(), PartitionSpec("seq")
        q, kv, _ = shapes()
        full = [
            jax.ShapeDtypeStruct((16, *q.shape[1:]), q.dtype), kv,
            jax.ShapeDtypeStruct((16, K), jnp.int32),
        ]  # fmt: skip
        run = lambda *a: attend("cutedsl", *a)  # noqa: E731
        if mode == "shard_map":
            run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0])
        split = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
            for x, s in zip(full, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            artefact = lowered(run, *split)
        self.assertEqual((artefact.nr_devices, artefact.platforms), (8, ("cuda",)))
        text = artefact.mlir_module()
        self.assertIn("tensor<1x2x4x576xbf16>, tensor<1x7x576xbf16>", text)
        self.assertNotIn("all_gather", text)


class RegisterTest(parameterized.TestCase):
    def test_register_installs_the_kernels_of_the_gpus_once(self):
        devices = [types.SimpleNamespace(compute_capability="9.0")] * 2
        found = mock.sentinel.found
        with (
            mock.patch.object(cutedsl, "local_gpus", lambda: devices),
            mock.patch.object(cutedsl, "_installed", set()),
            mock.patch.object(registry, "entries", return_value=(found,)) as entries,
            mock.patch.object(library, "install") as install,
        ):
            jax_dsa.register()
            jax_dsa.register()
        entries.assert_called_once_with("sm_90a")
        install.assert_called_once()

    def test_what_is_missing_is_a_warning_where_there_is_a_gpu(self):
        devices = [types.SimpleNamespace(compute_capability="7.0")]
        with mock.patch.object(cutedsl, "local_gpus", lambda: devices):
            with mock.patch.object(logging, "warning") as warning:
                jax_dsa.register()
        self.assertIn("compute capability 7.0", str(warning.call_args))

    def test_no_bridge_is_no_matter_without_a_gpu(self):
        error = library.BridgeError("no bridge")
        with mock.patch.object(library, "register", side_effect=error):
            with mock.patch.object(logging, "warning") as warning:
                jax_dsa.register()
        warning.assert_not_called()


if __name__ == "__main__":
    absltest.main()
