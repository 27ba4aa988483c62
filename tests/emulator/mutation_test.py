"""Mutants of a small kernel: those that matter are caught, the redundant one carries a computed
proof.
"""

from absl.testing import absltest
from harness import THREAD, text

from jax_dsa.emulator import Launch, Program, Settings, mutation, run

# Warp 0 fills a word, warp 1 reads it; the second barrier and the second proxy fence order nothing
# new.
BODY = f"""{THREAD}
    mov.u32 %r3, smem;
    setp.eq.u32 %p0, %r2, 0;
    and.b32 %r9, %r0, 31;
    setp.eq.u32 %p1, %r9, 0;
    @%p0 bra FIRST;
    bra READY;
FIRST:
    @%p1 mbarrier.init.shared.b64 [%r3], 32;
READY:
    bar.sync 0;
    @%p0 bra WRITE;
W1:
    mbarrier.try_wait.parity.shared.b64 %p7, [%r3], 0;
    @!%p7 bra W1;
W2:
    mbarrier.try_wait.parity.shared.b64 %p7, [%r3], 0;
    @!%p7 bra W2;
    ld.shared.b32 %r5, [%r3+64];
    bra END;
WRITE:
    st.shared.b32 [%r3+64], 5;
    mbarrier.arrive.shared.b64 _, [%r3];
END:"""


class MutationTest(absltest.TestCase):
    def outcomes(self) -> list[mutation.Outcome]:
        program = Program(text(BODY, shared=128))
        launch = Launch("test", (1, 1, 1), (64, 1, 1), [])

        def execute(changed, witness):
            settings = Settings(observers="none", step_limit=5000)
            return run(program, launch, {}, settings, [witness], {"test": changed})[1], ""

        return list(mutation.survey(program.code("test"), execute))

    def test_each_element(self):
        outcomes = self.outcomes()
        self.assertEqual(
            [o.mutant.ins.opcode.split(".")[1] for o in outcomes],
            ["init", "sync", "try_wait", "try_wait", "arrive"],
        )
        init, sync, first, second, arrive = outcomes
        self.assertEqual(init.caught, "race")
        self.assertEqual(sync.caught, "race")
        self.assertEqual(arrive.caught, "deadlock")
        self.assertEqual((first.caught, second.caught), ("silent", "silent"))
        self.assertIn(f"learned at line {second.mutant.ins.line}", first.detail)
        self.assertIn("known already when it is reached", second.detail)
        self.assertIn("stay ordered", first.detail)


if __name__ == "__main__":
    absltest.main()
