"""What a study knows of quality: trials and prior together, and how a wrong prior is found out."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.prior.predict import Prior
from autotune.prior.task import Task
from autotune.search.joint import CONTRADICTION, JointSampler
from autotune.search.quality import QualityModel, hyperparameter_columns
from autotune.search.sampler import Observation, SearchState
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space

pytestmark = pytest.mark.unit

QUALITY = Objective(name="quality")
SPACE = Space(
    "lm",
    (QUALITY,),
    (
        Dimension("learning_rate", "log_float", low=1e-4, high=3e-2),
        Dimension("global_batch_tokens", "log_float", low=2**15, high=2**21),
    ),
    {},
)
TASK = Task(num_parameters=300_000_000, num_active_parameters=300_000_000, total_tokens=20_000_000_000)


def rows(n, seed=0):
    u = np.random.default_rng(seed).uniform(0.1, 0.9, size=(n, 2))
    return [{"learning_rate": 1e-4 * 300 ** float(a), "global_batch_tokens": 2.0**15 * 64 ** float(b)} for a, b in u]


def columns(points):
    return {name: np.array([row[name] for row in points]) for name in points[0]}


def state(points, losses, prior=None):
    observations = tuple(
        Observation(i, "ok", row, {"quality": float(loss)})
        for i, (row, loss) in enumerate(zip(points, losses, strict=True))
    )
    return SearchState(SPACE, observations, len(observations), 0, 0, task_prior=prior)


@pytest.fixture(scope="module")
def prior():
    return Prior.load().at(TASK)


def test_the_level_is_learnt_and_the_shape_is_the_priors(prior):
    seen, asked = rows(2), rows(30, seed=1)
    level = (prior.loss_level() or (2.5, 0.0))[0] + 0.02
    excess, cap = prior.excess(columns(asked))[0], 0.06 * level
    losses = level + prior.excess(columns(seen))[0]
    model = QualityModel.fit(state(seen, losses, prior), QUALITY)
    mean, sd = model.posterior(asked)
    assert not model.is_contradicted
    near = excess < 0.6 * cap
    assert (np.abs(mean - level - excess)[near] < 2.5 * sd[near] + 0.005).all()
    alone = QualityModel.fit(state(seen, losses), QUALITY).posterior(asked)[0]
    assert np.abs(mean - level - excess)[near].mean() < 0.5 * np.abs(alone - level - excess)[near].mean()


def test_a_contradicted_prior_is_dropped(prior):
    seen = rows(8)
    shuffled = 2.5 + np.random.default_rng(1).permutation(prior.excess(columns(seen))[0])
    model = QualityModel.fit(state(seen, shuffled, prior), QUALITY)
    assert model.is_contradicted
    assert model.view.prior is None
    assert JointSampler().remarks(state(seen, shuffled, prior)) == [CONTRADICTION]
    assert JointSampler().remarks(state(seen, shuffled)) == JointSampler().remarks(state([], [], prior)) == []


def test_parts_of_trainings_are_not_judged_by_the_level_of_full_ones(prior):
    """Before a training went to the end it is not known how far the others will still fall."""
    level = (prior.loss_level() or (2.5, 0.0))[0]
    for count in (1, 3):
        seen = rows(count)
        partly = state(seen, level + 1.1 + prior.excess(columns(seen))[0], prior)
        parts = tuple(replace(o, noise={"quality": 0.01}) for o in partly.observations)
        model = QualityModel.fit(replace(partly, observations=parts), QUALITY)
        assert not model.is_contradicted
        assert model.view.prior is not None
    assert QualityModel.fit(partly, QUALITY).is_contradicted, "full trainings are judged"


def test_before_any_trial_the_prior_alone_speaks(prior):
    model = QualityModel.fit(state([], [], prior), QUALITY)
    asked = rows(20)
    mean, sd = model.posterior(asked)
    assert np.argmin(mean) == np.argmin(prior.excess(columns(asked))[0])
    assert np.isfinite(sd).all()


def test_a_diverged_loss_does_not_flatten_the_rest(prior):
    seen, asked = rows(12), rows(30, seed=1)

    def losses(points):
        return 2.4 + 0.5 * ((np.log10(columns(points)["learning_rate"]) + 2.7) / 2) ** 2

    values = losses(seen)
    diverged = seen[:3], [8.0, 7.0, 11.0]
    model = QualityModel.fit(
        state([*seen, *[{**row, "learning_rate": 2.9e-2} for row in diverged[0]]], [*values, *diverged[1]]), QUALITY
    )
    near = [row for row in asked if row["learning_rate"] < 1e-2]
    assert model.posterior(near)[0] == pytest.approx(losses(near), abs=0.05)
    assert model.costs.max() < 4


def test_running_trials_are_believed_not_measured():
    points = rows(6)
    base = state(points[:5], np.linspace(2.4, 2.5, 5))
    running = Observation(5, "running", points[5])
    model = QualityModel.fit(base, QUALITY)
    believing = QualityModel.fit(replace(base, observations=(*base.observations, running)), QUALITY)
    assert believing.posterior([points[5]])[1] < model.posterior([points[5]])[1]
    assert len(believing.costs) == 5


def test_forecasts_count_the_less_the_noisier_they_are():
    points = rows(12)
    full = np.linspace(2.4, 2.6, 12)
    known = [Observation(i, "ok", points[i], {"quality": float(full[i])}) for i in range(0, 12, 2)]

    def means(noise: float) -> np.ndarray:
        wrong = [
            Observation(i, "ok", points[i], {"quality": float(full[i]) + 0.2}, noise={"quality": noise})
            for i in range(1, 12, 2)
        ]
        return QualityModel.fit(SearchState(SPACE, (*known, *wrong), 12, 0, 0), QUALITY).posterior(points)[0]

    without = QualityModel.fit(SearchState(SPACE, known, 12, 0, 0), QUALITY).posterior(points)[0]
    assert np.abs(means(100.0) - without).max() < 0.3 * np.abs(means(1e-3) - without).max()


def test_hyperparameters_are_found_under_both_names():
    fixed = {"workload.sequence_length": 1024, "weight_decay": 0.2}
    space = Space(
        "x", (QUALITY,), (Dimension("hyperparameters.global_batch_size", "categorical", values=(8, 16)),), fixed
    )
    found = hyperparameter_columns(space, {"hyperparameters.global_batch_size": np.array([8.0, 16.0])})
    assert found["global_batch_tokens"].tolist() == [8192, 16384]
    assert found["weight_decay"].tolist() == [0.2, 0.2]
    assert "learning_rate" not in found
