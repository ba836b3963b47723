"""The default search for one objective: a Gaussian process on what is known, and the trial that promises most.

Without a prior the first trial is the middle of the box, a few more are spread over it, and then the expected
improvement decides. With one, the first trial is at its optimum, and every other is chosen by the transferred model;
what the prior says nothing of, all where its task lies outside of what it knows, is spread over first as without one.
"""

from __future__ import annotations

import numpy as np

from autotune.search.acquisition import Candidates, first_new, log_expected_improvement
from autotune.search.encoding import ABSENT
from autotune.search.feasible import log_chance_of
from autotune.search.quality import QualityModel
from autotune.search.sampler import SearchState
from autotune.search.uniform import UniformSampler
from autotune.space.space import Scalar

NUM_SPREAD = 1
"""Trials spread over the box after the one in the middle, plus one a dimension."""
MARGIN = 0.2
"""They keep so far from its walls: the corners of a box of hyperparameters usually diverge."""
CENTRE_PULL = 1e-3
"""Of points that are equally good the one nearest to the middle of the box is first."""
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
        if not len(tried) and model.view.prior is None:
            return candidates.by_distance(candidates.middle(), rng)
        if not len(tried):
            return self._from_prior(model, candidates, tried, rng)
        is_told = model.view.is_told()
        if not is_told.all() and len(tried) < 1 + NUM_SPREAD + int((~is_told).sum()):
            start = self._from_prior(model, candidates, tried, rng)[0] if is_told.any() else None
            held = None if start is None else np.where(is_told, start, np.nan)
            return candidates.spread(tried, MARGIN, rng, held)
        known = model.coordinates[np.argsort(model.costs, kind="stable")] if len(model.costs) else tried
        if not len(known):
            return self._from_prior(model, candidates, known, rng)
        best = float(model.posterior_at(known)[0].min())
        log_chance = log_chance_of(state, candidates.encoding)

        def score(coordinates: np.ndarray) -> np.ndarray:
            mean, sd = model.posterior_at(coordinates)
            promise = log_expected_improvement(mean, sd, best) + log_chance(coordinates)
            return np.asarray(promise - CROWDED * candidates.crowded(coordinates, tried))

        return candidates.maximise(score, known, rng)

    def _from_prior(
        self, model: QualityModel, candidates: Candidates, known: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        return candidates.maximise(lambda x: -self._first(model, x), known, rng)

    @staticmethod
    def _first(model: QualityModel, coordinates: np.ndarray) -> np.ndarray:
        """Cost at which to begin: the prior's, and what it leaves open near the middle of the box."""
        mean, _ = model.posterior_at(coordinates)
        away = np.nan_to_num(coordinates - ABSENT)
        return np.asarray(mean + CENTRE_PULL * model.view.unit * (away**2).sum(axis=1))
