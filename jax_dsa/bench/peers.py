"""Other packages' kernels, where they are installed, behind the same interface as ours.

    flash_mla        forward    PyPI sgl-flash-mla (FlashMLA's SM90 kernels)
    cudnn_frontend   backward   PyPI nvidia-cudnn-frontend, with nvidia-cutlass-dsl's cu13 libraries
    tilelang         both       PyPI tilelang, and its examples/deepseek_v32 on sys.path

They are PyTorch packages: operands go there through DLPack, without a copy.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax

from jax_dsa.bench.programs import Operands, Program, Shape


def _torch() -> Any:
    return importlib.import_module("torch")


def _tensors(*arrays: jax.Array | None) -> list[Any]:
    return [_torch().from_dlpack(x) for x in arrays if x is not None]


def _synchronised(call: Callable[[], object]) -> Program:
    synchronize = _torch().cuda.synchronize

    def run():
        call()
        synchronize()

    return Program(run)


def _flash_mla(kind: str, shape: Shape, given: Operands) -> Program | None:
    if kind != "forward":
        return None
    peer: Any = importlib.import_module("flash_mla")
    q, kv, indices = _tensors(given.q, given.kv, given.indices)
    scale = shape.head_dim**-0.5
    return _synchronised(
        lambda: peer.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], scale, use_legacy=True)
    )


def _cudnn_frontend(kind: str, shape: Shape, given: Operands) -> Program | None:
    if kind != "backward":
        return None
    peer: Any = importlib.import_module("cudnn.deepseek_sparse_attention")
    q, kv, indices, out, lse, dout = _tensors(
        given.q, given.kv, given.indices, given.out, given.lse, given.dout
    )
    torch = _torch()
    sink = torch.full((shape.heads,), -float("inf"), device=q.device)
    scale = shape.head_dim**-0.5
    return _synchronised(
        lambda: peer.sparse_attention_backward_wrapper(
            q, kv, out, dout, lse, sink, indices, softmax_scale=scale
        )
    )


def _tilelang(kind: str, shape: Shape, given: Operands) -> Program | None:
    q, kv, indices, dout = _tensors(given.q, given.kv, given.indices, given.dout)
    q, kv = q[None], kv[None, :, None].contiguous()
    indices = indices[None, :, None].contiguous()
    if kind == "forward":
        peer: Any = importlib.import_module("sparse_mla_fwd_pipelined")
        return _synchronised(lambda: peer.sparse_mla_fwd_interface(q, kv, indices, shape.keys, 1))
    if kind == "backward":
        peer = importlib.import_module("sparse_mla_bwd")
        out, lse = _tensors(given.out, given.lse)
        lse2 = lse[None] * 1.4426950408889634  # base 2
        return _synchronised(
            lambda: peer.sparse_mla_bwd(q, kv, out[None], dout[None], indices, lse2)
        )
    return None


PEERS: dict[str, Callable[[str, Shape, Operands], Program | None]] = {
    "flash_mla": _flash_mla,
    "cudnn_frontend": _cudnn_frontend,
    "tilelang": _tilelang,
}
