"""Intervals of forecasts that keep their coverage while the run drifts: adaptive conformal prediction.

Gibbs and Candes, "Adaptive Conformal Inference Under Distribution Shift", arXiv:2106.00170.

A score is the absolute log error of a past forecast over the square root of log(1 + horizon / history): in backtests on
published loss curves that ratio was nearly the same for horizons of a third to three times the history.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

INITIAL_SCORES = (0.005, 0.01, 0.015, 0.02, 0.03, 0.045)
"""Scores to begin with, before the run has forecasts of its own to be judged by: the spread of the plain power law's on
published curves of 25M and 100M parameters."""


class AdaptiveInterval:
    """Half-widths of log-loss forecasts from the errors of earlier ones.

    Args:
        miss_rate: Nominal share of outcomes outside the interval.
        gain: How fast the working miss rate follows hits and misses.
        memory: Scores kept.
    """

    def __init__(self, *, miss_rate: float = 0.1, gain: float = 0.05, memory: int = 200) -> None:
        self.miss_rate = miss_rate
        self._gain = gain
        self._working_rate = miss_rate
        self._scores: deque[float] = deque(INITIAL_SCORES, maxlen=memory)

    def half_width(self, horizon_ratio: float) -> float:
        """Half-width in log loss of a forecast whose horizon is so many times the history behind it."""
        level = float(np.clip(1.0 - self._working_rate, 0.0, 1.0))
        # Beyond the largest score (level 1) the width keeps growing with the shortfall, so that coverage can recover.
        excess = 1.0 + max(0.0, -self._working_rate)
        return float(np.quantile(self._scores, level)) * excess * _spread(horizon_ratio)

    def record(self, log_error: float, horizon_ratio: float) -> bool:
        """Learn from a forecast whose outcome is known.

        Returns:
            Whether the outcome lay inside the interval that would have been given.
        """
        inside = abs(log_error) <= self.half_width(horizon_ratio)
        self._working_rate += self._gain * (self.miss_rate - (0.0 if inside else 1.0))
        self._scores.append(abs(log_error) / _spread(horizon_ratio))
        return inside


def _spread(horizon_ratio: float) -> float:
    return math.sqrt(math.log1p(max(horizon_ratio, 1e-3)))
