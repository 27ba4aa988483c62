"""``run``: launches of one program in stream order on shared arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jax_dsa.emulator import parallel
from jax_dsa.emulator.code import Code
from jax_dsa.emulator.collector import little_to_walk
from jax_dsa.emulator.errors import LaunchError
from jax_dsa.emulator.events import Observer
from jax_dsa.emulator.launch import Launch, Program, Settings, check, pack
from jax_dsa.emulator.machine import Machine
from jax_dsa.emulator.memory import GlobalMemory
from jax_dsa.emulator.observers import make_observers
from jax_dsa.emulator.report import Report


def run(
    program: Program,
    launch: Launch | Sequence[Launch],
    arrays: Mapping[str, np.ndarray],
    settings: Settings | None = None,
    observers: Sequence[Observer] = (),
    codes: Mapping[str, Code] | None = None,
) -> tuple[dict[str, np.ndarray], Report]:
    """Executes launches one after another, as on a stream.

    Args:
      program: the PTX and its manifest entries.
      launch: one launch, or several in stream order.
      arrays: global arrays by name; they are copied, not changed.
      settings: schedule, observers, limits.
      observers: more observers than those that ``settings`` names.
      codes: kernels that replace the program's (mutants).

    Returns:
      (arrays, report): every array with its final contents, and what the observers found.

    Raises:
      LaunchError: a launch that does not fit the program or the arrays; nothing has run.
      UnsupportedInstruction: with opcode and line; nothing has run.
      StepLimit: with the state of every warp.
    """
    settings = settings or Settings()
    launches = [launch] if isinstance(launch, Launch) else list(launch)
    unknown = settings.outputs - arrays.keys()
    if unknown:
        raise LaunchError(
            f"Settings.outputs names {sorted(unknown)}, which are not among {sorted(arrays)}."
        )
    if settings.processes < 1:
        raise LaunchError(f"Settings.processes is {settings.processes}; wanted 1 or more.")
    for each in launches:
        check(program, each, arrays)
    bound = {each.kernel: program.code(each.kernel) for each in launches} | dict(codes or {})
    with np.errstate(all="ignore"), little_to_walk():
        return _run_all(bound, launches, arrays, settings, observers)


def _run_all(codes, launches, arrays, settings: Settings, observers):
    heap = GlobalMemory(dict(arrays), settings.outputs)
    observers = [*make_observers(settings), *observers]
    report = Report()
    for each in launches:
        report.steps += _run_one(codes[each.kernel], each, heap, observers, settings)
        if any(getattr(o, "stuck", False) for o in observers):
            break
    for observer in observers:
        observer.fill(report)
    return _results(arrays, heap), report


def _run_one(code: Code, launch: Launch, heap: GlobalMemory, observers, settings: Settings) -> int:
    params, maps = pack(launch, code, heap)
    if settings.processes > 1:
        steps = parallel.run(code, launch, heap, params, maps, observers, settings)
        if steps is not None:
            return steps
    machine = Machine(code, launch, heap, params, maps, observers, settings.schedule, settings)
    machine.run()
    return machine.now


def _results(arrays: Mapping[str, np.ndarray], heap: GlobalMemory) -> dict[str, np.ndarray]:
    return {
        name: heap.buffers[name].data[: array.nbytes].copy().view(array.dtype).reshape(array.shape)
        for name, array in arrays.items()
    }
