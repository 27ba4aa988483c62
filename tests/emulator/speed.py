"""Times the emulator on one CTA of a public backward, and digests what it reports.

    JAX_DSA_CONTROLS_DIR=... python -m tests.emulator.speed --topk 128 --observers all --repeat 3

Prints CPU and wall seconds (best of ``--repeat``; the processes of ``--processes`` apart), its peak
memory, and a digest of arrays and report: an optimisation may change all but the last.
``--profile`` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import hashlib
import os
import pathlib
import pstats
import resource
import sys
import tempfile
import time

from jax_dsa.emulator import SCHEDULES, Program, run
from jax_dsa.emulator.controls import Source, compile_peer, problems
from jax_dsa.emulator.controls.backward import BackwardControl


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.speed")
    parser.add_argument("--release", default="1.27.0")
    parser.add_argument("--head-dim", type=int, default=576)
    parser.add_argument("--topk", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--observers", default="all", help="all, none, or names with commas")
    parser.add_argument("--schedule", default="round_robin", choices=tuple(SCHEDULES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    return parser


def digest(arrays, report) -> str:
    """Of every array and of every field of the report."""
    found = hashlib.sha256(repr(dataclasses.astuple(report)).encode())
    for name in sorted(arrays):
        found.update(arrays[name].tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    options = arguments().parse_args()
    folder = pathlib.Path(os.environ.get("JAX_DSA_CONTROLS_DIR", tempfile.mkdtemp()))
    python = os.environ.get("JAX_DSA_CONTROLS_PYTHON", sys.executable)
    source = Source(options.release, "backward", options.head_dim, options.topk)
    compiled = compile_peer(source, folder, python)
    start = time.process_time()
    program = Program(compiled.text)
    parsed = time.process_time()
    for kernel in program.module.kernels:
        program.code(kernel)
    bound = time.process_time()
    print(f"parse {parsed - start:.2f} s, bind {bound - parsed:.2f} s")
    control = BackwardControl(compiled)
    case = problems.Case(
        options.head_dim, S=options.queries, T=max(256, options.topk), K=options.topk
    )
    launch, arrays, settings = control.main_alone(case, problems.make(case))
    observers = options.observers
    settings = dataclasses.replace(
        settings,
        schedule=SCHEDULES[options.schedule],
        processes=options.processes,
        observers=observers if observers in ("all", "none") else observers.split(","),
    )

    def once():
        start, wall = time.process_time(), time.perf_counter()
        found = run(control.program, launch, arrays, settings)
        return time.process_time() - start, time.perf_counter() - wall, found

    if options.profile:
        once()
        profile = cProfile.Profile()
        profile.runcall(once)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    results = [once() for _ in range(options.repeat)]
    outputs, report = results[0][2]
    cpu, wall = (min(r[i] for r in results) for i in (0, 1))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_children = (children.ru_utime + children.ru_stime) / options.repeat
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"K={options.topk} {observers}: {cpu:.2f} CPU s, {wall:.2f} s (first {results[0][0]:.2f}), "
        f"{of_children:.2f} CPU s of other processes, "
        f"{report.steps} steps, {peak:.0f} MiB, digest {digest(outputs, report)}"
    )


if __name__ == "__main__":
    main()
