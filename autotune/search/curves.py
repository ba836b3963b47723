"""Where the loss curve of a run that was stopped early would have ended.

The loss law's plain form (``prior.loss_law``) over a grid of exponents and offsets: level and amplitude have closed
forms, and each law weighs as much as it explains the points. So a curve of few points gives a mean and a standard
deviation in a fraction of a millisecond, and one that still falls steeply is told from one that has flattened out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from autotune.prior.loss_law import noise_of, progress_term

NUM_POINTS = 24
"""Most segments of a curve."""
MIN_POINTS = 4
"""Fewest that a law is fitted to."""
START_RATIO = 0.15
"""The first part of what was seen that is left out where enough follows: a law of the end does not hold there."""
EXPONENTS = np.array([0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5])
OFFSETS = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
"""Of the law, over the part of the training that was seen."""
MIN_NOISE_RATIO = 1e-3
"""Of the loss: no law holds better."""
MISFIT_RATIO = 0.05
"""Of the fall that is forecast: what no fit of one curve can know."""


class Fall(NamedTuple):
    """By how much a loss will fall."""

    mean: float
    sd: float


@dataclass(frozen=True)
class Curve:
    """Training loss of the first part of a run, as segments."""

    progress: tuple[float, ...]
    """``[n]``, rising: share of the whole training done at the middle of each segment, 0 to 1. Where the schedule is
    known training is counted in summed learning rate, else in tokens."""
    loss: tuple[float, ...]
    """``[n]``: mean loss of each segment, finite."""
    rungs: tuple[float, ...] = (1.0,)
    """Progress at the end of each rung of the study."""

    @classmethod
    def of(cls, progress: Sequence[float], loss: Sequence[float], rungs: Sequence[float] = (1.0,)) -> Curve:
        """Of steps.

        Args:
            progress: ``[m]``, at each step.
            loss: ``[m]``; averaged into at most ``NUM_POINTS`` segments, those that are not finite left out.
            rungs: Progress at the end of each rung.
        """
        x, y = np.asarray(progress, dtype=float), np.asarray(loss, dtype=float)
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        parts = np.array_split(np.arange(len(x)), min(NUM_POINTS, len(x))) if len(x) else []
        return cls(
            tuple(float(x[part].mean()) for part in parts), tuple(float(y[part].mean()) for part in parts), tuple(rungs)
        )

    def encode(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=2**14)
    def decode(text: str) -> Curve:
        """The inverse of ``encode``."""
        return Curve(**{name: tuple(values) for name, values in json.loads(text).items()})

    @functools.lru_cache(maxsize=2**14)  # noqa: B019  # a curve is a value: equal ones share the entry
    def fall(self, start: float, end: float) -> Fall | None:
        """How much lower the loss is at ``end`` than at ``start``, both as ``progress``; None with too few points."""
        if len(self.loss) < MIN_POINTS:
            return None
        x, y = np.array(self.progress), np.array(self.loss)
        late = x >= START_RATIO * x[-1]
        if late.sum() >= MIN_POINTS:
            x, y = x[late], y[late]
        noise = max(noise_of(y), MIN_NOISE_RATIO * abs(float(y[-1])))
        exponent, offset = (grid.reshape(-1, 1) for grid in np.meshgrid(EXPONENTS, OFFSETS * x[-1]))

        def term(at: np.ndarray) -> np.ndarray:
            """``[laws, m]``: from 1 at the first point to 0 at the last."""
            first, last = (progress_term(x[place], offset, exponent) for place in (0, -1))
            return np.asarray((progress_term(at, offset, exponent) - last) / (first - last))

        terms = term(x)
        centred = terms - terms.mean(axis=1, keepdims=True)
        squares = (centred**2).sum(axis=1)
        # A loss that rises says nothing of a law: then nothing more is gained.
        amplitude = np.maximum(centred @ y / squares, 0.0)
        misfit = ((y - y.mean() - amplitude[:, None] * centred) ** 2).sum(axis=1)
        weight = np.exp(-0.5 * (misfit - misfit.min()) / noise**2) / np.sqrt(squares)
        weight /= weight.sum()
        places = term(np.array([start, end]))
        share = places[:, 0] - places[:, 1]
        falls = amplitude * share
        mean = float(weight @ falls)
        variance = float(weight @ ((falls - mean) ** 2 + (noise * share) ** 2 / squares))
        return Fall(mean, float(np.sqrt(variance + (MISFIT_RATIO * mean) ** 2 + noise**2)))
