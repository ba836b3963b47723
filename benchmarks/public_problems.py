"""Search on public problems that the prior never saw: our default sampler against Optuna's default, seed by seed.

For problems whose hyperparameters the prior speaks of, three kinds of it: one fitted without any row of the problem's
task (Marin's sweeps: without that model size; of TaskSet it has no row anyway), one spoiled on purpose (the losses of
its source rows shuffled within each task, so that it is sure of what is wrong), and none. Where ours is worse by more
than noise, the table says so.

    python benchmarks/public_problems.py [--shared ../shared] [--seeds 20] [--trials 60] [--only GROUP]

Runs that are in ``runs/benchmarks/public_problems.jsonl`` are not run again. Writes
``benchmarks/results/public_problems.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bootstrap
import numpy as np
import run_log
from problems import SEQUENCE_LENGTH, Problem, everything
from search_loop import Search, feasible_values, search, search_by_optuna

from autotune.prior.predict import TaskPrior
from autotune.search.pareto import front_box, hypervolume
from autotune.search.samplers import make_sampler
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "public_problems.json"
CHECKPOINTS = (10, 20, 40, 60)
RIVAL = "Optuna's default"

PriorOf = Callable[[Problem, Path], TaskPrior | None]


@dataclass(frozen=True)
class Method:
    """One column of the table."""

    name: str
    run: Callable[[Problem, int, int, Path | None], Search | None]
    """Problem, seed, trials, reference data -> what was tried; None where the method has nothing to add."""


def main() -> int:
    """Run what is missing, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="reference data")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--only", help="one group of problems")
    parser.add_argument("--log", type=Path, default=Path("runs/benchmarks/public_problems.jsonl"))
    options = parser.parse_args()
    shared = options.shared if (options.shared / "data" / "hpo").is_dir() else None
    if shared is None:
        print("no reference data: only the problems that need none", file=sys.stderr)
    problems = [p for p in everything(shared) if options.only in (None, p.group)]
    done = {(row["problem"], row["method"], row["seed"]): row for row in run_log.read(options.log)}
    for problem in problems:
        for seed in range(options.seeds):
            for method in METHODS:
                key = (problem.name, method.name, seed)
                if key in done and len(done[key]["values"]) >= min(options.trials, done[key]["asked"]):
                    continue
                run = method.run(problem, seed, options.trials, shared)
                if run is None:
                    continue
                done[key] = as_data(problem, method, seed, options.trials, run)
                run_log.add(options.log, done[key])
        print(f"{problem.name} done", file=sys.stderr)
    result = evaluate(problems, done, options.trials)
    lines = table(result)
    print("\n".join(lines))
    if options.only is None:
        facts = {"title": "Search on problems the prior never saw", "setup": setup(), "lines": lines}
        write_json(RESULT, {**facts, **result})
    return 0


def setup() -> str:
    """How it was made, in words."""
    return (
        f"optuna {version('optuna')}, one CPU core; every method sees the same seeds; what a prior decides where its"
        " task lies outside of what it knows was chosen on these TaskSet tables"
    )


def ours(prior_of: PriorOf | None) -> Callable[[Problem, int, int, Path | None], Search | None]:
    """Our default sampler, with a prior or without."""

    def run(problem: Problem, seed: int, num_trials: int, shared: Path | None) -> Search | None:
        prior = None
        if prior_of is not None:
            prior = prior_of(problem, shared) if shared is not None else None
            if prior is None:
                return None
        sampler = make_sampler("joint")
        return search(sampler, problem.space, problem.function, seed=seed, num_trials=num_trials, task_prior=prior)

    return run


def optuna_default(problem: Problem, seed: int, num_trials: int, shared: Path | None) -> Search:
    """What ``optuna.create_study`` takes when nothing is said; only its seed is ours."""
    from optuna.samplers import TPESampler

    return search_by_optuna(TPESampler(seed=seed), problem.space, problem.function, num_trials=num_trials)


def random(problem: Problem, seed: int, num_trials: int, shared: Path | None) -> Search:
    """At random."""
    sampler = make_sampler("random")
    return search(sampler, problem.space, problem.function, seed=seed, num_trials=num_trials)


def foreign_prior(problem: Problem, shared: Path) -> TaskPrior | None:
    """The prior without the problem's source, at its task."""
    return _prior_at(problem, shared, is_spoiled=False)


def spoiled_prior(problem: Problem, shared: Path) -> TaskPrior | None:
    """The same, fitted to shuffled losses."""
    return _prior_at(problem, shared, is_spoiled=True)


METHODS = (
    Method("ours", ours(None)),
    Method("ours, foreign prior", ours(foreign_prior)),
    Method("ours, spoiled prior", ours(spoiled_prior)),
    Method(RIVAL, optuna_default),
    Method("random", random),
)


def _prior_at(problem: Problem, shared: Path, *, is_spoiled: bool) -> TaskPrior | None:
    from autotune.prior.task import Task

    if problem.group == "Marin":
        size = problem.space.data["num_parameters"]
        task = Task(
            num_parameters=size,
            num_active_parameters=size,
            total_tokens=problem.space.data["total_tokens"],
            sequence_length=SEQUENCE_LENGTH,
            schedule="linear",
            min_lr_ratio=0.0,
        )
        return _prior(shared, is_spoiled, size).at(task)
    if problem.group == "TaskSet":  # a learning rate all the same, of networks far smaller than any the prior knows
        task = Task(
            num_parameters=1_000_000, num_active_parameters=1_000_000, total_tokens=100_000_000, sequence_length=128
        )
        return _prior(shared, is_spoiled, None).at(task)
    return None


@cache
def _prior(shared: Path, is_spoiled: bool, without_size: int | None) -> Any:
    """The prior fitted anew, without the one-factor sweeps of one model size."""
    from autotune.prior.fit import fit
    from autotune.prior.tables import marin_rows, step_law_rows

    folder = shared / "data" / "hpo"
    reference = step_law_rows(folder)
    others = [row for row in marin_rows(folder) if row.task.num_parameters != without_size]
    if is_spoiled:
        reference, others = _shuffled(reference), _shuffled(others)
    return fit(reference, others)


def _shuffled(rows: Sequence[Any]) -> list[Any]:
    """Rows whose losses are dealt out anew within each task."""
    rng = np.random.default_rng(0)
    by_task: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_task[row.task.model_dump_json()].append(row)
    shuffled = []
    for members in by_task.values():
        order = rng.permutation(len(members))
        shuffled += [
            row.changed(loss=members[other].loss, status=members[other].status)
            for row, other in zip(members, order, strict=True)
        ]
    return shuffled


# Evaluation -----------------------------------------------------------------------------------------------------------


def as_data(problem: Problem, method: Method, seed: int, asked: int, run: Search) -> dict[str, Any]:
    """A search as one line of the log; values are null where a trial gave none or lies beyond a bound."""
    rows = feasible_values(run, problem.space.objectives).tolist()
    values = [None if np.isnan(row).any() else row for row in rows]
    return {
        "problem": problem.name,
        "method": method.name,
        "seed": seed,
        "asked": asked,
        "values": values,
        "num_refused": len(run.observations) - len(run.trials),
        "ask_seconds": sum(run.ask_seconds) / max(1, len(run.ask_seconds)),
    }


def evaluate(
    problems: Sequence[Problem], done: Mapping[tuple[str, str, int], dict[str, Any]], num_trials: int
) -> dict[str, Any]:
    """Loss of each method by trials, and its difference from the rival's by seed with a bootstrap interval.

    The loss of a search is, with one objective, its distance from the best value that any search found, as a share of
    the distance from there to the median of random trials; with several, one minus its share of the hypervolume of all
    searches' common front.
    """
    counts = [count for count in CHECKPOINTS if count <= num_trials]
    table = {}
    for problem in problems:
        runs = {key: row for key, row in done.items() if key[0] == problem.name}
        directions = [objective.direction for objective in problem.space.objectives]
        width = len(directions)
        arrays = {
            key: np.array([[np.nan] * width if v is None else v for v in row["values"]], dtype=float).reshape(-1, width)
            for key, row in runs.items()
        }
        everything_seen = np.concatenate(list(arrays.values()))
        if width == 1:
            best = np.nanmin(everything_seen)
            chance = [array for key, array in arrays.items() if key[1] == "random"]
            unit = float(np.nanmedian(np.concatenate(chance)) - best) or 1.0
            losses = {
                key: [float((np.nanmin(a[:count], initial=np.inf) - best) / unit) for count in counts]
                for key, a in arrays.items()
            }
        else:
            box = front_box(everything_seen, directions)
            whole = hypervolume(everything_seen, directions, box)
            losses = {
                key: [1 - hypervolume(a[:count], directions, box) / whole for count in counts]
                for key, a in arrays.items()
            }
        table[problem.name] = {
            "group": problem.group,
            "num_seeds": len({key[2] for key in runs}),
            "methods": _methods(losses, runs, counts),
        }
    return {"num_trials": num_trials, "after": counts, "problems": table}


def _methods(
    losses: Mapping[tuple[str, str, int], list[float]],
    runs: Mapping[tuple[str, str, int], dict[str, Any]],
    counts: Sequence[int],
) -> dict[str, Any]:
    by_method: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for (_, method, seed), values in losses.items():
        by_method[method][seed] = [min(value, 10.0) for value in values]
    result = {}
    for method, by_seed in by_method.items():
        common = sorted(by_seed.keys() & by_method[RIVAL].keys())
        difference = np.array([by_seed[s] for s in common]) - np.array([by_method[RIVAL][s] for s in common])
        low, high = bootstrap.interval(bootstrap.means(difference))
        seconds = [row["ask_seconds"] for key, row in runs.items() if key[1] == method]
        result[method] = {
            "mean_loss": np.array(list(by_seed.values())).mean(axis=0).round(5).tolist(),
            "minus_rival": difference.mean(axis=0).round(5).tolist(),
            "interval_95": [[round(a, 5), round(b, 5)] for a, b in zip(low, high, strict=True)],
            "is_worse": [bool(a > 0) for a in low],
            "ask_cpu_seconds": round(float(np.mean(seconds)), 5),
        }
    assert len(counts)
    return result


def table(result: Mapping[str, Any]) -> list[str]:
    """The table for people, as Markdown."""
    counts = result["after"]
    lines = [
        "Loss, 0 is the best known: with one objective the distance from there as a share of that of a median random"
        " trial, with several the share of the common front's hypervolume that is missing. **Bold**: worse than"
        f" {RIVAL} (TPE) by more than the 95 % interval of the difference seed by seed. *Foreign prior*: fitted without"
        " the problem's task; *spoiled*: fitted to losses shuffled within each task.",
        "",
        f"| problem (seeds) | method | {' | '.join(f'after {count}' for count in counts)} | CPU s an ask |",
        f"|---|---|{'---|' * len(counts)}---|",
    ]
    for name, problem in result["problems"].items():
        for method in (m.name for m in METHODS if m.name in problem["methods"]):
            row = problem["methods"][method]
            cells = [
                f"**{value:.4f}**" if is_worse and method.startswith("ours") else f"{value:.4f}"
                for value, is_worse in zip(row["mean_loss"], row["is_worse"], strict=True)
            ]
            seconds = f"{row['ask_cpu_seconds']:.3f}"
            lines.append(f"| {name} ({problem['num_seeds']}) | {method} | {' | '.join(cells)} | {seconds} |")
    return [*lines, "", *_summary(result)]


def _summary(result: Mapping[str, Any]) -> list[str]:
    """How often each of ours is worse than the rival, and how often better, beyond noise."""
    lines = [
        f"Problems on which ours is worse than {RIVAL} by more than noise / better by more than noise / all:",
        "",
        f"| method | {' | '.join(f'after {count}' for count in result['after'])} |",
        f"|---|{'---|' * len(result['after'])}",
    ]
    for method in (m.name for m in METHODS if m.name.startswith("ours")):
        rows = [p["methods"][method] for p in result["problems"].values() if method in p["methods"]]
        cells = []
        for place in range(len(result["after"])):
            ends = [row["interval_95"][place] for row in rows]
            worse, better = sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)
            cells.append(f"{worse} / {better} / {len(rows)}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
