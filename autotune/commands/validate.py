"""``autotune validate``: the cost model against measured runs of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from autotune.cost.accuracy import Accuracy, Errors, Ranking, Spread
    from autotune.cost.published import PublishedRuns
    from autotune.cost.run_estimates import RunEstimates


def command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Table of measured runs, one a row.")],
    software: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Training stack of all runs. [default: each run's, told from its source]"),
    ] = None,
    worst: Annotated[int, typer.Option(min=0, metavar="N", help="Show the N runs with the largest errors.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare the planner's estimates with measured runs: errors of time and memory, and how well it ranks plans.

    Takes a CSV file with one run a row: model_name, layers, hidden, ffn_hidden, heads, kv_heads, vocab, seq_len, gpu,
    num_gpus, tp, pp, dp, cp, ep, micro_batch, global_batch, zero_stage, recompute, precision, schedule,
    step_time_s_equiv, memory_gb_per_gpu, outcome (ok, oom) and more. Cells may be missing: what is completed is listed
    as an assumption, what can't be is skipped with the reason.
    """
    from autotune.cost.accuracy import judge
    from autotune.cost.published import read_runs
    from autotune.cost.run_estimates import estimate_runs, no_estimates

    table = read_runs(runs)
    estimates = estimate_runs(table.runs, software) if table.runs else no_estimates()
    accuracy = judge(table.runs, estimates)
    if as_json:
        print(json.dumps(result(table, estimates, accuracy), indent=2, allow_nan=False))
        return
    from autotune.commands.validate_view import show

    show(table, estimates, accuracy, worst)


def result(table: PublishedRuns, estimates: RunEstimates, accuracy: Accuracy) -> dict[str, Any]:
    """Everything as plain data; a figure that there is nothing for is null."""
    from autotune.cost.accuracy import predicted_memory_gb
    from autotune.cost.fitted import num_fitted

    memory = predicted_memory_gb(table.runs, estimates)
    time, ranking = accuracy.time, accuracy.ranking
    return {
        "rows": len(table.runs),
        "rows_fitted": num_fitted(table.runs),
        "skipped": [{"id": row.id, "reason": row.reason} for row in table.skipped],
        "unknown_columns": list(table.unknown_columns),
        "num_timed": time.overall.num_rows,
        "time_median_abs_error_pct": _number(time.overall.median_abs_pct),
        "time_p90_abs_error_pct": _number(time.overall.p90_abs_pct),
        "time_bias_pct": _number(time.overall.bias_pct),
        "num_memory": accuracy.memory.overall.num_rows,
        "memory_median_abs_error_pct": _number(accuracy.memory.overall.median_abs_pct),
        **_ranking_figures(ranking),
        "family_mean_time_median_abs_error_pct": _number(time.family_mean("median_abs_pct")),
        "family_mean_time_p90_abs_error_pct": _number(time.family_mean("p90_abs_pct")),
        "family_mean_memory_median_abs_error_pct": _number(accuracy.memory.family_mean("median_abs_pct")),
        **{f"family_mean_{name}": value for name, value in _ranking_figures(ranking, by_family=True).items()},
        "num_ranking_groups": len(ranking.groups),
        "by_family": _by(accuracy, "by_family"),
        "by_device": _by(accuracy, "by_device"),
        "by_size": _by(accuracy, "by_size"),
        "by_model": _by(accuracy, "by_model"),
        "memory_gate": vars(accuracy.gate),
        "baseline": {
            "time_median_abs_error_pct": _number(accuracy.baseline_time.overall.median_abs_pct),
            "time_p90_abs_error_pct": _number(accuracy.baseline_time.overall.p90_abs_pct),
            **_ranking_figures(accuracy.baseline_ranking),
            **{
                f"family_mean_{name}": value
                for name, value in _ranking_figures(accuracy.baseline_ranking, by_family=True).items()
            },
        },
        "predictions": [
            {
                "id": run.id,
                "predicted_step_time_s": _number(estimates.step_seconds[index], 7),
                "predicted_step_time_low_s": _number(estimates.step_seconds_low[index], 7),
                "predicted_step_time_high_s": _number(estimates.step_seconds_high[index], 7),
                "predicted_memory_gb": _number(memory[index], 5),
                "measured_step_time_s": run.step_seconds if run.timed else None,
                "measured_memory_gb": run.memory_gb,
                "memory_kind": run.memory_kind,
                "family": run.family,
                "software": run.software,
                "assumptions": list(run.assumptions),
            }
            for index, run in enumerate(table.runs)
        ],
    }


def _ranking_figures(ranking: Ranking, by_family: bool = False) -> dict[str, float | None]:
    mean = ranking.family_mean if by_family else ranking.mean
    return {
        "spearman_mean": _number(mean("spearman")),
        "top1_regret_mean_pct": _number(mean("top1_regret_pct")),
        "top3_regret_mean_pct": _number(mean("top3_regret_pct")),
    }


def _by(accuracy: Accuracy, key: str) -> dict[str, dict[str, float | int | None]]:
    """Errors of time and memory by what runs have in common."""
    times, memories = _spread(accuracy.time, key), _spread(accuracy.memory, key)
    found: dict[str, dict[str, float | int | None]] = {}
    for name in dict.fromkeys((*times, *memories)):
        time, memory = times.get(name), memories.get(name)
        found[name] = {
            "rows": time.num_rows if time else 0,
            "time_median_abs_error_pct": _number(time.median_abs_pct) if time else None,
            "time_p90_abs_error_pct": _number(time.p90_abs_pct) if time else None,
            "time_bias_pct": _number(time.bias_pct) if time else None,
            "memory_rows": memory.num_rows if memory else 0,
            "memory_median_abs_error_pct": _number(memory.median_abs_pct) if memory else None,
        }
    return found


def _spread(spread: Spread, key: str) -> dict[str, Errors]:
    return dict(getattr(spread, key))


def _number(value: float, digits: int = 4) -> float | None:
    """A number of JSON, with some significant digits; null for one that isn't finite."""
    number = float(value)
    return float(f"{number:.{digits}g}") if abs(number) < float("inf") else None
