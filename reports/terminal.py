"""The front in a terminal."""

from __future__ import annotations

import re
import textwrap

from rich import box
from rich.table import Table
from rich.text import Text

from autotune.apply.program import is_program_study
from autotune.apply.select import front_trials, knee_trial, value_matrix
from autotune.search.pareto import costs_of
from autotune.study.snapshot import StudySnapshot, TrialRow
from reports.info import get_axes, get_summary, parameter_text, searched_parameters

PLAN_PREFIX = "plan."
"""Searched values that the plan's description already tells."""

SETTING_WIDTH, PLAN_WIDTH = 23, 15
"""Characters that settings and plan have beside three objectives in a terminal of 80 columns."""


def front_table(snapshot: StudySnapshot, *, most: int = 20) -> Table:
    """The Pareto front: trial, plan, hyperparameters, values with units; the knee is marked.

    Args:
        snapshot: The study.
        most: Rows shown of a longer front: the knee and an even selection by the first objective.
    """
    front = front_trials(snapshot)
    knee = knee_trial(snapshot, front)
    costs = costs_of(value_matrix(snapshot, front), [objective.direction for objective in snapshot.objectives])
    ordered = [front[row] for row in costs[:, 0].argsort(kind="stable")]
    shown = _selection(ordered, knee, most)
    caption = _caption(snapshot, len(front), len(shown))
    title = Text(f"Pareto front of {snapshot.name}")
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("Trial", justify="right", no_wrap=True)
    has_plans = not is_program_study(snapshot)
    if has_plans:
        table.add_column("Plan", overflow="fold")
    table.add_column("Hyperparameters" if has_plans else "Values", overflow="fold", min_width=SETTING_WIDTH)
    axes = get_axes(snapshot)
    for axis in axes:  # one word a line: three objectives and the settings fit into 80 columns
        words = axis.label.replace(" ", "\n")
        table.add_column(f"{words} {'↑' if axis.higher_is_better else '↓'}\n{axis.unit}", justify="right", no_wrap=True)
    names = [name for name in searched_parameters(front) if not name.startswith(PLAN_PREFIX)]
    for trial in shown:
        is_knee = knee is not None and trial.number == knee.number
        values = trial.values or {}
        # As Text: a study's words are never read as markup.
        plan = "\n".join(textwrap.wrap(trial.plan, PLAN_WIDTH, break_long_words=False, break_on_hyphens=False))
        cells = [Text(f"{'★ ' if is_knee else ''}{trial.number}"), *([Text(plan)] if has_plans else [])]
        cells.append(Text(_settings(trial, names)))
        cells += [Text(_figure(values[axis.name] / axis.scale, axis.decimals)) for axis in axes]
        table.add_row(*cells, style="bold" if is_knee else None)
    return table


def status_line(snapshot: StudySnapshot) -> str:
    """How the trials stand, in one line."""
    summary = get_summary(snapshot)
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts.items())
    trials = f"{summary.num_trials} trial{'s' if summary.num_trials != 1 else ''}"
    return f"{trials}: {counts}" if counts else "no trials yet"


def _caption(snapshot: StudySnapshot, num_front: int, num_shown: int) -> Text:
    if not num_front:
        return Text(get_summary(snapshot).empty_reason)
    parts = ["★ the knee: a good compromise of all objectives"] if num_front > 1 else []
    parts += [f"{num_front - num_shown} more in the report"] if num_shown < num_front else []
    return Text("; ".join(parts))


def _selection(ordered: list[TrialRow], knee: TrialRow | None, most: int) -> list[TrialRow]:
    if len(ordered) <= most:
        return ordered
    rows = {round(place * (len(ordered) - 1) / (most - 2)) for place in range(most - 1)}
    return [trial for row, trial in enumerate(ordered) if row in rows or trial is knee]


def _figure(value: float, decimals: int) -> str:
    """A value with so many decimals; a small one, of which they would leave nothing, by its own digits."""
    return f"{value:.3g}" if 0 < abs(value) < 10 ** (1 - decimals) else f"{value:.{decimals}f}"


def _settings(trial: TrialRow, names: list[str]) -> str:
    told = (f"{name.rpartition('.')[2]}={parameter_text(trial.parameters.get(name))}" for name in names)
    return " ".join("\n".join(_folded(setting)) for setting in told)


def _folded(setting: str) -> list[str]:
    """Lines of a long setting, broken after an underscore."""
    lines = [""]
    for part in re.findall(r"[^_]*_|[^_]+", setting):
        if lines[-1] and len(lines[-1] + part) > SETTING_WIDTH:
            lines.append("")
        lines[-1] += part
    return lines
