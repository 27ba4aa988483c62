"""The SM90 forward kernel, executed by the emulator, against the float64 definition.

Unless a test says otherwise, everything that the emulator watches must be silent, lints too.
"""

import dataclasses
import tempfile
import unittest

import emulated
import ml_dtypes
import numpy as np
import oracle
from absl.testing import absltest, parameterized

from jax_dsa.emulator import SCHEDULES, Launch, Pointer, Settings, run

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BOUNDS = {"bfloat16": 4e-3, "float16": 1e-3}
INPUTS, OUTPUTS = ("q", "kv", "indices", "topk_length", "sink"), ("out", "lse")
GROUPS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of two groups of S queries; its inputs come from ``inputs``."""

    head_dim: int = 576
    dtype: str = "bfloat16"
    H: int = 3
    K: int = 64
    S: int = 1
    T: int = 96

    def __str__(self):
        return f"{self.dtype}_D{self.head_dim}_H{self.H}_K{self.K}_S{self.S}"

    def inputs(self) -> dict[str, np.ndarray]:
        """Normal q, kv and sink; rows 40..48 of kv are NaN and named by no valid slot: those slots
        and a tenth of the others hold numbers that are no rows.
        """
        rng, kind = np.random.default_rng(self.K), DTYPES[self.dtype]
        q = rng.standard_normal((GROUPS, self.S, self.H, self.head_dim)).astype(kind)
        kv = rng.standard_normal((GROUPS, self.T, self.head_dim)).astype(kind)
        kv[:, 40:49] = np.nan
        indices = rng.integers(0, self.T, (GROUPS, self.S, self.K))
        none = np.array([-1, self.T, -(2**31), 2**31 - 1])
        replaced = ((indices >= 40) & (indices < 49)) | (rng.random(indices.shape) < 0.1)
        indices = np.where(replaced, rng.choice(none, indices.shape), indices).astype(np.int32)
        lengths = np.full((GROUPS, self.S), self.K, np.int32)
        sink = rng.standard_normal((1, self.H)).astype(np.float32)
        return dict(zip(INPUTS, (q, kv, indices, lengths, sink), strict=True))


def plain(H: int = 2, K: int = 8, **changes) -> dict[str, np.ndarray]:
    """Inputs of a small problem whose slots are all valid, with changed arrays."""
    x = Case(H=H, K=K).inputs()
    x["indices"] = np.random.default_rng(1).integers(0, 40, x["indices"].shape, dtype=np.int32)
    return x | changes


def dtype_of(x) -> str:
    return next(name for name, kind in DTYPES.items() if kind == x["q"].dtype)


def subject_of(x) -> emulated.Compiled:
    return emulated.compiled("sm90.forward", "Forward", x["q"].shape[-1], dtype_of(x))


def scale_of(x) -> float:
    return x["q"].shape[-1] ** -0.5


def execute(x, settings: Settings, scale: float, **more):
    """({"out", "lse"}, report) of a launch as the kernel's docstring states it."""
    subject, (groups, queries, heads, _) = subject_of(x), x["q"].shape
    stride = 0 if len(x["sink"]) == 1 else heads
    values = [Pointer(name) for name in INPUTS + OUTPUTS]
    values += [queries, x["kv"].shape[1], x["indices"].shape[-1], heads, stride, scale]
    entry, grid = subject.entry, (groups * queries, -(-heads // 64), 1)
    shared = entry.dynamic_shared_bytes
    launch = Launch(entry.symbol, grid, entry.block, values, shared, entry=entry)
    out = np.zeros((groups, queries, heads, 512), x["q"].dtype)
    lse = np.zeros(out.shape[:-1], np.float32)
    settings = dataclasses.replace(settings, outputs=frozenset(OUTPUTS))
    return run(subject.program, launch, x | {"out": out, "lse": lse}, settings, **more)


def definition(x, scale: float) -> oracle.Values:
    """Float64 out and lse, group by group: each may have its own row of sinks."""
    sinks = np.broadcast_to(x["sink"], (len(x["q"]), x["sink"].shape[-1]))
    each = [
        oracle.forward((*(x[name][g] for name in INPUTS[:4]), sinks[g]), scale=scale)
        for g in range(len(x["q"]))
    ]
    return oracle.Values(np.stack([v.out for v in each]), np.stack([v.lse for v in each]))


def deviations(results, want: oracle.Values, bound: float) -> str:
    """What is wrong with the results, or ""."""
    out, lse = (results[name].astype(np.float64) for name in OUTPUTS)
    empty = np.isneginf(want.lse)
    if not np.array_equal(np.isneginf(lse), empty) or not np.isfinite(lse[~empty]).all():
        return f"lse is not finite in the right places: {lse[~np.isfinite(lse)]}"
    if not np.isfinite(out).all():
        return f"{np.sum(~np.isfinite(out))} values of out are not finite"
    error = np.linalg.norm(out - want.out) / max(np.linalg.norm(want.out), 1e-300)
    mine, theirs = lse[~empty], want.lse[~empty]
    far = np.max(np.abs(mine - theirs) / np.maximum(1, np.abs(theirs)), initial=0)
    return "" if error <= bound and far <= 2e-5 else f"out is off by {error:.1e}, lse by {far:.1e}"


@unittest.skipUnless(emulated.ENABLED, emulated.WHY)
class ForwardTest(parameterized.TestCase):
    def assert_right(self, x, schedule: str = "round_robin", scale: float | None = None):
        scale = scale_of(x) if scale is None else scale
        settings = Settings(SCHEDULES[schedule], ("races", "registers"))
        results, report = execute(x, settings, scale)
        self.assertEqual(str(report), "clean")
        bound = BOUNDS[dtype_of(x)]
        self.assertEqual(deviations(results, definition(x, scale), bound), "")
        return results

    @parameterized.product(
        case=(
            Case(576, "bfloat16", H=64, K=320),
            Case(512, "float16", H=96, K=200),
            Case(576, "float16", H=16, K=65, S=2),
            Case(512, "bfloat16", H=1, K=1, S=2),
            Case(576, "bfloat16", H=128, K=63),
            Case(512, "float16", H=64, K=64),
        ),
        schedule=tuple(SCHEDULES),
    )
    def test_values_and_order(self, case, schedule):
        self.assert_right(case.inputs(), schedule)

    @parameterized.parameters(*SCHEDULES)
    def test_rows_without_slots_end_and_are_empty(self, schedule):
        x = Case(K=130, S=4).inputs()
        x["topk_length"] = np.array([[0, 130, -5, -(2**31)], [1, 64, 2**31 - 1, 65]], np.int32)
        x["indices"][1, 3] = -1
        results = self.assert_right(x, schedule)
        for at in ((0, 0), (0, 2), (0, 3), (1, 3)):
            self.assertTrue((results["out"][at] == 0).all())
            self.assertTrue(np.isneginf(results["lse"][at]).all())

    @parameterized.parameters("bfloat16", "float16")
    def test_tiles_without_valid_slots_before_and_between(self, dtype):
        x = Case(dtype=dtype, K=320).inputs()
        x["indices"][..., :128] = x["indices"][..., 192:256] = -1
        self.assert_right(x)

    def test_all_schedules_give_the_same_bits(self):
        x = Case(H=64, K=200).inputs()
        first, *others = (
            execute(x, Settings(SCHEDULES[name], "none"), scale_of(x))[0] for name in SCHEDULES
        )
        for other in others:
            for name in OUTPUTS:
                self.assertEqual(first[name].tobytes(), other[name].tobytes())

    def test_sinks_of_every_size_and_per_group(self):
        row = np.array([-np.inf, np.inf, -3e38, 3e38, -40, 40, 0, 1], np.float32)
        results = self.assert_right(plain(H=8, sink=np.stack([row, row[::-1]])))
        for at in ((0, 0, 1), (0, 0, 3), (1, 0, 6), (1, 0, 4)):
            self.assertTrue((results["out"][at] == 0).all())

    def test_infinite_sinks_of_an_empty_row(self):
        sink = np.array([[np.inf, -np.inf]], np.float32)
        self.assert_right(plain(sink=sink, topk_length=np.zeros((GROUPS, 1), np.int32)))

    @parameterized.product(
        dtype=("bfloat16", "float16"), factor=(1.0, -1.0), scale=(0.04, 30.0, 1e30)
    )
    def test_large_logits_of_either_sign(self, dtype, factor, scale):
        """Logits are 8 factor scale (1..8) up to 2e32; every slot valid."""
        x, kind = plain(K=70), DTYPES[dtype]
        x["q"] = np.full(x["q"].shape, factor, kind)
        x["kv"] = np.zeros(x["kv"].shape, kind)
        x["kv"][..., :8] = np.arange(1, 97)[:, None] % 8 + 1
        x["sink"][:] = -np.inf
        self.assert_right(x, scale=scale)

    def test_scales_at_the_ends_of_float32(self):
        x = plain(q=np.zeros_like(plain()["q"]))
        x["kv"] = np.abs(x["kv"])
        for scale in (1e-40, 1e-30, 3e38):
            self.assert_right(x, scale=scale)

    def test_values_near_the_largest_bfloat16_do_not_overflow_the_sum(self):
        x = plain(K=320, kv=np.full((GROUPS, 96, 576), 3e38, ml_dtypes.bfloat16))
        x["q"] = np.zeros_like(x["q"])
        x["sink"][:] = -np.inf
        self.assert_right(x)

    def test_two_zero_logits_have_lse_ln_2(self):
        x = plain(K=2)
        x["q"] = np.zeros_like(x["q"])
        results = self.assert_right(x)
        np.testing.assert_allclose(results["lse"], np.log(2), rtol=1e-6)

    def test_duplicates_count(self):
        x = plain(K=66)
        x["indices"][:] = 7
        x["indices"][..., 0] = 8
        self.assert_right(x)

    def test_slot_position_is_not_compared_with_the_number_of_rows(self):
        x = plain(K=128, kv=Case(T=4).inputs()["kv"])
        x["indices"][:] = -1
        x["indices"][..., 100:104] = [0, 1, 2, 3]
        self.assert_right(x)

    def test_a_query_s_nan_stays_there(self):
        x = Case(S=2, K=66).inputs()
        clean, _ = execute(x, Settings(observers="none"), scale_of(x))
        x["q"][0, 0, 1] = np.nan
        x["kv"][1, 5] = np.nan
        x["indices"][1, 0, 3] = 5
        x["indices"][1, 1][x["indices"][1, 1] == 5] = -1
        with np.errstate(invalid="ignore"):
            want = definition(x, scale_of(x))
        got, _ = execute(x, Settings(observers="none"), scale_of(x))
        for name, theirs in (("out", want.out), ("lse", want.lse)):
            np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(theirs))
        np.testing.assert_array_equal(got["out"][0, 0, 0], clean["out"][0, 0, 0])

    def test_small_integers_on_disjoint_columns_are_exact(self):
        """Every logit is 0, P = 1 / K: out is the mean of small integers."""
        x, rng = Case(H=64, K=128).inputs(), np.random.default_rng(2)
        x["q"][..., :512], x["kv"] = 0, np.zeros_like(x["kv"])
        x["kv"][..., :512] = rng.integers(-4, 5, (GROUPS, 96, 512))
        x["indices"] = rng.integers(0, 96, x["indices"].shape, dtype=np.int32)
        x["sink"][:] = -np.inf
        results = self.assert_right(x)
        mean = np.take_along_axis(x["kv"].astype(int), x["indices"].transpose(0, 2, 1), 1)
        mean = mean[..., :512].sum(1, keepdims=True)[:, None] / 128
        np.testing.assert_array_equal(
            results["out"], np.broadcast_to(mean, results["out"].shape).astype(ml_dtypes.bfloat16)
        )


@unittest.skipUnless(emulated.ENABLED, emulated.WHY)
class OrderTest(absltest.TestCase):
    def test_every_ordering_element_is_needed(self):
        """Each barrier, fence, wait and commit taken out, weakened and moved in turn."""
        x = {name: array[:1] for name, array in Case(H=64, K=320).inputs().items()}
        subject, want = subject_of(x), definition(x, scale_of(x))

        def attempt(codes, limit, observers):
            settings = Settings(observers=("races",), step_limit=limit)
            results, report = execute(x, settings, scale_of(x), observers=observers, codes=codes)
            return report, deviations(results, want, BOUNDS["bfloat16"])

        changes = ("delete", "weaken", "move")
        outcomes = emulated.assert_all_needed(self, subject, attempt, changes)
        self.assertGreater(len(outcomes), 30)
        deleted = [o for o in outcomes if o.mutant.change == "delete"]
        self.assertEqual([str(o.mutant) for o in deleted if o.caught == "silent"], [])


@unittest.skipUnless(emulated.ENABLED, emulated.WHY)
class BuildTest(parameterized.TestCase):
    @parameterized.product(head_dim=(512, 576), dtype=tuple(DTYPES))
    def test_resources(self, head_dim, dtype):
        subject = emulated.compiled("sm90.forward", "Forward", head_dim, dtype)
        self.assertNotIn(".local", subject.text)
        self.assertLessEqual(subject.entry.dynamic_shared_bytes, 232_448)
        self.assertEqual([r.name for r in subject.entry.regions], ["q", "kv", "valid", "barriers"])

    @parameterized.parameters(("128", "bfloat16", "head_dim is 128"), ("512", "float32", "float32"))
    def test_other_facts_are_refused(self, head_dim, dtype, said):
        with tempfile.TemporaryDirectory() as folder:
            done = emulated.call_compiler("sm90.forward", "Forward", head_dim, dtype, folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(said, done.stderr)
        self.assertIn("must be one of", done.stderr)


if __name__ == "__main__":
    absltest.main()
