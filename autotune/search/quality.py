"""What a study knows of one objective anywhere in the space: its trials, and for quality the meta-learned prior.

    cost(x) = level + weight * prior excess(x) + residual(x) + noise

The prior says how much loss is lost away from its optimum and how sure it is of that at each point; the residual is a
Gaussian process whose size follows that uncertainty. Level, weight and residual are learnt from the trials. The same
trials are also explained without the prior; where that explains them better, the prior is contradicted and dropped.
Costs are capped before any model sees them (``hygiene``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.prior.predict import TaskPrior
from autotune.prior.task import HYPERPARAMETERS
from autotune.search.encoding import Encoding
from autotune.search.gp import GaussianProcess, LogNormal, Points, Priors
from autotune.search.hygiene import CAP_RATIO, costs_of
from autotune.search.sampler import SearchState
from autotune.space.objectives import Objective
from autotune.space.space import Scalar, Space

DIVERGED = ("diverged", "nan")
"""Failures that say that the loss is bad there; of the others it is not known."""

UNIT_NATS = 0.01
"""Losses are modelled in these units where a prior is known."""
LEVEL_SD_NATS = 0.3
"""How far the level may lie from where the first trials put it, without a prediction."""
WEIGHT_SD = 0.2
"""The prior's weight is 1 within so much."""
SHAPE_SD = 0.15
"""Beyond what the prior does not know of its optimum, an excess is known to be within so much of itself: an excess is
never negative, which a normal law of a greater width would allow, far away first of all."""
UNCOVERED_NATS = 0.02
"""What dimensions that the prior does not speak of may do to the loss."""
CONTRADICTED = -3.0
"""The log evidence for the prior below which it is dropped."""

PRIOR_LAWS = Priors(
    length=LogNormal(0.7, 0.5, 0.1, 10.0),
    amplitude=LogNormal(0.7, 0.5, 0.1, 4.0),
    curvature=LogNormal(1.0, 1.0, 1e-2, 10.0),
    noise=LogNormal(0.01, 1.5, 5e-4, 1.0),
)
"""Outputs in ``UNIT_NATS``; the amplitude is a factor of the prior's own standard deviation."""
RIVAL_LAWS = Priors(
    length=LogNormal(0.55, 0.7, 0.05, 20.0),
    amplitude=LogNormal(3.0, 1.0, 1e-2, 50.0),
    curvature=LogNormal(3.0, 1.0, 1e-2, 50.0),
    noise=LogNormal(0.01, 1.5, 5e-4, 1.0),
)
"""The same trials without the prior, in the same units."""


def hyperparameter_columns(space: Space, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the prior's hyperparameters are in chosen values, under its own names.

    Args:
        space: Names are taken by its roles, or with or without a ``hyperparameters.`` before them.
        columns: Dimension name -> values ``[n]``; NaN or None where the dimension is absent.

    Returns:
        Name -> ``[n]``; only those that the space sets or searches.
    """
    base = space.names({})

    def column(*names: str) -> np.ndarray | None:
        for name in (space.roles.get(names[-1], names[-1]), *names):
            if name in columns:
                values = columns[name]
                absent = values == None if values.dtype == object else np.isnan(values)  # noqa: E711
                return np.where(absent, base[name], values) if name in base and absent.any() else values
            if base.get(name) is not None:
                return np.array([base[name]])
        return None

    found = {name: column(f"hyperparameters.{name}", name) for name in HYPERPARAMETERS}
    if found["global_batch_tokens"] is None:
        sequences = column("hyperparameters.global_batch_size", "global_batch_size")
        length = column("workload.sequence_length", "sequence_length")
        if sequences is not None and length is not None:
            found["global_batch_tokens"] = sequences.astype(float) * length.astype(float)
    num = max((len(values) for values in columns.values()), default=1)
    return {name: np.broadcast_to(values, num) for name, values in found.items() if values is not None}


@dataclass(frozen=True)
class View:
    """Trials as a Gaussian process sees them: with or without the prior, in which units."""

    space: Space
    encoding: Encoding
    prior: TaskPrior | None
    centre: float
    unit: float
    """Costs are ``centre + unit * y``."""
    level_sd: float
    """Of y."""
    cap: float
    """Greatest excess over the level that any cost has, in y."""
    optimum_sd: float = 0.0
    """The prior's standard deviation at its own optimum."""

    def points(self, coordinates: np.ndarray) -> Points:
        """Coordinates ``[n, k]`` with what is known there."""
        inputs = self.encoding.columns(coordinates)
        if self.prior is None:
            return Points.plain(inputs, self.level_sd)
        columns = self.encoding.value_columns(coordinates)
        excess, sd = self.prior.excess(hyperparameter_columns(self.space, columns))
        mean = np.minimum(np.broadcast_to(excess, len(coordinates)) / self.unit, self.cap)
        sd = np.minimum(np.broadcast_to(sd, len(coordinates)), self.optimum_sd + SHAPE_SD * mean * self.unit)
        scale = np.minimum(np.hypot(sd, self._uncovered()) / self.unit, self.cap)
        return Points(inputs, mean, scale, np.stack([np.full(len(mean), self.level_sd), WEIGHT_SD * mean], axis=1))

    def is_told(self) -> np.ndarray:
        """``[k]`` bools: which dimensions the prior speaks of; none where the task lies outside of what it knows."""
        if self.prior is None or self.prior.support == "outside":
            return np.zeros(len(self.encoding.axes), dtype=bool)
        return self._is_known()

    def _is_known(self) -> np.ndarray:
        # The size of a micro-batch does nothing to the loss.
        told = (*HYPERPARAMETERS, "global_batch_size", "micro_batch_size")
        known = {self.space.roles.get(name, name) for name in told}
        names = [axis.dimension.name.removeprefix("hyperparameters.") for axis in self.encoding.axes]
        return np.array([name in known or name.startswith("plan.") for name in names], dtype=bool)

    def _uncovered(self) -> float:
        return 0.0 if self._is_known().all() else UNCOVERED_NATS


@dataclass(frozen=True)
class QualityModel:
    """Posterior of one objective's cost over the space, in the objective's units; lower is better."""

    view: View
    process: GaussianProcess
    is_contradicted: bool
    """A prior was there, and the trials spoke against it."""
    coordinates: np.ndarray
    """``[n, k]``: of the trials it knows, without those that still run."""
    costs: np.ndarray
    """``[n]``: their costs, capped."""

    @classmethod
    def fit(cls, state: SearchState, objective: Objective) -> QualityModel:
        """Explain the trials so far.

        Args:
            state: Of the search. Trials that still run are believed to come out as forecast.
            objective: Whose costs.
        """
        encoding = Encoding.of(state.space.dimensions)
        is_quality = objective.name == state.space.quality_name
        prior = state.task_prior if is_quality else None
        told = [o for o in state.tried if o.state == "ok" or o.failure in DIVERGED]
        # How much parts of trainings still gain is not known before one went to the end: they tell no level.
        are_parts = [o.noise.get(objective.name, 0.0) > 0 for o in told if o.state == "ok"]
        predicted = prior.loss_level() if prior and not (are_parts and all(are_parts)) else None
        # Without a predicted level the best trial stands for it.
        best = None if prior is None else {objective.name: predicted[0] if predicted else 0.0}
        costs = costs_of(told, [objective], best)[:, 0]
        coordinates = encoding.coordinates([o.parameters for o in told])
        noise = np.array([o.noise.get(objective.name, 0.0) for o in told])
        view = View(state.space, encoding, None, 0.0, 1.0, 1.0, math.inf)
        trials = _Trials(coordinates, costs, noise)
        running = encoding.coordinates([o.parameters for o in state.tried if o.state == "running"])
        if prior is not None:
            with_prior, evidence = _with_prior(view, prior, predicted, trials)
            if evidence > CONTRADICTED:
                return cls(*with_prior, False, coordinates, costs)._believing(running)
        return cls(*_alone(view, trials), prior is not None, coordinates, costs)._believing(running)

    def posterior(self, rows: Sequence[Mapping[str, Scalar]]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the costs of full trials, without their noise, ``[n]`` each."""
        return self.posterior_at(self.view.encoding.coordinates(rows))

    def posterior_at(self, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As ``posterior``, of coordinates ``[n, k]``."""
        mean, sd = self.process.posterior(self.view.points(coordinates))
        return self.view.centre + self.view.unit * mean, self.view.unit * sd

    def _believing(self, coordinates: np.ndarray) -> QualityModel:
        return replace(self, process=self.process.believing(self.view.points(coordinates)))


@dataclass(frozen=True)
class _Trials:
    coordinates: np.ndarray
    costs: np.ndarray
    noise: np.ndarray
    """Of costs that are forecasts of full trainings (``fidelity``)."""

    def fit(self, view: View, laws: Priors | None = None) -> GaussianProcess:
        points = replace(view.points(self.coordinates), noise=self.noise / view.unit)
        return GaussianProcess.fit(
            points, (self.costs - view.centre) / view.unit, laws, num_starts=2 if laws is None else 1
        )


def _alone(view: View, trials: _Trials) -> tuple[View, GaussianProcess]:
    """The trials by themselves, in units of their spread."""
    spread = float(trials.costs.std()) if len(trials.costs) > 1 else 0.0
    unit = spread if spread > 0 else max(abs(float(trials.costs[0])) * 0.01, 1e-12) if len(trials.costs) else 1.0
    centre = float(trials.costs.mean()) if len(trials.costs) else 0.0
    alone = replace(view, centre=centre, unit=unit)
    return alone, trials.fit(alone)


def _with_prior(
    view: View, prior: TaskPrior, predicted: tuple[float, float] | None, trials: _Trials
) -> tuple[tuple[View, GaussianProcess], float]:
    """The trials with the prior, and how much better than without it (log evidence; 0 without trials)."""
    _, at_optimum = prior.excess({name: np.array([value]) for name, value in prior.optimum().items()})
    view = replace(view, optimum_sd=float(at_optimum[0]))
    centre, level_sd = predicted or (0.0, LEVEL_SD_NATS)
    if predicted is None and len(trials.costs):
        plain = replace(view, prior=prior, unit=UNIT_NATS)
        excess = UNIT_NATS * plain.points(trials.coordinates).mean
        centre = float(np.median(trials.costs - np.minimum(excess, np.ptp(trials.costs))))
    best = max(centre, float(trials.costs.min(initial=centre)))
    cap = (CAP_RATIO * best - centre) / UNIT_NATS if best > 0 else math.inf
    known = replace(view, prior=prior, centre=centre, unit=UNIT_NATS, level_sd=level_sd / UNIT_NATS, cap=cap)
    process = trials.fit(known, PRIOR_LAWS)
    rival = trials.fit(replace(known, prior=None), RIVAL_LAWS)
    return (known, process), process.log_evidence - rival.log_evidence
