"""The exact search over plans: every legal plan of a space is estimated, or shown to be worse by a bound.

A space is cut into parts of its degrees. Each part becomes blocks (``blocks``), whose plans are estimated in chunks; an
archive keeps the Pareto front and the best rows (``archive``). Parts are independent, so that processes share them and
the result is the same however many there are.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np

from autotune.cost.columns import PlanColumns, encode
from autotune.cost.estimate import Distinct, EstimateTable, Estimator
from autotune.search.archive import Best, Front, first_of_equals, non_dominated
from autotune.search.blocks import Blocks, Chunk, Counts, Expander, Part, plan_at
from autotune.search.bounds import MemoryBounds, least_seconds, memory_bounds, time_bounds, without_recompute
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

EXACT_COMBINATIONS = 20_000_000_000
"""Spaces of more combinations are searched to within ``LARGE_TOLERANCE`` by default."""
LARGE_TOLERANCE = 0.01
CHUNK_ROWS = 2**15
"""Rows that are estimated at once; their intermediate arrays stay in the processor's caches."""
MAX_LAYERS = 64
"""Layers of blocks that are told apart by how good their bounds are."""
PIECES_OF_CHUNKS = 4
"""Chunks' worth of plans of the other blocks that are estimated before it is asked again which blocks are of use."""

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
    not_searched: int = 0
    """Combinations that there was no time for; they are not among ``combinations``."""

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
            self.not_searched += other.not_searched


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
    gaps: Mapping[PlanObjective, float]
    """By objective: the best found may be worse than the best possible by this ratio at most; 0 where it is the best
    possible, infinite where the search was ended early and nothing is known of the rest."""

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
    max_memory_bytes: float
    top: int
    distinct: tuple[str, ...]
    software: str
    optimizer: Literal["adamw", "sgd"]
    prices: Prices
    chunk_rows: int
    prune: bool
    tolerance: float

    @functools.cached_property
    def expander(self) -> Expander:
        """Makes the blocks of the space."""
        return Expander(self.space, RuleContext(self.model, self.cluster.num_devices))

    @functools.cached_property
    def estimator(self) -> Estimator:
        """The cost model."""
        return Estimator.of(self.model, self.cluster, software=self.software, optimizer=self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def costs(self, seconds: np.ndarray, memory: np.ndarray, columns: PlanColumns) -> np.ndarray:
        """``[n, k]`` costs of plans."""
        return objective_costs(self.objectives, seconds, memory, columns, self.prices)


@dataclass(frozen=True)
class Archive:
    """What is kept of the rows seen."""

    front: Front
    best: dict[PlanObjective, Best]

    @classmethod
    def empty(cls, job: Job) -> Archive:
        """An archive that has seen nothing."""
        return cls(Front(len(job.objectives)), {name: Best(job.top, i) for i, name in enumerate(job.objectives)})

    def add(self, job: Job, costs: np.ndarray, numbers: np.ndarray) -> None:
        """See rows that fit."""
        self.front.add(costs, numbers)
        for best in self.best.values():
            best.add(costs, numbers, functools.partial(job.expander.keys, fields=job.distinct))

    def merge(self, job: Job, other: Archive) -> None:
        """See what another archive kept."""
        keys = functools.partial(job.expander.keys, fields=job.distinct)
        self.front.add(other.front.costs, other.front.numbers)
        for name, best in other.best.items():
            if len(best.numbers):
                self.best[name].add(best.costs, best.numbers, keys)

    def has_no_use_for(self, bounds: np.ndarray) -> np.ndarray:
        """``[n]`` bools: rows with costs of at least ``bounds`` ``[n, k]`` would change nothing."""
        useless = self.front.dominates(bounds)
        for best in self.best.values():
            useless &= bounds[:, best.column] > best.limit
        return useless


@dataclass
class PartResult:
    """A part of the space, searched."""

    archive: Archive
    counts: SearchCounts = field(default_factory=SearchCounts)
    bounds_hold: bool = True
    """No plan was better than its block's bounds."""

    def merge(self, job: Job, other: PartResult) -> None:
        """Add another part."""
        self.archive.merge(job, other.archive)
        self.counts.merge(other.counts)
        self.bounds_hold &= other.bounds_hold


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
    prune: bool = True,
    tolerance: float | None = None,
    max_seconds: float | None = None,
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
        prune: Whether blocks of plans that a bound shows to be of no use are left out. The answer is the same.
        tolerance: A block is left out too where it could better what is known by no more than this ratio; by default 0,
            an exact search, up to ``EXACT_COMBINATIONS``, and ``LARGE_TOLERANCE`` beyond. See ``SearchResult.gaps``.
        max_seconds: The search ends after about so long, with what it found and how much better the rest could be.
        progress: Told the share that is done.

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
        prune=prune,
        tolerance=_tolerance(space) if tolerance is None else tolerance,
    )
    processes = num_processes or _usable_cores()
    deadline = np.inf if max_seconds is None else time.monotonic() + max_seconds
    found = _run(job, processes, progress, deadline)
    least = Archive.empty(job)
    if not len(found.archive.front.numbers) and found.counts.legal:
        smallest = replace(job, objectives=("memory",), max_memory_bytes=np.inf)
        least = _run(smallest, processes, progress, deadline).archive
    return _result(job, found, least)


def _tolerance(space: PlanSpace) -> float:
    return 0.0 if space.num_combinations <= EXACT_COMBINATIONS else LARGE_TOLERANCE


def _run(job: Job, num_processes: int, progress: Progress | None, deadline: float) -> PartResult:
    """Search all parts, or as many as there is time for (one at least). If a bound turns out not to be one, search
    again without."""
    parts = job.expander.parts()
    total, done = PartResult(Archive.empty(job)), 0
    with _Workers(num_processes if len(parts) > 1 else 1) as workers:
        for wave in _waves(len(parts)):
            known = Archive.empty(job)
            known.merge(job, total.archive)
            work = functools.partial(_search_part, job, known)
            for part in workers.map(work, [parts[i] for i in wave]):
                total.merge(job, part)
                done += 1
                if time.monotonic() > deadline:
                    break
            if progress:
                progress(done / len(parts))
            if time.monotonic() > deadline:
                break
    if not total.bounds_hold:
        return _run(replace(job, prune=False), num_processes, progress, deadline)
    total.counts.not_searched = sum(job.expander.size(part) for part in parts[done:])
    return total


def _waves(num_parts: int) -> list[range]:
    """Which parts are searched beside each other: one, then more. Every wave is pruned by what those before it found,
    whatever the number of processes, so that counts don't depend on it."""
    waves, start, size = [], 0, 1
    while start < num_parts:
        waves.append(range(start, min(start + size, num_parts)))
        start, size = start + size, min(size * 4, 32)
    return waves


def _search_part(job: Job, known: Archive, part: Part) -> PartResult:
    """The plans of a part, with what is known already."""
    result = PartResult(Archive.empty(job))
    result.archive.merge(job, known)
    blocks = job.expander.blocks(part)
    result.counts.merge(blocks.counts)
    if not job.prune:
        for chunk, same_memory in blocks.chunks(np.arange(len(blocks)), job.chunk_rows):
            _evaluate(job, result, chunk, same_memory)
        return result
    held = memory_bounds(job.estimator, blocks, job.chunk_rows)
    fits = held.memory_bytes_high <= job.max_memory_bytes
    result.counts.pruned_by_memory += int(blocks.num_plans[~fits].sum())
    bounds = _Bounds(job, blocks, held)
    left = bounds.of_use(np.flatnonzero(fits), result)
    for layer in _layers(bounds.costs[left], blocks.num_plans[left], job.chunk_rows):
        some = bounds.without_useless(left[layer], bounds.costs[left[layer]], result)
        for chunk, same_memory in blocks.chunks(some, job.chunk_rows):
            _evaluate(job, result, chunk, same_memory, bounds)
    return result


class _Bounds:
    """The bounds of the blocks of a part, and the costs they amount to."""

    def __init__(self, job: Job, blocks: Blocks, held: MemoryBounds) -> None:
        self._job, self._blocks, self._held = job, blocks, held
        self._columns = blocks.columns()
        self._seconds = np.zeros(len(blocks))
        self.costs = np.zeros((len(blocks), len(job.objectives)))
        """``[b, k]``."""

    def of_use(self, which: np.ndarray, result: PartResult) -> np.ndarray:
        """Compute the bounds of blocks ``which``, but of those that are of no use as it is: what recomputes nothing is
        estimated first, and is a bound for its siblings."""
        job, blocks = self._job, self._blocks
        bare = without_recompute(job.space, blocks)
        first = np.unique(bare[which])
        first = first[first >= 0]
        seconds = time_bounds(job.estimator, blocks, first, job.chunk_rows)
        self._seconds[which] = np.where(bare[which] >= 0, seconds[bare[which]], 0.0)
        which = self.without_useless(which, self._costs(which), result)
        rest = np.setdiff1d(which, first, assume_unique=True)
        self._seconds[rest] = time_bounds(job.estimator, blocks, rest, job.chunk_rows)[rest]
        self.costs[which] = self._costs(which)
        return which

    def without_useless(self, which: np.ndarray, costs: np.ndarray, result: PartResult) -> np.ndarray:
        """Those of the blocks ``which`` that may hold something of use, with costs of at least ``costs``."""
        useless = result.archive.has_no_use_for(costs * (1 + self._job.tolerance))
        result.counts.pruned += int(self._blocks.num_plans[which[useless]].sum())
        left: np.ndarray = which[~useless]
        return left

    def _costs(self, which: np.ndarray) -> np.ndarray:
        memory = self._held.memory_bytes[which]
        return self._job.costs(self._seconds[which], memory, self._columns.take(which))

    def hold(self, table: EstimateTable, numbers: np.ndarray) -> bool:
        """Whether estimated plans are within their blocks' bounds."""
        block = np.searchsorted(self._blocks.index, numbers // self._blocks.num_inner)
        return bool(
            (table.step_seconds >= self._seconds[block]).all()
            and (table.memory_bytes >= self._held.memory_bytes[block]).all()
            and (table.memory_bytes_high >= self._held.memory_bytes_high[block]).all()
        )


def _layers(costs: np.ndarray, num_plans: np.ndarray, least_plans: int) -> Iterator[np.ndarray]:
    """Blocks with the best bounds first: indices of the front of the bounds, of the front of the others, and so on,
    joined until they have ``least_plans`` plans. After some layers, few of the blocks left are of any use."""
    left = first_of_equals(costs, np.arange(len(costs)))
    twins = np.setdiff1d(np.arange(len(costs)), left)
    waiting: list[np.ndarray] = []
    plans = 0
    for _ in range(MAX_LAYERS):
        best = non_dominated(costs[left])
        waiting.append(left[best])
        plans += int(num_plans[left[best]].sum())
        left = left[~best]
        if plans >= least_plans:
            yield np.concatenate(waiting)
            waiting, plans = [], 0
    rest = np.concatenate([*waiting, left, twins])
    place = np.cumsum(num_plans[rest]) // (PIECES_OF_CHUNKS * least_plans)
    yield from np.split(rest, np.flatnonzero(np.diff(place)) + 1)


def _evaluate(job: Job, result: PartResult, chunk: Chunk, same_memory: Distinct, bounds: _Bounds | None = None) -> None:
    """Estimate plans and keep what is of use."""
    numbers = chunk.numbers
    table = job.estimator.estimate(chunk.plans, same_work=chunk.same_work, same_memory=same_memory)
    fits = table.memory_bytes_high <= job.max_memory_bytes
    result.counts.evaluated += len(numbers)
    result.counts.evaluated_not_fitting += len(numbers) - int(np.count_nonzero(fits))
    if bounds is not None:
        result.bounds_hold &= bounds.hold(table, numbers)
    if fits.any():
        costs = job.costs(table.step_seconds, table.memory_bytes, chunk.plans)
        result.archive.add(job, costs[fits], numbers[fits])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the one that started the search ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Workers:
    """Processes that work on parts; none are started for one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def map(self, work: Callable[[Part], PartResult], parts: Sequence[Part]) -> Iterator[PartResult]:
        """The results of parts, in their order."""
        if self._number == 1 or len(parts) == 1:
            return map(work, parts)
        if self._pool is None:
            methods = multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
            self._pool = ProcessPoolExecutor(self._number, mp_context=context, initializer=_leave_interrupts)
        return self._pool.map(work, parts)

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _result(job: Job, found: PartResult, least: Archive) -> SearchResult:
    closest = least.best["memory"].numbers if "memory" in least.best else np.zeros(0, dtype=np.int64)
    if len(found.archive.front.numbers):
        closest = closest[:0]
    return SearchResult(
        objectives=job.objectives,
        front=_rows(job, found.archive.front.numbers),
        top={name: _rows(job, best.numbers) for name, best in found.archive.best.items()},
        counts=found.counts,
        max_memory_bytes=int(job.max_memory_bytes),
        closest=_rows(job, closest),
        num_devices=job.cluster.num_devices,
        gaps={name: _gap(job, found, i) for i, name in enumerate(job.objectives)},
    )


def _gap(job: Job, found: PartResult, column: int) -> float:
    """How much better in one cost than the best that was found a plan may be, as a ratio."""
    if not found.counts.not_searched:
        return job.tolerance if found.counts.pruned else 0.0
    if not len(found.archive.front.numbers):
        return np.inf
    columns = job.expander.columns(job.expander.first_numbers())
    least = job.costs(least_seconds(job.model, job.cluster, columns), np.zeros(len(columns)), columns)[:, column].min()
    best = found.archive.front.costs[:, column].min()
    return max(float(best / least) - 1, job.tolerance) if least > 0 else np.inf


def _rows(job: Job, numbers: np.ndarray) -> PlanRows:
    """Plans by their numbers."""
    columns = job.expander.columns(numbers)
    rows = [plan_at(columns, row, job.model.num_layers) for row in range(len(numbers))]
    return plan_rows(job, rows)


def plan_rows(job: Job, rows: Sequence[tuple[Plan, int, int]]) -> PlanRows:
    """Plans with their batches and sequence lengths, estimated."""
    table = plan_table(rows)
    columns = encode(table, job.model.num_layers)
    estimates = job.estimator.estimate(columns) if rows else EstimateTable.of_nothing()
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
        values=objective_values(job.objectives, estimates.step_seconds, estimates.memory_bytes, columns, job.prices),
        not_built=tuple(broken),
    )
