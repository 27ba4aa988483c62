"""Observers: they hear the machine's events and fill a report."""

from __future__ import annotations

from jax_dsa.emulator.observers.faults import Faults


def make_observers(settings) -> list:
    """The observers that ``settings.observers`` names."""
    names = ("races", "coverage", "timeline") if settings.observers == "all" else settings.observers
    if names == "none":
        names = ()
    return [Faults()]
