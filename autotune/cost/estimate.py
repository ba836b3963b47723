"""What the cost model says of candidates before they run: step time by part and memory by part, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np

from autotune.cost import distinct
from autotune.cost.coefficients import Coefficients, coefficients_on
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import Communication, LinkColumns, WireFacts, communication
from autotune.cost.compute import Basis, ComputeWork, compute_work
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.memory import MemoryTable, memory
from autotune.cost.memory_recipe import recipe
from autotune.cost.parts import HIDDEN_PARTS, MEMORY_PARTS, TIME_PARTS, Method
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_on, time_interval, time_interval_ratio
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
    """With ``step_seconds_low`` an interval that held four in five of the runs that fits of the figures never saw."""
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

    @classmethod
    def of_nothing(cls) -> Self:
        """Estimates of no candidates."""
        none = np.zeros(0)
        time, hidden, memory = (dict.fromkeys(names, none) for names in (TIME_PARTS, HIDDEN_PARTS, MEMORY_PARTS))
        return cls(none, none, none, none, none, none, none, time, hidden, memory, none.astype(np.int64))


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
    coefficients: Coefficients

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
            software=software_on(cluster, software),
            optimizer=optimizer,
            links=LinkColumns.of(cluster),
            coefficients=coefficients_on(cluster),
        )

    def estimate(
        self, c: PlanColumns, *, same_work: Distinct | None = None, same_memory: Distinct | None = None
    ) -> EstimateTable:
        """Time and memory of coded plans.

        Args:
            c: ``n`` plans.
            same_work: See ``step_time``.
            same_memory: Distinct plans as far as memory goes; all may differ where it is None.

        Raises:
            UserError: The cluster has no figures for a precision of the table.
        """
        step = self.step_time(c, same_work=same_work)
        seconds = np.sum(list(step.parts.values()), axis=0)
        low, high = time_interval(seconds, time_interval_ratio(self.software, self.figures))
        held = self.memory(c) if same_memory is None else _taken(self.memory(same_memory.plans), same_memory.of_row)
        return EstimateTable(
            step_seconds=seconds,
            step_seconds_low=low,
            step_seconds_high=high,
            memory_bytes=held.memory_bytes,
            memory_bytes_low=held.low_bytes,
            memory_bytes_high=held.high_bytes,
            allocated_bytes=held.allocated_bytes,
            time=step.parts,
            hidden=step.hidden,
            memory=held.parts,
            fullest_stage=held.fullest_stage,
        )

    def step_time(self, c: PlanColumns, *, same_work: Distinct | None = None) -> StepTime:
        """Time alone.

        Args:
            c: ``n`` plans.
            same_work: Distinct plans as far as blocks and collectives go. What differs beside them is recompute,
                overlap and offload, which decide how work is put together. All may differ where it is None.
        """
        if same_work is None:
            return step_time(self.scope(c), c)
        work, wire = work_and_wire(self.scope(same_work.plans), same_work.plans)
        seconds = {f.name: getattr(wire, f.name) for f in fields(wire) if not f.name.endswith("_bytes")}
        none = {f.name: 0.0 for f in fields(wire) if f.name.endswith("_bytes")}
        taken = Communication(**{name: values[same_work.of_row] for name, values in seconds.items()}, **none)
        return compose(self.scope(c), c, _taken(work, same_work.of_row), taken)

    def memory(self, c: PlanColumns) -> MemoryTable:
        """Memory alone."""
        return memory(
            self.shape, c, recipe(self.software.memory_recipe, self.cluster.device),
            overhead_bytes=self.figures.overhead_gib * GIB,
            num_states=2 if self.optimizer == "adamw" else 1,
            fused_attention=self.software.fused_attention,
            imbalance_ratio=self.software.imbalance_ratio,
        )  # fmt: skip

    def scope(self, c: PlanColumns) -> Scope:
        """What the formulas of time take, for these plans."""
        precision = np.atleast_1d(c.precision)
        if len(precision) and (precision == precision[0]).all():
            precision = precision[0]  # one figure stands for all rows
        return Scope(
            shape=self.shape,
            device=DeviceColumns.of(self.figures, precision),
            software=SoftwareColumns.of(self.software),
            coefficients=self.coefficients,
            links=self.links,
        )


@dataclass(frozen=True)
class Distinct:
    """The distinct ones among ``n`` plans, as far as something goes."""

    plans: PlanColumns
    """``k`` plans."""
    of_row: np.ndarray
    """``[n]``: which of them each plan is like."""


def step_time(x: Scope, c: PlanColumns) -> StepTime:
    """Step time by part of coded plans, each row with the model, device and stack that ``x`` has for it."""
    return compose(x, c, *work_and_wire(x, c))


def work_and_wire(x: Scope, c: PlanColumns) -> tuple[ComputeWork, Communication]:
    """Work of single blocks, and seconds of single collectives, of coded plans."""
    work = _once_per_block(x, c)
    wire = communication(
        x.shape,
        x.links,
        c,
        element_bytes=x.device.element_bytes,
        facts=WireFacts.of(x.software),
        imbalance_ratio=x.software.imbalance_ratio,
    )
    return work, wire


_BLOCK_KEY = (
    "tp", "cp", "ep", "etp", "micro_batch_size", "sequence_length", "sequence_parallel", "vocab_parallel", "precision",
)  # fmt: skip
"""What the work of a block depends on."""


def _once_per_block(x: Scope, c: PlanColumns) -> ComputeWork:
    """Work of single blocks, computed for the distinct ones where all rows have one model, device and stack."""
    figures = (figure for part in (x.shape, x.device, x.software) for figure in vars(part).values())
    if any(np.ndim(figure) for figure in figures) or not len(c):
        return compute_work(Basis(x.shape, x.device, x.software, x.coefficients, c))
    columns = {name: np.broadcast_to(getattr(c, name), len(c)) for name in _BLOCK_KEY}
    first, kind = distinct.Columns(columns).distinct(_BLOCK_KEY)
    work = compute_work(Basis(x.shape, x.device, x.software, x.coefficients, c.take(first)))
    return _taken(work, np.broadcast_to(kind, (len(c),)))


T = TypeVar("T")


def _taken(value: T, rows: np.ndarray) -> T:
    """Rows of all arrays in nested tuples, mappings and dataclasses; numbers and arrays of one row stand for all."""
    result: Any = value
    if isinstance(value, np.ndarray):
        if value.ndim:
            result = value[rows] if len(value) > 1 else np.broadcast_to(value, rows.shape)
    elif isinstance(value, tuple):
        result = type(value)(*(_taken(part, rows) for part in value))  # a NamedTuple
    elif isinstance(value, Mapping):
        result = {key: _taken(part, rows) for key, part in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(cast(Any, value), **{f.name: _taken(getattr(value, f.name), rows) for f in fields(value)})
    return cast(T, result)
