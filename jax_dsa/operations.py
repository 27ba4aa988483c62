"""The two operations as JAX primitives: result types, batching, sharding, lowering.

    forward   q, kv, indices, topk_length, sink                   -> out, lse
    backward  q, kv, indices, topk_length, lse, alpha, beta, dout -> dq, dkv

Every operand carries the same number of leading batch axes; on one on which it is not mapped its
size is 1. Batching therefore adds an axis and copies nothing. Only on the device, after
partitioning, are the axes folded into the one group axis of the implementations: no sharded axis is
ever merged with another. Which implementation runs, `dispatch` knows.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from jax_dsa import dispatch, sharding

FORWARD = sharding.Rule(
    operands=("shd", "td", "sk", "s", "h"),
    results=("shv", "sh"),
    sharded="sh",
    gathered="t",
)
BACKWARD = sharding.Rule(
    operands=("shd", "td", "sk", "s", "sh", "sh", "sh", "shv"),
    results=("shd", "td"),
    sharded="sh",
    gathered="t",
    gradients=((1, 1),),
)


def forward(call, q, kv, indices, topk_length, sink):
    """``out [*B, S, H, value_dim]`` in q's dtype and ``lse [*B, S, H]``."""
    return _bound(_FORWARD[_on_one_device()], call)(q, kv, indices, topk_length, sink)


def backward(call, q, kv, indices, topk_length, lse, alpha, beta, dout):
    """``dq [*B, S, H, D]`` in q's dtype and ``dkv [*B, T, D]`` in the accumulation dtype."""
    dispatch.refuse_gradient(call.implementation, call.facts)
    operands = (q, kv, indices, topk_length, lse, alpha, beta, dout)
    return _bound(_BACKWARD[_on_one_device()], call)(*operands)


def _forward_results(call, q, *_):
    return (*q.shape[-3:-1], call.facts.value_dim), q.dtype, q.shape[-3:-1], call.facts.accum_dtype


def _backward_results(call, q, kv, *_):
    return q.shape[-3:], q.dtype, kv.shape[-2:], call.facts.accum_dtype


def _on_one_device() -> bool:
    """Whether arrays are one device's own: inside a shard_map over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(t == AxisType.Manual for t in mesh.axis_types)


@functools.cache
def _bound(primitive: Primitive, call):
    """The primitive under jit, so that it also runs eagerly."""
    return jax.jit(functools.partial(primitive.bind, call=call))


def _define(name: str, rule: sharding.Rule, results, on_one_device: bool) -> Primitive:
    primitive = Primitive(f"jax_dsa_{name}")
    primitive.multiple_results = True

    def abstract(*operands, call):
        batch = _batch(rule, operands)
        out, out_dtype, other, other_dtype = results(call, *operands)
        return sharding.result_types(
            rule, operands, [((*batch, *out), out_dtype), ((*batch, *other), other_dtype)]
        )

    def batch(operands, dims, *, call):
        moved = [
            jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        return primitive.bind(*moved, call=call), [0, 0]

    def lower(ctx, *operands, call):
        fn = functools.partial(_local, name, rule, call, ctx.module_context.platforms)
        types = ctx.avals_in, ctx.avals_out
        if 0 in ctx.avals_out[0].shape:  # only vmap over nothing comes here with nothing to do
            fn = functools.partial(_nothing, ctx.avals_out)
        elif on_one_device or _devices(ctx.module_context.axis_context) == 1:
            # The types of meshes would only get in the way of the implementations' loops.
            ctx = ctx.replace(avals_in=[ShapedArray(t.shape, t.dtype) for t in ctx.avals_in])
        elif sharding.explicit_mesh(*ctx.avals_in) is not None:
            fn = sharding.on_explicit(fn, rule, *types)
        else:
            _refuse_export(ctx.module_context)
            ctx = ctx.replace(avals_in=[ShapedArray(t.shape, t.dtype) for t in ctx.avals_in])
            fn = sharding.on_auto(fn, rule, *([t.shape for t in each] for each in types))
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)

    def jvp(primals, tangents, *, call):
        raise NotImplementedError(
            f"implementation={call.implementation!r} has no second derivative: use "
            "implementation='reference', which JAX differentiates to any order"
        )

    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = jvp
    return primitive


def _nothing(types, *_):
    return [jnp.zeros(t.shape, t.dtype) for t in types]


def _devices(axis_context) -> int:
    """The devices lowered for, under jit or in a shard_map over some of the mesh axes."""
    mesh = getattr(axis_context, "mesh", None)
    return axis_context.num_devices if mesh is None else mesh.size


def _refuse_export(module):
    if module.lowering_parameters.for_export:
        raise NotImplementedError(
            "sparse_attention cannot be exported for several devices on an Auto mesh: its "
            "partitioning is a callback, which cannot be serialised. Export on an Explicit mesh "
            "(jax.make_mesh's default) or inside jax.shard_map"
        )


def _batch(rule: sharding.Rule, operands) -> tuple[int, ...]:
    axes = len(operands[0].shape) - len(rule.operands[0])
    return np.broadcast_shapes(*(x.shape[:axes] for x in operands))


def _local(name, rule, call, platforms, *operands):
    """Folds one device's batch axes into a group axis and runs each platform's implementation."""
    batch = _batch(rule, operands)
    tails = [x.shape[x.ndim - len(dims) :] for x, dims in zip(operands, rule.operands, strict=True)]
    folded = [
        jnp.broadcast_to(x, batch + tail).reshape(math.prod(batch), *tail)
        for x, tail in zip(operands, tails, strict=True)
    ]
    branches = {
        p: functools.partial(dispatch.implementation(call.implementation, name, p), call.facts, p)
        for p in platforms
    }
    if len(branches) == 1:
        results = branches[platforms[0]](*folded)
    else:  # only an exported program is lowered for several
        results = jax.lax.platform_dependent(*folded, **branches)
    return [x.reshape(batch + x.shape[1:]) for x in results]


# Two primitives an operation. Outside shard_map XLA's partitioner may have to be asked, for which
# JAX must know the devices when it lowers; on one device it need not, so that programs can be
# exported for devices that are not there.
_FORWARD = {one: _define("forward", FORWARD, _forward_results, one) for one in (False, True)}
_BACKWARD = {one: _define("backward", BACKWARD, _backward_results, one) for one in (False, True)}
prim_requires_devices_during_lowering.update((_FORWARD[False], _BACKWARD[False]))


# Forward-mode differentiation: an identity whose tangent can be transposed but not executed.

_tangent_p = Primitive("jax_dsa_tangent")


def reverse_mode_only(x, implementation: dispatch.Choice):
    """``x`` with a tangent that reverse mode transposes and forward mode refuses readably."""
    return _mark(implementation, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mark(implementation, x):
    return x


@_mark.defjvp
def _mark_jvp(implementation, primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0], implementation=implementation)


def no_forward_mode(implementation: dispatch.Choice) -> NotImplementedError:
    return NotImplementedError(
        f"implementation={implementation!r} has no forward-mode derivative (jvp, jacfwd): use "
        "implementation='reference', or reverse mode (grad, vjp)"
    )


def _refuse_forward_mode(*_, implementation):
    raise no_forward_mode(implementation)


def _batch_tangent(operands, dims, *, implementation):
    return _tangent_p.bind(*operands, implementation=implementation), dims[0]


_tangent_p.def_impl(_refuse_forward_mode)
_tangent_p.def_abstract_eval(lambda x, *, implementation: x)
ad.deflinear2(_tangent_p, lambda ct, x, *, implementation: [ct])
batching.primitive_batchers[_tangent_p] = _batch_tangent
mlir.register_lowering(
    _tangent_p,
    lambda ctx, x, *, implementation: _refuse_forward_mode(implementation=implementation),
)
