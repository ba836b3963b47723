"""The front in a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from autotune.apply.program import is_program_study
from autotune.apply.select import front_trials, knee_trial, value_matrix
from autotune.search.pareto import costs_of
from autotune.study.snapshot import StudySnapshot, TrialRow
from reports.info import Axis, get_axes, get_summary, parameter_text, searched_parameters

PLAN_PREFIX = "plan."
"""Searched values that the plan's description already tells."""

SETTING_WIDTH = 23
"""Characters that the settings have beside three objectives in a terminal of 80 columns."""
LEAST_WIDTH = 9
"""Characters that plans and settings have at least: numbers are never cut."""
UNIT_WIDTH = 10
"""Characters of a unit in a line of the header."""
GAP = 2
"""Spaces between columns, and of both edges together."""


def front_table(snapshot: StudySnapshot, *, most: int = 20, width: int = 80) -> Table:
    """The Pareto front: trial, plan, hyperparameters, values with units; the knee is marked.

    Args:
        snapshot: The study.
        most: Rows shown of a longer front: the knee and an even selection by the first objective.
        width: Columns of the terminal.
    """
    front = front_trials(snapshot)
    knee = knee_trial(snapshot, front)
    costs = costs_of(value_matrix(snapshot, front), [objective.direction for objective in snapshot.objectives])
    ordered = [front[row] for row in costs[:, 0].argsort(kind="stable")]
    shown = _selection(ordered, knee, most)
    caption = _caption(snapshot, len(front), len(shown))
    title = Text(f"Pareto front of {snapshot.name}")
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    axes = get_axes(snapshot)
    headers = ["Trial", *("\n".join(_header(axis)) for axis in axes)]
    names = [name for name in searched_parameters(front) if not name.startswith(PLAN_PREFIX)]
    numbers = [
        [
            f"{'★ ' if trial is knee else ''}{trial.number}",
            *(_figure((trial.values or {})[axis.name] / axis.scale, axis.decimals) for axis in axes),
        ]
        for trial in shown
    ]
    has_plans = not is_program_study(snapshot)
    texts = [[*([trial.plan] if has_plans else []), _settings(trial, names, SETTING_WIDTH)] for trial in shown]
    titles = ["Plan", "Hyperparameters"] if has_plans else ["Values"]
    taken = sum(_width(column) + GAP for column in zip(headers, *numbers, strict=True))
    widths = _text_widths([_width(column) for column in zip(titles, *texts, strict=True)], width - taken - GAP)
    table.add_column(headers[0], justify="right", no_wrap=True)
    for column, text_width in zip(titles, widths, strict=True):
        table.add_column(column, overflow="fold", width=text_width)
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=True)
    for trial, (number, *figures), (*plan, _) in zip(shown, numbers, texts, strict=True):
        words = [*plan, _settings(trial, names, widths[-1])]
        # As Text: a study's words are never read as markup.
        table.add_row(*map(Text, (number, *words, *figures)), style="bold" if trial is knee else None)
    return table


def _header(axis: Axis) -> list[str]:
    """Lines of an objective's header, a word a line: three objectives and the settings fit into 80 columns."""
    label = f"{axis.label} {'↑' if axis.higher_is_better else '↓'}".split(" ")
    return [*label[:-2], " ".join(label[-2:]), *textwrap.wrap(axis.unit, UNIT_WIDTH, break_long_words=False)]


def _width(cells: Sequence[str]) -> int:
    """Characters of the longest line."""
    return max((len(line) for cell in cells for line in cell.splitlines()), default=0)


def _text_widths(wanted: list[int], free: int) -> list[int]:
    """Widths of the columns of text in what the numbers leave: the settings' own comes before the plan's.

    Args:
        wanted: Width of each at which nothing is folded; the settings are the last.
        free: Characters for all of them and the gaps behind them.
    """
    free -= GAP * (len(wanted) - 1)
    if sum(wanted) <= free:
        return wanted
    *plans, settings = wanted
    least = LEAST_WIDTH * len(plans)
    settings = max(min(settings, max(free - sum(plans), min(SETTING_WIDTH, free - least))), LEAST_WIDTH)
    return [*(max(free - settings, LEAST_WIDTH) for _ in plans), settings]


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


def _settings(trial: TrialRow, names: list[str], width: int) -> str:
    told = (f"{name.rpartition('.')[2]}={parameter_text(trial.parameters.get(name))}" for name in names)
    return " ".join("\n".join(_folded(setting, width)) for setting in told)


def _folded(setting: str, width: int) -> list[str]:
    """Lines of a long setting, broken after an underscore or its name."""
    lines = [""]
    for part in re.findall(r"[^_=]*[_=]|[^_=]+", setting):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return lines
