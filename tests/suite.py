"""The attention suite: one base class; the subclass of an implementation declares what it lacks."""

import contextlib
import dataclasses
from typing import Any, ClassVar

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from absl.testing import parameterized
from cases import CORE, DTYPES, SHAPES, Case, Operands

import jax_dsa

RESULTS = ("out", "lse", "dq", "dkv", "dsink")


@dataclasses.dataclass(frozen=True)
class Results:
    """What an implementation gives for one set of inputs, as NumPy arrays."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dkv: np.ndarray
    dsink: np.ndarray | None


def precision_context(dtype: str) -> contextlib.AbstractContextManager:
    """float64 exists only under x64."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def by_name(*groups: tuple[Case, ...]) -> list[tuple[str, Case]]:
    return [(f"_{case}", case) for group in groups for case in group]


def by_dtype(group: tuple[Case, ...], dtypes=DTYPES) -> list[tuple[str, Case, str]]:
    return [(f"_{case}_{dtype}", case, dtype) for case in group for dtype in dtypes]


class Suite(parameterized.TestCase):
    """What every suite knows of the implementation under test.

    Attributes:
        implementation: its name.
        options: passed with every call.
        dtypes: what it takes.
        head_dims: the widths that it takes, with a value_dim of 512; () where it takes any.
        ordered_sums: whether dkv and dsink are added in the same order in every program.
    """

    implementation: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    head_dims: ClassVar[tuple[int, ...]] = ()
    ordered_sums: ClassVar[bool] = True

    @property
    def dtype(self) -> str:
        """float32 where the implementation takes it, else the first that it does."""
        return "float32" if "float32" in self.dtypes else self.dtypes[0]

    def fit(self, case: Case) -> Case:
        """The case at a width that the implementation takes, its logits as wide as before."""
        if not self.head_dims:
            return case
        width = case.head_dim
        if width not in self.head_dims:
            width = self.head_dims[len(case.name) % len(self.head_dims)]
        scale = case.scale and case.scale * (case.head_dim / width) ** 0.5
        return dataclasses.replace(case, head_dim=width, value_dim=None, scale=scale)

    def inputs(self, case: Case, dtype: str | None = None, **options) -> cases.Inputs:
        return cases.make_inputs(self.fit(case), dtype or self.dtype, **options)

    def attend(self, *operands, **options):
        """``sparse_attention`` of five positional operands by the implementation under test."""
        q, kv, indices, topk_length, attn_sink = operands
        return jax_dsa.sparse_attention(
            q,
            kv,
            indices,
            topk_length=topk_length,
            attn_sink=attn_sink,
            implementation=self.implementation,
            **{**self.options, **options},
        )

    def program(self, options: dict[str, Any]):
        """``(operands, dout, dlse) -> out, lse, (dq, dkv, dsink)``, to be jitted."""

        def run(operands, dout, dlse):
            def attend(q, kv, sink):
                fixed = (operands.indices, operands.topk_length)
                return self.attend(q, kv, *fixed, sink, return_lse=True, **options)

            results, vjp = jax.vjp(attend, operands.q, operands.kv, operands.attn_sink)
            return *results, vjp((dout, dlse))

        return run

    def evaluate(self, inputs: cases.Inputs, program=None) -> Results:
        program = program or jax.jit(self.program(inputs.options))
        out, lse, grads = jax.device_get(program(inputs.operands, inputs.dout, inputs.dlse))
        return Results(out, lse, *grads)

    def check(self, got: Results, inputs: cases.Inputs, dtype: str, logit_std: float = 1.0):
        """Against the oracle, within the contract's accuracy, in the contract's dtypes."""
        results = (got.out, got.lse, got.dq, got.dkv, got.dsink)
        cases.check_results(results, inputs, dtype, logit_std)

    def run_and_check(self, inputs: cases.Inputs, logit_std: float = 1.0) -> Results:
        got = self.evaluate(inputs)
        self.check(got, inputs, str(inputs.operands.q.dtype), logit_std)
        return got

    def check_equal(self, name: str, first: np.ndarray, second: np.ndarray) -> None:
        """Two runs agree bit for bit; sums over queries up to their order where that may change."""
        if name in ("dkv", "dsink") and not self.ordered_sums:
            rounding = 1e-5 if name == "dsink" else 2**-7
            first, second = (np.asarray(x).astype(np.float64) for x in (first, second))
            np.testing.assert_allclose(first, second, rtol=rounding, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(first, second, name)

    def skip_dtype(self, dtype: str) -> None:
        if dtype not in self.dtypes:
            self.skipTest(f"{self.implementation} does not take {dtype}")


class AttentionSuite(Suite):
    """Everything the contract says of one implementation's values and gradients."""

    # ---------- accuracy

    @parameterized.named_parameters(*by_dtype(CORE))
    def test_matches_float64_definition(self, case: Case, dtype: str):
        self.skip_dtype(dtype)
        with precision_context(dtype):
            self.run_and_check(self.inputs(case, dtype), case.logit_std)

    @parameterized.named_parameters(*by_name(SHAPES))
    def test_shapes_and_options(self, case: Case):
        """In float32, or the widest that the implementation takes."""
        if self.dtype != "float32" and case.queries * case.heads == 1:
            return self.check_pooled(case)
        self.run_and_check(self.inputs(case), self.fit(case).logit_std)

    def check_pooled(self, case: Case, seeds: int = 16) -> None:
        """As `check`, of several problems together.

        With one row and one key, dq is one number times a vector, dP - Delta, and out's rounding
        to 16 bits is in Delta: relative L2 means something over many such numbers only.
        """
        made = [self.inputs(case, seed=seed) for seed in range(seeds)]
        got = [self.evaluate(inputs) for inputs in made]
        limits = cases.bounds(self.dtype, self.fit(case).logit_std)
        values = [oracle.forward(i.operands, **i.options) for i in made]
        grads = [oracle.backward(i.operands, i.dout, i.dlse, **i.options) for i in made]
        for name in RESULTS:
            wanted = [getattr(w, name) for w in (values if name in ("out", "lse") else grads)]
            limit = {"out": limits.out, "lse": limits.lse}.get(name, limits.gradient)
            cases.check_close(
                name, np.stack([getattr(g, name) for g in got]), np.stack(wanted), limit
            )

    @parameterized.product(dtype=("bfloat16", "float32"), scale=(4.0, 32.0))
    def test_accuracy_with_very_wide_logits(self, dtype: str, scale: float):
        """Logits of standard deviation 32 and 256: one key takes nearly all the weight."""
        self.skip_dtype(dtype)
        case = Case("very_wide", queries=8, keys=24, heads=4, head_dim=64, topk=16, scale=scale)
        self.run_and_check(self.inputs(case, dtype), case.logit_std)

    @parameterized.parameters(1e-3, 16384.0)
    def test_float16_gradients_of_small_and_of_loss_scaled_cotangents(self, peak: float):
        """At the upper end dS exceeds float16's range although dq and dkv fit it."""
        self.skip_dtype("float16")
        case = Case("fp16", queries=4, keys=8, heads=2, head_dim=64, topk=4, lse_loss=False)
        inputs = self.inputs(case, "float16")
        dout = inputs.dout.astype(np.float64)
        dout = np.clip(dout, -3, 3) / (3 if peak > 1 else np.abs(dout).max()) * peak
        inputs = dataclasses.replace(inputs, dout=cases.as_dtype(dout, "float16"))
        self.check(self.evaluate(inputs), inputs, "float16")

    @parameterized.parameters("bfloat16", "float64")
    def test_float64_sink_keeps_its_dtype_in_the_gradient(self, dtype: str):
        self.skip_dtype(dtype)
        with jax.enable_x64(True):
            case = Case("sink64", sink=cases.SINKS, sink_dtype="float64")
            self.run_and_check(self.inputs(case, dtype))

    @parameterized.parameters(-1e30, 1e30)
    def test_logits_of_any_finite_size(self, size: float):
        """Every valid logit is the same huge number, of either sign; slots beyond are invalid."""
        case = Case("huge", heads=2, head_dim=4, lengths=(3,), sink=(0.0, -np.inf), scale=1.0)
        inputs = self.inputs(case)
        size = float(cases.as_dtype(size, self.dtype))
        q, kv = np.zeros_like(inputs.operands.q), inputs.operands.kv.copy()
        q[..., 0], kv[..., 0] = size, 1
        inputs = dataclasses.replace(inputs, operands=inputs.operands._replace(q=q, kv=kv))
        got = self.evaluate(inputs)
        for name in ("out", "lse", "dq", "dkv", "dsink"):
            self.assertTrue(np.isfinite(getattr(got, name)).all(), name)
        want = oracle.forward(inputs.operands, **inputs.options)
        cases.check_close("out", got.out, want.out, cases.BOUNDS[self.dtype].out)
        cases.check_close("lse", got.lse, want.lse, 2e-6)

    # ---------- exact and bitwise

    @parameterized.product(dtype=("bfloat16", "float16", "float32"), topk=(2, 16, 64, 128))
    def test_exact_inputs_give_exact_results(self, dtype: str, topk: int):
        self.skip_dtype(dtype)
        inputs = cases.exact_inputs(topk, dtype, seed=topk)
        got, wanted = self.evaluate(inputs), cases.exact_results(inputs, dtype)
        self.assertGreater(np.count_nonzero(wanted["dkv"]), 100)
        for name, want in wanted.items():
            np.testing.assert_array_equal(getattr(got, name), want, err_msg=name)

    def test_order_of_slots_does_not_matter_on_exact_inputs(self):
        inputs = cases.exact_inputs(32, self.dtypes[0])
        program = jax.jit(self.program(inputs.options))
        indices = np.random.default_rng(7).permuted(inputs.operands.indices, axis=-1)
        other = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        first, second = self.evaluate(inputs, program), self.evaluate(other, program)
        for name in ("out", "dq", "dkv"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))

    # ---------- zero sizes

    @parameterized.product(
        zero=("queries", "keys", "heads", "topk", "batch"), how=("eager", "jit", "vmap")
    )
    def test_zero_sizes(self, zero: str, how: str):
        sizes = {"batch": 2, "queries": 3, "keys": 4, "heads": 2, "topk": 5, zero: 0}
        b, s, t, h, k = (sizes[n] for n in ("batch", "queries", "keys", "heads", "topk"))
        dtype = jnp.dtype(self.dtypes[0])
        width, value_dim = (self.head_dims[0], 512) if self.head_dims else (8, 5)
        operands = Operands(
            np.ones((b, s, h, width), dtype),
            np.ones((b, t, width), dtype),
            np.zeros((b, s, k), np.int32),
            np.ones((b, s), np.int32),
            np.ones((h,), np.float32),
        )
        dout, dlse = np.ones((b, s, h, value_dim), dtype), np.ones((b, s, h), np.float32)
        program = self.program({"value_dim": value_dim})
        if how == "jit":
            program = jax.jit(program)
        if how == "vmap":
            axes = Operands(0, 0, 0, 0, None)
            program = jax.vmap(program, in_axes=(axes, 0, 0), axis_size=b)
        out, lse, (dq, dkv, dsink) = program(operands, dout, dlse)
        dsink = dsink.sum(0) if how == "vmap" else dsink
        for got, want in ((dq, operands.q), (dkv, operands.kv), (dsink, operands.attn_sink)):
            np.testing.assert_array_equal(got, np.zeros_like(want), strict=True)
        np.testing.assert_array_equal(out, np.zeros_like(dout), strict=True)
        np.testing.assert_array_equal(lse, np.full_like(dlse, -np.inf), strict=True)

    # ---------- non-finite data

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_unnamed_rows_of_kv_reach_nothing(self, poison: float):
        """Rows that no valid slot names: not named at all, or only beyond topk_length."""
        case = Case("unnamed", keys=12, lengths=(4, 2, 0, 8, 3), sink=cases.SINKS)
        dtype = self.dtypes[0]
        inputs = self.inputs(case, dtype)
        operands = inputs.operands
        named = np.unique(operands.indices[oracle.valid_slots(operands)])
        hidden = [j for j in range(12) if j not in named[:-2]]
        indices = np.where(np.isin(operands.indices, hidden), named[0], operands.indices)
        beyond = np.arange(8) >= np.clip(operands.topk_length, 0, 8)[:, None]
        indices = np.where(beyond, hidden[0], indices).astype(np.int32)
        clean = dataclasses.replace(inputs, operands=operands._replace(indices=indices))
        kv = operands.kv.copy()
        kv[hidden] = poison
        dirty = dataclasses.replace(clean, operands=clean.operands._replace(kv=kv))
        program = jax.jit(self.program(inputs.options))
        first, second = self.evaluate(clean, program), self.evaluate(dirty, program)
        self.assertTrue(np.isfinite(first.dkv.astype(np.float32)).all())
        for name in ("out", "lse", "dq", "dkv", "dsink"):
            self.check_equal(name, getattr(first, name), getattr(second, name))

    @parameterized.product(where=("q", "dout", "kv"), poison=(np.nan, np.inf))
    def test_non_finite_query_reaches_only_its_rows(self, where: str, poison: float):
        """Query 2 alone names rows 6 to 8; the others share rows 0 to 5."""
        case = Case("isolation", sink=cases.SINKS)
        inputs = self.inputs(case, self.dtypes[0])
        rng = np.random.default_rng(1)
        indices = rng.integers(0, 6, (5, 8)).astype(np.int32)
        indices[2] = rng.integers(6, 9, 8)
        clean = dataclasses.replace(inputs, operands=inputs.operands._replace(indices=indices))
        q, kv, dout = (x.copy() for x in (inputs.operands.q, inputs.operands.kv, inputs.dout))
        {"q": q[2], "kv": kv[7], "dout": dout[2]}[where][..., 3] = poison
        kv = np.where(np.isin(np.arange(9), indices)[:, None], kv, 0)
        operands = clean.operands._replace(q=q, kv=kv)
        dirty = dataclasses.replace(clean, operands=operands, dout=dout)
        program = jax.jit(self.program(inputs.options))
        first, second = self.evaluate(clean, program), self.evaluate(dirty, program)
        for name, rows in (("out", 5), ("lse", 5), ("dq", 5), ("dkv", 6)):
            keep = [r for r in range(rows) if r != 2 or name == "dkv"]
            self.check_equal(name, getattr(first, name)[keep], getattr(second, name)[keep])
        self.assertFalse(np.isfinite(second.dq[2].astype(np.float32)).all())

    def test_infinite_sink_lets_no_gradient_through_out(self):
        case = Case("infinite_sink", sink=(np.inf, np.inf, 1e38), lse_loss=False)
        inputs = self.inputs(case, self.dtypes[0])
        got = self.evaluate(inputs)
        for name in ("out", "dq", "dkv", "dsink"):
            np.testing.assert_array_equal(getattr(got, name), 0 * getattr(got, name), name)
