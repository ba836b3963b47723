"""Expected improvement of a front's hypervolume, for any number of objectives, by rays from the reference point.

The volume that points dominate is an average over directions: along the ray from the reference point towards better
values in direction ``u``, a point reaches ``min_j gap_j / u_j``, and the front as far as the point that reaches
farthest. So ``volume = c_d * mean_u(reach^d)``, and a new point adds ``c_d * mean_u(max(own^d - reach^d, 0))`` ("Random
hypervolume scalarizations for provable multi-objective black box optimization", Golovin and Zhang, 2020). There are no
boxes to cut space into, and every draw of uncertain values has rays of its own, so that few of each are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autotune.search.pareto import REFERENCE_MARGIN, Box

NUM_RAYS = 32
"""Of each draw."""


@dataclass(frozen=True)
class DrawnFront:
    """``s`` draws of the front of what was tried, along ``r`` rays each."""

    box: Box
    rays: np.ndarray = field(repr=False)
    """``[s, r, d]``: unit vectors of positive parts."""
    reached: np.ndarray = field(repr=False)
    """``[s, r]``: the front's reach to the power of ``d``."""

    @classmethod
    def of(cls, costs: np.ndarray, is_feasible: np.ndarray, box: Box, rng: np.random.Generator) -> DrawnFront:
        """The front of drawn points.

        Args:
            costs: ``[s, n, d]``, lower is better.
            is_feasible: ``[s, n]`` bools.
            box: What costs are scaled by; the reference point lies as in ``pareto.hypervolume``.
            rng: Of the rays.
        """
        num_draws, num_points, num_costs = costs.shape
        rays = np.abs(rng.standard_normal((num_draws, NUM_RAYS, num_costs)))
        rays = (rays / np.linalg.norm(rays, axis=2, keepdims=True)).astype(np.float32)
        empty = cls(box, rays, np.zeros((num_draws, NUM_RAYS), dtype=np.float32))
        if not num_points:
            return empty
        reached = np.where(is_feasible[:, None, :], empty.reach(costs), 0.0).max(axis=2)
        return cls(box, rays, reached)

    @property
    def volume(self) -> float:
        """Expected share of the box that is dominated."""
        return self._constant * float(self.reached.mean())

    def improvement(self, costs: np.ndarray, is_feasible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What points add to the share of the box.

        Args:
            costs: ``[s, m, d]``.
            is_feasible: ``[s, m]`` bools.

        Returns:
            The expected addition, ``[m]``; and for points that add nothing in any draw how near they come, ``[m]``.
        """
        more = np.where(is_feasible[:, None, :], self.reach(costs), 0.0) - self.reached[:, :, None]
        gain = self._constant * np.maximum(more, 0.0).mean(axis=(0, 1), dtype=np.float64)
        return gain, more.max(axis=(0, 1))

    def reach(self, costs: np.ndarray) -> np.ndarray:
        """How far points ``[s, m, d]`` reach along each ray, to the power of ``d``; ``[s, r, m]``."""
        gaps = np.maximum(REFERENCE_MARGIN - self.box.scale(costs), 0.0).astype(np.float32)
        farthest = gaps[:, None, :, 0] / self.rays[:, :, None, 0]
        for index in range(1, gaps.shape[2]):
            np.minimum(farthest, gaps[:, None, :, index] / self.rays[:, :, None, index], out=farthest)
        return np.asarray(farthest ** gaps.shape[2])

    @property
    def _constant(self) -> float:
        """Volume of the positive part of the unit ball, as a share of the box."""
        d = self.rays.shape[2]
        return float(math.pi ** (d / 2) / (2**d * math.gamma(d / 2 + 1)) / REFERENCE_MARGIN**d)
