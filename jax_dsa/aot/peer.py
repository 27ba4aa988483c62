"""Compiles a kernel of an installed public package to PTX, without a GPU and without torch: a
script.

    python peer.py PACKAGE_FOLDER RELEASE {backward|forward} HEAD_DIM MAX_TOPK ARCH OUTPUT_FOLDER

It needs nvidia-cutlass-dsl and writes ``kernel.ptx`` and ``facts.json`` (dynamic shared memory of
the main kernel).
The package's parent modules import torch; they are replaced by empty ones, so that only the
kernel's file is loaded.
"""

import json
import pathlib
import sys
import types

ROOT = "cudnn.deepseek_sparse_attention"
HEADS, VALUE_DIM = 64, 512


def stub_parents(folder: pathlib.Path) -> None:
    """Registers empty parent packages whose search paths are the installed folders."""
    names = ["cudnn", ROOT]
    names += [
        f"{ROOT}.{part}"
        for part in ("utils", "sparse_attention_backward", "sparse_attention_forward")
    ]
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module


def compile_backward(cute, cutlass, release: str, head_dim: int, max_topk: int, options: str):
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import (  # pyright: ignore
        dsa_bwd_sm100,
    )

    typed = {} if release == "1.26.0" else {"element_dtype": cutlass.BFloat16}
    kernel = dsa_bwd_sm100.FlashAttentionDSABackwardSm100(
        head_dim=head_dim, head_dim_v=VALUE_DIM, block_tile=64, max_topk=max_topk, **typed
    )
    f = Fakes(cute, cutlass)
    queries, keys = f.bf16(f.S, HEADS, head_dim), f.bf16(f.T, head_dim)
    out, lse, sink = f.bf16(f.S, HEADS, VALUE_DIM), f.f32(f.S, HEADS, align=8), f.f32(HEADS)
    indices, lengths = f.i32(f.S, max_topk), f.i32(f.S)
    work = f.u8(1, HEADS, cute.sym_int(), 8), f.u8(1, 1, cute.sym_int(), head_dim * 4)
    i32 = cutlass.Int32
    shape = (i32(1), i32(1), i32(head_dim), (i32(HEADS), i32(1)))
    tensors = (queries, keys, out, out, lse, sink, indices, lengths, queries, keys, sink, *work)
    compiled = cute.compile(
        kernel, shape, *tensors, cutlass.Float32(1.0), f.stream(), options=options
    )
    return compiled, kernel


def compile_forward(cute, cutlass, release: str, head_dim: int, max_topk: int, options: str):
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import (  # pyright: ignore
        dsa_fwd_sm100_head64,
    )

    kernel = dsa_fwd_sm100_head64.SparseAttentionForwardSm100Head64(
        head_dim=head_dim, indexer_topk=0
    )
    f = Fakes(cute, cutlass)
    queries, keys = f.bf16(f.S, HEADS, head_dim), f.bf16(f.T, head_dim)
    out, lse, sink = (
        f.bf16(f.S, HEADS, VALUE_DIM),
        f.f32(f.S, HEADS, align=4),
        f.f32(HEADS, align=4),
    )
    indices, lengths = f.i32(f.S, cute.sym_int(), align=4), f.i32(f.S, align=4)
    tensors = (queries, keys, indices, out, lse, lse, None, sink, lengths)
    options += " --opt-level 2"
    return cute.compile(kernel, *tensors, cutlass.Float32(1.0), f.stream(), options=options), kernel


class Fakes:
    """Storage-free tensors with symbolic query and key counts."""

    def __init__(self, cute, cutlass):
        self.cute, self.cutlass = cute, cutlass
        self.S, self.T = cute.sym_int(), cute.sym_int()

    def _tensor(self, dtype, shape, align=16):
        order = tuple(reversed(range(len(shape))))
        return self.cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=align
        )

    def bf16(self, *shape):
        return self._tensor(self.cutlass.BFloat16, shape)

    def f32(self, *shape, align=16):
        return self._tensor(self.cutlass.Float32, shape, align)

    def i32(self, *shape, align=16):
        return self._tensor(self.cutlass.Int32, shape, align)

    def u8(self, *shape):
        return self._tensor(self.cutlass.Uint8, shape)

    def stream(self):
        return self.cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False)


def main(argv: list[str]) -> None:
    folder, release, kind, head_dim, max_topk, arch, output = argv
    stub_parents(pathlib.Path(folder))
    import cutlass  # pyright: ignore
    import cutlass.cute as cute  # pyright: ignore

    target = pathlib.Path(output)
    options = f"--gpu-arch={arch} --keep-ptx --keep-cubin --dump-dir={target}"
    build = compile_backward if kind == "backward" else compile_forward
    compiled, kernel = build(cute, cutlass, release, int(head_dim), int(max_topk), options)
    text = compiled.artifacts.PTX
    (target / "kernel.ptx").write_text(text if isinstance(text, str) else text.decode())
    facts = {"dynamic_shared_bytes": kernel.shared_storage.size_in_bytes()}
    (target / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
