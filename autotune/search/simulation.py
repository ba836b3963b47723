"""Imagined studies of one space, for an agent to learn on before the first real trial.

Each imagined study has objectives of its own. Speed and memory are what the cost model says, bent by a random factor an
axis; a loss is what the prior says, plus a smooth function as large as the prior's doubt, or without a prior a random
valley with a smooth function on it; trials may fail beyond a border.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from autotune.prior.predict import TaskPrior
from autotune.search.agent import Ground, View, changed, filled, look, merits_of
from autotune.search.encoding import Axis
from autotune.search.quality import hyperparameter_columns
from autotune.search.sampler import SearchState

AXIS_SD = 0.3
"""Standard deviation of the logarithm by which an estimate is off from one end of a dimension to the other."""
NUM_WAVES = 64
"""Random Fourier features of a smooth function (Rahimi and Recht 2007)."""
NOISE_SHARE = 0.02
"""Noise of a trial as a share of an objective's spread."""
FAILING_SHARE = 0.5
"""So many imagined studies have a border beyond which trials fail."""
NUM_TRIALS = (10, 40)
"""Length of an imagined study, least and most."""
FAILED_REWARD = -0.05


@dataclass(frozen=True)
class Waves:
    """A smooth random function of coordinates ``[k]`` with mean 0 and variance 1."""

    frequencies: np.ndarray
    phases: np.ndarray
    amplitudes: np.ndarray

    @classmethod
    def draw(cls, num_dimensions: int, rng: np.random.Generator) -> Self:
        """One with a length-scale between 0.3 and 1.5 in each coordinate."""
        lengths = np.exp(rng.uniform(np.log(0.3), np.log(1.5), num_dimensions))
        frequencies = rng.standard_normal((NUM_WAVES, num_dimensions)) / lengths
        amplitudes = rng.standard_normal(NUM_WAVES) * np.sqrt(2.0 / NUM_WAVES)
        return cls(frequencies, rng.uniform(0, 2 * np.pi, NUM_WAVES), amplitudes)

    def at(self, place: np.ndarray) -> float:
        """Its value."""
        return float(np.cos(self.frequencies @ place + self.phases) @ self.amplitudes)


@dataclass(frozen=True)
class World:
    """All that imagined studies of a space have in common."""

    ground: Ground
    state: SearchState
    plan_costs: Mapping[str, np.ndarray]
    """Objective name -> estimated cost of each legal plan, as a logarithm, ``[num_legal]``."""
    start: np.ndarray
    """``[k]``: where a study begins."""
    prior: TaskPrior | None

    @classmethod
    def of(cls, state: SearchState) -> Self:
        """The world of a space: what is known of it before any trial."""
        space = state.space
        ground = Ground.of(space.dimensions, state.enumeration)
        plan_costs = {}
        if state.forecast is not None:
            predicted = state.forecast.predicted
            for objective in space.objectives:
                if objective.name in predicted:
                    sign = -1.0 if objective.direction == "maximize" else 1.0
                    plan_costs[objective.name] = sign * np.log(predicted[objective.name].value)
        has_quality = any(objective.name == space.quality_name for objective in space.objectives)
        prior = state.task_prior if has_quality else None
        return cls(ground, state, plan_costs, _start(ground, state, prior), prior)

    @property
    def num_dimensions(self) -> int:
        """k."""
        return len(self.ground.encoding.axes)

    @property
    def num_objectives(self) -> int:
        """m."""
        return len(self.state.space.objectives)

    def imagine(self, rng: np.random.Generator) -> Imagined:
        """A study of its own."""
        surfaces: dict[str, _OfPlan | _Doubted | _Valley] = {}
        for objective in self.state.space.objectives:
            if objective.name in self.plan_costs:
                surfaces[objective.name] = self._bent(self.plan_costs[objective.name], rng)
            elif objective.name == self.state.space.quality_name and self.prior is not None:
                surfaces[objective.name] = _Doubted(self, self.prior, Waves.draw(self.num_dimensions, rng))
            else:
                surfaces[objective.name] = _Valley.draw(self.num_dimensions, rng)
        border = None
        if rng.uniform() < FAILING_SHARE:
            border = (int(rng.integers(self.num_dimensions)), float(rng.uniform(0.7, 1.0)))
        return Imagined(self, surfaces, border, int(rng.integers(NUM_TRIALS[0], NUM_TRIALS[1] + 1)), rng)

    def _bent(self, costs: np.ndarray, rng: np.random.Generator) -> _OfPlan:
        slopes = AXIS_SD * rng.standard_normal(self.ground.plans.shape[1])
        bent = costs + self.ground.plans @ slopes
        return _OfPlan((bent - bent.min()) / (float(bent.std()) or 1.0))


def _start(ground: Ground, state: SearchState, prior: TaskPrior | None) -> np.ndarray:
    """The prior's optimum on the plan that the cost model puts first; the middle of what nobody speaks of."""
    middle = np.full(len(ground.encoding.axes), 0.5)
    best = dict(prior.optimum()) if prior is not None else {}
    length = state.space.names({}).get("workload.sequence_length")
    if length and "global_batch_tokens" in best:
        best["global_batch_size"] = float(best["global_batch_tokens"]) / float(length)
    named = {own: name for name, own in state.space.roles.items()}
    for index, axis in enumerate(ground.encoding.axes):
        name = axis.dimension.name
        value = best.get(named.get(name, name.removeprefix("hyperparameters.")))
        if value is not None:
            middle[index] = _coordinate(axis, value)
    if state.forecast is not None and len(ground.plans):
        first = np.flatnonzero(state.forecast.ranks == state.forecast.ranks.min())
        names = [axis.dimension.name for axis in ground.encoding.axes]
        batch = [i for i, column in enumerate(ground.plan_columns) if names[column].startswith("hyperparameters.")]
        distance = ((ground.plans[first][:, batch] - middle[ground.plan_columns[batch]]) ** 2).sum(axis=1)
        middle[ground.plan_columns] = ground.plans[first[int(distance.argmin())]]
    return ground.nearest(middle)[0]


def _coordinate(axis: Axis, value: float | str) -> float:
    """Of the value nearest to one that may not be in the dimension; the middle where they can't be compared."""
    if not axis.dimension.is_range and value in axis.dimension.values:
        return axis.coordinate(value)
    if isinstance(value, str) or not axis.is_ordered:
        return 0.5
    return axis.coordinate(axis.dimension.nearest(value))


@dataclass(frozen=True)
class _OfPlan:
    costs: np.ndarray

    def at(self, place: np.ndarray, row: int | None) -> float:
        return float(self.costs[row or 0])


@dataclass(frozen=True)
class _Doubted:
    world: World
    prior: TaskPrior
    waves: Waves

    def at(self, place: np.ndarray, row: int | None) -> float:
        columns = self.world.ground.encoding.value_columns(place[None])
        mean, sd = self.prior.excess(hyperparameter_columns(self.world.state.space, columns))
        return float(np.ravel(mean)[0] + np.ravel(sd)[0] * self.waves.at(place)) / 0.05


@dataclass(frozen=True)
class _Valley:
    centre: np.ndarray
    steepness: np.ndarray
    waves: Waves

    @classmethod
    def draw(cls, num_dimensions: int, rng: np.random.Generator) -> Self:
        steepness = np.exp(rng.normal(0.5, 1.0, num_dimensions))
        return cls(rng.uniform(0, 1, num_dimensions), steepness, Waves.draw(num_dimensions, rng))

    def at(self, place: np.ndarray, row: int | None) -> float:
        return float(self.steepness @ (place - self.centre) ** 2) + 0.3 * self.waves.at(place)


@dataclass
class Imagined:
    """One imagined study, a trial at a time."""

    world: World
    surfaces: Mapping[str, _OfPlan | _Doubted | _Valley]
    border: tuple[int, float] | None
    """Dimension, and the coordinate beyond which trials fail."""
    num_trials: int
    rng: np.random.Generator
    coordinates: list[np.ndarray] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def begin(self) -> View:
        """Do the first trial."""
        self._do(self.world.start)
        return self._look()

    def step(self, action: np.ndarray) -> tuple[View, float, bool]:
        """Do one more.

        Returns:
            What there is to see then, the reward, and whether the study is at its end. The reward is the root of the
            progress of the best trial, by what counted when the action was taken.
        """
        before = merits_of(np.array(self.costs), np.array(self.failed), self.weights)
        incumbent = self.coordinates[int(before.argmin())]
        self._do(changed(incumbent, action, len(self.costs) / self.num_trials))
        after = merits_of(np.array(self.costs), np.array(self.failed), self.weights)
        progress = float(after[:-1].min() - after[-1])
        reward = FAILED_REWARD if self.failed[-1] else float(np.sqrt(np.clip(progress, 0.0, 4.0)))
        return self._look(), reward, len(self.costs) >= self.num_trials

    def _do(self, wanted: np.ndarray) -> None:
        place, row = self.world.ground.nearest(wanted)
        place = filled(place)
        noise = NOISE_SHARE * self.rng.standard_normal(self.world.num_objectives)
        costs = np.array([surface.at(place, row) for surface in self.surfaces.values()]) + noise
        has_failed = self.border is not None and place[self.border[0]] > self.border[1]
        if has_failed and self.costs:
            costs = np.max(self.costs, axis=0)
        self.coordinates.append(place)
        self.costs.append(costs)
        self.failed.append(bool(has_failed))

    def _look(self) -> View:
        self.weights = self.rng.dirichlet(np.ones(self.world.num_objectives))
        return look(
            np.array(self.coordinates), np.array(self.costs), np.array(self.failed), self.weights,
            len(self.costs) / self.num_trials,
        )  # fmt: skip
