"""Curves that were cut off end where their law says, with an honest standard deviation."""

import numpy as np
import pytest

from autotune.prior.loss_law import progress_term
from autotune.search.curves import Curve

pytestmark = pytest.mark.unit


def curve(exponent: float, end: float, *, noise: float = 0.0, seed: int = 0) -> Curve:
    x = np.linspace(0.002, end, 200)
    loss = 2.0 + 0.3 * progress_term(x, 0.02, exponent) + np.random.default_rng(seed).normal(0, noise, len(x))
    return Curve.of(x.tolist(), loss.tolist(), (0.25, 1.0))


@pytest.mark.parametrize("exponent", [0.2, 0.5, 1.0])
def test_the_fall_of_a_law_is_found_again(exponent: float) -> None:
    ends = 0.3 * progress_term(np.array([0.25, 1.0]), 0.02, exponent)
    fall = curve(exponent, 0.25).fall(0.25, 1.0)
    assert fall is not None
    assert fall.mean == pytest.approx(ends[0] - ends[1], rel=0.25)


def test_forecasts_of_noisy_curves_are_as_uncertain_as_they_are_wrong() -> None:
    ends = 0.3 * progress_term(np.array([0.25, 1.0]), 0.02, 0.4)
    errors = []
    for seed in range(30):
        fall = curve(0.4, 0.25, noise=0.02, seed=seed).fall(0.25, 1.0)
        assert fall is not None
        errors.append((fall.mean - (ends[0] - ends[1])) / fall.sd)
    assert 0.2 < float(np.std(errors)) < 2.0


def test_a_steep_curve_falls_farther_than_a_flat_one() -> None:
    x = np.linspace(0.01, 0.25, 50)
    flat = Curve.of(x.tolist(), (2.5 + 0.01 / (x + 0.01)).tolist())
    steep = Curve.of(x.tolist(), (3.2 - 2 * x).tolist())
    falls = [one.fall(0.25, 1.0) for one in (flat, steep)]
    assert falls[0] is not None
    assert falls[1] is not None
    assert falls[1].mean > 4 * abs(falls[0].mean)


def test_rising_short_and_broken_curves_do_no_harm() -> None:
    rising = Curve.of([0.1, 0.15, 0.2, 0.25, 0.3], [2.0, 2.1, 2.2, 2.3, 2.4]).fall(0.3, 1.0)
    assert rising is not None
    assert rising.mean == 0.0
    assert Curve.of([0.1, 0.2], [2.0, 1.9]).fall(0.2, 1.0) is None
    assert Curve.of([0.1, 0.2, 0.3], [float("nan")] * 3).loss == ()
    assert Curve.of([], []).fall(0.1, 1.0) is None


def test_a_curve_is_read_back_as_it_was() -> None:
    one = curve(0.5, 0.25)
    assert Curve.decode(one.encode()) == one
    assert len(one.loss) <= 24
