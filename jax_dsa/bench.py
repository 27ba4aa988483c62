"""Times of forward and gradient, implementations side by side in one process.

    python -m jax_dsa.bench --shape cpu --implementations xla naive naive_map [--json F] [--plot F]

Calls of all implementations alternate; a figure is the median over all rounds, a ratio is that of
medians to the first implementation's. ``naive`` is what a user would write: gather all keys,
softmax, differentiated by JAX; ``naive_map`` does so for 32 queries at a time under
``jax.checkpoint`` and ``lax.map``. "temp" is the compiled program's own temporary memory.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa import api, dispatch
from jax_dsa.problem import Facts, Problem


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named problem: S queries, T keys, H heads, K slots, width D, value width 512 or D."""

    queries: int
    keys: int
    heads: int
    topk: int
    head_dim: int = 576

    @property
    def value_dim(self) -> int:
        return 512 if self.head_dim == 576 else self.head_dim

    def problem(self, dtype: str) -> Problem:
        facts = Facts(dtype, self.head_dim**-0.5, self.value_dim, False)
        return Problem((), self.queries, self.heads, self.head_dim, self.keys, self.topk, facts)


SHAPES = {
    "tiny": Shape(32, 64, 4, 16, 64),
    "cpu": Shape(512, 2048, 16, 256),
    "linear_2048": Shape(2048, 2048, 16, 512),
    "linear_4096": Shape(4096, 4096, 16, 512),
    "v32_h64": Shape(4096, 8192, 64, 2048),
    "v32_h128": Shape(4096, 8192, 128, 2048),
    "train_h64": Shape(8192, 8192, 64, 1024),
    "d512_h64": Shape(4096, 8192, 64, 1024, 512),
}


# ------------------------------------------------------------------------------ what is timed


def naive(q, kv, indices, value_dim: int):
    """All keys gathered at once: memory S K D."""
    keys = kv[indices]
    s = jnp.einsum("shd,skd->shk", q, keys, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(s * q.shape[-1] ** -0.5, -1).astype(q.dtype)
    values = keys[..., :value_dim]
    return jnp.einsum("shk,skv->shv", p, values, preferred_element_type=jnp.float32).astype(q.dtype)


def naive_map(q, kv, indices, value_dim: int, block: int = 32):
    """``naive`` for a block of queries at a time, recomputed in the backward pass."""
    body = jax.checkpoint(lambda kv, x: naive(x[0], kv, x[1], value_dim))
    blocks = [x.reshape(-1, min(block, len(x)), *x.shape[1:]) for x in (q, indices)]
    return jax.lax.map(lambda x: body(kv, x), tuple(blocks)).reshape(*q.shape[:2], value_dim)


NAIVE = {"naive": naive, "naive_map": naive_map}


def attention(name: str, value_dim: int) -> Callable:
    """``q, kv, indices -> out`` of an implementation's or a naive formulation's name."""
    if name in NAIVE:
        return functools.partial(NAIVE[name], value_dim=value_dim)
    return functools.partial(api.sparse_attention, value_dim=value_dim, implementation=name)


def gradient(forward: Callable) -> Callable:
    """``q, kv, indices, dout -> dq, dkv``: forward and backward pass together."""

    def run(q, kv, indices, dout):
        return jax.vjp(lambda q, kv: forward(q, kv, indices), q, kv)[1](dout)

    return run


def operands(shape: Shape, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    """Standard normal q, kv, dout; for every query K distinct rows in random order."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, *dims: jax.random.normal(key, dims, jnp.dtype(dtype))  # noqa: E731
    choose = lambda key: jax.random.permutation(key, shape.keys)[: shape.topk]  # noqa: E731
    indices = jax.lax.map(choose, jax.random.split(keys[2], shape.queries)).astype(jnp.int32)
    q = normal(keys[0], shape.queries, shape.heads, shape.head_dim)
    kv = normal(keys[1], shape.keys, shape.head_dim)
    return q, kv, indices, normal(keys[3], shape.queries, shape.heads, shape.value_dim)


# ---------------------------------------------------------------------------------- measuring


def measure(shape: Shape, dtype: str, names: list[str], rounds: int) -> list[dict]:
    """Times every name's forward and gradient, alternating call by call.

    Returns:
        A row for each name and pass: ``name, kind, ms`` (median), ``low_ms, high_ms``,
        ``temp_mib, tflops``; or ``name, kind, error`` where it does not compile or run.
    """
    args = operands(shape, dtype)
    rows = []
    for kind in ("forward", "gradient"):
        programs, found = {}, {}
        for name in names:
            try:
                programs[name] = _compile(name, kind, shape, args)
                jax.block_until_ready(programs[name][0]())
            except (RuntimeError, NotImplementedError, ExceptionGroup) as error:
                programs.pop(name, None)
                found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        times = _alternate({name: run for name, (run, _) in programs.items()}, rounds)
        for name, seconds in times.items():
            found[name] = _row(shape, dtype, kind, seconds, programs[name][1])
        rows += [{"name": name, "kind": kind, **found[name]} for name in names]
    return rows


def _compile(name, kind, shape, args):
    forward = attention(name, shape.value_dim)
    fn, args = (forward, args[:3]) if kind == "forward" else (gradient(forward), args)
    compiled = jax.jit(fn).lower(*args).compile()
    return functools.partial(compiled, *args), compiled.memory_analysis()


def _alternate(programs: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return times


def _row(shape, dtype, kind, seconds, memory) -> dict:
    problem = shape.problem(dtype)
    flops = problem.flops(backward=False)
    flops += problem.flops(backward=True) if kind == "gradient" else 0
    median = float(np.median(seconds))
    return {
        "ms": 1e3 * median,
        "low_ms": 1e3 * min(seconds),
        "high_ms": 1e3 * max(seconds),
        "temp_mib": None if memory is None else memory.temp_size_in_bytes / 2**20,
        "tflops": flops / median / 1e12,
    }


# ---------------------------------------------------------------------------------- reporting


def table(results: list[dict]) -> str:
    """The results as a Markdown table."""
    head = "| shape | pass | implementation | ms (min-max) | speed | TFLOP/s | temp MiB |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for result in results:
        first: dict[str, float] = {}
        for row in result["rows"]:
            title = f"| {result['shape']} | {row['kind']} | {row['name']} |"
            if "error" in row:
                lines.append(f"{title} {row['error'][:60]} | | | |")
                continue
            ratio = first.setdefault(row["kind"], row["ms"]) / row["ms"]
            temp = "" if row["temp_mib"] is None else f"{row['temp_mib']:.0f}"
            lines.append(
                f"{title} {row['ms']:.2f} ({row['low_ms']:.2f}-{row['high_ms']:.2f}) "
                f"| {ratio:.2f} x | {row['tflops']:.3g} | {temp} |"
            )
    return "\n".join(lines)


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Bars of the medians, a panel for each shape and pass."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'jax_dsa[examples]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = ("forward", "gradient")
    figure, axes = pyplot.subplots(
        len(results), 2, figsize=(9, 2 + 1.5 * len(results)), squeeze=False
    )
    for line, result in zip(axes, results, strict=True):
        for ax, kind in zip(line, kinds, strict=True):
            rows = [r for r in result["rows"] if r["kind"] == kind and "ms" in r]
            ax.barh([r["name"] for r in rows], [r["ms"] for r in rows])
            ax.set_title(f"{result['shape']} {kind}", fontsize=9)
            ax.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_dsa.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["cpu"])
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=[*NAIVE, *dispatch.NAMES],
        default=["naive", "xla"],
        help="the first is the one that speeds refer to",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each, default 5")
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="write a picture to this file")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}, {args.dtype}")
    results = []
    for name in args.shape:
        rows = measure(SHAPES[name], args.dtype, args.implementations, args.rounds)
        results.append({"shape": name, **dataclasses.asdict(SHAPES[name]), "rows": rows})
    print(table(results))
    if args.json:
        machine = {"platform": device.platform, "device": device.device_kind}
        versions = {"jax": jax.__version__, "dtype": args.dtype, "rounds": args.rounds}
        args.json.write_text(json.dumps({**machine, **versions, "results": results}, indent=2))
    if args.plot:
        plot(results, args.plot)
    return int(any("error" in row for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
