"""Whether plans that the planner calls tied are tied: pairs of measured plans of one job, told apart or not.

    python benchmarks/planner_ties.py RUNS.csv

Takes the groups of runs that differ in their plan alone (as ``autotune validate`` ranks them), and in each the plan
estimated to be best against every other. The rule is the planner's own, ``autotune.search.compare``.

Writes ``benchmarks/results/planner_ties.json``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autotune.cost.accuracy import MIN_GROUP
from autotune.cost.published import PublishedRun, read_runs
from autotune.cost.run_estimates import RunEstimates, estimate_runs
from autotune.search.compare import difference_uncertainty
from engine.atomic import write_json

RESULT = Path(__file__).resolve().parent / "results" / "planner_ties.json"


def pairs(runs: list[PublishedRun], estimates: RunEstimates) -> Iterator[tuple[bool, float]]:
    """For the estimated best of a group and each other plan: called a tie, and how much slower the other measured."""
    groups = defaultdict(list)
    for index, run in enumerate(runs):
        if run.timed:
            groups[run.ranking_group].append(index)
    time = np.stack([np.broadcast_to(part, len(runs)) for part in estimates.time.values()], axis=1)
    step, low, high = estimates.step_seconds, estimates.step_seconds_low, estimates.step_seconds_high
    for members in groups.values():
        best, *others = sorted(members, key=lambda index: step[index])
        if len(members) < MIN_GROUP:
            continue
        for other in others:
            error = float(high[best] - low[best]) / 2 / float(step[best])
            uncertainty = difference_uncertainty(float(step[best]), error, (time[other] - time[best]).tolist())
            measured = (runs[other].step_seconds or 0.0) / (runs[best].step_seconds or 1.0) - 1
            yield bool(step[other] - step[best] <= uncertainty), measured


def main() -> int:
    """Judge the pairs, write the result file."""
    parser = argparse.ArgumentParser(description="Judge the planner's ties on measured runs.")
    parser.add_argument("runs", type=Path, help="table of runs, in the form that autotune validate reads")
    runs = list(read_runs(parser.parse_args().runs).runs)
    found = np.array(list(pairs(runs, estimate_runs(runs))))
    tied = found[:, 0] > 0
    right = found[:, 1] > 0
    figures = {
        "pairs": len(found),
        "ties": int(tied.sum()),
        "told_apart_right_ratio": float(right[~tied].mean()),
        "ties_right_ratio": float(right[tied].mean()),
    }
    lines = [
        f"{figures['pairs']} pairs of measured plans of one job, the one estimated to be faster against each other:"
        f" {figures['ties']} are called ties. Of the pairs told apart, {figures['told_apart_right_ratio'] * 100:.0f} %"
        f" were measured in the order told; of the ties {figures['ties_right_ratio'] * 100:.0f} % (a coin gives 50 %).",
    ]
    write_json(RESULT, {
        "title": "Ties of the planner", "arguments": ["RUNS.csv"],
        "setup": "published runs, each with its own stack's figures", "lines": lines,
    } | figures)  # fmt: skip
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
