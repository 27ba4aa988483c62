"""The two operations as JAX primitives: result types, batching, sharding, lowering. Knows no implementation.

    forward   q, kv, indices, topk_length, sink                   -> out, lse
    backward  q, kv, indices, topk_length, lse, alpha, beta, dout -> dq, dkv

Every operand carries the same number of leading batch axes; on an axis on which an operand is not mapped its size is 1.
Batching therefore adds an axis and copies nothing; the axes are folded into the implementations' one group axis on the
device (``_local``), after partitioning, so that no sharded axis is ever merged with another.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax._src.dispatch import prim_requires_devices_during_lowering
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
    summed=((1, "sh"),),
)


# Two primitives an operation: the one of an operation outside shard_map is partitioned by XLA, for which JAX needs to
# know the devices when it lowers; the other need not, so that a program can be exported for devices that are not there.


def forward(call, q, kv, indices, topk_length, sink):
    """``out [*B, S, H, value_dim]`` in q's dtype and ``lse [*B, S, H]``."""
    return _bound(_FORWARD[_in_shard_map()], call)(q, kv, indices, topk_length, sink)


def backward(call, q, kv, indices, topk_length, lse, alpha, beta, dout):
    """``dq [*B, S, H, D]`` in q's dtype and ``dkv [*B, T, D]`` in the accumulation dtype."""
    return _bound(_BACKWARD[_in_shard_map()], call)(
        q, kv, indices, topk_length, lse, alpha, beta, dout
    )


def _forward_types(call, q, kv, indices, topk_length, sink):
    out = q[..., : call.facts.value_dim]
    return out, q[..., 0].astype(call.facts.accum_dtype)


def _backward_types(call, q, kv, indices, topk_length, lse, alpha, beta, dout):
    return q, kv.astype(call.facts.accum_dtype)


def _in_shard_map() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(t == AxisType.Manual for t in mesh.axis_types)


@functools.lru_cache(maxsize=None)
def _bound(primitive: Primitive, call):
    """The primitive under jit, so that it also runs eagerly."""
    return jax.jit(functools.partial(primitive.bind, call=call))


def _define(name: str, rule: sharding.Rule, types, in_shard_map: bool) -> Primitive:
    primitive = Primitive(f"jax_dsa_{name}")
    primitive.multiple_results = True

    def abstract(*operands, call):
        batch_axes = operands[0].ndim - len(rule.operands[0])
        batch = np.broadcast_shapes(*(x.shape[:batch_axes] for x in operands))

        def results(*arrays):
            core = types(call, *arrays)
            return [jnp.broadcast_to(x, batch + x.shape[batch_axes:]) for x in core]

        # Traced, so that the results carry the operands' mesh and varying axes in every JAX version.
        return jax.make_jaxpr(results)(*operands).out_avals

    def batch(operands, dims, *, call):
        moved = [
            jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        results = primitive.bind(*moved, call=call)
        return results, [0] * len(results)

    def lower(ctx, *operands, call):
        fn = functools.partial(_local, name, rule, call, ctx.module_context.platforms[0])
        if not in_shard_map and getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:
            _refuse_export(ctx.module_context)
            fn = sharding.partitioned(
                fn, rule, [a.shape for a in ctx.avals_in], [a.shape for a in ctx.avals_out]
            )
        # Here arrays are one device's own: their mesh types would only get in the way of the implementations' loops.
        plain = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
        return mlir.lower_fun(fn, multiple_results=True)(plain, *operands)

    def jvp(primals, tangents, *, call):
        raise NotImplementedError(
            f"implementation={call.implementation!r} has no second derivative: use implementation='reference', "
            "which JAX differentiates to any order."
        )

    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = jvp
    return primitive


def _refuse_export(module):
    if module.lowering_parameters.for_export:
        raise NotImplementedError(
            "sparse_attention cannot be exported for several devices on an Auto mesh: its partitioning is a callback that "
            "cannot be serialised. Export on an Explicit mesh (jax.make_mesh's default) or inside jax.shard_map."
        )


def _local(name, rule, call, platform, *operands):
    """Folds the batch axes of one device's operands into a group axis and runs the implementation."""
    cores = [len(dims) for dims in rule.operands]
    batch_axes = operands[0].ndim - cores[0]
    batch = np.broadcast_shapes(*(x.shape[:batch_axes] for x in operands))
    groups = math.prod(batch)
    folded = []
    for x, core in zip(operands, cores, strict=True):
        tail = x.shape[x.ndim - core :]
        folded.append(jnp.broadcast_to(x, batch + tail).reshape((groups, *tail)))
    results = dispatch.implementation(call.implementation, name)(call.facts, platform, *folded)
    return [x.reshape(batch + x.shape[1:]) for x in results]


_FORWARD = {manual: _define("forward", FORWARD, _forward_types, manual) for manual in (False, True)}
_BACKWARD = {
    manual: _define("backward", BACKWARD, _backward_types, manual) for manual in (False, True)
}
prim_requires_devices_during_lowering.update((_FORWARD[False], _BACKWARD[False]))


# Forward-mode differentiation: an identity whose tangent can be transposed but not executed.

_tangent_p = Primitive("jax_dsa_tangent")


def reverse_mode_only(x, implementation: str):
    """``x``, with a tangent that reverse mode can transpose and forward mode answers with a readable error."""
    return _mark(implementation, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mark(implementation, x):
    return x


@_mark.defjvp
def _mark_jvp(implementation, primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0], implementation=implementation)


def _refuse_forward_mode(*_, implementation):
    raise NotImplementedError(
        f"implementation={implementation!r} has no forward-mode derivative (jvp, jacfwd, linearize's tangent): use "
        "implementation='reference', or reverse mode (grad, vjp)."
    )


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
