"""The SM90 backward kernel, executed by the emulator, against the float64 definition.

Everything that the emulator watches must be silent, lints too.
"""

import dataclasses
import unittest

import emulated
import ml_dtypes
import numpy as np
import oracle
from absl.testing import absltest, parameterized

from jax_dsa.cubins import manifest
from jax_dsa.emulator import SCHEDULES, Launch, Pointer, Settings, run

ELEMENTS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BOUND = {"bfloat16": 8e-3, "float16": 2e-3}  # relative L2 of dq and dkv
ARRAYS = ("q", "kv", "indices", "topk_length", "lse", "alpha", "beta", "dout", "dq", "dkv")
HEADS = 64
CONFIGS = [
    {"testcase_name": f"{d}_{t}", "head_dim": d, "dtype": t} for d in (512, 576) for t in ELEMENTS
]
OUT_OF_RANGE = (-1, -7, 2**31 - 1, -(2**31))


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
      lengths: topk_length of the queries, repeated; None: K.
      invalid: share of slots with an index outside [0, T).
      gain: standard deviation of dout and of the cotangent of lse; sink: of every head.
    """

    name: str
    heads: int = 5
    topk: int = 130
    queries: int = 1
    groups: int = 1
    keys: int = 96
    lengths: tuple[int, ...] | None = None
    invalid: float = 0.15
    gain: float = 1.0
    sink: float = 0.0


CASES = [
    Case("one_head", heads=1, topk=64),
    Case("a_quarter_of_a_block", heads=16, topk=64),
    Case("a_block_and_a_half", heads=96, topk=64),
    Case("one_slot", heads=16, topk=1, invalid=0),
    Case("one_slot_less_than_a_tile", topk=63),
    Case("one_slot_more_than_a_tile", topk=65),
    Case("several_tiles", topk=320),
    Case("groups_and_lengths", queries=3, groups=2, lengths=(0, 130, -5, 500, 64, 1)),
    Case("few_rows_named_often", keys=3, queries=2, lengths=(70, 65)),
    Case("no_valid_slot", topk=70, invalid=1.0),
    Case("sink_takes_most", sink=8.0),
    Case("small_loss", gain=1e-3),
    Case("scaled_loss", gain=1e4),
]


def compiled(head_dim: int, dtype: str) -> emulated.Compiled:
    return emulated.compiled("sm90.backward", "Backward", head_dim, dtype)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a launch, its scale, and the gradients to expect in float64."""

    arrays: dict[str, np.ndarray]
    scale: float
    dq: np.ndarray
    dkv: np.ndarray


def finish(q, kv, indices, lengths, dout, dlse, sink, scale: float) -> Inputs:
    """Adds what the forward pass hands on, the outputs, and the expected gradients."""
    operands = (q, kv, indices, lengths, sink)
    values = oracle.forward(operands, scale=scale)
    gradients = oracle.backward(operands, dout, dlse, scale=scale)
    some = values.lse != -np.inf
    with np.errstate(over="ignore"):
        alpha = np.where(some, 1 / (1 + np.exp(sink - values.lse)), 0)
    beta = np.where(some, dlse - alpha * (dout.astype(np.float64) * values.out).sum(-1), 0)
    rows = {"lse": values.lse, "alpha": alpha, "beta": beta}
    arrays = {"q": q, "kv": kv, "indices": indices, "topk_length": lengths, "dout": dout}
    arrays |= {name: x.astype(np.float32) for name, x in rows.items()}
    arrays |= {"dq": np.full(q.shape, np.nan, q.dtype), "dkv": np.zeros(kv.shape, np.float32)}
    return Inputs(arrays, scale, gradients.dq, gradients.dkv)


def make(case: Case, head_dim: int, dtype: str, seed: int = 0) -> Inputs:
    """Random operands; rows of kv that no slot names are NaN and inf."""
    random, element = np.random.default_rng(seed), ELEMENTS[dtype]
    shape = (case.groups, case.queries)
    q = random.standard_normal((*shape, case.heads, head_dim)).astype(element)
    kv = random.standard_normal((case.groups, case.keys, head_dim)).astype(element)
    named = case.keys - (case.keys > 8) * 8
    kv[:, named:], kv[:, named + 1 :: 2] = np.nan, np.inf
    dout = (case.gain * random.standard_normal((*shape, case.heads, 512))).astype(element)
    dlse = case.gain * random.standard_normal((*shape, case.heads))
    indices = random.integers(0, named, (*shape, case.topk))
    wrong = random.choice([*OUT_OF_RANGE, case.keys], indices.shape)
    indices = np.where(random.random(indices.shape) < case.invalid, wrong, indices)
    lengths = np.resize(case.lengths or [case.topk], shape).astype(np.int32)
    sink = np.full(case.heads, case.sink)
    scale = float(np.float32(head_dim**-0.5))
    return finish(q, kv, indices.astype(np.int32), lengths, dout, dlse, sink, scale)


def make_exact(head_dim: int, dtype: str, topk: int = 128) -> Inputs:
    """Every logit and Delta is 0, and P, dS and all sums are exact: errors are not rounding.

    q lives on columns [0, 128) and the last 64, kv on [128, 512) in rows w, -w that are always
    named together.
    """
    random, element = np.random.default_rng(0), ELEMENTS[dtype]
    queries, heads, keys = 2, 16, 160
    q = np.zeros((1, queries, heads, head_dim), element)
    columns = np.r_[0:128, 512:head_dim]
    q[..., columns] = random.integers(-2, 3, (1, queries, heads, columns.size))
    kv = np.zeros((1, keys, head_dim), element)
    kv[:, ::2, 128:512] = random.integers(-2, 3, (1, keys // 2, 384))
    kv[:, 1::2] = -kv[:, ::2]
    pairs = [random.permutation(keys // 2)[: topk // 2] for _ in range(queries)]
    indices = [random.permutation(np.concatenate([2 * p, 2 * p + 1])) for p in pairs]
    dout = np.zeros((1, queries, heads, 512), element)
    for head in np.ndindex(dout.shape[:3]):
        dout[head][random.integers(128, 512, 4)] = random.choice([-1, 1], 4)
    lengths, no_sink = np.full((1, queries), topk, np.int32), np.full(heads, -np.inf)
    indices = np.array([indices], np.int32)
    return finish(q, kv, indices, lengths, dout, np.zeros(q.shape[:3]), no_sink, 2.0**-5)


def launch_of(kernel: manifest.Kernel, x: Inputs) -> Launch:
    groups, queries, heads, _ = x.arrays["q"].shape
    keys, topk = x.arrays["kv"].shape[1], x.arrays["indices"].shape[2]
    scalars = [queries, keys, topk, heads, x.scale]
    return Launch(
        kernel.symbol,
        (groups * queries, -(-heads // HEADS), 1),
        kernel.block,
        [*map(Pointer, ARRAYS), *scalars],
        kernel.dynamic_shared_bytes,
        entry=kernel,
    )


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """Relative L2 error; 0 where both are zero."""
    error = np.linalg.norm(value.astype(np.float64) - reference)
    return float(error / (np.linalg.norm(reference) or 1))


QUIET = Settings(observers="none", outputs=frozenset({"dq"}))


def execute(head_dim: int, dtype: str, x: Inputs, settings: Settings = QUIET):
    """(arrays, report) of a launch."""
    subject = compiled(head_dim, dtype)
    return run(subject.program, launch_of(subject.entry, x), x.arrays, settings)


@unittest.skipUnless(emulated.ENABLED, emulated.WHY)
class Sm90BackwardTest(parameterized.TestCase):
    def assert_right(self, results, x: Inputs, dtype: str):
        for name, reference in (("dq", x.dq), ("dkv", x.dkv)):
            self.assertTrue(np.isfinite(results[name].astype(np.float32)).all(), name)
            self.assertLessEqual(relative(results[name], reference), BOUND[dtype], name)

    @parameterized.product(config=CONFIGS, case=CASES)
    def test_gradients_are_those_of_the_definition(self, config, case):
        head_dim, dtype = config["head_dim"], config["dtype"]
        x = make(case, head_dim, dtype)
        results, report = execute(head_dim, dtype, x)
        self.assertTrue(report.clean, str(report)[:2000])
        self.assert_right(results, x, dtype)

    @parameterized.product(config=CONFIGS, schedule=tuple(SCHEDULES))
    def test_no_race_under_any_schedule(self, config, schedule):
        head_dim, dtype = config["head_dim"], config["dtype"]
        x = make(Case("three_tiles", heads=16, topk=190), head_dim, dtype, seed=1)
        settings = Settings(SCHEDULES[schedule], outputs=frozenset({"dq"}))
        results, report = execute(head_dim, dtype, x, settings)
        self.assertTrue(report.clean, str(report)[:2000])
        self.assert_right(results, x, dtype)

    @parameterized.named_parameters(CONFIGS)
    def test_exact_inputs_give_exact_gradients(self, head_dim, dtype):
        x = make_exact(head_dim, dtype)
        results, _ = execute(head_dim, dtype, x)
        np.testing.assert_array_equal(results["dq"], x.dq.astype(ELEMENTS[dtype]))
        np.testing.assert_array_equal(results["dkv"], x.dkv.astype(np.float32))

    @parameterized.product(config=CONFIGS, operand=("q", "dout"))
    def test_a_non_finite_query_reaches_its_own_rows_only(self, config, operand):
        head_dim, dtype = config["head_dim"], config["dtype"]
        x = make(Case("two_queries", queries=2, heads=3, topk=40), head_dim, dtype)
        x.arrays["indices"][0, 0] = np.where(x.arrays["indices"][0, 0] % 2 == 0, 2, -1)
        x.arrays["indices"][0, 1] = np.where(x.arrays["indices"][0, 1] % 2 == 0, 4, -1)
        clean, _ = execute(head_dim, dtype, x)
        x.arrays[operand][0, 0, 1, 7] = np.nan
        results, _ = execute(head_dim, dtype, x)
        self.assertTrue(np.isnan(results["dq"][0, 0, 1].astype(np.float32)).any())
        self.assertTrue(np.isnan(results["dkv"][0, 2]).any())
        for name in ("dq", "dkv"):
            reached = np.ones(results[name].shape, bool)
            reached[0, 0 if name == "dq" else 2] = False
            np.testing.assert_array_equal(results[name][reached], clean[name][reached], name)

    @parameterized.named_parameters(CONFIGS)
    def test_a_peak_that_grows_lowers_what_came_before(self, head_dim, dtype):
        # Later tiles bring larger dS: rows of kv grow with their number, and slots follow it.
        x = make(Case("growing", topk=192, keys=200, invalid=0, lengths=(192,)), head_dim, dtype)
        growth = np.exp2(np.arange(200) // 40 * 2.0)[:, None].astype(np.float32)
        kv = (x.arrays["kv"].astype(np.float32) * growth / 256).astype(ELEMENTS[dtype])
        indices = np.arange(192, dtype=np.int32)[None, None]
        a = x.arrays
        zero, sink = np.zeros(a["lse"].shape), np.zeros(a["q"].shape[2])
        q = (a["q"].astype(np.float32) / 4).astype(ELEMENTS[dtype])
        x = finish(q, kv, indices, a["topk_length"], a["dout"], zero, sink, x.scale)
        results, _ = execute(head_dim, dtype, x)
        self.assert_right(results, x, dtype)

    @parameterized.named_parameters(CONFIGS)
    def test_resources(self, head_dim, dtype):
        subject = compiled(head_dim, dtype)
        self.assertNotIn(".local", subject.text)
        self.assertLessEqual(subject.entry.dynamic_shared_bytes, 232_448)
        names = [region.name for region in subject.entry.regions]
        self.assertEqual(names[:5], ["q", "dout", "k", "p", "ds"])


@unittest.skipUnless(emulated.ENABLED, emulated.WHY)
class OrderTest(parameterized.TestCase):
    @parameterized.parameters(*ELEMENTS)
    def test_every_ordering_element_is_needed(self, dtype):
        """Each barrier, fence, wait and commit taken out in turn.

        float16 also has the agreement on the mult.
        """
        subject = compiled(576, dtype)
        x = make(Case("three_tiles", heads=16, topk=190), 576, dtype, seed=1)
        launch, arrays = launch_of(subject.entry, x), x.arrays

        def attempt(codes, limit, observers):
            settings = Settings(observers=("races",), outputs=frozenset({"dq"}), step_limit=limit)
            results, report = run(subject.program, launch, arrays, settings, observers, codes)
            errors = [relative(results["dq"], x.dq), relative(results["dkv"], x.dkv)]
            return report, "" if max(errors) <= BOUND[dtype] else f"errors {errors}"

        outcomes = emulated.assert_all_needed(self, subject, attempt, ("delete",))
        self.assertGreater(len(outcomes), 60)
        # A fence is for registers; the PTX has new ones in each run of products, so that most need
        # none there. ptxas, which makes them the same registers, puts in what lacks (C7519).
        silent = [o.mutant for o in outcomes if o.caught == "silent"]
        needless = [str(m) for m in silent if not m.ins.opcode.startswith("wgmma.fence")]
        self.assertEqual(needless, [])


if __name__ == "__main__":
    absltest.main()
