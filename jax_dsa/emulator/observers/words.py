"""Sentences of reports: which edge is missing between two accesses."""

from __future__ import annotations

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.observers.clocks import ORDER, Clock
from jax_dsa.emulator.observers.shadow import Conflict

_COMPLETION = {
    "tcgen05.ld": "tcgen05.wait::ld",
    "tcgen05.st": "tcgen05.wait::st",
    "tcgen05": "a tcgen05.commit and a wait on its mbarrier",
    "cp.async": "cp.async.wait_group or cp.async.mbarrier.arrive and a wait",
    "wgmma": "wgmma.commit_group and wgmma.wait_group",
    "bulk": "cp.async.bulk.wait_group",
    "bulk.load": "a wait on its mbarrier",
}
_PROXY = (
    "A barrier orders them, but the first goes through the generic proxy and the second"
    " through the asynchronous"
    " proxy: fence.proxy.async is missing between the first and that barrier, or before the second."
)


def missing_edge(conflict: Conflict, first, second, clock: Clock, issued, row: int) -> str:
    """What would order the two: a fence, the completion of asynchronous work, or any barrier at
    all.

    Args:
      conflict: the earlier access; first, second: the agents; clock: what the second one relies on.
      issued: (component, tick) of the first one's issuer at its issue, when it is asynchronous.
      row: the clock row that the second one was checked against.
    """
    if row != ORDER and clock.get(conflict.component) >= conflict.tick:
        return _PROXY
    text = _forward(first, second, clock, issued)
    if isinstance(second, Op):
        text += (
            f" (If the second was meant to come first: nothing waits for its completion,"
            f" {_completion(second)}.)"
        )
    return text


def _forward(first, second, clock: Clock, issued) -> str:
    if isinstance(first, Op):
        own = first.family != "wgmma" or _name(first) == _name(second)  # only its warp can wait
        if own and clock.get(issued[0]) >= issued[1] > 0:
            return (
                f"The first was issued before the second, but may still be running:"
                f" {_completion(first)} is missing"
                " in between."
            )
        return (
            f"Nothing leads from the completion of the first ({_completion(first)} by"
            f" {_name(first)}) to"
            f" {_what(second)}: a barrier is missing on which {_name(first)} arrives after it"
            f" and {_name(second)} waits."
        )
    if _name(first) == _name(second):
        return (
            "Lanes of one warp that run apart, or asynchronous work of the same warp: nothing"
            " orders them."
        )
    return (
        f"Nothing leads from {_name(first)} to {_what(second)}: a barrier is missing on which"
        f" {_name(first)} arrives"
        f" after the first and {_name(second)} waits before the second."
    )


def _completion(op: Op) -> str:
    return _COMPLETION.get(op.family, "its completion")


def _name(agent) -> str:
    return str(getattr(agent, "group", agent))


def _what(agent) -> str:
    return (
        f"the issue of the second by {_name(agent)}"
        if isinstance(agent, Op)
        else f"the second by {_name(agent)}"
    )
