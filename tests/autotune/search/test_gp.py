"""The Gaussian process against definitions written out in full, and what it is for: few points, known structure."""

import numpy as np
import pytest

from autotune.search.encoding import Inputs
from autotune.search.gp import Evidence, GaussianProcess, Kernel, Points, Priors

pytestmark = pytest.mark.unit


def points(x, **changes):
    x = np.asarray(x, dtype=float)
    plain = Points.plain(Inputs(x, np.arange(x.shape[1])))
    return Points(
        plain.inputs,
        changes.get("mean", plain.mean),
        changes.get("scale", plain.scale),
        changes.get("basis", plain.basis),
    )


def random_points(n, seed=0):
    rng = np.random.default_rng(seed)
    return points(
        rng.uniform(size=(n, 3)),
        mean=rng.normal(size=n), scale=rng.uniform(0.5, 2, size=n), basis=rng.normal(size=(n, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("priors", [Priors(), Priors(curvature=None)])
def test_gradient_is_that_of_the_value(priors):
    at = random_points(12)
    objective = Evidence(at, np.random.default_rng(1).normal(size=12), priors)
    start = objective.centre + np.random.default_rng(2).normal(size=len(objective.centre)) * 0.3
    step = np.eye(len(start)) * 1e-5
    differences = [(objective(start + s)[0] - objective(start - s)[0]) / 2e-5 for s in step]
    assert objective(start)[1] == pytest.approx(np.array(differences), rel=1e-4, abs=1e-5)


def test_posterior_is_the_textbook_one():
    seen, asked = random_points(9), random_points(5, seed=3)
    y = np.random.default_rng(4).normal(size=9)
    kernel = Kernel(np.log([0.4, 0.7, 1.1, 0.9, 0.2, 0.5]), 3)
    process = GaussianProcess.condition(kernel, seen, y)
    inverse = np.linalg.inv(kernel.covariance(seen, seen) + 0.2**2 * np.eye(9))
    cross = kernel.covariance(asked, seen)
    mean, sd = process.posterior(asked)
    covariance = kernel.covariance(asked, asked) - cross @ inverse @ cross.T
    assert mean == pytest.approx(asked.mean + cross @ inverse @ (y - seen.mean), abs=1e-6)
    assert sd**2 == pytest.approx(np.diag(covariance), abs=1e-6)
    assert kernel.variance(asked) == pytest.approx(np.diag(kernel.covariance(asked, asked)))


def test_a_parabola_is_placed_by_few_points():
    rng = np.random.default_rng(0)
    x, asked = rng.uniform(size=(8, 2)), rng.uniform(size=(200, 2))

    def loss(x):
        return 3 * (x[:, 0] - 0.7) ** 2 + (x[:, 1] - 0.3) ** 2 + (x[:, 0] - 0.7) * (x[:, 1] - 0.3)

    def error(priors):
        y = loss(x)
        process = GaussianProcess.fit(points(x), (y - y.mean()) / y.std(), priors)
        return np.abs(process.posterior(points(asked))[0] * y.std() + y.mean() - loss(asked)).max()

    assert error(Priors()) < 0.03
    assert error(Priors()) < error(Priors(curvature=None))


def test_noise_is_told_from_a_rough_surface():
    rng = np.random.default_rng(0)
    x = np.tile(rng.uniform(size=(10, 1)), (3, 1))
    smooth = np.sin(4 * x[:, 0])
    exact = GaussianProcess.fit(points(x), smooth)
    noisy = GaussianProcess.fit(points(x), smooth + 0.3 * rng.normal(size=30))
    assert exact.kernel.noise < 0.01
    assert 0.15 < noisy.kernel.noise < 0.5


def test_an_input_without_effect_gets_a_long_scale():
    x = np.random.default_rng(0).uniform(size=(30, 2))
    process = GaussianProcess.fit(points(x), np.sin(9 * x[:, 0]), Priors(curvature=None))
    assert process.kernel.lengths[1] > 3 * process.kernel.lengths[0]


def test_a_believed_trial_moves_no_mean_and_narrows_what_is_near():
    process = GaussianProcess.fit(points([[0.1], [0.5], [0.9]]), np.array([1.0, 0.0, 1.0]))
    asked = points([[0.3], [0.31], [0.7]])
    believing = process.believing(points([[0.3]]))
    assert believing.posterior(asked)[0] == pytest.approx(process.posterior(asked)[0], abs=1e-3)
    assert (believing.posterior(asked)[1] < process.posterior(asked)[1])[:2].all()


def test_repeated_points_without_noise_are_no_trouble():
    x = np.full((20, 2), 0.5)
    process = GaussianProcess.fit(points(x), np.zeros(20))
    assert np.isfinite(process.posterior(points([[0.5, 0.5], [0.0, 1.0]]))).all()
