"""Proofs that a changed ordering element is redundant, computed from the happens-before graph of
the unchanged program.

A change of one element is a change of the graph: edges disappear, or two neighbours in program
order swap. What everybody knows is computed anew, and everything that was ordered must still be:

* every two conflicting accesses of the run (62,000 pairs in a backward pass of two tiles);
* every use of an mbarrier after its initialisation, every operation before the end of its CTA;
* in kernels with tcgen05 fences, what these let through;
* what keeps barriers in step: arrivals of one phase before those of the next, waits neither before
  the phase that precedes theirs nor after the one that follows it.

The last point makes the proof one for every schedule: then each wait still meets its own phase.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

from jax_dsa.emulator.barriers import Mbarrier, NamedBarrier
from jax_dsa.emulator.observers.clocks import AFTER, BEFORE, ORDER, ROWS
from jax_dsa.emulator.observers.graph import ISSUE, PROGRAM, Edge, Graph

Known = list[list[int]]  # per clock row, per node: the tokens that have happened before
SHOWN = 2  # ways that a proof spells out in a table


@dataclasses.dataclass
class Change:
    """What a mutant does to the graph.

    Attributes:
      edges: new edges of some nodes; hidden: fences that are gone; gone: tokens of arrivals
        and waits that are gone.
      seeds: per node and row, what only the element tells it.
      refusal: why the graph of the unchanged program says nothing about the mutant, or "".
      idle: words for an element that orders nothing.
      cut: edges that do not count as the element's work: who comes after both neighbours of a swap.
    """

    edges: dict[int, list[Edge]] = dataclasses.field(default_factory=dict)
    hidden: set[int] = dataclasses.field(default_factory=set)
    gone: int = 0
    seeds: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    refusal: str = ""
    idle: str = "nothing that it tells is needed by a conflicting access"
    cut: dict[int, int] = dataclasses.field(default_factory=dict)
    swapped: bool = False


@dataclasses.dataclass(frozen=True)
class Proof:
    """``pairs``: conflicting pairs that the element ordered; ``ways``: (lines of a remaining path,
    number of kinds of pairs, an example); ``missing``: what is no longer ordered.
    """

    pairs: int = 0
    ways: tuple[tuple[tuple[int, ...], int, str], ...] = ()
    missing: tuple[str, ...] = ()
    idle: str = ""

    @property
    def holds(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        if not self.holds:
            return f"no proof: {self.missing[0]}" + _more(len(self.missing) - 1)
        if not self.pairs:
            return self.idle
        text = f"{self.pairs} ordered pairs stay ordered: " + "; ".join(self.words(SHOWN))
        return text + _more(len(self.ways) - SHOWN)

    def words(self, count: int | None = None) -> list[str]:
        """The remaining paths, those of most pairs first."""
        return [f"{example}: {_implied(lines)}" for lines, _, example in self.ways[:count]]


def _implied(lines: tuple[int, ...]) -> str:
    if not lines:
        return "edge implied by program order"
    return "edge implied by " + " -> ".join(f"line {line}" for line in lines)


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


class Prover:
    """Answers for one recorded run.

    Args:
      graph: of the unchanged program, after its run.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.count = len(graph.nodes)
        self.edges = [node.edges for node in graph.nodes]
        self.own = {n: [x.own] + [0] * (ROWS - 1) for n, x in enumerate(graph.nodes) if x.own}
        self.shows: list[dict[int, int]] = [{} for _ in range(ROWS)]
        for n, node in enumerate(graph.nodes):
            for row, source in node.shows:
                self.shows[row][n] = source
        unused = () if self.shows[AFTER] else (BEFORE, AFTER)  # a kernel without tcgen05 fences
        self.rows = [r for r in range(ROWS) if r == ORDER or (self.shows[r] and r not in unused)]
        self.known = self._spread(self.edges, frozenset(), self.own)
        # What must stay known: (node, row, tokens).
        self.kept = [
            (n, row, mask & self.known[row][n])
            for n, node in enumerate(graph.nodes)
            for row, mask in enumerate(node.needs)
            if mask & self.known[row][n]
        ]
        self.by: dict[int, list[int]] = collections.defaultdict(list)  # nodes with edges by a pc
        self.at: dict[int, list[int]] = collections.defaultdict(list)  # nodes of a pc
        for n, node in enumerate(graph.nodes):
            for pc in {e.by for e in node.edges}:
                self.by[pc].append(n)
            if node.ins is not None:
                self.at[node.ins.pc].append(n)
        self.wanted = 0
        for _, _, mask in self.kept:
            self.wanted |= mask
        self.of_line: dict[int, int] = collections.defaultdict(int)
        for token, node in enumerate(graph.tokens):
            self.of_line[graph.line(node)] |= 1 << token
        self.barriers = {b: u for b, u in graph.uses.items() if isinstance(b, _BARRIERS)}

    def unordered(self) -> list[tuple[int, int]]:
        """Lines of the conflicting accesses that the unchanged program leaves unordered."""
        found = set()
        for n, node in enumerate(self.graph.nodes):
            for row, needs in enumerate(node.needs[:AFTER]):
                for token in _bits(needs & ~self.known[row][n]):
                    found.add((self.graph.line(self.graph.tokens[token]), self.graph.line(n)))
        return sorted(found)

    # -- what is known ----------------------------------------------------------------------------
    def _spread(self, edges, hidden, seeds, base: Known | None = None, order=None) -> Known:
        """Lets tokens flow along the edges, to the nodes in ``order``; others keep what ``base``
        says.
        """
        known = [list(row) for row in base] if base else [[0] * self.count for _ in range(ROWS)]
        for row in self.rows:
            mine = known[row]
            for n in range(self.count) if order is None else order:
                tokens = seeds[n][row] if n in seeds else 0
                for edge in edges[n]:
                    if row != AFTER or edge[1] in _THREAD:
                        tokens |= mine[edge[0]]
                source = self.shows[row].get(n)
                if source is not None and n not in hidden:
                    tokens |= known[source][n]
                mine[n] = tokens
        return known

    def prove(self, change: Change) -> Proof:
        """Checks everything that must be ordered; see the file's docstring."""
        if change.refusal:
            return Proof(missing=(change.refusal,))
        edges = self._with(change.edges)
        order = _sorted(edges) if change.swapped else self._from(change.edges, change.hidden)
        if order is None:
            return Proof(missing=("the two wait for each other",))
        known = self._spread(edges, change.hidden, self.own, self.known, order)
        missing = self._lost(known, change) + self._out_of_step(known, change)
        if missing:
            return Proof(missing=tuple(missing))
        pairs, ways = self._ways(edges, known, change, order)
        return Proof(pairs, ways, idle=change.idle)

    def _from(self, *changed) -> range:
        """The nodes from the first changed one on."""
        return range(min((n for some in changed for n in some), default=self.count), self.count)

    def _with(self, changed: dict[int, list[Edge]]) -> list[list[Edge]]:
        edges = list(self.edges)
        for n, new in changed.items():
            edges[n] = new
        return edges

    def _lost(self, known: Known, change: Change) -> list[str]:
        found = {}
        for n, row, mask in self.kept:
            lost = mask & ~known[row][n] & ~change.gone
            if lost:
                words = self._pair(_lowest(lost), n)
                found.setdefault(words, f"{words} is no longer ordered")
        return list(found.values())

    def _pair(self, token: int, node: int) -> str:
        line = self.graph.line(node)
        first = self.graph.line(self.graph.tokens[token])
        return f"line {first} before {f'line {line}' if line else 'exit'}"

    # -- barriers in step -------------------------------------------------------------------------
    def _out_of_step(self, known: Known, change: Change) -> list[str]:
        found = []
        for barrier, uses in self.barriers.items():
            kept = {
                phase: [a for a in arrivals if not change.gone >> a[1] & 1]
                for phase, arrivals in sorted(uses.arrivals.items())
            }
            kept = {phase: arrivals for phase, arrivals in kept.items() if arrivals}
            masks = {p: sum(1 << a[1] for a in arrivals) for p, arrivals in kept.items()}
            found += self._arrivals(barrier, kept, masks, known)
            if isinstance(barrier, Mbarrier):
                waits = [w for w in uses.waits if not change.gone >> w[2] & 1]
                found += self._waits(barrier, waits, kept, masks, known)
        return found

    def _arrivals(self, barrier, kept, masks, known: Known) -> list[str]:
        """Those of one phase come before those of the next."""
        before, found = 0, []
        for phase, arrivals in kept.items():
            for node, _, pc in arrivals:
                if before & self.known[ORDER][node] & ~known[ORDER][node]:
                    line = self.line(pc)
                    found.append(f"line {line} may arrive early for phase {phase} of {barrier}")
            before = masks[phase]
        return found

    def _waits(self, barrier, waits, kept, masks, known: Known) -> list[str]:
        """No wait starts before the phase that precedes its own is over, or after the next one."""
        found = []
        for phase, node, token, pc in waits:
            start = self.edges[node][0].source if self.edges[node] else node
            if masks.get(phase - 1, 0) & self.known[ORDER][start] & ~known[ORDER][start]:
                found.append(f"line {self.line(pc)} may wait too early on {barrier}")
            later = [a[0] for a in kept.get(phase + 1, ())]
            held = any(self.known[ORDER][n] >> token & 1 for n in later)
            if held and not any(known[ORDER][n] >> token & 1 for n in later):
                found.append(f"line {self.line(pc)} may miss phase {phase} of {barrier}")
        return found

    def line(self, pc: int) -> int:
        return self.graph.code[pc].line

    # -- remaining paths --------------------------------------------------------------------------
    def _ways(self, edges, known: Known, change: Change, order):
        """(pairs that the element ordered; for each remaining path its lines, how many edges and
        kinds of pairs take it, an example).
        """
        self._found: dict[tuple[int, ...], list] = {}
        anchors = self._anchors(edges, order)
        trace = functools.partial(self._trace, edges, known, anchors)
        fresh = {}
        for n, told in change.seeds.items():
            told = [mask & self.wanted for mask in told]
            fresh[n] = [mask & ~known[row][n] for row, mask in enumerate(told)]
            for row, mask in enumerate(told):  # what is known there all the same
                trace(n, row, mask & known[row][n], 0)
        cut = {n: [e for e in self.edges[n] if e.source != s] for n, s in change.cut.items()}
        original, first = self._with(cut), self._from(change.seeds)
        carried = self._spread(original, frozenset(), change.seeds, order=first)
        later = self._spread(original, frozenset(), fresh, order=first)
        pairs, seen = 0, collections.defaultdict(int)
        for n, row, mask in self.kept:
            mask &= ~change.gone
            pairs += (mask & carried[row][n]).bit_count()
            if mask & later[row][n]:
                line = self.graph.line(n)
                seen[line] = trace(n, row, mask & later[row][n], seen[line])
        ranked = sorted(self._found.items(), key=lambda item: (-item[1][0], len(item[0])))
        return pairs, tuple((lines, *found) for lines, found in ranked) if pairs else ()

    def _anchors(self, edges, order) -> list[int]:
        """For each node the last one before it in the order of the program that learned from others
        (or let a proxy know).
        """
        found, nodes = list(range(self.count)), self.graph.nodes
        for n in range(self.count) if isinstance(order, range) else order:
            if len(edges[n]) == 1 and edges[n][0].by == PROGRAM and not nodes[n].shows:
                found[n] = found[edges[n][0].source]
        return found

    def _trace(self, edges, known: Known, anchors, n: int, row: int, tokens: int, seen: int) -> int:
        """Finds paths to node ``n`` for ``tokens``, one per line that is not in ``seen``; what the
        end of a path knows takes the same way.
        """
        tokens &= ~seen
        while tokens:
            token = tokens.bit_length() - 1
            home = self.graph.tokens[token]
            lines = self._path(edges, known, anchors, n, row, token)
            found = self._found.setdefault(lines, [0, self._pair(token, n)])
            found[0] += 1
            seen |= self.of_line[self.graph.line(home)]
            tokens &= ~(seen | known[ORDER][home] | 1 << token)
        return seen

    def _path(self, edges, known: Known, anchors, n: int, row: int, token: int) -> tuple[int, ...]:
        """Lines of the elements on a path from where ``token`` is set to node ``n``, in order."""
        lines: list[int] = []
        while True:
            if known[row][anchors[n]] >> token & 1:
                n = anchors[n]
            else:  # set on the way from there
                break
            ways = [e for e in edges[n] if row != AFTER or e.by in _THREAD]
            edge = next((e for e in ways if known[row][e.source] >> token & 1), None)
            if edge is not None:
                if edge.by >= 0:
                    lines.append(self.line(edge.by))
                n = edge.source
            elif row != ORDER:  # the fence of this node showed it
                lines.append(self.graph.line(n))
                row = self.shows[row][n]
            else:  # set here
                break
        lines.reverse()
        return tuple(line for i, line in enumerate(lines) if i == 0 or lines[i - 1] != line)


_BARRIERS = (Mbarrier, NamedBarrier)
_THREAD = (PROGRAM, ISSUE)  # edges within a thread: what a tcgen05 fence lets through stays there


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _bits(mask: int):
    while mask:
        token = _lowest(mask)
        yield token
        mask &= mask - 1


def _sorted(edges: list[list[Edge]]) -> list[int] | None:
    """The nodes, each after those that it has edges from; None where they go in a circle."""
    order, state = [], bytearray(len(edges))  # 0: new, 1: waits for others, 2: placed
    for root in range(len(edges)):
        stack = [root]
        while stack:
            n = stack[-1]
            waiting = [e.source for e in edges[n] if state[e.source] != 2]
            if state[n] == 2 or not waiting:
                stack.pop()
                if state[n] != 2:
                    order.append(n)
                state[n] = 2
            elif any(state[source] == 1 for source in waiting):
                return None
            else:
                state[n] = 1
                stack += waiting
    return order
