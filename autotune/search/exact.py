"""The exact search over plans: every legal plan of a space is estimated, or shown to be worse by a bound.

A space is cut into parts of its degrees. Each part becomes blocks (``blocks``), whose plans are estimated in chunks; an
archive keeps the Pareto front and the best rows (``archive``). Parts are independent, so that processes share them and
the result is the same however many there are.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autotune.cost.columns import PlanColumns, encode
from autotune.cost.estimate import EstimateTable, estimate
from autotune.search.archive import Best, Front
from autotune.search.blocks import Counts, Expander, plan_at
from autotune.search.plan_objectives import (
    PlanObjective,
    Prices,
    check_objectives,
    objective_costs,
    objective_values,
)
from autotune.search.plan_space import PlanSpace
from autotune.specs.cluster import ClusterSpec
from engine.plan import MESH_FIELDS, Plan, plan_table
from engine.rule import RuleContext, Scope
from engine.rules import violations
from engine.spec import ModelSpec

CHUNK_ROWS = 2**15
"""Rows that are estimated at once; their intermediate arrays stay in the processor's caches."""
ROWS_PER_PROCESS = 2**18
"""A second process is started for so many combinations that rules don't remove."""

Progress = Callable[[float], None]
"""Told the share of the search that is done, 0 to 1. What it raises ends the search."""


@dataclass
class SearchCounts(Counts):
    """What became of every combination: redundant, removed by a rule, pruned or evaluated."""

    pruned: int = 0
    """Legal plans that a bound shows to be dominated."""
    pruned_by_memory: int = 0
    """Legal plans that a bound shows not to fit."""
    evaluated: int = 0
    """Legal plans estimated."""
    evaluated_not_fitting: int = 0
    """Of those, plans that don't fit."""

    @property
    def legal(self) -> int:
        """Plans that no rule refuses."""
        return self.pruned + self.pruned_by_memory + self.evaluated

    @property
    def not_fitting(self) -> int:
        """Legal plans known not to fit."""
        return self.pruned_by_memory + self.evaluated_not_fitting

    def merge(self, other: Counts) -> None:
        """Add the counts of another part."""
        super().merge(other)
        if isinstance(other, SearchCounts):
            self.pruned += other.pruned
            self.pruned_by_memory += other.pruned_by_memory
            self.evaluated += other.evaluated
            self.evaluated_not_fitting += other.evaluated_not_fitting


@dataclass(frozen=True)
class PlanRows:
    """Some plans with their estimates."""

    plans: tuple[Plan, ...]
    global_batch_sizes: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    columns: PlanColumns
    estimates: EstimateTable
    values: np.ndarray
    """``[n, k]`` objectives, in their units."""
    not_built: tuple[tuple[str, ...], ...]
    """Rules by which our engine would refuse each plan; empty where it runs it."""

    def __len__(self) -> int:
        return len(self.plans)


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search."""

    objectives: tuple[PlanObjective, ...]
    front: PlanRows
    """Every point that no plan dominates, one plan for each; sorted by the first objective."""
    top: Mapping[PlanObjective, PlanRows]
    """By objective: the best plans that fit, best first, one for each distinct mesh (see ``distinct``)."""
    counts: SearchCounts
    max_memory_bytes: int
    closest: PlanRows
    """Where nothing fits: legal plans with the least memory, one for each distinct mesh. Else empty."""
    num_devices: int

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return len(self.front) > 0


@dataclass(frozen=True)
class Job:
    """All that a part of a search depends on; sent to the processes that work on it."""

    model: ModelSpec
    cluster: ClusterSpec
    space: PlanSpace
    objectives: tuple[PlanObjective, ...]
    max_memory_bytes: int
    top: int
    distinct: tuple[str, ...]
    software: str
    optimizer: Literal["adamw", "sgd"]
    prices: Prices
    chunk_rows: int

    @functools.cached_property
    def expander(self) -> Expander:
        """Makes the blocks of the space."""
        return Expander(self.space, RuleContext(self.model, self.cluster.num_devices))

    def estimate(self, columns: PlanColumns) -> EstimateTable:
        """Estimates of plans."""
        return estimate(self.model, self.cluster, columns, software=self.software, optimizer=self.optimizer)


@dataclass
class Archive:
    """What is kept of the rows seen."""

    front: Front
    best: dict[PlanObjective, Best]
    least_memory: Best
    """Of plans that don't fit, while none is known that does."""

    @classmethod
    def empty(cls, job: Job) -> Archive:
        """An archive that has seen nothing."""
        keys = functools.partial(job.expander.keys, fields=job.distinct)
        best = {name: Best(job.top, i, keys) for i, name in enumerate(job.objectives)}
        return cls(Front(len(job.objectives)), best, Best(job.top, 0, keys))

    def add(self, costs: np.ndarray, numbers: np.ndarray) -> None:
        """See rows that fit."""
        self.front.add(costs, numbers)
        for best in self.best.values():
            best.add(costs, numbers)

    def merge(self, other: Archive) -> None:
        """See what another archive kept."""
        self.front.add(other.front.costs, other.front.numbers)
        for name, best in other.best.items():
            if len(best.numbers):
                self.best[name].add(best.costs, best.numbers)
        if len(other.least_memory.numbers):
            self.least_memory.add(other.least_memory.costs, other.least_memory.numbers)


@dataclass
class PartResult:
    """A part of the space, searched."""

    archive: Archive
    counts: SearchCounts = field(default_factory=SearchCounts)


def search(
    model: ModelSpec,
    cluster: ClusterSpec,
    space: PlanSpace,
    *,
    objectives: Sequence[str] = ("step_time", "memory"),
    max_memory_bytes: int | None = None,
    top: int = 10,
    distinct: Sequence[str] = MESH_FIELDS,
    software: str = "default",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    prices: Prices | None = None,
    num_processes: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress | None = None,
) -> SearchResult:
    """The exact Pareto front of a space, and its best plans by each objective.

    Args:
        model: The architecture.
        cluster: The machines.
        space: The plans, as made by ``plan_space``.
        objectives: Names of ``OBJECTIVES``.
        max_memory_bytes: A plan fits where the high end of its memory estimate is within this; by default the
            device's memory.
        top: Plans kept for each objective.
        distinct: Fields in which the kept plans must differ; none keeps near-twins too.
        software: Training stack, a name in ``software.yaml``.
        optimizer: Optimizer, for its states.
        prices: For the objectives cost and energy.
        num_processes: Processes that share the work; by default one for each usable core where the space is large.
        chunk_rows: Plans estimated at once.
        progress: Called between chunks of work in this process.

    Raises:
        UserError: Objectives that can't be computed; a cluster without figures.
    """
    prices = prices or Prices()
    job = Job(
        model=model,
        cluster=cluster,
        space=space,
        objectives=check_objectives(objectives, prices),
        max_memory_bytes=max_memory_bytes or cluster.memory_bytes,
        top=top,
        distinct=tuple(distinct),
        software=software,
        optimizer=optimizer,
        prices=prices,
        chunk_rows=chunk_rows,
    )
    total = PartResult(Archive.empty(job))
    parts = job.expander.parts()
    processes = num_processes or _useful_processes(space, len(parts))
    for done, part in enumerate(_map(functools.partial(_search_part, job), parts, processes), start=1):
        total.archive.merge(part.archive)
        total.counts.merge(part.counts)
        if progress:
            progress(done / len(parts))
    return _result(job, total)


def _search_part(job: Job, part: slice) -> PartResult:
    """Estimate the legal plans of some degrees."""
    result = PartResult(Archive.empty(job))
    blocks = job.expander.blocks(part)
    result.counts.merge(blocks.counts)
    for columns, numbers in blocks.chunks(np.arange(len(blocks)), job.chunk_rows):
        _evaluate(job, result, columns, numbers)
    return result


def _evaluate(job: Job, result: PartResult, columns: PlanColumns, numbers: np.ndarray) -> None:
    table = job.estimate(columns)
    fits = table.memory_bytes_high <= job.max_memory_bytes
    result.counts.evaluated += len(numbers)
    result.counts.evaluated_not_fitting += len(numbers) - int(np.count_nonzero(fits))
    costs = objective_costs(job.objectives, table, columns, job.prices)
    if fits.any():
        result.archive.add(costs[fits], numbers[fits])
    elif not len(result.archive.front.numbers):
        result.archive.least_memory.add(table.memory_bytes_high[:, None], numbers)


def _useful_processes(space: PlanSpace, num_parts: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, num_parts, space.num_combinations // ROWS_PER_PROCESS))


def _map(work: Callable[[slice], PartResult], parts: Sequence[slice], num_processes: int) -> Iterator[PartResult]:
    """The results of all parts, in their order."""
    if num_processes == 1:
        yield from map(work, parts)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(num_processes, mp_context=context)
    try:
        yield from pool.map(work, parts)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(job: Job, total: PartResult) -> SearchResult:
    archive = total.archive
    nothing = not len(archive.front.numbers)
    return SearchResult(
        objectives=job.objectives,
        front=_rows(job, archive.front.numbers),
        top={name: _rows(job, best.numbers) for name, best in archive.best.items()},
        counts=total.counts,
        max_memory_bytes=job.max_memory_bytes,
        closest=_rows(job, archive.least_memory.numbers if nothing else np.empty(0, dtype=np.int64)),
        num_devices=job.cluster.num_devices,
    )


def _rows(job: Job, numbers: np.ndarray) -> PlanRows:
    """Plans by their numbers."""
    columns = job.expander.columns(numbers)
    rows = [plan_at(columns, row, job.model.num_layers) for row in range(len(numbers))]
    return plan_rows(job, rows)


def plan_rows(job: Job, rows: Sequence[tuple[Plan, int, int]]) -> PlanRows:
    """Plans with their batches and sequence lengths, estimated."""
    table = plan_table(rows)
    columns = encode(table, job.model.num_layers)
    estimates = job.estimate(columns)
    broken: list[tuple[str, ...]] = [()] * len(rows)
    if rows:
        scopes: tuple[Scope, ...] = ("engine",)
        flags = violations(RuleContext(job.model, job.cluster.num_devices), table, scopes)
        broken = [tuple(rule for rule, wrong in flags.items() if wrong[row]) for row in range(len(rows))]
    return PlanRows(
        plans=tuple(plan for plan, _, _ in rows),
        global_batch_sizes=tuple(batch for _, batch, _ in rows),
        sequence_lengths=tuple(length for _, _, length in rows),
        columns=columns,
        estimates=estimates,
        values=objective_values(job.objectives, estimates, columns, job.prices),
        not_built=tuple(broken),
    )
