"""What one more trial is expected to bring: said by the sampler where it knows, else by how the last trials went."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.search import pareto
from autotune.search.hygiene import costs_of, tells
from autotune.search.sampler import Foreseeing, Observation, Sampler, SearchState

MIN_WINDOW = 10
"""Trials that a plateau has at least."""
WINDOW_RATIO = 0.25
"""Share of the trials that are looked back on in a long search."""
PATIENCE = 3
"""Times in a row that little must be expected of the next trial before a search is at its end."""


@dataclass(frozen=True)
class Gain:
    """The expected growth of the dominated hypervolume by one more trial."""

    ratio: float
    """As a share of the whole box of the front (``pareto.hypervolume``): at most 1 however little is dominated yet."""
    window: int | None = None
    """It is the mean over so many last trials; None where the sampler's model says it."""

    @property
    def text(self) -> str:
        """For people."""
        basis = "by the model" if self.window is None else f"the mean of the last {self.window} trials"
        return f"one more trial is expected to widen the front by {100 * self.ratio:.2g} % of its range ({basis})"


def expected_gain(sampler: Sampler, state: SearchState) -> Gain | None:
    """What one more trial is expected to bring; None while that is not known.

    The sampler's model says it, where it can tell. Without one it is the mean growth over the last trials,
    ``MIN_WINDOW`` or ``WINDOW_RATIO`` of all: an upper bound where gains fall from trial to trial, as they do on
    average. Failed trials count, they brought nothing; those that the machines failed don't. It is known from the
    second window on, since gains of the first trials say nothing of later ones.
    """
    if isinstance(sampler, Foreseeing):
        ratio = sampler.expected_gain(state)
        if ratio is not None:
            return Gain(min(ratio, 1.0))
    ended = [o for o in state.observations if _is_result(o)]
    window = max(MIN_WINDOW, int(WINDOW_RATIO * len(ended)))
    if len(ended) < 2 * window:
        return None
    objectives = state.space.objectives
    costs = costs_of(ended, objectives, state.predicted_best)
    for row, observation in enumerate(ended):
        values = observation.values
        if values is None or any(o.violation(values[o.name]) > 0 for o in objectives):
            costs[row] = np.nan  # no point of the front
    shares = pareto.hypervolume_history(costs, ["minimize"] * len(objectives))
    return Gain(float(shares[-1] - shares[-1 - window]) / window, window) if shares[-1] > 0 else None


def is_enough(sampler: Sampler, state: SearchState, least_ratio: float) -> bool:
    """Whether a search is at its end: ``PATIENCE`` times in a row, now the last time, less than ``least_ratio`` was
    expected of the next trial. As pure as the sampler."""
    ends = [place for place, observation in enumerate(state.observations) if _is_result(observation)]
    if len(ends) < PATIENCE:
        return False
    for end in (len(state.observations), *ends[:-PATIENCE:-1]):
        gain = expected_gain(sampler, replace(state, observations=state.observations[:end]))
        if gain is None or gain.ratio >= least_ratio:
            return False
    return True


def _is_result(observation: Observation) -> bool:
    """Whether a trial ended and says something of its candidate for the first time. The part of a training that did
    well says it later: no part is on the front."""
    if observation.state == "refused" or not tells(observation) or observation.repeat_of is not None:
        return False
    return observation.fidelity == 1 or observation.state == "failed"
