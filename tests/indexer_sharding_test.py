"""The indexer in the four sharding modes, on 8 host devices: data x sequence x heads."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from collectives import collectives, psums
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dsa
from jax_dsa import indexer_blocks

AXES = ("data", "seq", "heads")
B, S, HI, DI, H, D, K = 2, 32, 4, 8, 8, 16, 6
INDEX = ("q_index", "k_index", "weights")
ROW, KEY = P("data", "seq"), P("data")
SPECS = {
    "q_index": ROW, "k_index": KEY, "weights": ROW, "q": P("data", "seq", "heads"), "kv": KEY,
    "lse": P("data", "seq", "heads"), "attn_sink": P("heads"), "indices": ROW, "topk_length": ROW,
    "query_positions": ROW,
}  # fmt: skip
SHARD_MAPS = [
    {"testcase_name": f"_{kind}_check_vma_{check}", "sparse": kind == "sparse", "check_vma": check}
    for kind in ("sparse", "dense") for check in (True, False)
]  # fmt: skip
MESHES = (AxisType.Auto, AxisType.Explicit)


def arguments(sparse: bool, dtype="float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(dtype))  # noqa: E731
    made = {
        "q_index": normal(B, S, HI, DI), "k_index": normal(B, S, DI), "weights": normal(B, S, HI),
        "q": normal(B, S, H, D), "kv": normal(B, S, D), "attn_sink": normal(H),
    }  # fmt: skip
    if sparse:
        made["indices"] = rng.integers(-2, S + 2, (B, S, K)).astype(np.int32)
        made["topk_length"] = np.broadcast_to(np.arange(S, dtype=np.int32) % (K + 1), (B, S))
        # Every device has as many queries with keys: the mean of means is the mean.
        made["topk_length"] = np.maximum(made["topk_length"], 1)
        made["indices"][..., 0] = 3
    else:
        made["query_positions"] = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    return made


def step(given: dict[str, Any], **options):
    """Loss and gradients for the indexer's operands."""
    rest = {n: x for n, x in given.items() if n not in INDEX}
    loss = lambda *index: jax_dsa.indexer_loss(*index, **rest, **options)  # noqa: E731
    return jax.value_and_grad(loss, (0, 1, 2))(*(given[n] for n in INDEX))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(kind,) * 3)


def place(given: dict[str, Any], mesh, **specs) -> dict[str, jax.Array]:
    specs = SPECS | specs
    return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in given.items()}


@functools.cache
def one_device(sparse: bool):
    return jax.jit(step)(arguments(sparse))


class IndexerShardingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Several blocks, so that their splits are tested; no other test has these shapes.
        budgets: Any = {"SCORES_BYTES": 2048, "SLOTS_BYTES": 16384, "PRODUCT_BYTES": 2048}
        self.enterContext(mock.patch.multiple(indexer_blocks, **budgets))
        self.assertGreater(indexer_blocks.block_count(S, 4 * B * S * S / 2048), 1)

    def assert_same(self, found, want, tolerance=1e-5):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            self.assertLessEqual(np.linalg.norm(x - y), tolerance * np.linalg.norm(y))

    def run_compiled(self, fn, *args):
        compiled = jax.jit(fn).lower(*args).compile()
        return compiled(*args), collectives(compiled)

    @parameterized.product(kind=MESHES, sparse=(True, False))
    def test_loss(self, kind, sparse):
        given = place(arguments(sparse), mesh_of(kind))
        (loss, gradients), found = self.run_compiled(step, given)
        self.assert_same((loss, gradients), one_device(sparse))
        self.assertEqual({name for name, _ in found}, {"all-reduce"}, found)
        for name, gradient in zip(INDEX, gradients, strict=True):
            self.assertTrue(
                gradient.sharding.is_equivalent_to(given[name].sharding, gradient.ndim), name
            )

    @parameterized.parameters(*MESHES)
    def test_keys_split_along_t(self, kind):
        """They are gathered, and nothing that has a row per query is."""
        split = P("data", "seq")
        given = place(arguments(True), mesh_of(kind), k_index=split, kv=split)
        result, found = self.run_compiled(step, given)
        self.assert_same(result, one_device(True))
        if kind == AxisType.Explicit:
            gathers = {size for name, size in found if name == "all-gather"}
            self.assertEqual(gathers, {B // 2 * S * DI, B // 2 * S * D})
            self.assertEqual(result[1][1].sharding.spec[:2], ("data", "seq"))

    @parameterized.parameters(*MESHES)
    def test_select_topk(self, kind):
        given = {n: arguments(True)[n] for n in INDEX}
        select = functools.partial(jax_dsa.select_topk, k=K)
        want = jax.jit(select)(**given)
        placed = place(given, mesh_of(kind))
        result, found = self.run_compiled(lambda x: select(**x), placed)
        self.assertFalse(found, "no communication at all")
        for x, y in zip(result, want, strict=True):
            np.testing.assert_array_equal(x, y)
            self.assertTrue(x.sharding.is_equivalent_to(placed["weights"].sharding, x.ndim))

    @parameterized.parameters(*MESHES)
    def test_select_topk_of_keys_split_along_t(self, kind):
        given = {n: arguments(True)[n] for n in INDEX}
        given |= {"key_positions": np.arange(S, dtype=np.int32)}
        select = functools.partial(jax_dsa.select_topk, k=K)
        placed = place(given, mesh_of(kind), k_index=P("data", "heads"), key_positions=P("heads"))
        result, _ = self.run_compiled(lambda x: select(**x), placed)
        for x, y in zip(result, jax.jit(select)(**given), strict=True):
            np.testing.assert_array_equal(x, y)

    @parameterized.parameters(*MESHES)
    def test_index_scores(self, kind):
        given = {n: arguments(True)[n] for n in INDEX}
        placed = place(given, mesh_of(kind), k_index=P("data", "heads"))
        result = jax.jit(lambda x: jax_dsa.index_scores(**x))(placed)
        self.assert_same(result, jax_dsa.index_scores(**given))

    def test_split_width_is_an_error_on_an_explicit_mesh(self):
        given = place(arguments(True), mesh_of(AxisType.Explicit), k_index=P("data", None, "heads"))
        with self.assertRaisesRegex(ValueError, "k_index: .*last dimension"):
            jax.eval_shape(step, given)

    @parameterized.named_parameters(*SHARD_MAPS)
    def test_shard_map(self, sparse, check_vma):
        given = arguments(sparse)

        def local(given):
            loss = jax_dsa.indexer_loss(**given, head_axis_name="heads")
            return lax.pmean(loss, ("data", "seq"))

        mesh = mesh_of(AxisType.Auto)
        specs = {n: SPECS[n] for n in given}
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma
        )

        def loss(index, given):
            return mapped(given | index)

        given = place(given, mesh)
        index = {n: given[n] for n in INDEX}
        (value, found), counted = self.run_compiled(jax.value_and_grad(loss), index, given)
        self.assert_same((value, tuple(found[n] for n in INDEX)), one_device(sparse))
        self.assertEqual({name for name, _ in counted}, {"all-reduce"}, counted)

    @parameterized.parameters(True, False)
    def test_gradient_inside_shard_map(self, check_vma):
        """With check_vma JAX adds parts of k_index's gradient over seq, else the caller does."""

        def local(given):
            loss, (dq, dk, dw) = step(given, head_axis_name="heads")
            if not check_vma:
                dk = lax.psum(dk, "seq")
            return lax.pmean(loss, ("data", "seq")), (dq / 4, dk / 4, dw / 4)

        mesh, given = mesh_of(AxisType.Auto), arguments(True)
        specs = {n: SPECS[n] for n in given}
        out = P(), (ROW, KEY, ROW)
        options = {"in_specs": (specs,), "out_specs": out, "check_vma": check_vma}
        mapped = jax.shard_map(local, mesh=mesh, **options)
        self.assert_same(jax.jit(mapped)(place(given, mesh)), one_device(True))

    def test_select_topk_in_shard_map(self):
        given = arguments(False)
        given = {n: given[n] for n in (*INDEX, "query_positions")}
        want = jax.jit(functools.partial(jax_dsa.select_topk, k=K))(**given)
        mesh = mesh_of(AxisType.Auto)
        specs = {n: SPECS[n] for n in given}
        for check_vma in (True, False):
            mapped = jax.shard_map(
                lambda x: jax_dsa.select_topk(**x, k=K),
                mesh=mesh, in_specs=(specs,), out_specs=ROW, check_vma=check_vma,
            )  # fmt: skip
            for x, y in zip(jax.jit(mapped)(place(given, mesh)), want, strict=True):
                np.testing.assert_array_equal(x, y)

    @parameterized.parameters("explicit", "shard_map")
    def test_parts_of_gradients_are_added_in_float32(self, mode):
        """By the jaxpr: the CPU's compiler promotes a bfloat16 sum."""
        given = arguments(True, "bfloat16")
        mesh = mesh_of(AxisType.Explicit if mode == "explicit" else AxisType.Auto)
        run: Any = step
        if mode == "shard_map":
            specs = {n: SPECS[n] for n in given}
            inner = functools.partial(step, head_axis_name="heads")
            run = jax.shard_map(
                lambda x: inner(x)[1], mesh=mesh, in_specs=(specs,), out_specs=(ROW, KEY, ROW)
            )
        found = psums(jax.make_jaxpr(run)(place(given, mesh)).jaxpr)
        self.assertIn(("float32", (B // 2, S, DI)), found)
        self.assertEqual({dtype for dtype, _ in found}, {"float32"})


if __name__ == "__main__":
    absltest.main()
