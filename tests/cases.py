"""Cases and inputs of the attention suite, and the comparison with the oracle."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import oracle

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DTYPES = ("bfloat16", "float16", "float32", "float64")


class Operands(NamedTuple):
    """The array arguments of ``sparse_attention``, as NumPy arrays."""

    q: Any
    kv: Any
    indices: Any
    topk_length: Any
    attn_sink: Any


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Operands and the cotangents of out and lse."""

    operands: Operands
    dout: np.ndarray
    dlse: np.ndarray
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the suite.

    Attributes:
        name: readable id.
        lengths: topk_length, repeated over the queries; None passes none.
        sink: attn_sink, repeated over the heads; None passes none.
        sink_dtype: dtype of attn_sink.
        lse_loss: whether lse has a cotangent.
    """

    name: str
    batch: tuple[int, ...] = ()
    queries: int = 5
    keys: int = 9
    heads: int = 3
    head_dim: int = 32
    topk: int = 8
    value_dim: int | None = None
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    sink: tuple[float, ...] | None = None
    sink_dtype: str = "float32"
    lse_loss: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        options = {"scale": self.scale, "value_dim": self.value_dim}
        return {k: v for k, v in options.items() if v is not None}

    @property
    def logit_std(self) -> float:
        """Standard deviation of the logits of standard normal q and kv."""
        return 1.0 if self.scale is None else self.scale * self.head_dim**0.5

    @property
    def value_width(self) -> int:
        return self.value_dim or (512 if self.head_dim == 576 else self.head_dim)


RAGGED = (8, 3, 0, -5, 100)
SINKS = (0.5, -1.0, 2.0)
EXTREME_SINKS = (np.inf, 1e38, -np.inf, -1e38, 40.0, -40.0, 0.0, 3.0)

# Run in every dtype.
CORE = (
    Case("plain"),
    Case("lengths_sink_lse", batch=(2,), lengths=RAGGED, sink=SINKS),
    Case("extreme_sinks", batch=(2,), heads=8, sink=EXTREME_SINKS, lengths=RAGGED),
    Case("width_576", queries=3, keys=40, heads=4, head_dim=576, topk=33, sink=SINKS),
    Case("wide_logits", heads=4, head_dim=64, scale=2.0, topk=6, sink=SINKS),
)
# Run in float32.
SHAPES = (
    Case("no_lse_loss", lse_loss=False, sink=SINKS),
    Case("two_batch_axes", batch=(2, 3), lengths=RAGGED, sink=SINKS),
    Case("batch_of_one", batch=(1, 1), lengths=(4,), sink=SINKS),
    Case("one_query", queries=1),
    Case("one_key", keys=1, sink=SINKS),
    Case("one_head", heads=1, sink=(0.3,)),
    Case("one_slot", topk=1, sink=SINKS),
    Case("one_of_all", queries=1, keys=1, heads=1, topk=1, head_dim=1, sink=(0.2,)),
    Case("width_512", queries=3, keys=20, heads=2, head_dim=512, topk=17),
    Case("value_dim", value_dim=7, sink=SINKS),
    Case("value_dim_576", queries=2, head_dim=576, value_dim=576, topk=5),
    Case("small_scale", scale=1e-3),
    Case("all_sinks_infinite", sink=(np.inf,), lengths=RAGGED),
    Case("all_sinks_huge", sink=(1e38,)),
    Case("sinks_in_bfloat16", sink=SINKS, sink_dtype="bfloat16"),
    Case("sinks_in_float16", sink=SINKS, sink_dtype="float16"),
    Case("slots_beyond_keys", keys=4, topk=24),
    Case("all_rows_empty", lengths=(0, -1), sink=SINKS),
    Case("int_min_length", lengths=(INT_MIN, INT_MAX), sink=SINKS),
)


def as_dtype(x: Any, dtype: str) -> np.ndarray:
    return np.asarray(x).astype(jnp.dtype(dtype))


def accum_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def make_indices(rng: np.random.Generator, shape: Sequence[int], keys: int) -> np.ndarray:
    """Rows of kv, some twice, rows beyond both ends, INT_MIN, INT_MAX; the first slot is valid."""
    indices = rng.integers(-2, keys + 2, shape)
    extreme = rng.choice([INT_MIN, INT_MAX], shape)
    indices = np.where(rng.random(shape) < 0.1, extreme, indices)
    indices[..., 0] = rng.integers(0, keys, shape[:-1])
    return indices.astype(np.int32)


def make_inputs(case: Case, dtype: str = "float32", seed: int = 0) -> Inputs:
    """Standard normal q, kv and dout rounded to the dtype, standard normal dlse."""
    rng = np.random.default_rng(seed)
    rows = (*case.batch, case.queries)

    def normal(*shape):
        return as_dtype(rng.standard_normal(shape), dtype)

    q, kv = normal(*rows, case.heads, case.head_dim), normal(*case.batch, case.keys, case.head_dim)
    indices = make_indices(rng, (*rows, case.topk), case.keys)
    length = sink = None
    if case.lengths is not None:
        length = np.resize(np.asarray(case.lengths, np.int32), rows)
    if case.sink is not None:
        sink = as_dtype(np.resize(case.sink, case.heads), case.sink_dtype)
    dout = normal(*rows, case.heads, case.value_width)
    dlse = rng.standard_normal((*rows, case.heads)) * case.lse_loss
    operands = Operands(q, kv, indices, length, sink)
    return Inputs(operands, dout, as_dtype(dlse, accum_dtype(dtype)), case.options)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Relative L2; for lse of 16-bit operands the error in units of max(1, |lse|)."""

    out: float
    gradient: float
    lse: float


BOUNDS = {
    "bfloat16": Bounds(4e-3, 8e-3, 2e-5),
    "float16": Bounds(1e-3, 2e-3, 2e-5),
    "float32": Bounds(2e-6, 2e-6, 2e-6),
    "float64": Bounds(1e-12, 1e-12, 1e-12),
}


def bounds(dtype: str, logit_std: float = 1.0) -> Bounds:
    """The contract's accuracy, with its growth for logits wider than at the default scale."""
    base = BOUNDS[dtype]
    if logit_std <= 1 or dtype == "float64":
        return base
    if dtype == "float32":
        growth = 1.3 * logit_std
        return Bounds(base.out * growth, base.gradient * growth, base.lse * growth)
    growth = 1.3 * max(1.0, (logit_std / 4) ** 0.5)
    return dataclasses.replace(base, gradient=base.gradient * growth)


def relative_l2(got: Any, want: np.ndarray) -> float:
    """``|got - want| / |want|`` over finite entries; 0 / 0 is 0."""
    got, finite = np.asarray(got).astype(np.float64), np.isfinite(want)
    error = np.linalg.norm(got[finite] - want[finite])
    return float(error / np.linalg.norm(want[finite])) if error else 0.0


def check_special(name: str, got: Any, want: np.ndarray) -> None:
    """Shapes, and NaN, inf and -inf in the same places."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    for what, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(got) != test(want)
        assert not wrong.any(), f"{name}: {what} differs at {np.argwhere(wrong)[:5].tolist()}"


def check_close(name: str, got: Any, want: np.ndarray, bound: float) -> None:
    """NaN and inf positions first, then relative L2."""
    check_special(name, got, want)
    error = relative_l2(got, want)
    assert error <= bound, f"{name}: relative L2 {error:.3g} exceeds {bound:.3g}"


def check_lse(got: Any, want: np.ndarray, dtype: str, limits: Bounds) -> None:
    if dtype in ("float32", "float64"):
        return check_close("lse", got, want, limits.lse)
    check_special("lse", got, want)
    finite = np.isfinite(want)
    got, want = np.asarray(got).astype(np.float64)[finite], want[finite]
    worst = np.max(np.abs(got - want) / np.maximum(1, np.abs(want)), initial=0)
    assert worst <= limits.lse, f"lse: error {worst:.3g} exceeds {limits.lse:.3g} max(1, |lse|)"


def check_results(got: Sequence[Any], inputs: Inputs, dtype="float32", logit_std=1.0) -> None:
    """``out, lse, dq, dkv, dsink`` against the oracle: the contract's accuracy and dtypes."""
    values = oracle.forward(inputs.operands, **inputs.options)
    grads = oracle.backward(inputs.operands, inputs.dout, inputs.dlse, **inputs.options)
    limits = bounds(dtype, logit_std)
    out, lse, dq, dkv, dsink = got
    check_close("out", out, values.out, limits.out)
    check_lse(lse, values.lse, dtype, limits)
    check_close("dq", dq, grads.dq, limits.gradient)
    check_close("dkv", dkv, grads.dkv, limits.gradient)
    wanted = [dtype, accum_dtype(dtype), dtype, dtype]
    assert [str(x.dtype) for x in (out, lse, dq, dkv)] == wanted, wanted
    if dsink is not None:
        sink_dtype = str(inputs.operands.attn_sink.dtype)
        assert str(dsink.dtype) == sink_dtype, f"dsink: {dsink.dtype}, want {sink_dtype}"
        # The contract bounds dq and dkv; dsink is held to the same, or to rounding to its dtype.
        check_close("dsink", dsink, grads.dsink, max(limits.gradient, BOUNDS[sink_dtype].out))


def exact_inputs(
    topk: int, dtype: str = "bfloat16", *, seed=0, tail=True, queries=3, heads=4
) -> Inputs:
    """Inputs whose results are exact in any order of summation: a race shows as a changed bit.

    q lives on even columns and on 512..575, kv on odd columns below 512, so every logit is 0 and
    P = 1/K; rows of kv come in pairs +w, -w and each query selects whole pairs in random slot
    order, so out = 0 and Delta = 0.
    """
    rng = np.random.default_rng(seed)
    head_dim, pairs = (576 if tail else 512), topk
    q = np.zeros((queries, heads, head_dim))
    columns = np.concatenate([np.arange(0, 512, 2), np.arange(512, head_dim)])
    q[..., columns] = rng.integers(-2, 3, (queries, heads, columns.size))
    kv = np.zeros((2 * pairs, head_dim))
    kv[::2, 1:512:2] = rng.integers(-3, 4, (pairs, 256))
    kv[1::2] = -kv[::2]
    chosen = np.stack([rng.permutation(pairs)[: topk // 2] for _ in range(queries)])
    slots = np.concatenate([2 * chosen, 2 * chosen + 1], -1)
    indices = rng.permuted(slots, axis=-1).astype(np.int32)
    dout = np.zeros((queries, heads, 512))
    dout[..., [1, 129, 257, 511]] = rng.choice([-1, 1], (queries, heads, 4))
    operands = Operands(as_dtype(q, dtype), as_dtype(kv, dtype), indices, None, None)
    dlse = np.zeros((queries, heads), accum_dtype(dtype))
    return Inputs(operands, as_dtype(dout, dtype), dlse, {"scale": 2.0**-4})


def exact_results(inputs: Inputs, dtype: str) -> dict[str, np.ndarray]:
    """What `exact_inputs` must give, from P = 1/K and Delta = 0, rounded once to the dtype."""
    q, kv, indices = (np.asarray(x).astype(np.float64) for x in inputs.operands[:3])
    dout, scale, topk = inputs.dout.astype(np.float64), inputs.options["scale"], indices.shape[-1]
    dkv, rows = np.zeros_like(kv), indices.astype(int)
    ds = np.einsum("shv,skv->shk", dout, kv[rows][..., :512]) / topk
    dkv_rows = np.einsum("shk,shd->skd", ds, q) * scale
    dkv_rows[..., :512] += dout.sum(1)[:, None] / topk
    np.add.at(dkv, rows, dkv_rows)
    dq = np.einsum("shk,skd->shd", ds, kv[rows]) * scale
    results = {"out": np.zeros_like(dout), "dq": dq, "dkv": dkv}
    return {name: as_dtype(x, dtype) for name, x in results.items()}
