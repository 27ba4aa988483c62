"""Synchronisation of threads: named barriers, mbarriers, fences (PTX ISA 9.7.13)."""

from __future__ import annotations

import numpy as np

from jax_dsa.emulator.barriers import Mbarrier
from jax_dsa.emulator.events import WRITE
from jax_dsa.emulator.isa.addressing import (
    Place,
    distinct,
    lane_numbers,
    shared_addresses,
    told,
    uniform,
)
from jax_dsa.emulator.isa.table import effect

SHARED = "{|.shared|.shared::cta}"
ORDER = "{|.release.cta|.release.cluster|.relaxed.cta|.relaxed.cluster}"


# -- named barriers (9.7.13.1)
# ------------------------------------------------------------------------
def _bind_named(asm, ins, waits: bool, aligned: bool):
    number = asm.source(ins.operands[0], "u32")
    threads = asm.source(ins.operands[1], "u32") if len(ins.operands) > 1 else None

    def run(group, active):
        machine, cta = group.machine, group.cta
        count = cta.threads if threads is None else uniform(group, active, threads)
        if aligned and not (active | group.warp.exited).all():
            machine.fault(
                "barrier",
                group,
                ins,
                f"only lanes {_lanes(active)} reach this .aligned barrier together",
            )
        barrier = cta.named_barrier(uniform(group, active, number))
        arriving = 32 if aligned else int(active.sum())
        complete = barrier.arrive(group, ins, arriving, count, waits)
        if waits and not complete:
            return machine.wait(group, f"waits on {barrier}", barrier)

    return run


def _lanes(active) -> str:
    return ",".join(map(str, np.flatnonzero(active)))


@effect("bar{|.cta}.sync", "barrier{|.cta}.sync.aligned")
def bar_sync(asm, ins, parts):
    """Whole warps arrive and wait until the barrier's count of threads has arrived."""
    return _bind_named(asm, ins, waits=True, aligned=True)


@effect("bar{|.cta}.arrive", "barrier{|.cta}.arrive.aligned")
def bar_arrive(asm, ins, parts):
    """Whole warps arrive and go on."""
    return _bind_named(asm, ins, waits=False, aligned=True)


@effect("barrier{|.cta}.sync")
def barrier_sync(asm, ins, parts):
    """As bar.sync; lanes need not arrive together."""
    return _bind_named(asm, ins, waits=True, aligned=False)


@effect("barrier{|.cta}.arrive")
def barrier_arrive(asm, ins, parts):
    """As bar.arrive; lanes need not arrive together."""
    return _bind_named(asm, ins, waits=False, aligned=False)


# -- mbarrier (9.7.13.15)
# -----------------------------------------------------------------------------
def find(group, address: int, agent, ins) -> Mbarrier | None:
    """The mbarrier at a shared address, or None after a report."""
    barrier = group.cta.mbarriers.get(address)
    if barrier is None:
        group.machine.fault(
            "barrier", agent, ins, f"no mbarrier was initialised at shared byte {address}"
        )
    elif group.machine.on.use:
        group.machine.on.use(agent, barrier, ins)
    return barrier


def _words(group, active, base: int, offset: int) -> np.ndarray:
    return shared_addresses(group, lane_numbers(group, active), base, offset)


@effect(f"mbarrier.init{SHARED}.b64")
def mbarrier_init(asm, ins, parts):
    """Makes an mbarrier that expects ``count`` arrivals per phase (9.7.13.15.9); a write to its
    eight bytes.
    """
    base, offset = asm.address(ins.operands[0])
    count = asm.source(ins.operands[1], "u32")

    def run(group, active):
        address, cta = int(_words(group, active, base, offset)[0]), group.cta
        if address % 8:
            group.machine.fault(
                "misaligned", group, ins, f"mbarrier at shared byte {address}: not a multiple of 8"
            )
        if cta.shared.locate(address, address + 8) is None:
            group.machine.fault(
                "out of bounds", group, ins, f"mbarrier at shared byte {address:#x}"
            )
            return
        cta.mbarriers[address] = Mbarrier(
            group.machine, cta, address, uniform(group, active, count)
        )
        told(group, ins, Place(cta.shared, np.array([address]), np.array([0])), 8, WRITE)

    return run


@effect(f"mbarrier.inval{SHARED}.b64")
def mbarrier_inval(asm, ins, parts):
    """Ends the life of an mbarrier (9.7.13.15.10)."""
    base, offset = asm.address(ins.operands[0])

    def run(group, active):
        address = int(_words(group, active, base, offset)[0])
        if find(group, address, group, ins) is not None:
            del group.cta.mbarriers[address]
            told(group, ins, Place(group.cta.shared, np.array([address]), np.array([0])), 8, WRITE)

    return run


def _bind_arrive(asm, ins, parts, expects: bool, drop: bool):
    operands = list(ins.operands)
    has_state = len(operands) > 1 and not hasattr(operands[0], "base")
    state = operands.pop(0) if has_state else None
    d = asm.destination(state, "b64") if state is not None else None
    base, offset = asm.address(operands[0])
    extra = asm.source(operands[1], "u32") if len(operands) > 1 else None
    edge = "relaxed" not in parts

    def run(group, active):
        argument = 1 if extra is None else uniform(group, active, extra)
        for address, lanes in distinct(_words(group, active, base, offset)):
            barrier = find(group, address, group, ins)
            if barrier is None:
                continue
            if expects:
                barrier.expect(argument * lanes)
            phase = barrier.arrive(group, ins, lanes * (1 if expects else argument), drop, edge)
            if d is not None:
                group.R[d][active] = phase

    return run


ARRIVE = ORDER + "{|.shared|.shared::cta|.shared::cluster}.b64"


@effect(f"mbarrier.arrive{ARRIVE}")
def mbarrier_arrive(asm, ins, parts):
    """Each thread arrives ``count`` times; the state returned is the phase (9.7.13.15.13)."""
    return _bind_arrive(asm, ins, parts, expects=False, drop=False)


@effect(f"mbarrier.arrive.expect_tx{ARRIVE}")
def mbarrier_arrive_expect_tx(asm, ins, parts):
    """Raises the transaction count, then arrives once (9.7.13.15.13)."""
    return _bind_arrive(asm, ins, parts, expects=True, drop=False)


@effect(f"mbarrier.arrive_drop{ARRIVE}")
def mbarrier_arrive_drop(asm, ins, parts):
    """Arrives and takes itself out of later phases (9.7.13.15.14)."""
    return _bind_arrive(asm, ins, parts, expects=False, drop=True)


def _bind_transactions(asm, ins, apply):
    base, offset = asm.address(ins.operands[0])
    count = asm.source(ins.operands[1], "u32")

    def run(group, active):
        for address, lanes in distinct(_words(group, active, base, offset)):
            barrier = find(group, address, group, ins)
            if barrier is not None:
                apply(group, barrier, lanes * uniform(group, active, count))

    return run


TX = "{|.relaxed.cta|.relaxed.cluster}{|.shared|.shared::cta|.shared::cluster}.b64"


@effect(f"mbarrier.expect_tx{TX}")
def mbarrier_expect_tx(asm, ins, parts):
    """Raises the transaction count of the current phase (9.7.13.15.11)."""
    return _bind_transactions(asm, ins, lambda group, barrier, count: barrier.expect(count))


@effect(f"mbarrier.complete_tx{TX}")
def mbarrier_complete_tx(asm, ins, parts):
    """Lowers the transaction count as an asynchronous copy would (9.7.13.15.12)."""
    return _bind_transactions(
        asm, ins, lambda group, barrier, count: barrier.complete(group, ins, count)
    )


def _passed(barrier: Mbarrier, argument: int, parity: bool) -> bool:
    return barrier.passed(argument) if parity else barrier.phase > argument


def _bind_wait(asm, ins, parts, may_suspend: bool):
    d = asm.destination(ins.operands[0], "pred")
    base, offset = asm.address(ins.operands[1])
    parity, edge = "parity" in parts, "relaxed" not in parts
    argument = asm.source(ins.operands[2], "u32" if parity else "u64")

    def run(group, active):
        lanes = lane_numbers(group, active)
        words, arguments = shared_addresses(group, lanes, base, offset), group.R[argument][lanes]
        results = np.zeros(lanes.size, bool)
        for (address, wanted), members in _pairs(words, arguments):
            barrier = find(group, address, group, ins)
            if barrier is None:
                results[members] = True  # reported; a loop on it would never end
                continue
            results[members] = _passed(barrier, wanted, parity)
            if results[members].any():
                if edge and group.machine.on.observe:
                    group.machine.on.observe(
                        group, barrier, barrier.phase - 1 if parity else wanted, ins
                    )
            elif may_suspend and not _gives_up(group):
                return _suspend(group, barrier, wanted)
        group.fail = False
        group.R[d][lanes] = results

    return run


def _pairs(words: np.ndarray, arguments: np.ndarray):
    """((address, argument), lanes) for each different pair; usually one."""
    if (words == words[0]).all() and (arguments == arguments[0]).all():
        return [((int(words[0]), int(arguments[0])), slice(None))]
    keys = list(zip(words.tolist(), arguments.tolist(), strict=True))
    return [(key, np.array([k == key for k in keys])) for key in dict.fromkeys(keys)]


def _gives_up(group) -> bool:
    """try_wait may return False before the phase ends: when the schedule says so, or when nobody
    can move.
    """
    return group.fail or group.machine.scheduler.spurious()


def _suspend(group, barrier: Mbarrier, wanted: int):
    barrier.waiters.append(group)
    group.machine.spinning[id(group)] = group
    return group.machine.wait(
        group, f"waits on {barrier} for parity or state {wanted}: {barrier.state()}", barrier
    )


ACQUIRE = "{|.acquire.cta|.acquire.cluster|.relaxed.cta|.relaxed.cluster}"
WAITS = "{|.parity}" + ACQUIRE + "{|.shared|.shared::cta}.b64"


@effect(f"mbarrier.try_wait{WAITS}")
def mbarrier_try_wait(asm, ins, parts):
    """True when the phase is complete; may suspend the thread, and may fail at any time
    (9.7.13.15.16).
    """
    return _bind_wait(asm, ins, parts, may_suspend=True)


@effect(f"mbarrier.test_wait{WAITS}")
def mbarrier_test_wait(asm, ins, parts):
    """True when the phase is complete; never waits (9.7.13.15.16)."""
    return _bind_wait(asm, ins, parts, may_suspend=False)


# -- fences (9.7.13.4)
# --------------------------------------------------------------------------------
def _bind_fence(kind: str):
    def run_for(ins):
        def run(group, active):
            if group.machine.on.fence:
                group.machine.on.fence(group, kind, ins)

        return run

    return run_for


@effect("fence.proxy.async{|.global|.shared::cta|.shared::cluster}")
def fence_proxy_async(asm, ins, parts):
    """Orders earlier generic accesses before later ones of the asynchronous proxy, in one or all
    spaces.
    """
    space = parts[3].split("::")[0] if len(parts) > 3 else "all"
    return _bind_fence(f"proxy.async.{space}")(ins)


@effect("fence{|.sc|.acq_rel|.acquire|.release}.{cta|cluster|gpu|sys}", "membar.{cta|gl|sys}")
def fence_memory(asm, ins, parts):
    """Makes relaxed atomics around it release and acquire."""
    tell = _bind_fence("memory")(ins)

    def run(group, active):
        group.machine.memory.fenced = True
        tell(group, active)

    return run


@effect("fence.mbarrier_init.release.cluster")
def fence_mbarrier_init(asm, ins, parts):
    """Makes mbarrier.init visible to the cluster; within one CTA the barrier that follows does
    that.
    """
    return lambda group, active: None
