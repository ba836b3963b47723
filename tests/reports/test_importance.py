"""Importance finds what made the difference, and stays silent where there is too little to say."""

from dataclasses import replace

import optuna
import pytest

from reports.importance import MIN_TRIALS, get_importance
from tests.reports.synthetic import make_snapshot, make_trial

pytestmark = pytest.mark.unit


def test_the_causes_come_first():
    importance = get_importance(make_snapshot(120, failure_ratio=0.3, num_pending=3, num_repeats=2))
    shares = {
        objective: dict(zip(importance.parameters, row, strict=True))
        for objective, row in zip(importance.objectives, importance.shares, strict=True)
    }
    assert max(shares["Held-out loss"], key=shares["Held-out loss"].get) == "learning rate"
    assert shares["Peak memory"]["micro batch size"] + shares["Peak memory"]["recompute"] > 0.7
    assert shares["Training speed"]["micro batch size"] + shares["Training speed"]["recompute"] > 0.5
    assert all(sum(row) == pytest.approx(1) for row in importance.shares)
    assert shares["Held-out loss"]["warmup ratio"] < 0.05


def test_few_trials_are_told_instead_of_guessed_from():
    importance = get_importance(make_snapshot(MIN_TRIALS - 1, failure_ratio=0))
    assert importance.shares == ()
    assert f"at least {MIN_TRIALS}" in importance.note
    assert "hint" in get_importance(make_snapshot(MIN_TRIALS + 5, failure_ratio=0)).note


def test_one_varied_value_needs_no_comparison():
    trials = tuple(make_trial(n, speed=n + 1, parameters={"plan.x": n, "plan.y": 1}) for n in range(MIN_TRIALS))
    assert "Fewer than two" in get_importance(replace(make_snapshot(0), trials=trials)).note


def test_equal_values_have_no_cause():
    trials = tuple(make_trial(n, parameters={"plan.x": n, "plan.y": n % 3}) for n in range(MIN_TRIALS))
    for row in get_importance(replace(make_snapshot(0), trials=trials)).shares:
        assert sum(row) in (0.0, pytest.approx(1))


def test_optuna_is_left_as_it_was():
    optuna.logging.set_verbosity(optuna.logging.INFO)
    get_importance(make_snapshot(30))
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
