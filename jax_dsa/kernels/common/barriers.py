"""mbarriers and fences, by what they order."""

import cutlass.cute as cute


@cute.jit
def start(pointer, counts) -> None:
    """Initialises barrier i with ``counts[i]`` expected arrivals; by one warp, before the CTA's
    first synchronisation, which the caller does.
    """
    with cute.arch.elect_one():
        for index, count in enumerate(counts):
            cute.arch.mbarrier_init(pointer + int(index), count)
    cute.arch.mbarrier_init_fence()


def wait(pointer, phase) -> None:
    """Waits for the phase of this parity to complete; acquires what its arrivals released."""
    cute.arch.mbarrier_wait(pointer, phase)


@cute.jit
def arrive_warp(pointer, lane) -> None:
    """One arrival for the whole warp: releases what every lane did before it.

    The warp-level synchronisation carries the other lanes' accesses; without it the one lane's
    arrival publishes its own only.
    """
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(pointer)


def arrive_copies(pointer) -> None:
    """An arrival of this thread that happens once all its cp.async so far have written.

    It releases those copies, not the thread's ordinary stores.
    """
    cute.arch.cp_async_mbarrier_arrive_noinc(pointer)


def before_async_reads() -> None:
    """Orders the shared-memory writes that this thread has observed (its own, or others' through
    a barrier: cp.async writes count as ordinary ones) before its later wgmma and bulk copies.
    """
    cute.arch.fence_proxy("async.shared", space="cta")


def stage_and_parity(step, stages: int) -> tuple:
    """Buffer and barrier parity of use number ``step`` of a ring of ``stages`` buffers."""
    return step % stages, (step // stages) & 1
