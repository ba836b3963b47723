"""Runs a study's trials, several at once, until the budget is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from optuna.exceptions import StorageInternalError

from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.executor import Executor
from autotune.study.study import Nothing, Study
from engine.errors import UserError
from engine.outcome import Outcome

WAIT_SECONDS = 0.5
STORAGE_PAUSES_SECONDS = (1.0, 5.0, 20.0)
"""Pauses before another try when the storage fails."""
NUM_INFRA_RETRIES = 1
"""A trial hit by a fault of the machine is run again so often."""
NUM_ALIKE = 3
"""So many first trials that fail as ``user`` in the same words say that no trial can succeed."""


Result = TypeVar("Result")


class Listener(Protocol):
    """Is told what happens, from several threads."""

    def waiting(self) -> None:
        """Others hold the devices."""

    def started(self, assignment: Assignment) -> None:
        """A trial begins (again)."""

    def finished(self, assignment: Assignment, outcome: Outcome) -> None:
        """A trial has its outcome."""

    def released(self, assignment: Assignment) -> None:
        """A trial was stopped and waits for the next driver."""

    def retried(self, assignment: Assignment, outcome: Outcome) -> None:
        """A trial was hit by a fault of the machine and is run again."""


class Silent:
    """A listener that says nothing."""

    def waiting(self) -> None:
        """See ``Listener``."""

    def started(self, assignment: Assignment) -> None:
        """See ``Listener``."""

    def finished(self, assignment: Assignment, outcome: Outcome) -> None:
        """See ``Listener``."""

    def released(self, assignment: Assignment) -> None:
        """See ``Listener``."""

    def retried(self, assignment: Assignment, outcome: Outcome) -> None:
        """See ``Listener``."""


@dataclass
class FirstFailures:
    """Tells a sweep in which nothing can succeed: a mistake in the program's name, a misspelt objective ..."""

    study: Study
    _first: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Take note of a trial's outcome.

        Raises:
            UserError: It is the last of the first ``NUM_ALIKE``, all failed alike, and no trial of the study did well.
        """
        if len(self._first) >= NUM_ALIKE:
            return
        self._first.append(outcome)
        if len(self._first) < NUM_ALIKE or {(o.kind, o.detail) for o in self._first} != {("user", outcome.detail)}:
            return
        if any(row.outcome and row.outcome.kind != "user" for row in patiently(self.study.snapshot).trials):
            return
        raise UserError(
            f"the first {NUM_ALIKE} trials all failed alike: {outcome.detail}",
            hint="correct what is run or what it reports; the study then goes on where it was, these trials counted",
        )


@dataclass
class Driver:
    """Works on a study with several workers; ``stop_soon`` and ``stop_now`` may be called from signal handlers."""

    study: Study
    executor: Executor
    listener: Listener
    num_workers: int = 1
    time_limit_seconds: float | None = None
    """No trial is started after this; those that run end as they would."""
    _stop: Stop = Stop.NO
    _error: BaseException | None = None
    _deadline: float = field(default=float("inf"))

    def __post_init__(self) -> None:
        self._first_failures = FirstFailures(self.study)

    def run(self) -> Nothing | None:
        """Run trials until there is nothing left to do.

        Returns:
            Why there is nothing left, or None when it was stopped or the time was up.

        Raises:
            UserError: Something that ends the whole sweep, such as a full disk, changed data, or first trials that all
                fail alike.
        """
        limit = self.time_limit_seconds
        self._deadline = float("inf") if limit is None else time.monotonic() + limit
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="trial") as executor:
            workers = [executor.submit(self._work) for _ in range(self.num_workers)]
            try:
                while not all(worker.done() for worker in workers):
                    if self.study.stop_requested():
                        self.stop_soon()
                    time.sleep(WAIT_SECONDS / 5)
            finally:
                if not all(worker.done() for worker in workers):  # an error here must not leave children behind
                    self.stop_now()
        if isinstance(self._error, OSError):
            raise UserError(
                f"cannot write to the study: {self._error}",
                hint="free some space or correct the permissions; the same command goes on where it was",
            ) from self._error
        if self._error is not None:
            raise self._error
        reasons = [worker.result() for worker in workers]
        return None if None in reasons else reasons[0]

    def stop_soon(self) -> None:
        """End the running trials at a checkpoint and start no more."""
        self._stop = max(self._stop, Stop.SOON)

    def stop_now(self) -> None:
        """End the running trials at once."""
        self._stop = Stop.NOW

    @property
    def is_stopping(self) -> bool:
        """Whether no more trials are started."""
        return self._stop > Stop.NO

    def _work(self) -> Nothing | None:
        try:
            while not self.is_stopping and time.monotonic() < self._deadline:
                asked = patiently(self.study.ask)
                if asked is Nothing.WAIT:
                    time.sleep(WAIT_SECONDS)
                elif isinstance(asked, Nothing):
                    return asked
                else:
                    self._run(asked)
            return None
        except BaseException as error:
            self._error = self._error or error
            self.stop_soon()
            return None

    def _run(self, assignment: Assignment) -> None:
        num_retries = 0
        while True:
            outcome = None if self.is_stopping else self._outcome(assignment)
            if outcome is None or (self._stop_of(assignment) and outcome.kind in ("interrupted", "infra")):
                self._release(assignment)
                return
            if outcome.kind != "infra" or num_retries == NUM_INFRA_RETRIES:
                break
            num_retries += 1
            self.listener.retried(assignment, outcome)
            retried = patiently(partial(self.study.retry, assignment))
            if retried is None:
                self._release(assignment)
                return
            assignment = retried
        if patiently(partial(self.study.tell, assignment, outcome)):
            self.listener.finished(assignment, outcome)
            self._first_failures.add(outcome)

    def _outcome(self, assignment: Assignment) -> Outcome | None:
        return self.executor.run(
            assignment,
            self.study.space.limits,
            stop=lambda: self._stop_of(assignment),
            on_start=lambda: self.listener.started(assignment),
            on_waiting=self.listener.waiting,
        )

    def _stop_of(self, assignment: Assignment) -> Stop:
        return Stop.NOW if self.study.is_lost(assignment.number) else self._stop

    def _release(self, assignment: Assignment) -> None:
        patiently(lambda: self.study.release(assignment))
        self.listener.released(assignment)


def patiently(call: Callable[[], Result]) -> Result:
    """``call()``, tried again while the storage fails: every change to a study can be taken up where it stopped.

    Raises:
        UserError: The storage was away for too long.
    """
    pauses = iter(STORAGE_PAUSES_SECONDS)
    while True:
        try:
            return call()
        except StorageInternalError as error:
            pause_seconds = next(pauses, None)
            if pause_seconds is None:
                reason = str(error.__cause__ or error).splitlines()[0]
                raise UserError(
                    f"the study's storage can't be used: {reason}",
                    hint="bring it back; the same command goes on where it was",
                ) from error
            time.sleep(pause_seconds)
