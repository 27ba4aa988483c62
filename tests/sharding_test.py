"""Values, gradients and collectives in the four sharding modes, on 8 host devices."""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from collectives import collectives, psums
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dsa

B, S, T, H, D, K, V = 4, 16, 24, 4, 20, 6, 12
AXES = ("data", "seq", "heads")
SPECS = {
    "q": P("data", "seq", "heads", None),
    "kv": P("data", None, None),
    "indices": P("data", "seq", None),
    "topk_length": P("data", "seq"),
    "attn_sink": P("heads"),
    "dout": P("data", "seq", "heads", None),
}
GRADIENTS = ("q", "kv", "attn_sink")


def operands(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "q": normal(B, S, H, D),
        "kv": normal(B, T, D),
        "indices": jnp.asarray(rng.integers(-2, T + 2, (B, S, K)), jnp.int32),
        "topk_length": jnp.asarray(rng.integers(-1, K + 2, (B, S)), jnp.int32),
        "attn_sink": jnp.asarray(rng.normal(size=H), jnp.float32),
        "dout": normal(B, S, H, V),
    }


def attend(q, kv, indices, topk_length, attn_sink, **options):
    return jax_dsa.sparse_attention(
        q,
        kv,
        indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
        value_dim=V,
        return_lse=True,
        **options,
    )


def loss(q, kv, indices, topk_length, attn_sink, dout, attention=attend):
    out, lse = attention(q, kv, indices, topk_length, attn_sink)
    finite = jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0)
    return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32)) + jnp.sum(finite)


def gradients(loss, order=tuple(SPECS)):
    return jax.value_and_grad(loss, tuple(order.index(name) for name in GRADIENTS))


def mesh(kind: AxisType, shape=(2, 2, 2), names=AXES):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def place(x: dict, on, specs=SPECS):
    return [jax.device_put(v, NamedSharding(on, specs[name])) for name, v in x.items()]


KV = B * T * D // 2  # elements of one data shard of kv
KV_SHAPE = (B // 2, T, D)
SMALL = 8  # a scalar loss, d attn_sink


def big(found: collections.Counter) -> dict:
    return {key: n for key, n in found.items() if key[1] > SMALL}


class ShardingTest(parameterized.TestCase):
    def assert_same(self, got, want, rtol=2e-5):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            self.assertLess(np.linalg.norm(a - b), rtol * np.linalg.norm(b))

    @functools.cached_property
    def want(self):
        return jax.jit(gradients(loss))(*operands().values())

    def compile_and_check(self, fn, args, want=None, **jit_options):
        compiled = jax.jit(fn, **jit_options).lower(*args).compile()
        self.assert_same(compiled(*args), self.want if want is None else want)
        return big(collectives(compiled))

    # ---------- kv whole on every device

    @parameterized.parameters("xla", "reference")
    def test_auto_mesh_gives_one_devices_values(self, implementation):
        attention = functools.partial(attend, implementation=implementation)
        args = place(operands(), mesh(AxisType.Auto))
        got = jax.jit(gradients(functools.partial(loss, attention=attention)))(*args)
        self.assert_same(got, self.want)

    def test_auto_mesh_adds_dkv_once_and_gathers_nothing(self):
        args = place(operands(), mesh(AxisType.Auto))
        results = (None, tuple(args[list(SPECS).index(name)].sharding for name in GRADIENTS))
        found = self.compile_and_check(gradients(loss), args, out_shardings=results)
        self.assertEqual(found, {("all-reduce", KV): 1})

    def test_explicit_mesh_adds_dkv_once_and_gathers_nothing(self):
        on = mesh(AxisType.Explicit)
        with jax.set_mesh(on):
            args = place(operands(), on)
            found = self.compile_and_check(gradients(loss), args)
            out, lse = jax.eval_shape(attend, *args[:5])
        self.assertEqual(found, {("all-reduce", KV): 1})
        self.assertEqual(out.sharding.spec, P("data", "seq", "heads", None))
        self.assertEqual(lse.sharding.spec, P("data", "seq", "heads"))

    def test_explicit_mesh_runs_eagerly(self):
        on = mesh(AxisType.Explicit)
        with jax.set_mesh(on):
            self.assert_same(gradients(loss)(*place(operands(), on)), self.want)

    @parameterized.parameters(True, False)
    def test_shard_map(self, check_vma):
        on = mesh(AxisType.Auto)
        found = self.compile_and_check(gradients(self.mapped(on, check_vma)), place(operands(), on))
        self.assertEqual(found, {("all-reduce", KV): 1})

    def mapped(self, on, check_vma, attention=attend, specs=SPECS):
        inputs = tuple(specs[name] for name in list(SPECS)[:5])
        outputs = (P("data", "seq", "heads", None), P("data", "seq", "heads"))
        mapped = jax.shard_map(
            attention, mesh=on, in_specs=inputs, out_specs=outputs, check_vma=check_vma
        )
        return functools.partial(loss, attention=mapped)

    # ---------- kv split along T

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_kv_split_along_t_is_gathered_and_its_gradient_scattered(self, kind):
        on = mesh(kind)
        specs = SPECS | {"kv": P("data", "seq", None)}
        with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
            args = place(operands(), on, specs)
            results = tuple(args[list(SPECS).index(name)].sharding for name in GRADIENTS)
            found = self.compile_and_check(gradients(loss), args, out_shardings=(None, results))
        self.assertEqual(found.pop(("reduce-scatter", KV // 2)), 1)
        self.assertEqual(found.pop(("all-gather", KV)), 1)
        # What the other axis (heads) adds, before or after the scatter.
        self.assertLessEqual(set(found), {("all-reduce", KV), ("all-reduce", KV // 2)})

    @parameterized.product(
        implementation=("xla", "reference"), kind=(AxisType.Auto, AxisType.Explicit)
    )
    def test_kv_split_along_t_by_an_axis_that_splits_nothing_else(self, implementation, kind):
        on = mesh(kind)
        specs = SPECS | {"kv": P("data", "heads", None)}
        specs |= {n: P(*("data", "seq", None, None)[: len(SPECS[n])]) for n in ("q", "dout")}
        specs |= {"attn_sink": P(None)}
        attention = functools.partial(attend, implementation=implementation)
        fn = gradients(functools.partial(loss, attention=attention))
        with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
            self.assert_same(jax.jit(fn)(*place(operands(), on, specs)), self.want)

    def test_explicit_mesh_gathers_kv_split_along_t_for_the_reference(self):
        on = mesh(AxisType.Explicit)
        attention = functools.partial(attend, implementation="reference")
        fn = gradients(functools.partial(loss, attention=attention))
        with jax.set_mesh(on):
            args = place(operands(), on, SPECS | {"kv": P("data", "seq", None)})
            found = self.compile_and_check(fn, args)
        self.assertEqual(found[("all-gather", KV)], 1)
        self.assertEqual(found[("reduce-scatter", KV // 2)], 1)

    def test_gather_kv_in_shard_map(self):
        on = mesh(AxisType.Auto)

        def attention(q, kv, *rest):
            return attend(q, jax_dsa.gather_kv(kv, "seq"), *rest)

        specs = SPECS | {"kv": P("data", "seq", None)}
        fn = gradients(self.mapped(on, True, attention, specs))
        found = self.compile_and_check(fn, place(operands(), on, specs))
        self.assertEqual(found[("all-gather", KV)], 1)
        self.assertEqual(found[("reduce-scatter", KV // 2)], 1)

    # ---------- dtype
    # The CPU compiler widens 16-bit sums, so the dtype is read before it runs.

    @parameterized.parameters(True, False)
    def test_shard_map_adds_dkv_in_float32_with_check_vma(self, check_vma):
        on = mesh(AxisType.Auto)
        fn = gradients(self.mapped(on, check_vma))
        sums = psums(jax.make_jaxpr(fn)(*place(operands(jnp.bfloat16), on)).jaxpr)
        self.assertIn(("float32" if check_vma else "bfloat16", KV_SHAPE), sums)
        self.assertNotIn(("bfloat16" if check_vma else "float32", KV_SHAPE), sums)

    @parameterized.parameters((False, "all_reduce"), (True, "reduce_scatter"))
    def test_explicit_mesh_adds_dkv_in_float32_and_gathers_kv_in_its_dtype(self, split, name):
        on = mesh(AxisType.Explicit)
        specs = SPECS | {"kv": P("data", "seq" if split else None, None)}
        with jax.set_mesh(on):
            args = place(operands(jnp.bfloat16), on, specs)
            text = jax.jit(gradients(loss)).lower(*args).as_text()
        sums = re.findall(rf"stablehlo\.{name}.*?-> tensor<([\dx]+)x(\w+)>", text, re.DOTALL)
        self.assertIn(("x".join(map(str, (B // 2, T // (1 + split), D))), "f32"), sums)
        self.assertEqual({dtype for _, dtype in sums}, {"f32"})
        gathers = re.findall(r"stablehlo\.all_gather.*?-> tensor<[\dx]+x(\w+)>", text, re.DOTALL)
        self.assertEqual(set(gathers), {"bf16"} if split else set())

    def test_auto_mesh_adds_dkv_in_float32(self):
        args = place(operands(jnp.bfloat16), mesh(AxisType.Auto))
        results = tuple(args[list(SPECS).index(name)].sharding for name in GRADIENTS)
        fn = jax.jit(gradients(loss), out_shardings=(None, results))
        compiled = fn.lower(*args).compile()
        self.assertEqual(big(collectives(compiled)), {("all-reduce", KV): 1})
        # A widened sum would be followed by nothing but its narrowing, and named so.
        self.assertNotIn("promoted", str(compiled.as_text()))

    # ---------- sinks and vmap

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_vmap_over_a_mapped_sink(self, kind):
        x = operands()
        x["attn_sink"] = jnp.stack([x["attn_sink"], 2 - x["attn_sink"], jnp.full(H, -jnp.inf)])
        axes = (None, None, None, None, 0, None)
        batched = jax.vmap(gradients(loss), in_axes=axes)
        want = jax.jit(batched)(*x.values())
        on = mesh(kind)
        with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
            args = place(x, on, SPECS | {"attn_sink": P(None, "heads")})
            self.assert_same(jax.jit(batched)(*args), want)

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_vmap_over_a_sharded_axis_gathers_nothing(self, kind):
        axes = (0, 0, 0, 0, None, 0)
        x = operands()

        def total(*args):
            return jax.vmap(loss, in_axes=axes)(*args).sum()

        want = jax.jit(gradients(total))(*x.values())
        on = mesh(kind)
        with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
            args = place(x, on)
            results = tuple(args[list(SPECS).index(name)].sharding for name in GRADIENTS)
            found = self.compile_and_check(
                gradients(total), args, want, out_shardings=(None, results)
            )
        self.assertEqual({key for key in found if key[0] != "all-reduce"}, set())

    # ---------- shard_map over some of the axes

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_shard_map_over_the_data_axis_alone(self, kind):
        on = mesh(kind)
        inputs = (P("data"), P("data"), P("data"), P("data"), P(None))
        with jax.set_mesh(on):
            mapped = jax.shard_map(
                attend, in_specs=inputs, out_specs=(P("data"), P("data")), axis_names={"data"}
            )
            args = place(operands(), on)
            got = jax.jit(gradients(functools.partial(loss, attention=mapped)))(*args)
        self.assert_same(got, self.want)

    # ---------- refusals, export

    @parameterized.parameters("q", "kv")
    def test_explicit_mesh_refuses_a_split_width(self, name):
        on = mesh(AxisType.Explicit)
        specs = SPECS | {name: P(*[None] * (len(SPECS[name]) - 1), "heads")}
        with (
            jax.set_mesh(on),
            self.assertRaisesRegex(ValueError, f"{name}: its last dimension is split"),
        ):
            jax.jit(attend)(*place(operands(), on, specs)[:5])

    def test_auto_mesh_takes_a_split_width(self):
        on = mesh(AxisType.Auto)
        specs = SPECS | {"q": P("data", "seq", None, "heads"), "kv": P("data", None, "heads")}
        self.assert_same(jax.jit(gradients(loss))(*place(operands(), on, specs)), self.want)

    def test_sizes_that_do_not_divide(self):
        x = {name: value[:, :5] if value.ndim > 1 else value for name, value in operands().items()}
        x["indices"] = jnp.minimum(x["indices"], 4)
        want = jax.jit(gradients(loss))(*x.values())
        on = mesh(AxisType.Auto)

        def spread(q, *rest):
            q = jax.lax.with_sharding_constraint(q, NamedSharding(on, SPECS["q"]))
            return gradients(loss)(q, *rest)

        args = [jax.device_put(v, NamedSharding(on, P())) for v in x.values()]
        self.assert_same(jax.jit(spread)(*args), want)

    @parameterized.parameters("explicit", "shard_map")
    def test_export_on_eight_devices(self, mode):
        on = mesh(AxisType.Explicit if mode == "explicit" else AxisType.Auto)
        fn = gradients(loss if mode == "explicit" else self.mapped(on, True))
        checks = jax_dsa.EXPORT_DISABLED_CHECKS
        with jax.set_mesh(on) if mode == "explicit" else contextlib.nullcontext():
            args = place(operands(), on)
            exported = export.export(jax.jit(fn), disabled_checks=checks)(*args)
            self.assertEqual(exported.nr_devices, 8)
            again = export.deserialize(exported.serialize())
            self.assert_same(jax.jit(again.call)(*args), self.want)

    def test_export_on_an_auto_mesh_names_the_ways_that_work(self):
        args = place(operands(), mesh(AxisType.Auto))
        with self.assertRaisesRegex(NotImplementedError, "Explicit mesh.*shard_map"):
            export.export(jax.jit(attend))(*args[:5])


if __name__ == "__main__":
    absltest.main()
