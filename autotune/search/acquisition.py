"""Where to look next: how much a trial may improve on the best one, and the search for the point that promises most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autotune.search.encoding import ABSENT, Encoding
from autotune.search.uniform import uniform_draws
from autotune.space.enumerate import Enumeration
from autotune.space.space import Scalar, Space

NUM_RANDOM = 250
"""Points drawn anywhere in the space."""
NUM_NEAR = 40
"""Points drawn around each promising one, in each round."""
NUM_STARTS = 5
"""Promising points that are looked around at once."""
RADII = (0.25, 0.1, 0.04, 0.015, 0.005)
"""How far around, in each round; in coordinates."""
JUMP_RATIO = 0.2
"""Share of the words of a promising point that are drawn anew."""
SAME = 0.005
"""Trials that differ by less in every coordinate tell nothing new: their losses differ by less than noise."""

Score = Callable[[np.ndarray], np.ndarray]
"""Coordinates ``[n, k]`` -> how much each promises, ``[n]``; higher is better."""


def log_expected_improvement(mean: np.ndarray, sd: np.ndarray, best: float) -> np.ndarray:
    """Logarithm of the expected improvement on ``best`` (a cost) of normal costs, ``[n]``.

    Exact also where the improvement itself is too small for a float, so that far candidates still rank ("Unexpected
    improvements to expected improvement for Bayesian optimization", Ament et al., 2023).
    """
    from scipy.special import erfcx, log_ndtr

    z = (best - mean) / sd
    # h(z) = phi(z) + z Phi(z); below -1 as phi(z) (1 - |z| sqrt(pi/2) erfcx(|z| / sqrt 2)), without cancellation.
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    near = density + z * np.exp(log_ndtr(z))
    size = np.maximum(-z, 1.0)
    tail = 1.0 - size * math.sqrt(math.pi / 2) * erfcx(size / math.sqrt(2))
    far = np.where(size > 1e4, -2.0 * np.log(size), np.log(np.maximum(tail, 1e-300)))
    log_h = np.where(z > -1.0, np.log(np.maximum(near, 1e-300)), -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + far)
    return np.asarray(np.log(sd) + log_h)


@dataclass(frozen=True)
class Candidates:
    """Points of a space that exist, as coordinates ``[n, k]``, NaN where a dimension is absent."""

    space: Space
    encoding: Encoding
    enumeration: Enumeration | None = None
    """Legal plans, in a training space."""

    @cached_property
    def is_conditional(self) -> bool:
        """Whether some dimension is there only sometimes."""
        return any(dimension.when is not None for dimension in self.space.dimensions)

    @cached_property
    def is_discrete(self) -> bool:
        """Whether there are finitely many."""
        return not any(axis.is_continuous for axis in self.encoding.axes)

    def middle(self) -> np.ndarray:
        """The middle of the box, ``[1, k]``; nothing where the constraints forbid it."""
        return self._existing(np.full((1, len(self.encoding.axes)), ABSENT))

    def by_distance(self, ranked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``ranked``, and after it points drawn anywhere by their distance from the middle."""
        pool = self.random(NUM_RANDOM, rng)
        away = np.nan_to_num(pool - ABSENT)
        return np.concatenate([ranked, pool[np.argsort((away**2).sum(axis=1), kind="stable")]])

    def spread(
        self, tried: np.ndarray, margin: float, rng: np.random.Generator, held: np.ndarray | None = None
    ) -> np.ndarray:
        """Points by how far they are from all ``tried`` ones, ``[m, k]``, and no nearer to a wall than ``margin``.

        Args:
            tried: Coordinates ``[n, k]``.
            margin: Of the box, whose width is 1.
            rng: Draws the points.
            held: Coordinates ``[k]`` that all points share, NaN where they are free.
        """
        pool = self.random(NUM_RANDOM, rng)
        walls = np.nan_to_num(np.abs(pool - ABSENT))
        if held is not None:
            is_held = ~(np.isnan(held) | np.isnan(pool))
            pool, walls = self._existing(np.where(is_held, held, pool)), np.where(is_held, 0.0, walls)
        is_inside = walls.max(axis=1, initial=0.0) <= 0.5 - margin
        x, known = self.encoding.columns(pool).x, self.encoding.columns(tried).x
        distance = ((x[:, None, :] - known) ** 2).sum(axis=2).min(axis=1)
        return np.asarray(pool[np.lexsort((-distance, ~is_inside))])

    def random(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Up to ``count`` points drawn anywhere; all of a small discrete space."""
        if self.enumeration is None and not self.is_discrete:
            return self._existing(rng.uniform(size=(count, len(self.encoding.axes))))
        draws = uniform_draws(self.space, self.enumeration, int(rng.integers(2**31)))
        rows = list(itertools.islice(draws, count))
        return self._constrained(self.encoding.coordinates(rows))

    def near(self, centres: np.ndarray, radius: float, count: int, rng: np.random.Generator) -> np.ndarray:
        """``count`` points around each of ``centres``: numbers moved by about ``radius``, some words drawn anew."""
        base = np.repeat(centres, count, axis=0)
        missing = np.isnan(base)
        base[missing] = rng.uniform(size=int(missing.sum()))
        # Every other point moves in a few dimensions only: ridges and words are followed one dimension at a time.
        num_dims = max(base.shape[1], 1)
        moved = rng.uniform(size=base.shape) < np.where(rng.uniform(size=(len(base), 1)) < 0.5, 1.0, 1.5 / num_dims)
        result = base + moved * radius * rng.standard_normal(base.shape)
        for column, axis in enumerate(self.encoding.axes):
            if not axis.is_ordered:
                anew = moved[:, column] & (rng.uniform(size=len(base)) < JUMP_RATIO)
                result[:, column] = np.where(anew, rng.uniform(size=len(base)), base[:, column])
            elif not axis.is_continuous:
                # A step to a neighbour, where the radius is less than that.
                step = axis.spacing(base[:, column]) * rng.choice([-1.0, 1.0], size=len(base))
                far = np.maximum(radius, 1e-9) * np.abs(rng.standard_normal(len(base))) > np.abs(step)
                result[:, column] = np.where(moved[:, column] & ~far, base[:, column] + step, result[:, column])
        return self._existing(np.clip(result, 0.0, 1.0))

    def crowded(self, coordinates: np.ndarray, tried: np.ndarray) -> np.ndarray:
        """Which of ``[n, k]`` points are all but the same as one of ``[m, k]`` that were tried, ``[n]``."""
        a, b = (np.nan_to_num(x, nan=-1.0) for x in (coordinates, tried))
        apart = np.abs(a[:, None, :] - b).max(axis=2, initial=0.0)
        return np.asarray((apart < SAME).any(axis=1))

    def _existing(self, coordinates: np.ndarray) -> np.ndarray:
        snapped = self.encoding.snapped(coordinates)
        if self.is_conditional:
            snapped[~self._active(snapped)] = np.nan
        return self._constrained(snapped)

    def _active(self, coordinates: np.ndarray) -> np.ndarray:
        """Which dimensions are there, ``[n, k]``; asked once for all points that agree in what conditions read."""
        dimensions = self.space.dimensions
        read = {name for d in dimensions if d.when is not None for name in d.when.names}
        columns = [index for index, d in enumerate(dimensions) if any(_reads(name, d.name) for name in read)]
        _, first, group = np.unique(coordinates[:, columns], axis=0, return_index=True, return_inverse=True)
        masks = []
        for row in coordinates[first]:
            chosen = self.space.active(self.encoding.values(row))
            masks.append([dimension.name in chosen for dimension in dimensions])
        return np.array(masks, dtype=bool).reshape(-1, len(dimensions))[group.ravel()]

    def _constrained(self, coordinates: np.ndarray) -> np.ndarray:
        """Only the points that meet the space's own constraints."""
        if not self.space.constraints or not len(coordinates):
            return coordinates
        rows: list[Mapping[str, Any]] = [self.space.names(self.encoding.values(row)) for row in coordinates]
        return coordinates[[all(bool(constraint(row)) for constraint in self.space.constraints) for row in rows]]

    def maximise(self, score: Score, known: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Points in falling order of a score.

        Args:
            score: What is maximised.
            known: Coordinates ``[m, k]`` of promising points to look around first, the best first; any number.
            rng: Of the draws.

        Returns:
            Coordinates ``[n, k]``; several ways to be good, since the first may turn out to be taken or illegal.
        """
        pool = np.concatenate([self.middle(), self.random(NUM_RANDOM, rng)])
        if len(known):
            starts = known[:NUM_STARTS]
            around = [self.near(starts, radius, NUM_NEAR, rng) for radius in (RADII[1], RADII[3])]
            pool = np.concatenate([pool, *around])
        scores = score(pool) if len(pool) else np.zeros(0)
        for radius in RADII if len(pool) else ():
            starts = pool[np.argsort(-scores, kind="stable")[:NUM_STARTS]]
            fresh = self.near(starts, radius, NUM_NEAR // 2, rng)
            pool = np.concatenate([pool, fresh])
            scores = np.concatenate([scores, score(fresh) if len(fresh) else np.zeros(0)])
        return np.asarray(pool[np.argsort(-scores, kind="stable")])


def _reads(name: str, dimension: str) -> bool:
    """Whether a condition's name is told by a dimension (``plan.mesh`` tells all parallel degrees)."""
    return name == dimension or (dimension == "plan.mesh" and name.startswith("plan."))


def first_new(candidates: Candidates, ranked: np.ndarray, seen: set[str], limit: int) -> dict[str, Scalar] | None:
    """The first of ranked points that is legal and was not tried; None when none of the first ``limit`` is.

    Args:
        candidates: The space.
        ranked: Coordinates ``[n, k]``.
        seen: Keys of candidates that were tried.
        limit: Points to look at.
    """
    asked = set()
    for row in ranked[:limit]:
        chosen = candidates.encoding.values(row)
        identity = tuple(chosen.items())
        if identity in asked:
            continue
        asked.add(identity)
        candidate = candidates.space.candidate(chosen)
        if candidate.is_legal and candidate.key not in seen:
            return chosen
    return None
