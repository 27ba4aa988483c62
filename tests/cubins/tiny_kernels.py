"""The smallest kernels that follow the interface of ``jax_dsa.kernels``: out = scale * q."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import nullptr

from jax_dsa.cubins import manifest

THREADS = 128


class Scale:
    """One kernel. ``local`` words are kept in an array that is indexed by a run-time number."""

    op, block = "forward", (THREADS, 1, 1)
    grid = ("S", "ceil(H/128)", "1")
    dynamic_shared_bytes = 1024
    roles = (manifest.Role("all", 0, 3),)

    def __init__(self, head_dim: int, local: int = 0, allowed_spills=()):
        self.facts = {"head_dim": head_dim, "value_dim": 512, "dtype": "float32"}
        self.local, self.allowed_spills = local, allowed_spills
        self.parameters = (
            *(manifest.Parameter(name, "pointer") for name in ("q", "out")),
            *(manifest.Parameter(name, "scalar", "i32") for name in ("S", "H")),
            manifest.Parameter("scale", "scalar", "f32"),
        )

    def compile_arguments(self):
        pointer = nullptr(cutlass.Float32, cute.AddressSpace.gmem, 4)
        return pointer, pointer, cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1.0)

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, out: cute.Pointer, S: cutlass.Int32, H: cutlass.Int32,
        scale: cutlass.Float32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        query, block, _ = cute.arch.block_idx()
        at = query * H + block * THREADS + thread
        if block * THREADS + thread < H:
            source = cute.make_tensor(q, cute.make_layout(S * H))
            target = cute.make_tensor(out, cute.make_layout(S * H))
            if cutlass.const_expr(self.local):
                words = cute.make_rmem_tensor(self.local, cutlass.Float32)
                for i in cutlass.range(self.local, unroll=1):
                    words[i] = source[(at + i) % (S * H)]
                for i in cutlass.range(H, unroll=1):
                    words[(i * i) % self.local] = words[(i * 7) % self.local] * scale
                target[at] = words[H % self.local]
            else:
                target[at] = source[at] * scale

    @cute.jit
    def __call__(
        self, q: cute.Pointer, out: cute.Pointer, S: cutlass.Int32, H: cutlass.Int32,
        scale: cutlass.Float32,
    ):  # fmt: skip
        grid = (S, (H + THREADS - 1) // THREADS, 1)
        self.kernel(q, out, S, H, scale).launch(
            grid=grid, block=self.block, smem=self.dynamic_shared_bytes
        )


KERNELS = (Scale(512), Scale(576))
