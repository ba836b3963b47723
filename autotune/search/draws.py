"""Joint draws of Gaussian processes: at anchors (the points that were tried), and anywhere else given those.

A front is made of values that are themselves uncertain, and a candidate near one of its points is uncertain in the same
way. So every draw of the anchors comes with draws of the candidates that agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autotune.search.gp import GaussianProcess, Points, join

JITTER = 1e-8
"""Added to the variance at the anchors, as a share of the largest: trials lie where anchors do."""


@dataclass(frozen=True)
class Draws:
    """``s`` draws of a process's noise-free values."""

    process: GaussianProcess
    known: Points
    """The ``n`` observations and the ``a`` anchors."""
    factor: np.ndarray = field(repr=False)
    """``[n + a, n + a]``: lower Cholesky factor of their covariance."""
    innovations: np.ndarray = field(repr=False)
    """``[s, n + a]``: what each draw takes for them, whitened."""
    noise: np.ndarray = field(repr=False)
    """``[s]``: standard normal, what is left open at any other point; the same for all, so that points compare."""
    anchors: np.ndarray
    """``[s, a]``: values at the anchors."""

    @classmethod
    def of(cls, process: GaussianProcess, anchors: Points, num_draws: int, rng: np.random.Generator) -> Draws:
        """Draw the anchors."""
        from scipy.linalg import cholesky

        num_told, num_anchors = len(process.points), len(anchors)
        known = join(process.points, anchors)
        covariance = process.kernel.covariance(known, known)
        diagonal = np.arange(num_told + num_anchors)
        covariance[diagonal, diagonal] += JITTER * float(covariance[diagonal, diagonal].max(initial=1e-12))
        covariance[diagonal[:num_told], diagonal[:num_told]] += process.points.noise_variance + process.kernel.noise**2
        factor = cholesky(covariance, lower=True)
        told = _whitened(factor[:num_told, :num_told], process.y - process.points.mean)
        free = rng.standard_normal((num_draws, num_anchors))
        innovations = np.concatenate([np.broadcast_to(told, (num_draws, num_told)), free], axis=1)
        values = anchors.mean + innovations @ factor[num_told:].T
        return cls(process, known, factor, innovations, rng.standard_normal(num_draws), values)

    def at(self, points: Points) -> np.ndarray:
        """Values at ``m`` points given those at the anchors, ``[s, m]``; how two of them go together is not kept."""
        whitened = _whitened(self.factor, self.process.kernel.covariance(self.known, points))
        left = np.maximum(self.process.kernel.variance(points) - (whitened**2).sum(axis=0), 0.0)
        return np.asarray(points.mean + self.innovations @ whitened + self.noise[:, None] * np.sqrt(left))


def _whitened(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    from scipy.linalg import solve_triangular

    if not len(factor):
        return np.zeros_like(right)
    return np.asarray(solve_triangular(factor, right, lower=True))
