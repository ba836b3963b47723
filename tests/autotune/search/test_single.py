"""The default search for one objective: where it begins, what it finds, what it never does."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.prior.predict import Prior
from autotune.prior.task import Task
from autotune.search.acquisition import log_expected_improvement
from autotune.search.sampler import Observation, SearchState
from autotune.search.seeds import derive_seed
from autotune.search.single import SurrogateSampler
from autotune.space.expression import parse_expression
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space

pytestmark = pytest.mark.unit

RATE = Dimension("learning_rate", "log_float", low=1e-4, high=1e-2)
BATCH = Dimension("global_batch_tokens", "log_float", low=2**15, high=2**21)


def space(*dimensions, constraints=(), name="quality"):
    return Space("s", (Objective(name=name),), dimensions, {}, constraints)


def run(space, function, num_trials, seed=0, prior=None, batch=1):
    """Observations of a search; ``batch`` proposals at once."""
    observations = []
    while len(observations) < num_trials:
        for _ in range(batch):
            number = len(observations)
            state = SearchState(
                space, tuple(observations), number, derive_seed(seed, number), seed, num_trials, task_prior=prior
            )
            chosen = SurrogateSampler().propose(state)
            if chosen is None:
                return observations
            assert space.candidate(chosen).is_legal
            observations.append(Observation(number, "running", chosen))
        for index in range(len(observations) - batch, len(observations)):
            value = function(observations[index].parameters)
            observations[index] = (
                replace(observations[index], state="failed", failure="oom")
                if value is None
                else replace(observations[index], state="ok", values={space.objectives[0].name: value})
            )
    return observations


def values(observations, name="quality"):
    return [o.values[name] for o in observations if o.values]


def bowl(row):
    u = np.log(row["learning_rate"] / 2e-3)
    v = np.log(row["global_batch_tokens"] / 2**18)
    return 2.4 + 0.02 * u**2 - 0.015 * u * v + 0.02 * v**2


def test_without_a_prior_the_first_trial_is_the_middle_of_the_box():
    (first,) = run(space(RATE, BATCH), bowl, 1)
    assert first.parameters == pytest.approx({"learning_rate": 1e-3, "global_batch_tokens": 2**18})


def prior_at(num_parameters=300_000_000, total_tokens=20_000_000_000):
    return Prior.load().at(
        Task(num_parameters=num_parameters, num_active_parameters=num_parameters, total_tokens=total_tokens)
    )


def test_what_the_prior_says_nothing_of_is_spread_over_first():
    unknown = [Dimension(name, "float", low=0.0, high=1.0) for name in ("dropout", "noise")]
    searched = run(space(RATE, BATCH, *unknown), bowl, 4, prior=prior_at())
    first, *others = (o.parameters for o in searched)
    for name in ("learning_rate", "global_batch_tokens"):
        assert [row[name] for row in others] == pytest.approx([first[name]] * 3, rel=0.2)
    for name in ("dropout", "noise"):
        assert np.ptp([row[name] for row in (first, *others)]) > 0.3
        assert all(0.19 < row[name] < 0.81 for row in others)


def test_far_from_the_prior_all_is_spread_over_after_its_first_word():
    prior = prior_at(1_000_000, 100_000_000)
    assert prior.support == "outside"
    rates = [o.parameters["learning_rate"] for o in run(space(RATE, BATCH), bowl, 4, prior=prior)]
    assert rates[0] == pytest.approx(prior.optimum()["learning_rate"], rel=0.3)
    assert np.ptp(np.log10(rates)) > 0.8


def test_with_a_prior_the_first_trial_is_its_optimum():
    prior = prior_at()
    (first,) = run(space(RATE, BATCH), bowl, 1, prior=prior)
    optimum = prior.optimum()
    assert first.parameters == pytest.approx({name: optimum[name] for name in first.parameters}, rel=0.1)


def test_finds_the_bottom_of_a_bowl():
    assert min(values(run(space(RATE, BATCH), bowl, 12))) < 2.4 + 5e-4


def test_the_same_state_gives_the_same_proposal_and_another_seed_another():
    trials = run(space(RATE, BATCH), bowl, 6)
    state = SearchState(space(RATE, BATCH), tuple(trials), 6, 1, 0)
    propose = SurrogateSampler().propose
    assert propose(state) == propose(state)
    assert propose(state) != propose(replace(state, seed=2))


def test_proposals_made_at_once_spread_out():
    trials = run(space(RATE, BATCH), bowl, 12, batch=4)
    keys = {tuple(np.round(np.log(list(o.parameters.values())), 2)) for o in trials}
    assert len(keys) >= 11


def test_a_discrete_space_is_gone_through_without_repeats():
    small = space(
        Dimension("a", "categorical", values=("x", "y", "z")), Dimension("b", "int", low=1, high=4), name="loss"
    )
    trials = run(small, lambda row: row["b"] + 3.0 * (row["a"] != "y"), 50)
    assert len(trials) == len({tuple(o.parameters.items()) for o in trials}) == 12
    assert min(values(trials[:7], "loss")) == 1.0


def test_conditions_and_constraints_hold():
    known = frozenset({"kind", "momentum", "rate"})
    mixed = space(
        Dimension("kind", "categorical", values=("sgd", "adam")),
        Dimension("rate", "log_float", low=1e-4, high=1.0),
        Dimension("momentum", "float", low=0.0, high=0.99, when=parse_expression("kind == 'sgd'", known)),
        constraints=(parse_expression("rate <= 0.1", known),),
        name="loss",
    )

    def loss(row):
        best = 1e-2 if row["kind"] == "sgd" else 1e-3
        momentum = (row["momentum"] - 0.9) ** 2 if "momentum" in row else 0.3
        return np.log10(row["rate"] / best) ** 2 + momentum

    trials = run(mixed, loss, 25)
    assert all(("momentum" in o.parameters) == (o.parameters["kind"] == "sgd") for o in trials)
    assert all(o.parameters["rate"] <= 0.1 for o in trials)
    assert min(values(trials, "loss")) < 0.1


def test_failures_are_kept_away_from():
    def half(row):
        return None if row["learning_rate"] > 4e-3 else bowl(row)

    trials = run(space(RATE, BATCH), half, 20)
    assert sum(o.state == "failed" for o in trials) <= 6
    assert min(values(trials)) < 2.4 + 2e-3


def test_diverged_losses_do_no_harm():
    def cliff(row):
        return 9.0 if row["learning_rate"] > 3e-3 else bowl(row)

    assert min(values(run(space(RATE, BATCH), cliff, 15))) < 2.4 + 1e-3


def test_log_expected_improvement_is_exact_and_finite_far_away():
    from scipy.stats import norm

    z = np.array([3.0, 0.5, -0.9, -1.1, -4.0])
    exact = 2.0 * (z * norm.cdf(z) + norm.pdf(z))
    assert log_expected_improvement(-2.0 * z, np.full(5, 2.0), 0.0) == pytest.approx(np.log(exact), rel=1e-6)
    far = log_expected_improvement(np.array([10.0, 100.0, 1e5, 1e8]), np.ones(4), 0.0)
    assert np.isfinite(far).all()
    assert (np.diff(far) < 0).all()
