"""Trials that grow against full trainings, at equal total tokens, on published learning curves.

TaskSet (Metz et al., arXiv:2002.11887; the subset of DyHPO): 9 text tasks, each with the validation and training losses
of the same 1000 Adam configurations at 51 points. A search takes configurations of the table; it may stop them and go
on. Its result is the best validation loss of a configuration that it trained to the end, as regret against the best of
the table, over the distance from the best to the median (0: the best; 1: no better than the middle of the table).

    python benchmarks/fidelity.py [--shared ../shared] [--samplers random:20 tpe:20 joint:20]

Searches that are in ``runs/benchmarks/fidelity.jsonl`` are not run again. Writes ``benchmarks/results/fidelity.json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import run_log

from autotune.search.curves import Curve
from autotune.search.fidelity import Growth, as_candidates, chains_of, next_growth
from autotune.search.sampler import Observation, SearchState
from autotune.search.seeds import derive_seed
from autotune.space.fidelity import Fidelity
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fidelity.json"
BUDGETS = (10, 20)
"""Full trainings' worth of tokens after which the results are compared."""
NUM_POINTS = 50
"""Points of a curve after the one at the start."""
DIMENSIONS = ("learning_rate", "beta1", "beta2", "epsilon", "l1", "l2", "linear_decay", "exponential_decay")
LADDERS = {"0.25, 1": Fidelity(rungs=(0.26, 1.0)), "0.1, 0.32, 1": Fidelity(rungs=(0.1, 0.32, 1.0))}
"""Rungs at whole points of the curves."""
ONE_RUNG_COST = 1.0


class Table(NamedTuple):
    """One task."""

    name: str
    points: np.ndarray
    """``[1000, 8]``, coordinates in the unit cube."""
    trained: np.ndarray
    """``[1000, 51]``: training losses; NaN after divergence."""
    held_out: np.ndarray
    """``[1000, 51]``."""

    def regret(self, row: int) -> float:
        """Of a configuration trained to its end."""
        final = np.where(np.isfinite(self.held_out[:, -1]), self.held_out[:, -1], np.inf)
        best, middle = float(final.min()), float(np.median(final))
        return min((float(final[row]) - best) / (middle - best), 1.0)


def read_tables(path: Path) -> list[Table]:
    """The tasks of the file."""
    import pandas as pd

    tables = []
    for name, group in pd.read_parquet(path).groupby("task"):
        values = group[list(DIMENSIONS)].to_numpy(dtype=float)
        # All were drawn by their logarithms, betas by that of their distance from 1: ranks make them uniform.
        points = (values.argsort(axis=0).argsort(axis=0) + 0.5) / len(values)
        curves = [np.array([np.asarray(c, dtype=float) for c in group[key]]) for key in ("train_curve", "valid_curve")]
        tables.append(Table(str(name), points, *curves))
    return tables


SPACE = Space(
    name="taskset",
    objectives=(Objective(name="quality"),),
    dimensions=tuple(Dimension(name, "float", (), 0.0, 1.0) for name in DIMENSIONS),
    fixed={},
)

Policy = Callable[[SearchState, Fidelity, float, bool], Growth | None]
View = Callable[[SearchState, Fidelity], SearchState]


def plain_halving(state: SearchState, fidelity: Fidelity, left: float, may_begin: bool) -> Growth | None:
    """Asynchronous successive halving on the losses of each rung, without forecasts."""
    chains = chains_of(state.observations)
    for rung in range(fidelity.last - 1, -1, -1):
        members = [link for c in chains for link in c.links if link.rung == rung and link.values is not None]
        members.sort(key=lambda link: (link.values or {})["quality"])
        begun = {link.continues for c in chains for link in c.links}
        for link in members[: int(len(members) / fidelity.eta)]:
            if link.number not in begun and fidelity.cost_from(rung + 1) <= left + 1e-9:
                return Growth(link.number, rung + 1)
    return None


def as_measured(state: SearchState, fidelity: Fidelity) -> SearchState:
    """Candidates with the loss of their highest rung as it is."""
    kept = []
    for chain in chains_of(state.observations):
        known = chain.known or chain.last
        kept.append(replace(chain.first, state=known.state, values=known.values, failure=known.failure))
    return replace(state, observations=kept)


class Method(NamedTuple):
    """A way to spend a budget."""

    sampler: str
    ladder: str
    policy: str
    """``full``: none; ``halving``: without forecasts; ``forecasts``: the product's."""

    @property
    def words(self) -> str:
        """For the table."""
        return f"{self.sampler}, {self.policy}" + (f" ({self.ladder})" if self.ladder else "")


POLICIES: dict[str, tuple[Policy, View]] = {
    "halving": (plain_halving, as_measured),
    "forecasts": (lambda s, f, left, may: next_growth(s, f, left, may_begin=may), as_candidates),
}


def search(table: Table, method: Method, seed: int, budget: float) -> list[tuple[float, float]]:
    """One search.

    Returns:
        Spent so far and the best regret so far, after each configuration that was trained to its end.
    """
    fidelity = LADDERS.get(method.ladder)
    order = np.random.default_rng(derive_seed(seed, "order", 0)).permutation(len(table.points))
    observations: list[Observation] = []
    rows: dict[int, int] = {}
    spent, best, found = 0.0, 1.0, []
    while True:
        number = len(observations)
        state = SearchState(
            SPACE, tuple(observations), number, derive_seed(seed, "sampler", number), seed, num_trials=int(budget)
        )
        left = budget - spent
        may_begin = left >= (fidelity.cost_from(0) if fidelity else ONE_RUNG_COST) - 1e-9
        growth = POLICIES[method.policy][0](state, fidelity, left, may_begin) if fidelity else None
        if growth is None:
            first_cost = fidelity.cost(0) if fidelity else ONE_RUNG_COST
            if left < (fidelity.cost_from(0) if fidelity and method.policy == "forecasts" else first_cost) - 1e-9:
                return found
            is_blind = method.sampler == "random"
            seen = state if fidelity is None or is_blind else POLICIES[method.policy][1](state, fidelity)
            row = _proposed(table, method.sampler, seen, set(rows.values()), order)
            rung, continues = 0, None
            spent += first_cost
        else:
            row, rung, continues = rows[growth.of], growth.rung, growth.of
            assert fidelity is not None
            spent += fidelity.cost(rung)
        rows[number] = row
        observations.append(_trained(table, row, number, rung, continues, fidelity))
        if observations[-1].fidelity == 1.0:
            best = min(best, table.regret(row))
            found.append((spent, best))


def _trained(
    table: Table, row: int, number: int, rung: int, continues: int | None, fidelity: Fidelity | None
) -> Observation:
    shares = fidelity.rungs if fidelity else (1.0,)
    ends = [round(share * NUM_POINTS) for share in shares]
    end = ends[rung]
    parameters = dict(zip(DIMENSIONS, table.points[row].tolist(), strict=True))
    common: dict[str, Any] = {"rung": rung, "continues": continues, "fidelity": shares[rung]}
    if not np.isfinite(table.held_out[row, : end + 1]).all():
        return Observation(number, "failed", parameters, None, "diverged", **common)
    return Observation(
        number,
        "ok",
        parameters,
        {"quality": float(table.held_out[row, end])},
        curve=_curve(table, row, end, shares),
        **common,
    )


def _curve(table: Table, row: int, end: int, shares: Sequence[float]) -> Curve:
    return Curve.of(np.arange(1, end + 1) / NUM_POINTS, table.trained[row, 1 : end + 1], shares)


def _proposed(table: Table, sampler: str, state: SearchState, taken: set[int], order: np.ndarray) -> int:
    """A row of the table: at random, or the nearest to what the sampler proposes."""
    if sampler == "random":
        return next(int(row) for row in order if row not in taken)
    proposal = _sampler(sampler).propose(state)
    point = np.array([float(proposal[name]) for name in DIMENSIONS])
    distance = ((table.points - point) ** 2).sum(axis=1)
    distance[list(taken)] = np.inf
    return int(distance.argmin())


@functools.cache
def _sampler(name: str) -> Any:
    from autotune.search.samplers import make_sampler

    return make_sampler(name)


def key_of(method: Method, budget: int, seed: int) -> str:
    """Names one search on every task in the log."""
    return json.dumps([*method, budget, seed])


def missing(
    log: Path, methods: Sequence[Method], seeds: Mapping[str, int], tables: Sequence[Table]
) -> dict[str, list[float]]:
    """Run the searches that the log lacks. A budget is a search of its own: what is kept for the end depends on it.

    Args:
        log: Of all searches.
        methods: What to run.
        seeds: Sampler -> how many.
        tables: The tasks.

    Returns:
        Key -> regret on each task.
    """
    done: dict[str, list[float]] = {}
    for run in run_log.read(log):
        done.update(run)
    for seed in range(max(seeds.values())):
        for method in (method for method in methods if seed < seeds[method.sampler]):
            for budget in BUDGETS:
                key = key_of(method, budget, seed)
                if key not in done:
                    found = [search(table, method, seed, budget) for table in tables]
                    done[key] = [min((regret for _, regret in one), default=1.0) for one in found]
                    run_log.add(log, {key: done[key]})
    return done


def row_of(done: dict[str, list[float]], method: Method, seeds: int) -> list[dict[str, float]]:
    """Mean regret at each budget over tasks and seeds; the difference to full trainings, seed by seed, with its
    standard error."""
    row = []
    for budget in BUDGETS:
        own, full = (
            np.array([done[key_of(which, budget, seed)] for seed in range(seeds)])
            for which in (method, Method(method.sampler, "", "full"))
        )
        change = (own - full).mean(axis=1)
        error = float(change.std(ddof=1)) / seeds**0.5
        row.append({"budget": budget, "regret": own.mean(), "change": change.mean(), "standard_error": error})
    return row


def _cell(words: str, cell: dict[str, float]) -> str:
    change = "" if "full" in words else f" ({cell['change']:+.3f} ± {cell['standard_error']:.3f})"
    return f"{cell['regret']:.3f}{change}"


def _seeds(word: str) -> tuple[str, int]:
    name, _, count = word.partition(":")
    return name, int(count)


def main() -> int:
    """Run what is missing, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="reference data")
    parser.add_argument(
        "--samplers", nargs="+", type=_seeds, default=[("random", 20), ("tpe", 20), ("joint", 20)], metavar="NAME:SEEDS"
    )
    parser.add_argument("--log", type=Path, default=Path("runs/benchmarks/fidelity.jsonl"))
    options = parser.parse_args()
    seeds = dict(options.samplers)
    methods = [
        Method(sampler, ladder, policy)
        for sampler in seeds
        for ladder, policy in [("", "full"), *((ladder, policy) for ladder in LADDERS for policy in POLICIES)]
    ]
    tables = read_tables(options.shared / "data" / "hpo" / "taskset_rnn9.parquet")
    done = missing(options.log, methods, seeds, tables)
    rows = {method.words: row_of(done, method, seeds[method.sampler]) for method in methods}
    lines = [
        "| proposals, policy (rungs) | " + " | ".join(f"{budget} full trainings" for budget in BUDGETS) + " |",
        "|---" * (1 + len(BUDGETS)) + "|",
    ]
    for words, row in rows.items():
        cells = [_cell(words, cell) for cell in row]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    told = ", ".join(f"{name} {count}" for name, count in seeds.items())
    result = {
        "title": "Trials that grow against full trainings, at equal tokens",
        "setup": f"TaskSet, {len(tables)} text tasks, {told} seeds; mean regret over the distance from the"
        " best to the median of the table; in brackets the change against full trainings with the same proposals, ± one"
        " standard error over seeds",
        "lines": lines,
        "arguments": ["--samplers", *(f"{name}:{count}" for name, count in seeds.items())],
        "rows": rows,
        "versions": {name: version(name) for name in ("optuna", "numpy")},
    }
    print("\n".join(lines))
    write_json(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
