"""Instructions that steer a warp without touching memory (PTX ISA 9.7.12, 9.7.19)."""

from jax_dsa.emulator.isa.table import effect


@effect("setmaxnreg.{inc|dec}.sync.aligned.u32")
def setmaxnreg(asm, ins, parts):
    """Gives registers to or takes them from the CTA's pool (9.7.19.5); ``inc`` waits until the pool
    has enough.
    """
    count = ins.operands[0].value

    def run(group, active):
        pool = group.cta.registers
        if not pool.request(group.warp.index, count):
            pool.waiting.append(group)
            return group.machine.wait(group, f"waits for {count} registers per thread", pool)
        for waiting in pool.waiting:
            group.machine.wake(waiting, pool)
        pool.waiting.clear()

    return run


@effect("nanosleep.u32", "griddepcontrol.{wait|launch_dependents}")
def nothing(asm, ins, parts):
    """Timing only: launches run in stream order (9.7.13.20, 9.7.13.14)."""
    return lambda group, active: None
