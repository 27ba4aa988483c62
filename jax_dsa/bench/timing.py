"""How long calls take, alternating between programs: device time by the profiler, or wall time."""

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.profiler import ProfileData, TraceAnnotation

_MARK = "jax_dsa.bench/"


def alternate(
    programs: Mapping[str, Callable], rounds: int, calls: int, on_device: bool
) -> dict[str, list[list[float]]]:
    """Seconds of each call: name -> round -> call.

    Args:
        programs: name -> a call that returns when its work is done.
        rounds, calls: ``rounds`` times ``calls`` calls of each, in turn call by call.
        on_device: take the span of a call's kernels from the profiler's trace; else wall time.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        measure = _device_round if on_device else _wall_round
        for name, seconds in measure(programs, calls).items():
            times[name].append(seconds)
    return times


def _wall_round(programs: Mapping[str, Callable], calls: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(calls):
        for name, run in programs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def _device_round(programs: Mapping[str, Callable], calls: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for call in range(calls):
                for name, run in programs.items():
                    with TraceAnnotation(f"{_MARK}{name}/{call}"):
                        run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(path))
    spans = sorted(_marks(data))
    kernels = sorted(_kernels(data))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for start, end, name in spans:
        inside = [k for k in kernels if start <= k[0] and k[1] <= end]
        if not inside:
            raise RuntimeError(f"{name}: the trace holds no kernel of this call")
        times[name].append((max(k[1] for k in inside) - inside[0][0]) * 1e-9)
    return times


def _marks(data: Any) -> Iterator[tuple[float, float, str]]:
    """Start and end in nanoseconds, and the program's name, of each call."""
    for plane in data.planes:
        if plane.name.startswith("/host:CPU"):
            for event in (e for line in plane.lines for e in line.events):
                if event.name.startswith(_MARK):
                    name = event.name.removeprefix(_MARK).rpartition("/")[0]
                    yield event.start_ns, event.end_ns, name


def _kernels(data: Any) -> Iterator[tuple[float, float]]:
    """Start and end in nanoseconds of everything on the device's streams."""
    for plane in data.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if "Stream" in line.name:
                    yield from ((e.start_ns, e.end_ns) for e in line.events)
