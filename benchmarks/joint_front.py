"""How soon a search finds the front of speed, memory and quality, on problems whose whole front is known.

    python benchmarks/joint_front.py [--seeds 20] [--trials 50] [--only METHOD] [--noise 0.003]

The problems (``joint_problem``): plans, batch and learning rate of published model sizes on machines of the catalogue.
All methods see the same legal plans; what an unrestricted one proposes beyond them costs it nothing. Measured by the
hypervolume of the true values of what was tried, as a share of the dense front's. Every seed draws anew how wrong the
cost model is; run-to-run noise of quality is ``--noise``. Ours: with the prior fitted without the problem's model size,
without it, and as a black box (a Gaussian process an objective over all dimensions, neither cost model nor prior).

Runs that are in ``runs/benchmarks/joint_front.jsonl`` are not run again. Writes
``benchmarks/results/joint_front.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import run_log
from hpo_cells import load_dense
from joint_problem import LEVEL_SHARE, MEMORY_SD, PAIR_SHARE, PLAN_SHARE, QUALITY_NOISE, TIME_SD, Problem
from search_loop import tell_optuna

from autotune.prior.fit import fit
from autotune.prior.predict import Prior, TaskPrior
from autotune.prior.tables import marin_rows, step_law_rows
from autotune.search.joint import JointSampler
from autotune.search.sampler import Observation, SearchState
from autotune.search.seeds import derive_seed
from autotune.search.uniform import uniform_draws
from autotune.space.objectives import Objective
from autotune.space.space import Scalar
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parent
LOG = ROOT.parent / "runs" / "benchmarks" / "joint_front.jsonl"
RESULT = ROOT / "results" / "joint_front.json"

PROBLEMS = (
    ("N268M_D25.0B", "h100x8"),
    ("N537M_D10.0B", "a100x8:2"),
    ("N1074M_D20.0B", "h100x8:2"),
    ("N429M_D8.0B", "h200x8"),
)
"""Cell and cluster. The search was made on others; results on these were seen before its last changes."""
NUM_TRIALS = 50
CHECKPOINTS = (1, 5, 10, 25, 50)
MAX_REFUSED = 300
"""Proposals of an unrestricted method in a row that may be illegal."""

ERRORS = {
    "time_sd": TIME_SD, "memory_sd": MEMORY_SD, "level_share": LEVEL_SHARE, "pair_share": PAIR_SHARE,
    "plan_share": PLAN_SHARE,
}  # fmt: skip
"""Of the cost model. Searches of a log that were made with others are left aside."""

Chosen = dict[str, Scalar]
Told = Callable[[int, Chosen], Observation]


@dataclass(frozen=True)
class Method:
    """A search."""

    name: str
    run: Callable[[Problem, Told, int], Iterator[tuple[Chosen, float]]]
    """Problem, what tells a trial's values, seed -> candidates with the CPU seconds of choosing each, without end."""
    num_seeds: int | None = None
    """Fewer seeds than the others have, for a slow one."""
    is_restricted: bool = False
    """Whether it knows of the cost model."""


# Ours -----------------------------------------------------------------------------------------------------------------


def ours(
    *, with_prior: bool, is_black_box: bool = False
) -> Callable[[Problem, Told, int], Iterator[tuple[Chosen, float]]]:
    """Our default sampler."""

    def run(problem: Problem, tell: Told, seed: int) -> Iterator[tuple[Chosen, float]]:
        space = problem.space
        if is_black_box:  # objectives by other names are of nothing that is known
            renamed = tuple(Objective(name=f"own_{o.name}", direction=o.direction) for o in space.objectives)
            space = replace(space, objectives=renamed)
        observations: list[Observation] = []
        while True:
            number = len(observations)
            state = SearchState(
                space, tuple(observations), number, derive_seed(seed, "sampler", number), seed,
                enumeration=problem.enumeration,
                forecast=None if is_black_box else problem.forecast,
                task_prior=held_out_prior(problem) if with_prior else None,
            )  # fmt: skip
            begun = time.process_time()
            chosen = JointSampler().propose(state)
            seconds = time.process_time() - begun
            assert chosen is not None, "the space is used up"
            yield chosen, seconds
            told = tell(number, chosen)
            if is_black_box and told.values is not None:
                told = replace(told, values={f"own_{name}": value for name, value in told.values.items()})
            observations.append(told)

    return run


def held_out_prior(problem: Problem) -> TaskPrior:
    """The prior fitted without any run of the problem's model size, at its task."""
    return _prior_without(problem.cell.name.split("_")[0]).at(problem.cell.task)


@cache
def _prior_without(size: str) -> Prior:
    folder = _shared() / "data" / "hpo"
    out = {cell.task.num_parameters for cell in load_dense(_shared()) if cell.name.split("_")[0] == size}
    left = [row for row in step_law_rows(folder) if row.task.num_parameters not in out]
    return fit(left, marin_rows(folder))


# Optuna ---------------------------------------------------------------------------------------------------------------


def by_optuna(
    make: Callable[[int], optuna.samplers.BaseSampler],
) -> Callable[[Problem, Told, int], Iterator[tuple[Chosen, float]]]:
    """One of Optuna's samplers over all legal plans; numbers of a list are ordered for it."""

    def run(problem: Problem, tell: Told, seed: int) -> Iterator[tuple[Chosen, float]]:
        def suggest(trial: optuna.Trial) -> Chosen | None:
            chosen: Chosen = {}
            for dimension in problem.space.dimensions:
                if not problem.space.is_active(dimension, chosen):
                    continue
                if dimension.kind == "log_float":
                    chosen[dimension.name] = trial.suggest_float(
                        dimension.name, dimension.low, dimension.high, log=True
                    )
                elif all(isinstance(value, int) for value in dimension.values):
                    index = trial.suggest_int(dimension.name, 0, len(dimension.values) - 1)
                    chosen[dimension.name] = dimension.values[index]
                else:
                    chosen[dimension.name] = trial.suggest_categorical(dimension.name, dimension.values)
            return chosen if problem.row(chosen) is not None else None

        def rescue(number: int) -> Chosen:
            """A legal candidate at random, in the sampler's own terms."""
            chosen = next(uniform_draws(problem.space, problem.enumeration, derive_seed(seed, "rescue", number)))
            lists = {d.name: d.values for d in problem.space.dimensions if all(isinstance(v, int) for v in d.values)}
            return {n: lists[n].index(v) if lists.get(n) else v for n, v in chosen.items()}

        return _loop(make(seed), suggest, problem, tell, rescue)

    return run


def on_front(problem: Problem, tell: Told, seed: int) -> Iterator[tuple[Chosen, float]]:
    """Optuna's default over learning rate, batch and the place on the batch's exact front of estimates."""
    table = problem.forecast.enumeration.table
    fronts = {}
    for batch in np.unique(table["global_batch_size"]):
        rows = np.flatnonzero((table["global_batch_size"] == batch) & (problem.forecast.ranks == 0))
        fronts[int(batch)] = rows[np.argsort(problem.forecast.predicted["speed"].value[rows], kind="stable")]
    batches = sorted(fronts)

    def suggest(trial: optuna.Trial) -> Chosen:
        cell = problem.cell
        rate = trial.suggest_float("rate", float(cell.rates[0]), float(cell.rates[-1]), log=True)
        rows = fronts[batches[trial.suggest_int("batch", 0, len(batches) - 1)]]
        row = rows[min(int(trial.suggest_float("place", 0.0, 1.0) * len(rows)), len(rows) - 1)]
        return {**problem.plan(row), "hyperparameters.learning_rate": rate}

    return _loop(default(seed), suggest, problem, tell)


def _loop(
    sampler: optuna.samplers.BaseSampler,
    suggest: Callable[[optuna.Trial], Chosen | None],
    problem: Problem,
    tell: Told,
    rescue: Callable[[int], Chosen] | None = None,
) -> Iterator[tuple[Chosen, float]]:
    """Trials of an Optuna study. What is proposed beyond the legal plans is drawn again and forgotten, and after
    ``MAX_REFUSED`` of those in a row a legal candidate is enqueued; memory that ran out is told as a constraint."""
    study = optuna.create_study(directions=[o.direction for o in problem.space.objectives], sampler=sampler)
    worst: dict[str, float] = {}
    number, num_refused, seconds = 0, 0, 0.0
    while True:
        begun = time.process_time()
        if rescue is not None and num_refused == MAX_REFUSED:
            study.enqueue_trial(rescue(number))
        trial = study.ask()
        chosen = suggest(trial)
        seconds += time.process_time() - begun
        if chosen is None:
            num_refused += 1
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        yield chosen, seconds
        tell_optuna(study, trial, problem.space.objectives, tell(number, chosen).values, worst)
        number, num_refused, seconds = number + 1, 0, 0.0


def default(seed: int) -> optuna.samplers.BaseSampler:
    """What Optuna takes for several objectives when it is not told."""
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def at_random(problem: Problem, tell: Told, seed: int) -> Iterator[tuple[Chosen, float]]:
    """Legal candidates, all alike."""
    for number, chosen in enumerate(uniform_draws(problem.space, problem.enumeration, seed)):
        yield chosen, 0.0
        tell(number, chosen)


METHODS = (
    Method("ours", ours(with_prior=True), is_restricted=True),
    Method("ours, no prior", ours(with_prior=False), is_restricted=True),
    Method("ours, black box", ours(with_prior=False, is_black_box=True), num_seeds=5, is_restricted=True),
    Method("TPE on the front", on_front, is_restricted=True),
    Method("Optuna TPE", by_optuna(default)),
    Method("Optuna NSGA-II", by_optuna(lambda seed: optuna.samplers.NSGAIISampler(seed=seed))),
    Method("Optuna GP", by_optuna(lambda seed: optuna.samplers.GPSampler(seed=seed)), num_seeds=2),
    Method("random", at_random),
)


# Running --------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is missing, evaluate all, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=NUM_TRIALS, help="of each search")
    parser.add_argument("--only", help="name of one method")
    parser.add_argument("--noise", type=float, default=QUALITY_NOISE, help="run-to-run noise of quality, nats")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    cells = {cell.name: cell for cell in load_dense(_shared())}
    done = {_key(row): row for row in run_log.read(LOG) if row.get("errors") == ERRORS}
    for seed in range(arguments.seeds):
        for cell, cluster in PROBLEMS:
            missing = [m for m in METHODS if _is_missing(m, cell, cluster, seed, arguments, done)]
            problem = Problem.of(cells[cell], cluster, seed) if missing else None
            for method in missing:
                assert problem is not None, "made where a method is missing"
                row = run(problem, method, seed, arguments.noise, arguments.trials)
                done[_key(row)] = row
                run_log.add(LOG, row)
    cell, cluster = PROBLEMS[0]
    result = evaluate(done, ask_seconds_at_100(Problem.of(cells[cell], cluster, 0)))
    write_json(RESULT, result)
    print("\n".join([result["setup"], *result["lines"]]))
    return 0


def run(problem: Problem, method: Method, seed: int, noise: float, num_trials: int) -> dict[str, Any]:
    """One search as one line of the log."""
    trials: list[Chosen] = []
    seconds = []
    search = method.run(problem, lambda number, chosen: problem.observe(number, chosen, noise), seed)
    for chosen, cpu in search:
        trials.append(chosen)
        seconds.append(cpu)
        if len(trials) == num_trials:
            break
    return {
        "problem": problem.name, "method": method.name, "seed": seed, "noise": noise, "errors": ERRORS,
        "volume": problem.history(trials).round(5).tolist(),
        "ask_cpu_seconds": round(float(np.mean(seconds)), 5),
    }  # fmt: skip


def ask_seconds_at_100(problem: Problem) -> float:
    """CPU seconds of one of our proposals after 100 random trials: the median of 5."""
    draws = uniform_draws(problem.space, problem.enumeration, 0)
    told = tuple(problem.observe(number, next(draws), QUALITY_NOISE) for number in range(100))
    state = SearchState(
        problem.space, told, 100, 0, 0,
        enumeration=problem.enumeration, forecast=problem.forecast, task_prior=held_out_prior(problem),
    )  # fmt: skip
    seconds = []
    for seed in range(5):
        begun = time.process_time()
        JointSampler().propose(replace(state, seed=seed))
        seconds.append(time.process_time() - begun)
    return float(np.median(seconds))


def _is_missing(
    method: Method, cell: str, cluster: str, seed: int, arguments: argparse.Namespace, done: Mapping[Any, Any]
) -> bool:
    if arguments.only not in (None, method.name) or (method.num_seeds is not None and seed >= method.num_seeds):
        return False
    row = done.get((f"{cell} on {cluster}", method.name, seed, arguments.noise))
    return row is None or len(row["volume"]) < arguments.trials


def _key(row: Mapping[str, Any]) -> tuple[str, str, int, float]:
    return row["problem"], row["method"], row["seed"], row["noise"]


def evaluate(done: Mapping[tuple[str, str, int, float], dict[str, Any]], ask_seconds_at_100: float) -> dict[str, Any]:
    """Mean share of the dense front's volume by trials; and the trials after which a method is where each unrestricted
    one is after all of its own.

    Args:
        done: Searches.
        ask_seconds_at_100: See the function of that name.
    """
    grouped: dict[tuple[str, float], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for (problem, method, seed, noise), row in done.items():
        grouped[problem, noise][method][seed] = row
    table = []
    for (problem, noise), methods in sorted(grouped.items()):
        entry: dict[str, Any] = {"problem": problem, "noise": noise, "methods": {}}
        for name, rows in methods.items():
            mean, error, count = _curve([row["volume"] for row in rows.values()])
            entry["methods"][name] = {
                "num_seeds": len(rows),
                "num_trials": len(mean),
                "seeds_after": {str(n): int(count[n - 1]) for n in CHECKPOINTS if n <= len(mean)},
                "mean_volume": {str(n): round(float(mean[n - 1]), 4) for n in CHECKPOINTS if n <= len(mean)},
                "standard_error": {str(n): round(float(error[n - 1]), 4) for n in CHECKPOINTS if n <= len(mean)},
                "trials_to_unrestricted": {
                    rival.name: _trials_to(rows, methods[rival.name])
                    for rival in METHODS
                    if not rival.is_restricted and rows.keys() & methods.get(rival.name, {}).keys()
                },
                "ask_cpu_seconds": round(float(np.mean([row["ask_cpu_seconds"] for row in rows.values()])), 4),
            }
        table.append(entry)
    return {
        "title": "Front of speed, memory and quality: trials until it is found",
        "arguments": [],
        "setup": (
            "plans, batch and learning rate of published model sizes on machines of the catalogue; speed and memory by"
            f" the cost model with random errors by axis and pair of axes ({TIME_SD:g} and {MEMORY_SD:g} in logarithms,"
            " anew by seed), quality by published grids; share of the whole front's hypervolume by true values, mean"
            " over seeds; the prior knows nothing of the problem's model size"
        ),
        "lines": [
            *_lines(table), "", f"CPU seconds of one proposal of ours after 100 trials: {ask_seconds_at_100:.3f}.",
        ],
        "ask_cpu_seconds_at_100": ask_seconds_at_100,
        "num_trials": NUM_TRIALS,
        "errors": ERRORS,
        "versions": {name: version(name) for name in ("optuna", "numpy", "scipy")},
        "problems": table,
    }  # fmt: skip


def _lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for people."""
    after = " | ".join(f"after {count}" for count in CHECKPOINTS)
    lines = [
        f"| problem | noise, nats | method | seeds | {after}"
        f" | trials to where every unrestricted one is after {NUM_TRIALS} | CPU s an ask |",
        "|" + "---|" * (6 + len(CHECKPOINTS)),
    ]
    for entry in table:
        for method in METHODS:
            if (row := entry["methods"].get(method.name)) is None:
                continue
            means = [row["mean_volume"].get(str(count)) for count in CHECKPOINTS]
            volumes = " | ".join("" if mean is None else f"{mean:.3f}" for mean in means)
            needed = row["trials_to_unrestricted"].values()
            reached = f"not in {row['num_trials']}" if None in needed else max(needed, default="")
            lines.append(
                f"| {entry['problem']} | {entry['noise']:g} | {method.name} | {row['num_seeds']} | {volumes}"
                f" | {reached} | {row['ask_cpu_seconds']:.3f} |"
            )
    return lines


def _trials_to(rows: Mapping[int, Mapping[str, Any]], rival: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Trials after which searches are, on average over the seeds of both, where a rival is after all of its own; None
    where they never are. Every seed is another problem: only common ones can be compared."""
    common = sorted(rows.keys() & rival.keys())
    level = np.mean([rival[seed]["volume"][-1] for seed in common])
    mean, _, _ = _curve([rows[seed]["volume"] for seed in common])
    reached = np.flatnonzero(mean >= level - 1e-9)
    return int(reached[0]) + 1 if len(reached) else None


def _curve(rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over searches, its standard error (0 for one), and the number of searches, after each trial."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    count = np.isfinite(table).sum(axis=0)
    spread = np.nanstd(table, axis=0) * np.sqrt(count / np.maximum(count - 1, 1))
    return np.nanmean(table, axis=0), spread / np.sqrt(count), count


def _shared() -> Path:
    return ROOT.parent.parent / "shared"


if __name__ == "__main__":
    sys.exit(main())
