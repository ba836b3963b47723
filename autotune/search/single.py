"""The default search for one objective: a Gaussian process on what is known, and the trial that promises most.

After its opening the expected improvement decides; with a prior it is that of the transferred model.
"""

from __future__ import annotations

import numpy as np

from autotune.search.acquisition import Candidates, first_new, log_expected_improvement
from autotune.search.feasible import log_chance_of
from autotune.search.opening import most_promising, opening
from autotune.search.quality import QualityModel
from autotune.search.sampler import SearchState
from autotune.search.uniform import UniformSampler
from autotune.space.space import Scalar

CROWDED = 100.0
"""Taken from the logarithm of the promise of a trial that repeats another."""
MAX_TAKEN = 200
"""Ranked points that may turn out to be taken or illegal before a random one is drawn."""


class SurrogateSampler:
    """Bayesian optimisation of the first objective."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        rng = np.random.default_rng(state.seed)
        model = QualityModel.fit(state, state.space.objectives[0])
        candidates = Candidates(state.space, model.view.encoding, state.enumeration)
        ranked = self._ranked(state, model, candidates, rng)
        keys = (state.space.candidate(o.parameters).key for o in state.observations)
        chosen = first_new(candidates, ranked, set(keys), MAX_TAKEN)
        return UniformSampler().propose(state) if chosen is None else chosen

    def _ranked(
        self, state: SearchState, model: QualityModel, candidates: Candidates, rng: np.random.Generator
    ) -> np.ndarray:
        tried = candidates.encoding.coordinates([o.parameters for o in state.tried])
        first = opening(model, candidates, tried, rng)
        if first is not None:
            return first
        known = model.coordinates[np.argsort(model.costs, kind="stable")] if len(model.costs) else tried
        if not len(known):
            return most_promising(model, candidates, known, rng)
        best = float(model.posterior_at(known)[0].min())
        log_chance = log_chance_of(state, candidates.encoding)

        def score(coordinates: np.ndarray) -> np.ndarray:
            mean, sd = model.posterior_at(coordinates)
            promise = log_expected_improvement(mean, sd, best) + log_chance(coordinates)
            return np.asarray(promise - CROWDED * candidates.crowded(coordinates, tried))

        return candidates.maximise(score, known, rng)
