"""Candidates of a training space, composed: plans that are on the front of speed and memory, times hyperparameters that
are good at their batch and precision.

Plans that train alike are a group. The front of a group's plans is exact up to the correction of the estimates; the
hyperparameters that go with it are those of least loss, by its most likely value and by its lower bounds. What a trial
may add to the front of all objectives decides among the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.search.acquisition import Candidates
from autotune.search.encoding import ABSENT, Encoding, Inputs
from autotune.search.feasible import log_chance_from
from autotune.search.forecast import NUMERICS
from autotune.search.front_model import (
    Cost,
    Drawn,
    DrawnCost,
    DrawnLogarithm,
    FrontModel,
    Pool,
    RunningCost,
    limits_of,
    restricted,
)
from autotune.search.hygiene import tells
from autotune.search.opening import MARGIN, is_open
from autotune.search.pareto import layers
from autotune.search.plan_rows import OUTSIDE_PLAN, PlanRows
from autotune.search.plan_side import OUT_OF_MEMORY, Corrected, corrected
from autotune.search.quality import QualityModel
from autotune.search.sampler import Observation, SearchState
from autotune.search.uniform import is_enumerated, plan_values
from autotune.space.space import Dimension, Scalar
from autotune.space.training import TrainingSpace

FEW_ROWS, MANY_ROWS = 12, 40
"""Plans of a group that are looked at: when groups are compared, and in the best groups."""
NUM_GROUPS = 8
"""Best groups."""
NUM_LAYERS = 6
"""Layers of the corrected front."""
FEW_POINTS, MANY_POINTS = 12, 32
"""Hyperparameters drawn anywhere, for each group."""
OPTIMISM = (0.0, 1.0, 2.0)
"""Lower bounds of the loss, in standard deviations, whose least points are candidates."""
RADII = (0.15, 0.05, 0.015)
"""How far around them is looked, in rounds."""
NUM_NEAR = 6
NUM_KNOWN = 6
"""Points of the front so far whose hyperparameters are looked around."""
SPEED_FOLLOWERS = ("cost", "energy")


@dataclass(frozen=True)
class Group:
    """Plans that train alike."""

    places: np.ndarray
    """Of its plans, those nearest to the corrected front first."""
    numbers: np.ndarray
    """``[k]``: coordinates of what it sets; NaN elsewhere."""
    others: Candidates
    """The hyperparameters that remain."""


@dataclass(frozen=True)
class Composition:
    """What is known of a training space's candidates after trials. Made by ``of``."""

    state: SearchState
    rows: PlanRows
    encoding: Encoding
    """Of the dimensions that quality depends on."""
    is_free: np.ndarray
    """``[k]``: which of them no plan tells."""
    places: np.ndarray
    """Plans of all trials among the rows; -1 for one that is not among them."""
    plans: Mapping[str, Corrected]
    quality: QualityModel | None
    tried: Pool
    model: FrontModel
    rng: np.random.Generator

    @classmethod
    def of(cls, state: SearchState) -> Composition:
        """Fit all models."""
        space = state.space
        assert isinstance(space, TrainingSpace), "only a training space has plans"
        assert state.enumeration is not None, "a training space comes with its plans"
        rng = np.random.default_rng(state.seed)
        rows = PlanRows.of(space, state.enumeration, state.forecast)
        dimensions = quality_dimensions(space.dimensions)
        encoding = Encoding.of(dimensions)
        places = rows.find([o.parameters for o in state.tried])
        plans = corrected(rows, state.tried, places)
        is_known = np.array([o.state in ("ok", "running") for o in state.tried], dtype=bool) & (places >= 0)
        known = [o for o, is_one in zip(state.tried, is_known, strict=True) if is_one]
        tried = Pool(encoding.coordinates([_only(o, dimensions) for o in known]), places[is_known])
        drawn = {name: DrawnLogarithm.of(plan, tried, rng) for name, plan in plans.items()}
        quality = None
        costs: list[Drawn] = []
        for objective in space.objectives:
            sign = -1.0 if objective.direction == "maximize" else 1.0
            if objective.name in drawn:
                costs.append(Cost(drawn[objective.name], sign, True))
            elif objective.name in SPEED_FOLLOWERS:
                costs.append(Cost(RunningCost(objective.name, rows, drawn["speed"]), sign, False))
            else:
                quality = QualityModel.fit(restricted(state, dimensions), objective)
                costs.append(DrawnCost.of(quality, np.arange(len(dimensions)), tried, rng))
        log_memory = drawn["memory"] if rows.log_capacity is not None else None
        model = FrontModel(costs, limits_of(space.objectives), log_memory, rng)
        is_free = np.array([not is_enumerated(dimension) for dimension in dimensions], dtype=bool)
        return cls(state, rows, encoding, is_free, places, plans, quality, tried, model, rng)

    def ranked(self) -> tuple[Pool, np.ndarray]:
        """Candidates, the most promising first, and the share of the front's box that each is expected to add to what
        is dominated, ``[m]``."""
        groups = self._groups()
        if self._is_starting:
            pool = self._spread(groups)
            front = self.model.front(self.model.box(*self.model.drawn(pool)))
        else:
            coarse = self._products(groups, self._points(groups, FEW_POINTS, ()), FEW_ROWS)
            costs, within = self.model.drawn(coarse)
            front = self.model.front(self.model.box(costs, within))
            groups = self._best(groups, coarse, *front.improvement(costs, within))
            pool = self._products(groups, self._points(groups, MANY_POINTS, RADII), MANY_ROWS)
        costs, within = self.model.drawn(pool)
        gain, near = front.improvement(costs, within)
        gain = gain * self._chance(pool)
        order = np.lexsort((-within.mean(axis=0), -near, -gain))
        return pool.take(order), gain[order]

    def chosen(self, pool: Pool, index: int) -> dict[str, Scalar]:
        """A candidate of a pool as values of the active dimensions."""
        space = self.state.space
        row = int(self.rows.index[pool.places[index]])
        from_table = [dimension for dimension in space.dimensions if is_enumerated(dimension)]
        values = plan_values(self.rows.enumeration, row, from_table)
        free = np.where(self.is_free, pool.coordinates[index], np.nan)
        values |= self.encoding.values(free)
        # Values that neither decides: ranges of plan fields, and what is searched with this plan alone.
        left = [axis for axis in Encoding.of(space.dimensions).axes if axis.dimension.name not in values]
        values |= {axis.dimension.name: axis.value(float(self.rng.uniform())) for axis in left}
        return space.active(values)

    def _groups(self) -> list[Group]:
        """All groups, their plans by layers of the corrected front."""
        logs = {name: plan.mean() for name, plan in self.plans.items()}
        costs = [-logs["speed"], logs["memory"]]
        names = {objective.name for objective in self.state.space.objectives}
        wanted = [bool(names & {"speed", *SPEED_FOLLOWERS}), "memory" in names]
        few = np.stack([c for c, is_wanted in zip(costs, wanted, strict=True) if is_wanted] or costs, axis=1)
        groups = []
        for number in range(int(self.rows.group.max()) + 1):
            places = np.flatnonzero(self.rows.group == number)
            groups.append(self._group(places[_by_layers(few[places])]))
        return groups

    def _group(self, places: np.ndarray) -> Group:
        space, row = self.state.space, int(self.rows.index[places[0]])
        table = self.rows.enumeration.table
        values = plan_values(self.rows.enumeration, row, [d for d in space.dimensions if is_enumerated(d)])
        told = [d.name in values and space.is_active(d, values) for d in self._dimensions]
        numbers = self.encoding.coordinates(
            [{d.name: values[d.name] for d, is_told in zip(self._dimensions, told, strict=True) if is_told}]
        )[0]
        fixed: dict[str, Any] = {f"{OUTSIDE_PLAN.get(name, 'plan')}.{name}": c[row] for name, c in table.items()}
        free = tuple(d for d, is_free in zip(self._dimensions, self.is_free, strict=True) if is_free)
        # Plans keep the other constraints already.
        left = tuple(c for c in space.constraints if c.names & {dimension.name for dimension in free})
        within = replace(space, dimensions=free, fixed={**space.fixed, **fixed}, constraints=left)
        return Group(places, numbers, Candidates(within, Encoding.of(free)))

    @property
    def _dimensions(self) -> tuple[Dimension, ...]:
        return tuple(axis.dimension for axis in self.encoding.axes)

    def _best(self, groups: Sequence[Group], pool: Pool, gain: np.ndarray, near: np.ndarray) -> list[Group]:
        """The groups of the most promising candidates."""
        of_candidate = self.rows.group[pool.places[np.lexsort((-near, -gain))]]
        best = list(dict.fromkeys(of_candidate.tolist()))[:NUM_GROUPS]
        return [group for group in groups if self.rows.group[group.places[0]] in best]

    def _chance(self, pool: Pool) -> np.ndarray:
        """The probability of each candidate to end well, ``[m]``: of plan and hyperparameters together. What ran out of
        memory is known to the memory model."""
        told = [tells(o) and o.failure != OUT_OF_MEMORY for o in self.state.tried]
        ended = np.flatnonzero(np.array(told, dtype=bool) & (self.places >= 0))
        observations = [self.state.tried[index] for index in ended]
        if all(o.state == "ok" for o in observations):
            return np.ones(len(pool))
        coordinates = self.encoding.coordinates([_only(o, self._dimensions) for o in observations])
        known = self._inputs(Pool(coordinates, self.places[ended]))
        log_chance = log_chance_from(known, [o.state == "ok" for o in observations])
        return np.asarray(np.exp(log_chance(self._inputs(pool))))

    def _inputs(self, pool: Pool) -> Inputs:
        """Hyperparameters and plans side by side."""
        own = self.encoding.columns(pool.coordinates)
        plans = self.rows.inputs
        groups = np.concatenate([own.groups, plans.groups + int(own.groups.max(initial=-1)) + 1])
        return Inputs(np.concatenate([own.x, plans.x[pool.places]], axis=1), groups)

    @property
    def _is_starting(self) -> bool:
        """Whether hyperparameters are chosen as in the opening. The first trial is the prior's, where there is one."""
        if self.quality is None or (self.quality.view.prior is not None and not len(self.tried)):
            return False
        return is_open(self.quality, len(self.tried))

    def _spread(self, groups: Sequence[Group]) -> Pool:
        """The hyperparameters farthest from all tried ones (first those in the middle), those that a prior tells of at
        their best, with the plans that go with them."""
        assert self.quality is not None
        points = [self._whole(group, group.others.random(MANY_POINTS, self.rng)) for group in groups]
        owner = np.repeat(np.arange(len(groups)), [len(p) for p in points])
        pool = np.concatenate(points)
        is_held = self.quality.view.is_told() & self.is_free
        if is_held.any():
            best = pool[int(self.quality.posterior_at(pool)[0].argmin())]
            pool = np.where(is_held & ~np.isnan(pool), best, pool)
        x, known = (self.encoding.columns(c).x for c in (pool, self.tried.coordinates))
        off_middle = np.where(is_held, 0.0, np.nan_to_num(np.abs(pool - ABSENT)))
        if len(known):
            distance = ((x[:, None, :] - known) ** 2).sum(axis=2).min(axis=1)
            first = np.lexsort((-distance, off_middle.max(axis=1) > ABSENT - MARGIN))[0]
        else:
            first = int(np.argmin((off_middle**2).sum(axis=1)))
        group = groups[owner[first]]
        return _product(pool[first : first + 1], group.places[:MANY_ROWS])

    def _points(self, groups: Sequence[Group], num_random: int, radii: Sequence[float]) -> list[np.ndarray]:
        """Coordinates ``[m, k]`` of the hyperparameters to look at in each group."""
        known = self._known_points()
        points = []
        for group in groups:
            others = group.others
            parts = [others.middle(), others.random(num_random, self.rng)]
            if len(known) and known.shape[1]:
                parts += [known, *(others.near(known, radius, NUM_NEAR, self.rng) for radius in radii[:1])]
            points.append(self._whole(group, np.concatenate(parts)))
        points = self._least(points)
        for radius in radii if self.is_free.any() else ():
            around = []
            for group, p in zip(groups, points, strict=True):
                near = group.others.near(p[:, self.is_free], radius, NUM_NEAR, self.rng)
                around.append(np.concatenate([p, self._whole(group, near)]))
            points = self._least(around)
        return points

    def _known_points(self) -> np.ndarray:
        """Hyperparameters of the trials of least loss, ``[m, f]``."""
        if self.quality is None or not len(self.quality.costs):
            return np.zeros((0, int(self.is_free.sum())))
        order = np.argsort(self.quality.costs, kind="stable")[:NUM_KNOWN]
        return self.quality.coordinates[order][:, self.is_free]

    def _least(self, points: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of points in each group those of the least lower bounds of the loss."""
        if self.quality is None:
            return [p[:1] for p in points]
        mean, sd = self.quality.posterior_at(np.concatenate(points))
        ends = np.cumsum([len(p) for p in points])[:-1]
        chosen = []
        for p, m, s in zip(points, np.split(mean, ends), np.split(sd, ends), strict=True):
            chosen.append(p[sorted({int(np.argmin(m - optimism * s)) for optimism in OPTIMISM})])
        return chosen

    def _whole(self, group: Group, others: np.ndarray) -> np.ndarray:
        """The group's numbers with the remaining hyperparameters ``[m, f]``, ``[m, k]``."""
        whole = np.repeat(group.numbers[None], len(others), axis=0)
        whole[:, self.is_free] = others
        return whole

    @staticmethod
    def _products(groups: Sequence[Group], points: Sequence[np.ndarray], num_rows: int) -> Pool:
        pools = [_product(p, group.places[:num_rows]) for group, p in zip(groups, points, strict=True)]
        return Pool(np.concatenate([p.coordinates for p in pools]), np.concatenate([p.places for p in pools]))


def quality_dimensions(dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Those that quality depends on: hyperparameters, and what plans change in the numbers."""
    return tuple(d for d in dimensions if not d.name.startswith("plan.") or d.name.removeprefix("plan.") in NUMERICS)


def _only(observation: Observation, dimensions: Sequence[Dimension]) -> dict[str, Scalar]:
    return {d.name: observation.parameters[d.name] for d in dimensions if d.name in observation.parameters}


def _product(points: np.ndarray, places: np.ndarray) -> Pool:
    return Pool(np.repeat(points, len(places), axis=0), np.tile(places, len(points)))


def _by_layers(costs: np.ndarray) -> np.ndarray:
    """Rows of costs ``[n, d]``: the front, then the front of the others, a few times; each layer by its first cost, its
    ends first and then ever finer between them."""
    layer = layers(costs, NUM_LAYERS)
    order: list[int] = []
    for number in np.unique(layer[layer < NUM_LAYERS]):
        rows = np.flatnonzero(layer == number)
        order += rows[np.argsort(costs[rows, 0], kind="stable")][_ends_first(len(rows))].tolist()
    return np.array(order, dtype=np.int64)


def _ends_first(count: int) -> np.ndarray:
    """0..count-1 with the ends first, then the middle, the quarters, and so on."""
    levels = [np.linspace(0, count - 1, 2**level + 1).round().astype(int) for level in range(count.bit_length() + 1)]
    return np.array(list(dict.fromkeys(np.concatenate([*levels, np.arange(count)]).tolist())), dtype=np.int64)
