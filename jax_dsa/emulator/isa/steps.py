"""Value instructions as closures over register slots: the layer that makes the emulator fast.

A step exists twice: ``full(S)`` when all 32 lanes run, which writes without a mask, and
``masked(S, m)``. S lists a warp's slots (``registers.RegisterFile.slots``): ``S[slot][row]`` is a
register seen as the type that the instruction wants, or a constant. The closures are written out by
arity because they run most often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy import copyto

View = tuple[int, int]  # (slot, row)


class Step(NamedTuple):
    """One value instruction, or part of one."""

    full: Callable
    masked: Callable


def assign(fn: Callable, target: View, sources: Sequence[View], packed: bool) -> Step:
    """Writes fn(sources) to ``target``; a ufunc writes there itself."""
    return Step(_full(fn, target, sources), _masked(fn, target, sources, packed))


def _full(fn: Callable, target: View, sources: Sequence[View]) -> Callable:
    (d, i), direct = target, isinstance(fn, np.ufunc)
    if len(sources) == 1:
        ((a, j),) = sources
        if direct:
            return lambda S: fn(S[a][j], S[d][i])

        def run(S):
            S[d][i] = fn(S[a][j])

    elif len(sources) == 2:
        (a, j), (b, k) = sources
        if direct:
            return lambda S: fn(S[a][j], S[b][k], S[d][i])

        def run(S):
            S[d][i] = fn(S[a][j], S[b][k])

    else:

        def run(S):
            S[d][i] = fn(*[S[a][j] for a, j in sources])

    return run


def _masked(fn: Callable, target: View, sources: Sequence[View], packed: bool) -> Callable:
    d, i = target
    if packed:
        return lambda S, m: copyto(S[d][i], fn(*[S[a][j] for a, j in sources]), where=m[:, None])
    if len(sources) == 2:
        (a, j), (b, k) = sources
        return lambda S, m: copyto(S[d][i], fn(S[a][j], S[b][k]), where=m)
    return lambda S, m: copyto(S[d][i], fn(*[S[a][j] for a, j in sources]), where=m)


def move(target: View, source: View) -> Step:
    """A copy."""
    (d, i), (a, j) = target, source

    def full(S):
        S[d][i] = S[a][j]

    return Step(full, lambda S, m: copyto(S[d][i], S[a][j], where=m))


def both(first: Step, second: Step) -> Step:
    """One after the other."""

    def full(S):
        first.full(S)
        second.full(S)

    def masked(S, m):
        first.masked(S, m)
        second.masked(S, m)

    return Step(full, masked)


def guarded(step: Step, predicate: View, negated: bool) -> Step:
    """``@p`` before a value instruction: only lanes whose predicate holds write."""
    (d, i), masked = predicate, step.masked

    def full(S):
        p = S[d][i]
        masked(S, ~p if negated else p.copy())

    def run(S, m):
        p = S[d][i]
        masked(S, (~p if negated else p) & m)

    return Step(full, run)
