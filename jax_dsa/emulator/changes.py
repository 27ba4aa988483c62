"""What a mutant does to the happens-before graph of the program it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jax_dsa.emulator.barriers import NamedBarrier
from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.observers.clocks import ORDER, ROWS
from jax_dsa.emulator.observers.graph import PROGRAM, Edge, Uses
from jax_dsa.emulator.proof import Change, Prover
from jax_dsa.emulator.ptx.syntax import Instruction


def delete(prover: Prover, ins: Instruction) -> Change:
    """The instruction is not there: the edges that it makes, its arrivals, its waits, its fence."""
    change = Change()
    _drop(prover, change, prover.by[ins.pc], lambda edge: edge.by == ins.pc)
    if ".commit_group" in ins.opcode:
        _regroup(prover, change, lambda edge: edge.slack - edge.closed.count(ins.pc), ins.pc)
    for n in prover.at[ins.pc]:
        if prover.graph.nodes[n].shows:
            change.hidden.add(n)
            for row, source in prover.graph.nodes[n].shows:
                _seed(change, n)[row] |= prover.known[source][n]
    for barrier, uses in prover.barriers.items():
        _without(prover, change, barrier, uses, ins.pc)
        if ins.opcode.startswith("mbarrier.init") and _concerns(prover, barrier, uses, ins.pc):
            change.refusal = f"{barrier} is used"
    return change


def weaken_group(prover: Prover, ins: Instruction) -> Change:
    """wait_group waits for one group less."""
    change = Change()
    waits = [n for n in prover.at[ins.pc] if not isinstance(prover.graph.nodes[n].agent, Op)]
    _drop(prover, change, waits, lambda edge: edge.by == ins.pc and edge.slack == 1)
    return change


def recount(prover: Prover, ins: Instruction) -> Change:
    """A barrier counts something else: nobody may wait for a phase that has to be counted, nor,
    before it begins, miss that it has not ended.
    """
    change = Change(idle="nobody waits for a phase that its barrier counts")
    for barrier, uses in prover.barriers.items():
        if not _concerns(prover, barrier, uses, ins.pc):
            continue
        _retire(change, uses, 0)
        first = [prover.known[ORDER][node] for node, _, _ in uses.arrivals.get(0, ())]
        for phase, _, token, pc in uses.waits:
            if phase >= 0 or not all(known >> token & 1 for known in first):
                text = f"line {prover.line(pc)} waits on {barrier}, which counts otherwise"
                change.refusal = text
    return change


def move(prover: Prover, ins: Instruction, over: Instruction) -> Change:
    """The instruction comes after ``over``, which follows it."""
    idle = f"line {over.line}, which it moves over, needs nothing that it tells"
    change = Change(swapped=True, idle=idle)
    following = _following(prover)
    found = False
    for first in prover.at[ins.pc]:
        if _predecessor(prover, first) == ins.pc:
            continue
        unit = _unit(prover, first, following)
        behind = next((n for n in following.get(unit[-1], ()) if _pc(prover, n) == over.pc), None)
        if behind is not None and not isinstance(prover.graph.nodes[first].agent, Op):
            found = True
            _swap(prover, change, unit, _unit(prover, behind, following), following)
    if not found:
        change.swapped = False
        change.idle = f"it moves over line {over.line}, which does nothing that others could notice"
    if ".commit_group" in ins.opcode:
        _drop(prover, change, prover.at[over.pc], lambda edge: edge.slack == 1)
    return change


# -- edges ----------------------------------------------------------------------------------------
def _seed(change: Change, n: int) -> list[int]:
    return change.seeds.setdefault(n, [0] * ROWS)


def _drop(prover: Prover, change: Change, nodes: Iterable[int], which: Callable) -> None:
    """Takes edges away and notes what they told."""
    for n in nodes:
        edges = change.edges.get(n, prover.edges[n])
        kept = [e for e in edges if not which(e)]
        for edge in edges:
            if which(edge):
                for row in range(ROWS):
                    _seed(change, n)[row] |= prover.known[row][edge.source]
        if len(kept) < len(edges):
            change.edges[n] = kept


def _regroup(prover: Prover, change: Change, slack: Callable[[Edge], int], pc: int) -> None:
    """A commit_group is missing: operations end up in younger groups."""
    waits = [n for n, edges in enumerate(prover.edges) if any(pc in e.closed for e in edges)]
    _drop(prover, change, waits, lambda e: e.slack > 0 and (not e.closed or slack(e) <= 0))


# -- barriers -------------------------------------------------------------------------------------
def _without(prover: Prover, change: Change, barrier, uses: Uses, pc: int) -> None:
    """Notes arrivals and waits that are gone, and whether a phase is left that cannot end."""
    waits = [w for w in uses.waits if w[3] == pc]
    mine = {p: [a for a in some if a[2] == pc] for p, some in uses.arrivals.items()}
    change.gone |= sum({1 << w[2] for w in waits} | {1 << a[1] for s in mine.values() for a in s})
    named = isinstance(barrier, NamedBarrier)
    short = [p for p, some in mine.items() if some and not (named and some == uses.arrivals[p])]
    if waits and not any(prover.edges[w[1]][1:] for w in waits):
        change.idle = f"each of the {len(waits)} times its phase is over from the start"
    if not short:
        return
    left = [w for w in uses.waits if w[0] >= min(short) and w[3] != pc]
    count = sum(len(some) for some in mine.values())
    change.idle = f"nobody waits for the phase of its {count} arrivals, or for a later one"
    if left:
        line = prover.line(left[0][3])
        change.refusal = f"line {line} waits for phase {left[0][0]} of {barrier}, which cannot end"
    _retire(change, uses, min(short))


def _retire(change: Change, uses: Uses, phase: int) -> None:
    """Nobody asks in which phase the arrivals from ``phase`` on count."""
    for number, arrivals in uses.arrivals.items():
        if number >= phase:
            change.gone |= sum(1 << a[1] for a in arrivals)


def _concerns(prover: Prover, barrier, uses: Uses, pc: int) -> bool:
    """Is it this instruction that initialises the barrier or arrives on it?"""
    if any(a[2] == pc for some in uses.arrivals.values() for a in some):
        return True
    if isinstance(barrier, NamedBarrier):
        return False
    token = prover.graph.inits.get((barrier.cta, barrier.address))
    return token is not None and _pc(prover, prover.graph.tokens[token]) == pc


# -- order of the program -------------------------------------------------------------------------
def _pc(prover: Prover, n: int) -> int:
    ins = prover.graph.nodes[n].ins
    return ins.pc if ins is not None else -1


def _following(prover: Prover) -> dict[int, list[int]]:
    """For each node those that come next in the order of the program."""
    found: dict[int, list[int]] = {}
    for n, edges in enumerate(prover.edges):
        if edges and edges[0].by == PROGRAM:
            found.setdefault(edges[0].source, []).append(n)
    return found


def _predecessor(prover: Prover, n: int) -> int:
    edges = prover.edges[n]
    return _pc(prover, edges[0].source) if edges and edges[0].by == PROGRAM else -1


def _unit(prover: Prover, first: int, following) -> list[int]:
    """The nodes of one execution of an instruction."""
    unit, pc = [first], _pc(prover, first)
    while True:
        behind = [n for n in following.get(unit[-1], ()) if _pc(prover, n) == pc]
        if not behind:
            return unit
        unit.append(behind[0])


def _swap(prover: Prover, change: Change, unit, behind, following) -> None:
    """``behind`` moves in front of ``unit``."""

    def edges(n: int) -> list[Edge]:
        return change.edges.get(n, prover.edges[n])

    before = [e for e in edges(unit[0]) if e.by == PROGRAM]
    change.edges[behind[0]] = [*before, *[e for e in edges(behind[0]) if e.by != PROGRAM]]
    change.edges[unit[0]] = [
        Edge(behind[-1], PROGRAM),
        *[e for e in edges(unit[0]) if e.by != PROGRAM],
    ]
    for n in following.get(behind[-1], ()):
        change.edges[n] = [Edge(unit[-1], PROGRAM), *edges(n)[1:]]
        change.cut[n] = behind[-1]
    source = before[0].source if before else None
    for row in range(ROWS):
        known = prover.known[row][source] if source is not None else 0
        _seed(change, behind[0])[row] |= prover.known[row][unit[-1]] & ~known
