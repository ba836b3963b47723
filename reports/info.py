"""From a study's snapshot to the plain data of each table and figure. Nothing here draws; it is all tested as data."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.apply.program import is_program_study
from autotune.apply.select import (
    EXTREMES,
    comparable_trials,
    explain,
    extreme_trial,
    front_trials,
    knee_trial,
    least_violated,
    value_matrix,
)
from autotune.paths import DEFAULT_RUNS
from autotune.search import pareto
from autotune.space.objectives import Objective
from autotune.space.space import Scalar
from autotune.study.frame import PARAM, VALUE
from autotune.study.repeats import repeated_values
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.outcome import FAILURE_KINDS, OutcomeKind
from engine.units import GIB, format_count

STATUSES = (
    "knee", "front", "dominated", "infeasible", "repeat", "partial", *FAILURE_KINDS, "incomplete", "running", "waiting",
)  # fmt: skip
"""What a trial is in a report, in the order of the legend: its place beside the front, or why it has none. ``partial``:
it was trained on a part of its tokens, to see whether it is worth more."""

TOO_SLOW = (
    "Ended before it was done, as at the time limit of a trial: it counts and is not run again. Where such trials are"
    " worth their time, raise the limit."
)
TRAINING_ADVICE: Mapping[OutcomeKind, str] = {
    "oom": "A search for memory has to find the limit. If most trials end so: lower the largest micro-batch, or add"
    " recompute or sharding to the space.",
    "hang": "A rank stopped answering: look at the trial's stdout.log. If trials are only slow, raise the time limit in"
    " the space file.",
    "nan": "Numbers left the range of the precision: lower the largest learning rate, add warm-up, or use bf16 or"
    " fp32.",
    "diverged": "The loss rose and stayed up: lower the largest learning rate or lengthen the warm-up.",
    "infra": "The machine or a process failed, not the candidate: look at the trial's stdout.log and at"
    " autotune doctor, then run the sweep again.",
    "user": "The run refused its configuration or data, or it crashed: the message says what to change in the space"
    " file.",
    "interrupted": TOO_SLOW,
}
"""For training runs of the engine."""
PROGRAM_ADVICE: Mapping[OutcomeKind, str] = {
    "oom": "It needed more memory than there is, or than the limit of a trial. If most trials end so: narrow the values"
    " that memory grows with, or state the limit in a constraint.",
    "hang": "It gave no sign of life until the time limit. If trials are only slow, raise the limit.",
    "nan": "An objective was no finite number: look at what these values have in common, and narrow the space or add a"
    " constraint.",
    "diverged": "It said so itself: look at what these values have in common, and narrow the space.",
    "infra": "It was ended from outside, or said itself that the machine failed: the values are not to blame. Run the"
    " sweep again.",
    "user": "An error of its own, or no result for an objective: the message says what to correct.",
    "interrupted": TOO_SLOW,
}
"""For a user's own program or function."""


SIGNIFICANT_DIGITS = 4
"""Of the largest value of an objective, in tables."""
MAX_CATEGORIES = 8
"""Numbers with at most so many distinct values are choices, and shown as such."""


class Axis(NamedTuple):
    """How an objective is shown."""

    name: str
    label: str
    unit: str
    scale: float
    """Values are divided by this."""
    decimals: int
    """Digits after the point in tables."""
    higher_is_better: bool

    @property
    def title(self) -> str:
        """Label with unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


class PointGroup(NamedTuple):
    """Points that look alike."""

    status: str
    numbers: np.ndarray
    """Trial numbers, ``[n]``."""
    values: np.ndarray
    """Values in the units of the axes, ``[n, k]``."""


class CloudInfo(NamedTuple):
    """All measured points in objective space."""

    axes: tuple[Axis, ...]
    groups: tuple[PointGroup, ...]
    """Dominated and infeasible first, the knee last (drawn on top)."""


class PairInfo(NamedTuple):
    """Two objectives, or with a single objective its course over the trials."""

    x: Axis
    y: Axis
    groups: tuple[PointGroup, ...]
    edge: np.ndarray
    """Corners of the front of these two alone, from left to right, ``[m, 2]``."""
    num_outside: int
    """Points left outside the ranges below, so that a few far ones do not squeeze the rest."""
    x_range: tuple[float, float]
    y_range: tuple[float, float]


class HistoryInfo(NamedTuple):
    """Hypervolume over trials."""

    numbers: np.ndarray
    """Numbers of the feasible trials, ``[n]``."""
    shares: np.ndarray
    """Share of the box dominated by the trials so far, ``[n]``."""
    reference: tuple[str, ...]
    """The reference point, one text per objective."""


class ParallelColumn(NamedTuple):
    """One axis of the parallel coordinates."""

    label: str
    positions: np.ndarray
    """Where each line crosses it, ``[n]``."""
    tick_positions: tuple[float, ...]
    tick_texts: tuple[str, ...]


class ParallelInfo(NamedTuple):
    """Parallel coordinates of measured trials, one line each."""

    columns: tuple[ParallelColumn, ...]
    ranks: np.ndarray
    """Share of the trials that are as good or better in the first objective; colours the lines, ``[n]``, 0 is best."""
    coloured_by: str
    num_left_out: int
    """Trials beyond the most lines that a figure can show."""


class FailureInfo(NamedTuple):
    """One kind of failure."""

    kind: OutcomeKind
    num_trials: int
    ratio: float
    """Share of the finished trials."""
    first_trial: int
    first_detail: str
    advice: str
    log: str
    """Where the first one's output is."""


class Column(NamedTuple):
    """A column of the candidates' table."""

    key: str
    """Its own, whatever objectives and searched values are called."""
    label: str
    numeric: bool
    decimals: int | None = None
    """Digits after the point; None for as many as there are."""


class TableInfo(NamedTuple):
    """All trials as a table; cells are numbers, texts or None."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Scalar, ...], ...]


class ChoiceInfo(NamedTuple):
    """A trial worth choosing and why."""

    title: str
    trial: TrialRow
    values: tuple[str, ...]
    """One text per objective."""
    reasons: tuple[str, ...]
    repeats: str
    """What its repeats with other seeds gave; empty without any."""
    command: str


class SummaryInfo(NamedTuple):
    """The study in numbers."""

    counts: dict[str, int]
    """Status of a trial -> how many."""
    num_trials: int
    num_front: int
    choices: tuple[ChoiceInfo, ...]
    """The knee first, then the extremes; empty without a feasible trial."""
    empty_reason: str
    """Why there is nothing to choose; empty otherwise."""


def get_statuses(snapshot: StudySnapshot) -> dict[int, str]:
    """Trial number -> one of ``STATUSES``."""
    front = front_trials(snapshot)
    knee = knee_trial(snapshot, front)
    on_front = {trial.number for trial in front}
    statuses = {}
    for trial in snapshot.trials:
        if trial.outcome is None:
            status = "running" if trial.state == "running" else "waiting"
        elif trial.outcome.kind != "ok":
            status = trial.outcome.kind
        elif trial.values is None:
            status = "incomplete"
        elif trial.share < 1:
            status = "partial"
        elif trial.repeat_of is not None:
            status = "repeat"
        elif not trial.feasible:
            status = "infeasible"
        elif knee is not None and trial.number == knee.number:
            status = "knee"
        else:
            status = "front" if trial.number in on_front else "dominated"
        statuses[trial.number] = status
    return statuses


def get_axes(snapshot: StudySnapshot) -> tuple[Axis, ...]:
    """How each objective is shown: memory in GiB, or in MiB when all of it is below 0.1 GiB."""
    return tuple(_axis(snapshot, objective) for objective in snapshot.objectives)


def get_cloud(snapshot: StudySnapshot) -> CloudInfo:
    """All measured points by status."""
    axes = get_axes(snapshot)
    scales = np.array([axis.scale for axis in axes])
    statuses = get_statuses(snapshot)
    groups = []
    for status in ("repeat", "infeasible", "dominated", "front", "knee"):
        trials = [trial for trial in snapshot.trials if statuses[trial.number] == status]
        if trials:
            numbers = np.array([trial.number for trial in trials], dtype=np.int32)
            groups.append(PointGroup(status, numbers, value_matrix(snapshot, trials) / scales))
    return CloudInfo(axes, tuple(groups))


def get_pairs(cloud: CloudInfo) -> tuple[PairInfo, ...]:
    """Every pair of objectives; with one objective, its values over the trials."""
    if not cloud.groups:
        return ()
    if len(cloud.axes) == 1:
        trial = Axis("trial", "Trial", "number", 1.0, decimals=0, higher_is_better=False)
        groups = tuple(g._replace(values=np.column_stack([g.numbers, g.values])) for g in cloud.groups)
        return (_pair(CloudInfo((trial, *cloud.axes), groups), 0, 1),)
    size = len(cloud.axes)
    return tuple(_pair(cloud, x, y) for x in range(size) for y in range(x + 1, size))


def get_history(snapshot: StudySnapshot) -> HistoryInfo | None:
    """How much of objective space the trials cover; None without a feasible trial."""
    trials = comparable_trials(snapshot)
    if not trials:
        return None
    values = value_matrix(snapshot, trials)
    directions = [objective.direction for objective in snapshot.objectives]
    box = pareto.front_box(values, directions)
    reference = box.ideal + pareto.REFERENCE_MARGIN * (box.nadir - box.ideal)
    point = pareto.costs_of(reference, directions)[0]  # from costs to values it is the same change of signs
    return HistoryInfo(
        np.array([trial.number for trial in trials], dtype=np.int32),
        pareto.hypervolume_history(values, directions, box),
        tuple(objective.text(value) for objective, value in zip(snapshot.objectives, point, strict=True)),
    )


def get_parallel(snapshot: StudySnapshot, *, max_lines: int = 300) -> ParallelInfo | None:
    """Searched values and objectives of the feasible trials, at most ``max_lines`` (the front always, the others evenly
    over the trials); None with fewer than two."""
    trials = comparable_trials(snapshot)
    if len(trials) < 2:
        return None
    shown = thinned(trials, {trial.number for trial in front_trials(snapshot)}, max_lines)
    columns = [
        _parallel_column(short_name(name), [trial.parameters.get(name) for trial in shown])
        for name in varied_parameters(trials)
    ]
    values = value_matrix(snapshot, shown)
    for index, axis in enumerate(get_axes(snapshot)):
        columns.append(_parallel_column(axis.title, (values[:, index] / axis.scale).tolist()))
    first = snapshot.objectives[0]
    costs = pareto.costs_of(values, [objective.direction for objective in snapshot.objectives])[:, 0]
    ranks = np.searchsorted(np.sort(costs), costs) / max(len(costs) - 1, 1)
    return ParallelInfo(tuple(columns), ranks, first.label, len(trials) - len(shown))


def get_failures(snapshot: StudySnapshot) -> tuple[FailureInfo, ...]:
    """Failures by kind, the most frequent first."""
    advice = PROGRAM_ADVICE if is_program_study(snapshot) else TRAINING_ADVICE
    failed: dict[OutcomeKind, list[TrialRow]] = {}
    num_finished = 0
    for trial in snapshot.trials:
        num_finished += trial.outcome is not None
        if trial.outcome is not None and trial.outcome.kind != "ok":
            failed.setdefault(trial.outcome.kind, []).append(trial)
    infos = []
    for kind, trials in sorted(failed.items(), key=lambda item: -len(item[1])):
        told = next((trial for trial in trials if trial.outcome and trial.outcome.detail), trials[0])
        detail = told.outcome.detail if told.outcome else ""
        log = "" if told.folder is None else str(told.folder / "stdout.log")
        infos.append(FailureInfo(kind, len(trials), len(trials) / num_finished, told.number, detail, advice[kind], log))
    return tuple(infos)


def get_table(snapshot: StudySnapshot) -> TableInfo:
    """One row per trial: status, plan, objectives, searched values, time and what went wrong."""
    names = searched_parameters(snapshot.trials)
    axes = get_axes(snapshot)
    has_plans = not is_program_study(snapshot)
    columns = [Column("trial", "Trial", True), Column("status", "Status", False)]
    columns += [Column("plan", "Plan", False)] if has_plans else []
    columns += [Column(f"{VALUE}{axis.name}", axis.title, True, axis.decimals) for axis in axes]
    forecast = [axis for axis in axes if any(axis.name in trial.forecast for trial in snapshot.trials)]
    columns += [Column(f"estimated.{a.name}", f"Estimated {a.title.lower()}", True, a.decimals) for a in forecast]
    for name in names:
        numeric = all(v is None or _is_number(v) for v in (trial.parameters.get(name) for trial in snapshot.trials))
        columns.append(Column(f"{PARAM}{name}", short_name(name), numeric))
    columns += [Column("seconds", "Wall time (s)", True), Column("detail", "Detail", False)]
    statuses = get_statuses(snapshot)
    rows = []
    for trial in snapshot.trials:
        row: list[Scalar] = [trial.number, statuses[trial.number], *([trial.plan] if has_plans else [])]
        for axis in axes:
            value = None if trial.values is None else trial.values[axis.name] / axis.scale
            row.append(significant(value, SIGNIFICANT_DIGITS + 1))  # one more than shown, so that rounding is right
        for axis in forecast:
            estimated = trial.forecast[axis.name].value / axis.scale if axis.name in trial.forecast else None
            row.append(significant(estimated, SIGNIFICANT_DIGITS + 1))
        row += [significant(trial.parameters.get(name), 4) for name in names]
        row += [significant(trial.seconds, 4), _detail(trial)]
        rows.append(tuple(row))
    return TableInfo(tuple(columns), tuple(rows))


def get_summary(snapshot: StudySnapshot) -> SummaryInfo:
    """Counts, the recommended trial and the extremes, or why there is none."""
    counts = Counter(get_statuses(snapshot).values())
    ordered = {status: counts[status] for status in STATUSES if counts[status]}
    front = front_trials(snapshot)
    knee = knee_trial(snapshot, front)
    choices: list[ChoiceInfo] = []
    if knee is not None:
        title = "Recommended: the knee" if len(front) > 1 else "Recommended"
        choices.append(_choice(snapshot, title, knee, "knee"))
        words = {name: how for how, name in EXTREMES.items()}
        ordered_names = [*EXTREMES.values(), *(o.name for o in snapshot.objectives if o.name not in words)]
        for objective in sorted(snapshot.objectives, key=lambda objective: ordered_names.index(objective.name)):
            if len(front) > 1:
                how = words.get(objective.name, objective.name)
                title = {"best": "The best loss", objective.name: f"The best {objective.label}"}.get(how, f"The {how}")
                choices.append(_choice(snapshot, title, extreme_trial(objective, snapshot, front), how))
    return SummaryInfo(ordered, len(snapshot.trials), len(front), tuple(choices), _empty_reason(snapshot, front))


def apply_command(snapshot: StudySnapshot, pick: str | int) -> str:
    """What to type to get the run file of a trial."""
    output = "best.yaml" if is_program_study(snapshot) else "run.yaml"
    command = ["autotune", "apply", snapshot.name, "--pick", str(pick), "-o", output]
    runs = runs_folder(snapshot)
    if runs != DEFAULT_RUNS:
        command += ["--runs-dir", str(runs)]
    return shlex.join(command)


def runs_folder(snapshot: StudySnapshot) -> Path:
    """The runs folder that the study lies in."""
    return snapshot.folder.parent.parent


def searched_parameters(trials: Sequence[TrialRow]) -> list[str]:
    """All searched names, in the order in which trials have them."""
    return list(dict.fromkeys(name for trial in trials for name in trial.parameters))


def varied_parameters(trials: Sequence[TrialRow]) -> list[str]:
    """Searched names with more than one value among ``trials``; absent (a conditional one) counts as a value."""
    names = searched_parameters(trials)
    return [name for name in names if len({repr(trial.parameters.get(name)) for trial in trials}) > 1]


def short_name(name: str) -> str:
    """The last part of a dotted name, as words: ``hyperparameters.learning_rate`` is ``learning rate``."""
    return name.rpartition(".")[2].replace("_", " ")


def thinned(trials: Sequence[TrialRow], always: set[int], most: int) -> list[TrialRow]:
    """At most ``most`` trials: those in ``always`` and an even selection of the others, in order."""
    others = [trial.number for trial in trials if trial.number not in always]
    room = max(most - len(always), 0)
    if len(others) > room:
        others = [others[i] for i in np.linspace(0, len(others) - 1, room).round().astype(int)] if room else []
    chosen = always | set(others)
    return [trial for trial in trials if trial.number in chosen]


def parameter_text(value: Scalar) -> str:
    """A searched value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def looks_logarithmic(low: float, high: float) -> bool:
    """Whether values from ``low`` to ``high`` spread over so many powers that a log axis suits them."""
    return low > 0 and high / low >= 30


def significant(value: Scalar, digits: int) -> Scalar:
    """A float rounded to so many significant digits (None where it is not finite); anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _axis(snapshot: StudySnapshot, objective: Objective) -> Axis:
    unit, scale = objective.unit, 1.0
    largest = max((abs(t.values[objective.name]) for t in snapshot.trials if t.values is not None), default=0.0)
    if objective.name == "memory":
        unit, scale = ("GiB", float(GIB)) if largest >= 0.1 * GIB else ("MiB", 2.0**20)
    magnitude = math.floor(math.log10(largest / scale)) if largest > 0 else 0
    decimals = min(max(SIGNIFICANT_DIGITS - 1 - magnitude, 0), 6)
    return Axis(objective.name, objective.label, unit, scale, decimals, objective.direction == "maximize")


def _pair(cloud: CloudInfo, x: int, y: int) -> PairInfo:
    groups = tuple(group._replace(values=group.values[:, [x, y]]) for group in cloud.groups)
    points = np.vstack([group.values for group in groups])
    eligible = [group.values for group in groups if group.status in ("dominated", "front", "knee")]
    edge = np.vstack(eligible) if eligible else np.empty((0, 2))
    axes = cloud.axes[x], cloud.axes[y]
    edge = edge[pareto.front(edge, ["maximize" if axis.higher_is_better else "minimize" for axis in axes])]
    edge = np.unique(edge, axis=0)
    kept = np.vstack([group.values for group in groups if group.status in ("front", "knee")] or [points])
    ranges = [_range(points[:, column], kept[:, column]) for column in (0, 1)]
    outside = np.zeros(len(points), dtype=bool)
    for column, (low, high) in enumerate(ranges):
        outside |= (points[:, column] < low) | (points[:, column] > high)
    return PairInfo(*axes, groups, edge, int(outside.sum()), *ranges)


def _range(values: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
    """An axis range with all of ``kept`` and the middle of ``values``: far points (beyond three times the spread of the
    middle half) are left outside."""
    first, third = np.quantile(values, [0.25, 0.75])
    reach = 3 * (third - first)
    inside = values[(values >= first - reach) & (values <= third + reach)]
    low, high = float(min(kept.min(), inside.min())), float(max(kept.max(), inside.max()))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _parallel_column(label: str, values: Sequence[Scalar]) -> ParallelColumn:
    """Numbers on a linear or a log axis, anything else as categories. A value that is absent (of a conditional
    parameter) gets its own place below the others."""
    present = [value for value in values if value is not None]
    distinct = set(map(repr, present))
    if not all(_is_number(value) for value in present) or len(distinct) <= MAX_CATEGORIES:
        ordered = [parameter_text(value) for value in sorted(present, key=_sort_key)]
        absent = [parameter_text(None)] if len(present) < len(values) else []
        places = {text: float(place) for place, text in enumerate(dict.fromkeys([*absent, *ordered]))}
        positions = [places[parameter_text(value)] for value in values]
        return ParallelColumn(label, np.array(positions), tuple(places.values()), tuple(places))
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    is_log = looks_logarithmic(low, high)
    ticks = _log_ticks(low, high) if is_log else np.linspace(low, high, 5).tolist()
    positions_array = np.log10(numbers) if is_log else numbers
    tick_positions = [math.log10(tick) for tick in ticks] if is_log else list(ticks)
    texts = [format_count(tick) if tick >= 1000 else f"{tick:.3g}" for tick in ticks]
    if np.isnan(numbers).any():
        place = tick_positions[0] - 0.15 * (tick_positions[-1] - tick_positions[0])
        positions_array = np.where(np.isnan(positions_array), place, positions_array)
        tick_positions, texts = [place, *tick_positions], [parameter_text(None), *texts]
    return ParallelColumn(label, positions_array, tuple(tick_positions), tuple(texts))


def _log_ticks(low: float, high: float) -> list[float]:
    """The ends and the powers of ten between them."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [low, *(10.0**power for power in powers if low * 1.5 < 10.0**power < high / 1.5), high]


def _sort_key(value: Scalar) -> tuple[bool, str, Scalar]:
    """Numbers by size, then the others by type, which alone can be compared with each other."""
    return (False, "", value) if _is_number(value) else (True, type(value).__name__, value)


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _detail(trial: TrialRow) -> str:
    parts = [] if trial.repeat_of is None else [f"repeats trial {trial.repeat_of}"]
    parts += [] if trial.continues is None else [f"continues trial {trial.continues}"]
    parts += [f"{100 * trial.share:.3g} % of a training"] if trial.share < 1 else []
    parts += [f"{trial.attempts} attempts"] if trial.attempts > 1 else []
    parts += [trial.outcome.detail] if trial.outcome is not None and trial.outcome.detail else []
    text = "; ".join(parts)
    return text if len(text) <= 300 else f"{text[:299]}…"


def _choice(snapshot: StudySnapshot, title: str, trial: TrialRow, how: str) -> ChoiceInfo:
    values = trial.values or {}
    return ChoiceInfo(
        title,
        trial,
        tuple(objective.text(values[objective.name]) for objective in snapshot.objectives),
        tuple(explain(snapshot, trial, how)),
        _repeats(snapshot, trial),
        apply_command(snapshot, how),
    )


def _repeats(snapshot: StudySnapshot, trial: TrialRow) -> str:
    """What the repeats of a trial say, in words; empty without any."""
    repeated = repeated_values(snapshot, trial.number)
    if not repeated:
        return ""
    count = repeated[0].num_repeats
    values = ", ".join(f"{value.objective.label.lower()} {value.text}" for value in repeated)
    return f"Repeated with {count} other seed{'s' if count != 1 else ''} (mean and 95 % interval): {values}."


def _empty_reason(snapshot: StudySnapshot, front: Sequence[TrialRow]) -> str:
    if front:
        return ""
    if not snapshot.trials:
        return "No trial has run yet."
    measured = [trial for trial in snapshot.trials if trial.values is not None]
    if measured and all(trial.share < 1 for trial in measured):
        return "No candidate has been trained in full yet."
    if measured:
        nearest = least_violated(snapshot)
        which = f" The nearest is trial {nearest.trial.number}: {nearest.text}." if nearest else ""
        return f"Trials succeeded, but none is within the study's bounds.{which}"
    if all(trial.outcome is None for trial in snapshot.trials):
        return "No trial has ended yet."
    return "No trial has succeeded: the failures say why and what to change."
