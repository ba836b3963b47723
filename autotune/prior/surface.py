"""The loss over learning rate and batch, at any size: a power law of the optimum and a Gaussian process round it.

Excess loss e (nats above a cell's best run) is softened to y = c log(1 + e/c), c = 0.03, so that diverged runs neither
dominate the fit nor bend it. In coordinates u, v (logarithms of learning rate and batch over the power law's optimum,
whose exponents are of parameters, tokens and the active share) y is a fixed shape, a positive quadratic form that rises
faster towards high learning rates, plus a residual: features up to third order whose second-order part changes with
the task, and a Matern-5/2 process over (u, v, task) at inducing points. The residual is a Bayesian linear model, so its
uncertainty is exact. It fades away from the data in u and v. It goes on along its straight lines for a factor of 4.5 in
size outside the tasks it saw, and is held there, so that further away nothing but the power law moves the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.prior.robust import Floats

SOFTNESS = 0.03
"""Nats of excess loss from which differences count less."""
NOISE = 0.003
"""Run-to-run noise of one training run, nats (residuals of local fits)."""
RELATIVE_NOISE = 0.15
"""Further error of the form, as a share of the softened excess."""
FIT_CAP = 0.08
"""The residual is fitted to runs within so many nats of their cell's best."""
LAW_CAP = 0.5
"""Excess loss beyond which the law's fit asks only that a run is that bad."""
LEVEL_SD = 0.02
"""By how much the best run of a cell may be off its optimum, nats."""

LENGTHS = np.array([1.0, 1.0, 1.0, 1.5, 1.5])
AMPLITUDE = 0.01
LINEAR_SD = 0.05
INTERACTION_SD = 0.025
FADE = 2.5
REACH_OUTSIDE = 1.5
"""Length-scales over u, v and the task; sizes of the residual's parts; distance in (u, v) at which it fades;
factors of e outside the tasks up to which it goes on. Chosen
coarsely by leaving cells out; results hardly change within a factor of two."""

LAW_MEAN = np.array([math.log(2.5e-3), -0.5, 0.25, 0.0, math.log(4.5e5), 0.0, 0.5, 0.0])
LAW_SD = np.array([1.0, 0.25, 0.15, 0.3, 1.0, 0.15, 0.15, 0.3])
"""What is believed of the law before any table: learning rates fall as the width grows (N^-1/2 at a fixed depth) and
rise with a batch that grows as the square root of the tokens."""
INDUCING_U, INDUCING_V = np.linspace(-1.3, 1.0, 4), np.linspace(-1.2, 1.2, 4)


def soften(excess: Floats) -> Floats:
    """Excess loss on the scale where the model is fitted."""
    return np.asarray(SOFTNESS * np.log1p(excess / SOFTNESS))


def harden(softened: Floats, most: float = 6.0) -> Floats:
    """The inverse of ``soften``; a run that diverged is never worse than ``most`` nats."""
    limit = SOFTNESS * math.log1p(most / SOFTNESS)
    return np.asarray(SOFTNESS * np.expm1(np.clip(softened, -limit, limit) / SOFTNESS))


def optimum_law(law: Floats, tasks: Floats) -> tuple[Floats, Floats]:
    """Logarithms of the best learning rate and batch at ``[n, 3]`` tasks."""
    return law[0] + tasks @ law[1:4], law[4] + tasks @ law[5:8]


def raw_shape(shape: Floats, u: Floats, v: Floats) -> Floats:
    """Excess loss of the fixed shape, nats: a positive quadratic form of warped distances."""
    a, b = _warped(u, shape[3]), _warped(v, shape[4])
    return np.asarray((np.exp(shape[0]) * a + shape[1] * b) ** 2 + (np.exp(shape[2]) * b) ** 2)


def _warped(distance: Floats, bend: float) -> Floats:
    """The distance, stretched on its positive side where ``bend`` is positive."""
    if abs(bend) < 1e-6:
        return distance
    return np.asarray(np.expm1(np.clip(bend * distance, -8, 4)) / bend)


@dataclass(frozen=True)
class CellRuns:
    """Runs of the reference recipe by cell."""

    cell: NDArray[np.int64]
    """Number of the cell from 0, ``[n]``."""
    log_rate: Floats
    log_batch: Floats
    excess: Floats
    """Loss above the cell's best run, ``[n]``."""
    tasks: Floats
    """Task coordinates, ``[n, 3]``."""


@dataclass(frozen=True)
class Surface:
    """The fitted surface."""

    law: Floats
    """``[8]``: intercept and exponents of the best learning rate, then of the best batch."""
    shape: Floats
    """``[5]``: logarithm of the first diagonal, the off-diagonal, logarithm of the second diagonal, two bends."""
    tasks: Floats
    """Coordinates of the tasks it was fitted to, ``[m, 3]``."""
    weights: Floats
    """Posterior mean of the residual's weights, ``[k]``."""
    factor: Floats
    """Lower-triangular factor of their posterior covariance, ``[k, k]``."""

    @staticmethod
    def fit(runs: CellRuns) -> Surface:
        """Fit to runs over several sizes: law and shape by robust least squares, then the residual."""
        law, shape = _fit_law(runs)
        tasks = np.unique(runs.tasks, axis=0)
        empty = Surface(law, shape, tasks, np.zeros(0), np.zeros((0, 0)))
        near = runs.excess < FIT_CAP
        softened = soften(runs.excess[near])
        places = empty.places(runs.log_rate[near], runs.log_batch[near], runs.tasks[near])
        residual = softened - soften(raw_shape(shape, places[:, 0], places[:, 1]))
        features = empty.features(places)
        precision = 1 / (NOISE**2 + (RELATIVE_NOISE * softened) ** 2)
        posterior, moment = np.eye(features.shape[1]), np.zeros(features.shape[1])
        for number in np.unique(runs.cell[near]):  # the level of each cell is integrated out
            members = runs.cell[near] == number
            weighted = features[members] * precision[members, None]
            total, share = weighted.sum(axis=0), precision[members].sum() + LEVEL_SD**-2
            posterior += features[members].T @ weighted - np.outer(total, total) / share
            moment += weighted.T @ residual[members] - total * (precision[members] @ residual[members]) / share
        covariance = np.linalg.inv(posterior)
        factor = np.linalg.cholesky((covariance + covariance.T) / 2 + 1e-12 * np.eye(len(moment)))
        return Surface(law, shape, tasks, covariance @ moment, np.asarray(factor, dtype=np.float64))

    def places(self, log_rate: Floats, log_batch: Floats, tasks: Floats, offset: Floats | None = None) -> Floats:
        """``[n, 5]``: u, v and the task, held near the box of those fitted to.

        Args:
            log_rate: ``[n]``.
            log_batch: ``[n]``.
            tasks: ``[n, 3]``.
            offset: ``[2]`` by which the optimum of a recipe lies off the law.
        """
        rate, batch = optimum_law(self.law, tasks)
        move = np.zeros(2) if offset is None else offset
        beyond = self.beyond(tasks)
        held = tasks - np.sign(beyond) * np.maximum(np.abs(beyond) - REACH_OUTSIDE, 0.0)
        return np.column_stack([log_rate - rate - move[0], log_batch - batch - move[1], held])

    def beyond(self, tasks: Floats) -> Floats:
        """By how much task coordinates ``[..., 3]`` lie outside the box of those fitted to; 0 inside."""
        return np.asarray(tasks - np.clip(tasks, self.tasks.min(axis=0), self.tasks.max(axis=0)))

    def mean(self, places: Floats) -> Floats:
        """Softened excess at ``[n, 5]`` places, up to a constant of the task."""
        return self._mean(places, self._basis(places))

    def difference_sd(self, places: Floats, origin: Floats) -> Floats:
        """Standard deviation of ``mean(places) - mean(origin)``, ``[n]``."""
        return self.mean_and_sd(places, origin)[1]

    def mean_and_sd(self, places: Floats, origin: Floats) -> tuple[Floats, Floats]:
        """``mean`` and ``difference_sd`` at once: both need the same covariances, which take the time."""
        basis = self._basis(places)
        change = (basis - self._basis(origin[None])) @ self._basis_factor
        return self._mean(places, basis), np.asarray(np.sqrt((change**2).sum(axis=1)))

    def _mean(self, places: Floats, basis: Floats) -> Floats:
        return np.asarray(soften(raw_shape(self.shape, places[:, 0], places[:, 1])) + basis @ self._basis_weights)

    def _basis(self, places: Floats) -> Floats:
        """``[n, k]``: ``features`` before whitening, which is multiplied into weights and factor once."""
        return np.asarray(np.hstack([_linear(places), _matern(places, self._inducing)]) * _fade(places)[:, None])

    def features(self, places: Floats) -> Floats:
        """``[n, k]`` features of the residual, each with a standard normal weight before the fit."""
        process = _matern(places, self._inducing) @ self._whitening
        return np.asarray(np.hstack([_linear(places), process]) * _fade(places)[:, None])

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Arrays to ship; the covariance's factor in half precision, which keeps it a covariance."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        rows, columns = np.tril_indices(len(self.weights))
        return {**arrays, "factor": self.factor[rows, columns].astype(np.float16)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> Surface:
        """The inverse of ``to_arrays``."""
        size = len(arrays["weights"])
        factor = np.zeros((size, size))
        factor[np.tril_indices(size)] = arrays["factor"].astype(float)
        plain = {name: arrays[name].astype(float) for name in ("law", "shape", "tasks", "weights")}
        return Surface(**plain, factor=factor)

    @cached_property
    def _inducing(self) -> Floats:
        u, v = (grid.ravel() for grid in np.meshgrid(INDUCING_U, INDUCING_V, indexing="ij"))
        lattice = np.column_stack([u, v])
        return np.hstack([np.tile(lattice, (len(self.tasks), 1)), np.repeat(self.tasks, len(lattice), axis=0)])

    @cached_property
    def _whitening(self) -> Floats:
        """``[m, m]`` from covariances with the inducing points to features with independent weights."""
        covariance = _matern(self._inducing, self._inducing) + 1e-6 * AMPLITUDE**2 * np.eye(len(self._inducing))
        return np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)).T)

    @cached_property
    def _basis_weights(self) -> Floats:
        return self._unwhitened(self.weights)

    @cached_property
    def _basis_factor(self) -> Floats:
        return self._unwhitened(self.factor)

    def _unwhitened(self, rows: Floats) -> Floats:
        """What stands before features, as it stands before the basis."""
        num_linear = len(self.weights) - len(self._inducing)
        return np.concatenate([rows[:num_linear], self._whitening @ rows[num_linear:]])


def _linear(places: Floats) -> Floats:
    u, v = places[:, 0], places[:, 1]
    quadratic = [u, v, u * u, u * v, v * v]
    cubic = [u**3 / 3, u * u * v / 3, u * v * v / 3, v**3 / 3]
    columns = [LINEAR_SD * term for term in quadratic + cubic]
    columns += [INTERACTION_SD * term * places[:, axis] for axis in (2, 3, 4) for term in quadratic]
    return np.column_stack(columns)


def _fade(places: Floats) -> Floats:
    return np.asarray(np.exp(-(((places[:, 0] ** 2 + places[:, 1] ** 2) / FADE**2) ** 2)))


def _matern(left: Floats, right: Floats) -> Floats:
    """Matern-5/2 covariance of ``[n, 5]`` and ``[m, 5]`` places."""
    left, right = left / LENGTHS, right / LENGTHS
    distance = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    np.maximum(distance, 0.0, out=distance)  # the search asks for thousands: in place
    distance *= 5
    np.sqrt(distance, out=distance)
    decay = np.exp(-distance)
    decay *= 1 + distance * (1 + distance / 3)
    decay *= AMPLITUDE**2
    return np.asarray(decay)


def _fit_law(runs: CellRuns) -> tuple[Floats, Floats]:
    from scipy.optimize import least_squares

    capped = soften(np.minimum(runs.excess, LAW_CAP))
    most = SOFTNESS * math.log1p(LAW_CAP / SOFTNESS)
    scale = 1 / np.sqrt(NOISE**2 + (RELATIVE_NOISE * capped) ** 2)
    prior_weight = 3.0  # of the order of the weight of three runs: the tables speak, the prior settles what they can't

    def residuals(theta: Floats) -> Floats:
        rate, batch = optimum_law(theta[:8], runs.tasks)
        predicted = soften(raw_shape(theta[8:13], runs.log_rate - rate, runs.log_batch - batch)) + theta[13:][runs.cell]
        return np.concatenate([
            (np.minimum(predicted, most) - capped) * scale,
            (theta[:8] - LAW_MEAN) / LAW_SD * prior_weight,
            theta[11:13] / 0.3 * prior_weight,
            theta[13:] / 0.005,
        ])  # fmt: skip

    start = np.concatenate([LAW_MEAN, [-2.0, 0.0, -2.0, 0.2, 0.0], np.zeros(int(runs.cell.max()) + 1)])
    theta = np.asarray(least_squares(residuals, start, loss="soft_l1", max_nfev=100).x)
    return theta[:8], theta[8:13]
