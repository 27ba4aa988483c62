"""CTAs in several processes give the arrays and the report of one process, or run in one."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from harness import SCHEDULES, THREAD, execute, lanes, text

from jax_dsa.emulator import Launch, LaunchError, Pointer, Program, Settings, parallel, run

CTA = f"""{THREAD}
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r4, %r3, 64, %r0;
    mul.wide.u32 %d1, %r4, 4;
    add.s64 %d2, %a, %d1;
"""
OWN = f"""{CTA}
    ld.global.u32 %r5, [%d2];
    add.u32 %r5, %r5, %r3;
    st.shared.u32 [smem + 4], %r5;
    add.s64 %d3, %b, %d1;
    st.global.u32 [%d3], %r5;
"""
SUM = f"""{CTA}
    ld.global.f32 %f1, [%d2];
    add.s64 %d3, %b, %d0;
    red.global.add.f32 [%d3], %f1;
"""
FOLLOWED = f"""{CTA}
    st.global.u32 [%d2], %r3;
    sub.u32 %r6, %r3, 1;
    max.s32 %r6, %r6, 0;
    mad.lo.u32 %r6, %r6, 64, %r0;
    mul.wide.u32 %d3, %r6, 4;
    add.s64 %d3, %a, %d3;
    ld.global.u32 %r5, [%d3];
"""
SAME = f"""{CTA}
    add.s64 %d3, %b, %d0;
    st.global.u32 [%d3], %r3;
"""


def both(body, arrays, grid=5, threads=64, **settings):
    """(arrays, report) of one process and of two."""
    found = []
    for processes in (1, 2):
        found.append(execute(body, arrays, 1024, threads, grid, processes=processes, **settings))
    return found


class ProcessesTest(parameterized.TestCase):
    def assert_same(self, one, two):
        for name, array in one[0].items():
            np.testing.assert_array_equal(two[0][name].view(np.uint32), array.view(np.uint32))
        self.assertEqual(repr(dataclasses.asdict(two[1])), repr(dataclasses.asdict(one[1])))

    @parameterized.product(body=(OWN, SUM), schedule=tuple(SCHEDULES))
    def test_two_processes_give_what_one_gives(self, body, schedule):
        """Races in shared memory (two warps write the same word) are in the report of OWN."""
        rng = np.random.default_rng(0)
        arrays = {
            "a": rng.standard_normal(320).astype(np.float32),
            "b": np.arange(320, dtype=np.float32),
        }
        self.enterContext(Merged(self, 1))
        one, two = both(body, arrays, outputs=("b",) * (body is OWN), schedule=SCHEDULES[schedule])
        self.assertEqual(len(one[1].races), int(body is OWN))
        self.assert_same(one, two)

    @parameterized.parameters(FOLLOWED, SAME)
    def test_races_between_ctas_are_found(self, body):
        self.enterContext(Merged(self, 0))
        one, two = both(body, {"a": lanes(count=320), "b": lanes(count=320)}, threads=32)
        self.assertNotEmpty(two[1].races)
        self.assert_same(one, two)

    def test_what_one_launch_wrote_is_written_for_the_next(self):
        body = (
            f"{CTA}\n add.s64 %d3, %b, %d1;\n ld.global.u32 %r5, [%d3];\n st.global.u32 [%d2], %r5;"
        )
        module = text(OWN, ("a", "b"), 1024) + text(body, ("a", "b"), 1024).split(
            ".address_size 64"
        )[1].replace(" test(", " after(")
        program = Program(module)
        pointers = [Pointer("a"), Pointer("b")]
        launches = [Launch(k, (4, 1, 1), (32, 1, 1), pointers) for k in ("test", "after")]
        arrays = {"a": lanes(count=256), "b": lanes(count=256)}
        outputs = frozenset({"b"})
        one, two = (
            run(program, launches, arrays, Settings(processes=n, outputs=outputs)) for n in (1, 2)
        )
        self.assertEqual(two[1].faults, ())
        self.assert_same(one, two)

    @parameterized.parameters(
        ("atom.global.add.u32 %r5, [%d2], 1;\n st.global.u32 [%d2], %r5;", "atom"),
        ("ld.acquire.gpu.global.u32 %r5, [%d2];", "acquire"),
        ("fence.acq_rel.gpu;", "fence"),
        ("", ""),
        ("atom.global.add.u32 %r5, [%d2], 1;", ""),
    )
    def test_kernels_that_can_learn_of_other_ctas_run_in_one_process(self, body, reason):
        program = Program(text(CTA + body, ("a", "b")))
        launch = Launch("test", (4, 1, 1), (32, 1, 1), [Pointer("a"), Pointer("b")])
        found = parallel.reason_against(program.code("test"), launch, (), Settings(processes=2))
        self.assertIn(reason, found)
        self.assertEqual(bool(found), bool(reason))

    def test_fewer_than_one_process_is_refused(self):
        with self.assertRaisesRegex(LaunchError, "processes is 0; wanted 1 or more"):
            execute(CTA, {"a": lanes()}, processes=0)

    def test_ctas_in_flight_together_run_in_one_process(self):
        program = Program(text(CTA, ("a",)))
        launch = Launch("test", (4, 1, 1), (32, 1, 1), [Pointer("a")])
        settings = Settings(processes=2, concurrent_ctas=0)
        found = parallel.reason_against(program.code("test"), launch, (), settings)
        self.assertIn("in flight", found)


class Merged:
    """Checks how many launches the processes' results were merged for."""

    def __init__(self, test, wanted: int):
        self.test, self.wanted, self.count = test, wanted, 0

    def __enter__(self):
        self.merge = parallel._merge
        parallel._merge = self._count

    def _count(self, *arguments):
        self.count += 1
        return self.merge(*arguments)

    def __exit__(self, *error):
        parallel._merge = self.merge
        self.test.assertEqual(self.count, self.wanted)


if __name__ == "__main__":
    absltest.main()
