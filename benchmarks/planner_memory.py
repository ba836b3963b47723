"""How right the planner's memory is on published runs that it was not fitted to, and whether it calls right what fits.

    python benchmarks/planner_memory.py RUNS.csv [--write]

Fits the few figures of memory recipes that do not follow from a stack's code, then again without each (family, model,
device) group and without each source family. Writes ``benchmarks/results/planner_memory.json``, and with ``--write``
the figures and intervals into ``autotune/cost/memory.yaml``.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cost.accuracy import memory_gate
from autotune.cost.calibrate_memory import MemoryFit, held_out, solve, write_recipes
from autotune.cost.published import read_runs
from autotune.cost.run_estimates import estimate_runs
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planner_memory.json"
COVERAGE = 0.8
"""Share of unseen runs that intervals are made to hold."""
LEAST_WIDTH = 0.05
"""Least half-width: a source whose runs agree speaks for its own setup."""
PRIOR_RUNS = 10
"""Runs' worth of the residuals of all that a recipe's own interval starts from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    started = time.process_time()
    table = read_runs(arguments.runs)
    runs = [run for run in table.runs if run.memory_gb and run.outcome == "ok"]
    measured = np.log([(run.memory_gb or np.nan) * 1e9 for run in runs])
    families = [run.family for run in runs]
    fit = MemoryFit.of(runs)
    theta = solve(fit, measured, np.ones(len(runs), dtype=bool))
    predicted = {
        "folds": held_out(fit, measured, [run.fold for run in runs]),
        "family_left_out": held_out(fit, measured, families),
        "in_sample": fit.log_bytes(theta),
    }
    if arguments.write:
        write_recipes(theta, widths([fit.names[i] for i in fit.index], np.abs(predicted["folds"] - measured)))
    estimates = estimate_runs(table.runs)
    gate = vars(memory_gate(table.runs, estimates))
    sizes = np.array([run.cluster.memory_bytes for run in table.runs])
    runs_too_large = (estimates.memory_bytes_high > sizes) & np.array([run.outcome == "ok" for run in table.runs])
    gate["num_running_not_promised"] = int(runs_too_large.sum())
    errors = {name: np.expm1(values - measured) * 100 for name, values in predicted.items()}
    figures = {name: report(families, values) for name, values in errors.items()}
    told = lines(figures, gate)
    write_json(
        RESULT,
        {
            "title": "Memory of published runs that the fit never saw",
            "arguments": ["RUNS.csv"],
            "setup": f"{len(runs)} runs of {len(set(families))} source families with known memory, "
            f"{len({run.fold for run in runs})} folds of (family, model, device); "
            f"{time.process_time() - started:.0f} CPU seconds on {os.cpu_count()} cores ({platform.machine()})",
            "lines": told,
            "gate": gate,
            **figures,
        },
    )
    print("\n".join(told))


def report(families: list[str], errors: np.ndarray) -> dict[str, Any]:
    """Errors in percent, of all runs and by family."""
    keys = np.array(families)
    by_family = {name: np.abs(errors[keys == name]) for name in sorted(set(families))}
    return {
        "memory_median_abs_error_pct": float(np.median(np.abs(errors))),
        "memory_p90_abs_error_pct": float(np.quantile(np.abs(errors), 0.9)),
        "family_mean_memory_median_abs_error_pct": float(np.mean([np.median(e) for e in by_family.values()])),
        "by_family": {name: {"rows": len(e), "median": float(np.median(e))} for name, e in by_family.items()},
    }


def lines(figures: dict[str, dict[str, Any]], gate: dict[str, int]) -> list[str]:
    """The tables, as Markdown."""
    titles = {"folds": "folds of (family, model, device)", "family_left_out": "one family left out"}
    titles["in_sample"] = "in-sample"
    rows = [
        f"| {title} | {f['memory_median_abs_error_pct']:.1f} | {f['memory_p90_abs_error_pct']:.1f} "
        f"| {f['family_mean_memory_median_abs_error_pct']:.1f} |"
        for title, f in ((title, figures[name]) for name, title in titles.items())
    ]
    families = [
        f"| {name} | {found['rows']} | {found['median']:.1f} |"
        for name, found in sorted(figures["folds"]["by_family"].items())
    ]
    return [
        "| fit | median error % | p90 % | mean over families: median % |",
        "|---|---|---|---|",
        *rows,
        "",
        "| family (folds) | runs | median error % |",
        "|---|---|---|",
        *families,
        "",
        f"Of {gate['num_running']} runs published as running, {gate['num_running_refused']} are called out of memory "
        f"(estimate minus margin above the device's memory), and {gate['num_running_not_promised']} are not promised "
        "to fit (estimate plus margin above it). "
        f"Of {gate['num_oom']} that ran out of memory, {gate['num_oom_refused']} are called so, and "
        f"{gate['num_oom_promised']} are promised to fit.",
    ]


def widths(keys: list[str], residuals: np.ndarray) -> dict[str, float]:
    """Half-width by recipe that holds ``COVERAGE`` of the residuals, near that of all where a recipe has few runs."""
    overall = np.quantile(residuals, COVERAGE)
    found = {}
    for key in sorted(set(keys)):
        own = residuals[np.array(keys) == key]
        blend = (len(own) * np.quantile(own, COVERAGE) + PRIOR_RUNS * overall) / (len(own) + PRIOR_RUNS)
        found[key] = max(float(np.expm1(blend)), LEAST_WIDTH)
    return found


if __name__ == "__main__":
    main()
