"""Draws at anchors and elsewhere agree with the process and with each other."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.search.draws import Draws
from autotune.search.encoding import Inputs
from autotune.search.gp import GaussianProcess, Kernel, Points

pytestmark = pytest.mark.unit


def points(x: list[float]) -> Points:
    return Points.plain(Inputs(np.array(x, dtype=np.float64)[:, None], np.zeros(1, dtype=np.int64)))


def process(noise: float = 0.3, known_noise: np.ndarray | None = None) -> GaussianProcess:
    kernel = Kernel(np.log([0.3, 1.0, noise]), 1)
    told = replace(points([0.1, 0.5]), noise=known_noise)
    return GaussianProcess.condition(kernel, told, np.array([1.0, -1.0]))


@pytest.mark.parametrize("known_noise", [None, np.array([0.0, 0.8])])
def test_mean_and_spread_are_the_posterior_s(known_noise: np.ndarray | None) -> None:
    model = process(known_noise=known_noise)
    draws = Draws.of(model, points([0.1, 0.3]), 4000, np.random.default_rng(0))
    for values, where in ((draws.anchors, [0.1, 0.3]), (draws.at(points([0.2, 0.9])), [0.2, 0.9])):
        mean, sd = model.posterior(points(where))
        assert values.mean(axis=0) == pytest.approx(mean, abs=0.06)
        assert values.std(axis=0) == pytest.approx(sd, rel=0.06)


def test_a_candidate_at_an_anchor_has_the_anchor_s_value_in_every_draw() -> None:
    draws = Draws.of(process(), points([0.1, 0.3]), 50, np.random.default_rng(0))
    assert draws.at(points([0.3]))[:, 0] == pytest.approx(draws.anchors[:, 1], abs=1e-2)


def test_without_trials_draws_are_the_prior_s() -> None:
    kernel = Kernel(np.log([0.3, 1.0, 0.1]), 1)
    empty = GaussianProcess.condition(kernel, points([]), np.zeros(0))
    draws = Draws.of(empty, points([]), 4000, np.random.default_rng(0))
    assert draws.anchors.shape == (4000, 0)
    assert draws.at(points([0.5]))[:, 0].std() == pytest.approx(np.sqrt(2.0), rel=0.05)
