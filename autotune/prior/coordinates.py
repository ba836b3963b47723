"""The coordinates in which the prior's formulas are simple: logarithms of hyperparameters, of sizes, of recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.prior.robust import Floats
from autotune.prior.task import Task

REFERENCE_PARAMETERS, REFERENCE_TOKENS = 4e8, 2e10
"""Where the coordinates of a task are zero."""

COORDINATES = ("learning_rate", "global_batch_tokens", "weight_decay", "warmup_ratio", "beta1", "beta2")
"""Hyperparameters whose best value the prior moves with task and recipe, in the order of its arrays."""

_FLOORS = {"weight_decay": 0.02, "warmup_ratio": 0.01}
"""Added before the logarithm, so that 0 has a place: less than this much makes no difference."""


def forward(name: str, value: Any) -> Floats:
    """The coordinate of a value of hyperparameter ``name``."""
    values = np.asarray(value, dtype=float)
    if name in ("beta1", "beta2"):
        return np.asarray(np.log1p(-np.minimum(values, 1 - 1e-6)))
    return np.asarray(np.log(np.maximum(values, 0.0 if name in _FLOORS else 1e-12) + _FLOORS.get(name, 0.0)))


def backward(name: str, coordinate: float) -> float:
    """The value of hyperparameter ``name`` at a coordinate."""
    if name in ("beta1", "beta2"):
        return max(0.0, -math.expm1(coordinate))
    return max(0.0, math.exp(coordinate) - _FLOORS.get(name, 0.0))


def task_coordinates(task: Task) -> Floats:
    """``[3]``: logarithms of parameters, of tokens (both over the reference) and of the share of active parameters."""
    return np.array([
        math.log(task.num_parameters / REFERENCE_PARAMETERS),
        math.log(task.total_tokens / REFERENCE_TOKENS),
        math.log(task.num_active_parameters / task.num_parameters),
    ])  # fmt: skip


def recipe_coordinates(task: Task) -> Floats:
    """``[4]``: what makes recipes alike, scaled so that a distance of 1 is a doubtful likeness: sequence length, final
    learning rate, second-moment decay, weight decay."""
    return np.array([
        math.log2(task.sequence_length / 2048),
        math.log(task.min_lr_ratio + 0.003) / 3,
        math.log1p(-task.beta2) / 0.9,
        math.log(task.weight_decay + 0.02),
    ])  # fmt: skip


def values_of(task: Task, points: Mapping[str, Any], name: str, num_points: int) -> Any:
    """``[num_points]`` values of a hyperparameter: the points' own, or the recipe's."""
    value = points[name] if name in points else getattr(task, name)
    return np.broadcast_to(np.asarray(value), num_points)
