"""Runs trials as calls of a Python function in this process: no child, no folder, hundreds a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.space.objectives import Objective
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.growth import with_checkpoint
from autotune.study.measured import outcome_of_measured
from engine.errors import UserError
from engine.outcome import FAILURE_KINDS, Outcome, OutcomeKind

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
        super().__init__(detail, kind)
        if kind not in FAILURE_KINDS:
            raise UserError(f"there is no failure {kind!r}", hint=f"kinds are {', '.join(FAILURE_KINDS)}")
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
    """The outcome of a call. Exceptions are outcomes; Ctrl-C passes through."""
    started, cpu_started = time.monotonic(), time.thread_time()
    try:
        outcome = with_checkpoint(outcome_of_measured(function(assignment), objectives), assignment)
    except TrialFailed as failure:
        outcome = outcome_of_failure(failure)
    except SystemExit as end:
        outcome = Outcome(kind="user", detail=f"it ended the process with {end.code!r}")
    except Exception as error:
        outcome = outcome_of_exception(error)
    return outcome.changed(wall_seconds=time.monotonic() - started, cpu_seconds=time.thread_time() - cpu_started)


def outcome_of_failure(failure: TrialFailed) -> Outcome:
    """The outcome that a function asked for."""
    return Outcome(kind=failure.kind, detail=" ".join(failure.detail.split())[:500])


def outcome_of_exception(error: Exception) -> Outcome:
    """The failure that an exception stands for. Devices' libraries have their own exceptions of lacking memory."""
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    text = " ".join(str(error).split())
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome(kind="oom" if is_memory else "user", detail=detail[:500])
