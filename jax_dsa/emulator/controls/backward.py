"""The SM100 backward of cudnn-frontend (one CTA per query and 64 heads): its launches and what must
come out.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np

from jax_dsa.cubins import manifest
from jax_dsa.emulator.controls import problems
from jax_dsa.emulator.controls.fetch import Compiled
from jax_dsa.emulator.launch import Launch, Program, Settings, Structure
from jax_dsa.emulator.report import Report
from jax_dsa.emulator.run import run
from jax_dsa.emulator.tensor_map import Pointer, TensorMap

BF16 = problems.BF16
HEADS = 64
ROLES = (
    manifest.Role("gather", 0, 3),
    manifest.Role("compute", 4, 7),
    manifest.Role("reduce", 8, 15),
    manifest.Role("mma", 16, 16),
    manifest.Role("load", 17, 17),
)
QUERIES_PER_DELTA = 41  # queries that one CTA of the Delta kernel serves (for max_topk != 1024)
OUTPUTS = ("dq", "dkv", "d_sink")


@dataclasses.dataclass(frozen=True)
class Result:
    """dq [S, H, D], dkv [T, D], d_sink [H] and the report."""

    dq: np.ndarray
    dkv: np.ndarray
    d_sink: np.ndarray
    report: Report


class BackwardControl:
    """Runs one release's backward on cases.

    Args:
      compiled: PTX of the release.
    """

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.release = compiled.source.release
        self.program = Program(compiled.text)
        self.symbols = {
            name: _only(self.program, name)
            for name in ("sum_OdO", "bwd", "convert", "sum_dSink", "clear_dKV")
        }

    def run(
        self, case: problems.Case, settings: Settings, inputs: problems.Inputs | None = None
    ) -> Result:
        """Runs every kernel of the release in stream order."""
        x = inputs or problems.make(case)
        arrays, settings = self.arrays(case, x, settings)
        results, report = run(self.program, self.launches(case, x), arrays, settings)
        return Result(*(results[name] for name in OUTPUTS), report=report)

    def errors(self, result: Result, reference: dict[str, np.ndarray]) -> dict[str, float]:
        """Relative L2 error of each output; d_sink only where the release computes it."""
        names = OUTPUTS if self.symbols["sum_dSink"] else OUTPUTS[:2]
        return {name: problems.relative(getattr(result, name), reference[name]) for name in names}

    def run_main(
        self, case: problems.Case, x: problems.Inputs, settings: Settings, arrays
    ) -> Result:
        """The main kernel and the conversion alone, on arrays of ``main_alone``; d_sink stays 0."""
        launches = [self._main(case, x), self._convert(case)]
        settings = dataclasses.replace(settings, outputs=settings.outputs | {"dq", "dkv"})
        results, report = run(self.program, launches, arrays, settings)
        return Result(*(results[name] for name in OUTPUTS), report=report)

    def main_alone(
        self, case: problems.Case, x: problems.Inputs
    ) -> tuple[Launch, dict[str, np.ndarray], Settings]:
        """The main kernel's launch and the arrays after the launches before it: for mutation,
        delays and timing.
        """
        arrays, settings = self.arrays(case, x, Settings(observers="none"))
        launches = self.launches(case, x)
        at = next(i for i, launch in enumerate(launches) if launch.kernel == self.symbols["bwd"])
        if at:
            arrays, _ = run(self.program, launches[:at], arrays, Settings(observers="none"))
        return launches[at], arrays, dataclasses.replace(settings, outputs=frozenset({"dq"}))

    def arrays(self, case: problems.Case, x: problems.Inputs, settings: Settings):
        """(inputs, outputs and workspaces, settings that name what starts unwritten)."""
        rows = _round8(case.S)
        unwritten = {"dq", "dkv"} | ({"acc"} if self.release == "1.32.0" else set())
        arrays = {
            "q": x.q, "kv": x.kv, "out": x.out, "dout": x.dout, "lse": x.lse, "sink": x.sink,
            "indices": x.indices, "lengths": x.lengths,
            "dq": np.zeros(x.q.shape, BF16), "dkv": np.zeros(x.kv.shape, BF16),
            "d_sink": np.zeros(case.H, np.float32),
            "work": np.zeros((2, rows, case.H), np.float32),
            "acc": np.zeros((_round8(case.T), case.head_dim), np.float32),
        }  # fmt: skip
        # Queries of length 0 and rows of key that nobody names are written by no kernel in some
        # releases.
        return arrays, dataclasses.replace(settings, outputs=settings.outputs | unwritten)

    def launches(self, case: problems.Case, x: problems.Inputs) -> list[Launch]:
        """Clear (1.32), Delta, main, convert, d_sink."""
        found = [self._delta(case), self._main(case, x), self._convert(case), self._sink(case)]
        if self.symbols["clear_dKV"]:
            found.insert(0, self._clear(case))
        return [launch for launch in found if launch is not None]

    # -- one launch each --------------------------------------------------------------------------
    def _work(self, case: problems.Case, part: int) -> Structure:
        """A workspace tensor (H, S): pointer, shape, stride."""
        pointer = Pointer("work", part * _round8(case.S) * case.H * 4)
        return _tensor(pointer, case.H, _round8(case.S), case.H)

    def _shape(self, case: problems.Case) -> list[int]:
        return [case.S, case.T, case.head_dim, case.H, 1]

    def _delta(self, case: problems.Case) -> Launch:
        values = [
            _vector("out", case.S), _vector("dout", case.S), self._work(case, 0), _vector("lse",
            case.S),
            Pointer("sink"), self._work(case, 1), -1.0, -math.log2(math.e), *self._shape(case),
        ]  # fmt: skip
        grid = (-(-case.S // QUERIES_PER_DELTA), case.H, 1)
        return self._launch("sum_OdO", grid, (8, 16, 1), values)

    def _main(self, case: problems.Case, x: problems.Inputs) -> Launch:
        D, wide = case.head_dim, case.head_dim == 576
        maps = [
            _tensor_map("q", case, D),
            _tensor_map("dout", case, 512),
            _tensor_map("dq", case, D),
        ]
        maps += [maps[2]] if wide else []
        atoms = [v for tensor in maps for v in (tensor, b"\0" * 4)]
        middle = [0, 0] if self.release == "1.32.0" else [Pointer("d_sink"), Pointer("sink")]
        values = [
            *self._shape(case), *[b"\0" * 32] * (7 if wide else 5), *atoms,
            _vector("kv", case.T), _vector("dq", case.S), self._accumulator(case), *middle,
            _vector("indices", case.S), _vector("lengths", case.S), self._work(case, 1),
            self._work(case, 0), x.scale,
        ]  # fmt: skip
        return self._launch(
            "bwd", (case.S, 1, 1), (640, 1, 1), values, self.compiled.dynamic_shared_bytes
        )

    def _accumulator(self, case: problems.Case):
        if self.release != "1.32.0":
            return _vector("acc", case.T)
        return Structure(Pointer("acc"), struct.pack("<iiq", case.T, 0, case.head_dim))

    def _clear(self, case: problems.Case) -> Launch:
        return self._launch(
            "clear_dKV", (-(-case.T // 64), 1, 1), (32, 8, 1), [self._accumulator(case), case.T]
        )

    def _convert(self, case: problems.Case) -> Launch:
        values = [self._accumulator(case), _vector("dkv", case.T), case.T]
        return self._launch("convert", (-(-case.T // 32), 1, 1), (32, 32, 1), values)

    def _sink(self, case: problems.Case) -> Launch | None:
        if not self.symbols["sum_dSink"]:
            return None
        values = [
            self._work(case, 0),
            self._work(case, 1),
            Pointer("sink"),
            Pointer("d_sink"),
            *self._shape(case),
        ]
        return self._launch("sum_dSink", (-(-case.S // 256), case.H, 1), (32, 1, 1), values)

    def _launch(self, name: str, grid, block, values, shared: int = 0) -> Launch:
        symbol = self.symbols[name]
        parameters = self.program.module.kernels[symbol].parameters
        entry = _entry(symbol, block, [p.size for p in parameters], ROLES if name == "bwd" else ())
        return Launch(symbol, grid, block, values, shared, entry=entry)


def _only(program: Program, part: str) -> str:
    return next(
        (name for name in program.module.kernels if name.startswith(f"kernel_cutlass_{part}_")), ""
    )


def _round8(n: int) -> int:
    return -(-n // 8) * 8


def _tensor(pointer: Pointer, *words: int) -> Structure:
    """A tensor parameter: the pointer, then its dynamic extents and strides, padded to 8 bytes."""
    packed = struct.pack(f"<{len(words)}i", *words)
    return Structure(pointer, packed + b"\0" * (-len(packed) % 8))


def _vector(array: str, extent: int) -> Structure:
    """A tensor whose only dynamic word is one extent."""
    return _tensor(Pointer(array), extent)


def _tensor_map(array: str, case: problems.Case, width: int) -> TensorMap:
    row = width * 2
    return TensorMap(
        "BFLOAT16",
        Pointer(array),
        (width, case.H, case.S),
        (row, row * case.H),
        (64, 64, 1),
        swizzle="128B",
    )


def _entry(symbol: str, block, sizes, roles) -> manifest.Kernel:
    parameters = [manifest.Parameter(f"p{i}", "bytes", size=size) for i, size in enumerate(sizes)]
    return manifest.Kernel(symbol, "sm_100a", "backward", parameters, block, roles=roles)
