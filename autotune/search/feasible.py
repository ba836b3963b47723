"""How likely a trial is to end well, from those that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autotune.search.encoding import Encoding, Inputs
from autotune.search.gp import GaussianProcess, LogNormal, Points, Priors
from autotune.search.hygiene import tells
from autotune.search.sampler import SearchState

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
    """What the trials of a study say."""
    ended = [o for o in state.tried if tells(o)]
    known = encoding.columns(encoding.coordinates([o.parameters for o in ended]))
    log_chance = log_chance_from(known, [o.state == "ok" for o in ended])
    return lambda coordinates: log_chance(encoding.columns(coordinates))


def log_chance_from(known: Inputs, ended_well: Sequence[bool]) -> Callable[[Inputs], np.ndarray]:
    """A Gaussian process on the labels of ``n`` trials, and the probability of a positive one at other inputs."""
    if all(ended_well):
        return lambda inputs: np.zeros(len(inputs))
    labels = np.where(ended_well, 1.0, -1.0)
    process = GaussianProcess.fit(Points.plain(known, level_sd=0.0), labels - HOPE, LAWS)

    def log_chance(inputs: Inputs) -> np.ndarray:
        from scipy.special import log_ndtr

        mean, sd = process.posterior(Points.plain(inputs, level_sd=0.0))
        return np.asarray(log_ndtr((HOPE + mean) / np.hypot(sd, DOUBT)))

    return log_chance
