"""Observers: they hear the machine's events and fill a report."""

from __future__ import annotations

from jax_dsa.emulator.errors import LaunchError
from jax_dsa.emulator.observers.barrier_use import BarrierUse
from jax_dsa.emulator.observers.coverage import Coverage
from jax_dsa.emulator.observers.faults import Faults
from jax_dsa.emulator.observers.races import Races
from jax_dsa.emulator.observers.registers import RegisterUse
from jax_dsa.emulator.observers.timeline import Timeline
from jax_dsa.emulator.observers.warpgroup import WarpgroupRegisters

NAMES = ("races", "registers", "coverage", "timeline")


def make_observers(settings) -> list:
    """The observers that ``settings.observers`` names; faults are always collected."""
    wanted = settings.observers
    names = {"all": NAMES, "none": ()}[wanted] if isinstance(wanted, str) else tuple(wanted)
    unknown = set(names) - set(NAMES)
    if unknown:
        raise LaunchError(f"Settings.observers names {sorted(unknown)}; there are {NAMES}.")
    found: list = [Faults()]
    if "races" in names:
        found += [Races(settings.lints), BarrierUse(settings.lints)]
        found.append(WarpgroupRegisters(settings.lints))
    if "registers" in names:
        found.append(RegisterUse(settings.lints))
    if "coverage" in names:
        found.append(Coverage())
    if "timeline" in names:
        found.append(Timeline())
    return found
