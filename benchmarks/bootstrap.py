"""Bootstrap intervals of means. Not a benchmark itself: others import it."""

from __future__ import annotations

import numpy as np

NUM_DRAWS = 10_000
TAILS = (0.025, 0.975)


def means(values: np.ndarray) -> np.ndarray:
    """Means ``[NUM_DRAWS, ...]`` over redrawn rows of ``values`` ``[n, ...]``. Arrays with as many rows are redrawn
    alike, so that they may be compared pair by pair."""
    draws = np.random.default_rng(0).integers(len(values), size=(NUM_DRAWS, len(values)))
    weights = np.apply_along_axis(np.bincount, 1, draws, minlength=len(values)) / len(values)
    found: np.ndarray = np.tensordot(weights, values, axes=1)
    return found


def interval(redrawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the 95 % interval over the first axis."""
    low, high = np.quantile(redrawn, TAILS, axis=0)
    return low, high
