"""What the cost model says of candidates before they run: step time by part and memory by part, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from autotune.cost.coefficients import coefficients
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import LinkColumns, communication
from autotune.cost.compute import Basis, compute_work
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.memory import MemoryTable, memory
from autotune.cost.memory_recipe import recipe
from autotune.cost.parts import HIDDEN_PARTS, MEMORY_PARTS, TIME_PARTS, Method
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_figures
from autotune.cost.step_time import Scope, StepTime, compose
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import DeviceFigures, SoftwareFigures
from engine.errors import UserError
from engine.plan import PlanTable
from engine.spec import ModelSpec
from engine.units import GIB

__all__ = ["HIDDEN_PARTS", "MEMORY_PARTS", "TIME_PARTS", "EstimateTable", "Estimator", "Method", "estimate"]


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
    c = table if isinstance(table, PlanColumns) else encode(table, model.num_layers)
    return Estimator.of(model, cluster, software=software, optimizer=optimizer).estimate(c)


@dataclass(frozen=True)
class Estimator:
    """The cost model of one model on one cluster, made once for many tables."""

    shape: ModelShape
    cluster: ClusterSpec
    figures: DeviceFigures
    software: SoftwareFigures
    optimizer: str
    links: LinkColumns

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        cluster: ClusterSpec,
        *,
        software: str = "default",
        optimizer: Literal["adamw", "sgd"] = "adamw",
    ) -> Self:
        """See ``estimate``.

        Raises:
            UserError: The cluster has no figures.
        """
        if cluster.figures is None or not cluster.links:
            raise UserError(
                f"the cost model knows nothing of the devices of cluster '{cluster.name}' ({cluster.device_kind})",
                hint="measure them with 'autotune profile', or name a device of the catalogue",
            )
        return cls(
            shape=ModelShape.of(model),
            cluster=cluster,
            figures=cluster.figures,
            software=software_figures(software),
            optimizer=optimizer,
            links=LinkColumns.of(cluster),
        )

    def estimate(self, c: PlanColumns) -> EstimateTable:
        """Time and memory of coded plans.

        Raises:
            UserError: The cluster has no figures for a precision of the table.
        """
        interval = self.software.interval_ratio or self.figures.interval_ratio
        step = self.step_time(c)
        seconds = np.sum(list(step.parts.values()), axis=0)
        held = self.memory(c)
        return EstimateTable(
            step_seconds=seconds,
            step_seconds_low=seconds / (1 + interval),
            step_seconds_high=seconds * (1 + interval),
            memory_bytes=held.memory_bytes,
            memory_bytes_low=held.low_bytes,
            memory_bytes_high=held.high_bytes,
            allocated_bytes=held.allocated_bytes,
            time=step.parts,
            hidden=step.hidden,
            memory=held.parts,
            fullest_stage=held.fullest_stage,
        )

    def step_time(self, c: PlanColumns) -> StepTime:
        """Time alone."""
        return step_time(self.scope(c), c)

    def memory(self, c: PlanColumns) -> MemoryTable:
        """Memory alone."""
        return memory(
            self.shape, c, recipe(self.software.memory_recipe),
            overhead_bytes=self.figures.overhead_gib * GIB,
            num_states=2 if self.optimizer == "adamw" else 1,
            fused_attention=self.software.fused_attention,
        )  # fmt: skip

    def scope(self, c: PlanColumns) -> Scope:
        """What the formulas of time take, for these plans."""
        precision = np.atleast_1d(c.precision)
        if (precision == precision[:1]).all():
            precision = precision[:1]  # figures of one row stand for all
        return Scope(
            shape=self.shape,
            device=DeviceColumns.of(self.figures, precision),
            software=SoftwareColumns.of(self.software),
            coefficients=coefficients(),
            links=self.links,
        )


def step_time(x: Scope, c: PlanColumns) -> StepTime:
    """Step time by part of coded plans, each row with the model, device and stack that ``x`` has for it."""
    work = compute_work(Basis(x.shape, x.device, x.software, x.coefficients, c))
    wire = communication(x.shape, x.links, c, element_bytes=x.device.element_bytes)
    return compose(x, c, work, wire)
