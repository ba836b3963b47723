"""Estimates of published runs, of any models, machines and stacks, in one evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.coefficients import coefficients
from autotune.cost.communication import LinkColumns
from autotune.cost.device_columns import FP8_RECIPES, DeviceColumns, SoftwareColumns
from autotune.cost.estimate import step_time
from autotune.cost.memory import memory
from autotune.cost.memory_recipe import MemoryRecipe, recipe
from autotune.cost.published import PublishedRun, columns
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_figures, time_interval, time_interval_ratio
from autotune.cost.step_time import Scope
from autotune.specs.figures import DeviceFigures
from engine.errors import UserError
from engine.units import GIB


@dataclass(frozen=True)
class RunEstimates:
    """Estimates of ``n`` runs; every array is ``[n]``."""

    step_seconds: np.ndarray
    step_seconds_low: np.ndarray
    step_seconds_high: np.ndarray
    time: Mapping[str, np.ndarray]
    """Seconds by part."""
    allocated_bytes: np.ndarray
    """Peak of live tensors."""
    reserved_bytes: np.ndarray
    """What the allocator holds at its peak."""
    memory_bytes: np.ndarray
    """All memory of the device in use, as its driver shows it."""
    memory_bytes_low: np.ndarray
    memory_bytes_high: np.ndarray


def estimate_runs(runs: Sequence[PublishedRun], software: str | None = None) -> RunEstimates:
    """Estimate runs with the shipped calibration.

    Args:
        runs: One run or more.
        software: One training stack for all of them; None takes each run's own.

    Raises:
        UserError: Unknown software, or a device without figures.
    """
    table = columns(runs)
    figures = [software_figures(name) for name in ([software] if software else table.software)]
    stack = np.zeros(len(runs), dtype=np.int64) if software else table.software_index
    devices = [_figures(cluster.device_kind, cluster.figures) for cluster in table.clusters]
    machine, plans = table.cluster_index, table.plans
    recipes = np.array([FP8_RECIPES.index(run.recipe) if run.recipe else 0 for run in runs])
    scope = Scope(
        shape=ModelShape.rows([ModelShape.of(model) for model in table.models], table.model_index),
        device=DeviceColumns.rows(devices, machine, plans.precision, recipes),
        software=SoftwareColumns.rows(figures, stack),
        coefficients=coefficients(),
        links=LinkColumns.rows(table.clusters, machine),
    )
    step = step_time(scope, plans)
    seconds = np.sum(list(step.parts.values()), axis=0)
    intervals = np.array([[time_interval_ratio(figure, device) for device in devices] for figure in figures])
    low, high = time_interval(seconds, intervals[stack, machine])
    held = memory(
        scope.shape,
        plans,
        MemoryRecipe.rows([recipe(figure.memory_recipe) for figure in figures], stack),
        overhead_bytes=np.array([device.overhead_gib for device in devices])[machine] * GIB,
        num_states=np.array([2 if run.optimizer == "adamw" else 1 for run in runs]),
        fused_attention=scope.software.fused_attention,
        imbalance_ratio=scope.software.imbalance_ratio,
    )
    return RunEstimates(
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        time=step.parts,
        allocated_bytes=held.allocated_bytes,
        reserved_bytes=held.reserved_bytes,
        memory_bytes=held.memory_bytes,
        memory_bytes_low=held.low_bytes,
        memory_bytes_high=held.high_bytes,
    )


def no_estimates() -> RunEstimates:
    """Estimates of no runs."""
    none = np.zeros(0)
    return RunEstimates(none, none, none, {}, none, none, none, none, none)


def _figures(kind: str, figures: DeviceFigures | None) -> DeviceFigures:
    if figures is None:
        raise UserError(f"the cost model knows nothing of the device {kind}", hint="measure it with 'autotune profile'")
    return figures
