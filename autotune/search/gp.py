"""A Gaussian process for few trials: Matern-5/2 with a length-scale an input, a quadratic part, noise.

    y(x) = mean(x) + b(x)'c + q(x)'v + s(x) f(x) + e

``c ~ N(0, I)``: what is known to be linear (a level, a prior's weight; the columns carry their standard deviation).
``v ~ N(0, curvature^2 I)``: a parabola, since losses are nearly parabolic in the logarithms of most hyperparameters;
six points place one in two dimensions, which a stationary kernel alone does not see. ``f``: the Matern part, of
variance amplitude^2, times a known scale ``s(x)``. ``e``: noise of trials. Amplitudes, length-scales and noise are the
most probable ones under log-normal priors (L-BFGS-B with analytic gradients, within bounds, so that few points can't
drive them astray); what is linear is integrated out.

Length-scales: the prior of "Vanilla Bayesian optimization performs great in high dimensions" (Hvarfner et al., 2024)
grows with the square root of the number of inputs; ours is narrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.search.encoding import Inputs

JITTER = 1e-10
"""Added to the diagonal, as a share of the largest variance, so that repeated points have a Cholesky factor."""
MAX_ITERATIONS = 60
"""Of L-BFGS from each start."""
FEW = 40
"""Up to so many points the fit starts from several places; with more the likelihood has one clear peak."""


@dataclass(frozen=True)
class LogNormal:
    """Prior of a positive hyperparameter: its logarithm is normal, and it stays within bounds."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""
    low: float
    high: float


@dataclass(frozen=True)
class Priors:
    """Of the hyperparameters. Outputs have a standard deviation of about 1, inputs lie in the unit cube."""

    length: LogNormal = LogNormal(0.55, 0.7, 0.05, 20.0)
    """Of one input; times the square root of their number."""
    amplitude: LogNormal = LogNormal(0.7, 0.8, 1e-3, 20.0)
    curvature: LogNormal | None = LogNormal(0.3, 1.0, 1e-3, 50.0)
    """None for no quadratic part."""
    noise: LogNormal = LogNormal(0.01, 1.5, 1e-4, 1.0)


@dataclass(frozen=True)
class Points:
    """Where the process is asked, and what is known there."""

    inputs: Inputs
    mean: np.ndarray
    """``[n]``: known part of the mean."""
    scale: np.ndarray
    """``[n]``: known factor of the Matern part's standard deviation."""
    basis: np.ndarray
    """``[n, p]``: linear terms, each times its prior standard deviation."""
    noise: np.ndarray | None = None
    """``[n]``: known standard deviation of each value beside the noise that all have; None for none."""

    @classmethod
    def plain(cls, inputs: Inputs, level_sd: float = 1.0) -> Points:
        """Nothing known but that the level is about 0."""
        n = len(inputs)
        return cls(inputs, np.zeros(n), np.ones(n), np.full((n, 1), level_sd))

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def noise_variance(self) -> np.ndarray | float:
        """Of the known noise, ``[n]``."""
        return 0.0 if self.noise is None else self.noise**2

    @cached_property
    def centred(self) -> np.ndarray:
        """``[n, d]``: the inputs from -1 to 1."""
        return np.asarray(2.0 * self.inputs.x - 1.0)


@dataclass(frozen=True)
class Kernel:
    """The hyperparameters, as logarithms in one vector: length-scales, amplitude, noise, curvature (if any)."""

    log: np.ndarray
    num_lengths: int

    @property
    def lengths(self) -> np.ndarray:
        """``[g]``: length-scale of each group of columns."""
        return np.asarray(np.exp(self.log[: self.num_lengths]))

    @property
    def amplitude(self) -> float:
        """Standard deviation of the Matern part (times the points' scale)."""
        return math.exp(self.log[self.num_lengths])

    @property
    def noise(self) -> float:
        """Standard deviation of a trial's noise."""
        return math.exp(self.log[self.num_lengths + 1])

    @property
    def curvature(self) -> float:
        """Standard deviation of the quadratic part's coefficients; 0 without it."""
        rest = self.log[self.num_lengths + 2 :]
        return math.exp(rest[0]) if len(rest) else 0.0

    def covariance(self, a: Points, b: Points) -> np.ndarray:
        """Between the noise-free values at two sets of points, ``[n, m]``."""
        lengths = self.lengths[a.inputs.groups]
        matern, _ = _matern(_squared_distance(a.inputs.x / lengths, b.inputs.x / lengths))
        result = (self.amplitude * a.scale)[:, None] * (self.amplitude * b.scale) * matern + a.basis @ b.basis.T
        if self.curvature:
            result += self.curvature**2 * _quadratic(a.centred, b.centred)
        return np.asarray(result)

    def variance(self, a: Points) -> np.ndarray:
        """Of the noise-free value at each point, ``[n]``."""
        result = (self.amplitude * a.scale) ** 2 + (a.basis**2).sum(axis=1)
        if self.curvature:
            squares = a.centred**2
            length = squares.sum(axis=1)
            result += self.curvature**2 * (length + 0.5 * (length**2 + (squares**2).sum(axis=1)))
        return np.asarray(result)


def _quadratic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Covariance of a sum of linear, square and product terms with independent standard normal coefficients."""
    cross = a @ b.T
    return np.asarray(cross + 0.5 * (cross**2 + (a**2) @ (b**2).T))


def _squared_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``[n, d]``, ``[m, d]`` -> ``[n, m]``."""
    cross = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * (a @ b.T)
    return np.asarray(np.maximum(cross, 0.0))


def _matern(squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matern-5/2 of scaled squared distances, and its derivative by the logarithm of a length-scale divided by that
    length-scale's part of the squared distance (the same for all of them)."""
    root = np.sqrt(5.0 * squared)
    decay = np.exp(-root)
    return (1.0 + root + (5.0 / 3.0) * squared) * decay, (5.0 / 3.0) * (1.0 + root) * decay


@dataclass(frozen=True)
class GaussianProcess:
    """A process conditioned on observations. Make it by `fit`, or by `condition` with known hyperparameters."""

    kernel: Kernel
    points: Points
    y: np.ndarray
    """``[n]``: observed values."""
    factor: np.ndarray = field(repr=False)
    """``[n, n]``: lower Cholesky factor of their covariance, noise included."""
    weights: np.ndarray = field(repr=False)
    """``[n]``: covariance^-1 (y - mean)."""
    log_evidence: float
    """Log density of the observations, plus the log prior of the hyperparameters up to a constant."""

    @classmethod
    def fit(cls, points: Points, y: np.ndarray, priors: Priors | None = None, num_starts: int = 2) -> GaussianProcess:
        """The most probable hyperparameters, and the process under them.

        Args:
            points: Of the observations.
            y: ``[n]``: observed values, finite, of about unit variance.
            priors: Of the hyperparameters.
            num_starts: Places the search starts from with few points.
        """
        from scipy.optimize import minimize

        objective = Evidence(points, np.asarray(y, dtype=np.float64), priors or Priors())
        if not len(points):
            return cls.condition(Kernel(objective.starts()[0], objective.num_lengths), points, objective.y)
        starts = objective.starts()[: num_starts if len(points) <= FEW else 1]
        found = [
            minimize(
                objective, start, jac=True, method="L-BFGS-B", bounds=objective.bounds,
                options={"maxiter": MAX_ITERATIONS, "ftol": 1e-6, "gtol": 1e-4},
            )
            for start in starts
        ]  # fmt: skip
        best = min(found, key=lambda result: float(result.fun))
        return cls.condition(Kernel(best.x, objective.num_lengths), points, objective.y, -float(best.fun))

    @classmethod
    def condition(cls, kernel: Kernel, points: Points, y: np.ndarray, log_evidence: float = 0.0) -> GaussianProcess:
        """The process of a known kernel after the observations."""
        from scipy.linalg import cho_solve, cholesky

        covariance = kernel.covariance(points, points)
        diagonal = np.diag_indices_from(covariance)
        covariance[diagonal] += (
            points.noise_variance + kernel.noise**2 + JITTER * float(covariance[diagonal].max(initial=1.0))
        )
        factor = cholesky(covariance, lower=True, check_finite=False)
        return cls(kernel, points, y, factor, cho_solve((factor, True), y - points.mean), log_evidence)

    def believing(self, points: Points) -> GaussianProcess:
        """As if trials at ``points`` had come out as forecast ("kriging believer"): for trials that still run."""
        if not len(points):
            return self
        mean, _ = self.posterior(points)
        return self.condition(self.kernel, join(self.points, points), np.concatenate([self.y, mean]), self.log_evidence)

    def posterior(self, points: Points) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the noise-free value at each point, ``[m]`` each."""
        mean, whitened = self._project(points)
        variance = self.kernel.variance(points) - (whitened**2).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, 1e-18))

    def _project(self, points: Points) -> tuple[np.ndarray, np.ndarray]:
        from scipy.linalg import solve_triangular

        cross = self.kernel.covariance(self.points, points)
        return points.mean + cross.T @ self.weights, solve_triangular(
            self.factor, cross, lower=True, check_finite=False
        )


def join(a: Points, b: Points) -> Points:
    """The points of both."""
    pairs = {name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in ("mean", "scale", "basis")}
    noise = [np.zeros(len(points)) if points.noise is None else points.noise for points in (a, b)]
    inputs = replace(a.inputs, x=np.concatenate([a.inputs.x, b.inputs.x]))
    return Points(inputs=inputs, noise=np.concatenate(noise), **pairs)


class Evidence:
    """Minus the log posterior of the hyperparameters and its gradient."""

    def __init__(self, points: Points, y: np.ndarray, priors: Priors) -> None:
        self.y = y
        self.points = points
        groups = points.inputs.groups
        self.num_lengths = int(groups.max(initial=-1)) + 1
        x = points.inputs.x
        parts = [_squared_distance(x[:, groups == g], x[:, groups == g]) for g in range(self.num_lengths)]
        self.parts = np.array(parts).reshape(self.num_lengths, len(x), len(x))
        self.scales = np.outer(points.scale, points.scale)
        self.linear = points.basis @ points.basis.T
        self.square = _quadratic(points.centred, points.centred) if priors.curvature else None
        root = math.sqrt(max(self.num_lengths, 1))
        length = replace(priors.length, median=priors.length.median * root, high=priors.length.high * root)
        laws = [length] * self.num_lengths + [priors.amplitude, priors.noise]
        laws += [priors.curvature] if priors.curvature else []
        self.centre = np.log([law.median for law in laws])
        self.spread = np.array([law.spread for law in laws])
        self.bounds = [(math.log(law.low), math.log(law.high)) for law in laws]

    def starts(self) -> list[np.ndarray]:
        """The prior's centre, and a place with short length-scales and little noise."""
        rough = self.centre.copy()
        rough[: self.num_lengths] -= 1.0
        rough[self.num_lengths] += 0.5
        rough[self.num_lengths + 1] -= 1.0
        low, high = np.array(self.bounds).T
        return [np.clip(self.centre, low, high), np.clip(rough, low, high)]

    def __call__(self, log: np.ndarray) -> tuple[float, np.ndarray]:
        from scipy.linalg import LinAlgError, cho_solve, cholesky

        kernel = Kernel(log, self.num_lengths)
        inverse_squares = np.exp(-2.0 * log[: self.num_lengths])
        matern, slope = _matern(np.tensordot(inverse_squares, self.parts, axes=1))
        variance = kernel.amplitude**2
        rough = variance * self.scales * matern
        covariance = rough + self.linear
        if self.square is not None:
            covariance += kernel.curvature**2 * self.square
        diagonal = np.diag_indices_from(covariance)
        covariance[diagonal] += (
            self.points.noise_variance + kernel.noise**2 + JITTER * float(covariance[diagonal].max(initial=1.0))
        )
        away = (log - self.centre) / self.spread
        try:
            factor = cholesky(covariance, lower=True, check_finite=False)
        except LinAlgError:
            return 1e10, np.zeros_like(log)
        residual = self.y - self.points.mean
        weights = cho_solve((factor, True), residual, check_finite=False)
        value = 0.5 * float(residual @ weights) + float(np.log(np.diagonal(factor)).sum())
        inverse = cho_solve((factor, True), np.eye(len(residual)), check_finite=False)
        # d value / d covariance; each hyperparameter's gradient is the sum of it times the covariance's derivative.
        outer = 0.5 * (inverse - np.outer(weights, weights))
        sensitivity = outer * (variance * self.scales * slope)
        gradient = (np.tensordot(self.parts, sensitivity, axes=2) * inverse_squares).tolist()
        gradient.append(2.0 * float((outer * rough).sum()))
        gradient.append(2.0 * kernel.noise**2 * float(np.trace(outer)))
        if self.square is not None:
            gradient.append(2.0 * kernel.curvature**2 * float((outer * self.square).sum()))
        return value + 0.5 * float(away @ away), np.array(gradient) + away / self.spread
