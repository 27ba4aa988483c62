"""What devices exchange, read from compiled programs and from jaxprs."""

import collections
import math
import re

import jax

COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(compiled) -> collections.Counter:
    """``(name, elements of one result)`` of every collective of a compiled program, counted."""
    found = collections.Counter()
    for results, name in COLLECTIVE.findall(compiled.as_text()):
        for dims in re.findall(r"\[([\d,]*)\]", results):
            found[name, math.prod(int(d) for d in dims.split(",") if d)] += 1
    return found


def psums(jaxpr) -> list[tuple[str, tuple[int, ...]]]:
    """``(dtype, shape)`` of every sum across devices in a jaxpr, inner jaxprs included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("psum", "reduce_scatter")):
            found += [(str(v.aval.dtype), v.aval.shape) for v in eqn.outvars]
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += psums(inner)
    return found
