"""An estimated plan as plain data: each figure with its interval, and where the time and the memory go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autotune.cost.estimate import EstimateTable, Method
from autotune.search.plan_objectives import SPEED_OBJECTIVES, PlanObjective
from autotune.specs.cluster import ClusterSpec
from engine.flops import recomputed_flops_per_token, training_flops_per_token
from engine.plan import Plan
from engine.spec import ModelSpec

MFU_CONVENTION = "model FLOPs, causal attention, no recompute"
HFU_CONVENTION = "hardware FLOPs: MFU's and those of recompute"


class Figure(NamedTuple):
    """A figure with its interval."""

    value: float
    low: float
    high: float

    def over(self, numerator: float) -> Figure:
        """``numerator`` divided by it."""
        return Figure(numerator / self.value, numerator / self.high, numerator / self.low)

    def times(self, factor: float) -> Figure:
        """It, multiplied by a factor."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class EstimatedPlan:
    """One plan with what the cost model says of it."""

    plan: Plan
    global_batch_size: int
    """Sequences."""
    sequence_length: int
    step_seconds: Figure
    tokens_per_second: Figure
    """Of all devices together."""
    memory_bytes: Figure
    """Of the fullest device."""
    allocated_bytes: float
    """Live tensors of it alone."""
    memory_limit_bytes: float
    """What a device may take; the plan fits where the high end of its memory is within."""
    mfu: Figure | None
    """Model FLOPs over the devices' peak (``MFU_CONVENTION``); None where the peak is unknown."""
    hfu: Figure | None
    """The same with recompute (``HFU_CONVENTION``)."""
    dollars_per_billion_tokens: Figure | None
    """None where the cluster states no price."""
    kwh_per_billion_tokens: Figure | None
    """Kilowatt-hours; None where the devices' power is unknown."""
    time: dict[str, float] = field(repr=False)
    """Seconds by part (``autotune.cost.estimate.TIME_PARTS``), which add up to the step time."""
    hidden: dict[str, float] = field(repr=False)
    """Seconds of communication by part that run beside compute."""
    memory: dict[str, float] = field(repr=False)
    """Bytes by part (``MEMORY_PARTS``), which add up to the memory."""
    fullest_stage: int
    """Pipeline rank of the fullest device."""
    method: Method = "formula"

    @property
    def fits(self) -> bool:
        """Whether its memory with the margin is within the limit."""
        return self.memory_bytes.high <= self.memory_limit_bytes

    @property
    def excess_bytes(self) -> float:
        """What it needs beyond the limit, with the margin; at most 0 where it fits."""
        return self.memory_bytes.high - self.memory_limit_bytes

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.sequence_length

    @property
    def seconds_per_token(self) -> float:
        """Step time over the batch: comparable between batches."""
        return self.step_seconds.value / self.batch_tokens

    def cost(self, objective: PlanObjective) -> float:
        """What an objective makes as small as it can; of prices that are unknown, what they are multiplied with."""
        if objective == "memory":
            return self.memory_bytes.value
        if objective == "devices":
            return self.plan.world_size
        return self.seconds_per_token * (1 if objective in SPEED_OBJECTIVES else self.plan.world_size)


def describe_estimates(
    model: ModelSpec,
    cluster: ClusterSpec,
    plans: Iterable[tuple[Plan, int, int]],
    estimates: EstimateTable,
    memory_limit_bytes: float,
) -> list[EstimatedPlan]:
    """Plain data of every row of a table of estimates.

    Args:
        model: The architecture.
        cluster: The machines, for the peak that MFU refers to.
        plans: ``(plan, global_batch_size, sequence_length)`` of each row.
        estimates: Their estimates.
        memory_limit_bytes: What a device may take.
    """
    return [_describe(model, cluster, *row, estimates, index, memory_limit_bytes) for index, row in enumerate(plans)]


def _describe(
    model: ModelSpec,
    cluster: ClusterSpec,
    plan: Plan,
    global_batch_size: int,
    sequence_length: int,
    table: EstimateTable,
    row: int,
    memory_limit_bytes: float,
) -> EstimatedPlan:
    seconds = _figure(table.step_seconds, table.step_seconds_low, table.step_seconds_high, row)
    tokens = global_batch_size * sequence_length
    mfu = hfu = None
    peak = cluster.peak_flops.get(plan.precision)
    if peak is not None:
        per_token = training_flops_per_token(model, sequence_length)
        again = recomputed_flops_per_token(model, sequence_length, plan.recompute, plan.recompute_period)
        possible = peak * plan.world_size
        mfu = seconds.over(tokens * per_token / possible)
        hfu = seconds.over(tokens * (per_token + again) / possible)
    speed = seconds.over(tokens)
    hours = speed.over(1e9 * plan.world_size / 3600)  # of devices, for 10^9 tokens
    price, watts = cluster.dollars_per_device_hour, cluster.watts
    return EstimatedPlan(
        plan=plan,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        step_seconds=seconds,
        tokens_per_second=speed,
        memory_bytes=_figure(table.memory_bytes, table.memory_bytes_low, table.memory_bytes_high, row),
        allocated_bytes=_at(table.allocated_bytes, row),
        memory_limit_bytes=memory_limit_bytes,
        mfu=mfu,
        hfu=hfu,
        dollars_per_billion_tokens=None if price is None else hours.times(price),
        kwh_per_billion_tokens=None if watts is None else hours.times(watts / 1000),
        time={name: _at(values, row) for name, values in table.time.items()},
        hidden={name: _at(values, row) for name, values in table.hidden.items()},
        memory={name: _at(values, row) for name, values in table.memory.items()},
        fullest_stage=int(_at(table.fullest_stage, row)),
        method=table.method,
    )


def _figure(value: np.ndarray, low: np.ndarray, high: np.ndarray, row: int) -> Figure:
    return Figure(_at(value, row), _at(low, row), _at(high, row))


def _at(values: np.ndarray, row: int) -> float:
    return float(values[row]) if np.ndim(values) else float(values)
