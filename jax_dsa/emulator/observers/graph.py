"""The happens-before graph of one launch: what each warp and each asynchronous operation did, and
which instruction makes which edge.

The rules are those of ``races``; there they are clocks that forget where an edge came from, here
they are nodes and edges that ``proof`` can take away again. What must stay ordered is noted as
*tokens*: one bit per access, per completed operation, per arrival and per wait.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from jax_dsa.emulator.engines import Op
from jax_dsa.emulator.events import ATOMIC, ATOMIC_READ, ATOMIC_WRITE, READ, WRITE, Observer
from jax_dsa.emulator.observers.clocks import AFTER, BEFORE, GLOBAL, ORDER, ROWS, SHARED
from jax_dsa.emulator.ptx.syntax import Immediate, Instruction

# Edges that no element makes: program order; from an issue to the operation; to its completion.
PROGRAM, ISSUE, DONE = -1, -2, -3
_QUEUED = {"cp.async", "bulk", "tcgen05.ld", "tcgen05.st", "wgmma"}
_AGAINST = {
    READ: (WRITE, ATOMIC, ATOMIC_WRITE),
    WRITE: (READ, WRITE, ATOMIC, ATOMIC_READ, ATOMIC_WRITE),
    ATOMIC: (READ, WRITE),
    ATOMIC_READ: (WRITE,),
    ATOMIC_WRITE: (READ, WRITE),
}
_ROW = {"shared": SHARED, "global": GLOBAL, "tensor": ORDER}
_FENCES = (
    (SHARED, ORDER, ("proxy.async.shared", "proxy.async.all")),
    (GLOBAL, ORDER, ("proxy.async.global", "proxy.async.all")),
    (BEFORE, ORDER, ("tcgen05.before",)),
    (AFTER, BEFORE, ("tcgen05.after",)),
)


class Edge(NamedTuple):
    """``source`` comes before the node that holds the edge.

    ``by``: pc of the instruction that makes it, or PROGRAM, ISSUE, DONE. For wait_group n:
    ``slack`` is what n would have to grow by not to wait for the operation any more, 0 for other
    waits; ``closed`` are the pcs of the commit_groups in between.
    """

    source: int
    by: int = DONE
    slack: int = 0
    closed: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Node:
    """A moment of ``agent`` (a group, an operation, or None) at ``ins``.

    own: tokens that are set here; shows: (row, source) of the clock rows that a fence fills here;
    needs: per row, the tokens that must be known here.
    """

    agent: Any
    ins: Instruction | None
    edges: list[Edge]
    own: int = 0
    shows: tuple[tuple[int, int], ...] = ()
    needs: list[int] = dataclasses.field(default_factory=lambda: [0] * ROWS)


class Access(NamedTuple):
    """An access: its token, the node that must know what came before, its cells (a key)."""

    token: int
    node: int
    agent: Any
    memory: Any
    cells: Any
    kind: str
    row: int


@dataclasses.dataclass
class Uses:
    """What happened on one barrier: (node, token, pc) of the arrivals per phase, and
    (phase, node, token, pc) of the waits.
    """

    arrivals: dict[int, list[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)
    waits: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)


class Graph(Observer):
    """Records one launch. ``nodes`` are in the order in which they happened, so that every edge
    leads to a later one.
    """

    def launch(self, machine) -> None:
        self.nodes: list[Node] = []
        self.accesses: list[Access] = []
        self.tokens: list[int] = []  # node of each token
        self.generic = 0  # tokens of generic accesses, which the asynchronous proxy must be shown
        self.uses: dict[Any, Uses] = {}
        self.cells: dict[Any, Any] = {}
        self._tip: dict[Any, int] = {}
        self._start: dict[Op, int] = {}
        self._done: dict[Op, int] = {}
        self._body: dict[Op, int] = {}
        self._sources: dict[Op, int] = {}
        self._last: dict[tuple, int] = {}
        self._phase: dict[tuple, tuple[int, int]] = {}
        self._commits: dict[tuple, list[int]] = {}  # pcs of commit_groups of a warp and family
        self._opened: dict[Op, int] = {}
        self.inits: dict[tuple, int] = {}
        self.code = machine.code.kernel.code

    # -- nodes ------------------------------------------------------------------------------------
    def _node(self, agent, ins, edges: list[Edge]) -> int:
        self.nodes.append(Node(agent, ins, edges))
        return len(self.nodes) - 1

    def _advance(self, group, ins, edges: tuple[Edge, ...] = ()) -> int:
        """The group's next node, which also comes after ``edges``."""
        tip = self._tip.get(group)
        before = [Edge(tip, PROGRAM)] if tip is not None else []
        self._tip[group] = self._node(group, ins, [*before, *edges])
        return self._tip[group]

    def _at(self, group, ins) -> int:
        """The group's node for what it does by itself; one instruction needs one."""
        tip = self._tip.get(group)
        if tip is not None and self.nodes[tip].ins is ins and len(self.nodes[tip].edges) == 1:
            return tip
        return self._advance(group, ins)

    def _token(self, node: int) -> int:
        self.tokens.append(node)
        self.nodes[node].own |= 1 << len(self.tokens) - 1
        return len(self.tokens) - 1

    def _line(self, key: tuple, agent, ins, *edges: Edge) -> int:
        """A node after the last one under ``key``, which it replaces."""
        last = self._last.get(key)
        before = [Edge(last)] if last is not None else []
        self._last[key] = self._node(agent, ins, [*edges, *before])
        return self._last[key]

    def split(self, parent, child) -> None:
        tip = self._tip.get(parent)
        self._tip[child] = self._node(child, None, [] if tip is None else [Edge(tip, PROGRAM)])

    def merge(self, parent, child) -> None:
        self._advance(parent, None, (Edge(self._tip.pop(child)),))

    # -- asynchronous work ------------------------------------------------------------------------
    def issue(self, op: Op) -> None:
        start = Edge(self._at(op.group, op.ins), ISSUE)
        warp = op.group.warp
        if op.kind == "arrive":
            earlier = self._last.get((warp, op.family, "all"))
            before = [Edge(earlier, op.ins.pc)] if earlier is not None else []
            # Two commits of a thread arrive in order: the second one tracks all of the first.
            node = self._line((warp, op.family, "arrive"), op, op.ins, start, *before)
            self._start[op] = self._done[op] = node
            if op.family == "tcgen05":  # commit includes a fence
                self.nodes[self._done[op]].shows = ((BEFORE, ORDER),)
        elif op.kind == "mma":
            copies = self._last.get((warp, "cp", "all"))
            before = [Edge(copies, op.ins.pc)] if copies is not None else []
            node = self._line(("chain", op.chain), op, op.ins, start, *before)
            self._begin(op, node, node, node)
        elif op.family in _QUEUED or op.kind == "cp":
            self._queue(op, start)
        else:
            node = self._node(op, op.ins, [start])
            self._begin(op, node, node, node)

    def _begin(self, op: Op, start: int, body: int, done: int) -> None:
        """``start`` knows what the operation may rely on, ``body`` are its accesses, who learns
        ``done`` knows that it is complete.
        """
        self._start[op], self._body[op], self._done[op] = start, body, done
        if op.kind == "mma":
            self._line((op.group.warp, op.family, "all"), None, None, Edge(done))

    def _queue(self, op: Op, start: Edge) -> None:
        warp = op.group.warp
        self._opened[op] = len(self._commits.get((warp, op.family), ()))
        first = self._node(op, op.ins, [start])
        body = self._line((warp, op.family, op.kind), op, op.ins)
        edges = [Edge(first), Edge(body)]
        if op.family == "bulk":
            self._sources[op] = self._line((warp, "bulk.read"), op, op.ins)
            edges.append(Edge(self._sources[op]))
        done = self._node(op, op.ins, edges)
        self._begin(op, first, body, done)
        for family in {op.family, "cp"} if op.kind == "cp" else {op.family}:
            self._line((warp, family, "all"), None, None, Edge(done))

    def wait(self, group, family: str, ops, ins, everything: bool) -> None:
        limit = ins.operands[0] if ins.operands else None
        counts = isinstance(limit, Immediate)
        found = self._sources if family == "bulk.read" else self._done
        log = self._commits.get((group.warp, family.removesuffix(".read")), [])
        edges = []
        for op in ops:
            if op in found and counts:
                closed = tuple(log[self._opened[op] :])
                edges.append(Edge(found[op], ins.pc, len(closed) - int(limit.value), closed))
            elif op in found:
                edges.append(Edge(found[op], ins.pc))
        earlier = self._last.get((group.warp, family, "all"))
        if everything and earlier is not None:
            edges.append(Edge(earlier, ins.pc, int(counts)))
        self._advance(group, ins, tuple(edges))

    def commit(self, group, family: str, ins) -> None:
        self._at(group, ins)
        self._commits.setdefault((group.warp, family), []).append(ins.pc)

    # -- edges ------------------------------------------------------------------------------------
    def arrive(self, agent, barrier, phase: int, ins) -> None:
        node = self._done[agent] if isinstance(agent, Op) else self._at(agent, ins)
        uses = self.uses.setdefault(barrier, Uses())
        uses.arrivals.setdefault(phase, []).append((node, self._token(node), ins.pc))

    def observe(self, group, barrier, phase: int, ins) -> None:
        uses = self.uses.setdefault(barrier, Uses())
        known = self._completed(barrier, phase, uses.arrivals.get(phase, []))
        edges = () if known is None else (Edge(known, ins.pc),)
        node = self._advance(group, ins, edges)
        uses.waits.append((phase, node, self._token(node), ins.pc))

    def _completed(self, barrier, phase: int, arrivals) -> int | None:
        """The node that stands for the phase, with all arrivals so far."""
        node, count = self._phase.get((barrier, phase), (None, 0))
        if len(arrivals) > count:
            edges = [Edge(source, by) for source, _, by in arrivals[count:]]
            node = self._node(None, None, edges if node is None else [Edge(node), *edges])
            self._phase[barrier, phase] = (node, len(arrivals))
        return node

    def relaxed(self, group, flag, writes: bool, ins) -> None:
        if not writes and ("flag", flag) in self._last:
            self._line(("seen", group), None, None, Edge(self._last["flag", flag], ins.pc))
        elif writes and ("fenced", group) in self._last:
            self._line(("flag", flag), None, None, Edge(self._last["fenced", group], ins.pc))

    def fence(self, group, kind: str, ins) -> None:
        seen = self._last.get(("seen", group)) if kind == "memory" else None
        node = self._advance(group, ins, () if seen is None else (Edge(seen, ins.pc),))
        if kind == "memory":
            self._last["fenced", group] = node
        self.nodes[node].shows = tuple(
            (row, source) for row, source, names in _FENCES if kind in names
        )

    def use(self, agent, barrier, ins) -> None:
        """Initialising an mbarrier is a write that every use must come after."""
        made = self.inits.get((barrier.cta, barrier.address))
        if made is not None and not isinstance(agent, Op):
            self.nodes[self._at(agent, ins)].needs[ORDER] |= 1 << made

    # -- accesses ---------------------------------------------------------------------------------
    def access(self, agent, ins, memory, cells, kind: str) -> None:
        row = ORDER
        if isinstance(agent, Op):
            row = ORDER if agent.kind == "copy" else _ROW[memory.space]
            node = self._start[agent]
            sources = self._sources.get(agent) if kind == READ else None
            token = self._token(self._body[agent] if sources is None else sources)
        else:
            node = self._at(agent, ins)
            token = self._token(node)
        if not isinstance(agent, Op) or agent.kind == "copy":
            self.generic |= 1 << token
        key = self._key(cells)
        self.accesses.append(Access(token, node, agent, memory, key, kind, row))
        if ins.opcode.startswith("mbarrier.init"):
            at = cells.start if isinstance(cells, slice) else int(np.ravel(cells)[0])
            self.inits[agent.cta, at * 2] = token

    def _key(self, cells):
        if isinstance(cells, slice):
            return (cells.start, cells.stop)
        key = np.asarray(cells).tobytes()
        if key not in self.cells:
            self.cells[key] = np.unique(cells)
        return key

    # -- the end ----------------------------------------------------------------------------------
    def leave(self, cta) -> None:
        """Every operation must be known to be complete to some warp when its CTA ends."""
        groups = [g for g in self._tip if g.cta is cta]
        end = self._node(None, None, [Edge(self._tip.pop(g)) for g in groups])
        for op in [o for o in self._body if o.cta is cta]:
            body = self._body.pop(op)
            token = self._token(self._sources.get(op, body))
            self.nodes[end].needs[ORDER] |= 1 << token

    def end(self, machine) -> None:
        for node, before in conflicts(self).items():
            for row, mask in enumerate(before):
                self.nodes[node].needs[row] |= mask

    def line(self, node: int) -> int:
        """The PTX line of a node, 0 where it has none."""
        ins = self.nodes[node].ins
        return ins.line if ins is not None else 0


def conflicts(graph: Graph) -> dict[int, list[int]]:
    """For each node that accesses memory, per clock row, the tokens of all earlier accesses by
    others that conflict with it: the same cells, at least one write, atomics not among themselves.
    """
    needs: dict[int, list[int]] = {}
    memories: dict[int, list[Access]] = {}
    for access in graph.accesses:
        memories.setdefault(id(access.memory), []).append(access)
    for accesses in memories.values():
        if any(a.kind != accesses[0].kind or a.kind == WRITE for a in accesses):
            _collect(graph, accesses, needs)
    return needs


def _collect(graph: Graph, accesses: list[Access], needs: dict[int, list[int]]) -> None:
    keys = list(dict.fromkeys(a.cells for a in accesses))
    number = {key: i for i, key in enumerate(keys)}
    touching = _overlaps([graph.cells.get(key, key) for key in keys], accesses[0].memory.cells)
    seen = [dict.fromkeys(_AGAINST, 0) for _ in keys]
    mine: dict[Any, int] = {}
    tensor: dict[Any, int] = {}  # tokens of tensor-memory operations by warp
    for access in accesses:
        mask = 0
        for other in touching[number[access.cells]]:
            for kind in _AGAINST[access.kind]:
                mask |= seen[other][kind]
        mask &= ~mine.get(access.agent, 0)
        rows = needs.setdefault(access.node, [0] * ROWS)
        if access.row == ORDER:
            rows[ORDER] |= mask
        else:
            rows[access.row] |= mask & graph.generic
            rows[ORDER] |= mask & ~graph.generic
        seen[number[access.cells]][access.kind] |= 1 << access.token
        mine[access.agent] = mine.get(access.agent, 0) | 1 << access.token
        if access.memory.space == "tensor" and isinstance(access.agent, Op):
            warp = access.agent.group.warp
            others = [tokens for other, tokens in tensor.items() if other is not warp]
            rows[AFTER] |= mask & functools.reduce(operator.or_, others, 0)
            tensor[warp] = tensor.get(warp, 0) | 1 << access.token


def _overlaps(sets: list, size: int) -> list[list[int]]:
    """For each set of cells the numbers of the sets that share a cell with it."""
    places = [slice(*cells) if isinstance(cells, tuple) else cells for cells in sets]
    marks, random = np.zeros(size, np.int64), np.random.default_rng(0)
    for place, mark in zip(places, random.integers(2**63, size=len(sets)), strict=True):
        marks[place] ^= mark
    _, group = np.unique(marks, return_inverse=True)
    member = np.zeros((len(sets), int(group.max()) + 1), np.float32)  # cells that go together
    for row, place in zip(member, places, strict=True):
        row[group[place]] = 1
    return [np.flatnonzero(row).tolist() for row in member @ member.T]
