"""The learned agent: what it sees of a search, how it answers, and where its answer is legal.

It looks at the best trial so far and answers with a change of it. What it sees is the same in simulation, where it
learns, and in a study: where the best trial stands, what the last change was and brought, what counts this time, how
much of the budget is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from autotune.search.encoding import ABSENT, Encoding
from autotune.search.uniform import is_enumerated, plan_values
from autotune.space.enumerate import Enumeration
from autotune.space.space import Dimension
from engine.atomic import write_json

REACH = 0.6
"""The largest change of a coordinate in the first step."""
LAST_REACH_SHARE = 0.1
"""What of that is left at the end of the budget."""
SUM_SHARE = 0.05
"""Weight of the sum beside the maximum in the augmented Chebyshev norm, by which several costs become one."""
CLIP = 3.0
"""Nothing the agent sees is larger."""
ELITE_SHARE = 0.25
"""The best so many of the trials show where it is good."""
NEAR = 0.3
"""Root mean square distance at which a trial counts less for the slope."""
RIDGE = 0.1
"""Of the slope's regression: a few trials say little."""
NUM_PATIENT = 10
"""Trials without progress after which the agent sees no difference any more."""


@dataclass(frozen=True)
class View:
    """What the agent sees before a proposal."""

    incumbent: np.ndarray
    """``[k]``: coordinates of the best trial."""
    features: np.ndarray
    """``[view_size(k, m)]``."""


def view_size(num_dimensions: int, num_objectives: int) -> int:
    """Length of ``View.features``."""
    return 4 * num_dimensions + num_objectives + 4


def look(coordinates: np.ndarray, costs: np.ndarray, failed: np.ndarray, weights: np.ndarray, progress: float) -> View:
    """What there is to see.

    Args:
        coordinates: ``[n, k]`` of the trials in order, n at least 1; no NaN.
        costs: ``[n, m]``, lower is better; finite, also where a trial failed.
        failed: ``[n]`` bools.
        weights: ``[m]``: how much each objective counts this time; their sum is 1.
        progress: Share of the budget that is used.
    """
    merits = merits_of(costs, failed, weights)
    best = int(merits.argmin())
    since = len(merits) - 1 - best
    last = np.clip(merits[-1] - merits[best], 0.0, CLIP)
    facts = [float(last), float(failed[-1]), min(since / NUM_PATIENT, 1.0), progress]
    change = coordinates[-1] - coordinates[best]
    away = coordinates - coordinates[best]
    features = np.concatenate(
        [2 * coordinates[best] - 1, change, _elite(away, merits), _slope(away, merits), weights, facts]
    )
    return View(coordinates[best], np.clip(features, -CLIP, CLIP).astype(np.float32))


def _elite(away: np.ndarray, merits: np.ndarray) -> np.ndarray:
    """Where the best trials stand on average, seen from the best one, ``[k]``."""
    count = max(1, math.ceil(ELITE_SHARE * len(merits)))
    return np.asarray(4 * away[np.argsort(merits, kind="stable")[:count]].mean(axis=0))


def _slope(away: np.ndarray, merits: np.ndarray) -> np.ndarray:
    """Which way the trials near the best one become better, ``[k]``: minus the slope of their ranks, by a ridge
    regression in which near trials count more."""
    ranks = np.argsort(np.argsort(merits, kind="stable")) / max(len(merits) - 1, 1)
    near = np.exp(-0.5 * (away**2).mean(axis=1) / NEAR**2)
    normal = (away * near[:, None]).T @ away + RIDGE * np.eye(away.shape[1])
    return -np.asarray(np.linalg.solve(normal, (away * near[:, None]).T @ ranks))


def merits_of(costs: np.ndarray, failed: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Several costs as one, ``[n]``, lower is better: the augmented Chebyshev norm from the best value of each, in
    units of the distance from there to the median. Failures come last."""
    known = costs[~failed] if not failed.all() else costs
    ideal = known.min(axis=0)
    unit = np.median(known, axis=0) - ideal
    unit = np.where(unit > 0, unit, np.maximum(known.max(axis=0) - ideal, 1e-12))
    scaled = weights * np.minimum((costs - ideal) / unit, 10.0)
    merits = scaled.max(axis=1) + SUM_SHARE * scaled.sum(axis=1)
    return np.asarray(np.where(failed, 10.0 + merits, merits))


def changed(incumbent: np.ndarray, action: np.ndarray, progress: float) -> np.ndarray:
    """Coordinates ``[k]`` after an action ``[k]`` from -1 to 1: small ones are fine steps, large ones leaps; all become
    smaller as the budget (``progress`` of it is used) comes to its end."""
    action = np.clip(action, -1.0, 1.0)
    reach = REACH * LAST_REACH_SHARE**progress
    return np.asarray(np.clip(incumbent + reach * action * np.abs(action), 0.0, 1.0))


@dataclass(frozen=True)
class Ground:
    """The candidates an agent can stand on: the nearest legal plan, and the nearest value of everything else."""

    encoding: Encoding
    plan_columns: np.ndarray
    """``[p]`` ints: dimensions that the legal plans tell."""
    plans: np.ndarray
    """``[num_legal, p]``: their coordinates; no NaN."""

    @classmethod
    def of(cls, dimensions: Sequence[Dimension], enumeration: Enumeration | None) -> Self:
        """The ground of a space with its legal plans."""
        encoding = Encoding.of(dimensions)
        told = [d for d in dimensions if enumeration is not None and is_enumerated(d)]
        columns = np.array([index for index, d in enumerate(dimensions) if d in told], dtype=np.int64)
        num_rows = enumeration.num_legal if enumeration is not None and told else 0
        rows = [plan_values(enumeration, row, told) for row in range(num_rows)]
        plans = Encoding.of(told).coordinates(rows) if told else np.zeros((0, 0))
        return cls(encoding, columns, filled(plans))

    def nearest(self, coordinates: np.ndarray) -> tuple[np.ndarray, int | None]:
        """The nearest place to stand, ``[k]``, and the row of its plan (None in a space without plans)."""
        place = self.encoding.snapped(coordinates[None])[0]
        if not len(self.plans):
            return place, None
        distance = ((self.plans - coordinates[self.plan_columns]) ** 2).sum(axis=1)
        row = int(distance.argmin())
        place[self.plan_columns] = self.plans[row]
        return place, row


def filled(coordinates: np.ndarray) -> np.ndarray:
    """Coordinates with absent dimensions at their fixed place."""
    return np.asarray(np.where(np.isnan(coordinates), ABSENT, coordinates))


@dataclass(frozen=True)
class Policy:
    """A small network from what the agent sees to the mean of its action; tanh between layers."""

    weights: tuple[np.ndarray, ...]
    """Each ``[out, in]``."""
    biases: tuple[np.ndarray, ...]
    log_sd: np.ndarray
    """``[k]``: natural logarithm of the action's standard deviation."""

    def act(self, features: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An action ``[k]`` for what is seen."""
        hidden = features.astype(np.float64)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.tanh(weight @ hidden + bias)
        mean = self.weights[-1] @ hidden + self.biases[-1]
        return np.asarray(mean + np.exp(self.log_sd) * rng.standard_normal(len(mean)))

    def save(self, path: Path) -> None:
        """Write the numbers, atomically."""
        layers = [
            {"weight": weight.tolist(), "bias": bias.tolist()}
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        write_json(path, {"layers": layers, "log_sd": self.log_sd.tolist()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read them back."""
        data = json.loads(path.read_text(encoding="utf-8"))
        weights = tuple(np.array(layer["weight"]) for layer in data["layers"])
        biases = tuple(np.array(layer["bias"]) for layer in data["layers"])
        return cls(weights, biases, np.array(data["log_sd"]))
