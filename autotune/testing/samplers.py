"""What every sampler must do, as checks that any sampler can be put to; ours pass them all.

    import pytest
    from autotune.testing.samplers import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_sampler(check):
        check(MySampler())

A sampler that is meant to learn takes ``check_learns``, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autotune.search.forecast import Forecast
from autotune.search.sampler import Observation, ObservationState, Sampler, SearchState
from autotune.search.seeds import derive_seed
from autotune.search.uniform import UniformSampler
from autotune.search.warm_start import task_prior_of
from autotune.space.command import CommandSpace
from autotune.space.command_grammar import command_space
from autotune.space.enumerate import Enumeration
from autotune.space.expression import parse_expression
from autotune.space.grammar import load_space
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Scalar, Space
from autotune.space.training import TrainingSpace

Chosen = dict[str, Scalar]
Measure = Callable[[Mapping[str, Scalar]], Mapping[str, float]]
"""From chosen values to objective name -> value."""

TRAINING_OVERRIDES = ("cluster=h100x8", "objectives=[speed, memory, quality]")
MAX_SMALL = 12
"""Proposals after which a space of six candidates must be used up."""


# Spaces --------------------------------------------------------------------------------------------------------------


def mixed_space(objectives: Sequence[Objective] = (Objective(name="loss"),)) -> Space:
    """Values of a user's own program, every kind of dimension: a condition, a range in steps, a single choice, a
    constraint, a fixed value."""
    names = frozenset({"kind", "rate", "momentum", "width", "only", "depth", "steps", "fixed"})
    return CommandSpace(
        name="mixed",
        objectives=tuple(objectives),
        dimensions=(
            Dimension("kind", "categorical", ("plain", "heavy", "none")),
            Dimension("rate", "log_float", low=1e-5, high=1e-1),
            Dimension("momentum", "float", low=0.0, high=0.9, when=parse_expression("kind == 'heavy'", names)),
            Dimension("width", "int", low=8, high=64, step=8),
            Dimension("only", "categorical", (4,)),
            Dimension("depth", "categorical", (1, 2, 4)),
            Dimension("steps", "log_int", low=1, high=300),
        ),
        fixed={"fixed": 3},
        constraints=(parse_expression("width * depth <= 160", names),),
    )


def plain_space(objectives: Sequence[Objective] = (Objective(name="loss"),)) -> Space:
    """Two numbers."""
    dimensions = (Dimension("x", "float", low=0.0, high=1.0), Dimension("y", "log_float", low=1e-4, high=1e-1))
    return Space("plain", tuple(objectives), dimensions, {})


def small_space() -> Space:
    """Six candidates."""
    dimensions = (Dimension("a", "categorical", ("p", "q")), Dimension("b", "int", low=1, high=3))
    return Space("small", (Objective(name="loss"),), dimensions, {})


def training_space() -> tuple[Space, Enumeration]:
    """The shipped demonstration, on eight devices."""
    return load_space("demo", TRAINING_OVERRIDES)


# States --------------------------------------------------------------------------------------------------------------


def state_of(
    space: Space,
    observations: Sequence[Observation],
    *,
    seed: int = 0,
    num_trials: int | None = 40,
    enumeration: Enumeration | None = None,
) -> SearchState:
    """The state of a search after observations numbered from 0, as a study would make it."""
    number = len(observations)
    seed_of_proposal = derive_seed(seed, "sampler", number)
    return SearchState(space, observations, number, seed_of_proposal, seed, num_trials, enumeration)


def drawn(
    space: Space,
    count: int,
    *,
    state: ObservationState = "ok",
    failure: str = "",
    measure: Measure | None = None,
    enumeration: Enumeration | None = None,
    after: Sequence[Observation] = (),
) -> list[Observation]:
    """Observations of candidates drawn at random.

    Args:
        space: The space.
        count: How many more.
        state: Of all of them.
        failure: Of all of them.
        measure: What they are worth; by default an arbitrary value that depends on nothing but the candidate.
        enumeration: Its legal plans.
        after: Observations to go on from.
    """
    observations = list(after)
    for _ in range(count):
        chosen = UniformSampler().propose(state_of(space, observations, seed=7, enumeration=enumeration))
        assert chosen is not None, "the space has enough candidates"
        values = (measure or arbitrary(space))(chosen) if state == "ok" else None
        observations.append(Observation(len(observations), state, chosen, values, failure))
    return observations


def arbitrary(space: Space) -> Measure:
    """Values from 1 to 2 that depend on nothing but the candidate."""
    return lambda chosen: {o.name: 1 + derive_seed(0, str(chosen), o.name) / 2**31 for o in space.objectives}


def search(
    sampler: Sampler,
    space: Space,
    measure: Measure,
    num_trials: int,
    *,
    seed: int = 0,
    enumeration: Enumeration | None = None,
    after: Sequence[Observation] = (),
) -> list[Observation]:
    """A search with one worker until ``num_trials`` observations are there, or the space is used up."""
    observations = list(after)
    while len(observations) < num_trials:
        state = state_of(space, observations, seed=seed, num_trials=num_trials, enumeration=enumeration)
        chosen = sampler.propose(state)
        if chosen is None:
            break
        observations.append(Observation(len(observations), "ok", chosen, measure(chosen)))
    return observations


def bowl(chosen: Mapping[str, Scalar]) -> dict[str, float]:
    """A convex loss on ``plain_space``, 0 at its optimum."""
    x, y = chosen["x"], chosen["y"]
    assert isinstance(x, float)
    assert isinstance(y, float)
    return {"loss": (x - 0.7) ** 2 + (math.log(y / 1e-4) / math.log(1e3) - 0.4) ** 2}


# Checks --------------------------------------------------------------------------------------------------------------


def check_proposes_values_of_the_space(sampler: Sampler) -> None:
    """A value for every dimension that is active, in order, and nothing else; legal; with 0 to 60 observations."""
    space = mixed_space()
    for count in (0, 1, 6, 60):
        _proposed(sampler, state_of(space, drawn(space, count), num_trials=80))


def check_proposes_training_runs(sampler: Sampler) -> None:
    """Legal plans and hyperparameters of the engine for three objectives, with and without estimates and the prior."""
    space, enumeration = training_space()
    assert isinstance(space, TrainingSpace)
    forecast = Forecast.make(space, enumeration)
    for count in (0, 12):
        state = state_of(space, drawn(space, count, enumeration=enumeration), enumeration=enumeration)
        _proposed(sampler, state)
        known = replace(state, enumeration=forecast.enumeration, forecast=forecast, task_prior=task_prior_of(space))
        _proposed(sampler, known)


def check_takes_a_prior(sampler: Sampler) -> None:
    """Legal values of a user's own program, for one objective and for several, where a prior speaks of some of them."""
    values = {"lr": {"log_float": [1e-4, 1e-1]}, "batch": [8, 16, 32], "dropout": {"float": [0.0, 0.5]}}
    roles = {"learning_rate": "lr", "global_batch_size": "batch", "quality": "loss"}
    task = {"num_parameters": 10**8, "total_tokens": 2 * 10**9, "sequence_length": 2048, "roles": roles}
    for objectives in ({"loss": "minimize"}, {"loss": "minimize", "seconds": "minimize"}):
        space = command_space(values, objectives, task=task)
        prior = task_prior_of(space)
        assert prior is not None
        for count in (0, 1, 8):
            _proposed(sampler, replace(state_of(space, drawn(space, count)), task_prior=prior))


def check_is_a_function_of_the_state(sampler: Sampler) -> None:
    """The same state gives the same proposal, whatever was asked in between."""
    space = mixed_space()
    for count in (0, 14):
        state = state_of(space, drawn(space, count))
        first = sampler.propose(state)
        sampler.propose(state_of(plain_space(), drawn(plain_space(), 3)))
        assert sampler.propose(state) == first


def check_seeds_differ(sampler: Sampler) -> None:
    """Searches with two seeds are two searches."""
    one, other = (search(sampler, plain_space(), bowl, 7, seed=seed) for seed in (1, 2))
    assert [o.parameters for o in one] != [o.parameters for o in other]


def check_never_repeats_what_runs(sampler: Sampler) -> None:
    """Trials that still run are neither a difficulty nor proposed again; all of them may run at once."""
    space = small_space()
    for num_ended, num_running in ((0, 2), (2, 3), (0, 5)):
        observations = drawn(space, num_running, state="running", after=drawn(space, num_ended))
        chosen = _proposed(sampler, state_of(space, observations))
        assert dict(chosen) not in [dict(o.parameters) for o in observations]


def check_survives_failures(sampler: Sampler) -> None:
    """Every trial failed, by its own fault or the machines', every proposal was refused, a few of many failed, and a
    mixture of it."""
    space = mixed_space()
    failed = drawn(space, 12, state="failed", failure="oom")
    lost = drawn(space, 12, state="failed", failure="infra")
    refused = drawn(space, 12, state="refused", failure="constraint")
    mixture = drawn(space, 4, state="failed", failure="nan", after=drawn(space, 12))
    mixture = drawn(space, 2, state="running", after=drawn(space, 3, state="refused", after=mixture))
    for observations in (failed, lost, refused, mixture):
        _proposed(sampler, state_of(space, observations))


def check_survives_diverged_losses(sampler: Sampler) -> None:
    """A loss of a million beside losses of two, and equal losses everywhere."""
    space = plain_space()
    usual = drawn(space, 12, measure=lambda chosen: {"loss": 2.0 + bowl(chosen)["loss"]})
    diverged = drawn(space, 3, measure=lambda _: {"loss": 1e6}, after=usual)
    equal = drawn(space, 12, measure=lambda _: {"loss": 2.0})
    for observations in (diverged, equal):
        _proposed(sampler, state_of(space, observations))


def check_survives_bounds(sampler: Sampler) -> None:
    """One to four objectives in both directions, where no trial is within the bounds, some are, and all are."""
    for count, bound in ((1, 0.5), (2, 0.5), (2, 1.5), (3, 3.0), (4, None)):
        objectives = [Objective(name=name, direction="minimize") for name in ("loss", "seconds", "bytes")[:count]]
        objectives += [Objective(name="score", direction="maximize")] if count == 4 else []
        objectives[0] = objectives[0].changed(bound=bound)
        space = mixed_space(objectives)
        _proposed(sampler, state_of(space, drawn(space, 12)))


def check_uses_a_space_up(sampler: Sampler) -> None:
    """A space of six candidates: each is proposed once, and then nothing; and a space of one."""
    for space, size in ((small_space(), 6), (CommandSpace("one", (Objective(name="loss"),), (), {"only": 1}), 1)):
        observations = search(sampler, space, arbitrary(space), MAX_SMALL)
        keys = [tuple(o.parameters.items()) for o in observations]
        assert len(set(keys)) == len(keys) == size


def check_learns(sampler: Sampler, *, num_trials: int = 40, num_seeds: int = 3) -> None:
    """On a convex loss of two numbers the best of ``num_trials`` trials is better than that of random search."""
    space = plain_space()

    def mean_best(sampler: Sampler, num_seeds: int) -> float:
        searches = [search(sampler, space, bowl, num_trials, seed=seed) for seed in range(num_seeds)]
        return float(np.mean([min((o.values or {})["loss"] for o in observations) for observations in searches]))

    mine, random = mean_best(sampler, num_seeds), mean_best(UniformSampler(), 10)
    assert mine < random, f"{mine:.3g} above the optimum, random search {random:.3g}"


CHECKS = (
    check_proposes_values_of_the_space,
    check_proposes_training_runs,
    check_takes_a_prior,
    check_is_a_function_of_the_state,
    check_seeds_differ,
    check_never_repeats_what_runs,
    check_survives_failures,
    check_survives_diverged_losses,
    check_survives_bounds,
    check_uses_a_space_up,
)
"""What holds for every sampler."""


def _proposed(sampler: Sampler, state: SearchState) -> Chosen:
    """A proposal, found to be a legal candidate and made of values that were not computed from anything unfinished."""
    with np.errstate(invalid="raise"):  # a NaN inside a model is a fault even where the proposal looks right
        chosen = sampler.propose(state)
    assert chosen is not None, "there are candidates left"
    known: Chosen = {}
    for dimension in state.space.dimensions:
        is_active = state.space.is_active(dimension, known)
        assert is_active == (dimension.name in chosen), (
            f"{dimension.name} is {'' if is_active else 'not '}searched here"
        )
        if is_active:
            known[dimension.name] = chosen[dimension.name]
    assert list(chosen) == list(known), f"{list(chosen)} are not the space's dimensions in order"
    candidate = state.space.candidate(chosen)
    assert candidate.is_legal, candidate.reason
    return chosen
