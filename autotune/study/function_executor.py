"""Runs trials as calls of a Python function in this process: no child, no folder, hundreds a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.space.objectives import Objective
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.runner import Stop
from engine.outcome import Outcome, OutcomeKind

Measured = Mapping[str, float] | float
"""What a function gives: a value for each objective by name (further names are kept too), or the only objective's."""
TrialFunction = Callable[[Assignment], Measured]


class TrialFailed(Exception):
    """Raised by a function to say how its trial failed; any other exception is a failure of the kind ``user``.

    Args:
        detail: One line for people.
        kind: Kind of failure.
    """

    def __init__(self, detail: str, kind: OutcomeKind = "user") -> None:
        super().__init__(detail)
        self.detail = detail
        self.kind: OutcomeKind = kind


@dataclass
class FunctionExecutor:
    """Calls a function for each trial, in the thread that asks. A call can't be interrupted: time limits and stopping
    take effect between trials."""

    function: TrialFunction
    objectives: Sequence[Objective]

    def run(
        self,
        assignment: Assignment,
        limits: TrialLimits,
        *,
        stop: Callable[[], Stop],
        on_start: Callable[[], None],
        on_waiting: Callable[[], None],
    ) -> Outcome | None:
        """See ``Executor``."""
        if stop() > Stop.NO:
            return None
        on_start()
        return call(self.function, assignment, self.objectives)

    def close(self) -> None:
        """Nothing is held between trials."""


def call(function: TrialFunction, assignment: Assignment, objectives: Sequence[Objective]) -> Outcome:
    """The outcome of a call. Exceptions are outcomes; what is none (Ctrl-C, an exit) passes through."""
    started, cpu_started = time.monotonic(), time.thread_time()
    try:
        outcome = outcome_of_measured(function(assignment), objectives)
    except TrialFailed as failure:
        outcome = Outcome(kind=failure.kind, detail=failure.detail)
    except Exception as error:
        outcome = outcome_of_exception(error)
    return outcome.changed(wall_seconds=time.monotonic() - started, cpu_seconds=time.thread_time() - cpu_started)


def outcome_of_exception(error: Exception) -> Outcome:
    """The failure that an exception stands for. Devices' libraries have their own exceptions of lacking memory."""
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    text = " ".join(str(error).split())
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome(kind="oom" if is_memory else "user", detail=detail[:500])


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
