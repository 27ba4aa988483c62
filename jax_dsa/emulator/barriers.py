"""The two kinds of barriers: mbarrier objects in shared memory and the CTA's sixteen named
barriers.
"""

from __future__ import annotations


class Mbarrier:
    """An mbarrier (PTX ISA 9.7.13.15): a phase ends when no arrival and no transaction byte is
    pending.
    """

    def __init__(self, machine, cta, address: int, count: int):
        self.machine, self.cta, self.address = machine, cta, address
        self.expected = self.pending = count
        self.transactions = 0
        self.phase = 0
        self.waiters: list = []

    def __str__(self) -> str:
        return f"mbarrier at shared byte {self.address} of CTA {self.cta}"

    def state(self) -> str:
        return (
            f"phase {self.phase}, {self.pending} of {self.expected} arrivals and"
            f" {self.transactions} bytes pending"
        )

    def arrive(self, agent, ins, count: int = 1, drop: bool = False, edge: bool = True) -> int:
        """``count`` arrivals on the current phase; returns the phase they count for."""
        phase = self.phase
        if edge and self.machine.on.arrive:
            self.machine.on.arrive(agent, self, phase, ins)
        if count > self.pending:
            self.machine.fault(
                "barrier",
                agent,
                ins,
                f"{count} arrivals on {self}, which waits for {self.pending}: {self.state()}",
            )
            count = self.pending
        self.pending -= count
        if drop:
            self.expected -= count
        self._settle()
        return phase

    def expect(self, count: int) -> None:
        self.transactions += count

    def complete(self, agent, ins, count: int) -> None:
        """``count`` bytes of asynchronous work of the current phase are done."""
        if self.machine.on.arrive:
            self.machine.on.arrive(agent, self, self.phase, ins)
        self.transactions -= count
        self._settle()

    def _settle(self) -> None:
        self.machine.progress += 1
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.expected
        waiters, self.waiters = self.waiters, []
        for group in waiters:
            self.machine.wake(group, self)

    def passed(self, parity: int) -> bool:
        """True when the phase of this parity is complete: the current one has the other."""
        return self.phase & 1 != parity & 1


class NamedBarrier:
    """One of the CTA's barriers (PTX ISA 9.7.13.1): threads arrive, those that sync wait; it resets
    at the count.
    """

    def __init__(self, machine, cta, number: int):
        self.machine, self.cta, self.number = machine, cta, number
        self.count: int | None = None
        self.arrived = 0
        self.generation = 0
        self.waiting: list = []
        self.members: list = []

    def __str__(self) -> str:
        return f"named barrier {self.number} of CTA {self.cta}"

    def state(self) -> str:
        return f"generation {self.generation}, {self.arrived} of {self.count} threads arrived"

    def arrive(self, group, ins, threads: int, count: int, waits: bool) -> bool:
        """Registers ``threads`` arrivals; True when they complete the barrier."""
        machine = self.machine
        if self.count not in (None, count):
            machine.fault(
                "barrier", group, ins,
                f"{self} is used with {count} threads while its current generation counts"
                f" {self.count}: two"
                " protocols share one barrier id",
            )  # fmt: skip
        if any(w is group.warp for w in self.members):
            machine.fault(
                "barrier", group, ins, f"{group} arrives twice on one generation of {self}"
            )
        self.count = count
        machine.progress += 1
        if machine.on.arrive:
            machine.on.arrive(group, self, self.generation, ins)
        self.arrived += threads
        self.members.append(group.warp)
        if waits:
            self.waiting.append((group, ins))
        if self.arrived > count:
            machine.fault(
                "barrier",
                group,
                ins,
                f"{self.arrived} threads arrived on {self}, which counts {count}",
            )
        if self.arrived < count:
            return False
        self._release()
        return True

    def _release(self) -> None:
        machine, generation = self.machine, self.generation
        waiting, self.waiting, self.members = self.waiting, [], []
        self.arrived, self.count = 0, None
        self.generation += 1
        for group, ins in waiting:
            if machine.on.observe:
                machine.on.observe(group, self, generation, ins)
            if machine.on.synchronise:
                machine.on.synchronise(group, ins)
            machine.wake(group, self, past=True)


class Flag:
    """A global or shared word that atomics with release and acquire order; ``scope`` names who
    takes part.
    """

    def __init__(self, address: int, scope: str):
        self.address, self.scope = address, scope

    def __str__(self) -> str:
        return f"flag at address {self.address:#x} ({self.scope} scope)"


class RegisterPool:
    """Registers that setmaxnreg moves between the warps of a CTA (PTX ISA 9.7.19.5).

    ``registers`` per thread at launch; None: not known, every request is granted.
    """

    def __init__(self, registers: int | None, warps: int):
        self.held = {w: registers or 0 for w in range(warps)}
        self.known = registers is not None
        self.free = 0
        self.waiting: list = []

    def request(self, warp: int, count: int) -> bool:
        """Gives warp ``count`` registers per thread if the pool has them."""
        more = count - self.held[warp]
        if self.known and more > self.free:
            return False
        self.free -= more
        self.held[warp] = count
        return True
