"""Which implementation serves a call, and why not the others."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jax_dsa import cutedsl, xla
from jax_dsa.problem import Facts, Problem

NAMES = ("reference", "xla", "cutedsl")
# What runs the two operations; "reference" needs none: JAX differentiates it.
_MODULES = {"xla": xla, "cutedsl": cutedsl}
# What None tries, in this order.
DEFAULT_ORDER = ("cutedsl", "xla")
# Names of implementations, in the order in which a platform takes the first that runs on it.
Choice = str | tuple[str, ...]


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


def unusable(name: str, problem: Problem, *, build: bool = False) -> str | None:
    """The reason why an implementation cannot serve a call and its gradient, or None.

    Args:
        name: of the implementation.
        problem: the call.
        build: compile kernels that are missing, where their compiler is installed.
    """
    if name == "reference":
        if problem.facts.deterministic and _gpus():
            return "JAX's derivative of a gather adds in no fixed order on a GPU; use 'xla'"
        return None
    if name == "xla":
        return xla.unusable(problem.groups, problem.keys, problem.topk)
    limit = cutedsl.gradient_limits(problem.facts)
    return limit or cutedsl.unusable(problem, _gpus(), build=build)


def _unusable_if_named(name: str, problem: Problem) -> str | None:
    """As `unusable`, of a name that stands alone: the gradient and the device are asked later."""
    if name != "cutedsl":
        return unusable(name, problem)
    gpus = _gpus()
    return cutedsl.unusable(problem, gpus, build=True) if gpus else cutedsl.limits(problem)


def choose(problem: Problem, asked: str | Sequence[str] | None) -> Choice:
    """The name of the implementation that serves the call, or two: one for GPUs, one for the rest.

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
    if len(names) == 1:
        reasons = {names[0]: _unusable_if_named(names[0], problem)}
    else:
        reasons = _reasons(names, problem)
    chosen = _first_usable(reasons)
    if chosen is not None:
        return chosen
    errors = [
        NotImplementedError(f"implementation={name!r} cannot serve {problem}: {reason}")
        for name, reason in reasons.items()
    ]
    if isinstance(asked, str):
        raise errors[0]
    raise ExceptionGroup(f"no implementation of {list(names)} can serve {problem}", errors)


def _reasons(names: Sequence[str], problem: Problem) -> dict[str, str | None]:
    """Name -> why not, up to the first that can serve the call wherever it is lowered for."""
    reasons: dict[str, str | None] = {}
    for name in names:
        reasons[name] = unusable(name, problem, build=True)
        if reasons[name] is None and name != "cutedsl":
            break
    return reasons


def _first_usable(reasons: Mapping[str, str | None]) -> Choice | None:
    """The first without a reason; where that is "cutedsl", with what runs on other platforms."""
    usable = [name for name, reason in reasons.items() if reason is None]
    if usable[:1] != ["cutedsl"] or len(usable) == 1:
        return usable[0] if usable else None
    if usable[1] == "xla":
        return ("cutedsl", "xla")
    # "reference" is no operation that is chosen when a program is lowered.
    return "cutedsl" if _gpus() else usable[1]


def _default(problem: Problem) -> Choice:
    reasons = _reasons(DEFAULT_ORDER, problem)
    chosen = _first_usable(reasons)
    if chosen is None:
        raise NotImplementedError(f"no implementation can serve {problem}: {reasons}")
    runs = on_platform(chosen, _platform())
    _log_choice(problem, runs)
    if runs == "xla" and _gpus():
        _warn_slow(reasons["cutedsl"])
    return chosen


def on_platform(choice: Choice, platform: str) -> str:
    """Which of the chosen runs on what is lowered for: "cutedsl" on "cuda" alone."""
    if isinstance(choice, str):
        return choice
    return next(name for name in choice if name != "cutedsl" or platform == "cuda")


def refuse_gradient(choice: Choice, facts: Facts) -> None:
    """Raises where what was chosen serves a call, but not its gradient.

    Raises:
        NotImplementedError: with the reason and what serves it.
    """
    limit = cutedsl.gradient_limits(facts) if "cutedsl" in choice else None
    if limit:
        raise NotImplementedError(f"implementation={choice!r} cannot serve the gradient: {limit}")


def explain(problem: Problem, asked: str | Sequence[str] | None) -> Explanation:
    chosen = on_platform(choose(problem, asked), _platform())
    return Explanation(problem, chosen, {name: _why_not_here(name, problem) for name in NAMES})


def _why_not_here(name: str, problem: Problem) -> str | None:
    reason = unusable(name, problem)
    if name == "cutedsl" and reason is None and not _gpus():
        return "there is no NVIDIA GPU here; a program exported for one would call the kernels"
    return reason


def _platform() -> str:
    """What a program is lowered for here, unless it is told otherwise."""
    return "cuda" if _gpus() else "cpu"


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
    return cutedsl.local_gpus()


def implementation(choice: Choice, operation: str, platform: str) -> Callable:
    """What runs ``forward`` or ``backward`` on one device's operands, lowered for a platform."""
    return getattr(_MODULES[on_platform(choice, platform)], operation)


def register() -> None:
    """Makes ready what exported programs may call."""
    cutedsl.register()
