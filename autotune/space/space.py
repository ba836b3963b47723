"""A search space: its dimensions, what is fixed, and how chosen values become a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from autotune.space.expression import Expression
from autotune.space.objectives import Objective
from autotune.specs.cluster import ClusterSpec
from engine.config import CheckpointOptions, EvaluationOptions, RunConfig, RuntimeOptions
from engine.errors import RuleError, UserError
from engine.plan import MESH_FIELDS, Plan, PlanTable
from engine.rules import check_run
from engine.schema import Schema, parse
from engine.spec import Count, Hyperparameters, ModelSpec, Name, Positive, Workload

Scalar = str | int | float | bool | None
MESH = "plan.mesh"
"""Name of the dimension that stands for all parallel degrees at once (a mesh is one word, as in ``Plan.mesh``)."""


@dataclass(frozen=True)
class Dimension:
    """One searched value."""

    name: str
    """Dotted name, such as ``plan.micro_batch_size``."""
    kind: Literal["categorical", "int", "float", "log_float"]
    values: tuple[Scalar, ...] = ()
    """Choices of a categorical dimension."""
    low: float = 0.0
    """Least value of the other kinds."""
    high: float = 0.0
    """Greatest value, included."""
    step: int = 1
    """Step of an int dimension."""
    when: Expression | None = None
    """Searched only where this holds of the values chosen before; elsewhere the default is used."""

    def choices(self) -> tuple[Scalar, ...] | None:
        """All values of a discrete dimension; None for a continuous one."""
        if self.kind == "categorical":
            return self.values
        if self.kind == "int":
            return tuple(range(int(self.low), int(self.high) + 1, self.step))
        return None

    def contains(self, value: Scalar) -> bool:
        """Whether ``value`` is in the dimension."""
        choices = self.choices()
        if choices is not None:
            return any(type(value) is type(choice) and value == choice for choice in choices)
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def describe(self) -> str:
        """One line for people."""
        if self.kind == "categorical":
            text = ", ".join(map(str, self.values))
        elif self.kind == "int":
            text = f"{int(self.low)} to {int(self.high)}" + (f" in steps of {self.step}" if self.step > 1 else "")
        else:
            text = f"{self.low:g} to {self.high:g}" + (" (log)" if self.kind == "log_float" else "")
        return f"{text}, when {self.when.text}" if self.when else text


class Budget(Schema):
    """When a sweep ends; whichever comes first. Not part of the space: more of it extends the study."""

    trials: Count | None = None
    """Trials to run."""
    seconds: Positive | None = None
    """Wall time, written as ``time`` in a space file (``10m``)."""


class TrialLimits(Schema):
    """Limits of each trial."""

    seconds: Positive = 600.0
    """Wall time, written as ``time`` (``90s``)."""
    memory_bytes: Count | None = None
    """Resident memory of all its processes, written as ``memory`` (``4GiB``); null for its share of the machine."""
    heartbeat_seconds: Positive = 120.0
    """A trial without a step for so long hangs, written as ``heartbeat`` (``60s``)."""


@dataclass(frozen=True)
class Candidate:
    """Chosen values as a run, or why they are none."""

    run: RunConfig | None
    rule: str = ""
    """The rule that refused it; ``constraint`` for one of the space's own; ``value`` for a value out of bounds."""
    reason: str = ""
    """Message for people."""


@dataclass(frozen=True)
class Space:
    """What is searched, on which model, machines and data, for which objectives."""

    name: Name
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    objectives: tuple[Objective, ...]
    dimensions: tuple[Dimension, ...]
    """In the order they are chosen: conditions read only earlier ones. All parallel degrees are one, ``plan.mesh``."""
    fixed: dict[str, Any]
    """Dotted name -> value of everything else that the file sets in ``space``."""
    constraints: tuple[Expression, ...]
    meshes: dict[str, dict[str, int]]
    """Mesh word -> plan fields, of all meshes with at least one legal plan."""
    budget: Budget = Budget()
    limits: TrialLimits = TrialLimits()
    runtime: RuntimeOptions = RuntimeOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    data: dict[str, Any] = field(default_factory=dict)
    """The resolved file as plain data, without the budget: two studies with equal data search the same space."""
    notes: tuple[str, ...] = ()
    """What was rounded, for people."""

    def is_active(self, dimension: Dimension, chosen: Mapping[str, Any]) -> bool:
        """Whether ``dimension`` is searched, given the values chosen before it."""
        return dimension.when is None or bool(dimension.when(self.names(chosen)))

    def names(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Everything a condition can read: model, workload, devices, and plan and hyperparameters as chosen."""
        values = {f"model.{key}": value for key, value in self.model if isinstance(value, int | float | str | bool)}
        values |= {"workload.sequence_length": self.workload.sequence_length}
        values |= {"workload.total_tokens": self.workload.total_tokens, "devices": self.cluster.num_devices}
        values |= default_values() | self.fixed
        values |= {name: value for name, value in chosen.items() if name != MESH}
        if MESH in chosen:
            values |= {f"plan.{key}": value for key, value in self.meshes[str(chosen[MESH])].items()}
        return with_derived(values)

    def candidate(self, chosen: Mapping[str, Any]) -> Candidate:
        """The run of chosen values, or the rule or constraint that refuses them.

        Args:
            chosen: Dimension name -> value for every active dimension.
        """
        for dimension in self.dimensions:
            if dimension.name in chosen and not dimension.contains(chosen[dimension.name]):
                value = chosen[dimension.name]
                return Candidate(None, "value", f"{dimension.name} = {value!r} is not in {dimension.describe()}")
        values = self.names(chosen)
        for constraint in self.constraints:
            if not bool(constraint(values)):
                return Candidate(None, "constraint", f"does not hold: {constraint.text}")
        try:
            run = self._run(values)
            check_run(run, self.cluster.num_devices)
        except RuleError as error:
            return Candidate(None, error.rule, str(error))
        except UserError as error:
            return Candidate(None, "value", str(error))
        return Candidate(run)

    def _run(self, values: Mapping[str, Any]) -> RunConfig:
        def section(name: str, schema: type[Schema]) -> dict[str, Any]:
            return {key: values[f"{name}.{key}"] for key in schema.model_fields if f"{name}.{key}" in values}

        threads = self.cluster.threads_per_device
        return RunConfig(
            name=self.name,
            model=self.model,
            workload=self.workload,
            hyperparameters=parse(
                Hyperparameters, section("hyperparameters", Hyperparameters), path=("hyperparameters",)
            ),
            plan=parse(Plan, section("plan", Plan), path=("plan",)),
            runtime=self.runtime.changed(device=self.cluster.device, threads_per_rank=threads),
            evaluation=self.evaluation,
            checkpoint=CheckpointOptions(at_end=False, keep=1),
        )


def default_values() -> dict[str, Any]:
    """Dotted name -> default of every plan field and hyperparameter."""
    values = {f"plan.{key}": value for key, value in Plan()}
    return values | {f"hyperparameters.{key}": value for key, value in Hyperparameters()}


def with_derived(values: dict[str, Any]) -> dict[str, Any]:
    """Add ``plan.dp`` and ``plan.world_size`` (scalars or columns)."""
    values["plan.dp"] = values["plan.dp_replicate"] * values["plan.dp_shard"]
    values["plan.world_size"] = values["plan.tp"] * values["plan.pp"] * values["plan.cp"] * values["plan.dp"]
    return values


def mesh_word(fields: Mapping[str, int]) -> str:
    """``Plan.mesh`` of parallel degrees."""
    return parse(Plan, {key: fields[key] for key in MESH_FIELDS}).mesh


def as_columns(values: Mapping[str, Any], num_rows: int) -> PlanTable:
    """The plan table of dotted values: scalars become constant columns."""
    table = {}
    for key in Plan.model_fields:
        table[key] = column(values[f"plan.{key}"], num_rows)
    table["global_batch_size"] = column(values["hyperparameters.global_batch_size"], num_rows)
    table["sequence_length"] = column(values["workload.sequence_length"], num_rows)
    return table


def column(value: Any, num_rows: int) -> np.ndarray:
    """A column of ``num_rows`` equal values; a column stays as it is."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, tuple | list) or value is None:
        result = np.empty(num_rows, dtype=object)
        result[:] = [value] * num_rows
        return result
    return np.full(num_rows, value)


def choice_column(choices: tuple[Scalar, ...]) -> np.ndarray:
    """The choices of a dimension as a column; of objects where their types differ."""
    if len({type(choice) for choice in choices}) == 1 and isinstance(choices[0], int | float | str):
        return np.array(choices)
    result = np.empty(len(choices), dtype=object)
    result[:] = choices
    return result
