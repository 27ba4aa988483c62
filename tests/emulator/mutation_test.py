"""Mutants of small kernels: those that matter are caught, the redundant ones carry a proof from the
happens-before graph, and one that is neither counts as missed.
"""

import numpy as np
from absl.testing import absltest, parameterized
from harness import THREAD, lanes, text
from wgmma_kernels import FENCE, gemm

from jax_dsa.emulator import Launch, Pointer, Program, Settings, mutation, run
from jax_dsa.emulator.observers.graph import Graph
from jax_dsa.emulator.observers.races import Races
from jax_dsa.emulator.observers.warpgroup import WarpgroupRegisters
from jax_dsa.emulator.proof import Prover

WARPS = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p0, %r2, 0;
    and.b32 %r9, %r0, 31;
    setp.eq.u32 %p1, %r9, 0;
"""
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r3];\n"
READ, WRITE = "ld.shared.b32 %r5, [%r3+64];\n", "st.shared.b32 [%r3+64], 5;\n"


def wait(label: str, barrier: str = "%r3", parity: int = 0) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p7, [{barrier}], {parity};\n"
        f"@!%p7 bra {label};\n"
    )


def roles(first: str, second: str, count: int = 32) -> str:
    """Warp 0 initialises an mbarrier and runs ``first``, warp 1 runs ``second``."""
    return f"""{WARPS}
    @!%p0 bra READY;
    @%p1 mbarrier.init.shared.b64 [%r3], {count};
READY:
    bar.sync 0;
    @%p0 bra FIRST;
    {second}
    bra END;
FIRST:
    {first}
END:"""


def outcomes(body: str, arrays=None) -> dict[tuple[str, str], list[mutation.Outcome]]:
    """Every mutant's outcome by (stem of the opcode, change), in program order."""
    arrays = arrays or {}
    program = Program(text(body, arrays, shared=1024))
    launch = Launch("test", (1, 1, 1), (64, 1, 1), [Pointer(name) for name in arrays])
    settings = Settings(observers="none", step_limit=5000)
    graph = Graph()
    good, report = run(program, launch, arrays, settings, [graph, Races()])
    assert report.clean, report

    def execute(changed):
        races = Races(lints=False)
        results, report = run(program, launch, arrays, settings, [races], {"test": changed})
        wrong = [name for name in good if results[name].tobytes() != good[name].tobytes()]
        return report, ", ".join(wrong)

    found: dict[tuple[str, str], list[mutation.Outcome]] = {}
    prover = Prover(graph)
    for outcome in mutation.survey(program.code("test"), execute, prover):
        if outcome.caught == "race":  # the run and the graph agree
            assert not prover.prove(mutation.change_of(prover, outcome.mutant)).holds, outcome
        stem = ".".join(outcome.mutant.ins.opcode.split(".")[:2])
        found.setdefault((stem, outcome.mutant.change), []).append(outcome)
    return found


class DeletionTest(absltest.TestCase):
    def test_one_of_two_waits_is_implied_by_the_other(self):
        found = outcomes(roles(WRITE + ARRIVE, wait("W1") + wait("W2") + READ))
        self.assertEqual(found["mbarrier.init", "delete"][0].caught, "race")
        self.assertEqual(found["bar.sync", "delete"][0].caught, "race")
        (arrive,) = found["mbarrier.arrive", "delete"]
        self.assertEqual(arrive.caught, "deadlock")
        first, second = found["mbarrier.try_wait", "delete"]
        self.assertEqual((first.caught, second.caught), ("silent", "silent"))
        lines = [o.mutant.ins.line for o in (arrive, first, second)]
        self.assertIn(f"edge implied by line {lines[0]} -> line {lines[2]}", first.detail)
        self.assertIn(f"edge implied by line {lines[0]} -> line {lines[1]}", second.detail)

    def test_nobody_waits_for_an_arrival(self):
        found = outcomes(roles(WRITE + ARRIVE, ""))
        (arrive,) = found["mbarrier.arrive", "delete"]
        self.assertEqual(arrive.caught, "silent")
        self.assertIn("nobody waits for the phase of its 1 arrivals", arrive.detail)

    def test_a_wait_for_a_phase_that_was_over_orders_nothing(self):
        found = outcomes(roles(wait("W", parity=1) + WRITE + ARRIVE, wait("V") + READ))
        empty, full = sorted(
            found["mbarrier.try_wait", "delete"], key=lambda o: o.mutant.ins.operands[2].value
        )[::-1]
        self.assertEqual((empty.caught, full.caught), ("silent", "race"))
        self.assertIn("its phase is over from the start", empty.detail)

    def test_a_pair_that_never_conflicts(self):
        load = "ld.global.b32 %r5, [%a];\n"
        found = outcomes(roles(load + ARRIVE, wait("W") + load), {"a": lanes()})
        (only,) = found["mbarrier.try_wait", "delete"]
        self.assertEqual(only.caught, "silent")
        self.assertIn("nothing that it tells is needed by a conflicting access", only.detail)

    def test_a_second_proxy_fence_is_implied_by_the_first(self):
        copy = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [%r4], 128;"
        body = f"""{WARPS}
            @!%p0 bra END;
            add.s32 %r4, %r3, 128;
            add.s32 %r6, %r4, %r1;
            st.shared.b32 [%r6], %r0;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            fence.proxy.async.shared::cta;
            {copy}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        END:"""
        found = outcomes(body, {"a": lanes()})
        fences = found["fence.proxy", "delete"]
        self.assertEqual([o.caught for o in fences], ["silent", "silent"])
        for fence, other in zip(fences, fences[::-1], strict=True):
            self.assertIn(f"edge implied by line {other.mutant.ins.line}", fence.detail)
        self.assertEqual(found["cp.async", "delete"][0].caught, "fault")  # commit_group
        self.assertEqual(found["cp.async", "weaken"][0].caught, "fault")  # wait_group 1


class WeakeningTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_wait_group_is_weakened_by_a_group(self, redundant):
        copy = "cp.async.ca.shared.global [%r4+{}], [%d1], 4;\ncp.async.commit_group;\n"
        body = f"""{WARPS}
            add.s32 %r4, %r3, %r1;
            add.s64 %d1, %a, 0;
            {copy.format(0)}{copy.format(512)}
            cp.async.wait_group 1;
            {"cp.async.wait_all;" if redundant else ""}
            ld.shared.b32 %r5, [%r4];
            cp.async.wait_all;"""
        found = outcomes(body, {"a": lanes()})
        weak = found["cp.async", "weaken"][0]
        self.assertEqual(weak.mutant.value, 2)
        self.assertEqual(weak.caught, "silent" if redundant else "race")
        if redundant:
            everything = next(
                o for o in found["cp.async", "delete"] if "wait_all" in o.mutant.ins.opcode
            )
            self.assertIn(f"edge implied by line {everything.mutant.ins.line}", weak.detail)

    def test_counts(self):
        load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        fill = f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
            @%p1 {load} [%r3+128], [%a], 128, [%r3];\n"""
        found = outcomes(
            roles(fill + wait("V"), wait("W") + READ.replace("64", "128"), 1), {"a": lanes()}
        )
        self.assertEqual(found["mbarrier.arrive", "weaken"][0].mutant.value, 64)
        self.assertEqual(found["mbarrier.arrive", "weaken"][0].caught, "deadlock")
        self.assertEqual(found["mbarrier.init", "weaken"][0].mutant.value, 2)
        self.assertEqual(found["mbarrier.init", "weaken"][0].caught, "deadlock")

    @parameterized.parameters((1, 2), (2, 1))
    def test_a_count_that_nobody_waits_for(self, count, value):
        """The only wait is for the phase before the first one, which is over from the start."""
        body = roles(wait("W", parity=1) + f"@%p1 {ARRIVE}" * count, "", count)
        (weak,) = outcomes(body)["mbarrier.init", "weaken"]
        self.assertEqual((weak.mutant.value, weak.caught), (value, "silent"), weak.detail)
        self.assertIn("nobody waits for a phase that its barrier counts", weak.detail)

    def test_a_silent_mutant_without_proof_is_missed(self):
        """One arrival less is not noticed here, because nothing lies between the three."""
        arrivals = f"bar.warp.sync 0xffffffff;\n@%p1 {ARRIVE}@%p1 {ARRIVE}@%p1 {ARRIVE}"
        found = outcomes(roles(WRITE + arrivals, wait("W") + READ, 3))
        (weak,) = found["mbarrier.init", "weaken"]
        self.assertEqual((weak.mutant.value, weak.caught, weak.missed), (2, "missed", True))
        self.assertIn("no proof", weak.detail)


class WgmmaTest(parameterized.TestCase):
    def deletions(self, registers: bool, twice: bool) -> dict[str, list[mutation.Outcome]]:
        """Outcomes by opcode, of a product whose fence stands there once or twice."""
        a, b = np.ones((64, 16), np.float16), np.ones((8, 16), np.float16)
        body, arrays, shared = gemm(a, b, "f16")
        body = body.replace(FENCE, FENCE * (1 + twice))
        program = Program(text(body, arrays, shared, target="sm_90a"))
        launch = Launch("test", (1, 1, 1), (128, 1, 1), [Pointer(name) for name in arrays])
        settings = Settings(observers="none", step_limit=5000)
        graph, code = Graph(), program.code("test")
        _, report = run(program, launch, arrays, settings, [graph, WarpgroupRegisters()])
        self.assertEqual(str(report), "clean")

        def attempt(changed):
            observers = [Races(), *([WarpgroupRegisters()] if registers else [])]
            return run(program, launch, arrays, settings, observers, {"test": changed})[1], ""

        chosen = [m for m in mutation.mutants(code) if m.change == "delete"]
        chosen = [m for m in chosen if m.ins.opcode.startswith("wgmma.")]
        found: dict[str, list[mutation.Outcome]] = {}
        for outcome in mutation.survey(code, attempt, Prover(graph), chosen, registers):
            found.setdefault(outcome.mutant.ins.opcode.split(".")[1], []).append(outcome)
        return found

    def test_order_of_registers_is_noticed(self):
        found = self.deletions(registers=True, twice=False)
        caught = {name: [o.caught for o in some] for name, some in found.items()}
        self.assertEqual(
            caught, {"fence": ["lint"], "commit_group": ["race"], "wait_group": ["race"]}
        )

    def test_order_of_registers_is_not_proven_where_nobody_watches_them(self):
        (fence,) = self.deletions(registers=False, twice=False)["fence"]
        self.assertTrue(fence.missed, fence.detail)
        self.assertIn("nobody watched", fence.detail)

    def test_one_of_two_fences_is_redundant(self):
        fences = self.deletions(registers=True, twice=True)["fence"]
        self.assertEqual([o.caught for o in fences], ["silent", "silent"])
        self.assertIn("touched since the fence before it", fences[1].detail)


class MoveTest(absltest.TestCase):
    def over(self, outcome: mutation.Outcome) -> str:
        assert outcome.mutant.over is not None
        return outcome.mutant.over.opcode

    def test_over_an_access(self):
        """A wait that comes after the read it guards is noticed, an arrival after a read is not."""
        found = outcomes(roles(WRITE + ARRIVE + READ, "bar.warp.sync 0xffffffff;" + wait("W")))
        (arrive,) = found["mbarrier.arrive", "move"]
        self.assertStartsWith(self.over(arrive), "ld.shared")
        self.assertEqual(arrive.caught, "silent")
        body = roles(f"{WRITE}bar.sync 1, 64;\n", f"bar.sync 1, 64;\n{READ}")
        moved = [o for o in outcomes(body)["bar.sync", "move"] if "1, 64" in o.mutant.ins.text]
        self.assertEqual([o.caught for o in moved], ["race"])
        self.assertStartsWith(self.over(moved[0]), "ld.shared")

    def test_over_a_wait_that_needs_it(self):
        body = roles("bar.arrive 1, 64;\nbar.sync 2, 64;\n", "bar.sync 1, 64;\nbar.arrive 2, 64;\n")
        found = outcomes(body)
        (arrive,) = found["bar.arrive", "move"]
        self.assertEqual(arrive.caught, "deadlock")

    def test_not_over_what_uses_its_result(self):
        """try_wait stays before the branch on its predicate."""
        found = outcomes(roles(WRITE + ARRIVE, wait("W") + READ))
        self.assertNotIn(("mbarrier.try_wait", "move"), found)


if __name__ == "__main__":
    absltest.main()
