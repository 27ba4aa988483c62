"""The four ways an operation meets several devices, in one place. Knows nothing of what runs inside.

| mode                             | who splits the arrays                       | who adds partial results                  |
|----------------------------------|---------------------------------------------|-------------------------------------------|
| jit, Auto mesh                   | XLA, asked through ``partitioned``          | ``partitioned``: psum or reduce-scatter   |
| jit, Explicit mesh               | ``distribute``: a shard_map from the types  | transpose of ``align``'s pcast, ``gather``|
| shard_map(check_vma=True)        | the caller                                  | transpose of ``align``'s pcast            |
| shard_map(check_vma=False)       | the caller                                  | JAX, at the boundary, in the operand dtype|

A ``Rule`` names the dimensions; batch axes (any number, in front) are implied. An operand may have size 1 on a batch axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the dimensions of an operation's operands and results may be split, one letter a dimension.

    Attributes:
        operands: the dimensions behind the batch axes, an entry an operand: ``("shd", "td")``.
        results: the same for the results.
        sharded: dimensions that may stay split on the device; batch axes always may.
        gathered: dimensions that arrive split and are all-gathered, their gradient reduce-scattered.
        summed: result number -> dimensions over whose splits partial results are added.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    sharded: str
    gathered: str = ""
    summed: tuple[tuple[int, str], ...] = ()


def align(arrays: Sequence[jax.Array], accum) -> list[jax.Array]:
    """Gives all operands the same varying mesh axes; floating operands in ``accum``, so that the psum of their
    cotangents, which is the transpose of this cast, adds in ``accum``."""
    arrays = [x.astype(accum) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
    varying = [_varying(x) for x in arrays]
    union = frozenset().union(*varying)
    aligned = []
    for x, own in zip(arrays, varying, strict=True):
        missing = tuple(sorted(union - own))
        aligned.append(lax.pcast(x, missing, to="varying") if missing else x)
    return aligned


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(getattr(jax.typeof(x), "vma", ()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axis_name, accum) -> jax.Array:
    """All-gather along axis -2, the result in ``accum``; backward a reduce-scatter in ``accum``, cast once."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True).astype(accum)


def _gather_fwd(x, axis_name, accum):
    return gather(x, axis_name, accum), jnp.zeros((0,), x.dtype)


def _gather_bwd(axis_name, accum, like, g):
    g = g.astype(accum)
    return (
        lax.psum_scatter(g, axis_name, scatter_dimension=g.ndim - 2, tiled=True).astype(like.dtype),
    )


gather.defvjp(_gather_fwd, _gather_bwd)


# ---------------------------------------------------------------------------------------------- Explicit meshes


def distribute(fn: Callable, rule: Rule, accum, arrays: Sequence[jax.Array], names: Sequence[str]):
    """``fn(*align(arrays))``; where the operands' types name an Explicit mesh, on each device's own part of them.

    Args:
        fn: arrays -> tuple of arrays, as ``rule`` says.
        rule: the dimensions.
        accum: dtype in which contributions to a gradient are added.
        arrays: operands, all with the same batch axes (or 1).
        names: the operands' names, for errors.

    Raises:
        ValueError: a dimension is split that the rule allows neither to stay split nor to be gathered.
    """
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return fn(*align(arrays, accum))
    batch = arrays[0].ndim - len(rule.operands[0])
    specs = [_explicit_spec(x) for x in arrays]
    for x, spec, dims, name in zip(arrays, specs, rule.operands, names, strict=True):
        _refuse_split_width(x, spec, dims, name, rule, batch)
    labels = [_labels(dims, batch) for dims in rule.operands]
    kept = _choose(labels, specs, [x.shape for x in arrays], [*range(batch), *rule.sharded])
    in_specs, gathers = [], []
    for x, spec, row in zip(arrays, specs, labels, strict=True):
        own = _spec(row, x.shape, kept)
        taken = {a for axes in own for a in axes}
        moved = {
            i: spec[i]
            for i, d in enumerate(row)
            if d in set(rule.gathered) and not taken & set(spec[i])
        }
        in_specs.append(_partition_spec([moved.get(i, axes) for i, axes in enumerate(own)]))
        gathers.append(next(iter(moved.values()), ()))
    result_rows = [_labels(dims, batch) for dims in rule.results]
    out_specs = tuple(_partition_spec([kept.get(d, ()) for d in row]) for row in result_rows)

    def body(*local):
        local = [
            gather(x, axes, accum) if axes else x for x, axes in zip(local, gathers, strict=True)
        ]
        return fn(*align(local, accum))

    arrays = [
        jax.sharding.reshard(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, in_specs, strict=True)
    ]
    explicit = {
        n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit
    }
    wrapped = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, axis_names=explicit
    )
    return wrapped(*arrays)


def _explicit_mesh(arrays):
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty and any(t == AxisType.Explicit for t in mesh.axis_types):
            return mesh
    return None


def _explicit_spec(x) -> list[Axes]:
    spec = jax.typeof(x).sharding.spec
    return [_axes(entry) for entry in (*spec, *[None] * (x.ndim - len(spec)))]


def _refuse_split_width(x, spec, dims, name, rule, batch):
    for i, d in enumerate(dims, start=batch):
        if spec[i] and d in "dv":
            raise ValueError(
                f"{name} must not be sharded along its last dimension: got {jax.typeof(x)}, split over {spec[i]}. "
                f"Shard batch axes, queries or heads; reshard {name} first."
            )


# -------------------------------------------------------------------------------------------------- Auto meshes


def partitioned(
    fn: Callable, rule: Rule, operand_shapes: Sequence[tuple[int, ...]], result_shapes
) -> Callable:
    """``fn`` wrapped so that XLA's partitioner runs it on each device's own part; itself where there is one device.

    Args:
        fn: arrays -> tuple of arrays, for any sizes.
        rule: the dimensions.
        operand_shapes: global shapes, to tell the batch axes of size 1.
        result_shapes: global shapes of the results.
    """
    batch = len(operand_shapes[0]) - len(rule.operands[0])
    rows = [_labels(dims, batch) for dims in (*rule.operands, *rule.results)]
    shapes = [*operand_shapes, *result_shapes]
    count = len(rule.operands)

    def partition(mesh, operand_types, result_types):
        types = [*operand_types, *result_types]
        if not all(isinstance(t.sharding, NamedSharding) for t in types):
            whole = [t.sharding.get_replicated(t.sharding._device_assignment) for t in types]
            return mesh, fn, tuple(whole[count:]), tuple(whole[:count])
        asked = [
            [_axes(e) for e in (*t.sharding.spec, *[None] * (len(t.shape) - len(t.sharding.spec)))]
            for t in types
        ]
        kept = _choose(rows, asked, shapes, [*range(batch), *rule.sharded], mesh.shape)
        specs = [_spec(row, shape, kept) for row, shape in zip(rows, shapes, strict=True)]
        sums = []
        for number, dims in rule.summed:
            row, spec = rows[count + number], specs[count + number]
            over = tuple(a for d in dims for a in kept.get(d, ()))
            scattered = _scatter_axes(row, asked[count + number], over, rule.gathered)
            for i, axes in scattered.items():
                spec[i] = axes
            sums.append((number, over, scattered))
        shardings = [NamedSharding(mesh, _partition_spec(spec)) for spec in specs]

        def lowered(*local):
            results = list(fn(*local))
            for number, over, scattered in sums:
                results[number] = _add_partials(results[number], over, scattered)
            return tuple(results)

        return mesh, lowered, tuple(shardings[count:]), tuple(shardings[:count])

    def infer(mesh, operand_types, result_types):
        return partition(mesh, operand_types, [_replicated(mesh, t) for t in result_types])[2]

    wrapped = custom_partitioning(lambda *arrays: tuple(fn(*arrays)))
    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_shardy_rule(rows, shapes, count, rule),
        need_replication_factors=tuple(sorted(_whole_factors(rows[:count], rule))),
    )
    return wrapped


def _add_partials(x, over: Axes, scattered: Mapping[int, Axes]):
    for i, axes in scattered.items():
        x = lax.psum_scatter(x, axes, scatter_dimension=i, tiled=True)
        over = tuple(a for a in over if a not in axes)
    return lax.psum(x, over) if over else x


def _scatter_axes(row, asked, over: Axes, gathered: str) -> dict[int, Axes]:
    """Where a summed result is wanted split along a gathered dimension, over axes it is summed over: scatter it."""
    return {
        i: asked[i]
        for i, d in enumerate(row)
        if d in set(gathered) and asked[i] and set(asked[i]) <= set(over)
    }


def _whole_factors(rows, rule: Rule) -> set[str]:
    return {d for row in rows for d in row if isinstance(d, str) and d not in rule.sharded}


def _shardy_rule(rows, shapes, count: int, rule: Rule) -> str:
    """The einsum-like rule of Shardy. A size-1 batch axis, and a gathered dimension of a result, are factors of their own."""
    texts = []
    for number, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        factors = []
        for i, d in enumerate(row):
            own = (
                isinstance(d, int)
                and shape[i] == 1
                or (number >= count and d in set(rule.gathered))
            )
            name = f"b{d}" if isinstance(d, int) else d
            factors.append(f"{name}_{number}" if own else name)
        texts.append(" ".join(factors))
    return ", ".join(texts[:count]) + " -> " + ", ".join(texts[count:])


def _replicated(mesh, t):
    return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


# ------------------------------------------------------------------------------------------------------- shared


def _labels(dims: str, batch: int) -> list[Any]:
    """Batch axes by number, then the letters."""
    return [*range(batch), *dims]


def _axes(entry) -> Axes:
    if entry is None or isinstance(entry, type(PartitionSpec.UNCONSTRAINED)):
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _choose(rows, specs, shapes, dims, sizes: Mapping[str, int] | None = None) -> dict[Any, Axes]:
    """For each dimension the mesh axes of the first array that splits it; no axis twice, only where the size divides."""
    kept: dict[Any, Axes] = {}
    for d in dims:
        taken = {a for axes in kept.values() for a in axes}
        for row, spec, shape in zip(rows, specs, shapes, strict=True):
            if d not in row:
                continue
            i = row.index(d)
            ways = 1
            for a in spec[i]:
                ways *= sizes[a] if sizes else 1
            if spec[i] and shape[i] > 1 and not taken & set(spec[i]) and shape[i] % ways == 0:
                kept[d] = spec[i]
                break
    return kept


def _spec(row, shape, kept) -> list[Axes]:
    return [
        () if isinstance(d, int) and shape[i] == 1 else kept.get(d, ()) for i, d in enumerate(row)
    ]


def _partition_spec(spec: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec))
