"""Which implementation serves a call, and why not the others."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from jax_dsa import xla
from jax_dsa.problem import Problem

NAMES = ("reference", "xla", "cutedsl")
# What runs the two operations; "reference" needs none: JAX differentiates it.
_MODULES = {"xla": xla}
# What None tries, in this order.
DEFAULT_ORDER = ("cutedsl", "xla")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice for one call, as data.

    Attributes:
        problem: shapes and facts of the call.
        chosen: name of the implementation that runs.
        reasons: implementation -> why it cannot serve the call; None where it can.
    """

    problem: Problem
    chosen: str
    reasons: Mapping[str, str | None]

    def __str__(self) -> str:
        lines = [f"{self.problem}: {self.chosen!r}"]
        lines += [f"  {name}: {reason or 'usable'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def unusable(name: str, problem: Problem) -> str | None:
    """The reason why an implementation cannot serve a problem, or None."""
    if name == "reference":
        if problem.facts.deterministic and _gpus():
            return "JAX's derivative of a gather adds in no fixed order on a GPU; use 'xla'"
        return None
    if name == "xla":
        return xla.unusable(problem.groups, problem.keys, problem.topk)
    return "this version of jax_dsa has no compiled kernels; use 'xla'"


def choose(problem: Problem, asked: str | Sequence[str] | None) -> str:
    """The name of the implementation that serves the call.

    Raises:
        ValueError: an unknown name, or an empty sequence.
        NotImplementedError: the named implementation cannot serve the problem.
        ExceptionGroup: none of a sequence of names can; one NotImplementedError each.
    """
    if asked is None:
        return _default(problem)
    names = (asked,) if isinstance(asked, str) else asked
    if not isinstance(names, Sequence):
        kind = type(asked).__name__
        raise TypeError(f"implementation: got {kind}, want a name, a sequence of names, or None")
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"implementation: got unknown name {name!r}, want one of {', '.join(NAMES)}"
            )
    if not names:
        raise ValueError(
            "implementation: got an empty sequence; want a name, a sequence of names, or None"
        )
    errors = []
    for name in names:
        reason = unusable(name, problem)
        if reason is None:
            return name
        errors.append(
            NotImplementedError(f"implementation={name!r} cannot serve {problem}: {reason}")
        )
    if isinstance(asked, str):
        raise errors[0]
    raise ExceptionGroup(f"no implementation of {list(names)} can serve {problem}", errors)


def _default(problem: Problem) -> str:
    reasons = {name: unusable(name, problem) for name in DEFAULT_ORDER}
    chosen = next((name for name, reason in reasons.items() if reason is None), None)
    if chosen is None:
        raise NotImplementedError(f"no implementation can serve {problem}: {reasons}")
    _log_choice(problem, chosen)
    if chosen == "xla" and _gpus():
        _warn_slow(reasons["cutedsl"])
    return chosen


def explain(problem: Problem, asked: str | Sequence[str] | None) -> Explanation:
    chosen = choose(problem, asked)
    return Explanation(problem, chosen, {name: unusable(name, problem) for name in NAMES})


@functools.lru_cache(maxsize=1024)
def _log_choice(problem: Problem, chosen: str) -> None:
    logging.info("jax_dsa: %s runs as %r", problem, chosen)


@functools.lru_cache(maxsize=1024)
def _warn_slow(reason: str) -> None:
    logging.warning(
        "jax_dsa: a GPU is present, but implementation 'xla' runs, many times slower than a "
        "kernel: %s. Name implementation='xla' to silence this.",
        reason,
    )


def _gpus() -> list[Any]:
    try:
        return [d for d in jax.local_devices() if d.platform == "gpu"]
    except RuntimeError:
        return []


def implementation(name: str, operation: str) -> Callable:
    """The function that runs ``forward`` or ``backward`` on one device's operands."""
    return getattr(_MODULES[name], operation)
