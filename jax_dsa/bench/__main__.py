"""``python -m jax_dsa.bench``; see the package."""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jax_dsa import bench, dispatch
from jax_dsa.bench import timing
from jax_dsa.bench.peers import PEERS
from jax_dsa.bench.programs import KINDS, NAIVE, SHAPES, Program, Shape, program, with_residuals
from jax_dsa.bench.tables import plot, table

# What keeps one name out of the table, not the others: it cannot, or it is not installed.
_REFUSALS = (RuntimeError, NotImplementedError, ExceptionGroup, ImportError)
PACKAGES = ("jax", "jaxlib", "sgl-flash-mla", "nvidia-cudnn-frontend", "tilelang", "torch")


def measure(shape: Shape, dtype: str, names: list[str], rounds: int, calls: int) -> list[dict]:
    """Times every name's passes, alternating call by call.

    Returns:
        A row for each name and pass that it has: ``name, kind, ms`` (median), ``low_ms, high_ms,
        speed`` (of medians, the pass's first name = 1), ``low_speed, high_speed`` (over rounds),
        ``temp_mib, tflops``; or ``name, kind, error`` where it does not compile or run.
    """
    given = with_residuals(shape, dtype)
    on_device = jax.devices()[0].platform == "gpu"
    rows = []
    for kind in KINDS:
        programs, errors = {}, {}
        for name in names:
            try:
                found = _prepare(name, kind, shape, dtype, given)
            except _REFUSALS as error:
                errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                programs |= {} if found is None else {name: found}
        runs = {name: p.run for name, p in programs.items()}
        times = timing.alternate(runs, rounds, calls, on_device)
        found = {name: {"error": text} for name, text in errors.items()}
        for name, seconds in times.items():
            first = next(iter(times.values()))
            flops = shape.flops(kind, dtype)
            found[name] = _row(np.array(first), np.array(seconds), flops, programs[name])
        rows += [{"name": name, "kind": kind, **found[name]} for name in names if name in found]
    return rows


def _prepare(name, kind, shape, dtype, given) -> Program | None:
    """The program, run once, so that nothing is compiled while calls are timed."""
    if name in PEERS:
        found = PEERS[name](kind, shape, given)
    else:
        found = program(name, kind, shape, dtype, given)
        if found is not None:
            run = found.run
            found = dataclasses.replace(found, run=lambda: jax.block_until_ready(run()))
    if found is not None:
        found.run()
    return found


def _row(first: np.ndarray, seconds: np.ndarray, flops: int, timed: Program) -> dict[str, Any]:
    """Of the seconds [rounds, calls] of one name, beside those of the pass's first name."""
    median = float(np.median(seconds))
    speeds = np.median(first, axis=1) / np.median(seconds, axis=1)
    return {
        "ms": 1e3 * median,
        "low_ms": 1e3 * float(seconds.min()),
        "high_ms": 1e3 * float(seconds.max()),
        "speed": float(np.median(first)) / median,
        "low_speed": float(speeds.min()),
        "high_speed": float(speeds.max()),
        "temp_mib": None if timed.temp_bytes is None else timed.temp_bytes / 2**20,
        "tflops": flops / median / 1e12,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jax_dsa.bench", description=bench.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["cpu"])
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=[*NAIVE, *dispatch.NAMES, *PEERS],
        default=["naive", "xla"],
        help="the first is the one that speeds refer to",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--calls", type=int, default=1, help="timed calls of each in a round")
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="write a picture to this file")
    parser.add_argument("--table", type=pathlib.Path, help="print this file's table, time nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.table:
        print(table(json.loads(args.table.read_text())["results"]))
        return 0
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}, {args.dtype}")
    results = []
    run = functools.partial(measure, rounds=args.rounds, calls=args.calls)
    for name in args.shape:
        rows = run(SHAPES[name], args.dtype, args.implementations)
        results.append({"shape": name, **dataclasses.asdict(SHAPES[name]), "rows": rows})
    print(table(results))
    if args.json:
        facts = {"platform": device.platform, "device": device.device_kind}
        facts |= {"dtype": args.dtype, "rounds": args.rounds, "calls": args.calls}
        facts |= {"versions": _versions(), "results": results}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)
    return int(any("error" in row for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
