"""The point of least expected loss: lower the less is known of the optimum, and the nearer the cliff."""

import numpy as np
import pytest

from autotune.prior.risk import CLIFF, careful, cliff_seen
from autotune.prior.robust import Floats

pytestmark = pytest.mark.unit

FAR_CLIFF = np.array([4.0, 0.1])
ANYWHERE = [(-20.0, 20.0), (-20.0, 20.0)]


def parabola(x: Floats, y: Floats) -> Floats:
    return 0.02 * (x + 6) ** 2 + 0.01 * (y - 13) ** 2


def lopsided(x: Floats, y: Floats) -> Floats:
    return 0.02 * np.expm1(0.8 * (x + 6)) ** 2 + 0.01 * (y - 13) ** 2


BEST = np.array([-6.0, 13.0])


def test_a_symmetric_loss_asks_for_no_caution() -> None:
    place = careful(parabola, BEST, np.array([0.2, 0.2]), FAR_CLIFF, ANYWHERE)
    assert place == pytest.approx(BEST, abs=1e-3)


def test_where_high_rates_cost_more_doubt_lowers_the_proposal() -> None:
    sure, unsure = (careful(lopsided, BEST, np.array([sd, sd]), FAR_CLIFF, ANYWHERE)[0] - BEST[0] for sd in (0.01, 0.2))
    assert sure == pytest.approx(0, abs=0.01)
    assert -0.3 < unsure < -0.02


def test_a_near_or_unknown_cliff_lowers_the_proposal() -> None:
    sd = np.array([0.1, 0.1])
    far, near, unknown = (
        careful(parabola, BEST, sd, np.array(cliff), ANYWHERE)[0] for cliff in ((3.0, 0.1), (0.8, 0.1), (1.5, 0.7))
    )
    assert near < far - 0.1
    assert unknown < far - 0.1
    assert far == pytest.approx(BEST[0], abs=0.01)


def test_fixed_values_and_bounds_are_kept() -> None:
    place = careful(lopsided, BEST, np.array([0.2, 0.2]), np.array([0.8, 0.1]), [(-5.99, 0.0), (13.0, 13.0)])
    assert place[0] >= -6.1
    assert place[1] == pytest.approx(13.0)


def test_runs_that_diverge_tell_where_the_cliff_is() -> None:
    distance = np.repeat(np.linspace(-1, 3, 21), 3)
    place, sd = cliff_seen(distance, distance > 0.9)
    assert place == pytest.approx(0.9, abs=0.15)
    assert sd < 0.2
    # one at a low rate has another cause
    odd = cliff_seen(np.append(distance, -1.0), np.append(distance > 0.9, True))
    assert odd[0] == pytest.approx(place, abs=0.1)


def test_runs_far_below_it_tell_nothing_of_the_cliff() -> None:
    place, sd = cliff_seen(np.full(20, -2.0), np.zeros(20, dtype=bool))
    assert (place, sd) == (CLIFF, np.inf)
