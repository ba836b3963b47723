"""What models may see of measured values: costs, finite and capped.

A diverged loss of 8 beside losses of 2.4 is all that a Gaussian process fits, and a NaN is lost on most samplers. So
values become costs (lower is better), bad ends are cut off, and failures get the cap. The values as measured stay where
they are, in the observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune.search.sampler import Observation
from autotune.space.objectives import Objective

CAP_RATIO = 1.06
"""A loss may exceed what was predicted for the best by so much. The errors of loss laws over model sizes and tokens are
far below (0.011 of 2.4 nats on average)."""
CAP_SPREADS = 4.0
"""Without a prediction: so many times the distance from the best value to the median, beyond the best."""

CHANCE = ("infra", "interrupted")
"""Failures of the machines: they say nothing of the candidate."""

MEASURED_EXACTLY = ("speed", "memory", "cost", "energy")
"""Objectives that don't diverge: they are not capped."""


def tells(observation: Observation) -> bool:
    """Whether a number's end says something of its candidate; not where the machines failed, nor while it runs."""
    return observation.state != "running" and observation.failure not in CHANCE


def costs_of(
    observations: Sequence[Observation], objectives: Sequence[Objective], predicted: Mapping[str, float] | None = None
) -> np.ndarray:
    """Costs of observations.

    Args:
        observations: Of any state.
        objectives: The columns.
        predicted: Objective name -> predicted best value, where one is known.

    Returns:
        ``[n, k]``: lower is better; the running ones are NaN, failed and refused ones get the greatest cost allowed.
    """
    costs = np.full((len(observations), len(objectives)), np.nan)
    for column, objective in enumerate(objectives):
        sign = -1.0 if objective.direction == "maximize" else 1.0
        for row, observation in enumerate(observations):
            if observation.values is not None:
                costs[row, column] = sign * observation.values[objective.name]
        best = (predicted or {}).get(objective.name)
        cap = _cap(costs[:, column], None if best is None else sign * best, objective.name)
        costs[:, column] = np.minimum(costs[:, column], cap)
        lost = [observation.state in ("failed", "refused") for observation in observations]
        costs[lost, column] = cap if np.isfinite(cap) else _worst(costs[:, column])
    return costs


def violations_of(observations: Sequence[Observation], objectives: Sequence[Objective]) -> np.ndarray:
    """How far each observation is from feasible.

    Returns:
        ``[n, 1 + k]``: whether it failed (1) or not (-1), then how far each objective lies beyond its bound as a share
        of it (at most 0 when within or without a bound); the running ones are NaN.
    """
    violations = np.full((len(observations), 1 + len(objectives)), np.nan)
    for row, observation in enumerate(observations):
        if observation.state == "running":
            continue
        if observation.values is None:
            violations[row] = [1.0, *(1.0 if o.bound is not None else 0.0 for o in objectives)]
        else:
            violations[row] = [-1.0, *(o.violation(observation.values[o.name]) for o in objectives)]
    return violations


def _cap(costs: np.ndarray, predicted: float | None, name: str) -> float:
    known = costs[np.isfinite(costs)]
    if name in MEASURED_EXACTLY or (not len(known) and predicted is None):
        return np.inf
    best = float(known.min(initial=np.inf))
    if predicted is not None:
        # What was measured counts where the prediction was too low.
        best = max(predicted, best) if len(known) else predicted
        return best + (CAP_RATIO - 1) * abs(best)
    spread = float(np.median(known)) - best
    return best + CAP_SPREADS * spread if spread > 0 else np.inf


def _worst(costs: np.ndarray) -> float:
    known = costs[np.isfinite(costs)]
    return float(known.max()) if len(known) else 0.0
