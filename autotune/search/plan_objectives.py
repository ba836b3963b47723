"""What plans are compared by: from estimates to costs, lower is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from autotune.cost.columns import PlanColumns
from autotune.space.objectives import Direction
from engine.errors import UserError

PlanObjective = Literal["step_time", "speed", "memory", "devices", "cost", "energy"]

SPEED_OBJECTIVES: tuple[PlanObjective, ...] = ("speed", "step_time")
"""Those that a faster step serves, whatever devices it takes."""

DISCARDED_BITS = 20
"""Last bits of a cost that are rounded away, so that noise in them (2e-10, relative) does not tell equals apart."""


@dataclass(frozen=True)
class Prices:
    """What a device costs while it runs."""

    dollars_per_device_hour: float | None = None
    watts_per_device: float | None = None


@dataclass(frozen=True)
class ObjectiveInfo:
    """An objective for tables and axes."""

    title: str
    unit: str
    direction: Direction


OBJECTIVES: dict[PlanObjective, ObjectiveInfo] = {
    "step_time": ObjectiveInfo("Step time", "s", "minimize"),
    "speed": ObjectiveInfo("Training speed", "tokens/s", "maximize"),
    "memory": ObjectiveInfo("Peak memory", "bytes", "minimize"),
    "devices": ObjectiveInfo("Devices used", "devices", "minimize"),
    "cost": ObjectiveInfo("Cost", "$ per 10^9 tokens", "minimize"),
    "energy": ObjectiveInfo("Energy", "kWh per 10^9 tokens", "minimize"),
}

_Value = Callable[[np.ndarray, np.ndarray, PlanColumns, Prices], np.ndarray]


def _tokens(c: PlanColumns) -> np.ndarray:
    return np.asarray(c.global_batch_size * c.sequence_length, dtype=np.float64)


def _device_seconds(seconds: np.ndarray, c: PlanColumns) -> np.ndarray:
    """Device-seconds per 10^9 tokens."""
    return np.asarray(seconds * c.world_size / _tokens(c) * 1e9)


_VALUES: dict[PlanObjective, _Value] = {
    "step_time": lambda seconds, memory, c, p: seconds,
    "speed": lambda seconds, memory, c, p: _tokens(c) / seconds,
    "memory": lambda seconds, memory, c, p: memory,
    "devices": lambda seconds, memory, c, p: np.asarray(c.world_size, dtype=np.float64),
    "cost": lambda seconds, memory, c, p: _device_seconds(seconds, c) / 3600 * (p.dollars_per_device_hour or 0.0),
    "energy": lambda seconds, memory, c, p: _device_seconds(seconds, c) / 3.6e6 * (p.watts_per_device or 0.0),
}
"""From step seconds and memory bytes. None gets better when either rises: lower bounds of both give one of the cost."""


def check_objectives(objectives: Sequence[str], prices: Prices) -> tuple[PlanObjective, ...]:
    """The objectives as a tuple.

    Raises:
        UserError: None, an unknown one, one twice, or one whose price is not given.
    """
    known: tuple[PlanObjective, ...] = get_args(PlanObjective)
    for name in objectives:
        if name not in known:
            raise UserError(f"unknown objective {name!r}", hint=f"known are {', '.join(known)}")
    if not objectives or len(set(objectives)) < len(objectives):
        raise UserError("objectives are one or more different names", hint=f"known are {', '.join(known)}")
    for name, price, unit in (
        ("cost", prices.dollars_per_device_hour, "dollars per device and hour"),
        ("energy", prices.watts_per_device, "watts per device"),
    ):
        if name in objectives and not price:
            raise UserError(f"the objective {name} needs {unit}", hint=f"give {unit}, or leave {name} out")
    return tuple(name for name in known if name in objectives)


def objective_values(
    objectives: Sequence[PlanObjective], seconds: np.ndarray, memory: np.ndarray, columns: PlanColumns, prices: Prices
) -> np.ndarray:
    """``[n, k]`` values in the units of ``OBJECTIVES``, from step seconds and memory bytes ``[n]``."""
    return np.stack([_VALUES[name](seconds, memory, columns, prices) for name in objectives], axis=1)


def objective_costs(
    objectives: Sequence[PlanObjective], seconds: np.ndarray, memory: np.ndarray, columns: PlanColumns, prices: Prices
) -> np.ndarray:
    """``[n, k]`` positive costs, lower is better, rounded to 32 bits of mantissa."""
    with np.errstate(divide="ignore"):  # where nothing is known of the time, the bound of 0 s is a cost of 0 too
        costs = objective_values(objectives, seconds, memory, columns, prices)
    for i, name in enumerate(objectives):
        if OBJECTIVES[name].direction == "maximize":
            costs[:, i] = 1.0 / costs[:, i]
    return rounded(costs)


def rounded(costs: np.ndarray) -> np.ndarray:
    """Positive costs without their last bits."""
    bits = np.ascontiguousarray(costs, dtype=np.float64).view(np.int64)
    half, mask = np.int64(1 << (DISCARDED_BITS - 1)), np.int64(-(1 << DISCARDED_BITS))
    result: np.ndarray = ((bits + half) & mask).view(np.float64)
    return result
