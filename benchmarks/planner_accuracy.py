"""How right the planner's step times are on published runs it was not fitted to; and the fit of the shipped figures.

    python benchmarks/planner_accuracy.py RUNS.csv [--write]

Fits all figures of the cost model to the runs, then again without each part of them: ten folds, each of whole (family,
model, device) groups, with all runs of equal inputs in one fold; and one fold for each source family. Errors are of the
fits that never saw the run. Writes ``benchmarks/results/planner_accuracy.json``, and with ``--write`` the fitted
figures into ``autotune/cost/coefficients.yaml``, ``autotune/cost/software.yaml`` and ``autotune/specs/hardware.yaml``.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cost.accuracy import Ranking, Spread, baseline_seconds, ranking, spread, time_errors
from autotune.cost.calibrate import Fit, grouped_folds, held_out, solve, tabulate
from autotune.cost.calibration_files import write_calibration
from autotune.cost.fitted import write_fitted
from autotune.cost.published import PublishedRun, read_runs
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planner_accuracy.json"
NUM_FOLDS = 10
COVERAGE = 0.8
"""Share of unseen runs that intervals are made to hold."""
UNSEEN_RATIO = 1.25
"""How much wider the interval of a device without runs is than that of all runs of families left out."""
PRIOR_RUNS = 10
"""Runs' worth of the residuals of all that a stack's or a device's own interval starts from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    started = time.process_time()
    runs = [run for run in read_runs(arguments.runs).runs if run.timed]
    measured = np.log([run.step_seconds or np.nan for run in runs])
    names = sorted({run.family for run in runs})
    families = np.array([names.index(run.family) for run in runs])
    fit = Fit(tabulate(runs))
    theta = solve(fit, measured, families, np.ones(len(runs), dtype=bool))
    folds = grouped_folds([run.fold for run in runs], NUM_FOLDS)
    predictions = {
        "in_sample": fit.log_seconds(theta),
        "folds": held_out(fit, measured, families, folds),
        "family_left_out": held_out(fit, measured, families, families),
        "ten_line_model": np.log(baseline_seconds(runs)),
    }
    figures = {name: report(runs, predicted) for name, predicted in predictions.items()}
    seconds = time.process_time() - started
    write_json(
        RESULT,
        {
            "title": "Step times of published runs that the fit never saw",
            "arguments": ["RUNS.csv"],
            "setup": f"{len(runs)} runs of {len(names)} source families, {NUM_FOLDS} folds of (family, model, device); "
            f"{seconds:.0f} CPU seconds on {os.cpu_count()} cores ({platform.machine()})",
            "lines": [*lines(figures), "", *by_family(figures), "", *worst(runs, np.exp(predictions["folds"]))],
            **figures,
        },
    )
    print("\n".join(lines(figures)))
    if arguments.write:
        residuals = {name: np.abs(predicted - measured) for name, predicted in predictions.items()}
        stacks, kinds = [run.software for run in runs], [run.cluster.device_kind for run in runs]
        everywhere = float(np.expm1(np.quantile(residuals["family_left_out"], COVERAGE)))
        write_calibration(
            fit.calibration(theta),
            widths(stacks, residuals["folds"]),
            widths(kinds, residuals["family_left_out"]),
            unseen_interval=min(everywhere * UNSEEN_RATIO, 1.0),
        )
        write_fitted(runs)


def report(runs: Sequence[PublishedRun], predicted: np.ndarray) -> dict[str, Any]:
    """Errors and ranking of predictions ``[n]`` (logarithms of seconds)."""
    errors: Spread = spread(runs, time_errors(runs, np.exp(predicted)))
    ranks: Ranking = ranking(runs, np.exp(predicted))
    return {
        "time_median_abs_error_pct": errors.overall.median_abs_pct,
        "time_p90_abs_error_pct": errors.overall.p90_abs_pct,
        "family_mean_time_median_abs_error_pct": errors.family_mean("median_abs_pct"),
        "family_mean_time_p90_abs_error_pct": errors.family_mean("p90_abs_pct"),
        "spearman_mean": ranks.mean("spearman"),
        "top1_regret_mean_pct": ranks.mean("top1_regret_pct"),
        "top3_regret_mean_pct": ranks.mean("top3_regret_pct"),
        "num_groups": len(ranks.groups),
        "by_family": {
            name: {"rows": e.num_rows, "median": e.median_abs_pct, "p90": e.p90_abs_pct, "bias": e.bias_pct}
            for name, e in errors.by_family.items()
        },
        "by_device": {
            name: {"rows": e.num_rows, "median": e.median_abs_pct, "p90": e.p90_abs_pct, "bias": e.bias_pct}
            for name, e in errors.by_device.items()
        },
    }


def lines(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The table, as Markdown."""
    titles = {
        "folds": "folds of (family, model, device)",
        "family_left_out": "one family left out",
        "in_sample": "in-sample",
        "ten_line_model": "ten-line model, not fitted",
    }
    rows = [
        f"| {title} | {f['time_median_abs_error_pct']:.1f} | {f['time_p90_abs_error_pct']:.1f} "
        f"| {f['family_mean_time_median_abs_error_pct']:.1f} | {f['family_mean_time_p90_abs_error_pct']:.1f} "
        f"| {f['spearman_mean']:.3f} | {f['top1_regret_mean_pct']:.1f} | {f['top3_regret_mean_pct']:.1f} |"
        for title, f in ((title, figures[name]) for name, title in titles.items())
    ]
    return [
        "| fit | median error % | p90 % | family mean: median % | p90 % | Spearman | top-1 regret % | top-3 regret % |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def by_family(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Errors of each source family, held out by fold and as a whole, as Markdown."""
    folds, left_out = (figures[name]["by_family"] for name in ("folds", "family_left_out"))
    return [
        "| source family | runs | folds: median error % | p90 % | bias % | family left out: median error % | bias % |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {found['rows']} | {found['median']:.1f} | {found['p90']:.1f} | {found['bias']:+.1f} "
            f"| {left_out[name]['median']:.1f} | {left_out[name]['bias']:+.1f} |"
            for name, found in folds.items()
        ),
    ]


def worst(runs: Sequence[PublishedRun], predicted: np.ndarray, most: int = 10) -> list[str]:
    """The runs with the largest errors of predictions ``[n]`` in seconds, those of equal inputs once, as Markdown."""
    errors = time_errors(runs, predicted)
    rows: dict[Any, int] = {}
    for index in np.argsort(-np.abs(errors)):
        rows.setdefault((runs[index].family, runs[index].inputs), int(index))
    shown = list(rows.values())[:most]
    return [
        f"The {len(shown)} largest errors of the folds (runs of equal inputs once); docs/accuracy.md says why:",
        "",
        "| run | model | devices | plan | measured s | predicted s | error % |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {run.id} | {run.model_name} | {run.cluster.num_devices} {run.cluster.device_kind} "
            f"| {run.plan.describe()} | {run.step_seconds:.4g} | {predicted[index]:.4g} | {errors[index]:+.0f} |"
            for index in shown
            for run in (runs[index],)
        ),
    ]


def widths(keys: Sequence[str], residuals: np.ndarray) -> dict[str, float]:
    """Half-width by key that holds ``COVERAGE`` of the residuals, near that of all where a key has few."""
    overall = np.quantile(residuals, COVERAGE)
    found = {}
    for key in sorted(set(keys)):
        own = residuals[np.array([other == key for other in keys])]
        blend = (len(own) * np.quantile(own, COVERAGE) + PRIOR_RUNS * overall) / (len(own) + PRIOR_RUNS)
        found[key] = float(min(np.expm1(blend), 1.0))
    return found


if __name__ == "__main__":
    main()
