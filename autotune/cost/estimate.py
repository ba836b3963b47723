"""What the cost model says of candidates before they run: step time by part and memory by part, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.cost.coefficients import coefficients
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import LinkColumns, communication
from autotune.cost.compute import Basis, compute_work
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.memory import memory
from autotune.cost.memory_recipe import recipe
from autotune.cost.parts import HIDDEN_PARTS, MEMORY_PARTS, TIME_PARTS, Method
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_figures
from autotune.cost.step_time import Scope, StepTime, compose
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import SoftwareFigures
from engine.errors import UserError
from engine.plan import PlanTable
from engine.spec import ModelSpec
from engine.units import GIB

__all__ = ["HIDDEN_PARTS", "MEMORY_PARTS", "TIME_PARTS", "EstimateTable", "Method", "estimate"]


@dataclass(frozen=True)
class EstimateTable:
    """Estimates of ``n`` candidates; every array is ``[n]``."""

    step_seconds: np.ndarray
    step_seconds_low: np.ndarray
    step_seconds_high: np.ndarray
    memory_bytes: np.ndarray
    """Peak memory of the fullest device as its allocator reserves it: the point estimate."""
    memory_bytes_low: np.ndarray
    memory_bytes_high: np.ndarray
    """With the margin: a plan is taken to fit where this is within the device's memory."""
    allocated_bytes: np.ndarray
    """Peak of live tensors on the fullest device, without the allocator's slack and the driver's share."""
    time: Mapping[str, np.ndarray]
    """Seconds by part (``TIME_PARTS``), which add up to ``step_seconds``."""
    hidden: Mapping[str, np.ndarray]
    """Seconds of communication (``HIDDEN_PARTS``) that run beside compute."""
    memory: Mapping[str, np.ndarray]
    """Bytes by part (``MEMORY_PARTS``), which add up to ``memory_bytes``, of the fullest stage."""
    fullest_stage: np.ndarray
    """Pipeline rank of the fullest device."""
    method: Method = "formula"

    def __len__(self) -> int:
        return len(self.step_seconds)


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    table: PlanTable | PlanColumns,
    *,
    software: str = "default",
    optimizer: Literal["adamw", "sgd"] = "adamw",
) -> EstimateTable:
    """Estimate every plan of a table in closed form.

    Args:
        model: The architecture.
        cluster: The machines; needs ``figures`` and ``links``.
        table: ``n`` legal plans with their batches, as words (``engine.plan.plan_table``) or codes.
        software: Training stack, a name in ``software.yaml``.
        optimizer: Optimizer, for its states.

    Raises:
        UserError: The cluster has no figures, or none for a precision of the table.
    """
    if cluster.figures is None or not cluster.links:
        raise UserError(
            f"the cost model knows nothing of the devices of cluster '{cluster.name}' ({cluster.device_kind})",
            hint="measure them with 'autotune profile', or name a device of the catalogue",
        )
    c = table if isinstance(table, PlanColumns) else encode(table, model.num_layers)
    figures = software_figures(software)
    scope = Scope(
        shape=ModelShape.of(model),
        device=DeviceColumns.of(cluster.figures, np.broadcast_to(c.precision, len(c))),
        software=SoftwareColumns.of(figures),
        coefficients=coefficients(),
        links=LinkColumns.of(cluster),
    )
    interval = figures.interval_ratio or cluster.figures.interval_ratio
    return estimate_columns(scope, c, cluster=cluster, software=figures, interval_ratio=interval, optimizer=optimizer)


def estimate_columns(
    x: Scope,
    c: PlanColumns,
    *,
    cluster: ClusterSpec,
    software: SoftwareFigures,
    interval_ratio: float,
    optimizer: str = "adamw",
) -> EstimateTable:
    """Estimates of coded plans of one model on one cluster."""
    step = step_time(x, c)
    seconds = np.sum(list(step.parts.values()), axis=0)
    held = memory(
        x.shape, c, recipe(software.memory_recipe),
        overhead_bytes=(cluster.figures.overhead_gib if cluster.figures else 0.0) * GIB,
        num_states=2 if optimizer == "adamw" else 1,
        fused_attention=x.software.fused_attention,
    )  # fmt: skip
    return EstimateTable(
        step_seconds=seconds,
        step_seconds_low=seconds / (1 + interval_ratio),
        step_seconds_high=seconds * (1 + interval_ratio),
        memory_bytes=held.memory_bytes,
        memory_bytes_low=held.low_bytes,
        memory_bytes_high=held.high_bytes,
        allocated_bytes=held.allocated_bytes,
        time=step.parts,
        hidden=step.hidden,
        memory=held.parts,
        fullest_stage=held.fullest_stage,
    )


def step_time(x: Scope, c: PlanColumns) -> StepTime:
    """Step time by part of coded plans, each row with the model, device and stack that ``x`` has for it."""
    work = compute_work(Basis(x.shape, x.device, x.software, x.coefficients, c))
    wire = communication(x.shape, x.links, c, element_bytes=x.device.element_bytes)
    return compose(x, c, work, wire)
