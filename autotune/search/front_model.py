"""Joint draws of all objectives of a study: of what was tried, and of any candidates given that.

Each objective has its own model and sees only what it depends on: speed and memory (and money and energy, which follow
from speed) the plan, quality the hyperparameters and what changes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autotune.search.draws import Draws
from autotune.search.ehvi import DrawnFront
from autotune.search.pareto import Box, front_box
from autotune.search.plan_rows import PlanRows
from autotune.search.plan_side import Corrected
from autotune.search.quality import QualityModel
from autotune.search.sampler import SearchState
from autotune.space.objectives import Objective
from autotune.space.space import Dimension

NUM_DRAWS = 40


@dataclass(frozen=True)
class Pool:
    """``m`` candidates."""

    coordinates: np.ndarray
    """``[m, k]``: of the dimensions that are modelled by their coordinates."""
    places: np.ndarray
    """``[m]`` ints: their plans among the plan rows; all 0 in a space without plans."""

    def __len__(self) -> int:
        return len(self.places)

    def take(self, rows: np.ndarray) -> Pool:
        """Some of them."""
        return Pool(self.coordinates[rows], self.places[rows])


class Drawn(Protocol):
    """Draws of one quantity."""

    @property
    def anchors(self) -> np.ndarray:
        """``[s, a]``: at what was tried or runs."""

    def at(self, pool: Pool) -> np.ndarray:
        """``[s, m]``: at candidates."""


@dataclass(frozen=True)
class DrawnCost:
    """Draws of an objective's cost by a model over coordinates."""

    model: QualityModel
    columns: np.ndarray
    """Which coordinates it depends on."""
    draws: Draws

    @classmethod
    def of(cls, model: QualityModel, columns: np.ndarray, tried: Pool, rng: np.random.Generator) -> DrawnCost:
        """Draw at what was tried."""
        points = model.view.points(tried.coordinates[:, columns])
        return cls(model, columns, Draws.of(model.process, points, NUM_DRAWS, rng))

    @property
    def anchors(self) -> np.ndarray:
        """See ``Drawn``."""
        return self.model.view.centre + self.model.view.unit * self.draws.anchors

    def at(self, pool: Pool) -> np.ndarray:
        """See ``Drawn``."""
        first, place = _distinct(pool.coordinates[:, self.columns])
        values = self.draws.at(self.model.view.points(pool.coordinates[first][:, self.columns]))
        return np.asarray(self.model.view.centre + self.model.view.unit * values[:, place])


@dataclass(frozen=True)
class DrawnLogarithm:
    """Draws of the logarithm of speed or memory by a corrected estimate."""

    model: Corrected
    tried: np.ndarray
    draws: Draws

    @classmethod
    def of(cls, model: Corrected, tried: Pool, rng: np.random.Generator) -> DrawnLogarithm:
        """Draw at what was tried."""
        return cls(model, tried.places, Draws.of(model.process, model.points(tried.places), NUM_DRAWS, rng))

    @property
    def anchors(self) -> np.ndarray:
        """See ``Drawn``."""
        return self.model.logarithm(self.tried, self.draws.anchors)

    def at(self, pool: Pool) -> np.ndarray:
        """See ``Drawn``."""
        distinct, place = np.unique(pool.places, return_inverse=True)
        return self.model.logarithm(distinct, self.draws.at(self.model.points(distinct)))[:, place]


@dataclass(frozen=True)
class RunningCost:
    """Money or energy per token: they follow from speed and the devices in use."""

    name: str
    rows: PlanRows
    log_speed: DrawnLogarithm

    @property
    def anchors(self) -> np.ndarray:
        """See ``Drawn``."""
        return self._of(self.log_speed.tried, self.log_speed.anchors)

    def at(self, pool: Pool) -> np.ndarray:
        """See ``Drawn``."""
        return self._of(pool.places, self.log_speed.at(pool))

    def _of(self, places: np.ndarray, log_speed: np.ndarray) -> np.ndarray:
        costs = self.rows.space.running_costs(self.rows.world_size[places], np.exp(log_speed))
        return np.asarray(costs[self.name])


@dataclass(frozen=True)
class Cost:
    """Draws of a quantity as a cost: lower is better."""

    drawn: Drawn
    sign: float
    is_logarithm: bool

    @property
    def anchors(self) -> np.ndarray:
        """See ``Drawn``."""
        return self._of(self.drawn.anchors)

    def at(self, pool: Pool) -> np.ndarray:
        """See ``Drawn``."""
        return self._of(self.drawn.at(pool))

    def _of(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self.sign * (np.exp(values) if self.is_logarithm else values))


@dataclass(frozen=True)
class FrontModel:
    """All objectives together."""

    costs: Sequence[Drawn]
    """One an objective."""
    limits: np.ndarray
    """``[d]``: greatest cost that is within the objective's bound."""
    log_memory: DrawnLogarithm | None
    """Where it is known when a device is full."""
    rng: np.random.Generator

    def drawn(self, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
        """Costs ``[s, m, d]`` of candidates, and whether each keeps within all bounds, ``[s, m]``."""
        costs = np.stack([cost.at(pool) for cost in self.costs], axis=2)
        fits = np.asarray((costs <= self.limits).all(axis=2))
        if self.log_memory is not None:
            capacity = self.log_memory.model.rows.log_capacity
            assert capacity is not None
            fits = fits & (self.log_memory.at(pool) <= capacity[pool.places])
        return costs, fits

    def tried(self) -> tuple[np.ndarray, np.ndarray]:
        """As ``drawn``, of what was tried or runs."""
        costs = np.stack([cost.anchors for cost in self.costs], axis=2)
        return costs, np.asarray((costs <= self.limits).all(axis=2))

    def box(self, costs: np.ndarray, within: np.ndarray) -> Box:
        """The range of the most likely front over candidates, as ``drawn`` gives them, and what was tried."""
        pairs = [(costs, within), self.tried()]
        likely = np.concatenate([c.mean(axis=0) for c, _ in pairs])
        fits = np.concatenate([w.mean(axis=0) >= 0.5 for _, w in pairs])
        return front_box(likely[fits] if fits.any() else likely, ["minimize"] * likely.shape[1])

    def front(self, box: Box) -> DrawnFront:
        """The front of what was tried or runs."""
        costs, within = self.tried()
        return DrawnFront.of(costs, within, box, self.rng)


def limits_of(objectives: Sequence[Objective]) -> np.ndarray:
    """``[d]``: bounds as costs; infinite without one."""
    signs = [-1.0 if o.direction == "maximize" else 1.0 for o in objectives]
    return np.array([np.inf if o.bound is None else s * o.bound for o, s in zip(objectives, signs, strict=True)])


def restricted(state: SearchState, dimensions: Sequence[Dimension]) -> SearchState:
    """The state as a model sees it that knows of these dimensions alone."""
    names = {dimension.name for dimension in dimensions}
    observations = [
        replace(o, parameters={name: value for name, value in o.parameters.items() if name in names})
        for o in state.observations
    ]
    return replace(state, space=replace(state.space, dimensions=tuple(dimensions)), observations=observations)


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of equal rows ``[n, k]``, and for every row which of those it equals."""
    if not rows.shape[1]:
        return np.arange(min(len(rows), 1)), np.zeros(len(rows), dtype=np.int64)
    _, first, place = np.unique(np.nan_to_num(rows, nan=-1.0), axis=0, return_index=True, return_inverse=True)
    return first, place.reshape(-1)
