"""The SM100 forward of cudnn-frontend 1.32 for 64 heads (gather4, mma.ws, A in tensor memory)."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from jax_dsa.cubins import manifest
from jax_dsa.emulator.controls import problems
from jax_dsa.emulator.controls.fetch import Compiled
from jax_dsa.emulator.launch import Launch, Program, Settings, Structure
from jax_dsa.emulator.report import Report
from jax_dsa.emulator.run import run
from jax_dsa.emulator.tensor_map import Pointer, TensorMap

ROLES = (
    manifest.Role("softmax", 0, 3),
    manifest.Role("gather", 4, 7),
    manifest.Role("mma", 8, 8),
    manifest.Role("load", 9, 11),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """out [S, H, 512], lse [S, H] and the report."""

    out: np.ndarray
    lse: np.ndarray
    report: Report


class ForwardControl:
    """Runs the forward on cases."""

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.program = Program(compiled.text)
        (self.symbol,) = self.program.module.kernels

    def run(
        self, case: problems.Case, settings: Settings, inputs: problems.Inputs | None = None
    ) -> Result:
        """Runs the kernel; the case's K is rounded up by the caller to a multiple of 64."""
        launch, arrays, alone = self.main_alone(case, inputs or problems.make(case))
        settings = dataclasses.replace(settings, outputs=settings.outputs | alone.outputs)
        results, report = run(self.program, launch, arrays, settings)
        return Result(results["out"], results["lse"], report)

    def main_alone(
        self, case: problems.Case, x: problems.Inputs
    ) -> tuple[Launch, dict[str, np.ndarray], Settings]:
        """The only launch, its arrays, and settings that name those that start unwritten."""
        arrays = {
            "q": x.q, "kv": x.kv, "indices": x.indices, "sink": x.sink, "lengths": x.lengths,
            "out": np.zeros(x.out.shape, problems.BF16), "top": np.zeros(x.lse.shape, np.float32),
            "lse": np.zeros(x.lse.shape, np.float32),
        }  # fmt: skip
        settings = Settings(observers="none", outputs=frozenset({"out", "top", "lse"}))
        return self.launch(case, x), arrays, settings

    def launch(self, case: problems.Case, x: problems.Inputs) -> Launch:
        sizes = [p.size for p in self.program.module.kernels[self.symbol].parameters]
        row = case.head_dim * 2
        q = TensorMap(
            "BFLOAT16",
            Pointer("q"),
            (case.head_dim, case.H, case.S),
            (row, row * case.H),
            (64, 64, 1),
            swizzle="128B",
        )
        out = TensorMap(
            "BFLOAT16",
            Pointer("out"),
            (512, case.H, case.S),
            (1024, 1024 * case.H),
            (64, 64, 1),
            swizzle="128B",
        )
        kv = TensorMap("BFLOAT16", Pointer("kv"), (512, case.T), (row,), (64, 1), swizzle="128B")
        indices = Structure(Pointer("indices"), struct.pack("<iiq", case.S, case.K, case.K))
        values = [
            case.S, _extent("q", case.S, 512 * 2), _extent("kv", case.T), indices, case.S,
            _extent("top", case.S), _extent("lse", case.S), Pointer("sink"), _extent("lengths",
            case.S), x.scale,
            q, out, kv, *[b"\0" * 32] * 3,
        ]  # fmt: skip
        entry = manifest.Kernel(
            self.symbol, "sm_100a", "forward", [manifest.Parameter(f"p{i}", "bytes",
            size=n) for i, n in enumerate(sizes)],
            (384, 1, 1), roles=ROLES,
        )  # fmt: skip
        shared = self.compiled.dynamic_shared_bytes
        return Launch(self.symbol, (case.S, 1, 1), (384, 1, 1), values, shared, entry=entry)


def _extent(array: str, extent: int, offset: int = 0) -> Structure:
    return Structure(Pointer(array, offset), struct.pack("<ii", extent, 0))
