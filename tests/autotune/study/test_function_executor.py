"""A function's trials: whatever a call does becomes a typed outcome, and the sweep goes on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space, TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.driver import Driver
from autotune.study.function_executor import FunctionExecutor, TrialFailed, call
from autotune.study.study import Nothing, Study

pytestmark = pytest.mark.unit

LOSS = Objective(name="loss")
ACCURACY = Objective(name="accuracy", direction="maximize")


def assignment(x: float = 0.5) -> Assignment:
    return Assignment(number=0, attempt=1, folder=Path("none"), parameters={"x": x}, label="", seed=1)


def outcome_of(function: Callable[[Assignment], Any], *objectives: Objective) -> Any:
    return call(function, assignment(), objectives or (LOSS,))


def raising(error: BaseException) -> Callable[[Assignment], Any]:
    def function(_: Assignment) -> Any:
        raise error

    return function


class OutOfMemoryError(RuntimeError):
    """As devices' libraries call it."""


@pytest.mark.parametrize(
    ("given", "metrics"),
    [
        (0.5, {"loss": 0.5}),
        (np.float32(0.5), {"loss": 0.5}),
        ({"loss": 1, "seconds": 2.0, "note": "x", "worst": math.inf}, {"loss": 1.0, "seconds": 2.0}),
    ],
)
def test_values_and_further_figures_are_kept(given: Any, metrics: dict[str, float]) -> None:
    outcome = outcome_of(lambda _: given)
    assert (outcome.kind, outcome.metrics) == ("ok", metrics)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (None, "user", "it gave None"),
        ("0.5", "user", "it gave '0.5'"),
        (True, "user", "it gave True"),
        ({"los": 0.5}, "user", "no 'loss', only los"),
        ({"loss": "low"}, "user", "loss = 'low'"),
        ({"loss": math.nan}, "nan", "loss is nan"),
        (math.inf, "nan", "loss is inf"),
    ],
)
def test_what_is_no_value_is_a_failure_with_its_reason(given: Any, kind: str, words: str) -> None:
    outcome = outcome_of(lambda _: given)
    assert outcome.kind == kind
    assert words in outcome.detail


def test_several_objectives_need_a_mapping() -> None:
    assert "a mapping with loss, accuracy" in outcome_of(lambda _: 0.5, LOSS, ACCURACY).detail
    outcome = outcome_of(lambda _: {"loss": 0.5, "accuracy": math.nan}, LOSS, ACCURACY)
    assert (outcome.kind, outcome.metrics) == ("nan", {"loss": 0.5})


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (ValueError("too\nbig"), "user", "ValueError: too big"),
        (MemoryError(), "oom", "MemoryError"),
        (OutOfMemoryError("16 GiB"), "oom", "OutOfMemoryError: 16 GiB"),
        (TrialFailed("loss of 9", "diverged"), "diverged", "loss of 9"),
    ],
)
def test_exceptions_are_outcomes(error: Exception, kind: str, detail: str) -> None:
    outcome = outcome_of(raising(error))
    assert (outcome.kind, outcome.detail) == (kind, detail)


def test_an_interrupt_is_no_outcome() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome_of(raising(KeyboardInterrupt()))


def test_a_call_is_not_begun_while_stopping() -> None:
    executor = FunctionExecutor(lambda _: 1.0, (LOSS,))
    quiet: Callable[[], None] = lambda: None  # noqa: E731
    assert executor.run(assignment(), TrialLimits(), stop=lambda: Stop.SOON, on_start=quiet, on_waiting=quiet) is None


class Silent:
    """Listens and says nothing."""

    def waiting(self) -> None: ...

    def started(self, assignment: Assignment) -> None: ...

    def finished(self, assignment: Assignment, outcome: Any) -> None: ...

    def released(self, assignment: Assignment) -> None: ...

    def retried(self, assignment: Assignment, outcome: Any) -> None: ...


def test_one_error_does_not_end_the_sweep(tmp_path: Path) -> None:
    space = Space(
        "s", (LOSS,), (Dimension("x", "float", low=0.0, high=1.0),), {}, data={"objectives": [LOSS.to_data()]}
    )

    def function(trial: Assignment) -> float:
        if trial.number % 4 == 0:
            raise RuntimeError("broken")
        return (float(trial.parameters["x"]) - 0.3) ** 2  # type: ignore[arg-type]

    study = Study.create_or_open(tmp_path / "s", space, sampler="random", num_trials=40)
    ending = Driver(study, FunctionExecutor(function, space.objectives), Silent(), 2).run()
    rows = study.snapshot().trials
    study.close()
    assert ending is Nothing.DONE
    kinds = [row.outcome.kind for row in rows if row.outcome is not None]
    assert (kinds.count("ok"), kinds.count("user")) == (30, 10)
