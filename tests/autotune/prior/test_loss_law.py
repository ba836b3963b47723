"""The loss law finds its own parameters again, and forecasts published curves under schedules it has not seen."""

from pathlib import Path

import numpy as np
import pytest

from autotune.prior.loss_law import DropTerm, LossLaw, RatePath, fit_loss_law
from autotune.prior.robust import Floats

pytestmark = pytest.mark.unit

DROPS = DropTerm(gain=0.3, speed=0.05, power=0.6, rate_power=0.6)


def cosine(num_bins: int, steps_per_bin: float = 10.0) -> RatePath:
    phase = np.linspace(0, np.pi, num_bins)
    return RatePath(1e-3 * (0.1 + 0.9 * (1 + np.cos(phase)) / 2), np.full(num_bins, steps_per_bin))


def head(path: RatePath, length: int) -> RatePath:
    return RatePath(path.rate[:length], path.num_steps[:length])


def tail(path: RatePath, length: int) -> RatePath:
    return RatePath(path.rate[length:], path.num_steps[length:])


def test_multi_power_law_forecasts_its_own_synthetic_curve() -> None:
    truth = LossLaw(1.5, 20.0, 30.0, 0.5, 1e-3, DROPS)
    path = cosine(60)
    loss = truth.predict(path) * np.exp(np.random.default_rng(0).normal(0, 2e-4, 60))
    law = fit_loss_law(head(path, 40), loss[:40])
    assert law is not None
    assert law.form == "multi-power"
    forecast = law.predict(head(path, 40).then(tail(path, 40)))[-1]
    assert forecast == pytest.approx(loss[-1], rel=0.01)


def test_constant_rate_and_few_points_fall_back_to_the_power_law() -> None:
    truth = LossLaw(2.0, 5.0, 10.0, 0.4, 1e-3)
    constant = RatePath(np.full(40, 1e-3), np.full(40, 20.0))
    law = fit_loss_law(head(constant, 25), truth.predict(constant)[:25])
    assert law is not None
    assert law.form == "power"
    assert law.predict(constant)[-1] == pytest.approx(truth.predict(constant)[-1], rel=0.005)
    few = fit_loss_law(head(cosine(60), 20), truth.predict(cosine(60))[:20])
    assert few is not None
    assert few.form == "power"


def test_no_law_without_data() -> None:
    path = RatePath(np.full(5, 1e-3), np.full(5, 1.0))
    assert fit_loss_law(path, np.full(5, 3.0)) is None
    assert fit_loss_law(RatePath(np.zeros(20), np.ones(20)), np.full(20, 3.0)) is None


def test_outliers_hardly_move_the_fit() -> None:
    truth = LossLaw(2.0, 5.0, 10.0, 0.4, 1e-3)
    path = RatePath(np.full(40, 1e-3), np.full(40, 20.0))
    loss = truth.predict(path) * np.exp(np.random.default_rng(1).normal(0, 2e-3, 40))
    clean = fit_loss_law(head(path, 30), loss[:30])
    loss[[7, 19]] *= 1.5
    dirty = fit_loss_law(head(path, 30), loss[:30])
    assert clean is not None
    assert dirty is not None
    assert dirty.predict(path)[-1] == pytest.approx(clean.predict(path)[-1], rel=0.01)


def read_curve(folder: Path, name: str, num_bins: int) -> tuple[RatePath, Floats]:
    """A published curve after warm-up as segments, with the mean loss of each."""
    step, rate, loss = np.genfromtxt(folder / f"{name}.csv", delimiter=",", skip_header=1).T
    length = np.diff(step, prepend=2 * step[0] - step[1])
    groups = np.array_split(np.arange(len(step)), num_bins)
    path = RatePath(
        np.array([np.average(rate[group], weights=length[group]) for group in groups]),
        np.array([length[group].sum() for group in groups]),
    )
    return path, np.array([loss[group].mean() for group in groups])


def test_published_curves_are_forecast_from_half_the_run(shared_data: Path) -> None:
    """The drop term of one 25M run, carried over to schedules at 100M: far better than the last value, and than
    the power law that does not know the schedule."""
    curves = shared_data / "loss_curves"
    proxy = fit_loss_law(*read_curve(curves / "25M", "cosine_72000", 48))
    assert proxy is not None
    assert proxy.drops is not None
    errors: dict[str, list[float]] = {"transferred": [], "power": [], "last": []}
    for file in sorted((curves / "100M").glob("*.csv"))[::2]:
        path, loss = read_curve(curves / "100M", file.stem, 40)
        past, future = head(path, 20), tail(path, 20)
        transferred = fit_loss_law(past, loss[:20], drops=proxy.drops)
        flat = fit_loss_law(past, loss[:20], drops=DropTerm(1e-9, 1.0, 1.0, 0.0))
        assert transferred is not None
        assert flat is not None
        errors["transferred"].append(abs(transferred.predict(past.then(future))[-1] / loss[-1] - 1))
        errors["power"].append(abs(flat.predict(past.then(future))[-1] / loss[-1] - 1))
        errors["last"].append(abs(loss[19] / loss[-1] - 1))
    mean = {name: float(np.mean(values)) for name, values in errors.items()}
    assert mean["transferred"] < 0.015
    assert mean["transferred"] < 0.7 * mean["power"]
    assert mean["power"] < 0.7 * mean["last"]
