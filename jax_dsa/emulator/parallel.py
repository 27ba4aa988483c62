"""CTAs of one launch in several processes, where that cannot be told from running one after the
other.

Each CTA starts from the memory as the launch found it. A process that was forked runs some of them,
each with observers of its own, and hands back what it found, which cells of global memory it read,
wrote and updated, and the operands of its atomics. Merged in the order of the CTAs this gives what
one process gives, bit for bit, unless a CTA reads or writes what another writes or updates: then
(a race, or a dependence on the order) the launch runs again in one process, which reports it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import warnings
from typing import Any

import numpy as np

from jax_dsa.emulator.errors import EmulatorError
from jax_dsa.emulator.events import ATOMIC, READ, WRITE, Observer
from jax_dsa.emulator.isa.memory import apply, space_of, update_of
from jax_dsa.emulator.machine import Machine, grid_of
from jax_dsa.emulator.observers.registers import names
from jax_dsa.emulator.registers import dtype_of

_ORDERED = {"relaxed", "acquire", "release", "acq_rel", "volatile"}


@dataclasses.dataclass
class Update:
    """One atomic instruction: ``operation`` on rows of ``count`` elements of ``element``."""

    array: str
    operation: str
    type: str
    element: str
    count: int
    index: np.ndarray
    operands: list[np.ndarray]


@dataclasses.dataclass
class Result:
    """What one CTA leaves behind; ``touched``: kind -> array -> flags of cells."""

    steps: int
    stuck: bool
    found: list[Any]
    touched: dict[str, dict[str, np.ndarray]]
    written: dict[str, np.ndarray]
    updates: list[Update]


class Recorder(Observer):
    """Notes what a CTA does to global memory."""

    def __init__(self, heap):
        self.names = {id(buffer): name for name, buffer in heap.buffers.items()}
        self.touched: dict[str, dict[str, np.ndarray]] = {READ: {}, WRITE: {}, ATOMIC: {}}
        self.updates: list[Update] = []

    def access(self, agent, ins, memory, cells, kind: str) -> None:
        if memory.space == "global":
            found, name = self.touched[kind], self.names[id(memory)]
            if name not in found:
                found[name] = np.zeros(memory.cells, bool)
            found[name][cells] = True

    def update(self, memory, form: tuple, index, operands) -> None:
        if memory.space == "global":
            name = self.names[id(memory)]
            operation, type_, element, count = form
            copies = [o.copy() for o in operands]
            self.updates.append(Update(name, operation, type_, element, count, index, copies))


def reason_against(code, launch, observers, settings) -> str:
    """Why the CTAs of a launch have to share one process, or ""."""
    if int(np.prod(launch.grid)) < 2:
        return "there is one CTA"
    if settings.concurrent_ctas != 1:
        return "several CTAs are in flight at once"
    if not hasattr(os, "fork"):
        return "processes cannot be forked here"
    strange = [type(o).__name__ for o in observers if not hasattr(o, "adopt")]
    if strange:
        return f"{strange[0]} cannot be merged"
    for ins in code.kernel.code:
        if _orders_ctas(code, ins):
            return f"line {ins.line} `{ins.opcode}` may order CTAs or return what others wrote"
    return ""


def _orders_ctas(code, ins) -> bool:
    parts = ins.opcode.split(".")
    if parts[0] in ("fence", "membar"):
        return bool({"gpu", "sys", "gl"} & set(parts))
    if parts[0] == "cp" and "reduce" in parts:
        return True
    if parts[0] not in ("ld", "st", "atom", "red") or space_of(parts) in ("shared", "param"):
        return False
    if _ORDERED & set(parts):
        return True
    return parts[0] == "atom" and _is_read(code, ins)


def _is_read(code, ins) -> bool:
    """True when some instruction reads a register that this one writes."""
    if "read" not in code.notes:
        sources = [o for i in code.kernel.code for o in (*_sources(i), *_guard(i))]
        code.notes["read"] = {name for operand in sources for name in names(operand)}
    return not code.notes["read"].isdisjoint(names(ins.operands[0]))


def _sources(ins) -> tuple:
    """The operands that an instruction reads, or more."""
    stem = ins.opcode.split(".")[0]
    return ins.operands[1:] if stem in ("atom", "ld", "mov") else ins.operands


def _guard(ins) -> tuple:
    return (ins.guard,) if ins.guard is not None else ()


def run(code, launch, heap, params, maps, observers, settings) -> int | None:
    """Runs the CTAs of a launch in ``settings.processes`` processes.

    Returns:
      The scheduler steps, or None when nothing was done because one process has to do it.
    """
    if reason_against(code, launch, observers, settings):
        return None
    ctas = list(grid_of(launch))

    def machine(listeners):
        return Machine(code, launch, heap, params, maps, listeners, settings.schedule, settings)

    def work(number: int) -> Result:
        recorder, own = Recorder(heap), [o.fresh() for o in observers]
        one = machine([*own, recorder])
        one.run([(number, ctas[number])])
        written = {
            name: heap.buffers[name].views[2][flags].copy()
            for name, flags in recorder.touched[WRITE].items()
        }
        stuck = any(getattr(o, "stuck", False) for o in own)
        found = [o.hand_over() for o in own]
        return Result(one.now, stuck, found, recorder.touched, written, recorder.updates)

    results = _spread(work, len(ctas), settings.processes, heap)
    last = next((i for i, r in enumerate(results) if r is None or r.stuck), len(results) - 1)
    results = results[: last + 1]
    complete = [r for r in results if r is not None]
    if len(complete) < len(results) or not _independent(complete):
        return None
    if sum(r.steps for r in complete) > settings.step_limit:
        return None
    return _merge(complete, machine(observers), observers)


def _spread(work, count: int, processes: int, heap) -> list[Result | None]:
    """work(0), work(1), ... in forked processes; None where a process failed."""
    context = multiprocessing.get_context("fork")
    processes = min(processes, count)
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]

    def body(first: int, channel) -> None:
        start = heap.heap.copy()
        for number in range(first, count, processes):
            heap.heap[:] = start
            try:
                channel.send(work(number))
            except EmulatorError:  # the run in one process raises it
                channel.send(None)

    workers = [
        context.Process(target=body, args=(i, write), daemon=True)
        for i, (_, write) in enumerate(pipes)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of fork; these processes run NumPy alone
        for worker in workers:
            worker.start()
    for _, write in pipes:
        write.close()
    results = [_receive(pipes[number % processes][0]) for number in range(count)]
    for worker in workers:
        worker.join()
    return results


def _receive(channel) -> Result | None:
    try:
        return channel.recv()
    except EOFError:
        return None


def _independent(results: list[Result]) -> bool:
    """True when no CTA touches what another one writes, atomics on both sides apart."""
    before: dict[tuple[str, str], np.ndarray] = {}
    for result in results:
        for kind, others in _EXCLUDED.items():
            for name, flags in result.touched[kind].items():
                for other in others:
                    if (other, name) in before and (before[other, name] & flags).any():
                        return False
        for kind, arrays in result.touched.items():
            for name, flags in arrays.items():
                known = before.get((kind, name))
                before[kind, name] = flags if known is None else known | flags
    return True


_EXCLUDED = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}


def _merge(results: list[Result], whole: Machine, observers) -> int:
    """One CTA after the other, as if this process had run them."""
    if whole.on.launch:
        whole.on.launch(whole)
    for result in results:
        for observer, found in zip(observers, result.found, strict=True):
            observer.adopt(found, whole, result.touched)
        _take_over(whole.memory, result)
        whole.now += result.steps
    if whole.on.end:
        whole.on.end(whole)
    return whole.now


def _take_over(heap, result: Result) -> None:
    """Atomics are carried out again, so that sums are rounded in the order of the CTAs."""
    for u in result.updates:
        rows = heap.buffers[u.array].rows(dtype_of(u.element), u.count)
        apply(rows, u.index, update_of(u.operation, u.type), u.operands)
    for name, values in result.written.items():
        heap.buffers[name].views[2][result.touched[WRITE][name]] = values
