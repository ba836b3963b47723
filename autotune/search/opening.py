"""The first trials of a search: where to begin, and what to look at before a model is trusted.

Without a prior that is the middle of the box and points spread over it. With one, its optimum is first; what it says
nothing of, all where its task lies outside of what it knows, is spread over as without one.
"""

from __future__ import annotations

import numpy as np

from autotune.search.acquisition import Candidates
from autotune.search.encoding import ABSENT
from autotune.search.quality import QualityModel

NUM_SPREAD = 1
"""Trials spread over the box after the first one, plus one a dimension."""
MARGIN = 0.2
"""They keep so far from its walls: the corners of a box of hyperparameters usually diverge."""
CENTRE_PULL = 1e-3
"""Of points that are equally good the one nearest to the middle of the box is first."""


def is_open(quality: QualityModel, num_tried: int) -> bool:
    """Whether a search is still in its opening: too few trials tell of what no prior speaks of.

    Args:
        quality: What is known so far.
        num_tried: Trials so far.
    """
    num_untold = int((~quality.view.is_told()).sum())
    return not num_tried or (num_untold > 0 and num_tried < 1 + NUM_SPREAD + num_untold)


def opening(
    quality: QualityModel, candidates: Candidates, tried: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """Points for the next trial, ``[m, k]``, the best first; None once the opening is over.

    Args:
        quality: What is known so far, with the prior if there is one.
        candidates: Of the space.
        tried: Coordinates of all trials, ``[n, k]``.
        rng: Of this proposal.
    """
    if not is_open(quality, len(tried)):
        return None
    if not len(tried):
        if quality.view.prior is None:
            return candidates.by_distance(candidates.middle(), rng)
        return most_promising(quality, candidates, tried, rng)
    is_told = quality.view.is_told()
    if not is_told.any():
        return candidates.spread(tried, MARGIN, rng)
    start = most_promising(quality, candidates, tried, rng)[0]
    return candidates.spread(tried, MARGIN, rng, np.where(is_told, start, np.nan))


def most_promising(
    quality: QualityModel, candidates: Candidates, known: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Points by their mean, ``[m, k]``, what it leaves open near the middle of the box.

    Args:
        quality: What is known so far.
        candidates: Of the space.
        known: Points to look around, ``[n, k]``.
        rng: Of this proposal.
    """

    def score(coordinates: np.ndarray) -> np.ndarray:
        mean, _ = quality.posterior_at(coordinates)
        away = np.nan_to_num(coordinates - ABSENT)
        return np.asarray(-mean - CENTRE_PULL * quality.view.unit * (away**2).sum(axis=1))

    return candidates.maximise(score, known, rng)
