"""From what a user's program or function measured to an Outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune.space.objectives import Objective
from engine.outcome import Outcome


def outcome_of_measured(measured: object, objectives: Sequence[Objective]) -> Outcome:
    """The outcome that measured values stand for: ``ok``, ``nan`` where an objective is not finite, ``user`` where one
    is missing or no number.

    Args:
        measured: What the function or program gave; figures that are no objectives are kept when they are finite.
        objectives: The study's.
    """
    names = [objective.name for objective in objectives]
    if len(names) == 1 and _number(measured) is not None:
        measured = {names[0]: measured}
    if not isinstance(measured, Mapping):
        wanted = f"a mapping with {', '.join(names)}" + (" (or a number)" if len(names) == 1 else "")
        return Outcome(kind="user", detail=f"it gave {_short(measured)}, wanted is {wanted}")
    figures = {str(name): value for name, item in measured.items() if (value := _number(item)) is not None}
    for name in names:
        if name not in measured:
            given = ", ".join(map(str, measured)) or "nothing"
            return Outcome(kind="user", detail=f"it gave no {name!r}, only {given}"[:500])
        if name not in figures:
            return Outcome(kind="user", detail=f"it gave {name} = {_short(measured[name])}, wanted is a number")
    metrics = {name: value for name, value in figures.items() if math.isfinite(value)}
    for name in names:
        if name not in metrics:
            return Outcome(kind="nan", detail=f"{name} is {figures[name]}", metrics=metrics)
    return Outcome(kind="ok", metrics=metrics)


def _number(value: object) -> float | None:
    """A number as a float, also one of numpy's or a tensor's with one element; None for anything else."""
    if isinstance(value, str | bytes | bool) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
