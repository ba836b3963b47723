"""How right the cost model is: errors of time and memory, quality of ranking, and a ten-line model to compare with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.columns import code
from autotune.cost.published import PublishedRun, columns
from autotune.cost.run_estimates import RunEstimates
from autotune.cost.shapes import ModelShape
from engine.flops import parameter_counts

FULL = code("recompute", "full")

MIN_GROUP = 4
"""Fewest plans of a group that ranking is judged on."""

SIZE_CLASSES = ((1e9, "below 1B"), (10e9, "1B to 10B"), (100e9, "10B to 100B"), (np.inf, "100B and more"))
"""Upper end of total parameters -> name."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of one quantity over some runs, percent; NaN without any."""

    num_rows: int
    median_abs_pct: float
    """Median of ``|predicted / measured - 1|``."""
    p90_abs_pct: float
    """90th percentile of the same."""
    bias_pct: float
    """Median of ``predicted / measured - 1``: below 0 where estimates are too low."""

    @classmethod
    def of(cls, errors: np.ndarray) -> Errors:
        """Of signed errors in percent, ``[n]``; those that are NaN don't count."""
        known = errors[np.isfinite(errors)]
        if not len(known):
            return cls(0, np.nan, np.nan, np.nan)
        size = np.abs(known)
        return cls(len(known), float(np.median(size)), float(np.percentile(size, 90)), float(np.median(known)))


@dataclass(frozen=True)
class Spread:
    """Errors over all runs, and by what the runs have in common."""

    overall: Errors
    by_family: Mapping[str, Errors]
    by_device: Mapping[str, Errors]
    by_size: Mapping[str, Errors]
    by_model: Mapping[str, Errors]

    def family_mean(self, field: str) -> float:
        """Mean over source families of a field of ``Errors``, so that no publisher counts for its many rows."""
        values = [getattr(errors, field) for errors in self.by_family.values() if errors.num_rows]
        return float(np.mean(values)) if values else np.nan


@dataclass(frozen=True)
class GroupRanking:
    """How well one group of plans is ranked."""

    family: str
    num_plans: int
    spearman: float
    """Rank correlation of predicted and measured step time."""
    top1_regret_pct: float
    """How much slower the plan predicted best is than the best."""
    top3_regret_pct: float
    """The same of the best of the three predicted best."""


@dataclass(frozen=True)
class Ranking:
    """Ranking over all groups."""

    groups: tuple[GroupRanking, ...]

    def mean(self, field: str) -> float:
        """Mean over groups of a field of ``GroupRanking``; NaN without groups."""
        return float(np.mean([getattr(group, field) for group in self.groups])) if self.groups else np.nan

    def family_mean(self, field: str) -> float:
        """Mean over families of the mean over their groups."""
        by_family = defaultdict(list)
        for group in self.groups:
            by_family[group.family].append(getattr(group, field))
        return float(np.mean([np.mean(values) for values in by_family.values()])) if by_family else np.nan


@dataclass(frozen=True)
class MemoryGate:
    """Whether plans are rightly called too large. A plan is called out of memory where even the low end of its
    estimate exceeds the device, and is promised to fit where the high end is within it."""

    num_running: int
    """Runs published as running."""
    num_running_refused: int
    """Of these, called out of memory."""
    num_oom: int
    """Runs published as out of memory."""
    num_oom_refused: int
    """Of these, called out of memory."""
    num_oom_promised: int
    """Of these, promised to fit."""


@dataclass(frozen=True)
class Accuracy:
    """All figures of a table of runs."""

    time: Spread
    memory: Spread
    gate: MemoryGate
    ranking: Ranking
    baseline_time: Spread
    """The same of the ten-line model."""
    baseline_ranking: Ranking


def judge(runs: Sequence[PublishedRun], estimates: RunEstimates) -> Accuracy:
    """Estimates against what was measured.

    Args:
        runs: ``n`` runs.
        estimates: Theirs.
    """
    baseline = baseline_seconds(runs)
    return Accuracy(
        time=spread(runs, time_errors(runs, estimates.step_seconds)),
        memory=spread(runs, memory_errors(runs, estimates)),
        gate=memory_gate(runs, estimates),
        ranking=ranking(runs, estimates.step_seconds),
        baseline_time=spread(runs, time_errors(runs, baseline)),
        baseline_ranking=ranking(runs, baseline),
    )


# -------------------------------------------------------------------------------------------------------------- errors


def time_errors(runs: Sequence[PublishedRun], step_seconds: np.ndarray) -> np.ndarray:
    """Signed errors of predicted step times ``[n]``, percent; NaN for runs that time is not judged on."""
    measured = np.array([run.step_seconds if run.timed and run.step_seconds else np.nan for run in runs])
    return np.asarray((step_seconds / measured - 1) * 100)


def memory_errors(runs: Sequence[PublishedRun], estimates: RunEstimates) -> np.ndarray:
    """Signed errors of memory ``[n]``, percent, like with like; NaN for runs whose memory is not known."""
    measured = np.array([run.memory_gb if run.memory_gb and run.outcome == "ok" else np.nan for run in runs])
    return np.asarray((predicted_memory_gb(runs, estimates) / measured - 1) * 100)


def predicted_memory_gb(runs: Sequence[PublishedRun], estimates: RunEstimates) -> np.ndarray:
    """Memory of the fullest device ``[n]``, 10^9 bytes, counted as each run's own figure is.

    Live tensors where the source counts those, what the allocator reserved where it counts that, and all memory in
    use for what a driver shows and where nothing was measured.
    """
    figures = {"allocated": estimates.allocated_bytes, "reserved": estimates.reserved_bytes}
    kinds = np.array([run.memory_kind or ("reserved" if run.memory_gb else "device") for run in runs])
    values = np.array(estimates.memory_bytes, dtype=np.float64)
    for kind, figure in figures.items():
        values = np.where(kinds == kind, figure, values)
    return values / 1e9


def memory_gate(runs: Sequence[PublishedRun], estimates: RunEstimates) -> MemoryGate:
    """How many runs are rightly and wrongly called out of memory."""
    capacity = np.array([run.cluster.memory_bytes for run in runs])
    refused, promised = estimates.memory_bytes_low > capacity, estimates.memory_bytes_high <= capacity
    oom = np.array([run.outcome == "oom" for run in runs], dtype=bool)
    return MemoryGate(
        num_running=int((~oom).sum()),
        num_running_refused=int((~oom & refused).sum()),
        num_oom=int(oom.sum()),
        num_oom_refused=int((oom & refused).sum()),
        num_oom_promised=int((oom & promised).sum()),
    )


def spread(runs: Sequence[PublishedRun], errors: np.ndarray) -> Spread:
    """Signed errors ``[n]`` in percent, over all runs and by what they have in common."""
    models = {id(run.model): run.model for run in runs}
    classes = {key: size_class(parameter_counts(model).total) for key, model in models.items()}

    def by(key: Callable[[PublishedRun], str]) -> dict[str, Errors]:
        rows: dict[str, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            if np.isfinite(errors[index]):
                rows[key(run)].append(index)
        return {name: Errors.of(errors[rows[name]]) for name in sorted(rows, key=lambda name: -len(rows[name]))}

    return Spread(
        overall=Errors.of(errors),
        by_family=by(lambda run: run.family),
        by_device=by(lambda run: run.cluster.device_kind),
        by_size=by(lambda run: classes[id(run.model)]),
        by_model=by(lambda run: run.model_family),
    )


def size_class(total_parameters: int) -> str:
    """The class of a model by its parameters."""
    return next(name for end, name in SIZE_CLASSES if total_parameters < end)


# ------------------------------------------------------------------------------------------------------------- ranking


def ranking(runs: Sequence[PublishedRun], step_seconds: np.ndarray) -> Ranking:
    """Quality of ranking in every group of runs that differ in their plan alone.

    Args:
        runs: ``n`` runs.
        step_seconds: ``[n]`` predictions.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if run.timed:
            groups[run.ranking_group].append(index)
    found = []
    for members in groups.values():
        measured = np.array([runs[index].step_seconds for index in members], dtype=np.float64)
        if len(members) >= MIN_GROUP and np.ptp(measured) > 0:
            found.append(_rank(runs[members[0]].family, measured, step_seconds[members]))
    return Ranking(tuple(found))


def _rank(family: str, measured: np.ndarray, predicted: np.ndarray) -> GroupRanking:
    chosen = measured[np.argsort(predicted, kind="stable")]
    best = measured.min()
    return GroupRanking(
        family=family,
        num_plans=len(measured),
        spearman=spearman(measured, predicted),
        top1_regret_pct=float(chosen[0] / best - 1) * 100,
        top3_regret_pct=float(chosen[:3].min() / best - 1) * 100,
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two ``[n]`` arrays, equal values sharing their mean rank; 0 if one is constant."""
    x, y = (_mean_ranks(values) - (len(values) - 1) / 2 for values in (a, b))
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else 0.0


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[index])


# ------------------------------------------------------------------------------------------------------------ baseline


def baseline_seconds(runs: Sequence[PublishedRun]) -> np.ndarray:
    """Step seconds ``[n]`` by a model of ten lines with constants chosen by hand, none of them fitted.

    Products at an efficiency that saturates in tokens * hidden / tp, a pipeline bubble, and tensor- and data-parallel
    traffic at one fixed bandwidth.
    """
    if not runs:
        return np.zeros(0)
    table = columns(runs)
    shape = ModelShape.rows([ModelShape.of(model) for model in table.models], table.model_index)
    c, peaks = table.plans, np.array([_peak_flops(run) for run in runs])
    tokens = c.micro_batch_size * c.sequence_length / c.cp
    idle = (
        shape.expert_parameters
        * shape.num_moe_layers
        * (1 - shape.experts_per_token / np.maximum(shape.num_experts, 1))
    )
    per_token = shape.total_parameters - idle + shape.num_layers * shape.hidden * c.sequence_length
    size = tokens * shape.hidden / c.tp
    efficiency = 0.65 * size / (size + 2e6)
    passes = np.where(c.recompute == FULL, 4, 3)
    compute = 2 * passes * per_token * tokens / (c.tp * c.pp) / (efficiency * peaks)
    traffic = 2 * 4 * 2 * tokens * shape.hidden * (1 - 1 / c.tp) * shape.num_layers / c.pp / 200e9
    bubble = (c.pp - 1) / c.virtual_stages
    gradients = 4 * shape.total_parameters / (c.tp * c.pp) * (1 - 1 / c.dp) / 200e9
    return np.asarray((compute + traffic) * (c.num_micro_batches + bubble) + gradients)


def _peak_flops(run: PublishedRun) -> float:
    peaks = run.cluster.peak_flops
    return peaks.get(run.plan.precision, max(peaks.values()))
