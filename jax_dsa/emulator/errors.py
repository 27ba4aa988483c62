"""What the emulator raises before anything runs, and when it cannot go on.

Faults of the emulated program (races, deadlocks, addresses out of bounds) are not exceptions: they
are data in
``report.Report``.
"""


class EmulatorError(Exception):
    """Base class of everything that the emulator raises."""


class PtxSyntaxError(EmulatorError):
    """PTX text that does not parse; names the line and the token."""

    def __init__(self, line: int, token: str, wanted: str):
        super().__init__(f"PTX line {line}: found {token!r}, wanted {wanted}.")
        self.line = line
        self.token = token


class UnsupportedInstruction(EmulatorError):
    """An opcode or a form of it that the instruction table does not hold."""

    def __init__(self, opcode: str, line: int, nearest: str | None, why: str = ""):
        hint = f" The nearest supported form is {nearest}." if nearest else ""
        reason = f": {why}" if why else ""
        super().__init__(
            f"PTX line {line}: {opcode} is not in the instruction table{reason}.{hint}"
            " Add a row to jax_dsa/emulator/isa."
        )
        self.opcode = opcode
        self.line = line
        self.nearest = nearest


class LaunchError(EmulatorError, ValueError):
    """A launch that does not fit its program: parameters, arrays, grid or shared memory."""


class StepLimit(EmulatorError):
    """The run took more steps than ``Settings.step_limit``; the message holds the state of every
    warp.
    """
