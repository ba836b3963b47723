"""Optuna's samplers behind our contract: each proposal asks a sampler on a study in memory, made from the observations.

The study that users see in their storage holds values as measured; what samplers see here is clean (``hygiene``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIIISampler, NSGAIISampler, TPESampler
from optuna.samplers.nsgaii import PolynomialMutation, SBXCrossover
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.search.hygiene import costs_of, tells, violations_of
from autotune.search.sampler import SearchState
from autotune.search.uniform import UniformSampler, is_new
from autotune.space.space import Dimension, Scalar, Space

optuna.logging.set_verbosity(optuna.logging.WARNING)

MAX_ASKED = 3
"""Proposals of a sampler that are illegal or known already before one is drawn uniformly."""


def num_startup_trials(num_trials: int | None) -> int:
    """Trials drawn uniformly before a sampler models anything: a quarter of the budget, from 5 to 20."""
    return 10 if num_trials is None else min(20, max(5, num_trials // 4))


def population_size(num_trials: int | None) -> int:
    """Trials of a generation: a sixth of the budget, from 6 to 50, so that about six generations fit in."""
    return 12 if num_trials is None else min(50, max(6, num_trials // 6))


def tree_parzen(seed: int) -> BaseSampler:
    """Tree-structured Parzen estimators: several objectives, constraints, conditions; trials that still run count as
    bad, so that parallel proposals spread out."""
    return TPESampler(seed=seed, n_startup_trials=1)


def gaussian_process(seed: int) -> BaseSampler:
    """Gaussian processes with expected (hypervolume) improvement; conditional dimensions are drawn at random."""
    return GPSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False)


def nsga2(seed: int, size: int) -> NSGAIISampler:
    """Non-dominated sorting with crowding distance, with the operators of its paper (Deb et al. 2002): children near
    their parents. Optuna draws mutated values anywhere by default, which is half of them with two dimensions."""
    with _without_warnings():
        return NSGAIISampler(seed=seed, population_size=size, crossover=SBXCrossover(), mutation=PolynomialMutation())


def nsga3(seed: int, size: int) -> NSGAIIISampler:
    """Non-dominated sorting with reference points, otherwise as ``nsga2``."""
    with _without_warnings():
        return NSGAIIISampler(seed=seed, population_size=size, crossover=SBXCrossover(), mutation=PolynomialMutation())


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of interfaces that may change, of fits on few or equal values, which the next trials mend, and of packages that
    would make proposals a little faster."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class OptunaSampler:
    """Proposals of an Optuna sampler, after some that are drawn uniformly from the legal candidates."""

    make: Callable[[int], BaseSampler]
    """From a seed to the sampler."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        if len(state.tried) < num_startup_trials(state.num_trials):
            return UniformSampler().propose(state)
        return _asked(state, self.make(state.seed), trials_of(state))


@dataclass(frozen=True)
class GeneticSampler:
    """Proposals of a genetic algorithm of Optuna. Generations are the trials in order, so many at a time; the first is
    drawn uniformly from the legal candidates."""

    make: Callable[[int, int], NSGAIISampler | NSGAIIISampler]
    """From a seed and the size of a generation to the sampler."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        size = population_size(state.num_trials)
        if len(state.tried) < size:
            return UniformSampler().propose(state)
        sampler = self.make(state.seed, size)
        return _asked(state, sampler, trials_of(state, generation_key=sampler._get_generation_key(), size=size))


def _asked(state: SearchState, sampler: BaseSampler, trials: Sequence[FrozenTrial]) -> dict[str, Scalar] | None:
    """The first legal and new proposal of a sampler; drawn uniformly when it has none."""
    study = optuna.create_study(directions=["minimize"] * len(state.space.objectives), sampler=sampler)
    study.add_trials(trials)
    is_fresh = is_new(state)
    for _ in range(MAX_ASKED):
        with _without_warnings():
            chosen = suggest(study.ask(), state.space)
        if is_fresh(chosen):
            return chosen
    return UniformSampler().propose(state)


def trials_of(state: SearchState, *, generation_key: str = "", size: int = 0) -> list[FrozenTrial]:
    """Observations as Optuna's trials: costs to be minimised, violations as constraints; without those that the
    machines failed.

    Args:
        state: Of the search.
        generation_key: Attribute that a genetic algorithm keeps a trial's generation in.
        size: Trials of a generation. Proposals that were refused are of none.
    """
    space = state.space
    observations = [o for o in state.observations if o.state == "running" or tells(o)]
    distributions = {dimension.name: distribution_of(dimension) for dimension in space.dimensions}
    costs = costs_of(observations, space.objectives, state.predicted_best)
    violations = _telling(violations_of(observations, space.objectives))
    num_ended = 0
    trials = []
    for row, observation in enumerate(observations):
        is_running = observation.state == "running"
        attributes: dict[str, Any] = {}
        if size and observation.state in ("ok", "failed"):
            attributes[generation_key] = num_ended // size
            num_ended += 1
        trials.append(
            create_trial(
                state=TrialState.RUNNING if is_running else TrialState.COMPLETE,
                values=None if is_running else costs[row].tolist(),
                params=dict(observation.parameters),
                distributions={name: distributions[name] for name in observation.parameters},
                constraints=None if is_running else _named(violations[row]),
                system_attrs=attributes,
            )
        )
    return trials


def _telling(violations: np.ndarray) -> np.ndarray:
    """The columns that differ between observations: a model of what never varies would only blur the others."""
    known = violations[~np.isnan(violations).any(axis=1)]
    return violations[:, np.ptp(known, axis=0) > 0] if len(known) else violations[:, :0]


def _named(violations: np.ndarray) -> dict[str, float]:
    return {str(index): float(value) for index, value in enumerate(violations)}


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """The dimension in Optuna's terms."""
    if dimension.kind == "categorical":
        return CategoricalDistribution(dimension.values)
    if dimension.is_whole:
        values = dimension.choices()
        assert values is not None
        return IntDistribution(int(dimension.low), int(values[-1] or 0), step=dimension.step, log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


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
                dimension.name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
            )
        else:
            assert isinstance(distribution, FloatDistribution)
            chosen[dimension.name] = trial.suggest_float(
                dimension.name, distribution.low, distribution.high, log=distribution.log
            )
    return chosen
