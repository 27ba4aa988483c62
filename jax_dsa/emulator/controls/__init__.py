"""Kernels that others have run on hardware: known good and known bad. The emulator is measured by
them.

They are public packages, installed by name into a temporary folder and compiled there; nothing of
them is kept here.
"""

from jax_dsa.emulator.controls.backward import BackwardControl
from jax_dsa.emulator.controls.fetch import Source, compile_peer
from jax_dsa.emulator.controls.forward import ForwardControl
from jax_dsa.emulator.controls.problems import Case

__all__ = ["BackwardControl", "Case", "ForwardControl", "Source", "compile_peer"]
