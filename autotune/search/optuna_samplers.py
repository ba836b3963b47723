"""Optuna's samplers behind our contract: each proposal asks a sampler on a study in memory, made from the observations.

The study that users see in their storage holds values as measured; what samplers see here is clean (``hygiene``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.search.hygiene import costs_of, violations_of
from autotune.search.sampler import Observation, SearchState
from autotune.search.uniform import UniformSampler
from autotune.space.space import Dimension, Scalar, Space


def num_startup_trials(num_trials: int | None) -> int:
    """Trials drawn uniformly before a sampler models anything: a quarter of the budget, from 5 to 20."""
    return 10 if num_trials is None else min(20, max(5, num_trials // 4))


def tree_parzen(seed: int) -> BaseSampler:
    """Tree-structured Parzen estimators: several objectives, constraints, conditions; trials that still run count as
    bad, so that parallel proposals spread out."""
    return TPESampler(seed=seed, n_startup_trials=1)


@dataclass(frozen=True)
class OptunaSampler:
    """Proposals of an Optuna sampler, after some that are drawn uniformly from the legal candidates."""

    make: Callable[[int], BaseSampler]
    """From a seed to the sampler."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        if len(state.tried) < num_startup_trials(state.num_trials):
            return UniformSampler().propose(state)
        study = optuna.create_study(
            directions=["minimize"] * len(state.space.objectives), sampler=self.make(state.seed)
        )
        study.add_trials(trials_of(state.space, state.observations))
        return suggest(study.ask(), state.space)


def trials_of(space: Space, observations: Sequence[Observation]) -> list[FrozenTrial]:
    """Observations as Optuna's trials: costs to be minimised, violations as constraints."""
    distributions = {dimension.name: distribution_of(dimension) for dimension in space.dimensions}
    costs, violations = costs_of(observations, space.objectives), violations_of(observations, space.objectives)
    return [
        create_trial(
            state=TrialState.RUNNING if observation.state == "running" else TrialState.COMPLETE,
            values=None if observation.state == "running" else costs[row].tolist(),
            params=dict(observation.parameters),
            distributions={name: distributions[name] for name in observation.parameters},
            constraints=None if observation.state == "running" else _named(violations[row]),
        )
        for row, observation in enumerate(observations)
    ]


def _named(violations: np.ndarray) -> dict[str, float]:
    return {str(index): float(value) for index, value in enumerate(violations)}


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """The dimension in Optuna's terms."""
    if dimension.kind == "categorical":
        return CategoricalDistribution(dimension.values)
    if dimension.kind == "int":
        values = dimension.choices()
        assert values is not None
        return IntDistribution(int(dimension.low), int(values[-1] or 0), step=dimension.step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log_float")


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Scalar]:
    """Let the trial's sampler choose a value for every active dimension.

    Returns:
        Dimension name -> value.
    """
    chosen: dict[str, Scalar] = {}
    for dimension in space.dimensions:
        if not space.is_active(dimension, chosen):
            continue
        distribution = distribution_of(dimension)
        if isinstance(distribution, CategoricalDistribution):
            chosen[dimension.name] = trial.suggest_categorical(dimension.name, distribution.choices)
        elif isinstance(distribution, IntDistribution):
            chosen[dimension.name] = trial.suggest_int(
                dimension.name, distribution.low, distribution.high, step=distribution.step
            )
        else:
            assert isinstance(distribution, FloatDistribution)
            chosen[dimension.name] = trial.suggest_float(
                dimension.name, distribution.low, distribution.high, log=distribution.log
            )
    return chosen
