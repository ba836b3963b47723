"""How likely a trial is to end well, from those that failed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autotune.search.encoding import Encoding
from autotune.search.gp import GaussianProcess, LogNormal, Points, Priors
from autotune.search.sampler import SearchState

CHANCE = ("infra", "interrupted")
"""Failures that say nothing of the candidate."""
HOPE = 0.8
"""Label expected where nothing is known; trials that ended well have 1, those that failed -1."""
DOUBT = 0.3
"""Standard deviation of a label where all is known: between good and bad the border is not sharp."""
LAWS = Priors(
    length=LogNormal(0.4, 0.7, 0.05, 10.0),
    amplitude=LogNormal(1.0, 0.3, 0.3, 3.0),
    curvature=None,
    noise=LogNormal(0.1, 0.5, 0.01, 0.5),
)

LogChance = Callable[[np.ndarray], np.ndarray]
"""Coordinates ``[n, k]`` -> logarithm of the probability to end well, ``[n]``."""


def log_chance_of(state: SearchState, encoding: Encoding) -> LogChance:
    """What the trials of a study say: a Gaussian process on their labels, and the probability of a positive one."""
    ended = [o for o in state.tried if o.state in ("ok", "failed") and o.failure not in CHANCE]
    labels = np.array([1.0 if o.state == "ok" else -1.0 for o in ended])
    if (labels > 0).all():
        return lambda coordinates: np.zeros(len(coordinates))

    def points(coordinates: np.ndarray) -> Points:
        return Points.plain(encoding.columns(coordinates), level_sd=0.0)

    process = GaussianProcess.fit(points(encoding.coordinates([o.parameters for o in ended])), labels - HOPE, LAWS)

    def log_chance(coordinates: np.ndarray) -> np.ndarray:
        from scipy.special import log_ndtr

        mean, sd = process.posterior(points(coordinates))
        return np.asarray(log_ndtr((HOPE + mean) / np.hypot(sd, DOUBT)))

    return log_chance
