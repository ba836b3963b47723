"""Speed and memory of plans: what the cost model says, corrected by what trials measured.

    log measured = log estimated + sd(plan) * (level + axes(plan)'c + f(plan)) + noise

The estimates are only roughly right, but their errors are not random: a device is slower than its figures say (the
level), an axis costs more than it should (``c``: one number a feature of plans), and the rest differs from plan to
plan (``f``, a Gaussian process). Before any trial all of it together is as uncertain as the estimate says it is. A run
out of memory says that a plan needs at least what the device has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.search.encoding import Inputs
from autotune.search.gp import GaussianProcess, LogNormal, Points, Priors, join
from autotune.search.plan_rows import PlanRows
from autotune.search.sampler import Observation

LEVEL_SD, AXES_SD = 0.7, 0.6
"""Parts of the estimate's own uncertainty that are the same for all plans, and that follow their features."""
UNKNOWN_LEVEL_SD = 30.0
"""Without a cost model the level is whatever the trials say."""
LAWS = Priors(
    length=LogNormal(1.0, 0.5, 0.2, 5.0),
    amplitude=LogNormal(0.3, 0.5, 0.05, 1.5),
    curvature=None,
    noise=LogNormal(0.1, 1.2, 1e-3, 3.0),
)
"""What is left to single plans, and the noise of trials, both in units of the estimate's uncertainty."""
MAX_FITTED = 40
"""Trials from which the sizes of errors are learnt."""
OUT_OF_MEMORY = "oom"
"""The kind of failure."""


@dataclass(frozen=True)
class Corrected:
    """Posterior of the logarithm of one quantity over the plans."""

    rows: PlanRows
    quantity: str
    unit: float
    """Logarithms are the estimate's plus ``unit * y``."""
    process: GaussianProcess

    @classmethod
    def fit(cls, rows: PlanRows, quantity: str, places: np.ndarray, measured: np.ndarray) -> Corrected:
        """Learn from trials.

        Args:
            rows: The plans.
            quantity: ``speed`` or ``memory``.
            places: ``[n]``: the plans that were tried.
            measured: ``[n]``: what they measured.
        """
        unit = float(np.median(rows.estimates[quantity].sd))
        y = (np.log(measured) - rows.estimates[quantity].log[places]) / unit
        # A few trials tell how large the errors are; what they are is told by all.
        few = np.linspace(0, len(y) - 1, min(len(y), MAX_FITTED)).astype(np.int64)
        fitted = GaussianProcess.fit(_points(rows, quantity, unit, places[few]), y[few], LAWS, num_starts=1)
        process = GaussianProcess.condition(fitted.kernel, _points(rows, quantity, unit, places), y)
        return cls(rows, quantity, unit, process)

    def points(self, places: np.ndarray) -> Points:
        """The plans at places ``[n]`` as the process sees them."""
        return _points(self.rows, self.quantity, self.unit, places)

    def logarithm(self, places: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Logarithms of the quantity at places ``[n]`` for values ``[..., n]`` of the process."""
        return np.asarray(self.rows.estimates[self.quantity].log[places] + self.unit * y)

    def mean(self) -> np.ndarray:
        """``[r]``: the most likely logarithm for every plan."""
        every = np.arange(len(self.rows))
        cross = self.process.kernel.covariance(self.points(every), self.process.points)
        return self.logarithm(every, cross @ self.process.weights)

    def at_least(self, places: np.ndarray, floor: np.ndarray) -> Corrected:
        """As if plans had measured a floor (logarithms ``[n]``) where less was expected of them."""
        if not len(places):
            return self
        points = self.points(places)
        y = (floor - self.logarithm(places, np.zeros(len(places)))) / self.unit
        low = self.process.posterior(points)[0] < y
        known = join(self.process.points, self.points(places[low]))
        process = GaussianProcess.condition(self.process.kernel, known, np.concatenate([self.process.y, y[low]]))
        return replace(self, process=process)


def _measured(rows: PlanRows, quantity: str, observation: Observation, place: int) -> float:
    """A quantity as a trial measured it; 0 where it did not. Speed is told by what it costs, too."""
    values = observation.values or {}
    if quantity == "speed" and quantity not in values and place >= 0:
        for name, at_one in rows.space.running_costs(rows.world_size[place], 1.0).items():
            if values.get(name, 0.0) > 0:
                return float(at_one / values[name])
    return float(values.get(quantity, 0.0))


def _points(rows: PlanRows, quantity: str, unit: float, places: np.ndarray) -> Points:
    level = LEVEL_SD if rows.log_capacity is not None else UNKNOWN_LEVEL_SD
    scale = rows.estimates[quantity].sd[places] / unit
    basis = np.concatenate([np.full((len(places), 1), level), AXES_SD * rows.basis[places]], axis=1)
    inputs = Inputs(rows.inputs.x[places], rows.inputs.groups)
    return Points(inputs, np.zeros(len(places)), scale, scale[:, None] * basis)


def corrected(rows: PlanRows, observations: Sequence[Observation], places: np.ndarray) -> dict[str, Corrected]:
    """What is known of speed and memory after trials.

    Args:
        rows: The plans.
        observations: ``n`` trials; what did not measure a quantity says nothing of it.
        places: ``[n]``: their plans; -1 for one that is not among the rows, which says nothing.
    """
    found = {}
    for name in rows.estimates:
        values = np.array([_measured(rows, name, o, place) for o, place in zip(observations, places, strict=True)])
        is_told = (values > 0) & (places >= 0)
        found[name] = Corrected.fit(rows, name, places[is_told], values[is_told])
    if rows.log_capacity is not None:
        is_full = np.array([o.failure == OUT_OF_MEMORY for o in observations], dtype=bool)
        full = places[is_full & (places >= 0)]
        found["memory"] = found["memory"].at_least(full, rows.log_capacity[full])
    return found
