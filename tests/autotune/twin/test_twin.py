"""Forecasts of a live run, their intervals, and what a changed learning rate is expected to do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autotune.prior.loss_law import RatePath, fit_loss_law
from autotune.twin.interval import AdaptiveInterval
from autotune.twin.twin import Twin
from engine.config import RunConfig
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.telemetry import StepRecord

pytestmark = pytest.mark.unit

MakeSteps = Callable[..., list[StepRecord]]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(
        model=ModelSpec(
            num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=16, vocab_size=257
        ),
        workload=Workload(sequence_length=64, total_tokens=1000 * 1024),
        hyperparameters=Hyperparameters(global_batch_size=16, schedule="constant", warmup_ratio=0.05),
    )


def losses(num_steps: int) -> np.ndarray:
    steps = np.arange(1, num_steps + 1)
    return (1.8 + 4.0 * (1 + steps / 20) ** -0.5) * np.exp(np.random.default_rng(0).normal(0, 0.02, num_steps))


def test_forecast_of_the_end(config: RunConfig, make_steps: MakeSteps) -> None:
    twin = Twin(config)
    assert twin.forecast() is None
    for start in range(0, 400, 20):
        twin.update(make_steps(losses(400)[start : start + 20], first=start + 1))
        twin.forecast()
    forecast = twin.forecast()
    assert forecast is not None
    truth = 1.8 + 4.0 * (1 + 1000 / 20) ** -0.5
    assert forecast.low < truth < forecast.high
    assert forecast.loss == pytest.approx(truth, rel=0.05)
    assert forecast.law == "power"
    assert twin.num_steps_left == 600


def test_a_slower_rate_loses_progress_that_a_short_trial_hides(config: RunConfig, make_steps: MakeSteps) -> None:
    twin = Twin(config)
    twin.update(make_steps(losses(300)))
    assert twin.progress_lost(0.25, 20) > 0.02
    assert twin.progress_lost(4.0, 20) < 0
    assert twin.progress_lost(0.25, 10_000) == 0.0


def test_refits_grow_rarer(config: RunConfig, make_steps: MakeSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = fit_loss_law
    monkeypatch.setattr("autotune.twin.twin.fit_loss_law", lambda *a, **k: calls.append(1) or real(*a, **k))
    twin = Twin(config)
    for start in range(0, 600, 10):
        twin.update(make_steps(losses(600)[start : start + 10], first=start + 1))
        assert twin.law is not None or start < 100
    assert 5 < len(calls) < 20


def test_rollback_forgets_the_fit_made_on_what_was_taken_back(config: RunConfig, make_steps: MakeSteps) -> None:
    twin = Twin(config)
    twin.update(make_steps(losses(300)))
    assert twin.forecast() is not None
    twin.update(make_steps(losses(70)[60:], first=61))
    assert twin.step == 70
    forecast = twin.forecast()
    assert forecast is None or forecast.num_steps < 100


def test_coverage_recovers_when_errors_grow() -> None:
    """A static interval calibrated on the first half would cover far less of the second."""
    random = np.random.default_rng(0)
    interval = AdaptiveInterval()
    for _ in range(150):
        interval.record(float(random.normal(0, 0.01)), 1.0)
    inside = [interval.record(float(random.normal(0, 0.03)), 1.0) for _ in range(400)]
    assert np.mean(inside[100:]) == pytest.approx(0.9, abs=0.04)
    assert interval.half_width(2.0) > interval.half_width(0.5)


def test_coverage_on_published_curves(shared_data: Path) -> None:
    """Rolling forecasts of half as much again: schedules that the power law does not know, covered all the same."""
    inside = []
    interval = AdaptiveInterval()
    for file in sorted((shared_data / "loss_curves").glob("*/*.csv"))[::6]:
        step, rate, loss = np.genfromtxt(file, delimiter=",", skip_header=1).T
        groups = np.array_split(np.arange(len(step)), 40)
        rates, values = (np.array([column[group].mean() for group in groups]) for column in (rate, loss))
        for end in range(12, 36, 2):
            lengths = np.ones(40)
            law = fit_loss_law(RatePath(rates[:end], lengths[:end]), values[:end])
            assert law is not None
            target = min(end + end // 2, 39)
            predicted = law.predict(RatePath(rates[: target + 1], lengths[: target + 1]))[-1]
            inside.append(interval.record(float(np.log(predicted / values[target])), (target - end) / end))
    assert len(inside) == 36
    assert 0.82 <= np.mean(inside) <= 0.97
