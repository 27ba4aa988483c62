"""Control flow of a kernel: block leaders and, for each branch, where diverged lanes meet again.

Lanes that part at a branch meet at its immediate post-dominator (the first point that every path to
the end passes).
"""

from __future__ import annotations

from jax_dsa.emulator.ptx.syntax import Instruction, Kernel, Label


def is_branch(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] == "bra"


def ends_thread(instruction: Instruction) -> bool:
    return instruction.opcode in ("ret", "exit", "trap")


def leaders(kernel: Kernel) -> list[int]:
    """Positions where a basic block starts, ascending."""
    found = {0, *kernel.labels}
    for instruction in kernel.code:
        if is_branch(instruction) or ends_thread(instruction):
            found.add(instruction.pc + 1)
    return sorted(pc for pc in found if pc < len(kernel.code))


def _successors(kernel: Kernel, start: int, stop: int, end: int) -> list[int]:
    last = kernel.code[stop - 1]
    if ends_thread(last):
        return [end] if last.guard is None else [end, stop]
    if is_branch(last):
        label = last.operands[0]
        assert isinstance(label, Label)
        return [label.target] if last.guard is None else [label.target, stop]
    return [stop]


def reconvergence(kernel: Kernel) -> dict[int, int]:
    """Maps each branch's pc to the pc where its lanes meet; ``len(code)`` means only at the end."""
    end = len(kernel.code)
    starts = [*leaders(kernel), end]
    blocks = {
        start: [min(s, end) for s in _successors(kernel, start, stop, end)]
        for start, stop in zip(starts, starts[1:], strict=False)
    }
    immediate = _post_dominators(blocks, end)
    return {
        stop - 1: immediate.get(start, end)
        for start, stop in zip(starts, starts[1:], strict=False)
        if is_branch(kernel.code[stop - 1])
    }


def _post_dominators(blocks: dict[int, list[int]], end: int) -> dict[int, int]:
    """Immediate post-dominators by iterating intersections over the reversed graph (Cooper, Harvey,
    Kennedy).
    """
    order = _reverse_postorder(blocks, end)
    rank = {block: i for i, block in enumerate(order)}
    immediate = {end: end}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [s for s in blocks[block] if s in immediate]
            if not known:
                continue
            new = known[0]
            for other in known[1:]:
                new = _meet(new, other, immediate, rank)
            if immediate.get(block) != new:
                immediate[block] = new
                changed = True
    return immediate


def _meet(a: int, b: int, immediate: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = immediate[a]
        while rank[b] > rank[a]:
            b = immediate[b]
    return a


def _reverse_postorder(blocks: dict[int, list[int]], end: int) -> list[int]:
    """Reverse postorder of the reversed graph, from ``end``."""
    predecessors: dict[int, list[int]] = {end: []}
    for block, targets in blocks.items():
        predecessors.setdefault(block, [])
        for target in targets:
            predecessors.setdefault(target, []).append(block)
    seen, order, stack = {end}, [], [(end, iter(predecessors[end]))]
    while stack:
        node, rest = stack[-1]
        child = next((p for p in rest if p not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(predecessors[child])))
    return order[::-1]
