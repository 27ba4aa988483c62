"""CTAs, warps, and groups: lanes of a warp that run together.

Lanes that part at a branch run on as groups of their own and meet at the branch's immediate
post-dominator. Where one
side has nothing to do (it waits at the meeting point), the other side stays in the same group with
fewer lanes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_dsa.emulator.barriers import Mbarrier, NamedBarrier, RegisterPool
from jax_dsa.emulator.engines import Tracker
from jax_dsa.emulator.memory import SharedMemory, TensorMemory
from jax_dsa.emulator.registers import LANES, RegisterFile

NONE, EVERY = bytes(LANES), b"\x01" * LANES


@dataclasses.dataclass
class Frame:
    """Where ``mask`` lanes meet, and how many groups are still away."""

    meet: int
    mask: np.ndarray
    children: int = 0


class Group:
    """Lanes of one warp at one pc. ``where`` is True when all 32 run, else their mask."""

    __slots__ = (
        "machine", "cta", "warp", "R", "mask", "bytes", "where", "pc", "frames", "parent", "meet",
        "waiting", "wait_on", "fail",
        "fail_at", "delayed_at", "serial",
    )  # fmt: skip

    def __init__(
        self, warp: Warp, mask: np.ndarray, pc: int, parent: Group | None = None, meet: int = -1
    ):
        self.machine, self.cta, self.warp, self.R = warp.machine, warp.cta, warp, warp.registers
        self.frames: list[Frame] = []
        self.parent, self.meet = parent, meet
        self.waiting: str | None = None
        self.wait_on: object = None
        self.fail = False
        self.fail_at = self.delayed_at = -1
        self.pc = pc
        self.serial = warp.next_serial()
        self.set_mask(mask)

    def set_mask(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.bytes = mask.tobytes()  # comparing bytes is several times faster than any() and all()
        self.where = True if self.bytes == EVERY else mask

    def __str__(self) -> str:
        return str(self.warp)

    def state(self) -> str:
        """Words for deadlock and step-limit messages."""
        code = self.machine.code.kernel.code
        at = str(code[self.pc]) if self.pc < len(code) else "end"
        return f"{self} ({int(self.mask.sum())} lanes) at {at}: {self.waiting or 'can run'}"


class Warp:
    """Registers, exited lanes, and the asynchronous work of 32 threads."""

    def __init__(self, cta: Cta, index: int, threads: int):
        self.machine, self.cta, self.index = cta.machine, cta, index
        self.role = self.machine.role(index)
        self.registers = RegisterFile(self.machine.code.layout)
        self.exited = np.arange(LANES) >= threads
        self.trackers: dict[str, Tracker] = {}
        self.written = 0
        self._serial = 0
        self.root = Group(self, ~self.exited, 0)

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def tracker(self, family: str) -> Tracker:
        found = self.trackers.get(family)
        if found is None:
            found = self.trackers[family] = Tracker()
        return found

    def __str__(self) -> str:
        return f"CTA {self.cta} warp {self.index}" + (f" ({self.role})" if self.role else "")


class Cta:
    """One thread block: its memories, barriers and warps."""

    def __init__(self, machine, index: tuple[int, int, int]):
        self.machine, self.index = machine, index
        self.name = ",".join(map(str, index))
        self.shared = SharedMemory(machine.shared_bytes, self.name)
        self.tensor = TensorMemory(self.name)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.allocators: list[Group] = []
        self.warpgroups: dict[int, Any] = {}  # by first warp: isa.wgmma.Warpgroup
        threads = int(np.prod(machine.launch.block))
        self.threads = threads
        self.alive = -(-threads // LANES)
        self.registers = RegisterPool(machine.launch.registers, self.alive)
        self.warps = [Warp(self, i, threads - LANES * i) for i in range(self.alive)]

    def __str__(self) -> str:
        return self.name

    def release(self) -> None:
        """The CTA has ended: what is kept for reports needs its name only."""
        for warp in self.warps:
            warp.registers.release()
        del self.shared, self.tensor

    def named_barrier(self, number: int) -> NamedBarrier:
        found = self.named.get(number)
        if found is None:
            found = self.named[number] = NamedBarrier(self.machine, self, number)
        return found


def branch(group: Group, taken: np.ndarray, target: int, following: int, meet: int) -> None:
    """Splits ``group`` at a branch: ``taken`` lanes go to target, the others to ``following``."""
    rest = group.mask & ~taken
    if not group.frames or group.frames[-1].meet != meet or group.frames[-1].children:
        group.frames.append(Frame(meet, group.mask))
    if target == meet:
        group.set_mask(rest)
        group.pc = following
    elif following == meet:
        group.set_mask(taken)
        group.pc = target
    else:
        group.frames[-1].children += 1
        child = Group(group.warp, rest, following, group, meet)
        group.set_mask(taken)
        group.pc = target
        group.machine.add(child)


def reconverge(group: Group) -> bool:
    """Called at block starts: lets lanes meet. False when the group is over or has to wait for
    others.
    """
    while group.frames and group.pc == group.frames[-1].meet:
        if not _pop(group):
            return False
    if group.parent is not None and not group.frames and group.pc == group.meet:
        _finish(group)
        return False
    return True


def exit_lanes(group: Group) -> None:
    """The group's lanes end; the lanes that wait at its frames go on."""
    group.warp.exited = group.warp.exited | group.mask
    group.set_mask(np.zeros(LANES, bool))
    unwind(group)


def unwind(group: Group) -> None:
    """Continues with the innermost frame that still has lanes, or ends the group."""
    while group.frames:
        group.pc = group.frames[-1].meet
        if not _pop(group):
            return
        if group.bytes != NONE:
            return
    _finish(group)


def _pop(group: Group) -> bool:
    frame = group.frames[-1]
    if frame.children:
        group.machine.wait(group, "waits for the other lanes of its warp", frame)
        return False
    group.frames.pop()
    group.set_mask(frame.mask & ~group.warp.exited)
    return True


def _finish(group: Group) -> None:
    """A group ends: its lanes went back to the parent, or the warp is over."""
    machine, parent = group.machine, group.parent
    machine.remove(group)
    if parent is None:
        machine.warp_ended(group.warp)
        return
    frame = next(f for f in reversed(parent.frames) if f.meet == group.meet and f.children)
    frame.children -= 1
    if machine.on.merge:
        machine.on.merge(parent, group)
    if not frame.children:
        machine.wake(parent, frame)
