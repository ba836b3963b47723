"""The space of a training sweep: plans and hyperparameters of one model on given machines and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.space.space import Candidate, Scalar, Space, hash_of
from autotune.specs.cluster import ClusterSpec
from engine.config import CheckpointOptions, EvaluationOptions, RunConfig, RuntimeOptions
from engine.errors import RuleError, UserError
from engine.outcome import Outcome
from engine.plan import MESH_FIELDS, Plan, PlanTable
from engine.rules import check_run
from engine.schema import Schema, parse
from engine.spec import Hyperparameters, ModelSpec, Workload

MESH = "plan.mesh"
"""Name of the dimension that stands for all parallel degrees at once (a mesh is one word, as in ``Plan.mesh``)."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpace(Space):
    """Runs of the engine: what is searched, on which model, machines and data. Names are dotted, such as
    ``plan.micro_batch_size``; all parallel degrees are one dimension, ``plan.mesh``."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    meshes: dict[str, dict[str, int]]
    """Mesh word -> plan fields, of all meshes with at least one legal plan."""
    runtime: RuntimeOptions = RuntimeOptions()
    evaluation: EvaluationOptions = EvaluationOptions()

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

    def base_run(self) -> RunConfig:
        """The run of what is fixed, and of the defaults of what is searched: the recipe that candidates vary."""
        return self._run(self.names({}))

    def completed(self, outcome: Outcome, run: RunConfig | None) -> Outcome:
        """An outcome with what its speed costs: money and energy per token, where the machines' figures are known."""
        if run is None or not outcome.tokens_per_second:
            return outcome
        costs = self.running_costs(run.plan.world_size, outcome.tokens_per_second)
        return outcome.changed(metrics={**outcome.metrics, **costs})

    def running_costs(self, num_devices: Any, tokens_per_second: Any) -> dict[str, Any]:
        """Objective name -> dollars (``cost``) and kWh (``energy``) per 10^9 tokens, for the figures that the cluster
        has. Devices count at the power they are limited to.

        Args:
            num_devices: Devices in use: a number, or an array ``[n]``.
            tokens_per_second: Likewise.
        """
        device_hours = 1e9 * num_devices / tokens_per_second / 3600
        costs = {}
        if self.cluster.dollars_per_device_hour is not None:
            costs["cost"] = device_hours * self.cluster.dollars_per_device_hour
        if self.cluster.watts is not None:
            costs["energy"] = device_hours * self.cluster.watts / 1000
        return costs

    def _candidate(self, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> Candidate:
        try:
            run = self._run(values)
            check_run(run, self.cluster.num_devices)
        except RuleError as error:
            return Candidate(rule=error.rule, reason=str(error))
        except UserError as error:
            return Candidate(rule="value", reason=str(error))
        key = hash_of({name: getattr(run, name).to_data() for name in ("plan", "hyperparameters")})
        return Candidate(run, key=key, label=run.plan.describe())

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


def devices_of(table: PlanTable) -> np.ndarray:
    """Devices that each plan of a table uses, ``[n]``."""
    devices: np.ndarray = table["tp"] * table["pp"] * table["cp"] * table["dp_replicate"] * table["dp_shard"]
    return devices


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
