"""Manifest entries as the C structures of ``csrc_bridge/bridge.h``; field for field as there."""

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

from jax_dsa.cubins import manifest

BRIDGE_VERSION = 2
MAX_RANK = 5


class Fact(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("value", c_char_p)]


class TensorMap(ctypes.Structure):
    _fields_ = [
        ("data_type", c_char_p),
        ("buffer", c_char_p),
        ("rank", c_int32),
        ("global_dim", c_char_p * MAX_RANK),
        ("global_strides", c_char_p * MAX_RANK),
        ("box_dim", c_uint32 * MAX_RANK),
        ("element_strides", c_uint32 * MAX_RANK),
        ("interleave", c_char_p),
        ("swizzle", c_char_p),
        ("l2_promotion", c_char_p),
        ("oob_fill", c_char_p),
    ]


class Parameter(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("kind", c_char_p),
        ("type", c_char_p),
        ("tensor_map", ctypes.POINTER(TensorMap)),
    ]


class Kernel(ctypes.Structure):
    _fields_ = [
        ("symbol", c_char_p),
        ("arch", c_char_p),
        ("op", c_char_p),
        ("major", c_int32),
        ("minor_low", c_int32),
        ("minor_high", c_int32),
        ("minimum_cuda", c_int32),
        ("minimum_driver", c_char_p),
        ("facts", ctypes.POINTER(Fact)),
        ("num_facts", c_int32),
        ("parameters", ctypes.POINTER(Parameter)),
        ("num_parameters", c_int32),
        ("grid", c_char_p * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("dynamic_shared_bytes", c_uint32),
        ("zeroed", ctypes.POINTER(c_char_p)),
        ("num_zeroed", c_int32),
        ("image_hash", c_char_p),
        ("image", c_void_p),
        ("image_size", c_size_t),
    ]


def capabilities(arch: str) -> tuple[int, int, int]:
    """The compute capabilities that code of an architecture runs on: major, lowest, highest minor.

    "sm_90a" runs on 9.0 alone, "sm_100f" on its family from 10.0 on, "sm_90" on 9.x from 9.0 on
    (PTX ISA, ".target").

    Raises:
        ValueError: the name is none of an architecture.
    """
    found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if not found:
        raise ValueError(f"arch: got {arch!r}, want a name such as 'sm_90a' or 'sm_100f'")
    major, minor = int(found[1]), int(found[2])
    return major, minor, minor if found[3] == "a" else 9


def minimum_cuda(tools: str) -> int:
    """The least ``cuDriverGetVersion`` for code of CUDA tools "12.9": that of their major version.

    0 where the text names no version. Source: "CUDA minor version compatibility", CUDA Toolkit
    release notes.
    """
    found = re.fullmatch(r"(\d+)\.\d+", tools)
    return 1000 * int(found[1]) if found else 0


def kernel(entry: manifest.Kernel, image: bytes) -> Kernel:
    """The structure of a manifest entry and its cubin; it keeps alive what it points to.

    Raises:
        ManifestError: the entry wants something of the launcher that it cannot give.
    """
    if entry.workspaces:
        raise manifest.ManifestError(
            f"kernel {entry.symbol}: the launcher passes no workspaces, got {[*entry.workspaces]}"
        )
    facts = _array(Fact, [Fact(_text(k), _text(v)) for k, v in sorted(entry.facts.items())])
    parameters = _array(Parameter, [_parameter(p) for p in entry.parameters])
    zeroed = _array(c_char_p, [_text(name) for name in entry.zeroed])
    major, low, high = capabilities(entry.arch)
    return Kernel(
        symbol=_text(entry.symbol),
        arch=_text(entry.arch),
        op=_text(entry.op),
        major=major,
        minor_low=low,
        minor_high=high,
        minimum_cuda=minimum_cuda(entry.tools.get("cuda", "")),
        minimum_driver=_text(entry.minimum_driver or "one of that version"),
        facts=facts,
        num_facts=len(facts),
        parameters=parameters,
        num_parameters=len(parameters),
        grid=_fill(c_char_p, 3, map(_text, entry.grid)),
        block=_fill(c_uint32, 3, entry.block),
        cluster=_fill(c_uint32, 3, entry.cluster),
        dynamic_shared_bytes=entry.dynamic_shared_bytes,
        zeroed=zeroed,
        num_zeroed=len(zeroed),
        image_hash=_text(entry.hashes["cubin"]),
        image=ctypes.cast(ctypes.c_char_p(image), c_void_p),
        image_size=len(image),
    )


def _parameter(p: manifest.Parameter) -> Parameter:
    pointed = ctypes.pointer(_tensor_map(p.name, p.tensor_map)) if p.kind == "tensor_map" else None
    return Parameter(_text(p.name), _text(p.kind), _text(p.type), pointed)


def _tensor_map(name: str, fields: Mapping[str, Any]) -> TensorMap:
    """Fields are named as in ``cuTensorMapEncodeTiled``; sizes are formulas, bytes for strides."""
    try:
        dims, strides = fields["globalDim"], fields["globalStrides"]
        box = fields["boxDim"]
        if not len(dims) == len(box) == len(strides) + 1 <= MAX_RANK:
            raise manifest.ManifestError(
                f"tensor map {name}: got {len(dims)} globalDim, {len(box)} boxDim and "
                f"{len(strides)} globalStrides, want n, n and n - 1, n at most {MAX_RANK}"
            )
        return TensorMap(
            data_type=_text(fields["tensorDataType"]),
            buffer=_text(fields["globalAddress"]),
            rank=len(dims),
            global_dim=_fill(c_char_p, MAX_RANK, map(_text, dims)),
            global_strides=_fill(c_char_p, MAX_RANK, map(_text, strides)),
            box_dim=_fill(c_uint32, MAX_RANK, box),
            element_strides=_fill(
                c_uint32, MAX_RANK, fields.get("elementStrides", (1,) * len(dims))
            ),
            interleave=_text(fields.get("interleave", "NONE")),
            swizzle=_text(fields.get("swizzle", "NONE")),
            l2_promotion=_text(fields.get("l2Promotion", "NONE")),
            oob_fill=_text(fields.get("oobFill", "NONE")),
        )
    except KeyError as error:
        raise manifest.ManifestError(f"tensor map {name}: field {error} is missing") from None


def _text(value: Any) -> bytes:
    return str(value).encode()


def _array(kind: Any, items: Sequence[Any]) -> Any:
    return (kind * len(items))(*items)


def _fill(kind: Any, size: int, items: Iterable[Any]) -> Any:
    return (kind * size)(*items)
