"""Search for one objective on published grids of pretraining runs: regret after n trials, ours and other optimizers.

    python benchmarks/search_quality.py [--shared ../shared] [--methods "Ax;SMAC"] [--seeds 20]

Each problem is one size and token budget of Step Law (``hpo_cells``): learning rate and batch in the box of its grid,
the loss of the run as objective, without noise. Ours runs with the prior fitted without the cell, with the prior fitted
without every cell of its size (both keep the shipped offsets of other recipes, which were measured against the whole
surface), and without a prior; the last and Ax both begin at the middle of the box. Optuna's GP
runs on the losses as they are and capped at 1.06 times the cell's best, which no user knows.

Runs that are in ``runs/benchmarks/search_quality.jsonl`` are not run again, so the dear ones may run in another
interpreter that has them. Without ``--methods`` it writes ``benchmarks/results/search_quality.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import bootstrap
import numpy as np
import run_log
from hpo_cells import Cell, load_dense, load_moe
from rivals import Missing, make_rival
from search_loop import search

from autotune.prior.predict import Prior, TaskPrior
from autotune.search.encoding import Encoding
from autotune.search.sampler import Observation, SearchState
from autotune.search.single import SurrogateSampler
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "search_quality.json"
CHECKPOINTS = (1, 5, 10, 25, 50)
CAP_RATIO = 1.06
PACKAGES = ("numpy", "scipy", "optuna", "cmaes", "ax-platform", "botorch", "smac", "HEBO")

Run = Callable[[Cell, Path, int, int], tuple[list[float], list[float]]]
"""Cell, reference data, seed, trials -> loss of each trial, CPU seconds of each proposal."""


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    run: Run
    num_trials: int
    max_seeds: int
    """The dear ones run fewer."""


def space_of(cell: Cell) -> Space:
    """Learning rate and batch in the box of the grid."""
    dimensions = tuple(Dimension(name, "log_float", low=low, high=high) for name, (low, high) in cell.box.items())
    return Space(cell.name, (Objective(name="quality"),), dimensions, {})


def loss_of(cell: Cell, point: Mapping[str, Any]) -> float:
    """Loss at a point of the space."""
    return float(cell.loss(point["learning_rate"], point["global_batch_tokens"]))


# Priors that never saw the cell --------------------------------------------------------------------------------------


@cache
def _prior_without(shared: Path, excluded: Callable[[Any], bool]) -> Prior:
    from autotune.prior.fit import fit
    from autotune.prior.tables import step_law_rows

    rows = step_law_rows(shared / "data" / "hpo")
    return fit([row for row in rows if not excluded(row.task)], (), base=Prior.load())


@cache
def _excluded(num_parameters: int, total_tokens: int | None) -> Callable[[Any], bool]:
    def matches(task: Any) -> bool:
        return task.num_parameters == num_parameters and total_tokens in (None, task.total_tokens)

    return matches


def without_cell(cell: Cell, shared: Path) -> TaskPrior:
    """The prior without the cell's rows."""
    return _prior_without(shared, _excluded(cell.task.num_parameters, cell.task.total_tokens)).at(cell.task)


def without_size(cell: Cell, shared: Path) -> TaskPrior:
    """The prior without any row of the cell's number of parameters."""
    return _prior_without(shared, _excluded(cell.task.num_parameters, None)).at(cell.task)


# Methods --------------------------------------------------------------------------------------------------------------


def ours(prior_of: Callable[[Cell, Path], TaskPrior] | None) -> Run:
    """Our default search for one objective."""

    def run(cell: Cell, shared: Path, seed: int, num_trials: int) -> tuple[list[float], list[float]]:
        prior = prior_of(cell, shared) if prior_of else None
        found = search(
            SurrogateSampler(),
            space_of(cell),
            lambda point: {"quality": loss_of(cell, point)},
            seed=seed,
            num_trials=num_trials,
            task_prior=prior,
        )
        return [o.values["quality"] for o in found.trials if o.values], found.ask_seconds

    return run


def rival(name: str, *, is_capped: bool = False) -> Run:
    """Another optimizer."""

    def run(cell: Cell, shared: Path, seed: int, num_trials: int) -> tuple[list[float], list[float]]:
        optimizer = make_rival(name, space_of(cell), seed)
        losses, seconds = [], []
        for _ in range(num_trials):
            begun = time.process_time()
            point = optimizer.ask()
            seconds.append(time.process_time() - begun)
            losses.append(loss_of(cell, point))
            begun = time.process_time()
            optimizer.tell(point, min(losses[-1], CAP_RATIO * cell.best) if is_capped else losses[-1])
            seconds[-1] += time.process_time() - begun
        return losses, seconds

    return run


WITH_PRIOR = "ours, prior without the cell"
WITHOUT_SIZE = "ours, prior without the size"
COLD = "ours, no prior"
AX = "Ax"
METHODS = (
    Method(WITH_PRIOR, ours(without_cell), 25, 20),
    Method(WITHOUT_SIZE, ours(without_size), 25, 20),
    Method(COLD, ours(None), 25, 20),
    Method("random", rival("random"), 50, 20),
    Method("Optuna TPE", rival("Optuna TPE"), 50, 20),
    Method("Optuna TPE, first at the centre", rival("Optuna TPE, first at the centre"), 50, 20),
    Method("CMA-ES", rival("CMA-ES"), 50, 20),
    Method("Optuna GP", rival("Optuna GP"), 25, 2),
    Method("Optuna GP, capped", rival("Optuna GP", is_capped=True), 25, 2),
    Method(AX, rival("Ax"), 25, 6),
    Method("SMAC", rival("SMAC"), 25, 2),
    Method("HEBO", rival("HEBO"), 25, 1),
)


# Evaluation -----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is missing, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="reference data")
    parser.add_argument("--methods", help="names separated by semicolons; all")
    parser.add_argument("--kinds", default="dense,moe")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--log", type=Path, default=Path("runs/benchmarks/search_quality.jsonl"))
    parser.add_argument("--only-report", action="store_true", help="run nothing: evaluate what was run")
    options = parser.parse_args()
    cells = {"dense": load_dense(options.shared), "moe": load_moe(options.shared)}
    wanted = None if options.methods is None else options.methods.split(";")
    done = {(run["method"], run["cell"], run["seed"]): run for run in run_log.read(options.log)}
    for method in () if options.only_report else METHODS:
        if wanted is None or method.name in wanted:
            jobs = [
                (kind, cell, seed)
                for seed in range(min(options.seeds, method.max_seeds))
                for kind in options.kinds.split(",")
                for cell in cells[kind]
            ]
            run_all(method, jobs, options.shared, options.log, done)
    result = evaluate(cells, done)
    print("\n".join(result["lines"]))
    if wanted is None:
        write_json(RESULT, result)
    return 0


def run_all(
    method: Method, jobs: Iterable[tuple[str, Cell, int]], shared: Path, log: Path, done: dict[Any, dict[str, Any]]
) -> None:
    """Run what is not done and log it."""
    for kind, cell, seed in jobs:
        key = (method.name, cell.name, seed)
        if key in done:
            continue
        try:
            losses, seconds = method.run(cell, shared, seed, method.num_trials)
        except Missing as reason:
            print(f"skipped: {reason}", file=sys.stderr)
            return
        regrets = (np.array(losses) - cell.best).tolist()
        done[key] = {
            "method": method.name, "kind": kind, "cell": cell.name, "seed": seed, "regrets": regrets,
            "ask_seconds": seconds, "versions": versions(),
        }  # fmt: skip
        run_log.add(log, done[key])


def versions() -> dict[str, str]:
    """Of the packages that matter, where they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def evaluate(cells: Mapping[str, list[Cell]], done: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """The tables, and the comparison with Ax run by run."""
    tables: dict[str, Any] = {}
    lines = []
    for kind, those in cells.items():
        header = "| method | runs | " + " | ".join(map(str, CHECKPOINTS)) + " | to 0.005 | CPU-s a trial |"
        lines += [f"Mean regret in nats after n trials, {len(those)} {kind} cells:", "", header, "|---" * 9 + "|"]
        for method in METHODS:
            runs = [run for run in done.values() if run["method"] == method.name and run["kind"] == kind]
            if not runs:
                continue
            best = [np.minimum.accumulate(run["regrets"]) for run in runs]
            figures: dict[str, Any] = {"runs": len(runs), "seeds": len({run["seed"] for run in runs})}
            figures["regret"] = {
                str(n): _mean_over_cells(runs, [b[n - 1] for b in best]) for n in CHECKPOINTS if len(best[0]) >= n
            }
            reached = [int(np.argmax(b <= 0.005)) + 1 if b[-1] <= 0.005 else 10**6 for b in best]
            median = int(np.median(reached))
            figures["median_trials_to_0.005"] = median if median < 10**6 else None
            figures["ask_cpu_seconds"] = float(np.mean([np.mean(run["ask_seconds"]) for run in runs]))
            tables.setdefault(kind, {})[method.name] = figures
            num_cells = len({run["cell"] for run in runs})
            where = f" on {num_cells} cells" if num_cells < len(those) else ""
            cellwise = [f"{figures['regret'][str(n)]:.5f}" if str(n) in figures["regret"] else "" for n in CHECKPOINTS]
            lines.append(
                f"| {method.name} | {len(runs)}{where} | {' | '.join(cellwise)}"
                f" | {figures['median_trials_to_0.005'] or '-'} | {figures['ask_cpu_seconds']:.3f} |"
            )
        against = compared(done, kind)
        if against:
            tables[kind]["cold_minus_ax_at_10"] = against
            lines += [
                "",
                f"Ours without the prior minus Ax after 10 trials, mean of the {against['cells']} cells that both ran:"
                f" {against['mean']:+.5f} (95 % of bootstraps over cells: {against['low']:+.5f} to"
                f" {against['high']:+.5f}).",
            ]
        lines.append("")
    overhead = {f"{n} dimensions": ask_seconds_at_100(box_of(n)) for n in (2, 4, 6)}
    first = cells["dense"][0]
    overhead["2 dimensions and the prior"] = ask_seconds_at_100(space_of(first), Prior.load().at(first.task))
    texts = [f"{seconds:.3f} with {what}" for what, seconds in overhead.items()]
    lines.append(f"CPU seconds of one proposal after 100 trials: {', '.join(texts)}.")
    found = dict(item for run in done.values() for item in run["versions"].items())
    return {
        "title": "Search for one objective", "arguments": [], "lines": lines, "tables": tables,
        "ask_cpu_seconds_at_100": overhead, "versions": found,
        "setup": "Step Law's grids (arXiv 2503.04715), log loss interpolated between nodes, without noise; box of the"
        " grid; mean over cells of the mean over seeds; regret is the loss above the best node",
    }  # fmt: skip


def _mean_over_cells(runs: list[dict[str, Any]], values: list[float]) -> float:
    """Mean over cells of the mean over seeds."""
    by_cell: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        by_cell.setdefault(run["cell"], []).append(float(value))
    return float(np.mean([np.mean(those) for those in by_cell.values()]))


def compared(done: Mapping[Any, dict[str, Any]], kind: str) -> dict[str, float] | None:
    """Cold search against Ax after 10 trials, cell by cell."""

    def at_10(name: str) -> dict[str, float]:
        runs = [run for run in done.values() if run["method"] == name and run["kind"] == kind]
        return {
            cell: float(np.mean([min(run["regrets"][:10]) for run in runs if run["cell"] == cell]))
            for cell in {run["cell"] for run in runs}
        }

    cold, ax = at_10(COLD), at_10(AX)
    common = sorted(cold.keys() & ax.keys())
    if not common:
        return None
    differences = np.array([cold[cell] - ax[cell] for cell in common])
    low, high = bootstrap.interval(bootstrap.means(differences))
    return {"cells": len(common), "mean": float(differences.mean()), "low": float(low), "high": float(high)}


def box_of(num_dims: int) -> Space:
    """A unit cube."""
    dimensions = tuple(Dimension(f"x{i}", "float", low=0.0, high=1.0) for i in range(num_dims))
    return Space("overhead", (Objective(name="loss"),), dimensions, {})


def ask_seconds_at_100(space: Space, prior: TaskPrior | None = None) -> float:
    """CPU seconds of one of our proposals after 100 trials of a smooth function: the median of 5."""
    encoding, (objective,) = Encoding.of(space.dimensions), space.objectives
    x = np.random.default_rng(0).uniform(size=(100, len(space.dimensions)))
    observations = tuple(
        Observation(i, "ok", encoding.values(row), {objective.name: 2.5 + 0.3 * float(((row - 0.4) ** 2).sum())})
        for i, row in enumerate(x)
    )
    seconds = []
    for seed in range(5):
        begun = time.process_time()
        SurrogateSampler().propose(SearchState(space, observations, 100, seed, seed, task_prior=prior))
        seconds.append(time.process_time() - begun)
    return float(np.median(seconds))


if __name__ == "__main__":
    raise SystemExit(main())
