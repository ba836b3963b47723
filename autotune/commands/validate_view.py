"""What ``autotune validate`` prints for people."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.cost.accuracy import Accuracy, Errors, Ranking, Spread, memory_errors, time_errors
from autotune.cost.fitted import num_fitted
from autotune.cost.published import PublishedRuns
from autotune.cost.run_estimates import RunEstimates

MAX_REASONS = 12
"""Lines of reasons for skipping, and of assumptions, that are printed."""
MAX_NAMES = 4
"""Rows that are named with a reason."""
FAR_OFF_FACTOR = 50
"""A measured time so many times above or below the estimate is taken for a slip in the table."""


def show(table: PublishedRuns, estimates: RunEstimates, accuracy: Accuracy, num_worst: int) -> None:
    """Print tables of errors, ranking, the memory gate, the worst rows, what was skipped and what was assumed."""
    console = Console()
    _say(console, *_summary(table, accuracy), *_far_off(table, estimates), "")
    for title, key in (
        ("source", "by_family"), ("device", "by_device"), ("size", "by_size"), ("model family", "by_model")
    ):  # fmt: skip
        _errors(console, title, accuracy, key)
    _ranking(console, accuracy)
    _gate(console, accuracy)
    if num_worst:
        _worst(console, table, estimates, num_worst)
    _skipped(console, table)
    _reasons(console, "assumed", Counter(text for run in table.runs for text in run.assumptions))
    if table.unknown_columns:
        _say(console, f"columns not read: {', '.join(table.unknown_columns)}")


def _say(console: Console, *lines: str) -> None:
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _summary(table: PublishedRuns, accuracy: Accuracy) -> list[str]:
    runs, fitted = len(table.runs), num_fitted(table.runs)
    times, memories = accuracy.time.overall.num_rows, accuracy.memory.overall.num_rows
    lines = [f"{runs} runs estimated, {len(table.skipped)} skipped; compared: {times} times, {memories} of memory"]
    if fitted:
        lines.append(
            f"{fitted} of them are runs that the shipped calibration was fitted to: their errors are in-sample; "
            "docs/accuracy.md has those of held-out runs"
        )
    return lines


def _far_off(table: PublishedRuns, estimates: RunEstimates) -> list[str]:
    """A warning of measured times so far from the estimate that their unit must be wrong."""
    measured = np.array([run.step_seconds if run.timed else np.nan for run in table.runs], dtype=np.float64)
    ratios = np.abs(np.log(measured / estimates.step_seconds))
    names = [table.runs[index].id for index in np.flatnonzero(ratios > np.log(FAR_OFF_FACTOR))]
    if not names:
        return []
    return [
        f"warning: {len(names)} measured times are over {FAR_OFF_FACTOR} times off the estimate; is their unit seconds"
        f" a step? {_first(names)}"
    ]


def _first(names: list[str]) -> str:
    """The first few names of a list."""
    return ", ".join(names[:MAX_NAMES]) + (" ..." if len(names) > MAX_NAMES else "")


def _errors(console: Console, title: str, accuracy: Accuracy, key: str) -> None:
    times, memories = getattr(accuracy.time, key), getattr(accuracy.memory, key)
    names = dict.fromkeys((*times, *memories))
    if not names:
        return
    table = Table(title=f"errors by {title}", title_justify="left", show_edge=False)
    table.add_column(title, overflow="fold", min_width=20 if key == "by_family" else None)
    for name in ("runs", "time %", "90th %", "bias %", "memory runs", "memory %"):
        table.add_column(name, justify="right")
    for name in names:
        table.add_row(name, *_cells(times.get(name), memories.get(name)))
    if key == "by_family":
        table.add_section()
        table.add_row("all", *_cells(accuracy.time.overall, accuracy.memory.overall))
        table.add_row("mean over sources", *_mean_cells(accuracy.time, accuracy.memory))
    console.print(table)
    console.print()


def _cells(time: Errors | None, memory: Errors | None) -> list[str]:
    cells = ["", "", "", ""]
    if time and time.num_rows:
        cells = [str(time.num_rows), *(f"{v:.1f}" for v in (time.median_abs_pct, time.p90_abs_pct, time.bias_pct))]
    if memory and memory.num_rows:
        return [*cells, str(memory.num_rows), f"{memory.median_abs_pct:.1f}"]
    return [*cells, "", ""]


def _mean_cells(time: Spread, memory: Spread) -> list[str]:
    values = (
        time.family_mean("median_abs_pct"), time.family_mean("p90_abs_pct"), time.family_mean("bias_pct"),
        memory.family_mean("median_abs_pct"),
    )  # fmt: skip
    median, p90, bias, held = ("" if np.isnan(value) else f"{value:.1f}" for value in values)
    return ["", median, p90, bias, "", held]


def _ranking(console: Console, accuracy: Accuracy) -> None:
    if not accuracy.ranking.groups:
        _say(console, "no group of 4 runs or more that differ in their plan alone, so ranking is not judged", "")
        return
    plans = sum(group.num_plans for group in accuracy.ranking.groups)
    table = Table(
        title=f"ranking of {plans} plans in {len(accuracy.ranking.groups)} groups that differ in their plan alone",
        title_justify="left",
        show_edge=False,
    )
    table.add_column("model", no_wrap=True)
    for name in ("Spearman", "top-1 regret %", "top-3 regret %", "over sources", "top-1 %", "top-3 %"):
        table.add_column(name, justify="right")
    for name, ranking in (("this planner", accuracy.ranking), ("ten-line model", accuracy.baseline_ranking)):
        table.add_row(name, *_ranking_cells(ranking))
    console.print(table)
    console.print()


def _ranking_cells(ranking: Ranking) -> list[str]:
    means = (ranking.mean, ranking.family_mean)
    return [
        cell
        for mean in means
        for cell in (
            f"{mean('spearman'):.3f}", f"{mean('top1_regret_pct'):.1f}", f"{mean('top3_regret_pct'):.1f}"
        )
    ]  # fmt: skip


def _gate(console: Console, accuracy: Accuracy) -> None:
    gate = accuracy.gate
    lines = [f"memory: {gate.num_running_refused} of {gate.num_running} runs that ran are called out of memory"]
    if gate.num_oom:
        lines.append(
            f"        {gate.num_oom_refused} of {gate.num_oom} that ran out of memory are called so,"
            f" {gate.num_oom_promised} are promised to fit"
        )
    _say(console, *lines, "")


def _worst(console: Console, table: PublishedRuns, estimates: RunEstimates, num_worst: int) -> None:
    for title, unit, errors, predicted, measured in (
        (
            "time", "s", time_errors(table.runs, estimates.step_seconds), estimates.step_seconds,
            [run.step_seconds for run in table.runs],
        ),
        (
            "memory", "GB", memory_errors(table.runs, estimates), None,
            [run.memory_gb for run in table.runs],
        ),
    ):  # fmt: skip
        known = [int(index) for index in np.flatnonzero(np.isfinite(errors))]
        rows = sorted(known, key=lambda index: -abs(errors[index]))[:num_worst]
        if not rows:
            continue
        view = Table(title=f"largest errors of {title}", title_justify="left", show_edge=False)
        view.add_column("run", no_wrap=True)
        for name in ("model", "plan"):
            view.add_column(name, overflow="fold")
        for name in (f"measured {unit}", f"predicted {unit}", "error %"):
            view.add_column(name, justify="right")
        for index in rows:
            run, real = table.runs[index], measured[index] or np.nan
            guess = predicted[index] if predicted is not None else real * (1 + errors[index] / 100)
            view.add_row(
                run.id, run.model_name, run.plan.describe(), f"{real:.4g}", f"{guess:.4g}",
                f"{errors[index]:+.0f}",
            )  # fmt: skip
        console.print(view)
        console.print()


def _skipped(console: Console, table: PublishedRuns) -> None:
    """Reasons for skipping, each with the rows it was for (by id, or by line where they have none)."""
    rows: dict[str, list[str]] = {}
    for row in table.skipped:
        rows.setdefault(row.reason, []).append(row.id)
    _reasons(console, "skipped", Counter({f"{reason} ({_first(ids)})": len(ids) for reason, ids in rows.items()}))


def _reasons(console: Console, title: str, counts: Counter[str]) -> None:
    if not counts:
        return
    lines = [f"{title}:", *(f"  {count:5d}  {reason}" for reason, count in counts.most_common(MAX_REASONS))]
    rest = len(counts) - MAX_REASONS
    if rest > 0:
        lines.append(f"         and {rest} more kinds (--json has all, by run)")
    _say(console, *lines, "")
