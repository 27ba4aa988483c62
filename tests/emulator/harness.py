"""Tiny kernels for tests: PTX around a body, arrays in, arrays and report out."""

from __future__ import annotations

import numpy as np
from absl.testing import parameterized

from jax_dsa.emulator import Launch, Pointer, Program, Schedule, Settings, run
from jax_dsa.emulator.observers.graph import Graph
from jax_dsa.emulator.proof import Prover

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<16>;
    .reg .b16 %h<64>;
    .reg .b32 %r<160>;
    .reg .b64 %d<64>;
    .reg .f32 %f<64>;
"""


def text(body: str, arrays=(), shared: int = 0, target: str = "sm_100a") -> str:
    """PTX of kernel ``test``: one pointer parameter per array, loaded into ``%<name>``; shared
    bytes at ``smem``.
    """
    parameters = ", ".join(f".param .u64 p_{name}" for name in arrays)
    loads = "".join(f"    .reg .b64 %{n};\n    ld.param.u64 %{n}, [p_{n}];\n" for n in arrays)
    variable = f"    .shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    return (
        f"{HEADER.replace('sm_100a', target)}.visible .entry"
        f" test({parameters})\n{{{REGISTERS}{variable}{loads}{body}\n    ret;\n}}\n"
    )


def execute(
    body, arrays=None, shared=0, threads=32, grid=1, outputs=(), target="sm_100a", **settings
):
    """Runs ``body``; returns (arrays, report). The happens-before graph must agree with the clocks
    of the race check on every kernel.
    """
    arrays = arrays or {}
    program = Program(text(body, arrays, shared, target))
    launch = Launch("test", (grid, 1, 1), (threads, 1, 1), [Pointer(name) for name in arrays])
    graph, given = Graph(), Settings(outputs=frozenset(outputs), **settings)
    several = given.processes > 1  # a graph would keep all CTAs in one
    results, report = run(program, launch, arrays, given, [] if several else [graph])
    if given.observers == "all" and not several:
        agree(Prover(graph), report)
    return results, report


def agree(prover: Prover, report) -> None:
    """Both find races, or neither; every pair of the race check is one of the graph's."""
    unordered = {pair for pair in prover.unordered() if pair[1]}
    memory = [race for race in report.races if race.space != "registers"]
    races = {(race.first.line, race.second.line) for race in memory}
    assert races <= unordered and bool(races) == bool(unordered), (races, unordered)


def lanes(dtype=np.uint32, count: int = 32) -> np.ndarray:
    return np.arange(count, dtype=dtype)


SCHEDULES = {
    "turn": Schedule(),
    "eager": Schedule(engines="eager"),
    "lazy": Schedule(engines="lazy"),
    "random": Schedule("random", "random", seed=3, quantum=2),
}
# %r0 = thread, %r1 = 4 * thread, %r2 = warp
THREAD = """
    mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 2;
    shr.u32 %r2, %r0, 5;
    mul.wide.u32 %d0, %r0, 4;
"""
BOTH = (True, False)
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r3];\n"
WARPS = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p0, %r2, 0;
    and.b32 %r9, %r0, 31;
    setp.eq.u32 %p1, %r9, 0;
"""
# Lane 0 of warp 0 initialises the mbarrier at smem for 32 arrivals.
INIT = "@%p0 bra SETUP; bra READY; SETUP: @%p1 mbarrier.init.shared.b64 [%r3], 32; READY:\n"


def wait_loop(name: str, barrier: str, parity: str) -> str:
    return (
        f"{name}:\nmbarrier.try_wait.parity.shared.b64 %p7, [{barrier}], {parity};\n@!%p7 bra"
        f" {name};\n"
    )


class PairTest(parameterized.TestCase):
    def check(self, ordered: bool, body: str, missing: str = "", space: str = "shared", **settings):
        """Runs body; silent when ordered, else one race whose sentence holds ``missing``."""
        arrays = settings.pop("arrays", None)
        _, report = execute(body, arrays, shared=settings.pop("shared", 4096), **settings)
        self.assertEqual(report.deadlocks, ())
        if ordered:
            self.assertEqual((report.races, report.faults), ((), ()), str(report))
        else:
            self.assertNotEmpty(report.races, str(report))
            self.assertEqual({r.space for r in report.races}, {space})
            self.assertIn(missing, str(report))
        return report
