"""Candidates of a space without plans: a Gaussian process an objective, over all dimensions.

After the opening the candidate is searched that is expected to add most to the front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.search import pareto
from autotune.search.acquisition import Candidates
from autotune.search.encoding import Encoding
from autotune.search.feasible import LogChance, log_chance_of
from autotune.search.front_model import DrawnCost, FrontModel, Pool, limits_of
from autotune.search.opening import MARGIN, opening
from autotune.search.quality import QualityModel
from autotune.search.sampler import SearchState
from autotune.space.space import Scalar

TINY = 1e-12
"""Added to expected gains, so that they have a logarithm."""
NUM_AROUND = 20
REACHES = (0.3, 0.1)
"""Points, around each of the front and how far from it, that tell how far the front may go."""
MAX_FRONT = 12
NEARNESS = 10.0
"""Where no draw gains anything, how fast the score falls with the distance to the front."""


@dataclass(frozen=True)
class BlackBox:
    """What is known of a space after trials. Made by ``of``."""

    state: SearchState
    candidates: Candidates
    tried: Pool
    log_chance: LogChance
    quality: QualityModel
    """Of the objective that a prior speaks of, or of the first."""
    model: FrontModel
    rng: np.random.Generator

    @classmethod
    def of(cls, state: SearchState) -> BlackBox:
        """Fit all models."""
        rng = np.random.default_rng(state.seed)
        encoding = Encoding.of(state.space.dimensions)
        known = [o for o in state.tried if o.state in ("ok", "running")]
        coordinates = encoding.coordinates([o.parameters for o in known])
        tried = Pool(coordinates, np.zeros(len(known), dtype=np.int64))
        columns = np.arange(coordinates.shape[1])
        models = [QualityModel.fit(state, objective) for objective in state.space.objectives]
        quality = next((m for m in models if m.view.prior is not None), models[0])
        costs = [DrawnCost.of(model, columns, tried, rng) for model in models]
        model = FrontModel(costs, limits_of(state.space.objectives), None, rng)
        candidates = Candidates(state.space, encoding, state.enumeration)
        return cls(state, candidates, tried, log_chance_of(state, encoding), quality, model, rng)

    def ranked(self) -> tuple[Pool, np.ndarray]:
        """See ``Composition.ranked``."""
        tried = self.candidates.encoding.coordinates([o.parameters for o in self.state.tried])
        first = opening(self.quality, self.candidates, tried, self.rng)
        if first is None and not len(self.tried):
            first = self.candidates.spread(tried, MARGIN, self.rng)
        if first is not None:
            return self._unknown(first)
        on_front = self._on_front()
        # The front may go on where nothing was tried: what is expected there belongs to its range.
        around = [self.candidates.near(on_front, radius, NUM_AROUND, self.rng) for radius in REACHES]
        scouts = _pool(np.concatenate([on_front, self.candidates.random(NUM_AROUND, self.rng), *around]))
        front = self.model.front(self.model.box(*self.model.drawn(scouts)))
        gains = []

        def score(coordinates: np.ndarray) -> np.ndarray:
            gain, near = front.improvement(*self.model.drawn(_pool(coordinates)))
            chance = self.log_chance(coordinates)
            gains.append(float((gain * np.exp(chance)).max(initial=0.0)))
            return np.asarray(np.log(gain + TINY * np.exp(NEARNESS * np.minimum(near, 0.0))) + chance)

        ranked = _pool(self.candidates.maximise(score, on_front, self.rng))
        return ranked, np.full(len(ranked), max(gains, default=0.0))

    def chosen(self, pool: Pool, index: int) -> dict[str, Scalar]:
        """See ``Composition.chosen``."""
        return self.candidates.encoding.values(pool.coordinates[index])

    def _on_front(self) -> np.ndarray:
        """Coordinates of what was tried and is most likely on the front, in random order and not too many."""
        costs, within = self.model.tried()
        mean = np.where(within.mean(axis=0)[:, None] >= 0.5, costs.mean(axis=0), np.inf)
        is_front = pareto.front(mean, ["minimize"] * mean.shape[1])
        return np.asarray(self.rng.permutation(self.tried.coordinates[is_front])[:MAX_FRONT])

    @staticmethod
    def _unknown(coordinates: np.ndarray) -> tuple[Pool, np.ndarray]:
        """Candidates of which it is not known what they may gain."""
        return _pool(coordinates), np.full(len(coordinates), np.inf)


def _pool(coordinates: np.ndarray) -> Pool:
    return Pool(coordinates, np.zeros(len(coordinates), dtype=np.int64))
