"""Published runs: a table of measured training runs, each row read as a model, machines, a plan and what was measured.

Tables are read leniently. What a row doesn't say is completed and noted as an assumption; a row that can't be priced is
skipped with its reason. Neither is silent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from autotune.cost.columns import PlanColumns, encode
from autotune.cost.published_cells import Row, read_rows
from autotune.cost.published_model import Assumptions, Unreadable, model_of
from autotune.cost.published_plan import cluster_of, degrees_of, plan_of, recipe_of
from autotune.cost.published_source import MemoryKind, family_of, memory_kind_of, memory_unit_of, stack_of
from autotune.specs.cluster import ClusterSpec
from engine.errors import UserError
from engine.plan import Plan, plan_table
from engine.rule import RuleContext, Scope
from engine.rules import explain_row, violations
from engine.spec import ModelSpec

T = TypeVar("T")

_SCOPES: tuple[Scope, ...] = ("universal",)

_FAMILY_NAME = re.compile(r"[a-z]+(?:-[a-z]{2,})*")

UNPRICED_WORKLOADS = ("lora",)
"""Kinds of training that do less than a whole forward and backward pass with an update of every parameter."""


@dataclass(frozen=True)
class PublishedRun:
    """One measured run."""

    id: str
    source: str
    family: str
    """Publisher or repository."""
    model_name: str
    model: ModelSpec
    device: str
    """The device as the table writes it."""
    cluster: ClusterSpec
    plan: Plan
    global_batch_size: int
    sequence_length: int
    software: str
    """Training stack, a name of ``published_source.STACKS``."""
    precision: str
    """The precision as the table writes it."""
    recipe: str
    """Recipe of a low precision: ``fp8``, ``fp8-rowwise``, ``mxfp8``, ``nvfp4``; empty for the others."""
    optimizer: Literal["adamw", "sgd"]
    step_seconds: float | None
    memory_gb: float | None
    """Memory of the fullest device, 10^9 bytes."""
    memory_kind: MemoryKind | None
    workload: str
    outcome: Literal["ok", "oom"]
    tier: str
    assumptions: tuple[str, ...]
    """Every unknown cell that was completed, with the value."""
    fold: str = ""
    """Runs of one fold are held out together: those of one family, model and device, and all with equal inputs."""

    @property
    def timed(self) -> bool:
        """Whether its step time is one that estimates are judged by."""
        return self.workload == "pretrain" and self.outcome == "ok" and self.step_seconds is not None

    @property
    def inputs(self) -> tuple[Hashable, ...]:
        """What is known of the run before it starts, apart from who ran it with which software."""
        return (
            _shape(self.model), self.device, self.cluster.num_devices, self.sequence_length, self.global_batch_size,
            self.plan.tp, self.plan.pp, self.plan.cp, self.plan.dp, self.plan.ep, self.plan.virtual_stages,
            self.plan.micro_batch_size, self.plan.precision,
        )  # fmt: skip

    @property
    def model_family(self) -> str:
        """The name of the model without its size and version."""
        name = _FAMILY_NAME.match(self.model_name.lower().replace("_", "-"))
        return name[0] if name else "other"

    @property
    def ranking_group(self) -> tuple[Hashable, ...]:
        """Runs with the same value differ in their plan alone."""
        return (
            self.source, self.model_name, self.device, self.cluster.num_devices, self.sequence_length,
            self.global_batch_size, self.precision,
        )  # fmt: skip


@dataclass(frozen=True)
class SkippedRun:
    """A row that is not priced, and why."""

    id: str
    tier: str
    reason: str


@dataclass(frozen=True)
class PublishedRuns:
    """A table of runs, as read."""

    runs: tuple[PublishedRun, ...]
    skipped: tuple[SkippedRun, ...]
    unknown_columns: tuple[str, ...]
    """Columns of the file that are not read."""


@dataclass(frozen=True)
class RunColumns:
    """Runs in the form that the formulas take."""

    models: tuple[ModelSpec, ...]
    """Distinct models."""
    model_index: np.ndarray
    """``[n]``: which of them each run trains."""
    clusters: tuple[ClusterSpec, ...]
    """Distinct clusters."""
    cluster_index: np.ndarray
    """``[n]``."""
    software: tuple[str, ...]
    """Distinct stacks."""
    software_index: np.ndarray
    """``[n]``."""
    plans: PlanColumns
    """``n`` plans with their batches."""


def columns(runs: Sequence[PublishedRun]) -> RunColumns:
    """Columns of runs of any models and clusters, for one evaluation of all."""
    models, model_index = _distinct([run.model for run in runs])
    clusters, cluster_index = _distinct([run.cluster for run in runs])
    software, software_index = _distinct([run.software for run in runs])
    table = plan_table((run.plan, run.global_batch_size, run.sequence_length) for run in runs)
    num_layers = np.array([run.model.num_layers for run in runs], dtype=np.int64)
    plans = encode(table, num_layers)
    return RunColumns(models, model_index, clusters, cluster_index, software, software_index, plans)


def read_runs(path: str | Path) -> PublishedRuns:
    """Read a table of measured runs.

    Args:
        path: CSV file; its columns are those of ``published_cells.COLUMNS``, of which many may be missing.

    Raises:
        UserError: The file is not such a table.
    """
    rows, unknown_columns = read_rows(path)
    runs: list[PublishedRun] = []
    skipped: list[SkippedRun] = []
    models: dict[tuple[Hashable, ...], ModelSpec] = {}
    for row in rows:
        name = row.word("id") or f"line-{row.line}"
        try:
            runs.append(_run(row, name, models))
        except Unreadable as error:
            skipped.append(SkippedRun(name, row.word("tier"), str(error)))
    legal, broken = _without_violations(runs)
    skipped += broken
    if not rows:
        raise UserError(f"{path} has no rows", hint="add one row for each measured run")
    return PublishedRuns(tuple(_with_folds(legal)), tuple(skipped), tuple(unknown_columns))


def _run(row: Row, name: str, models: dict[tuple[Hashable, ...], ModelSpec]) -> PublishedRun:
    if row.problems:
        raise Unreadable("; ".join(row.problems))
    assumptions = Assumptions()
    workload, outcome = _workload(row, assumptions), _outcome(row, assumptions)
    if workload in UNPRICED_WORKLOADS:
        raise Unreadable(f"workload {workload}: only training of all parameters is priced")
    sequence_length, batch = row.count("seq_len"), row.count("global_batch")
    if sequence_length is None or batch is None:
        raise Unreadable("seq_len unknown" if sequence_length is None else "global_batch unknown")
    source, address, remarks = row.word("source"), row.word("url_or_repo_path"), row.word("notes")
    stack = stack_of(source, address, remarks, row.count("year") or 0)
    model = model_of(row, assumptions)
    model = models.setdefault((model.name, _shape(model), model.max_positions), model)
    *_, num_devices = degrees_of(row, assumptions)
    cluster = cluster_of(row, num_devices, assumptions)
    plan = plan_of(row, model, cluster, stack, assumptions)
    if other := _other_optimizer(remarks):
        assumptions.add(f"optimizer {other}: priced as adamw")
    memory = row.figure("memory_gb_per_gpu")
    kind = memory_kind_of(source, address, remarks) if memory else None
    if memory and (unit := memory_unit_of(source, remarks)) != 1:
        memory *= unit
        assumptions.add("memory printed in GB by a program that counts GiB: taken as GiB")
    if memory and kind is None:
        assumptions.add("what memory_gb_per_gpu counts is unknown: taken as what the allocator reserved")
    return PublishedRun(
        id=name,
        source=source,
        family=family_of(source, address),
        model_name=row.word("model_name") or model.name,
        model=model,
        device=row.word("gpu"),
        cluster=cluster,
        plan=plan,
        global_batch_size=batch,
        sequence_length=sequence_length,
        software=stack.name,
        precision=row.word("precision"),
        recipe=recipe_of(row),
        optimizer="adamw",
        step_seconds=_step_seconds(row, batch * sequence_length, num_devices) if outcome == "ok" else None,
        memory_gb=memory,
        memory_kind=kind,
        workload=workload,
        outcome=outcome,
        tier=row.word("tier"),
        assumptions=tuple(assumptions.texts),
    )


def _workload(row: Row, assumptions: Assumptions) -> str:
    workload = row.word("workload").lower()
    if not workload:
        assumptions.add("workload unknown: pretrain")
    return workload or "pretrain"


def _outcome(row: Row, assumptions: Assumptions) -> Literal["ok", "oom"]:
    word = row.word("outcome").lower()
    if not word:
        word = "oom" if row.word("measured_metric").lower() == "oom" else "ok"
        assumptions.add(f"outcome unknown: {word}")
    if word in ("ok", "success"):
        return "ok"
    if word in ("oom", "out of memory", "out_of_memory"):
        return "oom"
    raise Unreadable(f"outcome {word!r} is neither ok nor oom")


def _other_optimizer(remarks: str) -> str:
    return next((name for name in ("Muon", "LAMB", "Adafactor", "Lion", "SGD") if name.lower() in remarks.lower()), "")


def _step_seconds(row: Row, tokens: int, num_devices: int) -> float | None:
    """Measured time of a step, from time or tokens alone, never from printed TFLOP/s."""
    stated = row.figure("step_time_s_equiv")
    if stated is not None:
        return stated
    metric, value = row.word("measured_metric").lower(), row.figure("measured_value")
    if metric == "step_time_s" and value:
        return value
    rate = row.figure("tokens_per_s_per_gpu_equiv") or (value if metric == "tokens_per_s_per_gpu" else None)
    return tokens / (rate * num_devices) if rate else None


def _without_violations(runs: list[PublishedRun]) -> tuple[list[PublishedRun], list[SkippedRun]]:
    """Runs that keep every universal rule, and those that don't with the first broken rule's message."""
    by_model: dict[int, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        by_model[id(run.model)].append(index)
    reasons: dict[int, str] = {}
    for indices in by_model.values():
        members = [runs[index] for index in indices]
        context = RuleContext(members[0].model)
        table = plan_table((run.plan, run.global_batch_size, run.sequence_length) for run in members)
        broken = violations(context, table, _SCOPES)
        for rule_id, flags in broken.items():
            for position in np.flatnonzero(flags):
                index = indices[position]
                if index not in reasons:
                    message, _ = explain_row(rule_id, context, table, int(position))
                    reasons[index] = f"{message} [{rule_id}]"
    skipped = [SkippedRun(runs[index].id, runs[index].tier, reasons[index]) for index in sorted(reasons)]
    return [run for index, run in enumerate(runs) if index not in reasons], skipped


def _shape(model: ModelSpec) -> tuple[Hashable, ...]:
    """What tells architectures apart, names aside."""
    moe = model.moe
    return (
        model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_size, model.vocab_size,
        model.mlp, (moe.num_experts, moe.experts_per_token, moe.ffn_size, moe.shared_ffn_size) if moe else None,
    )  # fmt: skip


def _with_folds(runs: list[PublishedRun]) -> Iterable[PublishedRun]:
    """Runs with the key of their fold: the components of sharing a family, model and device, or all inputs."""
    parent = list(range(len(runs)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[Hashable, int] = {}
    for index, run in enumerate(runs):
        for key in (
            ("name", run.family, run.model_name, run.device),
            ("shape", run.family, _shape(run.model), run.device),
            ("inputs", *run.inputs),
        ):
            other = first.setdefault(key, index)
            parent[root(index)] = root(other)
    names: dict[int, str] = {}
    for index, run in enumerate(runs):
        names.setdefault(root(index), f"{run.family} / {run.model_name} / {run.device}")
    return [replace(run, fold=names[root(index)]) for index, run in enumerate(runs)]


def _distinct(values: Sequence[T]) -> tuple[tuple[T, ...], np.ndarray]:
    """Distinct values by identity, which the reader keeps for equal models and clusters, and each one's index."""
    positions: dict[int, int] = {}
    distinct: list[T] = []
    index = np.zeros(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if id(value) not in positions:
            positions[id(value)] = len(distinct)
            distinct.append(value)
        index[row] = positions[id(value)]
    return tuple(distinct), index
