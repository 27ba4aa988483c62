"""The four ways an operation meets several devices; knows nothing of what runs inside.

| mode                       | who splits the arrays       | who adds the parts of a gradient   |
|----------------------------|-----------------------------|------------------------------------|
| jit, Auto mesh             | XLA, asked by `on_auto`     | `on_auto`: psum or reduce-scatter  |
| jit, Explicit mesh         | `on_explicit`: a shard_map  | `on_explicit`: the same            |
| shard_map(check_vma=True)  | the caller                  | the transpose of `settle`'s pcast  |
| shard_map(check_vma=False) | the caller                  | JAX, at the boundary, in its dtype |

`distribute` serves functions that JAX differentiates itself. A `Rule` names the dimensions of an
operation; batch axes, any number of them, stand in front and are implied. An operand may have
size 1 on a batch axis: it is then not split there.
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

Axes = tuple[str, ...]  # the mesh axes that split one dimension
Spec = list[Axes]  # the same for every dimension of an array


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the dimensions of an operation's operands and results may be split, one letter each.

    Attributes:
        operands: the dimensions behind the batch axes, an entry an operand: ``("shd", "td")``.
        results: the same for the results.
        sharded: dimensions that may stay split on the device, as batch axes may.
        gathered: dimensions of operands that may arrive split and are all-gathered.
        gradients: pairs (result, operand): the result is the operand's gradient, of which every
            device that holds other queries or heads has a part. The parts are added; where the
            operand is split along a gathered dimension, by a reduce-scatter.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    sharded: str
    gathered: str = ""
    gradients: tuple[tuple[int, int], ...] = ()

    def rows(self, batch: int) -> list[list[Any]]:
        """The dimensions of operands and results; batch axes by number."""
        return [[*range(batch), *dims] for dims in (*self.operands, *self.results)]


# ------------------------------------------------------------------------------------ the plan


@dataclasses.dataclass(frozen=True)
class Plan:
    """One device's part of an operation.

    Attributes:
        operands: splits of the operands on the device.
        results: splits of the results.
        gathers: for each operand, dimension -> axes over which it arrives split.
        sums: result -> (axes over which parts are added, dimension -> those to scatter over).
    """

    operands: list[Spec]
    results: list[Spec]
    gathers: list[dict[int, Axes]]
    sums: dict[int, tuple[Axes, dict[int, Axes]]]


def plan(rule: Rule, shapes: Sequence, asked: Sequence[Spec], sizes: Mapping[str, int]) -> Plan:
    """Decides who holds what.

    Args:
        rule: the dimensions.
        shapes: of operands, then results.
        asked: how each of them comes, or is wanted, split.
        sizes: devices along each mesh axis.
    """
    count = len(rule.operands)
    rows = rule.rows(len(shapes[0]) - len(rule.operands[0]))
    kept = _choose(rule, rows, shapes, asked, sizes)
    specs = [_split(row, shape, kept) for row, shape in zip(rows, shapes, strict=True)]
    used = {a for axes in kept.values() for a in axes}
    gathers = [
        # Over an axis that splits nothing else the array is resharded before.
        {i: axes for i, axes in _gathers(rule, *each).items() if set(axes) <= used}
        for each in zip(rows[:count], specs, asked, strict=False)
    ]
    sums = {}
    for result, operand in rule.gradients:
        over = _over(rule, kept, rule.operands[operand])
        wanted = _gathers(rule, rows[count + result], specs[count + result], asked[count + result])
        scatters = {i: axes for i, axes in wanted.items() if set(axes) <= set(over)}
        for i, axes in scatters.items():
            specs[count + result][i] = axes
        sums[result] = over, scatters
    return Plan(specs[:count], specs[count:], gathers, sums)


def _choose(rule, rows, shapes, asked, sizes) -> dict[Any, Axes]:
    """Each dimension's axes: those of the first array that splits it evenly; no axis twice."""
    kept: dict[Any, Axes] = {}
    dims = dict.fromkeys(d for row in rows for d in row if isinstance(d, int) or d in rule.sharded)
    for d in dims:
        taken = {a for axes in kept.values() for a in axes}
        for row, shape, spec in zip(rows, shapes, asked, strict=True):
            axes = spec[row.index(d)] if d in row else ()
            ways = _product(sizes[a] for a in axes)
            if axes and not taken & set(axes) and shape[row.index(d)] % ways == 0:
                kept[d] = axes
                break
    return kept


def _product(numbers) -> int:
    return functools.reduce(lambda a, b: a * b, numbers, 1)


def _split(row, shape, kept) -> Spec:
    whole = lambda d, size: isinstance(d, int) and size == 1  # noqa: E731
    return [() if whole(d, size) else kept.get(d, ()) for d, size in zip(row, shape, strict=True)]


def _gathers(rule, row, spec, asked) -> dict[int, Axes]:
    taken = {a for axes in spec for a in axes}
    split = {
        i: asked[i] for i, d in enumerate(row) if not isinstance(d, int) and d in rule.gathered
    }
    return {i: axes for i, axes in split.items() if axes and not taken & set(axes)}


def _over(rule, kept, dims: str) -> Axes:
    """The axes that split dimensions which an operand lacks: over them its gradient has parts."""
    return tuple(a for d in rule.sharded if d not in dims for a in kept.get(d, ()))


def _add_parts(x: jax.Array, over: Axes, scatters: Mapping[int, Axes]) -> jax.Array:
    for i, axes in scatters.items():
        x = lax.psum_scatter(x, axes, scatter_dimension=i, tiled=True)
        over = tuple(a for a in over if a not in axes)
    return lax.psum(x, over) if over else x


def _on_device(fn: Callable, where: Plan, gather: bool, *local):
    """``fn`` on one device's operands, gathering before it and adding parts after it."""
    local = list(local)
    for n, gathers in enumerate(where.gathers if gather else ()):
        for i, axes in gathers.items():
            local[n] = lax.all_gather(local[n], axes, axis=i, tiled=True)
    results = list(fn(*local))
    for n, (over, scatters) in where.sums.items():
        results[n] = _add_parts(results[n], over, scatters)
    return tuple(results)


# ---------------------------------------------------------------------------------- Auto meshes


def on_auto(fn: Callable, rule: Rule, operands: Sequence, results: Sequence) -> Callable:
    """``fn`` so that XLA's partitioner runs it on each device's own part.

    Args:
        fn: arrays -> tuple of arrays, for any sizes.
        rule: the dimensions.
        operands: global shapes of the operands.
        results: global shapes of the results.
    """
    shapes = [*operands, *results]
    rows = rule.rows(len(shapes[0]) - len(rule.operands[0]))

    def partition(mesh, operand_types, result_types):
        types = [*operand_types, *result_types]
        if not all(isinstance(t.sharding, NamedSharding) for t in types):
            # Splits that no mesh axes name: every device takes the whole.
            whole = [t.sharding.get_replicated(t.sharding._device_assignment) for t in types]
            return mesh, fn, tuple(whole[len(operands) :]), tuple(whole[: len(operands)])
        where = plan(
            rule, shapes, [_spec(t.sharding.spec, len(t.shape)) for t in types], mesh.shape
        )
        named = lambda specs: tuple(NamedSharding(mesh, _entries(s)) for s in specs)  # noqa: E731
        local = functools.partial(_on_device, fn, where, False)
        return mesh, local, named(where.results), named(where.operands)

    def infer(mesh, operand_types, result_types):
        whole = NamedSharding(mesh, PartitionSpec())
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=whole) for t in result_types]
        return partition(mesh, operand_types, types)[2]

    wrapped = custom_partitioning(lambda *arrays: tuple(fn(*arrays)))
    letters = dict.fromkeys(d for dims in rule.operands for d in dims)
    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_shardy_rule(rule, rows, shapes),
        need_replication_factors=tuple(d for d in letters if d not in rule.sharded),
    )
    return wrapped


def _shardy_rule(rule: Rule, rows, shapes) -> str:
    """The einsum-like rule of Shardy's custom calls.

    A batch axis of size 1 is a factor of its own, and so is a gathered dimension of a result: it
    may be split as its consumer wants it.
    """
    count = len(rule.operands)

    def factor(n, d, size):
        own = size == 1 if isinstance(d, int) else n >= count and d in rule.gathered
        return f"{_name(d)}_{n}" if own else _name(d)

    texts = [
        " ".join(factor(n, d, size) for d, size in zip(row, shape, strict=True))
        for n, (row, shape) in enumerate(zip(rows, shapes, strict=True))
    ]
    return ", ".join(texts[:count]) + " -> " + ", ".join(texts[count:])


def _name(d) -> str:
    return f"b{d}" if isinstance(d, int) else d


# ------------------------------------------------------------------------------ Explicit meshes


def explicit_mesh(*arrays) -> Any:
    """The mesh in the types of the arrays if any of its axes is Explicit, else None."""
    for x in arrays:
        mesh = x.sharding.mesh if hasattr(x, "sharding") else None
        if mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def explicit_plan(rule: Rule, operands: Sequence) -> Plan:
    """The plan that follows from the operands' types."""
    rows = rule.rows(len(operands[0].shape) - len(rule.operands[0]))
    sizes: dict[Any, int] = {}
    for t, row in zip(operands, rows, strict=False):
        for d, size in zip(row, t.shape, strict=True):
            sizes[d] = max(size, sizes.get(d, 1))
    shapes = [t.shape for t in operands]
    shapes += [tuple(sizes.get(d, 1) for d in row) for row in rows[len(operands) :]]
    asked = [_spec(t.sharding.spec, len(t.shape)) for t in operands]
    like = dict(rule.gradients)
    whole = [[()] * len(row) for row in rows]
    asked += [asked[like[n]] if n in like else whole[n] for n in range(len(rule.results))]
    return plan(rule, shapes, asked, dict(operands[0].sharding.mesh.shape))


def split_of(rule: Rule, arrays: Sequence[jax.Array], dim: str) -> Axes:
    """The axes of an Explicit mesh that split a dimension on the device; none on other meshes."""
    types = [jax.typeof(x) for x in arrays]
    if explicit_mesh(*types) is None:
        return ()
    where = explicit_plan(rule, types)
    found = [
        spec[len(spec) - len(dims) + dims.index(dim)]
        for spec, dims in zip(where.operands, rule.operands, strict=True)
        if dim in dims
    ]
    return found[0] if found else ()


def result_types(rule: Rule, operands: Sequence, results: Sequence) -> list:
    """Types of results from those of the operands: mesh, splits, varying axes.

    Args:
        rule: the dimensions.
        operands: types of the operands.
        results: ``(shape, dtype)`` of each result.
    """
    first = operands[0]
    mesh = first.sharding.mesh
    specs = [[()] * len(shape) for shape, _ in results]
    if explicit_mesh(first) is not None:
        specs = explicit_plan(rule, operands).results
    return [
        first.update(shape=shape, dtype=dtype, sharding=NamedSharding(mesh, _entries(spec)))
        for (shape, dtype), spec in zip(results, specs, strict=True)
    ]


def on_explicit(fn: Callable, rule: Rule, operands: Sequence, results: Sequence) -> Callable:
    """``fn`` in a shard_map whose splits follow from the types of operands and results."""
    mesh = operands[0].sharding.mesh
    where = explicit_plan(rule, operands)
    mapped = _shard_map(functools.partial(_on_device, fn, where, True), mesh, where, False)

    def run(*arrays):
        with jax.sharding.use_abstract_mesh(mesh):
            outputs = mapped(*arrays)
            return [
                jax.sharding.reshard(x, t.sharding) for x, t in zip(outputs, results, strict=True)
            ]

    return run


def _shard_map(body: Callable, mesh, where: Plan, check_vma: bool) -> Callable:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(_arriving(where)),
        out_specs=tuple(_entries(spec) for spec in where.results),
        # The default is all axes but those that a vmap around it maps; name them in mixed meshes.
        axis_names=explicit if len(explicit) < len(kinds) else set(),
        check_vma=check_vma,
    )


def _arriving(where: Plan) -> list[PartitionSpec]:
    """Splits of the operands before they are gathered."""
    merged = [
        [gathers.get(i, axes) for i, axes in enumerate(spec)]
        for spec, gathers in zip(where.operands, where.gathers, strict=True)
    ]
    return [_entries(spec) for spec in merged]


def _refuse_split_width(array, dims: str, name: str) -> None:
    spec = _spec(jax.typeof(array).sharding.spec, array.ndim)
    if dims[-1] in "dv" and spec[-1]:
        raise ValueError(
            f"{name}: its last dimension is split over mesh axes {spec[-1]}, want it whole: "
            f"shard batch axes, queries or heads, or reshard {name} first"
        )


# -------------------------------------------------------------------- operands and their gradients


def settle(rule: Rule, accum, arrays: Sequence[jax.Array], names: Sequence[str]) -> list[jax.Array]:
    """Operands with splits that fit each other, so that gradients come back in operands' types.

    On an Explicit mesh they are resharded as the plan says. Inside shard_map they get the same
    varying axes. Floating operands are cast to ``accum``: the transposes of these casts then add
    parts of gradients in ``accum`` and cast once.

    Args:
        rule: the dimensions.
        accum: dtype in which parts of a gradient are added.
        arrays: operands, all with the same number of batch axes.
        names: the operands' names, for errors.

    Raises:
        ValueError: a width (the last dimension of q or kv) is split on an Explicit mesh.
    """
    return align(_reshard(rule, arrays, names), accum)


def _reshard(rule: Rule, arrays: Sequence[jax.Array], names) -> Sequence[jax.Array]:
    types = [jax.typeof(x) for x in arrays]
    mesh = explicit_mesh(*types)
    if mesh is None:
        return arrays
    for x, dims, name in zip(arrays, rule.operands, names, strict=True):
        _refuse_split_width(x, dims, name)
    return [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, _arriving(explicit_plan(rule, types)), strict=True)
    ]


def align(arrays: Sequence[jax.Array], accum) -> list[jax.Array]:
    """Floating operands in ``accum``, and all of them with the same varying mesh axes."""
    arrays = [x.astype(accum) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
    varying = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
    union = frozenset().union(*varying)
    missing = [tuple(sorted(union - own)) for own in varying]
    return [
        lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(arrays, missing, strict=True)
    ]


def distribute(
    fn: Callable, rule: Rule, accum, arrays: Sequence[jax.Array], names: Sequence[str]
) -> tuple[jax.Array, ...]:
    """``fn`` of settled operands, on an Explicit mesh on each device's own part of them.

    For functions that JAX differentiates itself: collectives and their transposes are JAX's.

    Args:
        fn: arrays -> tuple of arrays, as the rule says.
        rule: the dimensions.
        accum: dtype in which parts of a gradient are added.
        arrays: operands, all with the same number of batch axes.
        names: the operands' names, for errors.

    Raises:
        ValueError: as `settle`.
    """
    arrays = _reshard(rule, arrays, names)
    types = [jax.typeof(x) for x in arrays]
    mesh = explicit_mesh(*types)
    if mesh is None:
        return fn(*align(arrays, accum))
    where = explicit_plan(rule, types)

    def body(*local):
        local = list(local)
        for n, gathers in enumerate(where.gathers):
            for i, axes in gathers.items():
                assert i == local[n].ndim - 2, "only rows are gathered"
                local[n] = gather(local[n], axes, accum)
        return fn(*align(local, accum))

    return _shard_map(body, mesh, where, True)(*arrays)


def gather(x: jax.Array, axis_name, accum) -> jax.Array:
    """All-gather along axis -2, then cast to ``accum``; backward reduce-scatter, then cast."""
    return _gather(x, axis_name, accum)


def _gather_primal(x, axis_name, accum):
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True).astype(accum)


def _gather_fwd(x, axis_name, accum):
    return _gather_primal(x, axis_name, accum), jnp.zeros((0,), x.dtype)


def _gather_bwd(axis_name, accum, like, g):
    part = lax.psum_scatter(g.astype(accum), axis_name, scatter_dimension=g.ndim - 2, tiled=True)
    return (part.astype(like.dtype),)


_gather: Any = jax.custom_vjp(_gather_primal, nondiff_argnums=(1, 2))
_gather.defvjp(_gather_fwd, _gather_bwd)


# ------------------------------------------------------------------------------ PartitionSpecs


def _spec(spec: PartitionSpec, ndim: int) -> Spec:
    return [_axes(entry) for entry in (*spec, *[None] * (ndim - len(spec)))]


def _axes(entry) -> Axes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _entries(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec))
