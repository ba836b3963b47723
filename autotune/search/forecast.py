"""What the cost model says of a space's candidates before any trial: which can't be worth one, and which come first.

Speed and memory of a candidate depend on its plan and batch, which are known; its quality depends on the
hyperparameters and on the plan fields that change the numbers. So among candidates that train alike, a plan that is
surely slower and no smaller than another one (or surely larger and no faster) can't be on the front, and is not tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np

from autotune.cost.estimate import EstimateTable, estimate
from autotune.cost.software import OWN_ENGINE
from autotune.search import pareto
from autotune.space.enumerate import Enumeration
from autotune.space.objectives import Objective, ObjectiveName
from autotune.space.training import TrainingSpace, devices_of
from engine.config import RunConfig
from engine.errors import UserError
from engine.plan import PlanTable, plan_table
from engine.units import format_bytes

CHUNK = 100_000
"""Plans estimated at once."""
PAIRS = 2_000_000
"""Pairs of plans compared at once."""
MAX_RANK = 8
"""Later layers of the front are not told apart."""

MEMORY, BOUND, DOMINATED = "estimate.memory", "estimate.bound", "estimate.dominated"
"""What removes candidates, in the counts beside the rules."""

NUMERICS = ("precision", "gradient_compression", "expert_capacity_factor", "global_batch_size", "sequence_length")
"""Columns that change what a run learns: candidates that differ in none of them train alike."""


class Forecasted(NamedTuple):
    """What the cost model said of an objective before the trial."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Predicted:
    """An objective's forecast for ``n`` candidates, each ``[n]``."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Forecast:
    """Estimates of a space's candidates. Made by ``make``."""

    space: TrainingSpace
    enumeration: Enumeration
    """The plans that are worth a trial; those that are not are counted in ``removed`` under the names above."""
    ranks: np.ndarray
    """``[num_legal]`` ints: layer of the estimated front among the candidates that train alike, 0 is the front."""
    rivals: Mapping[tuple[object, ...], Sequence[Predicted]]
    """Values of ``NUMERICS`` -> costs of all plans that train alike."""
    predicted: Mapping[ObjectiveName, Predicted]
    """Of the plans that are worth a trial: ``speed``, ``memory``, and ``cost`` and ``energy`` where the machines' price
    and power are known."""
    capacity_bytes: np.ndarray
    """``[num_legal]``: live bytes at which a device is estimated to be full."""

    @classmethod
    def make(cls, space: TrainingSpace, enumeration: Enumeration) -> Self:
        """Estimate every plan of a space.

        Raises:
            UserError: The cost model has no figures for the machines, or every plan is estimated to be unfit.
        """
        predicted, fits, capacity = _predict_all(space, enumeration.table)
        groups = _groups(enumeration.table)
        costs = _costs(space.objectives, predicted)
        removed = {MEMORY: ~fits, BOUND: _beyond_bounds(space.objectives, predicted)}
        left = ~(removed[MEMORY] | removed[BOUND])
        if not left.any():
            raise UserError(
                f"none of the {enumeration.num_legal} plans of the space is estimated to fit: "
                + _why_nothing_fits(space, predicted, removed),
                hint="loosen the bounds, add smaller micro-batches, recompute or sharding to the space, or try them"
                " anyway with --no-estimates",
            )
        removed[DOMINATED] = np.zeros_like(left)
        ranks = np.zeros(len(left), dtype=np.int64)
        rivals: dict[tuple[object, ...], list[Predicted]] = {}
        for group in np.unique(groups[left]) if costs else ():
            rows = np.flatnonzero(left & (groups == group))
            few = [Predicted(p.value[rows], p.low[rows], p.high[rows]) for p in costs]
            removed[DOMINATED][rows] = _surely_beaten(few, few)
            ranks[rows] = pareto.layers(np.stack([cost.value for cost in few], axis=1), MAX_RANK)
            rivals[_numerics(enumeration.table, int(rows[0]))] = few
        keep = left & ~removed[DOMINATED]
        counts = {rule: int(rows.sum()) for rule, rows in removed.items() if rows.any()}
        kept = {name: column[keep] for name, column in enumeration.table.items()}
        left_over = replace(enumeration, table=kept, removed={**enumeration.removed, **counts})
        worth = {name: Predicted(p.value[keep], p.low[keep], p.high[keep]) for name, p in predicted.items()}
        return cls(space, left_over, ranks[keep], rivals, worth, capacity[keep])

    def of(self, run: RunConfig) -> dict[ObjectiveName, Forecasted]:
        """Objective name -> forecast of a candidate; quality has none."""
        predicted, *_ = _predict(self.space, _table_of(run), run.hyperparameters.optimizer)
        return {name: Forecasted(float(p.value[0]), float(p.low[0]), float(p.high[0])) for name, p in predicted.items()}

    def refusal(self, run: RunConfig) -> str:
        """The name under which a candidate is not worth a trial; empty when it is."""
        table = _table_of(run)
        predicted, fits, _ = _predict(self.space, table, run.hyperparameters.optimizer)
        if not fits[0]:
            return MEMORY
        if _beyond_bounds(self.space.objectives, predicted)[0]:
            return BOUND
        rivals = self.rivals.get(_numerics(table, 0))
        costs = _costs(self.space.objectives, predicted)
        return DOMINATED if rivals and _surely_beaten(costs, rivals)[0] else ""


def _table_of(run: RunConfig) -> PlanTable:
    return plan_table([(run.plan, run.hyperparameters.global_batch_size, run.workload.sequence_length)])


def _predict_all(
    space: TrainingSpace, table: PlanTable
) -> tuple[dict[ObjectiveName, Predicted], np.ndarray, np.ndarray]:
    """See ``_predict``; in chunks: a table may have millions of rows."""
    optimizer = space.fixed.get("hyperparameters.optimizer", "adamw")
    num_rows = len(table["tp"])
    chunks = [
        _predict(space, {name: column[start : start + CHUNK] for name, column in table.items()}, optimizer)
        for start in range(0, num_rows, CHUNK)
    ]
    predicted = {
        name: Predicted(
            *(np.concatenate([getattr(p[name], part) for p, *_ in chunks]) for part in ("value", "low", "high"))
        )
        for name in chunks[0][0]
    }
    fits, capacity = (np.concatenate([chunk[part] for chunk in chunks]) for part in (1, 2))
    return predicted, fits, capacity


def _predict(
    space: TrainingSpace, table: PlanTable, optimizer: Literal["adamw", "sgd"]
) -> tuple[dict[ObjectiveName, Predicted], np.ndarray, np.ndarray]:
    """Forecasts, which plans may fit, and the live bytes at which a device is full."""
    estimates = estimate(space.model, space.cluster, table, software=OWN_ENGINE, optimizer=optimizer)
    tokens = table["global_batch_size"] * table["sequence_length"]
    predicted: dict[ObjectiveName, Predicted] = {
        "speed": Predicted(
            tokens / estimates.step_seconds, tokens / estimates.step_seconds_high, tokens / estimates.step_seconds_low
        ),
        "memory": _allocated(estimates),
        **_running_costs(space, table, tokens, estimates),
    }
    # What the driver and the allocator take comes on top of live tensors.
    capacity = space.cluster.memory_bytes * estimates.allocated_bytes / estimates.memory_bytes
    return predicted, estimates.memory_bytes_low <= space.cluster.memory_bytes, capacity


def _running_costs(
    space: TrainingSpace, table: PlanTable, tokens: np.ndarray, estimates: EstimateTable
) -> dict[ObjectiveName, Predicted]:
    """``cost`` and ``energy``: they follow from the step time, so the longest step is the dearest."""
    num_devices = devices_of(table)
    steps = (estimates.step_seconds, estimates.step_seconds_low, estimates.step_seconds_high)
    value, low, high = (space.running_costs(num_devices, tokens / step_seconds) for step_seconds in steps)
    return {name: Predicted(value[name], low[name], high[name]) for name in value}


def _allocated(estimates: EstimateTable) -> Predicted:
    """Peak memory as trials measure it: live tensors, with the relative interval of the estimate."""
    value = estimates.allocated_bytes
    scale = value / estimates.memory_bytes
    return Predicted(value, estimates.memory_bytes_low * scale, estimates.memory_bytes_high * scale)


def _beyond_bounds(objectives: Sequence[Objective], predicted: Mapping[ObjectiveName, Predicted]) -> np.ndarray:
    """Which candidates lie beyond a bound with their whole interval; ``[n]`` bools."""
    beyond = np.zeros(len(predicted["speed"].value), dtype=bool)
    for objective in objectives:
        if objective.bound is not None and objective.name in predicted:
            of = predicted[objective.name]
            beyond |= of.high < objective.bound if objective.direction == "maximize" else of.low > objective.bound
    return beyond


def _groups(table: PlanTable) -> np.ndarray:
    """``[n]`` ints, equal for candidates that train alike."""
    codes = [np.unique(table[name].astype(str), return_inverse=True)[1] for name in NUMERICS]
    return np.unique(np.stack(codes), axis=1, return_inverse=True)[1].reshape(-1)


def _numerics(table: PlanTable, row: int) -> tuple[object, ...]:
    return tuple(str(table[name][row]) for name in NUMERICS)


def _costs(objectives: Sequence[Objective], predicted: Mapping[ObjectiveName, Predicted]) -> list[Predicted]:
    """What is minimised of what is known. Energy is cost by another factor: beside cost it decides nothing."""
    names = [o.name for o in objectives if o.name in predicted]
    return [_as_cost(name, predicted[name]) for name in names if name != "energy" or "cost" not in names]


def _as_cost(name: ObjectiveName, p: Predicted) -> Predicted:
    """Lower is better: speed becomes seconds per token."""
    return Predicted(1 / p.value, 1 / p.high, 1 / p.low) if name == "speed" else p


def _surely_beaten(costs: Sequence[Predicted], by: Sequence[Predicted]) -> np.ndarray:
    """Which of ``n`` candidates another one surely beats in one cost without being worse, by its value, in any other.

    Args:
        costs: One cost or more, each of ``n`` candidates.
        by: The same costs of those they are compared with (they themselves among them, or not).
    """
    beaten = np.zeros(len(costs[0].value), dtype=bool)
    for index in range(len(costs)):
        # In this cost the end of their interval has to lie before the beginning of mine, in the others values count.
        mine = np.stack([cost.low if other == index else cost.value for other, cost in enumerate(costs)], axis=1)
        theirs = np.stack([cost.high if other == index else cost.value for other, cost in enumerate(by)], axis=1)
        # What another one beats in all of these need not be asked.
        theirs = np.unique(theirs[pareto.front(theirs, ["minimize"] * len(by))], axis=0)
        for start in range(0, len(mine), rows_at_once := max(1, PAIRS // len(theirs))):
            few = mine[start : start + rows_at_once, None, :]
            at_most = theirs <= few
            at_most[:, :, index] = theirs[:, index] < few[:, :, index]
            beaten[start : start + rows_at_once] |= np.any(np.all(at_most, axis=2), axis=1)
    return beaten


def _why_nothing_fits(
    space: TrainingSpace, predicted: Mapping[ObjectiveName, Predicted], removed: Mapping[str, np.ndarray]
) -> str:
    if removed[MEMORY].all():
        least = format_bytes(float(predicted["memory"].low.min()))
        return f"the smallest needs {least} or more of a device's {format_bytes(space.cluster.memory_bytes)}"
    bounds = ", ".join(f"{o.name} {o.text(o.bound)}" for o in space.objectives if o.bound is not None)
    best = ", ".join(
        f"{o.name} {o.text(float(_best(o, predicted[o.name])))}" for o in space.objectives if o.name in predicted
    )
    return f"the bounds are {bounds}, the best that any plan may reach is {best}"


def _best(objective: Objective, p: Predicted) -> float:
    return float(p.high.max() if objective.direction == "maximize" else p.low.min())
